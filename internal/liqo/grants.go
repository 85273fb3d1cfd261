// SPDX-License-Identifier: Apache-2.0

package liqo

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/placer"
)

// Class is the class of ResourceSlices that are answered, without the domain: a consumer asks
// for the class "gpu-agent".
const Class = "gpu-agent"

// Books keep room for slices, and know what the nodes have.
type Books interface {
	Keep(quota string, want map[string]int) (short map[string]int)
	Drop(quota string)
	Kept(quota string) (parts []placer.Part, short map[string]int, nodes []string)
	Labels(nodes []string) map[string]string
	Lendable() (devices map[string]int, plain corev1.ResourceList)
}

// Reasons of the condition Resources, and of what is reported.
const (
	// Granted: all that is asked for is granted.
	Granted = "Granted"
	// Reduced: it was, and room for some of it has gone since.
	Reduced = "Reduced"
	// NotMore: what was granted stays; more is asked for, and there is no room for all of it.
	NotMore = "NotMore"
	// NoRoom: there is no room for all that is asked for, and nothing is granted.
	NoRoom = "NoRoom"
	// NotOffered: something is asked for that this class does not grant.
	NotOffered = "NotOffered"
)

const (
	// patience is how long granted room may be missing before the grant is reduced. What a
	// pod has left looks held for up to a minute.
	patience = 90 * time.Second
	// again is how long a request without room waits for the next try.
	again = 5 * time.Second
)

// usual is what a slice gets that does not ask for it, as Liqo's own class gives it: without
// cpu, memory and pods the consumer's virtual node takes no pod.
var usual = corev1.ResourceList{
	corev1.ResourceCPU: resource.MustParse("4"), corev1.ResourceMemory: resource.MustParse("8Gi"),
	corev1.ResourcePods: resource.MustParse("110"), corev1.ResourceEphemeralStorage: resource.MustParse("20Gi"),
}

// Grants decides what consumer clusters are granted. It is pure but for the books, which it
// asks to keep room. Its methods are not for several goroutines.
type Grants struct {
	prefix, domain string
	books          Books
	of             map[string]*grant // by UID
}

// grant is what is remembered of a slice.
type grant struct {
	quota string
	// want is what the books are to keep.
	want map[string]int
	// since is when granted room was first missing; zero where none is.
	since time.Time
	// tried is when there was no room for a request, and version what it was.
	tried   time.Time
	version string
}

// Decision is what to do about a slice.
type Decision struct {
	Slice *Slice
	// Status is what to write, nil for nothing.
	Status *Status
	// Bypass is true if the slice asks Liqo's own class for the agent's resources. Liqo then
	// grants them, also if there are none.
	Bypass bool
}

// NewGrants returns Grants that know no slice. domain is the domain of labels, and resourceDomain that
// of the agent's resources.
func NewGrants(domain, resourceDomain string, books Books) *Grants {
	return &Grants{prefix: resourceDomain + "/", domain: domain, books: books, of: map[string]*grant{}}
}

// Restore keeps what slices have been granted, as their status says. It decides nothing.
func (g *Grants) Restore(all []*Slice) {
	there := map[string]bool{}
	for _, s := range g.sorted(all) {
		m := g.of[s.UID]
		if there[s.UID] = true; m == nil {
			m = &grant{quota: s.Quota()}
			g.of[s.UID] = m
		}
		if name := s.Quota(); name != m.quota { // Liqo writes the consumer's name after it has made the slice
			g.keep(m, nil)
			m.quota = name
		}
		standing := g.ours(s.Granted)
		if m.want == nil && len(standing) > 0 {
			g.keep(m, standing)
		}
	}
	for uid, m := range g.of {
		if !there[uid] {
			g.keep(m, nil)
			delete(g.of, uid)
		}
	}
}

// Follow is Restore for a process that does not decide: what is kept is what slices have.
func (g *Grants) Follow(all []*Slice) {
	g.Restore(all)
	for _, s := range g.sorted(all) {
		g.keep(g.of[s.UID], g.ours(s.Granted))
	}
}

