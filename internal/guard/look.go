// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
)

// look looks at one GPU. It reports whether it should be done again at once.
func (g *Guard) look(ctx context.Context, d *gpu.Device, holders map[string]holder) (again bool) {
	metered := map[string]*sight{}
	for p, s := range g.seen {
		if p.gpu != d.UUID || s.meter == nil {
			continue
		}
		if err := s.meter.Begin(); err != nil {
			g.once("meter "+p.container, "cannot read a container's counters; what it has is taken from the driver", "container", p.container, "err", err)
			continue
		}
		metered[p.container] = s
	}
	dctx, cancel := context.WithTimeout(ctx, driverPatience)
	listed, err := g.w.Driver.Processes(dctx, d.UUID)
	cancel()
	if err != nil {
		if !errors.Is(err, gpu.ErrTimeout) && !errors.Is(err, gpu.ErrNoDriver) && !errors.Is(err, gpu.ErrLost) {
			g.once("driver "+string(d.UUID), "cannot list the processes on a GPU; nobody there is judged", "gpu", d.UUID, "err", err)
		}
		return false
	}
	sample := memcap.Sample{At: time.Now(), Tick: node.Ticks(), GPU: d.UUID, Processes: memcap.Merge(listed)}
	sums, owners := map[string]*sum{}, map[int]node.Owner{}
	var l look
	for i := range sample.Processes {
		p := &sample.Processes[i]
		o, err := g.w.Proc.Container(p.PID)
		if p.Start = o.Start; err != nil {
			if o.Start != 0 {
				l.strangers++
			}
			continue
		}
		p.Container = o.ID
		owners[p.PID] = o
		s := sums[o.ID]
		if s == nil {
			s = &sum{pid: p.PID, known: true}
			sums[o.ID] = s
		}
		s.add(p)
	}
	g.refresh(ctx, sample.At, sums)

	var holdings []memcap.Holding
	for id, s := range sums {
		c := g.containers[id]
		if c == nil {
			continue
		}
		key, bytes, held := g.holds(c, d.UUID, holders)
		if held {
			holdings = append(holdings, memcap.Holding{Container: id, GPU: d.UUID, Cap: bytes})
		} else if !g.isOwn(c) {
			l.intruders += s.procs
		}
		at := place{id, d.UUID}
		if g.seen[at] == nil {
			g.seen[at] = &sight{}
		}
		if held {
			g.limit(ctx, at, owners[s.pid], bytes, sample.At)
		}
		if held && g.open(at, key, s, sample.At) {
			again = true
		}
	}
	for at, s := range g.seen {
		if at.gpu == d.UUID {
			s.take(sums[at.container])
		}
	}
	for _, id := range slices.Sorted(maps.Keys(metered)) {
		s, t := metered[id], sums[id]
		if t == nil {
			t = &sum{known: true} // no process of it is on the GPU any more
		}
		r, err := s.meter.End(t.bytes, t.known)
		if err != nil {
			g.once("meter "+id, "cannot read a container's counters; what it has is taken from the driver", "container", id, "err", err)
			continue
		}
		s.reading = r
		if t.known {
			s.used, s.peak = r.Used, max(s.peak, r.Used)
		}
		if r.Context != 0 {
			g.w.Pages.Learn(d.UUID, r.Context)
		}
	}
	slices.SortFunc(holdings, func(a, b memcap.Holding) int { return strings.Compare(a.Container, b.Container) })
	g.last[d.UUID] = l
	knows := func(id string) bool { return g.knows(id, holders) }
	for _, v := range g.judge.Judge(sample, holdings, knows) {
		g.act(ctx, d, v, owners)
	}
	return again
}

// sum is what a container's processes have together.
type sum struct {
	pid   int // one of them
	bytes uint64
	known bool // no figure is missing
	procs int
}

func (s *sum) add(p *memcap.Process) {
	s.procs++
	s.bytes += p.Bytes
	s.known = s.known && p.Known
}

// take notes what the driver says of a container; nil is nothing.
func (s *sight) take(t *sum) {
	if t == nil {
		t = &sum{known: true}
	}
	s.used, s.known, s.procs = t.bytes, t.known, t.procs
	s.peak = max(s.peak, s.used)
}

// open looks for a container's counters, if there are none open, and reports
// whether it has found some.
func (g *Guard) open(at place, key string, t *sum, now time.Time) bool {
	s := g.seen[at]
	if s.meter != nil || now.Sub(s.sought) < pageEvery {
		return false
	}
	first := s.sought.IsZero()
	s.sought = now
	m, err := g.w.Pages.Meter(key, at.gpu, t.pid)
	switch {
	case err == nil:
		s.meter, s.missing = m, false
		return true
	case errors.Is(err, gpu.ErrNotFound):
		// It has memory and no counters: it goes round the library, or had been
		// started before there was one. In its first moments it may be about to
		// make them.
		s.missing = !first && t.bytes > 0
	default:
		s.missing = true
		g.once("open "+at.container, "cannot open a container's counters; the watchdog alone holds it", "container", at.container, "err", err)
	}
	return false
}

// refresh has the list of containers again where it is old, or lacks one that was
// seen.
func (g *Guard) refresh(ctx context.Context, now time.Time, sums map[string]*sum) {
	if len(sums) == 0 && len(g.seen) == 0 {
		return // there is nobody to know anything of
	}
	age := now.Sub(g.listed)
	missing := false
	for id := range sums {
		missing = missing || g.containers[id] == nil
	}
	if age < listSoon || age < listEvery && !missing {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, runtimePatience)
	defer cancel()
	list, err := g.w.Runtime.Containers(ctx)
	if err != nil {
		g.listed = now.Add(listSoon - listEvery) // again soon, and not at every look
		return
	}
	g.listed = now
	g.containers = make(map[string]*node.Container, len(list))
	for i := range list {
		g.containers[list[i].ID] = &list[i]
	}
}

// knows says whether all that a container holds is known: it is listed, and so is
// each of its claims, among those that its caps were taken from.
func (g *Guard) knows(id string, holders map[string]holder) bool {
	c := g.containers[id]
	if c == nil || g.isOwn(c) {
		return false
	}
	for _, key := range g.keys(c) {
		h, ok := holders[key]
		if !ok || len(h.caps) != len(h.claim.GPUs) {
			return false
		}
	}
	return true
}

func (g *Guard) isOwn(c *node.Container) bool {
	return g.opts.Own != (node.PodName{}) && c.Namespace == g.opts.Own.Namespace && c.Pod == g.opts.Own.Name
}

// keys are the claims that a container was given, in order.
func (g *Guard) keys(c *node.Container) []string {
	var out []string
	for name := range c.Annotations {
		if key, ok := strings.CutPrefix(name, g.prefix); ok && cdi.ValidKey(key) {
			out = append(out, key)
		}
	}
	slices.Sort(out)
	return out
}

// holds says what a container may have of a GPU, and by which claim.
func (g *Guard) holds(c *node.Container, u gpu.UUID, holders map[string]holder) (key string, bytes uint64, held bool) {
	for _, k := range g.keys(c) {
		for _, l := range holders[k].caps {
			if l.GPU == u && (!held || l.Bytes > bytes) {
				key, bytes, held = k, l.Bytes, true
			}
		}
	}
	return key, bytes, held
}
