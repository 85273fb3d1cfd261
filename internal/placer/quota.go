// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"cmp"
	"maps"
	"slices"
	"sort"
	"strings"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/mig"
)

// Part is so much of a resource that is kept in one place: on one node, and of memory units
// on one GPU.
type Part struct {
	Node, Resource string
	N              int
}

// quota is room for pods of which nobody knows yet.
type quota struct {
	want map[string]int
	// where, if set, says on which nodes.
	where func(node string) bool
	// parts are what no member uses, in order.
	parts []Part
	// members are the pods of the quota that have or will have devices of a node.
	members map[string]*entry
}

// quotas are what Books keep.
type quotas struct {
	b  *Books
	by map[string]*quota
	// seniority has them as they came, and moved says that there was news since they were
	// last looked at.
	seniority []*quota
	moved     bool
}

// Keep keeps room for so much of each resource, under an ID, until it is called again or
// [Books.Release] is: on the nodes of which where is true, on any where that is nil. Where may
// change its mind with news of a node. It is for pods whose Quota is that ID and nobody else;
// what they have is part of it. Short is what there is no room for, nil where there is room
// for all. It is looked for again whenever there is news.
//
// Each resource is kept in as few parts as there is room for. A part is kept by expectation:
// pods that have not reported their devices are taken to get those that the agent's packing
// gives them. Where it comes out otherwise, or the room goes, short says so. Of quotas that
// have not all room any more, those that have been there for longer keep theirs.
func (b *Books) Keep(id string, want map[string]int, where func(node string) bool) (short map[string]int) {
	// With news comes first what is kept already: one that wants more, and has been there for
	// longer, would get the room that another one is to have back.
	b.quotas.balance()
	q := b.quotas.by[id]
	if q == nil {
		q = &quota{members: map[string]*entry{}}
		b.quotas.by[id] = q
		b.quotas.seniority = append(b.quotas.seniority, q)
		for _, e := range b.pods {
			b.quotas.join(e)
		}
	}
	q.want, q.where = maps.Clone(want), where
	b.quotas.moved = true
	_, short = b.Kept(id)
	return short
}

// Release gives up what Keep has kept under an ID.
func (b *Books) Release(id string) {
	q := b.quotas.by[id]
	if q == nil {
		return
	}
	b.quotas.put(q, nil)
	for _, e := range q.members {
		e.of = nil
	}
	delete(b.quotas.by, id)
	b.quotas.seniority = slices.DeleteFunc(b.quotas.seniority, func(s *quota) bool { return s == q })
	b.quotas.moved = true
}

// Kept is what is kept under an ID beside what members use, and what there is no room for,
// nil if nothing.
func (b *Books) Kept(id string) (parts []Part, short map[string]int) {
	b.quotas.balance()
	q := b.quotas.by[id]
	if q == nil {
		return nil, nil
	}
	for name, n := range q.missing() {
		if n > 0 {
			if short == nil {
				short = map[string]int{}
			}
			short[name] = n
		}
	}
	return slices.Clone(q.parts), short
}

