// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Amount is how much of a plain resource a pod asks for: of anything but the agents' devices, for
// example processor time, memory, or a network card.
type Amount struct {
	// Name is the resource, for example "cpu" or "example.org/nic".
	Name string
	// N is in millicores for "cpu". For all others it is in the resource's unit: bytes of memory and
	// storage, pieces of devices, and "pods".
	N int64
}

// MostOfAmount is the most that an Amount may be. Sums of thousands of them do not overflow.
const MostOfAmount = 1 << 50

// Amounts have each resource once, in the order of the names. They do not change.
type Amounts []Amount

// NewAmounts returns what some resources are, without those of 0 and less.
func NewAmounts(of map[string]int64) Amounts {
	var out Amounts
	for name, n := range of {
		if n > 0 {
			out = append(out, Amount{name, min(n, MostOfAmount)})
		}
	}
	slices.SortFunc(out, func(x, y Amount) int { return cmp.Compare(x.Name, y.Name) })
	return out
}

// Of returns the amount of a resource, 0 if there is none.
func (a Amounts) Of(name string) int64 {
	i, there := slices.BinarySearchFunc(a, name, func(x Amount, name string) int { return cmp.Compare(x.Name, name) })
	if !there {
		return 0
	}
	return a[i].N
}

// Lack names a plain resource that a node has too little of. It is zero if the node has enough of all.
type Lack struct {
	Name string
	// Asked is what a pod asks for, and Left what the node has left for it, in the unit of Amount.N.
	Asked, Left int64
}

// String is the reason for people.
func (l Lack) String() string {
	return fmt.Sprintf("not enough %s: %s of it is asked for, and %s is left", l.Name, amountOf(l.Name, l.Asked),
		amountOf(l.Name, max(l.Left, 0)))
}

// amountOf writes an amount as people write it for Kubernetes, for example 1500m, 4Gi or 2. Of memory it
// keeps one digit after the point.
func amountOf(name string, n int64) string {
	short := func(n int64, unit float64) string {
		return strings.TrimSuffix(strconv.FormatFloat(float64(n)/unit, 'f', 1, 64), ".0")
	}
	bytes := name == "memory" || name == "ephemeral-storage" || strings.HasPrefix(name, "hugepages-")
	switch {
	case name == "cpu" && n%1000 != 0:
		return strconv.FormatInt(n, 10) + "m"
	case name == "cpu":
		return strconv.FormatInt(n/1000, 10)
	case bytes && n >= 1<<30:
		return short(n, 1<<30) + "Gi"
	case bytes && n > 0:
		return short(n, 1<<20) + "Mi"
	}
	return strconv.FormatInt(n, 10)
}

// SetPlain notes how much of the plain resources a node has for the pods of the books: what it has
// for pods in all, less what other pods have. The caller may not change has afterwards. A node has
// nothing of a resource that is not there, but for "pods": then it takes any number of them.
//
// A seat of a group loses its room if the node has too little for the pods, the older seats and this one.
// Place chooses a node by its GPUs alone, since the scheduler counts the rest. But no pod gets the plain
// room of an open seat.
func (b *Books) SetPlain(name string, has map[string]int64) {
	if b.nodes[name] == nil && len(has) == 0 {
		return
	}
	n := b.node(name)
	for of, amount := range has {
		if amount > n.plain[of] {
			b.news++ // there may be room
			break
		}
	}
	n.plain, n.rest = has, nil
	b.prune(name)
}

// rest is what a node has left of the plain resources.
type rest struct {
	// pods is what is left beside the pods of the books, and seats what is left beside the open seats
	// that have theirs, too.
	pods, seats map[string]int64
	// tight are the open seats that find too little left, since older seats have theirs first.
	tight []*seat
}

// restOf returns what a node has left.
func (n *node) restOf() *rest {
	if n.rest != nil {
		return n.rest
	}
	r := &rest{pods: maps.Clone(n.plain)}
	if r.pods == nil {
		r.pods = map[string]int64{}
	}
	for _, e := range n.here {
		n.take(r.pods, e.Plain)
	}
	r.seats = maps.Clone(r.pods)
	for _, s := range n.seats {
		if lackOf(r.seats, s.Plain) != (Lack{}) {
			r.tight = append(r.tight, s)
		} else {
			n.take(r.seats, s.Plain)
		}
	}
	n.rest = r
	return r
}

// take takes amounts away from what a node has.
func (n *node) take(from map[string]int64, of Amounts) {
	for _, a := range of {
		if _, counts := n.plain[a.Name]; counts || a.Name != "pods" {
			from[a.Name] -= a.N
		}
	}
}

// lackOf returns the first of some amounts that is more than what is left, zero if none is. What a pod of a hold
// leaves, or others that are to go, counts as left, too.
func lackOf(left map[string]int64, of Amounts, freed ...Amounts) Lack {
	for _, a := range of {
		n, counts := left[a.Name]
		for _, f := range freed {
			n += f.Of(a.Name)
		}
		if n < a.N && (counts || a.Name != "pods") {
			return Lack{a.Name, a.N, n}
		}
	}
	return Lack{}
}

// judgeSeat gives a node's verdict on one seat more: by its GPUs in a room, and then by the rest. What
// is freed counts as left.
func (n *node) judgeSeat(r *room, of *ask, freed ...Amounts) verdict {
	v := r.judgeSeat(of)
	if v.why != "" || n == nil || len(of.Plain) == 0 {
		return v
	}
	if v.lack = lackOf(n.restOf().seats, of.Plain, freed...); v.lack != (Lack{}) {
		v.why = v.lack.String()
	}
	return v
}

// freed are the plain amounts of pods and open seats, by their UIDs.
func (n *node) freed(uids map[string]bool) (out []Amounts) {
	for uid := range uids {
		if e := n.here[uid]; e != nil {
			out = append(out, e.Plain)
		}
	}
	for _, s := range n.seats {
		if uids[s.UID] && !slices.Contains(n.restOf().tight, s) {
			out = append(out, s.Plain)
		}
	}
	return out
}

// spoils returns the oldest open seat whose plain room a pod would take: there is enough for the pod,
// and not beside the seats. Whether there is enough for the pod is for the scheduler to judge. mine is a
// seat that the pod is to use, nil if there is none, and freed is what others leave.
func (n *node) spoils(p *ask, mine *seat, freed ...Amounts) *seat {
	if n == nil || len(n.seats) == 0 || len(p.Plain) == 0 {
		return nil
	}
	r := n.restOf()
	if lackOf(r.pods, p.Plain, freed...) != (Lack{}) {
		return nil
	}
	if mine != nil && !slices.Contains(r.tight, mine) {
		freed = append(slices.Clip(freed), mine.Plain)
	}
	if lackOf(r.seats, p.Plain, freed...) == (Lack{}) {
		return nil
	}
	i := slices.IndexFunc(n.seats, func(s *seat) bool { return s != mine && len(s.Plain) > 0 })
	if i < 0 {
		return nil
	}
	return n.seats[i]
}
