// SPDX-License-Identifier: Apache-2.0

package emulator

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
)

// CUDA's errors of MPS, and those by which a client learns of a fault that was another's.
const (
	ErrMPSConnection Return = 805 // no server, or none that can start
	ErrMPSRPC        Return = 806 // the server is gone
	ErrMPSClients    Return = 808 // the server has as many clients as it takes
	ErrMPSTerminated Return = 810 // the client was detached
	ErrIllegal       Return = 700 // an illegal address
	ErrLaunch        Return = 719 // a kernel failed
)

// MostMPSClients is how many clients a server takes, of the drivers before R615.
const MostMPSClients = 48

// serverMiB is what a server itself has on its GPU.
const serverMiB = 30

// mpsServer is an MPS server: a process that computes for others.
type mpsServer struct {
	pid     int
	g       *gpu
	percent float64 // of the contexts that are made from now on
	fault   bool    // it takes no client until all that it has are gone
}

// MPSServer is what the world knows of an MPS server.
type MPSServer struct {
	PID     int     `json:"pid"`
	GPU     int     `json:"gpu"`
	Percent float64 `json:"percent"`
	// Fault says that a client has had a fatal fault, and that others of that time are there still.
	Fault bool `json:"fault,omitempty"`
	// Clients are the PIDs of processes that are connected.
	Clients []int `json:"clients,omitempty"`
}

// ServeMPS makes a process the MPS server of a GPU, by the GPU's UUID, or of the first if that is
// empty. The GPU's compute mode may refuse it: an exclusive one if another process computes there.
func (w *World) ServeMPS(pid int, uuid string, percent float64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	i := slices.IndexFunc(w.gpus, func(g *gpu) bool { return uuid == "" || g.uuid == uuid })
	switch {
	case i < 0 || w.unloaded || w.gpus[i].unplugged:
		return fmt.Errorf("MPS server on GPU %q: %w", uuid, NotFound)
	case !(percent > 0 && percent <= 100):
		return fmt.Errorf("MPS server on GPU %q: %w: %v percent", uuid, InvalidArgument, percent)
	}
	g := w.gpus[i]
	others := slices.ContainsFunc(w.processesLocked(), func(p Process) bool { return p.GPU == g.slot && p.PID != pid })
	switch {
	case g.lost:
		return fmt.Errorf("MPS server on GPU %d: %w", i, GPUIsLost)
	case g.mig.on:
		return fmt.Errorf("MPS server on GPU %d: %w in MIG mode", i, NotSupported)
	case g.setup.Compute == ComputeProhibited, g.setup.Compute == ComputeExclusiveProcess && others:
		return fmt.Errorf("MPS server on GPU %d: %w: its compute mode is %s", i, InUse, g.setup.Compute)
	case w.serverOfLocked(g) != nil:
		return fmt.Errorf("MPS server on GPU %d: %w: process %d is one", i, InUse, w.serverOfLocked(g).pid)
	}
	w.mps[pid] = &mpsServer{pid: pid, g: g, percent: percent}
	w.procs = append(w.procs, &Process{PID: pid, GPU: g.slot, Kind: Compute, MiB: serverMiB, GI: -1, CI: -1})
	w.peakLocked(g)
	return nil
}

// EndMPS is the death of a server: its clients have no contexts any more.
func (w *World) EndMPS(pid int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.mps[pid]
	if s == nil {
		return
	}
	for _, p := range w.ofServerLocked(s) {
		w.breakLocked(p, ErrMPSRPC)
	}
	delete(w.mps, pid)
	w.procs = slices.DeleteFunc(w.procs, func(p *Process) bool { return p.PID == pid })
}

// SetMPSPercent changes what contexts get that are made from now on.
func (w *World) SetMPSPercent(pid int, percent float64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.mps[pid]
	if s == nil {
		return fmt.Errorf("MPS server %d: %w", pid, NotFound)
	}
	if !(percent > 0 && percent <= 100) {
		return fmt.Errorf("MPS server %d: %w: %v percent", pid, InvalidArgument, percent)
	}
	s.percent = percent
	return nil
}

// DetachMPS is terminate_client: a client's contexts and its memory are gone, and what happens to
// the process from then on is no other client's concern.
func (w *World) DetachMPS(server, client int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.mps[server]
	if s == nil {
		return fmt.Errorf("MPS server %d: %w", server, NotFound)
	}
	for _, p := range w.ofServerLocked(s) {
		if p.pid == client {
			p.mps = nil
			w.breakLocked(p, ErrMPSTerminated)
			w.releaseLocked(p)
			return nil
		}
	}
	return fmt.Errorf("client %d of MPS server %d: %w", client, server, NotFound)
}

