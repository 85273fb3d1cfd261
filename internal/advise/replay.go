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

// Rules are what a replay assumes of the scheduler and of pods.
type Rules struct {
	// Placer is true if the scheduler knows what fits, as with gpu-agent placer. Then a pod waits
	// and is not refused.
	Placer bool
	// Back is true if a refused pod comes back after a growing pause, as a Job's pod does.
	Back bool
	// Lag is how late the scheduler learns that an allocation has withdrawn devices of others, as
	// one of a MIG instance on demand does. Until then it sends pods that are refused.
	Lag time.Duration
}

// A Job creates the next pod firstBack after the first failure. The pause doubles, up to mostBack
// (kube-controller-manager 1.36).
const (
	firstBack = 10 * time.Second
	mostBack  = 10 * time.Minute
)

// Outcome is the result of a demand on a partition.
type Outcome struct {
	// Served is the number of requests that got their devices. Refused is how often the kubelet
	// refused a pod. Never is the number of requests that no empty node of this kind can serve.
	// Waited is the number of requests without room at first, and Waiting the number of those that
	// found none by the end.
	Served, Refused, Never, Waited, Waiting int
	// Wait is the sum of their waiting times, and Longest the longest.
	Wait, Longest time.Duration
	// Renamed is the number of requests that must ask for another resource.
	Renamed int
	// Packed is how full GPUs were on average while a pod had something of them. Idle is the part
	// of all GPUs' time when no pod had anything of them. Both are from 0 to 1.
	Packed, Idle float64
	// Names are what requests must ask for instead, sorted, each with the number of such requests.
	Names []Renaming
}

// Renaming is a change of what requests ask for, on a node that does not offer what they asked for.
type Renaming struct {
	From  string `json:"from"`
	To    string `json:"to"`
	Count int    `json:"requests"`
}

// Replay returns the result of a demand on a node with the partition wants, which has a want for
// each GPU. It fails if the node cannot have that partition.
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
	r.translateAll(d, empty)
	r.countDevices(true)
	for len(r.events) > 0 && r.events[0].at < span {
		at := r.events[0].at
		r.advance(at)
		for len(r.events) > 0 && r.events[0].at == at {
			r.happen(heap.Pop(&r.events).(event))
		}
		r.schedule()
	}
	r.advance(span)
	r.end(span)
	return r.out, nil
}

// replay is a replay that runs now.
type replay struct {
	node         *node
	placer, back bool // as in Rules, and so is lag
	lag          time.Duration
	at           time.Duration
	events       events
	seq          int
	// waiting are the pods without devices, in the order of their arrival.
	waiting []*pending
	// known is the number of devices of each resource that the scheduler counts, free or held.
	known map[string]int
	// share is the part of each GPU that is given out. busy is the time of the GPUs with a share,
	// and given the sum of share over that time, both in seconds times GPUs.
	share       map[gpu.UUID]float64
	busy, given float64
	out         Outcome
}

// pending is a pod without devices.
type pending struct {
	*Request
	*translated
	// came is when it was created first, and tries how often it was refused.
	came  time.Duration
	tries int
	// passed is true if there was no room for it at first.
	passed bool
}

// translated is what requests of one shape ask for on this node.
type translated struct {
	key   string
	wants []want
	fits  bool
}

// event is a pod that comes, or allocations that end. If it is neither, the scheduler learns the
// number of devices.
type event struct {
	at   time.Duration
	seq  int
	pod  *pending
	ends []ledger.Allocation
}

// order returns the order of an event among those of one time.
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

// events are sorted by time. At one time, ends come first, then news for the scheduler, then pods;
// each in the order of creation.
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

// translateAll finds out, on an empty node, what each request asks for.
func (r *replay) translateAll(d *Demand, empty *node) {
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
				names[Renaming{From: q.Asks[j].String(), To: r.node.describe(w)}]++
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

// advance moves the time on.
func (r *replay) advance(to time.Duration) {
	took := (to - r.at).Seconds()
	for i := range r.node.inv.GPUs {
		if u := r.node.inv.GPUs[i].UUID; r.node.users[u] > 0 {
			r.busy += took
			r.given += float64(took * r.share[u]) // not fused, so the same on every architecture
		} else {
			delete(r.share, u) // exactly 0, without a rest
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
		r.countDevices(false)
	case 1:
		r.countDevices(true)
	default:
		r.waiting = append(r.waiting, e.pod)
	}
}

// countDevices tells the scheduler the numbers of devices that have grown, and if less is true also
// those that have shrunk.
func (r *replay) countDevices(less bool) {
	for i := range r.node.offer.Resources {
		name := r.node.offer.Resources[i].Name
		if n := r.node.healthy(name); less || n > r.known[name] {
			r.known[name] = n
		}
	}
}

// charge adds an allocation to the shares of its GPUs. With sign -1 it removes it.
func (r *replay) charge(a *ledger.Allocation, sign int) {
	for _, p := range r.node.pieces(a) {
		r.share[p.GPU] += float64(sign) * p.Share
	}
}

// schedule tries to place the waiting pods in the order of their arrival. A pod without room does
// not delay those behind it.
func (r *replay) schedule() {
	var still []*pending
	full := map[string]bool{} // shapes without room; placing others makes no room for them
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

// admit lets the scheduler and then the kubelet decide on a pod. The scheduler counts devices that
// it knows of. With the placer or through DRA it knows what fits.
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
		r.countDevices(true)
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

// waited adds the waiting time of a pod so far, if it had to wait.
func (r *replay) waited(p *pending) {
	if !p.passed && p.tries == 0 {
		return
	}
	r.out.Waited++
	r.out.Wait += r.at - p.came
	r.out.Longest = max(r.out.Longest, r.at-p.came)
}

// end counts the pods that wait at the end, and computes the averages.
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
