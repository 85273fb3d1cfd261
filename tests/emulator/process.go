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
	// MiB is its memory, rounded down in lists. AddProcess takes this figure.
	MiB uint64 `json:"mib"`
	// Bytes is the same, exact; lists have it, AddProcess does not look at it.
	Bytes uint64 `json:"bytes"`
	// Unknown makes the driver's lists say "not available" for the memory,
	// which it does for some processes; it is used all the same.
	Unknown bool `json:"unknown,omitempty"`
}

// AddProcess gives a process memory on a GPU, on top of what it has there in
// that kind. It refuses what the card has no room for.
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
	w.buryLocked()
	if free := w.freeLocked(g) >> 20; p.MiB > free {
		return fmt.Errorf("GPU %d: %w: %d MiB asked for, %d MiB free", p.GPU, OutOfMemory, p.MiB, free)
	}
	p.Bytes = 0 // lists fill it in
	defer w.peakLocked(g)
	same := slices.IndexFunc(w.procs, func(q *Process) bool {
		return q.PID == p.PID && q.GPU == p.GPU && q.Kind == p.Kind
	})
	if same >= 0 {
		w.procs[same].MiB += p.MiB
		w.procs[same].Unknown = p.Unknown
		return nil
	}
	w.procs = append(w.procs, &p)
	slices.SortFunc(w.procs, func(a, b *Process) int {
		return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.PID, b.PID), cmp.Compare(a.Kind, b.Kind))
	})
	return nil
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

// freeLocked is what a GPU has left for processes, in bytes.
func (w *World) freeLocked(g *gpu) uint64 {
	return (g.MemoryMiB-g.ReservedMiB)<<20 - w.usedLocked(g)
}

// processesLocked lists the processes that have memory on any GPU, by GPU, PID
// and kind. What a process was given and what it allocated itself is one entry.
func (w *World) processesLocked() []Process {
	var list []Process
	add := func(p Process) {
		same := slices.IndexFunc(list, func(q Process) bool { return q.PID == p.PID && q.GPU == p.GPU && q.Kind == p.Kind })
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
		for slot, bytes := range p.charged {
			if bytes > 0 {
				add(Process{PID: p.pid, GPU: slot, Kind: Compute, Bytes: bytes})
			}
		}
	}
	for i := range list {
		list[i].MiB = list[i].Bytes >> 20
	}
	slices.SortFunc(list, func(a, b Process) int {
		return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.PID, b.PID), cmp.Compare(a.Kind, b.Kind))
	})
	return list
}
