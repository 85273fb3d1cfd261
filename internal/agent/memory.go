// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"maps"
	"slices"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// remember takes over what the process before this one left: its allocations, what it
// was still withdrawing, which GPUs it knew and which of them were faulty. All of
// it is in force before anything is said to the kubelet.
func (a *Agent) remember() {
	doc, now := a.journal.store.Document(), time.Now()
	same := doc.Boot == a.journal.boot && doc.Boot != ""
	if same && len(doc.GPUs) > 0 {
		a.reader.restore(doc.GPUs)
	}
	// Where no boot has a name, a fault stays: a reboot that nobody saw loads the driver anew.
	a.reader.health.Restore(doc.Faults, same || doc.Boot == "" || a.journal.boot == "")
	a.reader.told.apply()
	a.partitions.cordons.gpus = map[gpu.UUID]bool{}
	for _, u := range doc.Cordoned {
		a.partitions.cordons.gpus[u] = true
	}
	if same {
		a.slices.restore(doc.TimeSlices)
		a.layouts.restore(doc.Layouts, now)
		if offersClaims(a.layouts.now) {
			// The kubelet may call already: what it asks then can wait, and what it
			// cannot ask it tries again after a minute or more.
			a.offering.claims.start()
		}
		for _, m := range doc.Made {
			a.executor.own(m.GPU, m.Placement)
		}
	}
	// The journal knows when its allocations were allocated, the files do not.
	for _, c := range a.journal.store.Allocations() {
		if c.Allocated.After(now) { // the clock was put back
			c.Allocated = time.Time{}
		}
		if err := a.takeOver(c.Key, c.Record, c.Allocated, time.Time{}); err != nil {
			a.journal.log.Warn("cannot take an allocation over from the journal", "resource", c.Resource, "err", err)
		}
	}
	a.gates.adoptFiles(a.takeOver)
}

// takeOver has an allocation of the process before this one in the ledger again.
func (a *Agent) takeOver(id string, r ledger.Record, given, file time.Time) error {
	err := a.offering.takeOver(a.ledger, id, r, given, file)
	if err == nil {
		a.ledger.Filed(id, file)
	}
	return err
}

// save writes down what a successor must know. It costs nothing where nothing has
// changed.
func (a *Agent) save() error {
	doc := state.Document{Boot: a.journal.boot, TimeSlices: a.slices.inForce(), Layouts: a.layouts.listed(),
		Faults: a.reader.health.Records(), Cordoned: sortedKeys(a.partitions.cordons.gpus)}
	for i := range a.reader.inv.GPUs {
		d := a.reader.inv.GPUs[i]
		d.Fault, d.Lost, d.Links, d.MIG = "", false, nil, gpu.MIG{}
		doc.GPUs = append(doc.GPUs, d)
	}
	for _, u := range sortedKeys(a.executor.mine) {
		for _, m := range slices.SortedFunc(maps.Keys(a.executor.mine[u]), mig.ComparePlacements) {
			doc.Made = append(doc.Made, state.Made{GPU: u, Placement: m})
		}
	}
	if err := a.journal.store.Save(doc); err != nil {
		return status.Because(status.FilesFailed, err)
	}
	// An allocation whose container has been made is in its CDI file, unless that was taken
	// away.
	var need []state.Allocation
	for _, c := range a.ledger.Allocations() {
		if !c.Adopted && !a.offering.front.Started(c.ID) || a.gates.removed[c.ID] {
			need = append(need, recordOf(&c))
		}
	}
	return status.Because(status.FilesFailed, a.journal.trim(need))
}
