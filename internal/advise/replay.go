// SPDX-License-Identifier: Apache-2.0

package advise

import (
	"cmp"
	"container/heap"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
)

// Rules are how a replay goes where the node and the demand do not say it.
type Rules struct {
	// Placer says that the scheduler knows what fits, as with gpu-agent
	// placer: a pod waits rather than being refused.
	Placer bool
	// Back says that a refused pod comes back, later and later, as a Job's does.
	Back bool
	// Lag is how late the scheduler hears that an allocation has withdrawn devices of others,
	// as one of a MIG instance on demand does. Until then it sends pods that are refused.
	Lag time.Duration
}

// A Job makes the next pod so long after the first failure, then after twice that, up to the
// most (kube-controller-manager 1.36).
const (
	firstBack = 10 * time.Second
	mostBack  = 10 * time.Minute
)

// Outcome is what a partition would have made of a demand.
type Outcome struct {
	// Served have had what they asked for. Refused is how often the kubelet has refused a pod,
	// and Never counts the requests that no empty node of this kind can serve. Waited counts
	// those for which there was no room at first, Waiting those of them for which there was
	// none to the end.
	Served, Refused, Never, Waited, Waiting int
	// Wait is for how long they waited together, and Longest the longest of them.
	Wait, Longest time.Duration
	// Renamed counts the requests that have to ask for something else.
	Renamed int
	// Packed is how full GPUs were of which anybody had something, and Idle the part of all
	// GPUs' time in which nobody had anything of them, both from 0 to 1.
	Packed, Idle float64
	// Names are what requests have to ask for instead, sorted; each is as often as in Count.
	Names []Renaming
}

// Renaming is what requests ask for on a node that does not offer what they asked for.
type Renaming struct {
	From  string `json:"from"`
	To    string `json:"to"`
	Count int    `json:"requests"`
}

// Replay is what would have come of a demand on a node with this partition, a want for each
// of its GPUs. The error says why the node cannot have it.
func Replay(on Node, wants []config.Want, d *Demand, rules Rules) (Outcome, error) {
	n, err := on.lay(wants)
	if err != nil {
		return Outcome{}, err
	}
	empty, err := on.lay(wants)
	if err != nil {
		return Outcome{}, err
	}
	r := &replay{
		node: n, placer: rules.Placer, back: rules.Back, lag: rules.Lag,
		known: map[string]int{}, share: map[gpu.UUID]float64{},
	}
	span := d.Span()
	r.meet(d, empty)
	r.hear(true)
	for len(r.events) > 0 && r.events[0].at < span {
		at := r.events[0].at
		r.pass(at)
		for len(r.events) > 0 && r.events[0].at == at {
			r.happen(heap.Pop(&r.events).(event))
		}
		r.schedule()
	}
	r.pass(span)
	r.end(span)
	return r.out, nil
}

// replay is one in progress.
type replay struct {
	node         *node
	placer, back bool // see Rules, as is lag
	lag          time.Duration
	at           time.Duration
	events       events
	seq          int
	// waiting are the pods without a place, in the order in which they came.
	waiting []*pending
	// known is how many devices of each resource there are to the scheduler, which are free or
	// a pod has.
	known map[string]int
	// share is how much of each GPU is given out. busy is the time of such GPUs, and given what
	// was given out of them, both in seconds times GPUs.
	share       map[gpu.UUID]float64
	busy, given float64
	out         Outcome
}

// pending is a pod that has no place yet.
type pending struct {
	*Request
	*translated
	// came is when it was made, and tries how often it was refused.
	came  time.Duration
	tries int
	// passed says that there was no room for it at first.
	passed bool
}

// translated is what requests of one shape come to.
type translated struct {
	key   string
	wants []want
	fits  bool
}

// event is a pod that comes, or one that ends; if it is neither, the scheduler hears how many
// devices there are.
type event struct {
	at   time.Duration
	seq  int
	pod  *pending
	ends []ledger.Allocation
}

// order is that of events of one time.
func (e *event) order() int {
	switch {
	case e.ends != nil:
		return 0
	case e.pod == nil:
		return 1
	default:
		return 2
	}
}

// events are by time, ends before all else, then in the order of their making.
type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	a, b := &e[i], &e[j]
	return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.order(), b.order()), cmp.Compare(a.seq, b.seq)) < 0
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := (*e)[len(*e)-1]
	*e = (*e)[:len(*e)-1]
	return last
}

func (r *replay) push(e event) {
	r.seq++
	e.seq = r.seq
	heap.Push(&r.events, e)
}

// meet finds out what each request comes to, on an empty node.
func (r *replay) meet(d *Demand, empty *node) {
	asked, names := map[string]*translated{}, map[Renaming]int{}
	for i := range d.Requests {
		q := &d.Requests[i]
		shape := q.shape()
		t := asked[shape]
		if t == nil {
			t = &translated{key: shape}
			t.wants, t.fits = empty.translate(q.Asks)
			asked[shape] = t
		}
		if t.wants == nil {
			r.out.Never++
			continue
		}
		renamed := false
		for j, w := range t.wants {
			if !w.own {
				renamed = true
				names[Renaming{From: q.Asks[j].String(), To: r.node.told(w)}]++
			}
		}
		if renamed {
			r.out.Renamed++
		}
		r.push(event{at: q.At, pod: &pending{Request: q, translated: t, came: q.At}})
	}
	for name, n := range names {
		name.Count = n
		r.out.Names = append(r.out.Names, name)
	}
	slices.SortFunc(r.out.Names, func(a, b Renaming) int {
		return cmp.Or(strings.Compare(a.From, b.From), strings.Compare(a.To, b.To))
	})
}