// Decide returns a decision about each slice. It begins with the slices that have had a grant for the longest time. The
// books keep what it grants from then on. They give up what it takes back only after the slice's status shows that. So
// no unit is ever granted to two slices.
func (g *Grants) Decide(all []*Slice, tenants []*Tenant, now time.Time) (out []Decision) {
	g.Restore(all)
	for _, s := range all {
		if (s.Class == "default" || s.Class == "") && s.Replicated && len(g.ours(s.Ask)) > 0 {
			out = append(out, Decision{Slice: s, Bypass: true})
		}
	}
	slices.SortFunc(out, func(x, y Decision) int { return compare(x.Slice, y.Slice) })
	for _, s := range g.sorted(all) {
		w := g.decide(s, all, tenants, now)
		if w == nil {
			continue
		}
		// The message names what a cluster asks for, which may be long. Cut it before it is compared with the one
		// that was written. Otherwise it would be written again and again.
		if w.Resources.Message = brief.Cut(w.Resources.Message, brief.Message); !s.says(w) {
			out = append(out, Decision{Slice: s, Status: w})
		}
	}
	return out
}

// sorted are the slices that are answered here.
func (g *Grants) sorted(all []*Slice) (out []*Slice) {
	for _, s := range all {
		if s.Class == Class && s.Replicated {
			out = append(out, s)
		}
	}
	slices.SortFunc(out, compare)
	return out
}

func compare(x, y *Slice) int {
	has := func(s *Slice) int { return min(len(s.Granted), 1) }
	return cmp.Or(cmp.Compare(has(y), has(x)), x.Created.Compare(y.Created),
		cmp.Compare(x.Namespace, y.Namespace), cmp.Compare(x.Name, y.Name), cmp.Compare(x.UID, y.UID))
}

// keep changes what the books keep for a slice.
func (g *Grants) keep(m *grant, want map[string]int) (short map[string]int) {
	if len(want) == 0 {
		if m.want != nil {
			g.books.Drop(m.quota)
		}
		m.want = nil
		return nil
	}
	if maps.Equal(want, m.want) {
		_, short, _ = g.books.Kept(m.quota)
		return short
	}
	m.want = maps.Clone(want)
	return g.books.Keep(m.quota, want)
}

// decide returns the new status of a slice, nil if it stays as it is.
func (g *Grants) decide(s *Slice, all []*Slice, tenants []*Tenant, now time.Time) *Status {
	m, standing := g.of[s.UID], g.ours(s.Granted)
	of := func(t *Tenant) bool { return t.Cluster == s.Consumer && t.Namespace == s.Namespace }
	i := slices.IndexFunc(tenants, of)
	if s.Going || s.Consumer == "" || i < 0 || tenants[i].Condition == drained || s.Authentication.Status != accepted {
		g.keep(m, standing) // Liqo decides about the slice, or has not yet
		return nil
	}
	ask := g.ours(s.Ask)
	if s.Resources.Status != accepted && len(standing) == 0 {
		if tenants[i].Condition != active {
			g.keep(m, nil) // Liqo denies it
			return nil
		}
		return g.first(s, m, ask, all, now)
	}
	return g.standing(s, m, ask, standing, tenants[i].Condition == active, all, now)
}

// first decides on a slice that has been granted nothing: all that it asks for, or nothing.
func (g *Grants) first(s *Slice, m *grant, ask map[string]int, all []*Slice, now time.Time) *Status {
	no := func(reason, message string) *Status {
		g.keep(m, nil)
		return &Status{
			Granted: s.Granted, Labels: s.Labels, Selector: s.Selector, Resources: Condition{denied, reason, message},
		}
	}
	if why := g.unknown(s, ask); why != "" {
		return no(NotOffered, why)
	}
	if m.version == s.version && now.Sub(m.tried) < again {
		return nil
	}
	m.version, m.tried = s.version, now
	plain, over := g.plain(s, all)
	if over != "" {
		return no(NoRoom, over)
	}
	if short := g.keep(m, ask); short != nil {
		return no(NoRoom, lacks(ask, short))
	}
	return g.grant(s, m, ask, ask, plain, Granted)
}

