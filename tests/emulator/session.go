// SPDX-License-Identifier: Apache-2.0

package emulator

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// Handle names a GPU or a MIG device to the driver, as nvmlDevice_t does, or a GPU
// instance or compute instance. A GPU's is the same while it is lost or unplugged
// and after. Of the others it is made of the ids: what is made again with the same
// ids has the same handle.
type Handle uint32

// NoHandle stands for the GPU of calls that are about none.
const NoHandle Handle = 0xFFFFFFFF

// The parts of a handle: the GPU's slot, the two ids plus one, and what it is of.
const (
	handleGI      = 4
	handleCI      = 8
	handlePart    = 1<<4 - 1
	aboutInstance = 1 << 16
	aboutCompute  = 1 << 17
)

func (h Handle) slot() int { return int(h & handlePart) }
func (h Handle) gi() int   { return int(h>>handleGI&handlePart) - 1 }
func (h Handle) ci() int   { return int(h>>handleCI&handlePart) - 1 }

func (gi *gpuInstance) handle() Handle {
	return aboutInstance | Handle(gi.gpu.slot) | Handle(gi.id+1)<<handleGI
}

func (ci *computeInstance) handle() Handle { return aboutCompute | ci.device() }

// device is the handle of the MIG device that the compute instance is.
func (ci *computeInstance) device() Handle {
	return Handle(ci.gi.gpu.slot) | Handle(ci.gi.id+1)<<handleGI | Handle(ci.id+1)<<handleCI
}

// target is what a handle names: a GPU, with gi a GPU instance of it, with ci a
// compute instance or the MIG device that it is.
type target struct {
	g  *gpu
	gi *gpuInstance
	ci *computeInstance
}

// targetLocked finds what a handle names.
func (s *Session) targetLocked(h Handle) (target, Return) {
	const ids = handlePart | handlePart<<handleGI | handlePart<<handleCI
	var sound bool
	switch h &^ ids {
	case 0:
		sound = (h.gi() < 0) == (h.ci() < 0)
	case aboutInstance:
		sound = h.gi() >= 0 && h.ci() < 0
	case aboutCompute:
		sound = h.gi() >= 0 && h.ci() >= 0
	}
	if !sound {
		return target{}, InvalidArgument
	}
	g, r := s.gpuLocked(Handle(h.slot()))
	if r != Success {
		return target{}, r
	}
	t := target{g: g}
	if h.gi() >= 0 {
		t.gi = g.instanceLocked(h.gi())
	}
	if h.ci() >= 0 {
		t.ci = t.gi.computeLocked(h.ci())
	}
	if h.gi() >= 0 && t.gi == nil || h.ci() >= 0 && t.ci == nil {
		return target{}, InvalidArgument // it is gone
	}
	return t, Success
}

// PageWords is the size, in words, of a session's page: the generation of the
// static answers, then one counter for each call that the world has seen. One word
// follows: not 0 while the process is locked, so that its calls have to wait.
const PageWords = 2048

// Session is one process's use of the driver. A Session may be used from many
// goroutines.
type Session struct {
	p  *process
	as string
}

// process is what the driver knows of a process that has it open.
type process struct {
	w      *World
	pid    int
	root   bool
	see    func(pid int) (int, bool)
	node   func(minor int) bool
	can    func(minor, gi, ci int) bool
	alive  func() bool
	cgroup func(fd int) (Cgroup, error)
	page   []uint64 // words are read and added to atomically, also by the process itself
	done   chan struct{}
	end    sync.Once
	// Guarded by w.mu:
	refs int           // nvmlInit less nvmlShutdown
	gpus []*gpu        // found when refs became 1: those that the process can open, in its own order
	dead map[*gpu]bool // those that vanished since then, or were lost already
	// charged is the memory that it has through CUDA, in bytes.
	charged map[place]uint64
	// container never changes.
	container string
	// mps is the server that it is a client of, nil if none. broken is what its calls of CUDA answer
	// since its contexts have ended, Success while they have not.
	mps    *mpsServer
	broken Return
	park   parked
}

// reachable are the GPUs whose device nodes the process can open. It may take
// the time of some system calls.
func (p *process) reachable() []*gpu {
	var out []*gpu
	for _, g := range p.w.gpus { // neither the list nor a minor ever changes
		if p.node == nil || p.node(g.minor) {
			out = append(out, g)
		}
	}
	return out
}

