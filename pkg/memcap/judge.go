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

// Policy decides when use beyond a cap is an offence. A zero field means its default.
type Policy struct {
	// Percent of the cap is tolerated beyond it, but at least Least and at most Most bytes. The
	// driver rounds, and a context may cost more than was reserved for it. Defaults: 5, 256 MiB and
	// 1 GiB.
	Percent     int
	Least, Most uint64
	// Confirm is how many samples in a row must show an offence. Each counts only if it is at least
	// Spacing after the last one that counted. Defaults: 2 and 150 ms.
	Confirm int
	Spacing time.Duration
	// Grace is how long a container must have been an intruder: its allocation may become known
	// later than its processes. Default: 5 s.
	Grace time.Duration
	// Memory is how long a doubt waits for the sample that confirms it. Default: 5 s.
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

// Limit returns how many bytes are tolerated under a cap: the cap and the tolerance. None stays
// None.
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
	// At is when the driver was asked, by a monotonic clock.
	At time.Time
	// Tick is a moment after the driver's answer and before the first process was looked up, in
	// ticks as Process.Start. A process that began later is not the one that the driver meant by
	// its PID. 0 means unknown: then the judge may take a reused PID for the process that had it
	// before.
	Tick uint64
	GPU  gpu.UUID
	// Open is true if any container may use this GPU, so that it has no intruders.
	Open bool
	// Processes is what Merge returned, with Start and Container filled in.
	Processes []Process
}

// Allowance is how much of a GPU's memory a container may use. Several for one container and GPU
// add up; if one of them is None, so is their sum.
type Allowance struct {
	Container string
	GPU       gpu.UUID
	Cap       uint64 // bytes; None: all of the GPU
	// Allocation is the ID of the allocation that has the cap. Containers with the same allocation
	// share its cap; see Party. Empty means that the cap is the container's own.
	Allocation string
}

// Kind is what an offence consists of.
type Kind string

// Kinds of verdicts.
const (
	// Over: a container, or all that share its allocation together, have more than the cap and the
	// tolerance.
	Over Kind = "over"
	// Intruder: a container uses a GPU although it holds nothing of it.
	Intruder Kind = "intruder"
)

// Verdict is a confirmed offence.
type Verdict struct {
	Kind      Kind
	Container string
	GPU       gpu.UUID
	// Cap is the cap, and Limit the cap and the tolerance, in bytes; both are 0 for an intruder.
	// Used is the known memory of all that share the allocation, and Own that of the container
	// itself, in bytes. Both may have more.
	Cap, Limit, Used, Own uint64
	// First is when the offence was first seen. Told is how many verdicts on it were given before.
	// If it is not 0, the container has not been ended yet.
	First time.Time
	Told  int
	// What is what an intruder does, for people, if another judge has found it; empty if it has no
	// allocation.
	What string
	// Processes are the evidence, sorted; see Stands.
	Processes []Process
}

// Stands reports whether the evidence still holds by the processes that have not ended: same
// reports whether a process is still the same one. Callers ask this last before they end a
// container.
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

// Lasts reports whether the processes that used too much still do, by a later list of the driver,
// as Merge returned it.
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

// Judge turns samples into verdicts. For each GPU it remembers at most one doubt for each party in
// the last sample. A party is a container, or those that share an allocation. A Judge is safe for
// several goroutines.
type Judge struct {
	policy Policy

	mu   sync.Mutex // guards gpus
	gpus map[gpu.UUID]*gpuState
}

// gpuState is what the judge remembers of a GPU.
type gpuState struct {
	at time.Time // of its last sample
	// listed has the PIDs of the last sample. Its values are ticks: that of the first sample of the
	// row of samples, up to the last one, which all list the PID.
	listed map[int]uint64
	doubts map[party]*doubt
}

// doubt is an offence that is not confirmed yet, or that is confirmed and has not ended.
type doubt struct {
	kind            Kind
	cap             uint64
	named           string // container in the verdicts; empty if there are none
	first           time.Time
	counted, seen   time.Time // when the last sample counted, and when the last one showed it
	confirmed, told int
}

// NewJudge returns a judge that has seen nothing.
func NewJudge(p Policy) *Judge {
	return &Judge{policy: p.withDefaults(), gpus: map[gpu.UUID]*gpuState{}}
}

