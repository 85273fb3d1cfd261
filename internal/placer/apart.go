// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/piece"
)

// On a GPU that is shared through MPS a fatal fault of one program may end the programs of all pods. The agent cannot
// keep namespaces apart there, since it is not told whose pod it chooses a GPU for. The books can choose the node.
//
// After [Books.KeepApart] they do so where that costs no place. A place is room for a request of a size that pods ask
// for, or have asked for within a day. For example, a GPU of 80 units has four places of 20 units, and two of 40. A pod
// that asks for 20 takes one place of the first size from any GPU. From an empty one it takes a place of the second
// size, too, and from one with 60 free units it does not. So while pods ask for 40 units, it goes where 60 are free,
// beside pods of any namespace. If all ask for 20, it can go to the empty GPU.
//
// That holds if each size is a multiple of the next smaller one. Then a GPU's places say all about its room. With other
// sizes, choices are compared as without KeepApart, and it makes little difference.

// company says with whose pods a pod would share the MPS GPUs of a node. Of two nodes the lower one is better.
type company int

const (
	// noCompany: no pod of another namespace has, or may get, a share there. This is also the company on a node
	// that has no MPS GPU for the pod.
	noCompany company = iota
	// sameCompany: pods of other namespaces are there, and some of the pod's own.
	sameCompany
	// moreCompany: pods of several other namespaces share the node already.
	moreCompany
	// newCompany: pods of one other namespace have the node for themselves.
	newCompany
)

// asked counts the pods that ask for each resource. The nil value is of books that do not keep namespaces apart.
type asked map[string]*sizes

// sizes counts requests of containers by their size, and pods with several requests for the resource.
type sizes struct {
	of      map[int]int
	several int
	// gone has the sizes that no pod asks for any longer, with the time at which the last one ended.
	gone map[int]time.Time
}

const (
	// mostSizes bounds how many sizes are told apart. Beyond that, a pod may ask for any.
	mostSizes = 64
	// mostNames is of how many resources sizes are remembered that no pod asks for any longer.
	mostNames = 256
	// rememberedFor is how long a size counts after the last pod that asked for it.
	rememberedFor = 24 * time.Hour
)

// set counts what a pod asks for, or takes it away.
func (a asked) set(e *entry, is bool, now time.Time) {
	next := e.ask
	if !is {
		next = nil
	}
	if a == nil || e.counted == next {
		return
	}
	a.add(next, 1, now)
	a.add(e.counted, -1, now)
	e.counted = next
}

func (a asked) add(of *ask, sign int, now time.Time) {
	if of == nil {
		return
	}
	for _, name := range of.names {
		s := a[name]
		if s == nil {
			if len(a)%mostNames == mostNames-1 { // pods may ask for resources that no node has
				maps.DeleteFunc(a, func(_ string, s *sizes) bool { return len(s.of) == 0 })
			}
			s = &sizes{of: map[int]int{}, gone: map[int]time.Time{}}
			a[name] = s
		}
		requests := 0
		for i := range of.Containers {
			n := of.Containers[i].Requests[name]
			if n <= 0 {
				continue
			}
			requests++
			if s.of[n] += sign; s.of[n] > 0 {
				delete(s.gone, n)
				continue
			}
			delete(s.of, n)
			if len(s.gone) <= mostSizes {
				s.gone[n] = now
			}
		}
		if requests > 1 {
			s.several += sign
		}
	}
}

// larger returns the sizes above n, sorted. ok is false if they and the smaller ones are no multiples of each other.
func (s *sizes) larger(n int, now time.Time) (out []int, ok bool) {
	maps.DeleteFunc(s.gone, func(_ int, at time.Time) bool { return now.Sub(at) > rememberedFor })
	if len(s.of)+len(s.gone) > mostSizes {
		return nil, false
	}
	all := map[int]bool{}
	for size := range s.of {
		all[size] = true
	}
	for size := range s.gone {
		all[size] = true
	}
	smaller := 1
	for _, size := range slices.Sorted(maps.Keys(all)) {
		if size%smaller != 0 {
			return nil, false
		}
		if smaller = size; size > n {
			out = append(out, size)
		}
	}
	return out, true
}

// KeepApart has Place and Hold prefer nodes whose MPS GPUs have no pods of other namespaces, where that costs no place.
// The caller calls it before all other methods.
func (b *Books) KeepApart() { b.asked = asked{} }

// pick returns the index of the choice for a pod, or for a seat, of a namespace; 0 if there is none.
func (b *Books) pick(p *ask, namespace string, all choices) int {
	at := all.first()
	if b.asked == nil || namespace == "" || !b.throughMPS(p, all) {
		return at
	}
	costs, least := b.costs(p, all, at), dear
	for _, cost := range costs {
		least = min(least, cost)
	}
	at = -1
	var best company
	for i, cost := range costs {
		if cost > least {
			continue
		}
		with := b.company(p, namespace, all[i].node)
		if at < 0 || with < best || with == best && all.Less(i, at) {
			at, best = i, with
		}
	}
	return at
}

