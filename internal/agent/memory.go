// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/desk"
	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

// migKind is the word of the state file for a cut of MIG devices, which are of
// several resources.
const migKind = "mig"

// remember takes over what the process before this one left: its claims, what it
// was still withdrawing, which GPUs it knew and which of them were faulty. All of
// it is in force before anything is said to the kubelet.
func (a *Agent) remember() {
	doc, now := a.store.Document(), time.Now()
	same := doc.Boot == a.opts.Boot && doc.Boot != ""
	if same && len(doc.GPUs) > 0 {
		a.inv = &gpu.Inventory{GPUs: doc.GPUs}
		a.setTopology()
		for i := range a.inv.GPUs {
			a.health.Know(a.inv.GPUs[i].UUID)
		}
	}
	var faults []health.Record
	if len(doc.Faults) > 0 {
		if err := json.Unmarshal(doc.Faults, &faults); err != nil {
			a.log.Warn("cannot read which GPUs were faulty; they are looked at anew", "err", err)
		}
	}
	a.health.Restore(faults, same)
	a.applyFaults()
	if same {
		for u, s := range doc.TimeSlices {
			a.slices[u] = slice{is: s, unsure: true}
		}
		// What a process left that knew no bound, or a broken disk, is not restored
		// beyond it: this one would die of it before it has read a corrected partition
		// file. The kubelet has called no Allocate for what it is not told of again:
		// nobody was there to answer.
		listed := &rows{of: map[row]int{}}
		for _, w := range doc.Cuts {
			kind, ok := kindOf("/" + w.Kind)
			cut := Cut{Known: true, Offers: true, Kind: kind, N: w.N, Unit: w.Unit, Slots: w.Slots}
			if w.Kind == migKind {
				cut.Kind, ok = desk.Slots, true
			}
			if ok && (w.N < 0 || !listed.fits(w.GPU, cut)) {
				a.log.Warn("leave out what a GPU was cut into: these are more devices than the kubelet can be told of",
					"gpu", w.GPU, "resource", w.Kind, "devices", w.N, "most", timeslice.MaxListed)
				ok = false
			}
			if ok {
				listed.add(w.GPU, cut)
			}
			switch {
			case !ok:
			case w.Until.IsZero(): // in force when it was written
				a.cuts[w.GPU] = cut
			default:
				// The clock may have been put back since.
				until := w.Until
				if most := now.Add(Linger); until.After(most) {
					until = most
				}
				a.past[w.GPU] = append(a.past[w.GPU], pastCut{cut: cut, until: until})
			}
		}
	}
	if same {
		for _, m := range doc.Made {
			if name, err := mig.Parse(m.Profile); err == nil {
				a.own(m.GPU, mig.Slot{Profile: name, Start: m.Start, Size: m.Size, CI: m.CIStart})
			}
		}
	}
	// The journal knows when its claims were allocated, the files do not.
	for _, c := range a.store.Claims() {
		take := a.desk.Restore
		if c.Allocated.After(now) || c.Allocated.IsZero() { // the clock was put back, or nobody knew
			take = func(resource string, ids []string, _ time.Time) error { return a.desk.Adopt(resource, ids) }
		}
		if err := take(c.Resource, c.IDs, c.Allocated); err != nil {
			a.log.Warn("cannot take a claim over from the journal", "resource", c.Resource, "err", err)
		}
	}
	a.adoptFiles()
}

// save writes down what a successor must know. It costs nothing where nothing has
// changed.
func (a *Agent) save() error {
	doc := state.Document{Boot: a.opts.Boot, TimeSlices: map[gpu.UUID]gpu.TimeSlice{}}
	for i := range a.inv.GPUs {
		d := a.inv.GPUs[i]
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
	short := func(k desk.Kind) string {
		if k == desk.Slots {
			return migKind
		}
		_, s, _ := strings.Cut(a.names.of(k, mig.Name{}), "/")
		return s
	}
	for _, u := range sortedKeys(a.cuts) {
		if c := a.cuts[u]; c.Offers {
			doc.Cuts = append(doc.Cuts, state.Cut{GPU: u, Kind: short(c.Kind), N: c.N, Unit: c.Unit, Slots: c.Slots})
		}
	}
	for _, u := range sortedKeys(a.past) {
		for _, p := range a.past[u] {
			doc.Cuts = append(doc.Cuts, state.Cut{GPU: u, Kind: short(p.cut.Kind), N: p.cut.N, Unit: p.cut.Unit, Slots: p.cut.Slots, Until: p.until})
		}
	}
	for _, u := range sortedKeys(a.mine) {
		for _, m := range slices.SortedFunc(maps.Keys(a.mine[u]), mig.CompareSlots) {
			doc.Made = append(doc.Made, state.Made{GPU: u, Profile: m.Profile.String(),
				Placement: gpu.Placement{Start: m.Start, Size: m.Size}, CIStart: m.CI})
		}
	}
	for u, s := range a.slices {
		if s.note == "" {
			doc.TimeSlices[u] = s.is
		}
	}
	if err := a.store.Save(doc); err != nil {
		return err
	}
	return a.trimJournal()
}

// trimEvery is how many claims are written down before the journal is cut to
// those that need it, where some always do.
const trimEvery = 256

// trimJournal drops from the journal what is written elsewhere by now: a claim
// whose container has been made is in its CDI file, unless that was taken away.
func (a *Agent) trimJournal() error {
	need := func() []state.Claim {
		var out []state.Claim
		for _, c := range a.desk.Claims() {
			if !c.Adopted && !c.Started || a.removed[c.Key] {
				out = append(out, recordOf(&c))
			}
		}
		return out
	}
	// One that has ended goes at once: a successor would take it for a holder.
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
