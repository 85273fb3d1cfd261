// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"maps"
	"slices"
	"time"

	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

// remember takes over what the process before this one left: its claims, what it
// was still withdrawing, which GPUs it knew and which of them were faulty. All of
// it is in force before anything is said to the kubelet.
func (a *Agent) remember() {
	doc, now := a.store.Document(), time.Now()
	same := doc.Boot == a.opts.Boot && doc.Boot != ""
	if same && len(doc.GPUs) > 0 {
		a.reader.restore(doc.GPUs)
	}
	var faults []health.Record
	if len(doc.Faults) > 0 {
		if err := json.Unmarshal(doc.Faults, &faults); err != nil {
			a.log.Warn("cannot read which GPUs were faulty; they are looked at anew", "err", err)
		}
	}
	a.health.Restore(faults, same)
	a.reader.faults.apply()
	if same {
		for u, s := range doc.TimeSlices {
			a.slices.of[u] = slice{is: s}
		}
		// What a process left that knew no bound, or a broken disk, is not restored
		// beyond it: this one would die of it before it has read a corrected partition
		// file. The kubelet has called no Allocate for what it is not told of again:
		// nobody was there to answer.
		listed := plan.NewRows()
		for _, w := range doc.Layouts {
			cut := plan.Layout{Known: true, Offers: true, Kind: w.Kind, N: w.N, Unit: w.Unit, Alone: w.Alone}
			ok := slices.Contains([]ledger.Kind{ledger.Whole, ledger.Units, ledger.Replica, ledger.Placement}, w.Kind)
			for _, at := range w.Slots {
				s, err := slotFrom(&at)
				cut.Slots, ok = append(cut.Slots, s), ok && err == nil
			}
			if ok && (w.N < 0 || !listed.Fits(w.GPU, cut)) {
				a.log.Warn("leave out what a GPU was cut into: these are more devices than the kubelet can be told of",
					"gpu", w.GPU, "resource", w.Kind, "devices", w.N, "most", timeslice.MaxListed)
				ok = false
			}
			if ok {
				listed.Add(w.GPU, cut)
			}
			switch {
			case !ok:
			case w.Until.IsZero(): // in force when it was written
				a.layouts.now[w.GPU] = cut
			default:
				// The clock may have been put back since.
				until := w.Until
				if most := now.Add(plan.Linger); until.After(most) {
					until = most
				}
				a.layouts.past[w.GPU] = append(a.layouts.past[w.GPU], plan.Past{Layout: cut, Until: until})
			}
		}
	}
	if same {
		for _, m := range doc.Made {
			if s, err := slotFrom(&m.Slot); err == nil {
				a.executor.own(m.GPU, s)
			}
		}
	}
	// The journal knows when its claims were allocated, the files do not.
	for _, c := range a.store.Claims() {
		if c.Allocated.After(now) { // the clock was put back
			c.Allocated = time.Time{}
		}
		if err := a.takeOver(c.Key, c.Record, c.Allocated, time.Time{}); err != nil {
			a.log.Warn("cannot take a claim over from the journal", "resource", c.Resource, "err", err)
		}
	}
	a.adoptFiles()
}

// save writes down what a successor must know. It costs nothing where nothing has
// changed.
func (a *Agent) save() error {
	doc := state.Document{Boot: a.opts.Boot, TimeSlices: map[gpu.UUID]gpu.TimeSlice{}}
	for i := range a.reader.inv.GPUs {
		d := a.reader.inv.GPUs[i]
		d.Fault, d.Links, d.MIG = "", nil, gpu.MIG{}
		doc.GPUs = append(doc.GPUs, d)
	}
	if faults := a.health.Records(); len(faults) > 0 {
		data, err := json.Marshal(faults)
		if err != nil {
			return err
		}
		doc.Faults = data
	}
	write := func(u gpu.UUID, c plan.Layout, until time.Time) {
		out := state.Layout{GPU: u, Kind: c.Kind, N: c.N, Unit: c.Unit, Alone: c.Alone, Until: until}
		for _, s := range c.Slots {
			out.Slots = append(out.Slots, slotText(s))
		}
		doc.Layouts = append(doc.Layouts, out)
	}
	for _, u := range sortedKeys(a.layouts.now) {
		if c := a.layouts.now[u]; c.Offers {
			write(u, c, time.Time{})
		}
	}
	for _, u := range sortedKeys(a.layouts.past) {
		for _, p := range a.layouts.past[u] {
			write(u, p.Layout, p.Until)
		}
	}
	for _, u := range sortedKeys(a.executor.mine) {
		for _, m := range slices.SortedFunc(maps.Keys(a.executor.mine[u]), mig.CompareSlots) {
			doc.Made = append(doc.Made, state.Made{GPU: u, Slot: slotText(m)})
		}
	}
	for u, s := range a.slices.of {
		if s.note == "" {
			doc.TimeSlices[u] = s.is
		}
	}
	if err := a.store.Save(doc); err != nil {
		return status.Because(status.FilesFailed, err)
	}
	return status.Because(status.FilesFailed, a.trimJournal())
}

// slotText is a place as the state file has it, slotFrom the place that it means.
func slotText(s mig.Slot) state.Slot {
	return state.Slot{Profile: s.Profile.String(), Placement: gpu.Placement{Start: s.Start, Size: s.Size}, CIStart: s.CI}
}

func slotFrom(s *state.Slot) (mig.Slot, error) {
	name, err := mig.Parse(s.Profile)
	return mig.Slot{Profile: name, Start: s.Start, Size: s.Size, CI: s.CIStart}, err
}

// trimEvery is how many claims are written down before the journal is cut to
// those that need it, where some always do.
const trimEvery = 256

// trimJournal drops from the journal what is written elsewhere by now: a claim
// whose container has been made is in its CDI file, unless that was taken away.
func (a *Agent) trimJournal() error {
	a.noteReleases()
	need := func() []state.Claim {
		var out []state.Claim
		for _, c := range a.ledger.Allocations() {
			if !c.Adopted && !a.front.Started(c.ID) || a.removed[c.ID] {
				out = append(out, recordOf(&c))
			}
		}
		return out
	}
	if !a.trim && (a.written == 0 || a.written < trimEvery && len(need()) > 0) {
		return nil
	}
	a.written = 0
	if err := a.store.Keep(need); err != nil {
		return err
	}
	a.trim = false
	return nil
}