// findLocked makes the session's GPUs what there is now, and says whether they
// are others than before.
func (p *process) findLocked(reachable []*gpu) bool {
	before, dead := p.gpus, p.dead
	p.gpus, p.dead = nil, map[*gpu]bool{}
	for _, g := range reachable {
		if g.unplugged {
			continue
		}
		p.gpus = append(p.gpus, g)
		if g.lost {
			p.dead[g] = true
		}
	}
	return !slices.Equal(before, p.gpus) || !maps.Equal(dead, p.dead)
}

// Opening says who opens the driver.
type Opening struct {
	// PID of the process, in the world's PID namespace.
	PID int
	// Unprivileged processes may look but not change anything.
	Unprivileged bool
	// See translates a PID into the process's PID namespace; false leaves the
	// process out of its lists. Nil sees every PID as it is.
	See func(pid int) (int, bool)
	// Node says whether the process can open the device node of a minor; the
	// driver counts and numbers only those GPUs. Nil is all of them.
	Node func(minor int) bool
	// Capability says whether the process can open the device node that gives
	// access to an instance, by its GPU's minor: to a GPU instance where ci is -1,
	// and to all of MIG, to look and to change, where gi is -1 too. It is asked at
	// every such call, and must not take long. Nil is all.
	Capability func(minor, gi, ci int) bool
	// Alive says whether the process still runs: the memory of a dead one is
	// free at once, and not only when its session is closed. It must not take
	// long. Nil is until Close.
	Alive func() bool
	// Cgroup opens the control group that a descriptor of the process is of. Nil is
	// a machine without any.
	Cgroup func(fd int) (Cgroup, error)
	// Container is the ID of the container that the process is in: the books have
	// the most that each had together. Empty is none.
	Container string
	// Page is memory of PageWords words, and one more, shared with the process, which counts
	// there the calls that it answers from what it has kept. Nil for none.
	Page []uint64
	// Initialised opens a session that has called Init so many times already,
	// which is how a forked child comes.
	Initialised int
}

// Open starts a session.
func (w *World) Open(o Opening) *Session {
	p := &process{w: w, pid: o.PID, root: !o.Unprivileged, see: o.See, node: o.Node, alive: o.Alive, cgroup: o.Cgroup, container: o.Container, can: o.Capability, charged: map[place]uint64{}, page: o.Page, done: make(chan struct{}), refs: o.Initialised}
	if p.see == nil {
		p.see = func(pid int) (int, bool) { return pid, true }
	}
	if p.page == nil {
		p.page = make([]uint64, PageWords+1)
	}
	reachable := p.reachable()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sessions[p] = struct{}{}
	p.findLocked(reachable)
	atomic.StoreUint64(&p.page[0], w.generation)
	return &Session{p: p}
}

// Close ends a session, as the death of its process does: its event sets go,
// and calls of it that still wait come back.
func (s *Session) Close() {
	s.p.end.Do(func() {
		close(s.p.done)
		w := s.p.w
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.sessions, s.p)
		w.leaveLocked(s.p)
		w.dropSetsLocked(s.p)
		w.releaseLocked(s.p)
		for i := range w.ended {
			w.ended[i] += atomic.LoadUint64(&s.p.page[i])
		}
		atomic.StoreUint64(&s.p.page[0], 0) // no answer holds for it
	})
}

// As returns the session with the name under which its next calls are counted
// and meet faults: programs reach one answer under several exported names.
func (s *Session) As(call string) *Session { return &Session{p: s.p, as: call} }

// slotLocked is the place of a call's counter in the pages. The last one is
// shared by all calls that find no place of their own.
func (w *World) slotLocked(call string) int {
	if i, ok := w.slots[call]; ok {
		return i
	}
	i := len(w.names) + 1
	if i >= PageWords {
		return PageWords - 1
	}
	w.names = append(w.names, call)
	w.slots[call] = i
	return i
}

// enter is the first thing every call does: it counts the call, lets faults
// act and checks the handle. On Success the world's mutex is held and the
// caller unlocks it; otherwise it is not. late is what the call answers, unless
// it is Success, once it has done its work.
func (s *Session) enter(call string, h Handle) (r, late Return) {
	if s.as != "" {
		call = s.as
	}
	w := s.p.w
	w.mu.Lock()
	atomic.AddUint64(&s.p.page[w.slotLocked(call)], 1)
	r, late = s.admitLocked(call, h)
	if r != Success {
		w.mu.Unlock()
	}
	return r, late
}

