// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/desk"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// Container is what one container has of one GPU.
type Container struct {
	desk.Holder
	Claim string
	GPU   gpu.UUID
	Index int
	// Cap is in bytes, lib.None for a whole GPU.
	Cap uint64
	// Used and Peak are in bytes: what counts towards the cap, as last seen and at
	// most so far. Known is false where nobody can say.
	Used, Peak uint64
	Known      bool
	Level      memcap.Level
	// Refusals is how many allocations the container's own library has refused, by
	// its own word.
	Refusals uint64
	// Uncounted is how many allocations of a kind that the library does not know have
	// passed it under the open policy, and Undone the most in bytes that a memory pool
	// has taken beyond the cap and given back at once; also by the library's own word.
	Uncounted, Undone uint64

	Processes int
}

// State is what the guard last saw. It is immutable.
type State struct {
	// Off is why the guard does not run, empty where it does.
	Off string
	// Containers has the claims that somebody has, in order of GPU index, then
	// holder.
	Containers []Container
	// Intruders, Strangers and Unlisted are how many processes of containers without
	// a claim, of no pod, and of containers that the runtime does not list, are on
	// each GPU now.
	Intruders, Strangers, Unlisted map[gpu.UUID]int
	// Kills is how many containers were ended since the start, and Found how many
	// intruders were found.
	Kills, Found uint64
}

// publish makes what was seen the state.
func (g *Guard) publish(gpus []gpu.Device, holders map[string]holder) {
	st := &State{Intruders: map[gpu.UUID]int{}, Strangers: map[gpu.UUID]int{}, Unlisted: map[gpu.UUID]int{}, Found: g.found}
	g.mu.Lock()
	st.Kills = g.kills
	g.mu.Unlock()
	for i := range gpus {
		u := gpus[i].UUID
		st.Intruders[u], st.Strangers[u], st.Unlisted[u] = g.last[u].intruders, g.last[u].strangers, g.last[u].unlisted
	}
	st.Containers = containers(gpus, holders, func(d *gpu.Device, key string, h holder, l lib.Limit) Container {
		return g.describe(d, key, h.claim, l)
	})
	g.state.Store(st)
}

// unseen is the state of a guard that does not run.
func (g *Guard) unseen(off string) *State {
	return &State{Off: off, Containers: containers(g.w.House.Offered(), g.holders(), func(d *gpu.Device, key string, h holder, l lib.Limit) Container {
		c := granted(d, key, h.claim, l)
		c.Known = false
		return c
	})}
}

// containers lists who may have something of the GPUs, as one describes them.
func containers(gpus []gpu.Device, holders map[string]holder, describe func(*gpu.Device, string, holder, lib.Limit) Container) []Container {
	var out []Container
	for i := range gpus {
		for key, h := range holders {
			for _, l := range h.caps {
				if l.GPU == gpus[i].UUID {
					out = append(out, describe(&gpus[i], key, h, l))
				}
			}
		}
	}
	slices.SortFunc(out, func(a, b Container) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), strings.Compare(a.Namespace, b.Namespace),
			strings.Compare(a.Pod, b.Pod), strings.Compare(a.Holder.Container, b.Holder.Container), strings.Compare(a.Claim, b.Claim))
	})
	return out
}

// granted is a claim on a GPU of which nobody has used anything.
func granted(d *gpu.Device, key string, claim *desk.Claim, l lib.Limit) Container {
	c := Container{Holder: claim.Holder, Claim: key, GPU: d.UUID, Index: d.Index, Cap: l.Bytes, Known: true, Level: memcap.API}
	if l.Bytes == lib.None {
		c.Level = memcap.Hardware
	}
	return c
}

// describe is a claim on a GPU as people see it.
func (g *Guard) describe(d *gpu.Device, key string, claim *desk.Claim, l lib.Limit) Container {
	c := granted(d, key, claim, l)
	t := g.tallies[page{key, d.UUID}]
	if t != nil {
		c.Used, c.Peak, c.Known = t.used, t.peak, t.known
		c.Refusals, c.Uncounted, c.Undone = t.reading.Refusals, t.reading.Uncounted, t.reading.Undone
	}
	var levels []memcap.Level // of those that have been seen on it
	for _, in := range g.of[key] {
		if in.Running || c.Holder.Container == "" {
			c.Holder = desk.Holder{Namespace: in.Namespace, Pod: in.Pod, Container: in.Name}
		}
		if g.strayed(in.PodUID, d.UUID) {
			// Some of what its pod has may be this container's.
			c.Known = false
			levels = append(levels, memcap.Watchdog)
		}
		s := g.seen[place{in.ID, d.UUID}]
		if s == nil {
			continue
		}
		c.Processes += s.procs
		if in.Running || s.procs > 0 {
			levels = append(levels, s.level(t, c.Cap))
		}
	}
	if len(levels) > 0 && c.Cap != lib.None {
		c.Level = weakest(levels)
	}
	return c
}
