// SPDX-License-Identifier: Apache-2.0

package emulator

import (
	"fmt"
	"maps"
	"math"
	"slices"
)

// share is memory that more than one process can hold: exported by file
// descriptor or by CUDA IPC. It is charged to the process that made it until
// the last holder lets go; if that process dies first, to nobody.
type share struct {
	gpu   *gpu
	at    place
	bytes uint64
	owner *process // nil when it is dead
	refs  map[*process]int
	fds   int // descriptors that stand for it
}

// buryLocked frees what dead processes have, whose sessions are not closed yet.
func (w *World) buryLocked() {
	for p := range w.sessions {
		if len(p.charged) > 0 && p.alive != nil && !p.alive() {
			w.leaveLocked(p)
			w.releaseLocked(p)
		}
	}
}

// releaseLocked frees all that a process has through CUDA, but what others hold.
func (w *World) releaseLocked(p *process) {
	for id, s := range w.shares {
		delete(s.refs, p)
		if s.owner == p && len(s.refs)+s.fds > 0 {
			p.charged[s.at] -= min(s.bytes, p.charged[s.at])
			s.owner = nil
		} else {
			w.dropLocked(id)
		}
	}
	for at, bytes := range p.charged {
		w.gpus[at.gpu].charged -= bytes
	}
	clear(p.charged)
}

// dropLocked frees shared memory that nobody holds any more.
func (w *World) dropLocked(id uint64) {
	s := w.shares[id]
	if len(s.refs)+s.fds > 0 {
		return
	}
	delete(w.shares, id)
	if s.owner != nil {
		w.refundLocked(s.owner, s.at, s.bytes)
	} else {
		s.gpu.charged -= s.bytes
	}
}

// refundLocked takes back at most what a process has at a place.
func (w *World) refundLocked(p *process, at place, bytes uint64) {
	bytes = min(bytes, p.charged[at])
	w.gpus[at.gpu].charged -= bytes
	if p.charged[at] -= bytes; p.charged[at] == 0 {
		delete(p.charged, at)
	}
}

func (w *World) peakLocked(g *gpu) {
	if w.usedLocked(g) > g.peak {
		w.buryLocked()
		g.peak = max(g.peak, w.usedLocked(g))
	}
}

// bookLocked notes what a process's container has on a GPU by now.
func (w *World) bookLocked(g *gpu, by *process) {
	if by.container == "" {
		return
	}
	var used uint64
	for p := range w.sessions {
		if p.container != by.container || p.alive != nil && !p.alive() {
			continue
		}
		for at, bytes := range p.charged {
			if at.gpu == g.slot {
				used += bytes
			}
		}
	}
	at := containerOn{by.container, g.slot}
	if _, known := w.books[at]; known || len(w.books) < booksMost {
		w.books[at] = max(w.books[at], used)
	}
}

// containerOn is a container on a GPU. The books have at most booksMost.
type containerOn struct {
	container string
	gpu       int
}

const booksMost = 100_000

// PeakUsed is the most bytes that processes had on a GPU together, since the
// last ResetPeak.
func (w *World) PeakUsed(index int) (uint64, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	g, err := w.gpuLocked(index)
	if err != nil {
		return 0, fmt.Errorf("peak: %w", err)
	}
	return g.peak, nil
}

// ResetPeak makes what is used now a GPU's peak.
func (w *World) ResetPeak(index int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	g, err := w.gpuLocked(index)
	if err != nil {
		return fmt.Errorf("reset peak: %w", err)
	}
	w.buryLocked()
	g.peak = w.usedLocked(g)
	return nil
}

// Charge changes, by so many bytes, what the process has on a GPU or a MIG device; it is what
// all calls of the CUDA driver come to that take or give memory back. The
// library has rounded to what the hardware allocates. It answers OutOfMemory
// where the card has no room or a cgroup's limit is reached, ResetRequired on a GPU that takes no new work, and
// InUse where the compute mode lets this process not compute.
func (s *Session) Charge(call string, h Handle, bytes int64) Return {
	_, r := about(s, call, h, 0, func(t target) (struct{}, Return) {
		w, g, at := s.p.w, t.g, t.place()
		switch {
		case bytes == math.MinInt64:
			return struct{}{}, InvalidArgument
		case bytes <= 0:
			w.refundLocked(s.p, at, uint64(-bytes))
			return struct{}{}, Success
		case g.mig.on && t.ci == nil:
			return struct{}{}, NotSupported // of a GPU in MIG mode only instances can be used
		case g.health.Recovery == RecoveryReset:
			return struct{}{}, ResetRequired
		case !w.admitsLocked(g, s.p):
			return struct{}{}, InUse
		}
		if uint64(bytes) > w.freeLocked(t) {
			w.buryLocked()
		}
		if uint64(bytes) > w.freeLocked(t) || !w.allowsLocked(g, s.p.pid, uint64(bytes)) {
			return struct{}{}, OutOfMemory
		}
		g.charged += uint64(bytes)
		s.p.charged[at] += uint64(bytes)
		w.peakLocked(g)
		w.bookLocked(g, s.p)
		return struct{}{}, Success
	})
	return r
}

// Share gives memory that the process has been charged for an identity that
// other processes can open. The process holds it once.
func (s *Session) Share(call string, h Handle, bytes uint64) (id uint64, r Return) {
	return about(s, call, h, 0, func(t target) (uint64, Return) {
		if bytes > s.p.charged[t.place()] {
			return 0, InvalidArgument
		}
		w := s.p.w
		w.lastID++
		w.shares[w.lastID] = &share{gpu: t.g, at: t.place(), bytes: bytes, owner: s.p, refs: map[*process]int{s.p: 1}}
		return w.lastID, Success
	})
}

