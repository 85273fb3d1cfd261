// SPDX-License-Identifier: Apache-2.0

package emulator

import (
	"cmp"
	"fmt"
	"slices"
)

// Kind is how a process uses a GPU; the driver lists each kind by itself.
type Kind string

// The kinds that the driver tells apart.
const (
	Compute  Kind = "compute"
	Graphics Kind = "graphics"
	MPS      Kind = "mps" // a client of the MPS server
)

// Process is a process that has memory on a GPU.
type Process struct {
	PID  int  `json:"pid"` // in the world's own PID namespace
	GPU  int  `json:"gpu"` // index
	Kind Kind `json:"kind"`
	// GI and CI are the ids of the instances that it is on, of a GPU in MIG mode.
	// Without MIG they are -1 in lists, and AddProcess does not look at them.
	GI int `json:"gi"`
	CI int `json:"ci"`
	// MiB is its memory, rounded down in lists. AddProcess takes this figure.
	MiB uint64 `json:"mib"`
	// Bytes is the same, exact; lists have it, AddProcess does not look at it.
	Bytes uint64 `json:"bytes"`
	// Unknown makes the driver's lists say "not available" for the memory,
	// which it does for some processes; it is used all the same.
	Unknown bool `json:"unknown,omitempty"`
}

// place is where a process has memory: on a GPU or, with ids that are not -1, on
// an instance of it.
type place struct{ gpu, gi, ci int }

func (t target) place() place {
	if t.ci == nil {
		return place{t.g.slot, -1, -1}
	}
	return place{t.g.slot, t.gi.id, t.ci.id}
}

// handle is that of the GPU or the MIG device.
func (p place) handle() Handle {
	return Handle(p.gpu) | Handle(p.gi+1)<<handleGI | Handle(p.ci+1)<<handleCI
}

func (p *Process) at() place { return place{p.GPU, p.GI, p.CI} }

// AddProcess gives a process memory on a GPU, on top of what it has there in
// that kind. It refuses what the card, or the GPU instance, has no room for.
func (w *World) AddProcess(p Process) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	g, err := w.gpuLocked(p.GPU)
	switch {
	case err != nil:
		return err
	case p.PID <= 0:
		return fmt.Errorf("process %d: %w: not a PID", p.PID, InvalidArgument)
	case !slices.Contains([]Kind{Compute, Graphics, MPS}, p.Kind):
		return fmt.Errorf("process %d: %w: kind %q is not compute, graphics or mps", p.PID, InvalidArgument, p.Kind)
	case w.unloaded:
		return fmt.Errorf("GPU %d: %w", p.GPU, DriverNotLoaded)
	case g.lost:
		return fmt.Errorf("GPU %d: %w", p.GPU, GPUIsLost)
	case g.health.Recovery == RecoveryReset:
		return fmt.Errorf("GPU %d: %w: it takes no new work", p.GPU, ResetRequired)
	}
	t := target{g: g}
	if g.mig.on {
		t.gi = g.instanceLocked(p.GI)
		if t.ci = t.gi.computeLocked(p.CI); t.ci == nil {
			return fmt.Errorf("GPU %d: compute instance %d of GPU instance %d: %w", p.GPU, p.CI, p.GI, NotFound)
		}
	} else {
		p.GI, p.CI = -1, -1
	}
	w.buryLocked()
	if free := w.freeLocked(t) >> 20; p.MiB > free {
		return fmt.Errorf("GPU %d: %w: %d MiB asked for, %d MiB free", p.GPU, OutOfMemory, p.MiB, free)
	}
	p.Bytes = 0 // lists fill it in
	defer w.peakLocked(g)
	same := slices.IndexFunc(w.procs, func(q *Process) bool {
		return q.PID == p.PID && q.at() == p.at() && q.Kind == p.Kind
	})
	if same >= 0 {
		w.procs[same].MiB += p.MiB
		w.procs[same].Unknown = p.Unknown
		return nil
	}
	w.procs = append(w.procs, &p)
	slices.SortFunc(w.procs, func(a, b *Process) int { return compareProcesses(*a, *b) })
	return nil
}

func compareProcesses(a, b Process) int {
	return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.PID, b.PID), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.GI, b.GI), cmp.Compare(a.CI, b.CI))
}

// EndProcess frees all that a process has on any GPU, as its death does. It
// reports whether there was anything.
func (w *World) EndProcess(pid int) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	before := len(w.procs)
	w.procs = slices.DeleteFunc(w.procs, func(p *Process) bool { return p.PID == pid })
	return len(w.procs) < before
}

// usedLocked is what processes have on a GPU, in bytes; those that died a moment
// ago are among them, but for a buryLocked before.
func (w *World) usedLocked(g *gpu) uint64 {
	used := g.charged
	for _, p := range w.procs {
		if p.GPU == g.slot {
			used += p.MiB << 20
		}
	}
	return used
}

// ownMemory says whether a target has memory of its own: an instance of a GPU whose memory is
// the machine's has none, and its processes share the GPU's.
func (t target) ownMemory() bool { return t.gi != nil && t.gi.profile.MemoryMiB > 0 }

// usedOnLocked is what processes have on the GPU instance of a MIG device, all
// of its compute instances together, or on a whole GPU.
func (w *World) usedOnLocked(t target) uint64 {
	if !t.ownMemory() {
		return w.usedLocked(t.g)
	}
	used := uint64(0)
	for _, p := range w.procs {
		if p.GPU == t.g.slot && p.GI == t.gi.id {
			used += p.MiB << 20
		}
	}
	for p := range w.sessions {
		for at, bytes := range p.charged {
			if at.gpu == t.g.slot && at.gi == t.gi.id {
				used += bytes
			}
		}
	}
	return used
}

// room is what processes can have of a GPU or a MIG device, in bytes.
func (t target) room() uint64 {
	if !t.ownMemory() {
		return (t.g.MemoryMiB - t.g.ReservedMiB) << 20
	}
	return t.gi.profile.MemoryMiB << 20
}

// freeLocked is what a GPU or a MIG device has left for processes, in bytes.
func (w *World) freeLocked(t target) uint64 { return t.room() - w.usedOnLocked(t) }

// processesLocked lists the processes that have memory on any GPU, by GPU, PID
// and kind. What a process was given and what it allocated itself is one entry.
func (w *World) processesLocked() []Process {
	var list []Process
	add := func(p Process) {
		same := slices.IndexFunc(list, func(q Process) bool { return q.PID == p.PID && q.at() == p.at() && q.Kind == p.Kind })
		if same < 0 {
			list = append(list, p)
			return
		}
		list[same].Bytes += p.Bytes
		list[same].Unknown = list[same].Unknown || p.Unknown
	}
	w.buryLocked()
	for _, p := range w.procs {
		q := *p
		q.Bytes = p.MiB << 20
		add(q)
	}
	for p := range w.sessions {
		for at, bytes := range p.charged {
			if bytes > 0 {
				own := Process{PID: p.pid, GPU: at.gpu, GI: at.gi, CI: at.ci, Kind: Compute, Bytes: bytes}
				add(own)
				if p.mps != nil { // a client is on both lists, M+C
					own.Kind = MPS
					add(own)
				}
			}
		}
	}
	for i := range list {
		list[i].MiB = list[i].Bytes >> 20
	}
	slices.SortFunc(list, compareProcesses)
	return list
}
