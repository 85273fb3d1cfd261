// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// Container is what one container has of one GPU.
type Container struct {
	ledger.Holder
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
	// its own counters.
	Refusals uint64
	// Uncounted is how many allocations of a kind that the library does not know have
	// passed it under the open policy, and Undone the most in bytes that a memory pool
	// has taken beyond the cap and given back at once; also by the library's own counters.
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
func (g *Guard) publish(gpus []gpu.Device, held allocations) {
	st := &State{Intruders: map[gpu.UUID]int{}, Strangers: map[gpu.UUID]int{}, Unlisted: map[gpu.UUID]int{}, Found: g.hand.found.Load(), Kills: g.hand.kills.Load()}
	for i := range gpus {
		u := gpus[i].UUID
		st.Intruders[u], st.Strangers[u], st.Unlisted[u] = g.last[u].intruders, g.last[u].strangers, g.last[u].unlisted
	}
	st.Containers = containers(gpus, held, g.describe)
	g.state.Store(st)
}

// unseen is the state of a guard that does not run.
func (g *Guard) unseen(off string) *State {
	return &State{Off: off, Containers: containers(g.w.Allocations.Offered(), g.held(), func(c Container) Container {
		c.Known = false
		return c
	})}
}

// containers lists who may have something of the GPUs: what they were granted, with
// what seen adds to it.
func containers(gpus []gpu.Device, held allocations, seen func(granted Container) Container) []Container {
	var out []Container
	for i := range gpus {
		d := &gpus[i]
		for key, claim := range held {
			bytes, ok := held.on(key, d.UUID)
			if !ok {
				continue
			}
			c := Container{Holder: claim.Holder, Claim: key, GPU: d.UUID, Index: d.Index, Cap: bytes, Known: true, Level: memcap.API}
			if bytes == lib.None {
				c.Level = memcap.Hardware
			}
			out = append(out, seen(c))
		}
	}
	slices.SortFunc(out, func(a, b Container) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), strings.Compare(a.Namespace, b.Namespace),
			strings.Compare(a.Name, b.Name), strings.Compare(a.Holder.Container, b.Holder.Container), strings.Compare(a.Claim, b.Claim))
	})
	return out
}

// describe adds to what a claim's containers were granted on a GPU what is known of them.
func (g *Guard) describe(c Container) Container {
	t := g.tallies.by[page{c.Claim, c.GPU}]
	if t != nil {
		c.Used, c.Peak, c.Known = t.used, t.peak, t.known
		c.Refusals, c.Uncounted, c.Undone = t.reading.Refusals, t.reading.Uncounted, t.reading.Undone
	}
	var levels []memcap.Level // of those that have been seen on it
	for _, in := range g.of[c.Claim] {
		if in.Running || c.Holder.Container == "" {
			c.Holder = ledger.Holder{Pod: in.InPod(), Container: in.Name}
		}
		if g.strayed(in.PodUID, c.GPU) {
			// Some of what its pod has may be this container's.
			c.Known = false
			levels = append(levels, memcap.Watchdog)
		}
		s := g.seen[place{in.ID, c.GPU}]
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
