// SPDX-License-Identifier: Apache-2.0

package kubectlgpu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"go.yaml.in/yaml/v4"

	"example.com/gpu-agent/internal/kube/pluginkube"
	"example.com/gpu-agent/internal/status"
)

// File is a partition file.
type File struct {
	// Name is its name in messages, and Data what an agent reads.
	Name string
	Data []byte
	// first is the line of the manifest where Data begins, and literal is true if each line of Data
	// is one of the manifest. first is 0 for a file that is no manifest.
	first   int
	literal bool
}

// mostFile bounds a file or manifest, in bytes: more than a ConfigMap may have.
const mostFile = 2 << 20

// partitionsName and partitionsKey are the ConfigMap's, as in the agent's manifests.
const (
	partitionsName = "gpu-partitions"
	partitionsKey  = "config.yaml"
)

// ReadFile reads a partition file: a bare one, or a manifest with the ConfigMap that has one. It fails
// if a manifest has none, or has several and none with the name gpu-partitions.
func ReadFile(name string, from io.Reader) (*File, error) {
	data, err := io.ReadAll(io.LimitReader(from, mostFile+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	if len(data) > mostFile {
		return nil, fmt.Errorf("%s has more than %d MiB, and a ConfigMap at most 1", name, mostFile>>20)
	}
	bare := &File{Name: name, Data: data}
	loader, err := yaml.NewLoader(bytes.NewReader(data))
	if err != nil {
		return bare, nil
	}
	var found []*File
	manifest := false
	for {
		n := new(yaml.Node)
		if err := loader.Load(n); err != nil {
			// What is not YAML is no manifest: the agent explains the mistake.
			break
		}
		is, file := fromManifest(name, n)
		manifest = manifest || is
		if file != nil {
			found = append(found, file)
		}
	}
	switch {
	case !manifest:
		return bare, nil
	case len(found) == 1:
		return found[0], nil
	case len(found) == 0:
		return nil, fmt.Errorf("%s has objects, and no ConfigMap with the key %s", name, partitionsKey)
	}
	named := slices.DeleteFunc(found, func(f *File) bool { return !strings.HasSuffix(f.Name, " "+partitionsName) })
	if len(named) != 1 {
		return nil, fmt.Errorf("%s has several ConfigMaps with the key %s, and not one of them is named %s", name,
			partitionsKey, partitionsName)
	}
	return named[0], nil
}

// fromManifest returns whether a document is an object of the API, and its partition file; nil if it
// has none.
func fromManifest(name string, n *yaml.Node) (bool, *File) {
	if n.Kind == yaml.DocumentNode && len(n.Content) > 0 {
		n = n.Content[0]
	}
	kind, version := child(n, "kind"), child(n, "apiVersion")
	if kind == nil || version == nil {
		return false, nil
	}
	value := child(child(n, "data"), partitionsKey)
	if kind.Value != "ConfigMap" || value == nil || value.Kind != yaml.ScalarNode {
		return true, nil
	}
	f := &File{Name: name, Data: []byte(value.Value), first: value.Line}
	if of := child(child(n, "metadata"), "name"); of != nil {
		f.Name += ": configmap " + of.Value
	}
	if f.literal = value.Style&yaml.LiteralStyle != 0; f.literal {
		f.first++ // the text begins below the |
	}
	return true, f
}

// child returns a value of a mapping; nil if there is none.
func child(n *yaml.Node, key string) *yaml.Node {
	if n == nil || n.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			return n.Content[i+1]
		}
	}
	return nil
}

// At returns where a line of the partition file is: FILE:LINE of the file that the person has.
func (f *File) At(line int) string {
	file, object, _ := strings.Cut(f.Name, ": ")
	switch {
	case f.first == 0:
	case f.literal:
		line += f.first - 1
	default: // one line of the manifest may have many of the file
		return fmt.Sprintf("%s:%d (%s, line %d of it)", file, f.first, object, line)
	}
	return fmt.Sprintf("%s:%d", file, line)
}

// Names returns the partitions that the file names, as far as it can be read.
func (f *File) Names() []string {
	n := new(yaml.Node)
	loader, err := yaml.NewLoader(bytes.NewReader(f.Data))
	if err != nil || loader.Load(n) != nil {
		return nil
	}
	if n.Kind == yaml.DocumentNode && len(n.Content) > 0 {
		n = n.Content[0]
	}
	var out []string
	for _, key := range []string{"partitions", "mig-configs"} {
		if of := child(n, key); of != nil && of.Kind == yaml.MappingNode {
			for i := 0; i+1 < len(of.Content); i += 2 {
				out = append(out, of.Content[i].Value)
			}
		}
	}
	return out
}

// Verdicts are what the agents say about a partition file.
type Verdicts struct {
	File string `json:"file"`
	// Nodes are those that were asked, sorted by name.
	Nodes []Verdict `json:"nodes"`
	// Unjudged are partitions of the file that none of these nodes uses.
	Unjudged []string `json:"unjudged,omitempty"`

	of *File
}

// Verdict is what one agent says.
type Verdict struct {
	Node string `json:"node"`
	// Plan is what the file would come to there, for the partition that the node uses. It is nil if
	// the file cannot be read, or if the agent did not answer.
	Plan *status.Plan `json:"plan,omitempty"`
	// Mistakes are those of a file that cannot be read.
	Mistakes []status.Mistake `json:"mistakes,omitempty"`
	// Error is why the agent did not answer.
	Error string `json:"error,omitempty"`
}

