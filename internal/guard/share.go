// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
)

const (
	// silentGrace is how long a client of MPS may have said nothing on its usage page: until then it
	// may be in cuInit.
	silentGrace = 2 * time.Second
	// stuckAfter is how long a process is in cuInit if its server does not answer, and stuckEvery
	// how often that is looked into on a GPU: a container can write the time.
	stuckAfter = 5 * time.Second
	stuckEvery = time.Minute
	// detachBefore is how long before the end of a pod's grace period its clients are detached, detachEvery how
	// often that is done then, and detachAfter how long after the end it is done at most; detachGone if the pod
	// is gone.
	detachBefore = 2 * time.Second
	detachEvery  = 500 * time.Millisecond
	detachAfter  = 10 * time.Second
	detachGone   = 4 * time.Second
	// detachTimeout bounds the detaching of a container's clients.
	detachTimeout = 5 * time.Second
)

// Shares are the MPS daemons by which containers are held to their shares of GPUs' multiprocessors
// (SMs). agent.Shares implements it.
type Shares interface {
	// Daemon returns the daemon of a GPU as it was last seen. ok is false if the GPU is not under MPS.
	Daemon(gpu.UUID) (d Daemon, ok bool)
	// Daemons returns the daemons of all GPUs that are under MPS.
	Daemons() map[gpu.UUID]Daemon
	// Detach detaches clients of a GPU's server, so that their end harms no other. It returns how many
	// it has detached, and how many the daemon has not answered for. The others were no clients any more.
	Detach(ctx context.Context, u gpu.UUID, clients []int) (detached, timedOut int, err error)
	// Refresh has all daemons asked soon, so that Daemon tells what is now. It does not wait.
	Refresh()
	// Suspect reports a GPU's server that may not answer, since a program waits for it. It has that
	// found out, and does not wait.
	Suspect(u gpu.UUID, why string)
	// Now returns the time since boot (CLOCK_BOOTTIME).
	Now() time.Duration
}

// Daemon is the MPS daemon of a GPU.
type Daemon struct {
	// Percent is the largest share that a container of the GPU can have.
	Percent int
	// Trouble is why the daemon cannot be relied on now; empty if it can.
	Trouble string
	// At is when it told what follows; zero if it never has.
	At time.Time
	// PID is the daemon's, Servers those of its servers, and Clients those of their clients, as the
	// agent sees them.
	PID     int
	Servers []int
	Clients map[int]bool
}

// print tells two states of a daemon apart.
func (d *Daemon) print() string {
	return fmt.Sprint(d.Trouble, d.Servers, slices.Sorted(maps.Keys(d.Clients)))
}

// SharesMeter is a Meter that knows what processes say of their shares. *lib.Usage does the work.
type SharesMeter interface {
	// Compute is as in lib.Usage.
	Compute(of map[lib.Process]lib.Compute) (starting time.Duration, err error)
}

// life is one process: PIDs are used again.
type life struct {
	pid   int
	start uint64
}

// stranger is a process on a GPU under MPS that is not held to a share, as far as is known.
type stranger struct {
	first time.Time
	seen  time.Time
	told  int
}

// shares looks at the shares of containers. It belongs to Run's goroutine.
type shares struct {
	shares Shares // nil if no GPU is under MPS
	// held is how strongly each allocation is held on a GPU, as the last look saw it.
	held map[page]compute.Held
	// strangers are processes that are no clients, and silent are clients that have said nothing.
	strangers, silent map[gpu.UUID]map[life]*stranger
	// stuck is when a server was last reported, by GPU.
	stuck map[gpu.UUID]time.Time
}

// daemon returns the daemon of a GPU. ok is false if the GPU is not under MPS.
func (s *shares) daemon(u gpu.UUID) (d Daemon, ok bool) {
	if s.shares == nil {
		return d, false
	}
	return s.shares.Daemon(u)
}

// withoutServers leaves out the daemon's own processes: they hold the contexts of all clients.
func (d *Daemon) withoutServers(listed []gpu.Process) []gpu.Process {
	return slices.DeleteFunc(listed, func(p gpu.Process) bool {
		return p.PID == d.PID || slices.Contains(d.Servers, p.PID)
	})
}

