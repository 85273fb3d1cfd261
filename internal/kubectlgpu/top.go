// SPDX-License-Identifier: Apache-2.0

package kubectlgpu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"example.com/gpu-agent/internal/kube/pluginkube"
	"example.com/gpu-agent/internal/status"
)

// Top is what containers use of their GPU memory.
type Top struct {
	Containers []Usage `json:"containers"`
}

// Usage is the memory of a container on one GPU.
type Usage struct {
	Node string `json:"node"`
	status.Container
}

// ReadTop asks the agents of nodes, or of all nodes if there are none, for the containers of a
// namespace, or of all if it is empty. Errors are of single nodes, and
// the Top has the others.
func ReadTop(ctx context.Context, c *pluginkube.Client, nodes []string, namespace string) (*Top, error) {
	agents, failed, err := Agents(ctx, c, nodes)
	if err != nil {
		return nil, err
	}
	parts := make([][]Usage, len(agents))
	failed = append(failed, each(ctx, c, agents, func(i int, p *Pages) error {
		s, err := p.Status(ctx)
		for _, one := range s.Containers {
			if namespace == "" || one.Namespace == namespace {
				parts[i] = append(parts[i], Usage{agents[i].Node, one})
			}
		}
		return err
	})...)
	return &Top{append([]Usage{}, slices.Concat(parts...)...)}, errors.Join(failed...)
}

// Write writes the containers as a table, those that use the most of their caps first.
func (t *Top) Write(out io.Writer) error {
	if len(t.Containers) == 0 {
		_, err := fmt.Fprintln(out, "no container has a GPU")
		return err
	}
	of := slices.Clone(t.Containers)
	slices.SortStableFunc(of, func(a, b Usage) int { return cmp.Compare(b.filled(), a.filled()) })
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "NODE\tNAMESPACE\tPOD\tCONTAINER\tGPU\tUSED\tCAP\tPEAK\tREFUSED\tSM%\tCAP BY\tCOMPUTE")
	for i := range of {
		u := &of[i]
		peak, sm := "", ""
		if u.HasPeak() {
			peak = gib(&u.PeakMiB)
		}
		compute := ""
		if u.Compute != nil {
			compute = u.Compute.String()
		}
		if u.SMPercent != nil {
			sm = strconv.FormatFloat(*u.SMPercent, 'f', 0, 64)
		}
		row := []string{u.Node, u.Namespace, u.Pod, u.Container.Container, strconv.Itoa(u.Index), gib(u.UsedMiB),
			gib(u.CapMiB), peak, strconv.FormatUint(u.Refusals, 10), sm, u.Guarantee, compute}
		for j := range row {
			row[j] = cmp.Or(printable(row[j]), "-")
		}
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	return w.Flush()
}

// filled returns which part of its cap a container uses; 0 without one.
func (u *Usage) filled() float64 {
	if u.CapMiB == nil || u.UsedMiB == nil || *u.CapMiB == 0 {
		return 0
	}
	return float64(*u.UsedMiB) / float64(*u.CapMiB)
}

// gib returns MiB as GiB; empty for nil.
func gib(mib *uint64) string {
	if mib == nil {
		return ""
	}
	return strconv.FormatFloat(float64(*mib)/1024, 'f', 1, 64) + " GiB"
}
