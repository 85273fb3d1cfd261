// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"fmt"

	"example.com/gpu-agent/pkg/gpu"
)

// Joined returns the sets of two and more GPUs that NVLink connects, directly,
// through a switch or over each other: the largest first, then in the node's
// order. GPUs with a fault are left out.
func (g *Graph) Joined() [][]gpu.UUID {
	return nil
}

// Weakness is a connection with fewer lanes than its like on this node: a link
// is down.
type Weakness struct {
	// GPU and To are its ends, with their indices; To is empty and ToIndex -1
	// where it goes to a switch.
	GPU, To        gpu.UUID
	Index, ToIndex int
	// Lanes work, Of should.
	Lanes, Of int
}

// String is the weakness as a sentence for people.
func (w Weakness) String() string {
	to := "the NVSwitch"
	if w.To != "" {
		to = fmt.Sprintf("GPU %d", w.ToIndex)
	}
	return fmt.Sprintf("GPU %d has %d of %d NVLink lanes to %s", w.Index, w.Lanes, w.Of, to)
}

// Weak returns what has fewer lanes than its like, in the node's order.
func (g *Graph) Weak() []Weakness {
	return nil
}