// judgeShares finds how strongly each allocation on a GPU under MPS is held to its share, and acts on
// processes that are held to none, and returns how many there are. sure is true if nothing is left to find
// out.
func (e *examiner) judgeShares(ctx context.Context, d *gpu.Device, by *Daemon, sc *scene, held allocations) (strangers int, sure bool) {
	s := &e.shares
	now, sure := sc.sample.At, true
	said := e.saidOf(d, sc)
	of := map[string][]compute.Process{}
	var outside, silent []memcap.Process
	seen := map[int]bool{}
	for _, p := range sc.sample.Processes {
		key := sc.homes[p.Container]
		if p.Container == "" || key == "" || held.share(key, d.UUID).Ceiling == 0 || seen[p.PID] {
			continue // judged by its memory alone
		}
		seen[p.PID] = true
		is := compute.Process{PID: p.PID, Client: by.Clients[p.PID], SMs: said.of[p.PID].SMs}
		of[key] = append(of[key], is)
		switch {
		case !is.Client:
			outside = append(outside, p)
		case is.SMs == 0 && said.known[key]:
			silent = append(silent, p)
		}
	}
	for key, c := range held {
		share := held.share(key, d.UUID)
		if share.Ceiling == 0 || !c.On(d.UUID) {
			continue
		}
		is := compute.Verify(share, d.SMs, by.Trouble, of[key])
		s.held[page{key, d.UUID}] = is
		sure = sure && (is.Guarantee == compute.Ceiling || len(of[key]) == 0)
	}
	// Whether a process is a client is known once the daemon has listed its clients after the process
	// was first seen. Its answers come twice a second, so it is asked at once: the next look then has
	// an answer. A client is on its page when it is out of cuInit.
	if slices.ContainsFunc(outside, func(p memcap.Process) bool { return s.strangers[d.UUID][life{p.PID, p.Start}] == nil }) {
		s.shares.Refresh()
	}
	strangers += e.name(ctx, d, sc, held, s.strangers, outside, "computes outside MPS, and so without its share",
		func(first time.Time) bool { return by.At.After(first) && by.Trouble == "" })
	strangers += e.name(ctx, d, sc, held, s.silent, silent, "is a client of MPS and on no usage page, so its share is not known",
		func(first time.Time) bool { return now.Sub(first) >= silentGrace })
	e.lookForStuck(d, by, said.starting, now)
	return strangers, sure
}

// words are what processes say on the usage pages of a GPU.
type words struct {
	of map[int]lib.Compute // by PID
	// known has the allocations whose pages were read.
	known map[string]bool
	// starting is when the process began cuInit that is in it the longest; 0 if there is none.
	starting time.Duration
}

func (e *examiner) saidOf(d *gpu.Device, sc *scene) words {
	w := words{of: map[int]lib.Compute{}, known: map[string]bool{}}
	for at, t := range e.tallies.by {
		meter, tells := t.meter.(SharesMeter)
		if at.gpu != d.UUID || !tells {
			continue
		}
		pids, said := map[lib.Process]int{}, map[lib.Process]lib.Compute{}
		for _, p := range sc.sample.Processes {
			if p.Container == "" || sc.homes[p.Container] != at.allocation {
				continue
			}
			if name, err := e.names.of(p.PID, p.Start); err == nil {
				pids[name], said[name] = p.PID, lib.Compute{}
			}
		}
		starting, err := meter.Compute(said)
		if err != nil {
			continue // the next reading fails with it, too
		}
		w.known[at.allocation] = true
		for name, is := range said {
			w.of[pids[name]] = is
		}
		if starting != 0 && (w.starting == 0 || starting < w.starting) {
			w.starting = starting
		}
	}
	return w
}

// name names processes that are held to no share, once sure says so of the time at which they were
// first seen. It returns how many.
func (e *examiner) name(ctx context.Context, d *gpu.Device, sc *scene, held allocations,
	all map[gpu.UUID]map[life]*stranger, now []memcap.Process, what string, sure func(first time.Time) bool) (n int) {
	if all[d.UUID] == nil {
		all[d.UUID] = map[life]*stranger{}
	}
	known := all[d.UUID]
	for _, p := range now {
		id := life{p.PID, p.Start}
		k := known[id]
		if k == nil {
			k = &stranger{first: sc.sample.At}
			known[id] = k
		}
		k.seen = sc.sample.At
		if !sure(k.first) {
			continue
		}
		n++
		if c := e.offender(place{p.Container, d.UUID}, held); c != nil {
			e.handler.act(ctx, d, c, memcap.Verdict{Kind: memcap.Intruder, Container: p.Container, GPU: d.UUID,
				Used: p.Bytes, Own: p.Bytes, First: k.first, Told: k.told, What: what, Processes: []memcap.Process{p}}, sc.owners)
			k.told++
		}
	}
	maps.DeleteFunc(known, func(_ life, k *stranger) bool { return !k.seen.Equal(sc.sample.At) })
	return n
}

// lookForStuck reports a server that may not answer: a process has been in cuInit for long. A container
// writes that time, so a program of the node's own finds out whether it is so, and seldom.
func (e *examiner) lookForStuck(d *gpu.Device, by *Daemon, starting time.Duration, now time.Time) {
	s := &e.shares
	for u, at := range s.stuck {
		if now.Sub(at) >= stuckEvery {
			delete(s.stuck, u)
		}
	}
	if starting == 0 || by.Trouble != "" || !s.stuck[d.UUID].IsZero() {
		return
	}
	if waited := s.shares.Now() - starting; waited >= stuckAfter {
		s.stuck[d.UUID] = now
		s.shares.Suspect(d.UUID, fmt.Sprintf("a program has waited for its MPS server for %v", waited.Round(time.Second)))
	}
}
