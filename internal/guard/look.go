// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// scene is what one look finds on a GPU: its processes and their containers.
type scene struct {
	sample memcap.Sample
	sums   map[string]*sum    // by container ID
	owners map[int]node.Owner // by PID
	// whole is true if the container of every process is known.
	whole bool
	// together has the sum of all containers that count on an allocation's page, by the
	// allocation's key. homes has that key for each of these containers.
	together map[string]*sum
	homes    map[string]string
}

// examiner looks at GPUs. It belongs to Run's goroutine, with all its fields.
type examiner struct {
	driver      Driver
	allocations Allocations
	proc        Proc
	judge       *memcap.Judge
	log         *guardLog
	handler     handler
	limits      driverLimiter
	roster
	tallies tallies
	names   names
	shares  shares
	// seen is how many processes each container has on a GPU.
	seen map[place]int
}

// handler acts on offences, beside the looks. [offenceHandler] implements it.
type handler interface {
	lasts(ctx context.Context, u gpu.UUID, v memcap.Verdict) bool
	act(ctx context.Context, d *gpu.Device, c *node.Container, v memcap.Verdict, owners map[int]node.Owner)
	tell(c *node.Container, kind agentkube.EventType, reason, message string)
	tellNode(kind agentkube.EventType, reason, message string)
	forget(listed map[string]*node.Container)
	counts() (found, kills uint64)
	detaches() (done, not uint64)
}

// driverLimiter asks the driver to limit containers to their caps. [limits] implements it.
type driverLimiter interface {
	hold(ctx context.Context, at place, o node.Owner, bytes uint64, now time.Time)
	holds(at place) uint64
	learn(now time.Time) (news bool)
	renew(ctx context.Context, now time.Time) (news bool)
	started(key string, u gpu.UUID) (containers []string)
	forget(gone func(place) bool)
}

func (e *examiner) look(
	ctx context.Context, d *gpu.Device, held allocations, memory map[gpu.UUID]gpu.Memory,
) (f *finding, again bool) {
	metered := e.tallies.begin(d.UUID, time.Now())
	dctx, cancel := context.WithTimeout(ctx, driverTimeout)
	listed, err := e.driver.Processes(dctx, d.UUID)
	cancel()
	if err != nil {
		for p, t := range e.tallies.by {
			t.known = t.known && p.gpu != d.UUID
		}
		if !errors.Is(err, gpu.ErrTimeout) && !errors.Is(err, gpu.ErrNoDriver) && !errors.Is(err, gpu.ErrLost) {
			e.log.once("driver "+string(d.UUID), "cannot list the processes on a GPU; no container there is judged",
				"gpu", d.UUID, "err", err)
		}
		return nil, false
	}
	by, underMPS := e.shares.daemon(d.UUID)
	if underMPS {
		listed = by.withoutServers(listed)
	}
	var l Uninvited
	sc := e.census(d, listed, &l)
	// Without containers there is nothing to look up in the list.
	if len(sc.sums)+len(e.seen) > 0 && e.refresh(ctx, sc.sample.At, sc.sums) {
		e.handler.forget(e.containers)
	}

	var judged []memcap.Allowance // of containers that are not listed
	l.Unlisted, judged = e.unlisted(d, sc.sums, held, sc.sample.At)
	allowances, again := e.allowances(ctx, d, sc, held, &l)
	for at := range e.seen {
		if at.gpu == d.UUID {
			e.seen[at] = 0
			if t := sc.sums[at.container]; t != nil {
				e.seen[at] = t.procs
			}
		}
	}
	for at, t := range e.tallies.by {
		if at.gpu == d.UUID {
			t.take(sc.of(at.allocation))
		}
	}
	for _, key := range slices.Sorted(maps.Keys(metered)) {
		c := held[key]
		e.tallies.finish(page{key, d.UUID}, metered[key], sc, &e.roster, &e.names, c != nil && c.Owner == ledger.DRA)
	}
	allowances = append(allowances, judged...)
	slices.SortFunc(allowances, func(a, b memcap.Allowance) int { return strings.Compare(a.Container, b.Container) })
	f = &finding{Uninvited: l, users: sc.users(), presence: e.presence(sc)}
	e.count(d.UUID, sc, allowances)
	verdicts := e.judge.Judge(sc.sample, allowances, func(id string) bool {
		return e.knows(id, held) || slices.ContainsFunc(judged, func(h memcap.Allowance) bool {
			return h.Container == id
		})
	})
	for _, v := range verdicts {
		if v.Kind == memcap.Over && v.Told == 0 && !e.handler.lasts(ctx, d.UUID, v) {
			e.judge.Excuse(v)
			continue
		}
		if c := e.offender(place{v.Container, d.UUID}, held); c != nil {
			e.handler.act(ctx, d, c, v, sc.owners)
		}
	}
	sure := true
	if underMPS {
		f.daemon = by.print()
		var strangers int
		strangers, sure = e.judgeShares(ctx, d, &by, sc, held)
		f.Intruders += strangers
	}
	if m, known := memory[d.UUID]; known && len(verdicts) == 0 && !again && sure {
		f.baseline = e.newBaseline(d.UUID, m.Used, sc, held)
	}
	return f, again
}