// MembersOn are the nodes with pods of a quota.
func (b *Books) MembersOn(id string) (nodes []string) {
	if q := b.quotas.by[id]; q != nil {
		for _, e := range q.members {
			nodes = append(nodes, e.at)
		}
	}
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// join puts a pod among the members of its quota, or takes it out.
func (qs *quotas) join(e *entry) {
	if e.of != nil {
		delete(e.of.members, e.UID)
		e.of = nil
	}
	if q := qs.by[e.Quota]; q != nil && e.at != "" {
		e.of = q
		q.members[e.UID] = e
	}
}

// missing is how much is to be kept and is not, of each resource, less than nothing where
// too much is.
func (q *quota) missing() map[string]int {
	out := maps.Clone(q.want)
	for _, e := range q.members {
		for name, n := range e.needs {
			if left, of := out[name]; of {
				out[name] = max(0, left-n)
			}
		}
	}
	for _, p := range q.parts {
		out[p.Resource] -= p.N
	}
	return out
}

// on reports whether the quota is to have something of a node.
func (q *quota) on(node string) bool { return q.where == nil || q.where(node) }

// balance makes what is kept what there is room for, after news.
func (qs *quotas) balance() {
	if !qs.moved || len(qs.seniority) == 0 {
		return
	}
	qs.moved = false
	names := slices.Sorted(maps.Keys(qs.b.nodes))
	for _, q := range qs.seniority {
		parts := slices.DeleteFunc(slices.Clone(q.parts), func(p Part) bool { return !q.on(p.Node) })
		members := map[string]bool{} // nodes
		for _, e := range q.members {
			members[e.at] = true
		}
		qs.put(q, parts)
		for name, n := range q.missing() {
			if n < 0 {
				parts = less(parts, name, -n, members)
			}
		}
		qs.put(q, parts)
	}
	for _, name := range names {
		if n := qs.b.nodes[name]; n != nil && len(n.kept) > 0 && !qs.b.room(name).checked {
			qs.check(name)
		}
	}
	for _, q := range qs.seniority {
		qs.regain(q)
	}
}

// regain looks for room for what a quota lacks.
func (qs *quotas) regain(q *quota) {
	short := q.missing()
	for _, name := range slices.SortedFunc(maps.Keys(short), harder) {
		qs.extend(q, name, short[name])
	}
}

// put gives a quota other parts.
func (qs *quotas) put(q *quota, parts []Part) {
	slices.SortFunc(parts, func(x, y Part) int {
		return cmp.Or(cmp.Compare(x.Node, y.Node), harder(x.Resource, y.Resource), cmp.Compare(y.N, x.N))
	})
	if slices.Equal(parts, q.parts) {
		return
	}
	touched := map[string]bool{}
	for _, p := range slices.Concat(parts, q.parts) {
		touched[p.Node] = true
	}
	q.parts = parts
	for name := range touched {
		n := qs.b.node(name)
		n.kept, n.room = qs.keptOn(name), nil
		qs.b.prune(name)
	}
}

// keptOn are the parts on a node, the hardest to place first.
func (qs *quotas) keptOn(node string) (out []Part) {
	for _, q := range qs.seniority {
		for _, p := range q.parts {
			if p.Node == node {
				out = append(out, p)
			}
		}
	}
	sort.SliceStable(out, func(i, j int) bool {
		return cmp.Or(harder(out[i].Resource, out[j].Resource), cmp.Compare(out[j].N, out[i].N)) < 0
	})
	return out
}

// harder sorts names of resources: of MIG devices, which exclude each other, large profiles
// first.
func harder(x, y string) int {
	return cmp.Or(cmp.Compare(slicesOf(y), slicesOf(x)), cmp.Compare(x, y))
}

// slicesOf is how large a MIG device is, 0 for what is none.
func slicesOf(resource string) int {
	_, short, _ := strings.Cut(resource, "/")
	profile, err := mig.ParseResource(short)
	if err != nil {
		return 0
	}
	return profile.Slices*1000 + profile.GB
}

// less takes n of a resource out of parts: first of those on some nodes, then of the
// smallest.
func less(parts []Part, resource string, n int, first map[string]bool) (out []Part) {
	for _, p := range parts {
		if first[p.Node] {
			out = append(out, p)
		}
	}
	there := len(out)
	for _, p := range parts {
		if !first[p.Node] {
			out = append(out, p)
		}
	}
	for _, group := range [][]Part{out[:there], out[there:]} {
		slices.SortStableFunc(group, func(x, y Part) int { return cmp.Compare(x.N, y.N) })
	}
	for i := range out {
		if p := &out[i]; p.Resource == resource {
			k := min(n, p.N)
			p.N, n = p.N-k, n-k
		}
	}
	return slices.DeleteFunc(out, func(p Part) bool { return p.N == 0 })
}

// check takes away parts for which there is no room on a node any more.
func (qs *quotas) check(name string) {
	r := qs.b.room(name)
	if r.checked = true; r.holds(r.kept) {
		return
	}
	var stay []Part
	for _, q := range qs.seniority {
		parts := slices.DeleteFunc(slices.Clone(q.parts), func(p Part) bool {
			if p.Node != name {
				return false
			}
			if r.holds(append(slices.Clone(stay), p)) {
				stay = append(stay, p)
				return false
			}
			return true
		})
		qs.put(q, parts)
	}
}

// holds reports whether parts have their room, as far as one can tell.
func (r *room) holds(parts []Part) bool { return r.holdsBeside(nil, parts) }

// holdsBeside reports whether they do once a pod has what it asks for.
func (r *room) holdsBeside(p *Pod, parts []Part) bool {
	t := r.expect().anew()
	if p != nil {
		again := map[string][]string{}
		for i := range p.Containers {
			c := &p.Containers[i]
			for _, name := range sorted(c.Requests) {
				if _, ours := t.kinds[name]; ours && c.Requests[name] > 0 && !t.container(c, name, again) {
					return false
				}
			}
		}
	}
	for _, p := range parts {
		if _, ok := t.take(p.Resource, p.N, nil); !ok {
			return false
		}
	}
	return true
}

// extend keeps up to n more of a resource, in the largest parts that there is room for,
// and those where the least is left beside.
func (qs *quotas) extend(q *quota, resource string, n int) {
	for n > 0 {
		best, most, tight := "", 0, 0
		for _, name := range slices.Sorted(maps.Keys(qs.b.nodes)) {
			if !q.on(name) {
				continue
			}
			all := qs.b.room(name).chunk(resource)
			if c := min(all, n); c > most || c == most && c > 0 && all < tight {
				best, most, tight = name, c, all
			}
		}
		r := qs.b.room(best)
		for most > 0 && !r.holds(r.with(resource, most, best)) {
			most /= 2 // the rest is tried at another turn
		}
		if most == 0 {
			return
		}
		n -= most
		apart := append(slices.Clone(q.parts), Part{best, resource, most})
		qs.put(q, joined(apart, best, resource))
		if r = qs.b.room(best); !r.holds(r.kept) {
			qs.put(q, apart)
			r = qs.b.room(best)
		}
		r.checked = true
	}
}

// joined makes one of the parts of a resource on a node, which is worth more where there is
// room for it.
func joined(parts []Part, node, resource string) (out []Part) {
	all := Part{Node: node, Resource: resource}
	for _, p := range parts {
		if p.Node == node && p.Resource == resource {
			all.N += p.N
		} else {
			out = append(out, p)
		}
	}
	return append(out, all)
}

// chunk is the largest part of a resource for which there is room beside what is kept.
func (r *room) chunk(resource string) int {
	if n, known := r.chunks[resource]; known {
		return n
	}
	most := 0
	t := r.expect()
	for i := range t.gpus {
		switch s := &t.gpus[i]; {
		case s.kind == piece.KindPlacement:
			most += len(s.places[resource])
		case s.resource != resource:
		case s.kind == piece.KindUnits:
			most = max(most, s.free)
		default:
			most += min(s.free, 1)
		}
	}
	n := sort.Search(most, func(i int) bool { return !r.holds(r.with(resource, i+1, "")) })
	if r.chunks == nil {
		r.chunks = map[string]int{}
	}
	r.chunks[resource] = n
	return n
}

// with is what is kept, and one part more.
func (r *room) with(resource string, n int, node string) []Part {
	out := append(slices.Clone(r.kept), Part{node, resource, n})
	sort.SliceStable(out, func(i, j int) bool {
		return cmp.Or(harder(out[i].Resource, out[j].Resource), cmp.Compare(out[j].N, out[i].N)) < 0
	})
	return out
}

// bestOf is the best of some nodes for a member, among those where room is kept for it, and
// what is kept then; empty where there is none. Where the agent's packing would leave no room
// for the rest of the quota on any of them, the quota loses what competes, and is to look
// for it anew. Where that is not enough, other quotas do: a pod that has come has its room
// before pods that may.
func (qs *quotas) bestOf(q *quota, e *entry, among []string) (best string, parts []Part) {
	for _, lose := range []losing{loseNothing, loseOwn, loseAll} {
		var spoilt, left int
		for _, name := range among {
			if !slices.ContainsFunc(q.parts, func(p Part) bool { return p.Node == name && e.needs[p.Resource] > 0 }) {
				continue
			}
			v, rest := qs.judgeMember(q, e, name, lose)
			if v.why == "" && (best == "" || cmp.Or(cmp.Compare(v.spoilt, spoilt), cmp.Compare(v.left, left), cmp.Compare(name, best)) < 0) {
				best, parts, spoilt, left = name, rest, v.spoilt, v.left
			}
		}
		if best != "" {
			return best, parts
		}
	}
	return "", nil
}

// losing says whose parts that compete with a member are given up for it.
type losing int

const (
	loseNothing losing = iota
	loseOwn
	loseAll
)

// judgeMember gives a node's verdict on a member, with what its quota has left beside it.
// That is taken from the part that it fits into best, or else from the smallest ones.
func (qs *quotas) judgeMember(q *quota, e *entry, name string, lose losing) (v verdict, rest []Part) {
	before, here := q.parts, map[string]bool{name: true}
	competes := func(p Part) bool {
		r := qs.b.room(name)
		return p.Node == name && slices.ContainsFunc(e.names, func(of string) bool { return r.family(of) == r.family(p.Resource) })
	}
	defer qs.put(q, before)
	for _, whole := range []bool{true, false} {
		rest = before
		for _, resource := range e.names {
			n := e.needs[resource]
			if whole {
				rest, n = fit(rest, resource, n, name)
			}
			rest = less(rest, resource, n, here)
		}
		if lose != loseNothing {
			rest = slices.DeleteFunc(slices.Clone(rest), competes)
		}
		qs.put(q, slices.Clone(rest))
		r := qs.b.room(name)
		if lose == loseAll { // put has them back in place; those without room go at the next look
			r = qs.b.roomOf(qs.b.nodes[name], nil)
			r.kept = slices.DeleteFunc(slices.Clone(r.kept), competes)
		}
		if v = r.judge(e); v.why == "" {
			break
		}
	}
	return v, rest
}

// fit takes n of a resource out of the smallest part on a node that has as much; more is
// what is left to take.
func fit(parts []Part, resource string, n int, node string) (out []Part, more int) {
	at := -1
	for i, p := range parts {
		if p.Node == node && p.Resource == resource && p.N >= n && (at < 0 || p.N < parts[at].N) {
			at = i
		}
	}
	if at < 0 {
		return parts, n
	}
	out = slices.Clone(parts)
	if out[at].N -= n; out[at].N == 0 {
		out = slices.Delete(out, at, at+1)
	}
	return out, 0
}