// Ask asks the agents of nodes, or of all if there are none, what a file would come to. partition is
// the one to judge; empty means the one that each node uses. brief leaves out what pods could ask
// for then.
func Ask(
	ctx context.Context, c *pluginkube.Client, f *File, nodes []string, partition string, brief bool,
) (*Verdicts, error) {
	agents, failed, err := Agents(ctx, c, nodes)
	if err != nil {
		return nil, err
	}
	v := &Verdicts{File: f.Name, Nodes: make([]Verdict, len(agents)), of: f}
	q := status.Question{File: f.Data, Brief: brief}
	if partition != "" {
		q.Partitions = []string{partition}
	}
	failed = append(failed, each(ctx, c, agents, func(i int, p *Pages) error {
		of := &v.Nodes[i]
		of.Node = agents[i].Node
		a, err := p.Ask(ctx, q)
		switch of.Mistakes = a.Mistakes; {
		case err != nil:
		case len(a.Plans) == 1:
			of.Plan = &a.Plans[0]
		case len(a.Mistakes) == 0:
			err = fmt.Errorf("the agent %s answers with %d plans for one question", p.Agent.Name, len(a.Plans))
		}
		return err
	})...)
	used := map[string]bool{}
	for i := range v.Nodes {
		of := &v.Nodes[i]
		of.Node = agents[i].Node
		switch {
		case of.Plan != nil:
			used[of.Plan.Partition] = true
		case of.Mistakes == nil:
			of.Error = "it did not answer"
		}
	}
	if len(used) > 0 {
		v.Unjudged = slices.DeleteFunc(f.Names(), func(name string) bool { return used[name] })
	}
	return v, errors.Join(failed...)
}

// Worst is the gravest outcome of some verdicts.
type Worst int

// Outcomes, the gravest last.
const (
	Applies Worst = iota // the file is in force at once
	Waits                // holders are in the way
	Stays                // a reset is due, or something else is in the way
	Wrong                // the file is wrong, or does not fit
)

// Worst returns the gravest outcome.
func (v *Verdicts) Worst() (worst Worst) {
	for i := range v.Nodes {
		worst = max(worst, v.Nodes[i].outcome())
	}
	return worst
}

func (n *Verdict) outcome() Worst {
	switch p := n.Plan; {
	case len(n.Mistakes) > 0:
		return Wrong
	case p == nil:
		return Applies // the error is told apart
	case p.State == "invalid":
		return Wrong
	case p.State == "applied":
		return Applies
	case p.State == "blocked":
		return Waits
	}
	return Stays
}

// Misfits returns how many nodes the file does not fit, in the sense of `gpu-agent check`: one that
// waits for holders fits.
func (v *Verdicts) Misfits() (n int) {
	for i := range v.Nodes {
		if len(v.Nodes[i].misfit()) > 0 {
			n++
		}
	}
	return n
}

// misfit returns what is wrong with the file for a node.
func (n *Verdict) misfit() (out []status.Mistake) {
	out = append(out, n.Mistakes...)
	if p := n.Plan; p != nil {
		out = slices.Concat(out, p.Mistakes, p.Open)
		for _, k := range p.Conditions {
			if k.Type == status.Refused {
				out = append(out, status.Mistake{Message: k.Message})
			}
		}
	}
	return out
}

// WriteCheck writes whether the file fits each node, with each mistake once.
func (v *Verdicts) WriteCheck(out io.Writer) error {
	var b strings.Builder
	told := map[string][]string{} // nodes by mistake
	var order []string
	for i := range v.Nodes {
		n := &v.Nodes[i]
		wrong := n.misfit()
		for _, m := range wrong {
			text := printable(m.Message)
			if m.Line > 0 {
				text = v.of.At(m.Line) + ": " + text
			} else {
				text = v.of.Name + ": " + text
			}
			if told[text] == nil {
				order = append(order, text)
			}
			told[text] = append(told[text], n.Node)
		}
		if len(wrong) > 0 || n.Plan == nil {
			continue
		}
		fmt.Fprintf(&b, "%s: partition %s fits", n.Node, printable(n.Plan.Partition))
		if n.Plan.State != "applied" {
			fmt.Fprintf(&b, "; now it would be %s: %s", n.Plan.State, printable(n.Plan.Message))
		}
		fmt.Fprintln(&b)
	}
	for _, text := range order {
		nodes := told[text]
		slices.Sort(nodes)
		fmt.Fprintf(&b, "%s (%s)\n", text, list(slices.Compact(nodes)))
	}
	if len(v.Unjudged) > 0 {
		fmt.Fprintf(&b, "not judged, since no node uses them: %s\n", printable(strings.Join(v.Unjudged, ", ")))
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// WritePlan writes what the file would do to each node.
func (v *Verdicts) WritePlan(out io.Writer) error {
	for i := range v.Nodes {
		n := &v.Nodes[i]
		if len(v.Nodes) > 1 {
			if i > 0 {
				fmt.Fprintln(out)
			}
			fmt.Fprintf(out, "=== %s\n", n.Node)
		}
		for _, m := range n.Mistakes {
			fmt.Fprintf(out, "%s: %s\n", v.of.At(m.Line), printable(m.Message))
		}
		if n.Plan == nil {
			continue
		}
		for _, m := range n.Plan.Mistakes {
			fmt.Fprintf(out, "%s: %s\n", v.of.At(m.Line), printable(m.Message))
		}
		if n.Plan.State == "invalid" {
			continue
		}
		if err := status.WritePlan(out, *n.Plan); err != nil {
			return err
		}
	}
	return nil
}

// list joins names, and counts those beyond a few.
func list(names []string) string {
	const most = 4
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more nodes", strings.Join(names[:most], ", "), len(names)-most)
}
