// SPDX-License-Identifier: Apache-2.0

package emulator

import (
	"fmt"
	"path"
	"slices"
	"time"
)

// Fault makes driver calls slow, or fail, or both. Of several faults that
// match a call the first one injected acts.
type Fault struct {
	// Call is the exported name of the call, or a pattern of path.Match such
	// as nvmlDevice*.
	Call string `json:"call"`
	// GPU limits the fault to calls about one GPU, by index; nil is any call.
	GPU *int `json:"gpu,omitempty"`
	// Code is what the call answers; Success lets it go on after the delay.
	Code Return `json:"code,omitempty"`
	// Late lets the call do its work before it answers Code.
	Late bool `json:"late,omitempty"`
	// Skip lets so many calls pass before the first that it acts on, and Every so
	// many less one between any two: with Skip k-1 and Count 1 the k-th call fails,
	// with Every 10 one in ten, the tenth first.
	Skip  int `json:"skip,omitempty"`
	Every int `json:"every,omitempty"`
	// Count ends the fault after it has acted on so many calls; 0 leaves it until
	// Clear.
	Count int `json:"count,omitempty"`
	// Delay holds the call for so long, Hang until Clear. In both cases other
	// calls go on.
	Delay time.Duration `json:"delay,omitempty"`
	Hang  bool          `json:"hang,omitempty"`
}

type fault struct {
	Fault
	cleared bool
	passed  int // calls that it has let pass since it last acted
}

// Inject adds a fault.
func (w *World) Inject(f Fault) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, err := path.Match(f.Call, ""); err != nil || f.Call == "" {
		return fmt.Errorf("fault: call %q is neither a name nor a pattern", f.Call)
	}
	if f.Code == Success && (f.Late || f.Delay <= 0 && !f.Hang) {
		return fmt.Errorf("fault on %s: neither a code nor a delay", f.Call)
	}
	if f.Count < 0 || f.Skip < 0 || f.Every < 0 {
		return fmt.Errorf("fault on %s: count %d, skip %d, every %d: none may be negative", f.Call, f.Count, f.Skip, f.Every)
	}
	if f.GPU != nil {
		if _, err := w.gpuLocked(*f.GPU); err != nil {
			return fmt.Errorf("fault on %s: %w", f.Call, err)
		}
	}
	w.faults = append(w.faults, &fault{Fault: f})
	w.touchLocked()
	return nil
}

// Clear ends all faults; calls that hang go on.
func (w *World) Clear() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range w.faults {
		f.cleared = true
	}
	w.faults = nil
	w.touchLocked()
}

// Faults are those that may still act, each with the Skip and the Count that it has
// left.
func (w *World) Faults() []Fault {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := make([]Fault, len(w.faults))
	for i, f := range w.faults {
		out[i] = f.Fault
	}
	return out
}

// takeFaultLocked finds the fault that a call meets and counts it.
func (w *World) takeFaultLocked(call string, h Handle) *fault {
	for i, f := range w.faults {
		if f.GPU != nil && (h == NoHandle || h.slot() != *f.GPU) {
			continue
		}
		if ok, _ := path.Match(f.Call, call); !ok {
			continue
		}
		if f.Skip > 0 {
			f.Skip--
			continue
		}
		if f.passed++; f.passed < f.Every {
			continue
		}
		f.passed = 0
		if f.Count > 0 {
			if f.Count--; f.Count == 0 {
				w.faults = slices.Delete(w.faults, i, i+1)
			}
		}
		return f
	}
	return nil
}

// holdLocked keeps a call for as long as its fault says, letting others work.
// It reports false if the session ended meanwhile.
func (s *Session) holdLocked(f *fault) bool {
	w := s.p.w
	if f.Delay <= 0 && !f.Hang {
		return true
	}
	var after <-chan time.Time
	if !f.Hang {
		t := time.NewTimer(f.Delay)
		defer t.Stop()
		after = t.C
	}
	for !f.cleared {
		changed := w.changed
		w.mu.Unlock()
		over, gone := false, false
		select {
		case <-after:
			over = true
		case <-s.p.done:
			gone = true
		case <-changed:
		}
		w.mu.Lock()
		if gone {
			return false
		}
		if over {
			return true
		}
	}
	return true
}
