// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/placer"
)

// Books hold room, and know the nodes.
type Books interface {
	// Asks is what a pod asks for of the agents' resources, and of all others: cpu, memory and the like, as the
	// scheduler counts them.
	Asks(*corev1.PodSpec) ([]placer.Container, placer.Amounts)
	// Nodes have the names, labels and taints of all nodes, in order; a cordoned one has the taint for that.
	Nodes() []*corev1.Node
	Hold(id, name string, groups []placer.Group) (at [][]string, no *placer.Refusal)
	Open(id, name string, groups []placer.Group, guests []placer.Guest) (
		ends []string, at [][]string, no *placer.Refusal)
	SetHold(id, name string, groups []placer.Group, at [][]string)
	Drop(id string)
	Leave(id string)
	// Lost are nodes where a hold has lost the room of pods to come, and Stuck the hosts that its pods name
	// in node selectors, where the scheduler calls them unschedulable.
	Lost(id string) []string
	Stuck(id string) (hosts []string)
	// Running reports whether pods of a hold are on nodes, and are not ending.
	Running(id string) bool
	// Members are how many pods name a hold, without those that are ending or have ended: how many of them have a node,
	// and how many have a controller, which makes another pod when one is deleted.
	Members(id string) (pods, placed, owned int)
	// Might reports whether groups would have room if of all holds and pods only those stayed whose holds stay.
	Might(groups []placer.Group, stay func(hold string) bool) bool
	// News is a number that changes whenever there may be new room.
	News() uint64
}

const (
	// later is after how long a workload without room is tried again where it cannot be kept from
	// the flavor that has none.
	later = 15 * time.Second
	// forQuota is how long a workload in a cloud's queue waits for quota on-prem where there is
	// room, and pause what lies between two tries: others may have the quota for a moment.
	forQuota = 15 * time.Second
	pause    = 3 * time.Second
	// forEnds is how long a workload waits for the room of pods that are ending. Pods have 30 s for that
	// by default, and the devices of one that has gone may be free some seconds later.
	forEnds = 2 * time.Minute
	// early is how long room is held for a workload that has no quota for it yet, and again how
	// often Kueue is asked meanwhile to look at the workload. It does not hear when it looks already.
	early = 30 * time.Second
	again = 5 * time.Second
	// strand is how long a node may be without room for pods that can go nowhere else before their
	// workload begins again: one that restarts, or was cordoned by mistake, comes back.
	strand = 30 * time.Second
	// renews is how long Kueue may take to renew a workload's checks after it has given it quota; times are in whole
	// seconds. setBack is how the message of a check begins that it has not renewed.
	renews  = 3 * time.Second
	setBack = "Reset to Pending"
	// settle is how long pods that are starting are waited for, until they have reported their devices.
	settle = 5 * time.Second

	// Names of controllers and annotations, after the domain.
	onPremName = "gpu-placer"
	urgentName = "gpu-placer-urgent"
	cloudName  = "gpu-placer-cloud"
	// holdName is the key of the hold, and nodesName where its pods have their room. A key is a UID or an object's
	// name, so it has at most maxKey bytes.
	holdName  = "gpu.hold"
	nodesName = "gpu.hold-nodes"
	maxKey    = 253
	// refusedName is the annotation of workloads with the flavors that have no room for them.
	refusedName = "gpu.refused-flavors"
	// cloudLabel is the label of ResourceFlavors whose nodes cost money.
	cloudLabel = "gpu.cloud"
	// checkpoints is the label of pods that may be ended at any time, as others go on where
	// they were.
	checkpoints = "gpu.checkpoints"
)

// View is what is known of Kueue's objects, flavors and checks by name.
type View struct {
	Workloads []*Workload
	Flavors   map[string]*Flavor
	Checks    map[string]*Check
}

// Checks decides on admission checks. It is pure but for the books, which it asks to hold room.
// Its methods are not for several goroutines.
type Checks struct {
	names
	books Books
	held  map[string]*held // by ID
	// reaches are the nodes that workloads may be on. full are the shapes that found no room since the
	// books' news was heard.
	reaches reaches
	full    map[string]*placer.Refusal
	heard   uint64
	// sought is when it was last looked who makes room for an urgent workload, by UID.
	sought map[string]time.Time
	// refusedAt is since when a workload had the quota that it was last refused room for, by UID.
	refusedAt map[string]time.Time
	hopes     hopes
	// arriving is since when a cloud has had room for a pod of a workload none of whose pods has a node, by UID.
	arriving map[string]time.Time
	// tried is since when a workload in a cloud's queue has waited for quota on-prem, where it has room, by UID.
	tried map[string]time.Time
}

