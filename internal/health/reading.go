// SPDX-License-Identifier: Apache-2.0

package health

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// Reading adds an answer of the driver. It reports whether a verdict, or the result of Waiting,
// changed.
func (m *Monitor) Reading(r Reading, now time.Time) (changed bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lastRead = now
	if errors.Is(r.Err, gpu.ErrTimeout) {
		return m.waitLocked(fmt.Sprintf("reading the GPUs: %v", r.Err), now)
	}
	if r.Err != nil {
		changed = m.waitLocked("", now)
		c := noDriver(r.Err)
		for _, g := range m.gpus {
			if g.known {
				changed = g.complain(c, now) || changed
			}
		}
		return changed
	}

	m.load = cmp.Or(r.Load, m.load)
	listed := make(map[gpu.UUID]bool, len(r.GPUs))
	var hung []string
	for _, gr := range r.GPUs {
		u := gr.Device.UUID
		if u == "" {
			continue // a GPU without a UUID offers no device
		}
		listed[u] = true
		g := m.knowLocked(u)
		if g == nil {
			continue
		}
		if errors.Is(gr.Err, gpu.ErrTimeout) {
			hung = append(hung, fmt.Sprintf("%s: %v", u, gr.Err))
			continue
		}
		changed = g.read(gr, m.load, m.hold, now) || changed
	}
	for u, g := range m.gpus {
		if listed[u] {
			continue
		}
		if !g.known {
			changed = g.faulty() || changed
			delete(m.gpus, u)
			continue
		}
		changed = g.endDriver() || changed
		unlisted := complaint{
			key: faultKey(ClassLost, -1, -1), detail: "the driver no longer lists the GPU", needs: NeedsNothing,
			away: true, load: m.load,
		}
		changed = g.complain(unlisted, now) || changed
	}
	slices.Sort(hung)
	return m.waitLocked(strings.Join(hung, "; "), now) || changed
}

// waitLocked sets what hangs. The time of its beginning stays while anything hangs.
func (m *Monitor) waitLocked(what string, now time.Time) bool {
	was := m.waiting
	if was == "" && what != "" {
		m.waitingSince = now
	} else if what == "" {
		m.waitingSince = time.Time{}
	}
	m.waiting = clip(what)
	return was != m.waiting
}

// noDriver returns the complaint about a driver that cannot be asked.
func noDriver(err error) complaint {
	c := complaint{key: faultKey(ClassDriver, -1, -1), detail: err.Error(), needs: NeedsDriver}
	if errors.Is(err, gpu.ErrReloaded) {
		c.needs = NeedsRestart
	}
	return c
}

// read adds the driver's answer about this GPU. load is the loading of that driver.
func (g *card) read(gr GPUReading, load string, hold time.Duration, now time.Time) (changed bool) {
	complaints := judge(gr)
	if !slices.ContainsFunc(complaints, func(c complaint) bool { return c.class == ClassDriver }) {
		changed = g.endDriver()
	}
	for _, c := range complaints {
		c.load = load
		changed = g.complain(c, now) || changed
	}
	answers := gr.Device.Fault == "" && (gr.Err == nil || errors.Is(gr.Err, gpu.ErrNotSupported))
	for k, f := range g.faults {
		if f.last.After(now) {
			f.last = now // the clock was put back
		}
		complained := slices.ContainsFunc(complaints, func(c complaint) bool { return c.key == k })
		if !f.over && f.waits(k.class) {
			changed = f.findReset(k.class, gr.Health, load, answers && !complained) || changed
		}
		switch {
		case f.over:
			if now.Sub(f.last) > flapWindow {
				delete(g.faults, k)
			}
			continue
		case !answers || complained:
			continue
		case k.gi >= 0 && !exists(gr.Device, k):
			changed = true
			delete(g.faults, k)
			continue
		case f.waits(k.class) && !f.reset:
			continue
		case rules[rank(k.class)].proof && !figuresBack(gr.Health):
			continue
		case k.class == ClassFirmware || k.class == ClassLink || k.class == ClassRecovery:
			if gr.Health != nil && gr.Health.Recovery.Needed() {
				continue
			}
		}
		f.clean = true
		if now.Sub(f.last) >= hold<<f.strikes {
			f.over, changed = true, true
		}
	}
	return changed
}

// waits reports whether the fault ends only after a reset, since a GPU may run on quietly with
// what is broken in it. A fault of an unknown class does so if its needs ask for a reset.
func (f *fault) waits(class Class) bool {
	return rules[rank(class)].reset || gpu.Recovery(f.needs).Resets()
}

