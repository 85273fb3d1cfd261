// SPDX-License-Identifier: Apache-2.0

package health

import (
	"cmp"
	"slices"
	"time"
)

// Records returns all faults, sorted, for the state file.
func (m *Monitor) Records() []Record {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []Record
	for u, g := range m.gpus {
		for k, f := range g.faults {
			all = append(all, Record{
				GPU: u, GI: k.gi, CI: k.ci, Class: k.class, Xid: f.xid, Detail: f.detail, Needs: f.needs,
				Since: f.since.Round(0).UTC(), Last: f.last.Round(0).UTC(), Strikes: f.strikes, Over: f.over,
				Load: f.load, Reset: f.reset, Asked: f.asked, Errors: f.errors, Failed: f.failed,
				Away: f.away, Nameless: f.nameless,
			})
		}
	}
	slices.SortFunc(all, func(a, b Record) int {
		return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.GI, b.GI), cmp.Compare(a.CI, b.CI),
			cmp.Compare(rank(a.Class), rank(b.Class)))
	})
	return all
}

// Restore adds the records of an earlier process. Call it before anything else is added.
// sameBoot is false if the machine was started again since: that resets every GPU, so only
// faults that a reboot may not repair are kept.
//
// A record without a GPU is dropped. A record with a class that this version does not know
// becomes an unknown fault of the whole GPU. The GPU is then withdrawn for a minute, since a
// newer version found it faulty. The GPU of a record is known from then on: if the driver does
// not list it, it is lost.
func (m *Monitor) Restore(records []Record, sameBoot bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range records {
		if rank(r.Class) < 0 {
			r.Class, r.GI, r.CI = ClassUnknown, -1, -1
		}
		if !sameBoot && !rules[rank(r.Class)].boot {
			continue
		}
		g := m.knowLocked(r.GPU)
		if g == nil || len(g.faults) >= maxFaults {
			continue
		}
		f := &fault{
			xid: r.Xid, detail: clip(r.Detail), needs: clip(r.Needs), since: sane(r.Since), last: sane(r.Last),
			strikes: min(max(r.Strikes, 0), maxStrikes), over: r.Over,
			resetSigns: resetSigns{
				reset: r.Reset, load: clip(r.Load), asked: r.Asked, errors: r.Errors, failed: r.Failed,
				away: r.Away, nameless: r.Nameless,
			},
		}
		if !sameBoot {
			f.resetSigns = resetSigns{reset: true}
		}
		if f.last.IsZero() {
			f.last = f.since
		}
		k := faultKey(r.Class, r.GI, r.CI)
		if old := g.faults[k]; old == nil || old.over && !f.over {
			g.faults[k] = f
		}
	}
}

// sane returns a time in UTC that can be written as JSON. A year that JSON cannot hold gives
// the zero time.
func sane(t time.Time) time.Time {
	t = t.UTC()
	if t.Year() < 1 || t.Year() > 9999 {
		return time.Time{}
	}
	return t
}