// held is what a hold is for.
type held struct {
	by    string // UID of a workload
	shape string // of its groups
	// version is that of the workload to which Ready was sent and that has not said so yet. Whether
	// a request that failed was carried out shows when the workload has another version.
	version string
	// since is when room was held for a workload that has no quota for it yet, zero once its check
	// was answered; woken is when Kueue was last asked to look at it.
	since, woken time.Time
	// opening is true while others make room, and began is when that began.
	opening bool
	began   time.Time
	// grows is true while a slice of an elastic job has the hold of the slice that it replaces, and no answer yet.
	grows bool
	// stranded is since when pods of it have had no node to go to, zero once there is room for all again.
	stranded time.Time
}

// Answer is what a workload is told.
type Answer struct {
	Workload *Workload
	// Refuses, where Changes, are the flavors that the workload may not have from now on: there is no
	// room for it. It is told before State is.
	Changes bool
	Refuses []string
	// State is another state of a check, if it has a name.
	State CheckState
	// Wakes is why Kueue is to look at a workload that waits, empty where it is not.
	Wakes string
}

// NewChecks returns what has held nothing. Domain is that of controllers and annotations.
func NewChecks(domain string, books Books) *Checks {
	return &Checks{
		names: names{domain}, books: books, held: map[string]*held{},
		sought: map[string]time.Time{}, refusedAt: map[string]time.Time{}, hopes: hopes{},
		arriving: map[string]time.Time{}, tried: map[string]time.Time{},
	}
}

// HoldOf returns the ID of a pod's hold, empty where it has none. Its key is in an annotation, which Kueue
// copies from the workload's check into the pods' template. A tenant can write the annotation too, but not
// the namespace: a false key takes the room of workloads in the tenant's own namespace only, or keeps them in a
// cloud.
func HoldOf(domain string) func(*corev1.Pod) string {
	return func(p *corev1.Pod) string {
		if key := p.Annotations[domain+"/"+holdName]; key != "" && len(key) <= maxKey {
			return id(p.Namespace, key)
		}
		return ""
	}
}

// id is that of a hold in a namespace.
func id(namespace, key string) string { return "kueue/" + namespace + "/" + key }

// Follow holds the room that the checks of workloads name, and gives up the rest. It decides nothing.
//
// What pods were told cannot be changed while the check is Ready. So a process that begins has the seats where they
// were first. It looks anew for those that are lost as soon as it decides; others may have that room by then.
func (c *Checks) Follow(v *View, now time.Time) {
	c.reaches.of(c.books.Nodes(), v.Flavors)
	there, goes := map[string]bool{}, map[string]bool{}
	for _, w := range v.Workloads {
		if goes[w.UID] = !w.Over; w.Admitted {
			delete(c.tried, w.UID)
		}
	}
	for _, w := range v.Workloads {
		hold := c.id(w)
		h := c.held[hold]
		if _, replaces := w.Annotations[replacesName]; replaces && h != nil && w.Reserved && !w.Over && !goes[h.by] {
			h.by, h.grows, h.version = w.UID, true, "" // Kueue ends a slice as soon as the next one has quota
		}
		if h != nil && h.by == w.UID && !w.Over && !h.since.IsZero() {
			if c.returns(w, v) {
				h.since = now // its pods end yet
			}
			there[hold] = there[hold] || now.Sub(h.since) < early
		}
		for _, s := range w.Checks {
			if !w.Reserved || w.Over || !c.room(v, s.Name) || s.State != Ready && s.State != Pending {
				continue
			}
			if s.State == Pending {
				answered := h != nil && h.version != "" && h.version == w.version()
				there[hold] = there[hold] || h != nil && h.by == w.UID && (answered || h.opening || h.grows)
				continue
			}
			if h == nil && len(s.PodSetUpdates) > 0 {
				groups := c.want(w, v, c.byFlavors(w, v)).groups
				c.books.SetHold(hold, w.Namespace+"/"+w.Name, groups, c.written(w, s.PodSetUpdates))
				c.held[hold] = &held{by: w.UID} // of no shape: it is looked for anew what has moved since
			}
			there[hold] = there[hold] || c.held[hold] != nil && c.held[hold].by == w.UID
		}
	}
	maps.DeleteFunc(c.sought, func(_ string, at time.Time) bool { return now.Sub(at) >= lookAgain })
	gone := func(uid string, _ time.Time) bool { return !goes[uid] }
	maps.DeleteFunc(c.refusedAt, gone)
	maps.DeleteFunc(c.arriving, gone)
	maps.DeleteFunc(c.tried, gone)
	c.hopes.forget(now)
	for hold := range c.held {
		if !there[hold] {
			c.drop(hold)
		}
	}
}