// throughMPS reports whether a pod can get a share through MPS by any of the choices.
func (b *Books) throughMPS(p *ask, all choices) bool {
	return slices.ContainsFunc(all, func(c choice) bool {
		tenants := b.tenants(c.node)
		return slices.ContainsFunc(p.names, func(name string) bool {
			of, _ := piece.OfSpot(name)
			return tenants[of] != nil
		})
	})
}

// dear is more than any cost in places.
const dear = math.MaxInt

// costs returns of how many sizes above the pod's own each choice takes a place. It returns dear for a choice by which
// spot pods lose more than by the first one, or that cannot be compared with the first one.
func (b *Books) costs(p *ask, all choices, first int) []int {
	out := make([]int, len(all))
	best := &all[first]
	var n int
	var of *sizes
	var larger []int
	single, multiples := len(p.Containers) == 1 && len(p.names) == 1, false
	if single {
		if n, of = p.needs[p.names[0]], b.asked[p.names[0]]; of != nil {
			larger, multiples = of.larger(n, b.now)
		}
	}
	for i := range all {
		c := &all[i]
		switch alike := c.spoilt == best.spoilt && c.left == best.left; {
		case c.yields > best.yields:
			out[i] = dear
		case single && b.all(c.node, p.names[0], func(s *space) bool { return s.single }):
			// Each replica through MPS is one place.
		case single && multiples && c.spoilt < noRemnant && best.spoilt < noRemnant &&
			b.all(c.node, p.names[0], func(s *space) bool { return s.kind.Together() }):
			if of.several > 0 && c.left > best.left {
				out[i] = dear // the emptier node may be the one that has room for several requests
				continue
			}
			for _, size := range larger {
				if free := c.spoilt + n; free/size > c.spoilt/size {
					out[i]++
				}
			}
		case !alike:
			out[i] = dear
		}
	}
	return out
}

// all reports whether a node has GPUs with a resource, and something holds for each of them.
func (b *Books) all(node, resource string, holds func(*space) bool) bool {
	has := false
	gpus := b.room(node).gpus
	for i := range gpus {
		if s := &gpus[i]; s.resource != resource {
			continue
		} else if !holds(s) {
			return false
		}
		has = true
	}
	return has
}

// company returns whom a pod of a namespace would share a node's MPS GPUs with.
func (b *Books) company(p *ask, namespace, node string) company {
	tenants := b.tenants(node)
	own, others := false, map[string]bool{}
	for _, name := range p.names {
		of, _ := piece.OfSpot(name)
		for tenant := range tenants[of] {
			if tenant == namespace {
				own = true
			} else {
				others[tenant] = true
			}
		}
	}
	switch {
	case len(others) == 0:
		return noCompany
	case own:
		return sameCompany
	case len(others) > 1:
		return moreCompany
	}
	return newCompany
}

// tenants is node.tenants of a node, found once.
func (b *Books) tenants(node string) map[string]map[string]bool {
	n, r := b.nodes[node], b.room(node)
	if n == nil {
		return nil
	}
	if r.tenants == nil {
		r.tenants = n.tenants(r)
	}
	return r.tenants
}

// tenants returns the namespaces that have, or may get, shares of a node's MPS GPUs, by the guaranteed resource of the
// GPU. Each resource of such a GPU has a set, which may be empty. A pod that has not reported may get a share of any
// GPU with a resource that it asks for.
func (n *node) tenants(r *room) map[string]map[string]bool {
	out := map[string]map[string]bool{}
	for i := range r.gpus {
		if s := &r.gpus[i]; s.mps && !s.inSpot {
			out[s.resource] = map[string]bool{}
		}
	}
	if len(out) == 0 {
		return out
	}
	may := func(a *ask, namespace string) {
		for _, name := range a.names {
			of, _ := piece.OfSpot(name)
			if out[of] != nil && namespace != "" {
				out[of][namespace] = true
			}
		}
	}
	for _, e := range n.here {
		ids := n.devices(&e.Pod)
		if !r.reported(e.ask, ids) {
			may(e.ask, e.Namespace)
			continue
		}
		for _, id := range ids {
			if s := r.gpuOf(id); s != nil && s.mps {
				out[s.resource][e.Namespace] = true
			}
		}
	}
	for _, s := range n.seats {
		may(s.ask, s.namespace)
	}
	return out
}

// gpuOf returns the GPU of a device; nil if the node has no such GPU.
func (r *room) gpuOf(id string) *space {
	uuid, _, _ := strings.Cut(strings.TrimSuffix(id, spotMark), "::")
	i, known := r.at[uuid]
	if !known {
		return nil
	}
	return &r.gpus[i]
}