func (s *Session) admitLocked(call string, h Handle) (r, late Return) {
	w := s.p.w
	if w.unloaded {
		return DriverNotLoaded, Success
	}
	if f := w.takeFaultLocked(call, h); f != nil {
		if !s.holdLocked(f) {
			return Unknown, Success
		}
		if f.Late {
			late = f.Code
		} else if f.Code != Success {
			return f.Code, Success
		}
	}
	if strings.HasPrefix(call, "cu") && !s.awaitTurnLocked() {
		return Unknown, Success
	}
	if s.p.broken != Success && strings.HasPrefix(call, "cu") {
		return s.p.broken, Success
	}
	if _, open := w.sessions[s.p]; !open {
		return Uninitialized, Success // a call that was on its way when its process died
	}
	if slices.ContainsFunc(w.lacks, func(pattern string) bool { return matches(pattern, call) }) {
		return NotSupported, Success
	}
	if h == NoHandle {
		return Success, late
	}
	t, r := s.targetLocked(h)
	if r == Success && slices.ContainsFunc(t.g.NotSupported, func(pattern string) bool { return matches(pattern, call) }) {
		return NotSupported, Success
	}
	return r, late
}

// answered is a call's answer, or late in place of Success.
func answered[T any](v T, r, late Return) (T, Return) {
	if r == Success && late != Success {
		var none T
		return none, late
	}
	return v, r
}

// gpuLocked is the GPU of a handle that the process may use.
func (s *Session) gpuLocked(h Handle) (*gpu, Return) {
	i := slices.IndexFunc(s.p.gpus, func(g *gpu) bool { return g.slot == int(h) })
	switch {
	case i < 0:
		return nil, InvalidArgument
	case s.p.dead[s.p.gpus[i]]:
		return nil, GPUIsLost
	}
	return s.p.gpus[i], Success
}

// node answers a call that is about no GPU.
func node[T any](s *Session, call string, answer func(w *World) (T, Return)) (T, Return) {
	var none T
	r, late := s.enter(call, NoHandle)
	if r != Success {
		return none, r
	}
	defer s.p.w.mu.Unlock()
	if s.p.refs == 0 {
		return none, Uninitialized
	}
	v, r := answer(s.p.w)
	return answered(v, r, late)
}

// device answers a call about a GPU.
func device[T any](s *Session, call string, h Handle, answer func(g *gpu) (T, Return)) (T, Return) {
	var none T
	r, late := s.enter(call, h)
	if r != Success {
		return none, r
	}
	defer s.p.w.mu.Unlock()
	if s.p.refs == 0 {
		return none, Uninitialized
	}
	if h == NoHandle || h != Handle(h.slot()) {
		return none, InvalidArgument // a MIG device will not do
	}
	v, r := answer(s.p.w.gpus[h])
	return answered(v, r, late)
}

// about answers a call about anything that has a handle, of the kind that want
// says: 0 is a GPU or a MIG device.
func about[T any](s *Session, call string, h Handle, want Handle, answer func(t target) (T, Return)) (T, Return) {
	var none T
	r, late := s.enter(call, h)
	if r != Success {
		return none, r
	}
	defer s.p.w.mu.Unlock()
	if s.p.refs == 0 {
		return none, Uninitialized
	}
	if h == NoHandle || h&(aboutInstance|aboutCompute) != want {
		return none, InvalidArgument
	}
	t, _ := s.targetLocked(h)
	v, r := answer(t)
	return answered(v, r, late)
}

// CallCount is how often a call was made.
type CallCount struct {
	Call  string `json:"call"`
	Count uint64 `json:"count"`
}

// Calls counts the driver calls since the last ResetCalls, by exported name:
// of one process if pid is not zero, else of all, those that have ended
// included. Calls that were never made are left out.
func (w *World) Calls(pid int) []CallCount {
	w.mu.Lock()
	defer w.mu.Unlock()
	counts := w.countLocked(pid)
	var out []CallCount
	for _, name := range w.names {
		i := w.slots[name]
		n := counts[i]
		if pid == 0 {
			n -= w.baseline[i]
		}
		if n > 0 {
			out = append(out, CallCount{name, n})
		}
	}
	slices.SortFunc(out, func(a, b CallCount) int { return cmp.Compare(a.Call, b.Call) })
	return out
}

// ResetCalls starts the counting of all processes together anew. A single
// process's count runs from its start.
func (w *World) ResetCalls() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.baseline = w.countLocked(0)
}

func (w *World) countLocked(pid int) []uint64 {
	counts := make([]uint64, PageWords)
	if pid == 0 {
		copy(counts, w.ended)
	}
	for p := range w.sessions {
		if pid == 0 || p.pid == pid {
			for i := range counts {
				counts[i] += atomic.LoadUint64(&p.page[i])
			}
		}
	}
	return counts
}