func (c *Checks) drop(hold string) {
	c.books.Drop(hold)
	delete(c.held, hold)
}

// sorted are workloads as they came.
func sorted(all []*Workload) []*Workload {
	return slices.SortedFunc(slices.Values(all), func(x, y *Workload) int {
		return cmp.Or(x.Created.Compare(y.Created), cmp.Compare(x.Namespace, y.Namespace), cmp.Compare(x.Name, y.Name))
	})
}

// Decide returns what to tell workloads, older ones first. What makes a check Ready is held from
// then on.
func (c *Checks) Decide(v *View, now time.Time) (out []Answer) {
	c.Follow(v, now)
	all := sorted(v.Workloads)
	end := map[string]bool{} // UIDs of those who make room
	answer := func(all []*Workload, question string, decide func(*Workload, *CheckState, *View, time.Time) *Answer) {
		for _, w := range all {
			for i := range w.Checks {
				s := &w.Checks[i]
				if !c.is(v, s.Name, question) || !w.Reserved || w.Evicted || w.Over || end[w.UID] || w.stale(s, now) {
					continue
				}
				a := decide(w, s, v, now)
				if a != nil && a.State.State == Retry && w.Bare {
					a = pending(a.State.Message + bare)
				}
				if a != nil && (a.State.State != s.State || a.State.Message != s.Message) {
					out = append(out, a.to(w, s, now))
				}
			}
		}
	}
	// Urgent ones go first, the most urgent of them before the others.
	first := func(x, y *Workload) int { return cmp.Compare(y.Priority, x.Priority) }
	urgents := slices.SortedStableFunc(slices.Values(all), first)
	answer(urgents, urgentName, func(w *Workload, s *CheckState, v *View, now time.Time) *Answer {
		a, ends := c.urgent(w, s, v, now)
		for _, y := range ends {
			end[y.Workload.UID] = true
		}
		out = append(out, ends...)
		return a
	})
	// Workloads with quota on-prem go first, then those that run nowhere, and those in a cloud last.
	answer(all, onPremName, c.onPrem)
	if news := c.books.News(); c.full == nil || news != c.heard {
		c.full, c.heard = map[string]*placer.Refusal{}, news
	}
	for _, w := range all {
		if a := c.waiting(w, v, now); a != nil {
			a.Workload = w
			out = append(out, *a)
		}
		answer([]*Workload{w}, cloudName, c.nowhere)
	}
	answer(all, cloudName, c.cloud)
	return out
}

// stale reports whether a check may be of the flavor that a workload had before. Kueue sets checks back when it takes
// the quota away, and renews them a moment after it has given the next (0.19).
func (w *Workload) stale(s *CheckState, now time.Time) bool {
	return s.State == Pending && strings.HasPrefix(s.Message, setBack) && now.Sub(w.QuotaAt) < renews
}

// to addresses what a check becomes.
func (a *Answer) to(w *Workload, s *CheckState, now time.Time) Answer {
	if a.State.LastTransitionTime = s.LastTransitionTime; a.State.State != s.State {
		a.State.LastTransitionTime = metav1.NewTime(now)
	}
	a.Workload, a.State.Name, a.State.RetryCount = w, s.Name, s.RetryCount
	return *a
}

// bare is why a workload waits whose check would be Retry.
const bare = "; it keeps its quota while it waits, since Kueue cannot take the quota of a workload without a job"

// said is what is told to people, in a length that the API server takes.
func said(text string) string { return brief.Cut(text, brief.Message) }

func ready(why string) *Answer { return &Answer{State: CheckState{State: Ready, Message: said(why)}} }
func pending(why string) *Answer {
	return &Answer{State: CheckState{State: Pending, Message: said(why)}}
}

// retry has a workload give its quota back. Kueue tries it again at once, or after a while. It takes
// the quota only when that is over (0.19).
func retry(why string, after time.Duration) *Answer {
	a := &Answer{State: CheckState{State: Retry, Message: said(why)}}
	if seconds := int32(after.Seconds()); seconds > 0 {
		a.State.RequeueAfterSeconds = &seconds
	}
	return a
}