// findReset looks in an answer for signs of a reset, and reports whether f.reset changed. here is
// true if the driver has the GPU and has no complaint of the class.
func (f *fault) findReset(class Class, h *gpu.Health, load string, here bool) (changed bool) {
	was, begun := f.reset, false
	if load != "" && f.load != "" && load != f.load {
		begun = true // the driver was loaded anew
	}
	f.load = cmp.Or(load, f.load)
	if here && f.away {
		begun = true // the driver finds a lost GPU again only after a reset
	}
	if h != nil {
		begun = begun || f.asked && h.Recovery == gpu.RecoveryNone ||
			f.errors && h.Uncorrected != nil && *h.Uncorrected == 0 ||
			f.failed && h.Remap != nil && !h.Remap.Failed
		// Xid 154 reports a change of what the driver asks for, also to nothing. If a complaint
		// may be about several GPUs, it is not about those where the driver asks for nothing.
		begun = begun || (class == ClassRecovery || f.nameless) && h.Recovery == gpu.RecoveryNone
	}
	if begun {
		f.resetSigns = resetSigns{load: f.load, reset: true}
	}
	if h != nil {
		if h.Recovery.Resets() {
			f.asked, f.reset = true, false
		}
		f.errors = f.errors || class == ClassMemory && h.Uncorrected != nil && *h.Uncorrected > 0
		f.failed = f.failed || class == ClassRemapFailed && h.Remap != nil && h.Remap.Failed
	}
	return f.reset != was
}

// WasReset adds a reset of a GPU at a time. Faults that complained only before it end, once the
// GPU is quiet. WasReset reports whether a verdict changed.
func (m *Monitor) WasReset(u gpu.UUID, at time.Time) (changed bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	g := m.gpus[u]
	if g == nil {
		return false
	}
	for k, f := range g.faults {
		if !f.over && !f.reset && f.waits(k.class) && f.last.Before(at) {
			f.resetSigns, changed = resetSigns{load: f.load, reset: true}, true
		}
	}
	return changed
}

// endDriver removes a driver fault without a trace, since the card was not at fault.
func (g *card) endDriver() bool {
	k := faultKey(ClassDriver, -1, -1)
	_, had := g.faults[k]
	delete(g.faults, k)
	return had
}

// faulty reports whether any fault is in force.
func (g *card) faulty() bool {
	for _, f := range g.faults {
		if !f.over {
			return true
		}
	}
	return false
}

// exists reports whether the device still has the instance that a fault names.
func exists(d gpu.Device, k key) bool {
	return slices.ContainsFunc(d.MIG.Instances, func(i gpu.Instance) bool {
		return i.GI == k.gi && (k.ci < 0 || i.CI < 0 || i.CI == k.ci)
	})
}

// figuresBack reports whether the figures are those of a GPU that has been reset. A figure that the
// card does not have is ignored.
func figuresBack(h *gpu.Health) bool {
	return h == nil || (h.Uncorrected == nil || *h.Uncorrected == 0) &&
		(h.Remap == nil || *h.Remap == gpu.Remap{}) && !h.RetirePending && !h.Recovery.Needed()
}

// judge returns the complaints in an answer. Counters alone are no complaint: an uncorrected
// error may have been contained, and a pending remap waits for a reset while the GPU works on.
func judge(gr GPUReading) (all []complaint) {
	add := func(class Class, detail, needs string) {
		all = append(all, complaint{
			key: faultKey(class, -1, -1), detail: detail, needs: needs, away: class == ClassLost,
		})
	}
	if f := gr.Device.Fault; f != "" {
		if gr.Device.Gone || gr.Device.Lost {
			add(ClassLost, f, NeedsReset)
		} else {
			add(ClassUnreadable, f, NeedsNothing)
		}
	}
	switch err := gr.Err; {
	case err == nil || errors.Is(err, gpu.ErrNotSupported):
	case errors.Is(err, gpu.ErrNoDriver) || errors.Is(err, gpu.ErrReloaded):
		all = append(all, noDriver(err))
	case errors.Is(err, gpu.ErrLost) || errors.Is(err, gpu.ErrNotFound):
		add(ClassLost, err.Error(), NeedsReset)
	default:
		add(ClassUnreadable, err.Error(), NeedsNothing)
	}
	if h := gr.Health; h != nil {
		if h.Remap != nil && h.Remap.Failed {
			add(ClassRemapFailed, "no spare memory row is left for a broken one", NeedsReset)
		}
		if h.Recovery.Needed() {
			add(ClassRecovery, fmt.Sprintf("the driver asks for recovery: %s", h.Recovery), string(h.Recovery))
		}
	}
	return all
}
