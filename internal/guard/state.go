// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// State is what the guard last saw. It is immutable.
type State struct {
	// Off is the reason why the guard does not run, or empty while it runs.
	Off string
	// Containers has the allocations on each GPU, in order of GPU index, then holder.
	Containers []status.Container
	// On has the processes without an allocation on each GPU.
	On map[gpu.UUID]Uninvited
	// Kills is how many containers the guard has ended since its start, and Found how many
	// intruders it has found.
	Kills, Found uint64
	// Detached is how many clients of MPS were detached before the guard ended them, and Undetached for how
	// many the daemon has not answered in time.
	Detached, Undetached uint64

	// users has the allocation that each process counts for, by GPU and PID, as of each GPU's last
	// look. The inner maps are replaced, and never changed.
	users map[gpu.UUID]map[int]string
	// presences has which allocations have processes on each GPU, as of its last look.
	presences map[gpu.UUID]Presence
}

// Uninvited counts the processes on a GPU that have no allocation there: those of containers
// without one, those of no pod, and those of containers that the runtime does not list.
type Uninvited struct {
	Intruders, NoPod, Unlisted int
}

// publish makes what was seen the state.
func (g *Guard) publish(gpus []gpu.Device, held allocations) {
	st := &State{On: map[gpu.UUID]Uninvited{}, users: map[gpu.UUID]map[int]string{}, presences: map[gpu.UUID]Presence{}}
	st.Found, st.Kills = g.examiner.counts()
	st.Detached, st.Undetached = g.examiner.detaches()
	for i := range gpus {
		st.On[gpus[i].UUID] = Uninvited{}
	}
	for u, f := range g.found {
		if _, given := st.On[u]; given {
			st.On[u], st.presences[u] = f.Uninvited, f.presence
		}
		if f.users != nil {
			st.users[u] = f.users
		}
	}
	st.Containers = containers(gpus, held, g.examiner.describe)
	g.state.Store(st)
}

// containers returns one entry for each allocation and GPU. seen adds what was seen of an
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
			if s := held.share(key, d.UUID); s.Ceiling > 0 {
				c.ComputePercent, c.Compute = s.Ceiling, new(compute.NoneFor("the watchdog has not looked at it yet"))
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

// name fills in the holder of an allocation.
func name(c *status.Container, h *ledger.Holder) {
	c.Namespace, c.Pod, c.Container = h.Namespace, h.Name, h.Container
}

// mib converts bytes to MiB, rounded up.
func mib(bytes uint64) uint64 { return (bytes + 1<<20 - 1) >> 20 }

func (e *examiner) describe(c *status.Container, u gpu.UUID, bytes uint64) {
	t := e.tallies.by[page{c.Allocation, u}]
	if is, looked := e.shares.held[page{c.Allocation, u}]; looked && c.Compute != nil {
		c.Compute = &is
	}
	used, known := uint64(0), true
	if t != nil {
		used, known = t.used, t.known
		c.PeakMiB, c.UndoneMiB = mib(t.peak), mib(t.reading.Undone)
		c.Refusals, c.Uncounted = t.reading.Refusals, t.reading.Uncounted
	}
	var levels []memcap.Level // of the containers that were seen on it, or for which a hook has set a limit
	on := map[string]bool{}   // the containers that live
	for _, in := range e.of[c.Allocation] {
		on[in.ID] = on[in.ID] || in.Running
		if in.Running || c.Container == "" {
			name(c, &ledger.Holder{Pod: in.InPod(), Container: in.Name})
		}
		if e.hasUnlisted(in.PodUID, u) {
			// Some of the unlisted container's memory may be this one's.
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
	for _, id := range e.limits.started(c.Allocation, u) {
		on[id] = true
		if _, seen := e.seen[place{id, u}]; !seen {
			levels = append(levels, level(e.limits.holds(place{id, u}), t, bytes))
		}
	}
	if live := slices.Collect(maps.Values(on)); len(slices.DeleteFunc(live, func(lives bool) bool { return !lives })) > 1 {
		// The driver holds each of them to the cap, but not all of them together.
		levels = append(levels, memcap.API)
	}
	if known {
		c.UsedMiB = new(mib(used))
	}
	if len(levels) > 0 && bytes != lib.None {
		c.Guarantee = string(memcap.Weakest(levels...))
	}
}

// Show fills what the guard saw into the node's status.
func (st *State) Show(s *status.Status) {
	s.Watchdog = status.Watchdog{State: status.WatchdogRunning, Reason: st.Off, Kills: st.Kills, Intruders: st.Found,
		Detached: st.Detached, Undetached: st.Undetached}
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

// Sampled returns what was last seen of containers. If the driver reports how busy each process has
// kept the GPUs since a time, it adds that.
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
	ctx, cancel := context.WithTimeout(ctx, driverTimeout)
	defer cancel()
	busy, _ := driver.Utilization(ctx, since, asked...) // nothing is known of a GPU that is missing in it
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