// onPrem answers whether there is room; nil where the check stays as it is.
func (c *Checks) onPrem(w *Workload, s *CheckState, v *View, now time.Time) *Answer {
	want := c.want(w, v, c.byFlavors(w, v))
	h := c.held[c.id(w)]
	switch {
	case !want.asks && s.State == Pending:
		return ready("it asks for nothing that the GPU agents offer")
	case !want.asks, s.State != Pending && s.State != Ready:
		return nil
	case h != nil && h.by != w.UID:
		return nil // its slice before, or its variant
	case c.returns(w, v):
		return nil // its sets in a cloud come back, and the hold is for all of them
	case s.State == Ready && h != nil && h.shape == want.shape && c.books.Lost(c.id(w)) == nil:
		h.stranded = time.Time{}
		return nil
	}
	at, no := c.find(w, &want, s.State == Ready)
	switch {
	case no == nil:
		a := c.placed(w, &want, at)
		elsewhere := func(node string) bool { return !strings.Contains(s.Message, " "+node+" × ") }
		if s.State == Ready && !slices.ContainsFunc(slices.Concat(at...), elsewhere) {
			return nil
		} else if s.State == Ready {
			a.State.PodSetUpdates = s.PodSetUpdates // its pods have been told
		}
		return a
	case s.State == Pending && no.Waits && now.Sub(s.LastTransitionTime.Time) < settle:
		return pending("no room yet: " + because(no, &want))
	case s.State == Ready && w.Admitted && !c.stranded(w, s, now):
		return nil // the scheduler has the last word
	case s.State == Pending && c.running(w):
		return pending("its present pods keep running, and more follow once there is room: " + because(no, &want))
	case s.State == Pending:
		if a := c.await(w, &want, s, v, now); a != nil {
			return a
		}
	}
	c.drop(c.id(w))
	if s.State == Ready {
		return retry("its pods have lost their room on the nodes where they may go: it begins again", 0)
	}
	return c.refuse(w, &want, no.Group, because(no, &want)+partly(w, no))
}

// running reports whether a workload is a slice of an elastic job whose pods, of the former slice, run. Were its
// check Retry, they would all end. Kueue ends the former slice as soon as the new one has quota, so the new one takes
// over the hold. Kueue 0.19 also lets the new pods go to the scheduler then (elastic_job_ungater.go). The scheduler
// finds no room for them until the check is Ready.
func (c *Checks) running(w *Workload) bool {
	_, replaces := w.Annotations[replacesName]
	return replaces && c.books.Running(c.id(w))
}

// await has a workload without room wait for that of others that are leaving: Kueue has taken their quota away,
// and their pods are ending. It returns nil if that makes no room, or takes too long.
func (c *Checks) await(w *Workload, want *wanted, s *CheckState, v *View, now time.Time) *Answer {
	if h := c.held[c.id(w)]; h != nil && h.opening {
		if now.Sub(h.began) >= forEnds {
			return nil
		}
		return pending(s.Message)
	}
	leaving := slices.DeleteFunc(c.guests(w, v), func(g placer.Guest) bool { return !g.Going })
	_, at, no := c.books.Open(c.id(w), w.Namespace+"/"+w.Name, want.groups, leaving)
	if no != nil {
		return nil
	}
	c.held[c.id(w)] = &held{by: w.UID, shape: want.shape, opening: true, began: now}
	return pending("it waits for other workloads to end: " + places(at))
}

// partly returns a text about a set that may have fewer pods: how many of them would fit. It is empty for other sets.
// Kueue chooses the number by quota alone, before it asks, and a check cannot tell it another (KEP-420).
func partly(w *Workload, no *placer.Refusal) string {
	if no.Group < 0 || no.Group >= len(w.Sets) {
		return ""
	}
	s := &w.Sets[no.Group]
	switch {
	case s.Least == 0:
		return ""
	case no.Fit < s.Least:
		return fmt.Sprintf("; %d of %q fit, and it needs at least %d", no.Fit, s.Name, s.Least)
	}
	return fmt.Sprintf("; with a parallelism of %d for %q it would fit", no.Fit, s.Name)
}

// because is the reason for a refusal, with the number of nodes that were left out since they are closed.
func because(no *placer.Refusal, want *wanted) string {
	closed := map[string]bool{}
	for _, g := range want.groups {
		for _, name := range g.Closed {
			closed[name] = true
		}
	}
	const why = "%d nodes are cordoned, or have taints that its pods do not tolerate"
	switch {
	case len(closed) == 0:
		return no.Error()
	case len(no.Nodes) == 0 && no.Found == 0:
		return fmt.Sprintf("no other node is left: "+why, len(closed))
	}
	return fmt.Sprintf("%v; "+why, no, len(closed))
}

