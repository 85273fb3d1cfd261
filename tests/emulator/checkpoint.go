// SPDX-License-Identifier: Apache-2.0

package emulator

import (
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"
)

// CheckpointState is the state of a process as cuCheckpointProcessGetState has it, with the numbers
// of CUprocessState.
type CheckpointState uint32

// The states. A process calls CUDA in the first alone; its calls wait in the next two.
const (
	Running CheckpointState = iota
	Locked
	Checkpointed
	Failed // it was broken by a checkpoint or a restore, for good
)

// CUDA's errors of the calls that checkpoint.
const (
	ErrIllegalState Return = 401 // the call is not for a process in this state
	ErrNotReady     Return = 600 // the process could not be locked in time
)

// firstCheckpoint is the version of CUDA that the calls came with, as cuDriverGetVersion has it.
const firstCheckpoint = 12080

// mostWords bounds the contents that the world keeps of a process.
const mostWords = 4096

// parked is what the world knows of a process's checkpoint. All is guarded by w.mu.
type parked struct {
	state CheckpointState
	busy  bool // a call of the process does not return, so it cannot be locked
	// host is the memory that a checkpoint has moved from the cards to the process, in bytes.
	host map[place]uint64
	// words are contents of the card by address, saved those of the checkpoint: the card keeps none of
	// a process that has no memory on it.
	words, saved map[uint64]uint64
}

// Parked is a process that is not running, as State has it.
type Parked struct {
	PID   int             `json:"pid"`
	State CheckpointState `json:"state"`
	Bytes uint64          `json:"bytes"` // of the cards' memory that the process has on the host
}

// parkedLocked lists the processes that are not running, by PID.
func (w *World) parkedLocked() []Parked {
	var list []Parked
	for p := range w.sessions {
		if p.park.state == Running || p.alive != nil && !p.alive() {
			continue
		}
		of := Parked{PID: p.pid, State: p.park.state}
		for _, bytes := range p.park.host {
			of.Bytes += bytes
		}
		list = append(list, of)
	}
	slices.SortFunc(list, func(a, b Parked) int { return a.PID - b.PID })
	return list
}

// SetBusy says whether a call of a process does not return. Such a process cannot be locked.
func (w *World) SetBusy(pid int, busy bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	found := false
	for p := range w.sessions {
		if p.pid == pid {
			p.park.busy, found = busy, true
		}
	}
	if !found {
		return fmt.Errorf("process %d: %w", pid, NotFound)
	}
	w.wakeLocked()
	return nil
}

// setStateLocked also tells the process, which then waits before its next call.
func (p *process) setStateLocked(state CheckpointState) {
	p.park.state = state
	waits := uint64(0)
	if state == Locked || state == Checkpointed {
		waits = 1
	}
	atomic.StoreUint64(&p.page[PageWords], waits)
	p.w.wakeLocked()
}

// awaitTurnLocked keeps a call of CUDA while the process is locked. It reports false if the process
// has ended.
func (s *Session) awaitTurnLocked() bool {
	w := s.p.w
	for s.p.park.state == Locked || s.p.park.state == Checkpointed {
		if !s.awaitLocked(nil) {
			return false
		}
		if _, open := w.sessions[s.p]; !open {
			return false
		}
	}
	return true
}

// awaitLocked waits for the next change of the world. It reports false if the session has ended or
// the time is over.
func (s *Session) awaitLocked(over <-chan time.Time) bool {
	w := s.p.w
	changed := w.changed
	w.mu.Unlock()
	defer w.mu.Lock()
	select {
	case <-changed:
		return true
	case <-over:
	case <-s.p.done:
	}
	return false
}

