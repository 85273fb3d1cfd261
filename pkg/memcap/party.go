// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"cmp"
	"slices"
	"strings"

	"example.com/gpu-agent/pkg/gpu"
)

// A Party is a set of containers that have a cap together on a GPU. It is one of these:
//
//   - the containers that have one allocation and no other
//   - the containers that have any of several allocations, if some container has more than one of
//     them and so may use their sum
//   - a container that has a cap of its own
//
// For example, one container has the allocations A and B, and another has A alone. One party is A,
// with the second container and A's cap. The other is A+B, with both containers and the sum of the
// caps.
type Party struct {
	// Allocations are the IDs of the party's allocations, sorted; none for a container's own cap.
	Allocations []string
	// Containers are those that have some of these allocations and no others, sorted.
	Containers []string
	Cap        uint64 // bytes; None: all of the GPU
}

// key returns what tells the party from the others on its GPU.
func (p *Party) key() party {
	if len(p.Allocations) == 0 {
		return party{container: p.Containers[0]}
	}
	return party{allocation: strings.Join(p.Allocations, "+")}
}

// Parties returns the parties on a GPU that allowances make: those with fewer allocations first,
// then by name. Each has at least one container.
func Parties(u gpu.UUID, allowances []Allowance) []Party {
	caps, of := map[string]uint64{}, map[string][]string{}
	var parties []Party
	for _, a := range allowances {
		switch {
		case a.GPU != u:
		case a.Allocation != "":
			caps[a.Allocation] = a.Cap
			of[a.Container] = append(of[a.Container], a.Allocation)
		default:
			i := slices.IndexFunc(parties, func(p Party) bool { return p.Containers[0] == a.Container })
			if i < 0 {
				parties = append(parties, Party{Containers: []string{a.Container}, Cap: a.Cap})
			} else {
				parties[i].Cap = plus(parties[i].Cap, a.Cap)
			}
		}
	}
	sets := map[string]*Party{}
	add := func(allocations []string) *Party {
		slices.Sort(allocations)
		allocations = slices.Compact(allocations)
		name := strings.Join(allocations, "+")
		if sets[name] == nil {
			p := &Party{Allocations: allocations}
			for _, id := range allocations {
				p.Cap = plus(p.Cap, caps[id])
			}
			sets[name] = p
		}
		return sets[name]
	}
	for container, allocations := range of {
		p := add(allocations)
		p.Containers = append(p.Containers, container)
	}
	for _, p := range joined(sets) {
		add(p)
	}
	own := map[string][]string{} // containers with exactly these allocations
	for name, p := range sets {
		own[name] = p.Containers
	}
	for _, p := range sets {
		p.Containers = nil
		for name, containers := range own {
			same := name == strings.Join(p.Allocations, "+")
			if same || len(p.Allocations) > 1 && within(strings.Split(name, "+"), p.Allocations) {
				p.Containers = append(p.Containers, containers...)
			}
		}
		slices.Sort(p.Containers)
		parties = append(parties, *p)
	}
	slices.SortFunc(parties, func(a, b Party) int {
		return cmp.Or(cmp.Compare(len(a.Allocations), len(b.Allocations)),
			slices.Compare(a.Allocations, b.Allocations), slices.Compare(a.Containers, b.Containers))
	})
	return parties
}

// joined returns the sets of allocations that are linked by containers with several of them. Sets
// that have an allocation in common are joined to one.
func joined(sets map[string]*Party) (all [][]string) {
	for _, p := range sets {
		if len(p.Allocations) < 2 {
			continue
		}
		more := slices.Clone(p.Allocations)
		all = slices.DeleteFunc(all, func(other []string) bool {
			meets := slices.ContainsFunc(other, func(id string) bool { return slices.Contains(p.Allocations, id) })
			if meets {
				more = append(more, other...)
			}
			return meets
		})
		all = append(all, more)
	}
	return all
}

func within(some, all []string) bool {
	return !slices.ContainsFunc(some, func(id string) bool { return !slices.Contains(all, id) })
}
