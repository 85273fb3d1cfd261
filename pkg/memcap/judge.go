// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// Policy is when use beyond a cap is an offence. A zero field means its default.
type Policy struct {
	// Percent of the cap is tolerated beyond it, at least Least and at most Most
	// bytes: the driver rounds, and a context costs more than anyone foresaw.
	// Defaults 5, 256 MiB and 1 GiB.
	Percent     int
	Least, Most uint64
	// Confirm is how many samples in a row must agree, each Spacing or more
	// after the one before it. Defaults 2 and 150 ms.
	Confirm int
	Spacing time.Duration
	// Grace is for how long an intruder must have been seen as one: what it
	// holds may become known later than its processes. Default 5 s.
	Grace time.Duration
	// Memory is for how long a doubt waits for the sample that confirms it.
	// Default 5 s.
	Memory time.Duration
}

func (p Policy) withDefaults() Policy {
	set := func(d *time.Duration, value time.Duration) {
		if *d <= 0 {
			*d = value
		}
	}
	if p.Percent <= 0 {
		p.Percent = 5
	}
	p.Least = cmp.Or(p.Least, 256*mib)
	p.Most = max(cmp.Or(p.Most, 1024*mib), p.Least)
	if p.Confirm <= 0 {
		p.Confirm = 2
	}
	set(&p.Spacing, 150*time.Millisecond)
	set(&p.Grace, 5*time.Second)
	set(&p.Memory, 5*time.Second)
	return p
}

// Limit returns the use that is tolerated under a cap, in bytes: the cap and the
// tolerance. None stays None.
func (p Policy) Limit(limit uint64) uint64 {
	p = p.withDefaults()
	part := limit / 100 * uint64(p.Percent)
	if limit/100 > None/uint64(p.Percent) {
		part = None
	}
	return plus(limit, min(max(part, p.Least), p.Most))
}

// Sample is one reading of one GPU.
type Sample struct {
	// At is when the driver was asked, by a clock that only goes forward.
	At time.Time
	// Tick is a moment after the driver's answer and before the first process
	// was looked up, in the unit of Process.Start. A process that began later
	// is not the one that the driver means by its PID. 0 where that is not
	// known: reused PIDs are then told apart by chance alone.
	Tick uint64
	GPU  gpu.UUID
	// Open says that anyone may use this GPU: there are no intruders on it.
	Open bool
	// Processes is what Merge returned, with the owners filled in.
	Processes []Process
}

// Allowance is how much of a GPU's memory a container may use. Several for one container
// and GPU add up; if one of them is None, so is their sum.
type Allowance struct {
	Container string
	GPU       gpu.UUID
	Cap       uint64 // bytes; None: all of it
	// Allocation is the ID of the allocation that has the cap. Containers of the same
	// one share its cap; see Party. Empty: the cap is the container's own.
	Allocation string
}

// Kind says what is wrong.
type Kind string

// Kinds of verdicts.
const (
	// Over: a container, or all that share its allocation together, have more than
	// the cap and the tolerance.
	Over Kind = "over"
	// Intruder: a container uses a GPU of which it holds nothing.
	Intruder Kind = "intruder"
)

// Verdict is an offence that is beyond doubt.
type Verdict struct {
	Kind      Kind
	Container string
	GPU       gpu.UUID
	// Cap and Limit, which is the cap and the tolerance, are in bytes, and 0
	// for an intruder. Used is what is known, in bytes, so at least that: of all that
	// share the allocation, of which the container itself has Own.
	Cap, Limit, Used, Own uint64
	// First is when the offence was first seen, and Told how often a verdict
	// on it was given before: 0 makes it news, more that it was not ended yet.
	First time.Time
	Told  int
	// Processes are the evidence, sorted; see Stands.
	Processes []Process
}

// Stands tells whether the evidence still holds for those of its processes that have not
// ended since: same tells which. It is the last question before a kill.
func (v Verdict) Stands(same func(Process) bool) bool {
	var used uint64
	alive := 0
	for _, p := range v.Processes {
		if !same(p) {
			continue
		}
		alive++
		if p.Known {
			used = plus(used, p.Bytes)
		}
	}
	if v.Kind == Over {
		return used > v.Limit
	}
	return alive > 0
}

// Lasts tells whether the processes that used too much still do, by a later list of the
// driver's as Merge returned it.
func (v Verdict) Lasts(now []Process) bool {
	var used uint64
	for _, p := range now {
		same := func(q Process) bool { return comparePlaces(p, q) == 0 }
		if p.Known && slices.ContainsFunc(v.Processes, same) {
			used = plus(used, p.Bytes)
		}
	}
	return used > v.Limit
}