// checkpoints answers a call about another process. A fault that answers Unknown breaks the process
// where the call changes its memory; any other leaves it as it was, or with Late as the call made it.
func checkpoints(s *Session, call string, pid int, breaks bool, answer func(w *World, p *process) Return) Return {
	r, late := s.enter(call, NoHandle)
	w := s.p.w
	if r != Success {
		w.mu.Lock()
	}
	defer w.mu.Unlock()
	p := s.ofLocked(pid)
	switch {
	case r == Unknown && breaks && p != nil && p.park.state != Running && !s.ended():
		p.setStateLocked(Failed)
		p.broken = ErrLaunch
		return Unknown
	case r != Success:
		return r
	case s.p.refs == 0:
		return Uninitialized
	case w.cuda < firstCheckpoint:
		return NotSupported
	case p == nil || p.refs == 0:
		return InvalidArgument
	case !s.p.root:
		return NoPermission
	}
	if r := answer(w, p); r != Success {
		return r
	}
	return late
}

// ended says whether the process of a session is dead. A caller that dies while a fault delays its call
// breaks nobody.
func (s *Session) ended() bool {
	select {
	case <-s.p.done:
		return true
	default:
		return false
	}
}

// ofLocked finds a process by its PID in the session's PID namespace. A process with several sessions
// has those of programs that it was before; the one that is open is the last.
func (s *Session) ofLocked(pid int) *process {
	for p := range s.p.w.sessions {
		if p.alive != nil && !p.alive() {
			continue
		}
		if seen, ok := s.p.see(p.pid); ok && seen == pid && p.refs > 0 {
			return p
		}
	}
	return nil
}

// CheckpointState is cuCheckpointProcessGetState.
func (s *Session) CheckpointState(pid int) (state CheckpointState, r Return) {
	r = checkpoints(s, "cuCheckpointProcessGetState", pid, false, func(_ *World, p *process) Return {
		state = p.park.state
		return Success
	})
	return state, r
}

// CheckpointThread is cuCheckpointProcessGetRestoreThreadId: here the program's first thread.
func (s *Session) CheckpointThread(pid int) (tid int, r Return) {
	r = checkpoints(s, "cuCheckpointProcessGetRestoreThreadId", pid, false, func(*World, *process) Return {
		tid = pid
		return Success
	})
	return tid, r
}

// Lock is cuCheckpointProcessLock: from then on the process's calls of CUDA wait. It waits for a call
// that does not return, for as long as the timeout says, 0 without end. It refuses what the hardware
// cannot checkpoint: processes on MIG devices, and MPS's clients and servers.
func (s *Session) Lock(pid int, timeout time.Duration) Return {
	return checkpoints(s, "cuCheckpointProcessLock", pid, false, func(w *World, p *process) Return {
		if p.park.state != Running {
			return ErrIllegalState
		}
		for at := range p.charged {
			if at.gi >= 0 {
				return NotSupported
			}
		}
		if p.mps != nil || w.mps[p.pid] != nil {
			return NotSupported
		}
		var over <-chan time.Time
		if timeout > 0 {
			t := time.NewTimer(timeout)
			defer t.Stop()
			over = t.C
		}
		for p.park.busy {
			if !s.awaitLocked(over) {
				return ErrNotReady
			}
			if _, open := w.sessions[p]; !open {
				return InvalidArgument
			}
		}
		if p.park.state != Running {
			return ErrIllegalState // another caller was first
		}
		p.setStateLocked(Locked)
		return Success
	})
}

// Checkpoint is cuCheckpointProcessCheckpoint: the process's memory leaves the cards. It refuses a
// process that shares memory with others, and leaves it locked.
func (s *Session) Checkpoint(pid int) Return {
	return checkpoints(s, "cuCheckpointProcessCheckpoint", pid, true, func(w *World, p *process) Return {
		if p.park.state != Locked {
			return ErrIllegalState
		}
		for _, of := range w.shares {
			if of.refs[p] > 0 || of.owner == p {
				return NotSupported
			}
		}
		p.park.host = maps.Clone(p.charged)
		for at, bytes := range p.park.host {
			w.refundLocked(p, at, bytes)
		}
		p.park.saved, p.park.words = p.park.words, nil
		p.setStateLocked(Checkpointed)
		return Success
	})
}

