// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"time"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// calmFor is for how long a GPU on which all was in order is only asked whether
// anything has changed. Where nobody has a cap it is asked for so long as calmIdle: there
// is only an intruder to be found, and whoever comes to a GPU uses memory of it.
const (
	calmFor  = 5 * time.Second
	calmIdle = time.Minute
)

// calm is what a look found of a GPU on which all was in order: everybody within
// a cap, by the driver's figures and by exact counters. As long as the same amount of
// its memory is used and no counter has changed, there is nothing to find; and most
// processes take their memory once and keep it. A container that takes exactly what
// another frees, both past their counters and between two looks, is found when calmFor
// is over, and an intruder who takes exactly what another process frees when calmIdle is.
type calm struct {
	at   time.Time
	used gpu.MiB
	caps map[string]uint64 // by allocation, of those who have memory there
}

// still reports whether a GPU is as it was when all was in order, by its memory of this
// moment; capped says that somebody has a cap on it.
func (g *Guard) still(
	u gpu.UUID, capped bool, held allocations, memory map[gpu.UUID]gpu.Memory, now time.Time,
) bool {
	trusted := calmIdle
	if capped {
		trusted = calmFor
	}
	f := g.found[u]
	if f == nil || f.calm == nil {
		return false
	}
	c := f.calm
	if m, known := memory[u]; !known || m.Used != c.used || now.Sub(c.at) >= trusted {
		return false
	}
	for key, bytes := range c.caps {
		if has, ok := held.on(key, u); !ok || has != bytes {
			return false
		}
	}
	return g.eye.unmoved(u)
}

func (e *eye) unmoved(u gpu.UUID) bool {
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

// settle tells whether all was in order at a look: how much of the GPU was used,
// who they are, and what each allocation's containers have. It is nil if not.
func (e *eye) settle(u gpu.UUID, used gpu.MiB, sc *scene, held allocations) *calm {
	for i := range sc.sample.Processes {
		if sc.sample.Processes[i].Start == 0 {
			return nil // it went while it was looked at
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
	return &calm{at: sc.sample.At, used: used, caps: caps}
}