// census finds the containers of the processes that the driver lists.
func (e *examiner) census(d *gpu.Device, listed []gpu.Process, l *Uninvited) *scene {
	sc := &scene{
		sums: map[string]*sum{}, owners: map[int]node.Owner{}, whole: true,
		together: map[string]*sum{}, homes: map[string]string{},
		sample: memcap.Sample{
			At: time.Now(), Tick: node.Ticks(), GPU: d.UUID,
			Open: e.allocations.Open(d.UUID), Processes: memcap.Merge(listed),
		},
	}
	add := func(id, podUID string, pid int, p *memcap.Process) {
		if sc.sums[id] == nil {
			sc.sums[id] = &sum{pid: pid, podUID: podUID, known: true}
		}
		sc.sums[id].add(p)
	}
	for i := range sc.sample.Processes {
		p := &sc.sample.Processes[i]
		o, err := e.proc.Container(p.PID)
		if p.Start = o.Start; err != nil {
			switch {
			case o.Start != 0 && o.PodUID != "":
				add(podOnly+o.PodUID, o.PodUID, 0, p) // in the pod's cgroup, but in no container that could be ended
			case o.Start != 0:
				l.NoPod++
			case !errors.Is(err, gpu.ErrNotFound):
				sc.whole = false
				e.log.once("process", "cannot find the container of a process; "+
					"what containers use is not known exactly", "gpu", d.UUID, "err", err)
			}
			continue
		}
		p.Container = o.ID
		sc.owners[p.PID] = o
		add(o.ID, o.PodUID, p.PID, p)
	}
	for _, s := range sc.sums {
		s.known = s.known && sc.whole
	}
	return sc
}

// add adds a container's sum to that of an allocation.
func (sc *scene) add(key string, s *sum) {
	if sc.together[key] == nil {
		sc.together[key] = &sum{known: sc.whole}
	}
	sc.together[key].bytes += s.bytes
	sc.together[key].known = sc.together[key].known && s.known
}

// home makes an allocation the one on whose page a container counts, and adds the container's sum.
func (sc *scene) home(key, container string, s *sum) {
	sc.homes[container] = key
	sc.add(key, s)
}

// users returns the allocation that each process counts for, by PID.
func (sc *scene) users() map[int]string {
	out := map[int]string{}
	for i := range sc.sample.Processes {
		p := &sc.sample.Processes[i]
		if key := sc.homes[p.Container]; p.Container != "" && key != "" {
			out[p.PID] = key
		}
	}
	return out
}

// of returns the sum of all containers that count on an allocation's page, by the driver's figures.
func (sc *scene) of(key string) *sum {
	if t := sc.together[key]; t != nil {
		return t
	}
	return &sum{known: sc.whole} // no process of theirs is on the GPU now
}

// allowances returns what the listed containers may have of a GPU. It also adds up what the
// containers of each allocation have, has the driver limit them, and opens the counters that are
// not open. again is true if it has opened any.
func (e *examiner) allowances(
	ctx context.Context, d *gpu.Device, sc *scene, held allocations, l *Uninvited,
) (allowances []memcap.Allowance, again bool) {
	for id, s := range sc.sums {
		c := e.containers[id]
		if c == nil {
			continue
		}
		at := place{id, d.UUID}
		if _, known := e.seen[at]; !known {
			e.seen[at] = 0
		}
		shares := e.holds(c, d.UUID, held)
		if len(shares) == 0 {
			for _, key := range e.keys(c) {
				sc.add(key, s) // the allocation has ended, or is not known yet
			}
			if !e.isOwn(c) && !c.CDIUnknown {
				l.Intruders += s.procs
			}
			continue
		}
		sc.home(shares[0].allocation, id, s)
		bytes := uint64(0)
		for _, has := range shares {
			bytes += min(has.bytes, lib.None-bytes)
			allowances = append(allowances, memcap.Allowance{
				Container: id, GPU: d.UUID, Cap: has.bytes, Allocation: has.allocation,
			})
			again = e.tallies.open(page{has.allocation, d.UUID}, sc.sample.At) || again
		}
		e.limits.hold(ctx, at, sc.owners[s.pid], bytes, sc.sample.At)
	}
	return allowances, again
}