// pass lets the time pass.
func (r *replay) pass(to time.Duration) {
	took := (to - r.at).Seconds()
	for i := range r.node.inv.GPUs {
		if u := r.node.inv.GPUs[i].UUID; r.node.users[u] > 0 {
			r.busy += took
			r.given += float64(took * r.share[u]) // not fused: the same on every architecture
		} else {
			delete(r.share, u) // to the last bit
		}
	}
	r.at = to
	r.node.now = time.Time{}.Add(to)
}

func (r *replay) happen(e event) {
	switch e.order() {
	case 0:
		for i := range e.ends {
			r.charge(&e.ends[i], -1)
			r.node.put(&e.ends[i])
		}
		r.hear(false)
	case 1:
		r.hear(true)
	default:
		r.waiting = append(r.waiting, e.pod)
	}
}

// hear tells the scheduler how many devices there are: that there are more, or also that
// there are less.
func (r *replay) hear(less bool) {
	for i := range r.node.offer.Resources {
		name := r.node.offer.Resources[i].Name
		if n := r.node.healthy(name); less || n > r.known[name] {
			r.known[name] = n
		}
	}
}

// charge counts an allocation on its GPUs, or with -1 takes it out again.
func (r *replay) charge(a *ledger.Allocation, sign int) {
	for _, p := range r.node.pieces(a) {
		r.share[p.GPU] += float64(sign) * p.Share
	}
}

// schedule gives each pod that waits its place, if there is one, in the order in which they
// came; one that has none holds up nobody.
func (r *replay) schedule() {
	var still []*pending
	full := map[string]bool{} // what has no room now has none after others have taken some
	for _, p := range r.waiting {
		if full[p.key] {
			p.passed = true
			still = append(still, p)
			continue
		}
		switch has, verdict := r.admit(p); verdict {
		case served:
			r.serve(p, has)
		case waits:
			p.passed, full[p.key] = true, true
			still = append(still, p)
		case refused:
			r.out.Refused++
			if r.back {
				again := *p
				again.tries++
				after := mostBack
				if p.tries < 6 {
					after = firstBack << p.tries
				}
				r.push(event{at: r.at + after, pod: &again})
			}
		}
	}
	r.waiting = still
}

type verdict int

const (
	served verdict = iota
	waits
	refused
)

// admit has the scheduler and then the kubelet look at a pod. The scheduler counts devices, by
// what it has heard; behind the placer it asks the agent's packing.
func (r *replay) admit(p *pending) (has []ledger.Allocation, v verdict) {
	need, exact := map[string]int{}, r.placer || r.node.dynamic
	for _, w := range p.wants {
		need[w.resource] += w.n
		exact = exact || r.node.exact[w.resource]
	}
	for name, n := range need {
		if !exact && r.known[name]-len(r.node.inUse[name]) < n {
			return nil, waits
		}
	}
	for _, w := range p.wants {
		if a, ok := r.node.take(w.resource, w.n); ok {
			has = append(has, a)
			continue
		}
		for i := range has {
			r.node.put(&has[i])
		}
		if exact {
			return nil, waits
		}
		return nil, refused
	}
	if r.lag == 0 {
		r.hear(true)
	} else if slices.ContainsFunc(has, func(a ledger.Allocation) bool { return a.Kind().InMIG() }) {
		r.push(event{at: r.at + r.lag})
	}
	return has, served
}

func (r *replay) serve(p *pending, has []ledger.Allocation) {
	r.out.Served++
	for i := range has {
		r.charge(&has[i], 1)
	}
	r.waited(p)
	if p.Hold != ToTheEnd {
		r.push(event{at: r.at + p.Hold, ends: has})
	}
}

// waited counts for how long a pod has waited by now.
func (r *replay) waited(p *pending) {
	if !p.passed && p.tries == 0 {
		return
	}
	r.out.Waited++
	r.out.Wait += r.at - p.came
	r.out.Longest = max(r.out.Longest, r.at-p.came)
}

// end counts those who wait at the end of that time, and works out the rest.
func (r *replay) end(span time.Duration) {
	left := r.waiting
	for _, e := range r.events {
		if e.pod != nil { // refused, and about to come back
			left = append(left, e.pod)
		}
	}
	for _, p := range left {
		if !p.fits {
			r.out.Never++
			continue
		}
		r.waited(p)
		r.out.Waiting++
	}
	if r.busy > 0 {
		r.out.Packed = r.given / r.busy
	}
	if all := span.Seconds() * float64(len(r.node.inv.GPUs)); all > 0 {
		r.out.Idle = max(0, 1-r.busy/all)
	}
}
