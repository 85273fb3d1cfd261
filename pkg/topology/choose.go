// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"fmt"

	"example.com/gpu-agent/pkg/gpu"
)

// Request asks for a set of GPUs.
type Request struct {
	// Available is what may be chosen. Must is part of the answer, whether or not
	// Available names it too. No GPU is twice in either.
	Available, Must []gpu.UUID
	// N is how many are asked for, those of Must included.
	N int
	// Free is all GPUs of the node that nobody has, Available among them or not:
	// a kubelet that aligns NUMA nodes lets choose from a part only. What is left
	// for later requests is judged on these. Nil means Available.
	Free []gpu.UUID
}

// Choose returns the best set for a request, in the node's order (see the
// package comment for what best is). GPUs that the graph does not know count as
// unlinked and come last.
//
// Every error wraps gpu.ErrInvalid: fewer GPUs than N, N below the number of
// Must, or one GPU twice.
func (g *Graph) Choose(r Request) ([]gpu.UUID, error) {
	return nil, fmt.Errorf("choose %d GPUs: %w", r.N, gpu.ErrInvalid)
}

// Spare returns free in the order in which single GPUs are best broken up: first
// the one whose loss costs later requests least, then the one whose loss costs
// least after that, and so on.
func (g *Graph) Spare(free []gpu.UUID) []gpu.UUID {
	return free
}