// count fills in what processes count for themselves, for containers that share a cap and together
// have more than it: the judge then names one of them. If that cannot be found out, all counts stay
// zero.
func (e *examiner) count(u gpu.UUID, sc *scene, allowances []memcap.Allowance) {
	homes := map[string]bool{}
	for _, p := range memcap.Parties(u, allowances) {
		used := uint64(0)
		for _, id := range p.Containers {
			used += sc.sums[id].bytes
		}
		for _, id := range p.Containers {
			if len(p.Containers) > 1 && used > p.Cap {
				homes[sc.homes[id]] = true
			}
		}
	}
	for key := range homes {
		if t := e.tallies.by[page{key, u}]; t != nil && t.meter != nil {
			e.countOf(sc, t.meter, func(container string) bool { return sc.homes[container] == key })
		}
	}
}

// countOf fills in what the processes of containers count on a page.
func (e *examiner) countOf(sc *scene, meter Meter, has func(container string) bool) {
	names, counted := map[int]lib.Process{}, map[lib.Process]uint64{}
	for i := range sc.sample.Processes {
		p := &sc.sample.Processes[i]
		if p.Container == "" || !has(p.Container) {
			continue
		}
		name, err := e.names.of(p.PID, p.Start)
		if errors.Is(err, gpu.ErrNotFound) {
			return // the process has ended, and the next sample lacks it
		}
		if err != nil {
			e.log.once("inside", "cannot find out what each process counts; "+
				"of containers that share an allocation, the watchdog ends the one with the most memory", "err", err)
			return
		}
		names[p.PID] = name
		counted[name] = 0
	}
	if err := meter.Counted(counted); err != nil {
		return // the next reading fails with it, too
	}
	for i := range sc.sample.Processes {
		p := &sc.sample.Processes[i]
		if name, ok := names[p.PID]; ok {
			p.Counted = counted[name]
			delete(names, p.PID) // the driver lists it once for each instance; this count is for all of them
		}
	}
}

func (e *examiner) learn(ctx context.Context, now time.Time) (news bool) {
	news = e.limits.learn(now)
	return e.limits.renew(ctx, now) || news
}

func (e *examiner) counts() (found, kills uint64) { return e.handler.counts() }

func (e *examiner) detaches() (done, not uint64) { return e.handler.detaches() }

func (e *examiner) daemon(u gpu.UUID) string {
	d, ok := e.shares.daemon(u)
	if !ok {
		return ""
	}
	return d.print()
}

func (e *examiner) listen(now time.Time) <-chan time.Time { return e.tallies.listen(now) }

func (e *examiner) forget(offered func(gpu.UUID) bool) {
	gone := func(p place) bool { return e.containers[p.container] == nil || !offered(p.gpu) }
	maps.DeleteFunc(e.seen, func(p place, _ int) bool { return gone(p) })
	e.limits.forget(gone)
	maps.DeleteFunc(e.shares.held, func(p page, _ compute.Held) bool { return len(e.of[p.allocation]) == 0 || !offered(p.gpu) })
	maps.DeleteFunc(e.missing, func(p place, _ *unlistedContainer) bool { return !offered(p.gpu) })
	for p, t := range e.tallies.by {
		if len(e.of[p.allocation]) == 0 || !offered(p.gpu) {
			t.close()
			delete(e.tallies.by, p)
		}
	}
}

// sum is what a container's processes have together on a GPU.
type sum struct {
	pid    int // of one of them; 0 if they are in no container
	podUID string
	bytes  uint64
	known  bool // false if a figure is missing
	procs  int
}

func (s *sum) add(p *memcap.Process) {
	s.procs++
	s.bytes += p.Bytes
	s.known = s.known && p.Known
}
