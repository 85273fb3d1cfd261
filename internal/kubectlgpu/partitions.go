// SPDX-License-Identifier: Apache-2.0

package kubectlgpu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/kube/pluginkube"
	"example.com/gpu-agent/internal/status"
)

// File is a partition file that can be read.
type File struct {
	// Name is its name in messages, and Data what an agent reads. Its lines are those of the file or
	// manifest that the person has.
	Name string
	Data []byte
	// Partitions are the names of its partitions.
	Partitions []string
}

// mostFile bounds a file or manifest, in bytes: more than a ConfigMap may have.
const mostFile = 2 << 20

// ReadFile reads a partition file: a bare one, or manifests with the ConfigMap that has one. The error
// is a config.Errors if it cannot be read as partitions.
func ReadFile(name string, from io.Reader) (*File, error) {
	data, err := io.ReadAll(io.LimitReader(from, mostFile+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	if data, _, err = config.Unwrap(name, data); err != nil {
		return nil, err
	}
	parsed, err := config.Parse(name, data)
	if err != nil {
		return nil, err
	}
	return &File{name, data, parsed.Names()}, nil
}

// At returns where a line is, as FILE:LINE.
func (f *File) At(line int) string { return fmt.Sprintf("%s:%d", f.Name, line) }

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
		v.Unjudged = slices.DeleteFunc(slices.Clone(f.Partitions), func(name string) bool { return used[name] })
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