// Shared is memory that a process can open.
type Shared struct {
	GPU   Handle
	Bytes uint64
}

// OpenShared holds shared memory once more.
func (s *Session) OpenShared(call string, id uint64) (Shared, Return) {
	return node(s, call, func(w *World) (Shared, Return) {
		at, ok := w.shares[id]
		if !ok {
			return Shared{}, InvalidArgument
		}
		if _, r := s.gpuLocked(Handle(at.gpu.slot)); r != Success {
			return Shared{}, r
		}
		at.refs[s.p]++
		return Shared{at.at.handle(), at.bytes}, Success
	})
}

// CloseShared undoes one OpenShared, or the Share.
func (s *Session) CloseShared(call string, id uint64) Return {
	_, r := node(s, call, func(w *World) (struct{}, Return) {
		at, ok := w.shares[id]
		if !ok || at.refs[s.p] == 0 {
			return struct{}{}, InvalidArgument
		}
		if at.refs[s.p]--; at.refs[s.p] == 0 {
			delete(at.refs, s.p)
		}
		w.dropLocked(id)
		return struct{}{}, Success
	})
	return r
}

// HoldByDescriptor makes a file descriptor a holder of memory that the process
// holds; the function that it returns says that the last copy of it is closed.
func (s *Session) HoldByDescriptor(call string, id uint64) (closed func(), r Return) {
	return node(s, call, func(w *World) (func(), Return) {
		at, ok := w.shares[id]
		if !ok || at.refs[s.p] == 0 {
			return nil, InvalidArgument
		}
		at.fds++
		return func() {
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.shares[id] == at { // else it went with its GPU
				at.fds--
				w.dropLocked(id)
			}
		}, Success
	})
}

// charge takes a number of bytes, negative to give them back.
func charge(s *Session, f *frame) Return {
	bytes := int64(f.u64())
	if f.bad {
		return InvalidArgument
	}
	return s.Charge(f.name, f.handle, bytes)
}

var cudaCalls = map[string]call{
	"cuInit":            initialise,
	"cuEmulatorClose":   {serve: func(s *Session, _ *frame) Return { s.leaveMPS(); return s.Shutdown() }}, // of a cuInit that failed later
	"cuEmulatorDevices": {serve: serveCUDADevices},
	"cuMemGetInfo":      cudaMemory,
	"cuMemGetInfo_v2":   cudaMemory,
	"cuEmulatorShare": {serve: func(s *Session, f *frame) Return {
		id, r := s.Share(f.name, f.handle, f.u64())
		return put(id, r, func(v uint64) { f.putU64(v) })
	}},
	"cuIpcOpenMemHandle":                 openShared,
	"cuIpcOpenMemHandle_v2":              openShared,
	"cuMemImportFromShareableHandle":     openShared,
	"cuMemPoolImportFromShareableHandle": openShared, // of no bytes: it stands for a pool
	"cuMemPoolImportPointer":             openShared,
	"cuEmulatorUnshare":                  {serve: func(s *Session, f *frame) Return { return s.CloseShared(f.name, f.u64()) }},
	"cuMemExportToShareableHandle":       {serve: unsupported}, // the daemon has to make the descriptor
}

// serveCUDADevices lists the GPUs that the process can open, and instead of one in
// MIG mode its instances that the process reaches; the library chooses among them.
func serveCUDADevices(s *Session, f *frame) Return {
	_, r := node(s, f.name, func(w *World) (struct{}, Return) {
		var list []target
		for _, g := range s.p.gpus {
			if s.p.mps != nil && s.p.mps.g != g {
				continue // a client has what its server has
			}
			if !g.mig.on || s.p.dead[g] {
				list = append(list, target{g: g})
				continue
			}
			devices := s.devicesLocked(g)
			for _, i := range slices.Sorted(maps.Keys(devices)) {
				list = append(list, target{g, devices[i].gi, devices[i]})
			}
		}
		w.buryLocked()
		f.putInt(w.cuda)
		f.putInt(len(list))
		for _, t := range list {
			g, at := t.g, t.place()
			f.putU32(uint32(at.handle()), bit(s.p.dead[g]), uint32(g.major), uint32(g.cc), t.multiprocessors())
			f.putU64(t.room(), w.freeLocked(t), g.ContextMiB<<20)
			f.putU32(g.pci.Domain, g.pci.Bus, g.pci.Device, uint32(g.slot))
			f.putU32(uint32(at.gi), uint32(at.ci)) // -1 is NotMIG
			uuid, name := g.uuid, g.Name
			if t.ci != nil {
				uuid, name = t.ci.uuid, g.Name+" MIG "+t.ci.profile.Name
			}
			f.putStr(uuid)
			f.putStr(g.uuid)
			f.putStr(name)
		}
		return struct{}{}, Success
	})
	return r
}

var openShared = call{serve: func(s *Session, f *frame) Return {
	v, r := s.OpenShared(f.name, f.u64())
	return put(v, r, func(v Shared) {
		f.putU32(uint32(v.GPU))
		f.putU64(v.Bytes)
	})
}}

var cudaMemory = call{serve: func(s *Session, f *frame) Return {
	free, r := about(s, f.name, f.handle, 0, func(t target) (uint64, Return) {
		s.p.w.buryLocked()
		return s.p.w.freeLocked(t), Success
	})
	return put(free, r, func(v uint64) { f.putU64(v) })
}}

// multiprocessors are those of a MIG device, or of the GPU.
func (t target) multiprocessors() uint32 {
	switch {
	case t.ci != nil:
		return t.ci.profile.SMs
	case t.g.SMs > 0 || t.g.MIG == nil:
		return t.g.SMs
	}
	var n uint32
	for _, p := range t.g.MIG.Profiles {
		n = max(n, p.SMs)
	}
	return n
}