// Judge turns samples into verdicts. It remembers doubts, no more than one for
// each party in the last sample of a GPU: a container, or those that share an allocation.
// It is safe for several goroutines.
type Judge struct {
	policy Policy

	mu   sync.Mutex // guards gpus
	gpus map[gpu.UUID]*card
}

// card is what is remembered of a GPU.
type card struct {
	at time.Time // of its last sample
	// listed has the PIDs of the last sample, each with the tick of the sample
	// with which its row of samples without a gap began.
	listed map[int]uint64
	doubts map[party]*doubt
}

// doubt is an offence that waits for its confirmation, or for its end.
type doubt struct {
	kind            Kind
	cap             uint64
	named           string // the container of the verdicts that were given
	first           time.Time
	counted, seen   time.Time // of the last sample that counted, and that showed it
	confirmed, told int
}

// NewJudge returns a judge that has seen nothing.
func NewJudge(p Policy) *Judge {
	return &Judge{policy: p.withDefaults(), gpus: map[gpu.UUID]*card{}}
}

// Judge takes in a sample and returns the offences on that GPU that are
// confirmed, sorted by container: again with each sample as long as they last.
//
// allowances must have all that a container holds of a GPU or nothing of it, and
// known must say of which containers they have all; any other container is not
// judged. A sample that could not be taken is left out; it speaks neither way.
func (j *Judge) Judge(s Sample, allowances []Allowance, known func(container string) bool) []Verdict {
	j.mu.Lock()
	defer j.mu.Unlock()
	c := j.gpus[s.GPU]
	if c == nil || s.At.Before(c.at) {
		c = &card{doubts: map[party]*doubt{}}
		j.gpus[s.GPU] = c
	}
	c.at = s.At

	whole := slices.DeleteFunc(slices.Clone(allowances), func(a Allowance) bool { return !known(a.Container) })
	uses := c.uses(s, Parties(s.GPU, whole))
	doubts := make(map[party]*doubt, len(uses))
	suspects := map[string]bool{}
	var verdicts []Verdict
	for i := range uses {
		u := &uses[i]
		if slices.ContainsFunc(u.seen, func(container string) bool { return suspects[container] }) {
			continue // they are over a smaller cap: when that is settled, this may be
		}
		d := c.doubts[u.party]
		if d != nil && (s.At.Sub(d.seen) > j.policy.Memory || d.named != "" && !u.has(d.named)) {
			d = nil // the one that it named is gone: what the others have is judged anew
		}
		if known(u.container()) {
			d = j.doubt(d, s, u)
		}
		if d == nil {
			continue
		}
		for _, container := range u.seen {
			suspects[container] = true
		}
		doubts[u.party] = d
		graced := d.kind == Over || s.At.Sub(d.first) >= j.policy.Grace
		if d.seen.Equal(s.At) && d.confirmed >= j.policy.Confirm && graced {
			if d.named == "" {
				d.named = u.offender(j.policy.Limit(d.cap))
			}
			v := Verdict{
				Kind: d.kind, Container: d.named, GPU: s.GPU, Used: u.used, Own: u.of(d.named),
				First: d.first, Told: d.told, Processes: u.evidence,
			}
			if d.kind == Over {
				v.Cap, v.Limit = d.cap, j.policy.Limit(d.cap)
			}
			d.told++
			verdicts = append(verdicts, v)
		}
	}
	c.doubts = doubts
	slices.SortFunc(verdicts, func(a, b Verdict) int { return cmp.Compare(a.Container, b.Container) })
	return verdicts
}

// Excuse ends the doubt that led to a verdict: a second look found that the offence was
// over.
func (j *Judge) Excuse(v Verdict) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if c := j.gpus[v.GPU]; c != nil {
		maps.DeleteFunc(c.doubts, func(_ party, d *doubt) bool { return d.named == v.Container })
	}
}

// doubt returns what to think of a party from this sample on, nil for nothing.
func (j *Judge) doubt(d *doubt, s Sample, u *use) *doubt {
	limit, holds := u.cap, u.holds
	kind := Over
	if !holds {
		kind = Intruder
	}
	if d != nil && (d.kind != kind || d.cap != limit) {
		d = nil // of another offence than this one could be
	}
	switch {
	case holds && u.used > j.policy.Limit(limit):
	case !holds && !s.Open && len(u.evidence) > 0:
	case u.unclear && (holds || !s.Open):
		return d
	default:
		return nil
	}
	if d == nil {
		return &doubt{kind: kind, cap: limit, first: s.At, counted: s.At, seen: s.At, confirmed: 1}
	}
	d.seen = s.At
	if s.At.Sub(d.counted) >= j.policy.Spacing {
		d.confirmed++
		d.counted = s.At
	}
	return d
}

// party is who answers for what is used: a container, or all of some allocations.
type party struct{ allocation, container string }

