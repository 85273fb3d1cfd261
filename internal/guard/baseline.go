// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"time"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// baselineFor is how long after a look that found all in order the guard only checks whether
// anything has changed on the GPU. Without a cap on the GPU it does so for baselineIdleFor: there it
// can only find an intruder, and an intruder uses memory.
const (
	baselineFor     = 5 * time.Second
	baselineIdleFor = time.Minute
)

// baseline describes a GPU at a look that found all in order: every container was within its cap, by
// the driver's figures and by exact counters. As long as the same amount of memory is used and no
// counter has changed, a look would find nothing new. Most processes take their memory once and
// keep it.
//
// Two cases are found late. A container may take exactly what another frees, both past their
// counters and between two looks: the guard sees it after baselineFor. An intruder may take exactly
// what another process frees: the guard sees it after baselineIdleFor.
type baseline struct {
	at   time.Time
	used gpu.MiB
	caps map[string]uint64 // bytes by allocation, of those with processes there; lib.None if uncapped
}

// unchanged reports whether a GPU is as it was when all was in order: as much memory is used, and no
// cap and no counter has changed. capped is true if there is a cap on the GPU.
func (g *Guard) unchanged(
	u gpu.UUID, capped bool, held allocations, memory map[gpu.UUID]gpu.Memory, now time.Time,
) bool {
	trusted := baselineIdleFor
	if capped || g.allocations.Lends(u) {
		trusted = baselineFor
	}
	f := g.found[u]
	if f == nil || f.baseline == nil || f.daemon != g.examiner.daemon(u) {
		return false
	}
	c := f.baseline
	if m, known := memory[u]; !known || m.Used != c.used || now.Sub(c.at) >= trusted {
		return false
	}
	for key, bytes := range c.caps {
		if has, ok := held.on(key, u); !ok || has != bytes {
			return false
		}
	}
	return g.examiner.unmoved(u)
}

func (e *examiner) unmoved(u gpu.UUID) bool {
	for p, t := range e.tallies.by {
		if p.gpu != u || t.meter == nil {
			continue
		}
		if moved, err := t.meter.Moved(t.reading); err != nil || moved {
			return false
		}
	}
	return true
}

// newBaseline returns what a look found if all was in order, and nil if not: how much of the GPU was
// used, and the cap of each allocation that has containers there.
func (e *examiner) newBaseline(u gpu.UUID, used gpu.MiB, sc *scene, held allocations) *baseline {
	for i := range sc.sample.Processes {
		if sc.sample.Processes[i].Start == 0 {
			return nil // it ended during the look
		}
	}
	caps := map[string]uint64{}
	for id := range sc.sums {
		c := e.containers[id]
		if c == nil {
			return nil
		}
		if e.isOwn(c) {
			continue
		}
		shares := e.holds(c, u, held)
		if len(shares) == 0 {
			return nil
		}
		for _, s := range shares {
			caps[s.allocation] = s.bytes
		}
	}
	for key, bytes := range caps {
		if bytes == lib.None {
			continue
		}
		all, t := sc.of(key), e.tallies.by[page{key, u}]
		if !all.known || all.bytes > bytes || t == nil || t.meter == nil || !t.reading.Quiet || t.reading.Used > bytes {
			return nil
		}
	}
	return &baseline{at: sc.sample.At, used: used, caps: caps}
}
