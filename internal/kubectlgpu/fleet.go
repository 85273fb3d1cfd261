// SPDX-License-Identifier: Apache-2.0

package kubectlgpu

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/diagnosis"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube/pluginkube"
)

// Fleet is what `kubectl gpu` shows.
type Fleet struct {
	// Nodes are those that have or should have an agent, sorted by name.
	Nodes []Node `json:"nodes"`
	// Unseen is what could not be read. It may hide what is wrong.
	Unseen []diagnosis.Unseen `json:"unseen,omitempty"`
}

// Node is a node of the fleet.
type Node struct {
	Name string `json:"name"`
	// Summary has the figures of the GPUNode. It is nil if there is none that can be used.
	Summary *gpunode.Summary `json:"summary,omitempty"`
	// Resources are what the node offers through the device plugin.
	Resources []gpunode.Resource `json:"resources,omitempty"`
	// Wrong is what is wrong on the node, the gravest first.
	Wrong []diagnosis.Finding `json:"wrong,omitempty"`
}

// ReadFleet reads the nodes of the cluster. It fails if the person may not read GPUNodes.
func ReadFleet(ctx context.Context, c *pluginkube.Client) (*Fleet, error) {
	facts, err := c.Fleet(ctx)
	if err != nil {
		return nil, err
	}
	return fleetOf(&facts), nil
}

func fleetOf(f *diagnosis.Facts) *Fleet {
	out := &Fleet{Nodes: []Node{}, Unseen: f.Unseen}
	named := map[string]int{}
	add := func(name string) *Node {
		i, ok := named[name]
		if !ok {
			i = len(out.Nodes)
			named[name], out.Nodes = i, append(out.Nodes, Node{Name: name})
		}
		return &out.Nodes[i]
	}
	for i := range f.GPUNodes {
		n := add(f.GPUNodes[i].Name)
		if s := f.GPUNodes[i].Status; s != nil {
			n.Summary, n.Resources = &s.Summary, s.Resources
		}
	}
	for i := range f.Nodes {
		if f.Nodes[i].Chosen {
			add(f.Nodes[i].Name)
		}
	}
	for i := range out.Nodes {
		out.Nodes[i].Wrong = f.Troubles(out.Nodes[i].Name)
	}
	slices.SortFunc(out.Nodes, func(a, b Node) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// Write writes the fleet as a table.
func (f *Fleet) Write(out io.Writer) error {
	if len(f.Nodes) == 0 {
		fmt.Fprintln(out, "no node has an agent")
	} else {
		w := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
		fmt.Fprintln(w, "NODE\tGPUS\tMODES\tFREE\tLARGEST\tUSED%\tWRONG")
		for i := range f.Nodes {
			n := &f.Nodes[i]
			s := n.Summary
			if s == nil {
				s = &gpunode.Summary{}
			}
			row := []string{n.Name, strconv.Itoa(s.GPUs), s.Modes, s.Free, s.Largest,
				strconv.Itoa(s.SaturationPercent), n.wrong()}
			if n.Summary == nil {
				row[1], row[5] = "", ""
			}
			for j := range row {
				row[j] = cmp.Or(printable(row[j]), "-")
			}
			fmt.Fprintln(w, strings.Join(row, "\t"))
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
	if len(f.Unseen) == 0 {
		return nil
	}
	var what []string
	for _, u := range f.Unseen {
		what = append(what, printable(u.What))
	}
	_, err := fmt.Fprintf(out, "not seen: %s; something may be wrong that they would tell\n", strings.Join(what, ", "))
	return err
}

// widest is how long the last column may be, in bytes.
const widest = 100

// wrong returns in words what is wrong on a node.
func (n *Node) wrong() string {
	if len(n.Wrong) == 0 {
		return ""
	}
	text := strings.ReplaceAll(n.Wrong[0].Cause, " of "+n.Name, "")
	text = brief.Cut(strings.ReplaceAll(text, " on "+n.Name, ""), widest)
	if more := len(n.Wrong) - 1; more > 0 {
		text += fmt.Sprintf(" (and %d more)", more)
	}
	return text
}

// printable replaces characters that could move a terminal's cursor.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !strconv.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}
