// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"cmp"

	"example.com/gpu-agent/pkg/gpu"
)

// maxLanes is beyond what any board has (18 so far) and keeps sums of reported
// nonsense within bounds.
const maxLanes = 1 << 10

// NUMA says whether two GPUs are on one NUMA node.
type NUMA int

// Unknown, the zero value, lies between the two: either may be true.
const (
	Unknown NUMA = iota
	Same
	Different
)

func (n NUMA) String() string {
	switch n {
	case Same:
		return "same"
	case Different:
		return "different"
	}
	return "unknown"
}

// Pair is how two GPUs are connected. The zero Pair says that nothing is known
// but the PCI bus.
type Pair struct {
	// NVLink is the number of lanes between the two: of direct ones, or through
	// a switch as many as the lesser of the two has to it. 0 with Switch set
	// means that the driver did not count them.
	NVLink int
	// Switch says that they reach each other through an NVSwitch.
	Switch bool
	NUMA   NUMA
}

// Compare orders pairs from far to near: more NVLink lanes are nearer, through
// a switch or not; then any NVLink connection is nearer than none; then the same
// NUMA node is nearer than an unknown one, and that nearer than another one.
// Of pairs that are equal in all of that, a direct link is nearer than a switch.
// It is 0 only for equal pairs.
func Compare(a, b Pair) int {
	return cmp.Or(
		cmp.Compare(a.NVLink, b.NVLink),
		cmp.Compare(linked(a), linked(b)),
		cmp.Compare(nearness(a.NUMA), nearness(b.NUMA)),
		cmp.Compare(direct(a), direct(b)),
	)
}

func linked(p Pair) int {
	if p.NVLink > 0 || p.Switch {
		return 1
	}
	return 0
}

func direct(p Pair) int {
	if p.Switch {
		return 0
	}
	return 1
}

func nearness(n NUMA) int {
	switch n {
	case Same:
		return 2
	case Different:
		return 0
	}
	return 1
}

// Graph is the connections between a node's GPUs at the moment of an inventory.
// It does not change.
type Graph struct {
	at    map[gpu.UUID]int
	pairs [][]Pair
}

// New reads the links and NUMA nodes of an inventory, which may be nil.
//
// Where both ends of a link report it with different numbers of lanes, the
// smaller one counts, for a lane works only if both of its ends do; where one
// end alone reports it, that is believed. Of two GPUs with one name, or one
// index, the first counts.
func New(inv *gpu.Inventory) *Graph {
	g := &Graph{at: make(map[gpu.UUID]int)}
	if inv == nil {
		return g
	}
	n := len(inv.GPUs)
	byIndex := make(map[int]int, n)
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		if _, again := g.at[d.UUID]; !again && d.UUID != "" {
			g.at[d.UUID] = i
		}
		if _, again := byIndex[d.Index]; !again {
			byIndex[d.Index] = i
		}
	}

	direct := make([][]int, n)
	toSwitch := make([]int, n)
	onSwitch := make([]bool, n)
	for i := range inv.GPUs {
		direct[i] = make([]int, n)
		for _, l := range inv.GPUs[i].Links {
			if l.Switch {
				onSwitch[i] = true
				toSwitch[i] = addLanes(toSwitch[i], l.NVLink)
			} else if j, ok := byIndex[l.To]; ok && j != i {
				direct[i][j] = addLanes(direct[i][j], l.NVLink)
			}
		}
	}

	g.pairs = make([][]Pair, n)
	for i := range n {
		g.pairs[i] = make([]Pair, n)
		for j := range n {
			if i == j {
				continue
			}
			p := Pair{NVLink: bothOrOne(direct[i][j], direct[j][i]), NUMA: numa(&inv.GPUs[i], &inv.GPUs[j])}
			if p.NVLink == 0 && onSwitch[i] && onSwitch[j] {
				p.Switch = true
				p.NVLink = min(toSwitch[i], toSwitch[j])
			}
			g.pairs[i][j] = p
		}
	}
	return g
}

// Between returns how two GPUs are connected, the same whichever is named
// first; the zero Pair if one of them is unknown or both are one.
func (g *Graph) Between(a, b gpu.UUID) Pair {
	i, ok := g.at[a]
	j, ok2 := g.at[b]
	if !ok || !ok2 {
		return Pair{}
	}
	return g.pairs[i][j]
}

func addLanes(sum, more int) int {
	return min(sum+min(max(more, 0), maxLanes), maxLanes)
}

func bothOrOne(a, b int) int {
	if a > 0 && b > 0 {
		return min(a, b)
	}
	return max(a, b)
}

// numa takes a negative node for none, as the kernel writes it.
func numa(a, b *gpu.Device) NUMA {
	switch {
	case a.NUMA == nil || b.NUMA == nil || *a.NUMA < 0 || *b.NUMA < 0:
		return Unknown
	case *a.NUMA == *b.NUMA:
		return Same
	}
	return Different
}