// Judge takes in a sample. It returns the confirmed offences on the sample's GPU, sorted by
// container. It returns an offence again with each sample as long as it lasts.
//
// allowances must have all that a container holds of the GPU, or nothing of it. known must report
// whether they have all of a container; others are not judged. The caller leaves out a sample that
// failed, which then neither confirms a doubt nor ends it.
func (j *Judge) Judge(s Sample, allowances []Allowance, known func(container string) bool) []Verdict {
	j.mu.Lock()
	defer j.mu.Unlock()
	c := j.gpus[s.GPU]
	if c == nil || s.At.Before(c.at) {
		c = &gpuState{doubts: map[party]*doubt{}}
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
			continue // one of them is suspected under a smaller cap: settle that first
		}
		d := c.doubts[u.party]
		if d != nil && (s.At.Sub(d.seen) > j.policy.Memory || d.named != "" && !u.has(d.named)) {
			d = nil // the named one is gone: judge the others anew
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

// Excuse drops the doubt that led to a verdict. The caller uses it if a second look shows that the
// offence is over.
func (j *Judge) Excuse(v Verdict) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if c := j.gpus[v.GPU]; c != nil {
		maps.DeleteFunc(c.doubts, func(_ party, d *doubt) bool { return d.named == v.Container })
	}
}

// doubt returns the doubt about a party after this sample, or nil if there is none.
func (j *Judge) doubt(d *doubt, s Sample, u *use) *doubt {
	limit, holds := u.cap, u.holds
	kind := Over
	if !holds {
		kind = Intruder
	}
	if d != nil && (d.kind != kind || d.cap != limit) {
		d = nil // it was about another offence
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

// party identifies a Party: by its container, or by its allocations.
type party struct{ allocation, container string }

// use is what a party has in a sample.
type use struct {
	party
	cap      uint64
	holds    bool   // it has a cap, so it is no intruder
	used     uint64 // bytes; a lower bound if unclear
	unclear  bool
	seen     []string  // its containers that have processes, sorted
	evidence []Process // sorted
}

// container returns one of the party's containers. Callers use it for what is true of all of them.
func (u *use) container() string { return u.seen[0] }

func (u *use) has(container string) bool { return slices.Contains(u.seen, container) }

// of returns the known memory of a container, in bytes.
func (u *use) of(container string) (bytes uint64) {
	for _, p := range u.evidence {
		if p.Container == container && p.Known {
			bytes = plus(bytes, p.Bytes)
		}
	}
	return bytes
}

// offender returns the container with the largest excess of the driver's figure over its own count.
// So it names one that goes around the cap's library or has none, and not one that counts much.
//
// If the counts together exceed the limit, they are false, since the library keeps their sum within
// the cap. Then, and if there are no counts, it returns the container with the most memory, as the
// kernel does in a cgroup that runs out of memory. Among equals it returns the one that has the
// youngest process.
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

// uses returns how much each party has in a sample, in the order of the parties, and notes which
// PIDs are listed. A container that is in no party gets a party of its own.
func (c *gpuState) uses(s Sample, parties []Party) []use {
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
		// A PID that was listed before this process began was listed for another process. The
		// figure may still be that one's memory.
		since := listed[p.PID]
		other := p.Start == 0 || since > 0 && p.Start > since
		for _, i := range of[p.Container] {
			uses[i].add(p, other)
		}
	}
	return slices.DeleteFunc(uses, func(u use) bool { return len(u.seen) == 0 })
}

// add adds a process. other is true if its figure belongs to another process with the same PID.
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

// Offences remembers for an hour which pods had a container ended for an offence. The zero value is
// empty and ready for use. It is safe for several goroutines.
type Offences struct {
	mu sync.Mutex // guards by
	by map[string][]time.Time
}

const (
	// offenceMemory is how long an offence counts.
	offenceMemory = time.Hour
	// maxOffences is how many offences are remembered of one pod at most.
	maxOffences = 64
)

// Add notes an offence of a pod. It returns how many the pod has had within the last hour, with
// this one, at most 64. Pods are named by UID, since their containers change with each restart.
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