// standing decides on a slice with a grant. The slice loses some of it only if the room has gone.
func (g *Grants) standing(
	s *Slice, m *grant, ask, standing map[string]int, more bool, all []*Slice, now time.Time,
) *Status {
	reason, full := Granted, maps.Clone(standing)
	for name, n := range ask {
		full[name] = max(full[name], n)
	}
	plain, over := g.plain(s, all)
	raised := !maps.Equal(full, standing)
	if g.unknown(s, ask) != "" || raised && !more {
		reason, full, raised = NotMore, standing, false
	}
	if raised && s.Resources.Reason == Reduced && g.othersLack(s, all) {
		full, raised = standing, false // room that comes back is theirs
	}
	fresh := m.version != s.version || now.Sub(m.tried) >= again
	var short map[string]int
	switch {
	case !raised, s.Resources.Reason == Reduced, maps.Equal(full, m.want):
		short = g.keep(m, full)
	case fresh:
		m.version, m.tried = s.version, now
		short = g.keep(m, full)
	}
	if raised && s.Resources.Reason != Reduced && (short != nil || !maps.Equal(full, m.want)) {
		reason, full = NotMore, standing
		short = g.keep(m, full)
	}
	// What is missing beyond what was granted is not missed.
	give, lost := map[string]int{}, false
	for name, n := range ask {
		if give[name] = min(n, full[name]-short[name]); give[name] < min(n, standing[name]) {
			lost = true
		}
	}
	if !lost {
		m.since = time.Time{}
	} else if m.since.IsZero() {
		m.since = now
	}
	if lost && now.Sub(m.since) < patience {
		gone := g.gone(all)
		for name := range give {
			if !gone[name] {
				give[name] = max(give[name], min(ask[name], standing[name]))
			}
		}
	}
	for name, n := range ask {
		if reason == Granted && give[name] < n {
			reason = Reduced
		}
	}
	if over != "" && reason == Granted {
		reason = NotMore
	}
	return g.grant(s, m, ask, give, plain, reason)
}

// othersLack reports whether another slice has no room for some of what its status grants.
func (g *Grants) othersLack(s *Slice, all []*Slice) bool {
	for _, o := range g.sorted(all) {
		m := g.of[o.UID]
		if o.UID == s.UID || m == nil {
			continue
		}
		_, short, _ := g.books.Kept(m.quota)
		for name, n := range g.ours(o.Granted) {
			if m.want[name]-short[name] < n {
				return true
			}
		}
	}
	return false
}

// gone returns the resources that the nodes have less of in all than is granted.
func (g *Grants) gone(all []*Slice) map[string]bool {
	there, _ := g.books.Lendable()
	sum, out := map[string]int{}, map[string]bool{}
	for _, s := range g.sorted(all) {
		for name, n := range g.ours(s.Granted) {
			if sum[name] += n; sum[name] > there[name] {
				out[name] = true
			}
		}
	}
	return out
}

// grant returns the status of a slice with a grant. A resource that is no longer granted has the amount 0: the
// consumer's virtual node would keep a name that is left out.
func (g *Grants) grant(s *Slice, m *grant, ask, give map[string]int, plain corev1.ResourceList, reason string) *Status {
	w := &Status{Granted: maps.Clone(plain), Resources: Condition{Status: accepted, Reason: reason}}
	for name := range s.Granted {
		if _, there := w.Granted[name]; !there {
			w.Granted[name] = resource.Quantity{}
		}
	}
	for name, n := range give {
		w.Granted[corev1.ResourceName(name)] = *resource.NewQuantity(int64(n), resource.DecimalSI)
	}
	parts, _, nodes := g.books.Kept(m.quota)
	w.Labels, w.Selector = g.labels(s, nodes)
	same := maps.EqualFunc(s.Granted, w.Granted, func(x, y resource.Quantity) bool { return x.Equal(y) })
	said := s.Resources.Status == accepted && s.Resources.Reason == reason
	if w.Resources.Message = s.Resources.Message; !same || !said {
		w.Resources.Message = message(ask, give, parts, reason)
	}
	return w
}

// message is the text for people of the other cluster. It names the blocks of memory that the books found at that
// time. It leaves them out while pods have some of it, or more is kept than is granted: the parts that are kept free
// are not those blocks then.
func message(ask, give map[string]int, parts []placer.Part, reason string) string {
	var words []string
	for _, name := range slices.Sorted(maps.Keys(give)) {
		text := fmt.Sprintf("%d of %s", give[name], name)
		if n := ask[name]; n != give[name] {
			text += fmt.Sprintf(" (asked for %d)", n)
		}
		var blocks []string
		sum := 0
		for _, p := range parts {
			if p.Resource == name {
				blocks = append(blocks, fmt.Sprint(p.N))
				sum += p.N
			}
		}
		if len(blocks) > 1 && sum == give[name] {
			text += " in blocks of " + strings.Join(blocks, " and ")
		}
		words = append(words, text)
	}
	before := map[string]string{
		Granted: "granted: ", Reduced: "some of it was lost, and this is left: ",
		NotMore: "there is no room now for all that it asks for; it keeps ",
	}[reason]
	return before + strings.Join(words, ", ")
}

