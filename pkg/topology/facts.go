// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"example.com/gpu-agent/pkg/gpu"
)

// joined returns the sets of two and more GPUs that NVLink connects, directly, through a switch
// or through other GPUs. The sets have indices into the inventory, and are sorted by size,
// largest first, then by the node's order. GPUs with a fault are left out.
func (g *Graph) joined() [][]int {
	var sets [][]int
	seen := make([]bool, len(g.pairs))
	for i := range g.pairs {
		if seen[i] || g.broken(i) {
			continue
		}
		seen[i] = true
		set := []int{i}
		for k := 0; k < len(set); k++ {
			for j := range g.pairs {
				if !seen[j] && !g.broken(j) && g.pairs[set[k]][j].Linked() {
					seen[j] = true
					set = append(set, j)
				}
			}
		}
		if len(set) > 1 {
			slices.Sort(set)
			sets = append(sets, set)
		}
	}
	slices.SortStableFunc(sets, func(a, b []int) int { return cmp.Compare(len(b), len(a)) })
	return sets
}

func (g *Graph) broken(i int) bool {
	d := &g.inv.GPUs[i]
	return d.Fault != "" || d.Gone
}

// Weakness is a GPU, or a pair, with fewer lanes than others of its kind on this node: a link is
// down.
type Weakness struct {
	GPU   gpu.UUID
	Index int
	// To is the other end, and ToIndex its index. To is empty if Switch is true. It is also empty
	// if the other end of the link that is down is not known: then Lanes and Of are for all links
	// of the GPU.
	To      gpu.UUID
	ToIndex int
	Switch  bool
	// Lanes is the number of lanes that work, Of the number that should.
	Lanes, Of int
}

// String returns the weakness as a sentence for people.
func (w Weakness) String() string {
	to := ""
	switch {
	case w.Switch:
		to = " to the NVSwitch"
	case w.To != "":
		to = fmt.Sprintf(" to GPU %d", w.ToIndex)
	}
	return fmt.Sprintf("GPU %d has %d of %d NVLink lanes%s", w.Index, w.Lanes, w.Of, to)
}

// Weak returns the GPUs and pairs with fewer lanes than others of their kind, in the node's
// order. The right number is not known for any board, so Weak compares GPUs of the same model:
//
//   - To a switch, a GPU without direct links should have as many lanes as the GPU with the
//     most.
//   - A direct link should have the same number of lanes at both ends.
//   - A GPU with direct links should have as many lanes as the GPU with the most, if at
//     least half of these GPUs have that many. The link that is down is between two GPUs
//     that lack lanes. If no lane is left between the two, more than half of the GPUs must
//     have all of theirs. A GPU without any lane may be built without.
//
// If the links of a node are uneven, there is no kind to compare with. GPUs with a fault are left
// out, and so are those in MIG mode, which do not use their links.
func (g *Graph) Weak() []Weakness {
	var out []Weakness
	byModel := make(map[string][]int)
	for i := range g.inv.GPUs {
		if d := &g.inv.GPUs[i]; !g.broken(i) && !d.MIG.Enabled {
			byModel[d.Model] = append(byModel[d.Model], i)
		}
	}
	for _, model := range slices.Sorted(maps.Keys(byModel)) {
		like := byModel[model]
		out = append(out, g.weakToSwitch(like)...)
		out = append(out, g.weakDirect(like)...)
	}
	slices.SortStableFunc(out, func(a, b Weakness) int {
		return cmp.Or(cmp.Compare(g.at[a.GPU], g.at[b.GPU]), cmp.Compare(g.at[a.To], g.at[b.To]))
	})
	return out
}

func (g *Graph) weakToSwitch(like []int) (out []Weakness) {
	most := 0
	for _, i := range like {
		most = max(most, g.ends[i][i].count)
	}
	for _, i := range like {
		// A GPU with direct links is built differently.
		if n := g.ends[i][i].count; n < most && g.directLanes(i) == 0 {
			d := &g.inv.GPUs[i]
			out = append(out, Weakness{GPU: d.UUID, Index: d.Index, Switch: true, Lanes: n, Of: most})
		}
	}
	return out
}

func (g *Graph) weakDirect(like []int) (out []Weakness) {
	pair := func(i, j, lanes, of int) {
		out = append(out, Weakness{
			GPU: g.inv.GPUs[i].UUID, Index: g.inv.GPUs[i].Index,
			To: g.inv.GPUs[j].UUID, ToIndex: g.inv.GPUs[j].Index, Lanes: lanes, Of: of,
		})
	}
	// The lanes that one end reports count for both ends, and are not reported again as missing.
	total := make(map[int]int)
	for a, i := range like {
		total[i] += g.directLanes(i)
		for _, j := range like[a+1:] {
			less, more := g.ends[i][j].count, g.ends[j][i].count
			if less, more = min(less, more), max(less, more); less > 0 && less < more {
				pair(i, j, less, more)
				total[i] += more - less
				total[j] += more - less
			}
		}
	}
	most, have, linked := 0, 0, 0
	for _, n := range total {
		if n > 0 {
			linked++
		}
		if n == most {
			have++
		} else if n > most {
			most, have = n, 1
		}
	}
	if 2*have < linked {
		return out
	}
	var lacking []int
	for _, i := range like {
		if total[i] > 0 && total[i] < most {
			lacking = append(lacking, i)
		}
	}
	// far returns the GPU at the other end of the lanes that i lacks, or -1 if that is not clear.
	far := func(i int) int {
		var to, none []int
		for _, j := range lacking {
			switch {
			case j == i:
			case g.pairs[i][j].NVLink > 0:
				to = append(to, j)
			case 2*have > linked:
				none = append(none, j)
			}
		}
		if len(to) == 0 {
			to = none
		}
		if len(to) != 1 {
			return -1
		}
		return to[0]
	}
	for _, i := range lacking {
		switch j := far(i); {
		case j < 0 || far(j) != i:
			if 2*have > linked {
				d := &g.inv.GPUs[i]
				out = append(out, Weakness{GPU: d.UUID, Index: d.Index, Lanes: total[i], Of: most})
			}
		case i < j:
			lanes := g.pairs[i][j].NVLink
			pair(i, j, lanes, lanes+min(most-total[i], most-total[j]))
		}
	}
	return out
}

// directLanes returns how many lanes a GPU has to other GPUs without a switch.
func (g *Graph) directLanes(i int) int {
	n := 0
	for j, p := range g.pairs[i] {
		if j != i && !p.Switch {
			n += p.NVLink
		}
	}
	return n
}