// use is what a party has in a sample.
type use struct {
	party
	cap      uint64
	holds    bool   // it has a cap: it is no intruder
	used     uint64 // a lower bound if unclear
	unclear  bool
	seen     []string  // its containers, sorted
	evidence []Process // sorted
}

// container is one of the party's: what holds for that holds for all.
func (u *use) container() string { return u.seen[0] }

func (u *use) has(container string) bool { return slices.Contains(u.seen, container) }

// of returns what is known that a container has.
func (u *use) of(container string) (bytes uint64) {
	for _, p := range u.evidence {
		if p.Container == container && p.Known {
			bytes = plus(bytes, p.Bytes)
		}
	}
	return bytes
}

// offender is the container with the largest excess of the driver's figure over its own
// count: whoever goes around the cap's library, or has none, and not whoever has much of
// what it counts. Counts that come to more than the limit together are false, since the
// library holds them to the cap; then, as where nobody counts, it is the one with the most
// memory, as the kernel chooses where a cgroup is out of it. Of equals it is the one whose
// latest process is the youngest.
func (u *use) offender(limit uint64) string {
	counted, youngest := map[string]uint64{}, map[string]uint64{}
	sum := uint64(0)
	for _, p := range u.evidence {
		counted[p.Container] = plus(counted[p.Container], p.Counted)
		sum = plus(sum, p.Counted)
		youngest[p.Container] = max(youngest[p.Container], p.Start)
	}
	excess := func(container string) uint64 {
		has := u.of(container)
		if sum > limit {
			return has
		}
		return has - min(has, counted[container])
	}
	return slices.MaxFunc(u.seen, func(a, b string) int {
		return cmp.Or(cmp.Compare(excess(a), excess(b)), cmp.Compare(youngest[a], youngest[b]), cmp.Compare(a, b))
	})
}

// uses returns who has how much in a sample, in the order of the parties, and notes which
// PIDs are listed. A container that is in no party answers for itself alone.
func (c *card) uses(s Sample, parties []Party) []use {
	listed := make(map[int]uint64, len(s.Processes))
	sorted := make([]Process, 0, len(s.Processes))
	for _, p := range s.Processes {
		since, ok := c.listed[p.PID]
		if !ok {
			since = s.Tick
		}
		listed[p.PID] = since
		if p.Container != "" {
			sorted = append(sorted, p)
		}
	}
	c.listed = listed
	slices.SortStableFunc(sorted, func(a, b Process) int {
		return cmp.Or(cmp.Compare(a.Container, b.Container), comparePlaces(a, b))
	})
	uses, of := make([]use, len(parties), len(parties)+1), map[string][]int{}
	for i := range parties {
		uses[i] = use{party: parties[i].key(), cap: parties[i].Cap, holds: true}
		for _, container := range parties[i].Containers {
			of[container] = append(of[container], i)
		}
	}
	for _, p := range sorted {
		if of[p.Container] == nil {
			of[p.Container] = []int{len(uses)}
			uses = append(uses, use{party: party{container: p.Container}})
		}
		// A PID that was listed before this process began was listed for
		// another, whose memory it may still be.
		since := listed[p.PID]
		other := p.Start == 0 || since > 0 && p.Start > since
		for _, i := range of[p.Container] {
			uses[i].add(p, other)
		}
	}
	return slices.DeleteFunc(uses, func(u use) bool { return len(u.seen) == 0 })
}

// add adds a process, or what is listed under the PID of another.
func (u *use) add(p Process, other bool) {
	if !u.has(p.Container) {
		u.seen = append(u.seen, p.Container)
	}
	if other {
		u.unclear = true
		return
	}
	u.evidence = append(u.evidence, p)
	if p.Known {
		u.used = plus(u.used, p.Bytes)
	} else {
		u.unclear = true
	}
}

// Offences remembers for an hour who was ended for an offence. The zero value
// remembers nobody. It is safe for several goroutines.
type Offences struct {
	mu sync.Mutex // guards by
	by map[string][]time.Time
}

const (
	// offenceMemory is for how long an offence counts.
	offenceMemory = time.Hour
	// maxOffences bounds what is remembered of one pod: nobody asks for more.
	maxOffences = 64
)

// Add notes an offence and returns how many that pod has now, this one and all
// of the last hour, at most 64. A pod is named by its UID: its containers change
// with each restart.
func (o *Offences) Add(pod string, at time.Time) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.by == nil {
		o.by = map[string][]time.Time{}
	}
	for name, times := range o.by {
		times = slices.DeleteFunc(times, func(t time.Time) bool { return at.Sub(t) >= offenceMemory })
		if o.by[name] = times; len(times) == 0 {
			delete(o.by, name)
		}
	}
	times := append(o.by[pod], at)
	if len(times) > maxOffences {
		times = slices.Delete(times, 0, len(times)-maxOffences)
	}
	o.by[pod] = times
	return len(times)
}
