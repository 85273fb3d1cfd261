// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"log/slog"
	"slices"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
)

// layouts has the layouts of the GPUs, and those earlier ones that are still listed as withdrawn. A
// device stays listed for plan.Linger, also over a restart: the kubelet crashes if an ID leaves the
// list while its Allocate is under way. layouts belongs to the loop's goroutine.
type layouts struct {
	now  map[gpu.UUID]plan.Layout // settle replaces it and never changes it
	past map[gpu.UUID][]plan.Past
	log  *slog.Logger
	// told is called for each GPU that is laid out anew.
	told func(gpu.UUID, plan.Layout)
}

func newLayouts(log *slog.Logger, told func(gpu.UUID, plan.Layout)) *layouts {
	return &layouts{now: map[gpu.UUID]plan.Layout{}, past: map[gpu.UUID][]plan.Past{}, log: log, told: told}
}

// offerAny reports whether any of these GPUs has devices to withdraw.
func (l *layouts) offerAny(gpus []gpu.UUID) bool {
	return slices.ContainsFunc(gpus, func(u gpu.UUID) bool { return l.now[u].Offers })
}

// keep keeps the devices of an earlier layout listed for plan.Linger. Devices that were offered
// through DRA were not in the kubelet's list.
func (l *layouts) keep(u gpu.UUID, old plan.Layout) {
	if !old.Through(ledger.DevicePlugin) {
		return
	}
	l.past[u] = append(l.past[u], plan.Past{Layout: old, Until: time.Now().Add(plan.Linger)})
}

// settle puts the planned layouts in force, and keeps those that they replace listed.
func (l *layouts) settle(changes *plan.Changes) {
	for _, u := range sortedKeys(changes.Layouts) {
		// MIG devices come and go one by one
		old, to := l.now[u], changes.Layouts[u]
		if old.InMIG() && to.InMIG() && !old.Equal(to) {
			l.keep(u, old)
			l.log.Info("layout", "gpu", u, "from", plan.Names(old.Placements), "to", plan.Names(to.Placements))
			l.told(u, to)
		}
	}
	for _, u := range changes.Changing {
		old := l.now[u]
		if old.Offers {
			l.keep(u, old)
		}
		l.log.Info("layout", "gpu", u, "from", old.Mode(), "to", changes.Layouts[u].Mode(),
			"devices", changes.Layouts[u].N)
		l.told(u, changes.Layouts[u])
	}
	l.now = changes.Layouts
}

// expire drops layouts that have been listed as withdrawn for long enough. It runs before each
// plan, which may need their room.
func (l *layouts) expire(now time.Time) {
	for u, past := range l.past {
		l.past[u] = slices.DeleteFunc(past, func(p plan.Past) bool { return !p.Until.After(now) })
		if len(l.past[u]) == 0 {
			delete(l.past, u)
		}
	}
}

// linger keeps what an ended allocation had listed for a while, if its GPU's layout does not have
// it.
func (l *layouts) linger(c *ledger.Allocation) {
	for i := range c.Grants {
		g := &c.Grants[i]
		// Keep only what the allocation had: its last device may be number 30,000 of its GPU.
		have, _ := l.now[g.GPU].Of(g.Kind())
		rest, some := have.Rest(g.Piece)
		if !some {
			continue
		}
		had := plan.Divided(rest)
		l.keep(g.GPU, had)
	}
}

// restore takes over the layouts that an earlier process saved. It leaves out layouts with more
// devices than the kubelet can be told of, which a version without that bound or a broken disk may
// have left: the agent would die of them before it has read a corrected partition file. Leaving
// them out is safe, since the kubelet has no Allocate under way while no agent is there to answer.
func (l *layouts) restore(listed []state.Layout, now time.Time) {
	rows := plan.NewRows()
	for _, w := range listed {
		was, ok := w.Layout, w.Kind.Known()
		was.Known, was.Offers = true, true
		switch {
		case !ok:
		case w.N < 0 || !rows.Fits(w.GPU, was):
			l.log.Warn("leave out a layout that a GPU had: it has more devices than the kubelet can be told of",
				"gpu", w.GPU, "resource", w.Kind, "devices", w.N, "most", timeslice.MaxListed)
		case w.Until.IsZero(): // in force when it was saved
			rows.Add(w.GPU, was)
			l.now[w.GPU] = was
		default:
			rows.Add(w.GPU, was)
			// The clock may have been put back since.
			until := w.Until
			if most := now.Add(plan.Linger); until.After(most) {
				until = most
			}
			l.past[w.GPU] = append(l.past[w.GPU], plan.Past{Layout: was, Until: until})
		}
	}
}

// listed returns the layouts that the next process must go on listing.
func (l *layouts) listed() (out []state.Layout) {
	for _, u := range sortedKeys(l.now) {
		if c := l.now[u]; c.Offers {
			out = append(out, state.Layout{GPU: u, Past: plan.Past{Layout: c}})
		}
	}
	for _, u := range sortedKeys(l.past) {
		for _, p := range l.past[u] {
			out = append(out, state.Layout{GPU: u, Past: p})
		}
	}
	return out
}