// Restore is cuCheckpointProcessRestore: the memory is on the same cards again, and the process is
// locked. It answers OutOfMemory where a card has no room; the process stays as it was then.
func (s *Session) Restore(pid int) Return {
	return checkpoints(s, "cuCheckpointProcessRestore", pid, true, func(w *World, p *process) Return {
		if p.park.state != Checkpointed {
			return ErrIllegalState
		}
		w.buryLocked()
		for at, bytes := range p.park.host {
			g := w.gpus[at.gpu]
			switch {
			case g.lost:
				return GPUIsLost
			case bytes > w.freeLocked(target{g: g}) || !w.allowsLocked(g, p.pid, bytes):
				return OutOfMemory
			}
		}
		for at, bytes := range p.park.host {
			g := w.gpus[at.gpu]
			g.charged += bytes
			p.charged[at] += bytes
			w.peakLocked(g)
			w.bookLocked(g, p)
		}
		p.park.words, p.park.saved, p.park.host = p.park.saved, nil, nil
		p.setStateLocked(Locked)
		return Success
	})
}

// Unlock is cuCheckpointProcessUnlock: the process's calls go on.
func (s *Session) Unlock(pid int) Return {
	return checkpoints(s, "cuCheckpointProcessUnlock", pid, false, func(_ *World, p *process) Return {
		if p.park.state != Locked {
			return ErrIllegalState
		}
		p.setStateLocked(Running)
		return Success
	})
}

// Store keeps a word of the card's memory at an address. The world keeps the contents of words that
// a program copies one at a time, at most 4096 of a process; all other memory has none.
func (s *Session) Store(address, word uint64) Return {
	_, r := node(s, "cuEmulatorStore", func(*World) (struct{}, Return) {
		words := s.p.park.words
		if _, known := words[address]; !known && len(words) >= mostWords {
			return struct{}{}, OutOfMemory
		}
		if words == nil {
			words = map[uint64]uint64{}
			s.p.park.words = words
		}
		words[address] = word
		return struct{}{}, Success
	})
	return r
}

// Load returns the word at an address, 0 if none was stored.
func (s *Session) Load(address uint64) (uint64, Return) {
	return node(s, "cuEmulatorLoad", func(*World) (uint64, Return) { return s.p.park.words[address], Success })
}

func checkpointCall(do func(s *Session, pid int) Return) call {
	return call{serve: func(s *Session, f *frame) Return {
		pid := int(int32(f.u32()))
		if f.bad || pid <= 0 {
			return InvalidArgument
		}
		return do(s, pid)
	}}
}

var checkpointCalls = map[string]call{
	"cuCheckpointProcessGetState": {serve: func(s *Session, f *frame) Return {
		state, r := s.CheckpointState(int(int32(f.u32())))
		return put(state, r, func(v CheckpointState) { f.putU32(uint32(v)) })
	}},
	"cuCheckpointProcessGetRestoreThreadId": {serve: func(s *Session, f *frame) Return {
		tid, r := s.CheckpointThread(int(int32(f.u32())))
		return put(tid, r, func(v int) { f.putInt(v) })
	}},
	"cuCheckpointProcessLock": {serve: func(s *Session, f *frame) Return {
		pid, ms := int(int32(f.u32())), f.u32()
		if f.bad {
			return InvalidArgument
		}
		return s.Lock(pid, time.Duration(ms)*time.Millisecond)
	}},
	"cuCheckpointProcessCheckpoint": checkpointCall((*Session).Checkpoint),
	"cuCheckpointProcessRestore":    checkpointCall((*Session).Restore),
	"cuCheckpointProcessUnlock":     checkpointCall((*Session).Unlock),
	// A call of a locked process waits like any other.
	"cuEmulatorTurn": {serve: func(s *Session, f *frame) Return {
		_, r := node(s, f.name, func(*World) (struct{}, Return) { return struct{}{}, Success })
		return r
	}},
	"cuEmulatorStore": {serve: func(s *Session, f *frame) Return { return s.Store(f.u64(), f.u64()) }},
	"cuEmulatorLoad": {serve: func(s *Session, f *frame) Return {
		word, r := s.Load(f.u64())
		return put(word, r, func(v uint64) { f.putU64(v) })
	}},
}