// labels are what the grant's nodes have in common. A label that they had in common before
// is empty then: the consumer's virtual node would keep one that is left out.
func (g *Grants) labels(s *Slice, nodes []string) (labels, selector map[string]string) {
	if len(nodes) == 0 {
		return s.Labels, s.Selector
	}
	common := g.books.Labels(nodes)
	labels, selector = map[string]string{}, map[string]string{}
	for key := range s.Labels {
		labels[key] = ""
	}
	for _, key := range []string{"gpu.model", "gpu.memory", "gpu.mode", "gpu.driver-version", "gpu.cuda-version"} {
		if value, there := common[g.domain+"/"+key]; there {
			labels[g.domain+"/"+key] = value
		}
	}
	for _, key := range []string{"gpu.node", "gpu.model"} {
		if value, there := common[g.domain+"/"+key]; there {
			selector[g.domain+"/"+key] = value
		}
	}
	return labels, selector
}

// ours returns the amounts of the agent's resources in a list, without those that are 0.
func (g *Grants) ours(list corev1.ResourceList) map[string]int {
	out := map[string]int{}
	for name, amount := range list {
		if n := amount.Value(); strings.HasPrefix(string(name), g.prefix) && n > 0 {
			out[string(name)] = int(min(n, 1<<30))
		}
	}
	return out
}

// unknown returns a text about what a slice asks for that this class does not grant, empty if there is nothing.
func (g *Grants) unknown(s *Slice, ask map[string]int) string {
	var not []string
	for name, amount := range s.Ask {
		_, is := usual[name]
		if !is && !amount.IsZero() && ask[string(name)] == 0 || amount.Sign() < 0 {
			not = append(not, string(name))
		}
	}
	slices.Sort(not)
	switch {
	case len(not) > 0:
		const how = "the class %s does not grant %s: ask for it in a slice of another class"
		return fmt.Sprintf(how, Class, strings.Join(not, ", "))
	case len(ask) == 0 && len(s.Granted) == 0:
		return fmt.Sprintf("nothing below %s is asked for, and the class %s grants nothing else", g.prefix, Class)
	}
	return ""
}

// plain returns what a slice gets beside GPUs: what it asks for, or the usual, as far as the nodes have it and other
// slices do not. over is a text about what there is too little of. Of that, the slice keeps what it was granted.
func (g *Grants) plain(s *Slice, all []*Slice) (out corev1.ResourceList, over string) {
	_, free := g.books.Lendable()
	for _, o := range g.sorted(all) {
		for name := range usual {
			if left, there := free[name]; there && o.UID != s.UID {
				left.Sub(o.Granted[name])
				free[name] = left
			}
		}
	}
	out = corev1.ResourceList{}
	for _, name := range slices.Sorted(maps.Keys(usual)) {
		want, asked := s.Ask[name]
		left, was := free[name], s.Granted[name]
		switch {
		case !asked && !was.IsZero():
			want = was
		case !asked:
			if want = usual[name]; left.Cmp(want) < 0 {
				want = left
			}
		}
		if want.Cmp(left) > 0 && want.Cmp(was) > 0 {
			const why = "asked for %s of %s: the nodes with GPUs have %s beyond what other clusters were granted"
			over = fmt.Sprintf(why, want.String(), name, left.String())
			want = was
		}
		if want.Sign() < 0 {
			want = resource.Quantity{}
		}
		out[name] = want
	}
	return out, over
}

// lacks returns a text about each resource in short: how much the other cluster asked for, and how much there is.
func lacks(ask, short map[string]int) string {
	var words []string
	for _, name := range slices.Sorted(maps.Keys(short)) {
		const why = "asked for %d of %s: %d are available now beyond those of pods and other clusters"
		words = append(words, fmt.Sprintf(why, ask[name], name, ask[name]-short[name]))
	}
	return strings.Join(words, "; ")
}