// stranded reports whether a workload has waited for a while for the only node that its check lets some pods
// go to: the node has lost their seats, and the scheduler calls one of them unschedulable. A job whose pods all run
// is not stranded, even on a node that is cordoned.
func (c *Checks) stranded(w *Workload, s *CheckState, now time.Time) bool {
	h := c.held[c.id(w)]
	if h == nil {
		return false
	}
	stuck, lost := c.books.Stuck(c.id(w)), c.books.Lost(c.id(w))
	for i, at := range c.written(w, s.PodSetUpdates) {
		host := s.told(w.Sets[i].Name)[corev1.LabelHostname]
		if host == "" || len(at) == 0 || !slices.Contains(stuck, host) || !slices.Contains(lost, at[0]) {
			continue
		}
		if h.stranded.IsZero() {
			h.stranded = now
		}
		return now.Sub(h.stranded) >= strand
	}
	return false
}

// find finds room and holds it. Pods that there are before a workload has begun are of a time when it
// had quota before, and are ending; but those of a slice that it replaces go on.
func (c *Checks) find(w *Workload, want *wanted, begun bool) (at [][]string, no *placer.Refusal) {
	if _, replaces := w.Annotations[replacesName]; c.held[c.id(w)] == nil && !begun && !replaces {
		c.books.Leave(c.id(w))
	}
	return c.books.Hold(c.id(w), w.Namespace+"/"+w.Name, want.groups)
}

// placed notes that a workload's room is held, and says so.
func (c *Checks) placed(w *Workload, want *wanted, at [][]string) *Answer {
	c.held[c.id(w)] = &held{by: w.UID, shape: want.shape, version: w.version()}
	a := ready("there is room: " + places(at) + notJudged(w))
	a.State.PodSetUpdates = c.updates(w, at)
	return a
}

// refuse keeps a workload from the flavors of one of its sets, all if group is -1, so that Kueue tries the next ones.
// The annotation for that is Kueue's own: Kueue writes it for the variants of a workload, and obeys it for all.
func (c *Checks) refuse(w *Workload, want *wanted, group int, why string) *Answer {
	refused, _, mine := c.refused(w)
	news := false
	// Where the flavors were written and the state was not, since the workload had changed, it has the same quota yet.
	since, before := c.refusedAt[w.UID]
	again := before && !since.Equal(w.QuotaAt)
	c.refusedAt[w.UID] = w.QuotaAt
	for i, g := range want.groups {
		for _, flavor := range w.Sets[i].Flavors {
			if g.N > 0 && (group < 0 || group == i) && !slices.Contains(refused, flavor) {
				refused, news = append(refused, flavor), true
			}
		}
	}
	switch {
	case !mine:
		return retry(why, later)
	case !news && again:
		const hint = " (Kueue gave it a flavor that it may not have: is its feature gate ConcurrentAdmission on?)"
		return retry(why+hint, later)
	}
	a := retry(why, 0)
	a.Changes, a.Refuses = true, slices.Sorted(slices.Values(refused))
	return a
}

// waiting has Kueue look again at a workload without quota once there is room for it in flavors that
// it was kept from. That room is held for a while. Door also sets the condition Requeued, since Kueue looks
// at that and not at annotations. A shape without room is looked at again once there is news.
func (c *Checks) waiting(w *Workload, v *View, now time.Time) *Answer {
	refused, told, mine := c.refused(w)
	h := c.held[c.id(w)]
	switch {
	case w.Reserved || w.Over || !told || !mine || h != nil && h.by != w.UID:
		return nil
	case len(refused) == 0:
		if h == nil && w.Woken || h != nil && now.Sub(h.woken) < again {
			return nil
		}
		if h == nil {
			return &Answer{Wakes: "there was room"}
		}
		h.woken = now
		return &Answer{Changes: true, Wakes: "there was room"}
	}
	of := where{key: "refused " + strings.Join(refused, ","), holds: func(labels map[string]string) bool {
		return slices.ContainsFunc(refused, func(name string) bool {
			return v.Flavors[name] != nil && has(labels, v.Flavors[name].Labels)
		})
	}}
	want := c.want(w, v, func(*Set) where { return of })
	at, no := c.hold(w, &want, now)
	if no != nil {
		return nil
	}
	c.held[c.id(w)].woken = now
	return &Answer{Changes: true, Wakes: "there is room: " + places(at)}
}

// hold holds room for a workload that has no quota for it yet.
func (c *Checks) hold(w *Workload, want *wanted, now time.Time) (at [][]string, no *placer.Refusal) {
	h := c.held[c.id(w)]
	if no := c.full[want.shape]; no != nil && (h == nil || h.since.IsZero()) {
		return nil, no
	}
	if at, no = c.find(w, want, false); no != nil {
		c.full[want.shape] = no
	} else if h == nil || h.since.IsZero() {
		c.held[c.id(w)] = &held{by: w.UID, shape: want.shape, since: now}
	}
	return at, no
}
