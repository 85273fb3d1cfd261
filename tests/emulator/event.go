// SPDX-License-Identifier: Apache-2.0

package emulator

import (
	"fmt"
	"time"
)

// EventType is a bit set of nvmlEventType*.
type EventType uint64

// The events that the world raises or lets programs register for.
const (
	EventSingleBitECC EventType = 0x1
	EventDoubleBitECC EventType = 0x2
	EventPState       EventType = 0x4
	EventXid          EventType = 0x8
	EventClock        EventType = 0x10

	supportedEvents = EventSingleBitECC | EventDoubleBitECC | EventPState | EventXid | EventClock
)

// Event is what EventSetWait gives out; for an Xid, Data is its number.
type Event struct {
	GPU                          Handle
	Type                         EventType
	Data                         uint64
	GPUInstance, ComputeInstance uint32
}

// eventSet is guarded by World.mu.
type eventSet struct {
	owner   *process
	watched map[Handle]EventType
	pending []Event
}

// Xid raises a critical error on a GPU, with what the fault behind it does to
// the hardware: an error of memory is counted, a GPU that falls off the bus is
// lost. Every event set that listens there gets it once.
func (w *World) Xid(index int, xid uint64) error { return w.xid(place{index, -1, -1}, xid, true) }

// XidBare raises a critical error and leaves all else as it is.
func (w *World) XidBare(index int, xid uint64) error {
	return w.xid(place{index, -1, -1}, xid, false)
}

// XidOn is XidBare of an error that the driver can say the instances of: a GPU
// instance, and with ci not negative a compute instance of it.
func (w *World) XidOn(index, gi, ci int, xid uint64) error {
	return w.xid(place{index, gi, ci}, xid, false)
}

func (w *World) xid(at place, xid uint64, coupled bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	index := at.gpu
	g, err := w.gpuLocked(index)
	if err != nil {
		return err
	}
	if at.gi >= 0 && g.instanceLocked(at.gi) == nil || at.ci >= 0 && g.instanceLocked(at.gi).computeLocked(at.ci) == nil {
		return fmt.Errorf("GPU %d: compute instance %d of GPU instance %d: %w", index, at.ci, at.gi, NotFound)
	}
	if g.lost {
		return fmt.Errorf("GPU %d: %w: it raises no Xid", index, GPUIsLost)
	}
	w.raiseLocked(at, EventXid, xid)
	if coupled {
		w.coupleLocked(g, xid)
	}
	w.wakeLocked()
	return nil
}

func (w *World) raiseLocked(at place, t EventType, data uint64) {
	h := Handle(at.gpu)
	for _, set := range w.sets {
		if set.watched[h]&t != 0 { // -1 is NotMIG
			set.pending = append(set.pending, Event{GPU: h, Type: t, Data: data, GPUInstance: uint32(int32(at.gi)), ComputeInstance: uint32(int32(at.ci))})
		}
	}
}

// EventSetCreate makes an empty set.
func (s *Session) EventSetCreate() (uint32, Return) {
	return node(s, "nvmlEventSetCreate", func(w *World) (uint32, Return) {
		w.lastSet++
		w.sets[w.lastSet] = &eventSet{owner: s.p, watched: map[Handle]EventType{}}
		return w.lastSet, Success
	})
}

// SupportedEvents are the events that a GPU can raise.
func (s *Session) SupportedEvents(h Handle) (EventType, Return) {
	return device(s, "nvmlDeviceGetSupportedEventTypes", h, func(*gpu) (EventType, Return) {
		return supportedEvents, Success
	})
}

// RegisterEvents adds a GPU's events to a set; it refuses types that the GPU
// does not raise.
func (s *Session) RegisterEvents(h Handle, types EventType, set uint32) Return {
	_, r := device(s, "nvmlDeviceRegisterEvents", h, func(*gpu) (struct{}, Return) {
		es, ok := s.p.w.sets[set]
		switch {
		case !ok || es.owner != s.p || types == 0:
			return struct{}{}, InvalidArgument
		case types&^supportedEvents != 0:
			return struct{}{}, NotSupported
		}
		es.watched[h] |= types
		return struct{}{}, Success
	})
	return r
}

// EventSetWait waits for the set's next event: at most so long, then it
// answers Timeout. A set that watches a GPU that is lost answers GPUIsLost
// once the events before the loss have been given out.
func (s *Session) EventSetWait(set uint32, timeout time.Duration) (Event, Return) {
	r, late := s.enter("nvmlEventSetWait_v2", NoHandle)
	if r != Success {
		return Event{}, r
	}
	w := s.p.w
	defer w.mu.Unlock()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	for over := false; ; {
		es, ok := w.sets[set]
		if s.p.refs == 0 {
			return Event{}, Uninitialized
		}
		if !ok || es.owner != s.p {
			return Event{}, InvalidArgument
		}
		if len(es.pending) > 0 {
			e := es.pending[0]
			es.pending = es.pending[1:]
			return answered(e, Success, late)
		}
		for h := range es.watched {
			if s.p.dead[w.gpus[h]] {
				return Event{}, GPUIsLost
			}
		}
		if over {
			return Event{}, Timeout
		}
		changed := w.changed
		w.mu.Unlock()
		gone := false
		select {
		case <-changed:
		case <-timer.C:
			over = true
		case <-s.p.done:
			gone = true
		}
		w.mu.Lock()
		if gone {
			return Event{}, Unknown
		}
	}
}

// EventSetFree ends a set; a wait on it comes back with InvalidArgument.
func (s *Session) EventSetFree(set uint32) Return {
	_, r := node(s, "nvmlEventSetFree", func(w *World) (struct{}, Return) {
		if es, ok := w.sets[set]; !ok || es.owner != s.p {
			return struct{}{}, InvalidArgument
		}
		delete(w.sets, set)
		w.wakeLocked()
		return struct{}{}, Success
	})
	return r
}

func (w *World) dropSetsLocked(p *process) {
	for id, set := range w.sets {
		if set.owner == p {
			delete(w.sets, id)
		}
	}
	w.wakeLocked()
}

// wakeLocked makes whoever waits look again, without making kept answers
// stale.
func (w *World) wakeLocked() {
	close(w.changed)
	w.changed = make(chan struct{})
}
