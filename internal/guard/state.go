// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// State is what the guard last saw. It is immutable.
type State struct {
	// Off is why the guard does not run, empty where it does.
	Off string
	// Containers has the allocations on each GPU, in order of GPU index, then holder.
	Containers []status.Container
	// On has who is on a GPU without an allocation.
	On map[gpu.UUID]Uninvited
	// Kills is how many containers were ended since the start, and Found how many
	// intruders were found.
	Kills, Found uint64

	// users are the allocations that processes count for, by GPU and PID, as of each GPU's
	// last look. The inner maps are not changed but replaced.
	users map[gpu.UUID]map[int]string
}

// Uninvited is how many processes are on a GPU now that are of containers without an
// allocation on it, of no pod, and of containers that the runtime does not list.
type Uninvited struct {
	Intruders, NoPod, Unlisted int
}

// publish makes what was seen the state.
func (g *Guard) publish(gpus []gpu.Device, held allocations) {
	st := &State{On: map[gpu.UUID]Uninvited{}, users: map[gpu.UUID]map[int]string{}}
	st.Found, st.Kills = g.eye.counts()
	for i := range gpus {
		st.On[gpus[i].UUID] = Uninvited{}
	}
	for u, f := range g.found {
		if _, given := st.On[u]; given {
			st.On[u] = f.Uninvited
		}
		if f.users != nil {
			st.users[u] = f.users
		}
	}
	st.Containers = containers(gpus, held, g.eye.describe)
	g.state.Store(st)
}

// containers lists who may have something of the GPUs, with what seen adds of an
// allocation that allows so many bytes.
func containers(
	gpus []gpu.Device, held allocations, seen func(c *status.Container, u gpu.UUID, bytes uint64),
) []status.Container {
	var out []status.Container
	for i := range gpus {
		d := &gpus[i]
		for key, a := range held {
			bytes, ok := held.on(key, d.UUID)
			if !ok {
				continue
			}
			c := status.Container{
				Allocation: key, GPU: string(d.UUID), Index: d.Index, Guarantee: string(memcap.Hardware),
			}
			name(&c, &a.Holder)
			if bytes != lib.None {
				c.CapMiB, c.Guarantee = new(mib(bytes)), string(memcap.API)
			}
			seen(&c, d.UUID, bytes)
			out = append(out, c)
		}
	}
	slices.SortFunc(out, func(a, b status.Container) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), strings.Compare(a.Namespace, b.Namespace),
			strings.Compare(a.Pod, b.Pod), strings.Compare(a.Container, b.Container),
			strings.Compare(a.Allocation, b.Allocation))
	})
	return out
}

// name says whose an allocation is.
func name(c *status.Container, h *ledger.Holder) {
	c.Namespace, c.Pod, c.Container = h.Namespace, h.Name, h.Container
}

// mib is bytes in MiB, rounded up.
func mib(bytes uint64) uint64 { return (bytes + 1<<20 - 1) >> 20 }

func (e *eye) describe(c *status.Container, u gpu.UUID, bytes uint64) {
	t := e.tallies.by[page{c.Allocation, u}]
	used, known := uint64(0), true
	if t != nil {
		used, known = t.used, t.known
		c.PeakMiB, c.UndoneMiB = mib(t.peak), mib(t.reading.Undone)
		c.Refusals, c.Uncounted = t.reading.Refusals, t.reading.Uncounted
	}
	var levels []memcap.Level // of those that have been seen on it
	for _, in := range e.of[c.Allocation] {
		if in.Running || c.Container == "" {
			name(c, &ledger.Holder{Pod: in.InPod(), Container: in.Name})
		}
		if e.strayed(in.PodUID, u) {
			// Some of what its pod has may be this container's.
			known = false
			levels = append(levels, memcap.Watchdog)
		}
		at := place{in.ID, u}
		procs, seen := e.seen[at]
		if !seen {
			continue
		}
		c.Processes += procs
		if in.Running || procs > 0 {
			levels = append(levels, level(e.limits.holds(at), t, bytes))
		}
	}
	if known {
		c.UsedMiB = new(mib(used))
	}
	if len(levels) > 0 && bytes != lib.None {
		c.Guarantee = string(memcap.Weakest(levels...))
	}
}

// Show puts what the guard saw into the node's status.
func (st *State) Show(s *status.Status) {
	s.Watchdog = status.Watchdog{State: status.WatchdogRunning, Reason: st.Off, Kills: st.Kills, Intruders: st.Found}
	if st.Off != "" {
		s.Watchdog.State = status.WatchdogOff
	}
	for i := range s.GPUs {
		g := &s.GPUs[i]
		on := st.On[gpu.UUID(g.UUID)]
		g.Intruders, g.NoPod, g.Unlisted = on.Intruders, on.NoPod, on.Unlisted
	}
	s.Containers = st.Containers
}

// Sampled is what was last seen of containers, with how busy their processes have kept the GPUs
// since a time, where the driver tells that of processes.
func (g *Guard) Sampled(ctx context.Context, since time.Time) []status.Container {
	st := g.State()
	driver, tells := g.driver.(Utilizer)
	if !tells || st.Off != "" {
		return st.Containers
	}
	var asked []gpu.UUID
	for u, on := range st.users {
		if len(on) > 0 {
			asked = append(asked, u)
		}
	}
	if len(asked) == 0 {
		return st.Containers
	}
	slices.Sort(asked)
	ctx, cancel := context.WithTimeout(ctx, driverPatience)
	defer cancel()
	busy, _ := driver.Utilization(ctx, since, asked...) // of a GPU that is not in it, nothing is known
	out := slices.Clone(st.Containers)
	for i := range out {
		c := &out[i]
		of, known := busy[gpu.UUID(c.GPU)]
		if !known {
			continue
		}
		sum := 0.0
		for pid, key := range st.users[gpu.UUID(c.GPU)] {
			if key == c.Allocation {
				sum += of[pid]
			}
		}
		c.SMPercent = new(min(sum, 100))
	}
	return out
}