// Fail is a fatal fault of a process: an illegal address (Xid 31), a trap (13) or the like. It ends
// the process's contexts, and under MPS those of all clients of the same server. Its GPUs raise the
// Xid.
func (w *World) Fail(pid int, xid uint64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	found := false
	for p := range w.sessions {
		if p.pid != pid || p.broken != Success {
			continue
		}
		for at := range p.charged {
			w.raiseLocked(place{at.gpu, -1, -1}, EventXid, xid)
			found = true
		}
		if p.mps != nil {
			w.faultLocked(p.mps)
		}
		if len(p.charged) > 0 {
			w.breakLocked(p, ErrIllegal)
		}
	}
	if !found {
		return fmt.Errorf("process %d: %w: it has no context", pid, NotFound)
	}
	w.wakeLocked()
	return nil
}

// faultLocked ends the contexts of all clients. The memory stays theirs until they end.
func (w *World) faultLocked(s *mpsServer) {
	for _, p := range w.ofServerLocked(s) {
		s.fault = true
		w.breakLocked(p, ErrLaunch)
	}
}

// breakLocked has all further calls of CUDA answer with an error. The first one stays.
func (w *World) breakLocked(p *process, with Return) { p.broken = cmp.Or(p.broken, with) }

// leaveLocked is the end of a client's process. One that had work on the GPU, and was not detached
// before, takes its neighbours with it.
func (w *World) leaveLocked(p *process) {
	s := p.mps
	if s == nil {
		return
	}
	p.mps = nil
	if p.broken == Success && w.isBusyLocked(p.pid, s.g) {
		w.faultLocked(s)
	}
	if len(w.ofServerLocked(s)) == 0 {
		s.fault = false
	}
}

func (w *World) isBusyLocked(pid int, g *gpu) bool {
	return slices.ContainsFunc(w.busy, func(b busyTime) bool {
		return b.pid == pid && b.gpu == g.slot && b.percent > 0 && b.until.IsZero()
	})
}

func (w *World) serverOfLocked(g *gpu) *mpsServer {
	for _, s := range w.mps {
		if s.g == g {
			return s
		}
	}
	return nil
}

func (w *World) ofServerLocked(s *mpsServer) (list []*process) {
	for p := range w.sessions {
		if p.mps == s {
			list = append(list, p)
		}
	}
	return list
}

// MPSServers are the MPS servers, in the order of their PIDs.
func (w *World) MPSServers() []MPSServer {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.mpsServersLocked()
}

func (w *World) mpsServersLocked() (list []MPSServer) {
	w.buryLocked()
	for _, pid := range slices.Sorted(maps.Keys(w.mps)) {
		s := w.mps[pid]
		out := MPSServer{PID: pid, GPU: s.g.slot, Percent: s.percent, Fault: s.fault}
		for _, p := range w.ofServerLocked(s) {
			out.Clients = append(out.Clients, p.pid)
		}
		slices.Sort(out.Clients)
		list = append(list, out)
	}
	return list
}

// JoinMPS makes the process a client of a server, by the server's PID as the world knows it. It then
// has the server's GPU alone.
func (s *Session) JoinMPS(server int) Return {
	_, r := node(s, "cuEmulatorMPS", func(w *World) (struct{}, Return) {
		m := w.mps[server]
		switch {
		case m == nil || !slices.Contains(s.p.gpus, m.g):
			return struct{}{}, ErrMPSConnection
		case len(w.ofServerLocked(m)) >= MostMPSClients:
			return struct{}{}, ErrMPSClients
		}
		s.p.mps = m
		return struct{}{}, Success
	})
	return r
}

// SMs is how many multiprocessors a context has that the process makes now, if its own variable
// says so many percent; 0 says nothing. The variable only lowers. A card gives multiprocessors in
// pairs: of 188, 25 percent are 46.
func (s *Session) SMs(h Handle, percent float64) (uint32, Return) {
	return about(s, "cuEmulatorSMs", h, 0, func(t target) (uint32, Return) {
		all := t.multiprocessors()
		m := s.p.mps
		if m == nil {
			return all, Success
		}
		most := m.percent
		if percent > 0 && percent < most {
			most = percent
		}
		return max(2, uint32(float64(all)*most/100)/2*2), Success
	})
}

// leaveMPS undoes JoinMPS.
func (s *Session) leaveMPS() {
	w := s.p.w
	w.mu.Lock()
	defer w.mu.Unlock()
	w.leaveLocked(s.p)
}

var mpsCalls = map[string]call{
	"cuEmulatorMPS": {serve: func(s *Session, f *frame) Return { return s.JoinMPS(int(f.u32())) }},
	"cuEmulatorSMs": {serve: func(s *Session, f *frame) Return {
		n, r := s.SMs(f.handle, float64(f.u32())/100)
		return put(n, r, func(v uint32) { f.putU32(v) })
	}},
	// A call that has nothing to ask but whether the contexts still are.
	"cuEmulatorAlive": {serve: func(s *Session, f *frame) Return {
		_, r := node(s, f.name, func(*World) (struct{}, Return) { return struct{}{}, Success })
		return r
	}},
}
