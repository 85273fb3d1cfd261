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

// remember takes over what the last process saved: allocations, withdrawn devices, instances, GPUs
// and faults. Allocations come from the journal of internal/state and from the annotations of CDI
// files. All of it is in force before the agent answers the kubelet.
func (l *loop) remember() {
	doc, now := l.journal.store.Document(), time.Now()
	same := doc.Boot == l.journal.boot && doc.Boot != ""
	if same && len(doc.GPUs) > 0 {
		l.reader.restore(doc.GPUs)
	}
	// If a boot has no name, a fault stays: the reboot that would have ended it cannot be seen.
	l.reader.health.Restore(doc.Faults, same || doc.Boot == "" || l.journal.boot == "")
	l.reader.faults.apply()
	l.partitions.cordons.gpus = map[gpu.UUID]bool{}
	for _, u := range doc.Cordoned {
		l.partitions.cordons.gpus[u] = true
	}
	if same {
		l.slices.restore(doc.TimeSlices)
		l.layouts.restore(doc.Layouts, now)
		l.mps.restore(l.layouts.now)
		if offersClaims(l.layouts.now) {
			// The kubelet may call already. It can wait for an answer, but if nothing listens it
			// tries again only after a minute or more.
			l.offering.claims.start()
		}
		for _, m := range doc.Made {
			l.executor.own(m.GPU, m.Placement)
		}
	}
	// The journal has the times of its allocations, the files have not.
	for _, c := range l.journal.store.Allocations() {
		if c.Allocated.After(now) { // the clock was put back
			c.Allocated = time.Time{}
		}
		if err := l.takeOver(c.Key, c.Record, c.Allocated, time.Time{}); err != nil {
			l.journal.log.Warn("cannot take an allocation over from the journal", "resource", c.Resource, "err", err)
		}
	}
	l.gates.adoptFiles(l.takeOver)
	l.lender.adopt()
}

// takeOver adds an allocation of an earlier process to the ledger.
func (l *loop) takeOver(id string, r ledger.Record, given, file time.Time) error {
	err := l.offering.takeOver(l.ledger, id, r, given, file)
	if err == nil {
		l.ledger.Filed(id, file)
	}
	return err
}

// save saves what the next process must know. It writes nothing if nothing has changed.
func (l *loop) save() error {
	doc := state.Document{Boot: l.journal.boot, TimeSlices: l.slices.inForce(), Layouts: l.layouts.listed(),
		Faults: l.reader.health.Records(), Cordoned: sortedKeys(l.partitions.cordons.gpus)}
	for i := range l.reader.inv.GPUs {
		d := l.reader.inv.GPUs[i]
		d.Fault, d.Lost, d.Links, d.MIG = "", false, nil, gpu.MIG{}
		doc.GPUs = append(doc.GPUs, d)
	}
	for _, u := range sortedKeys(l.executor.mine) {
		for _, m := range slices.SortedFunc(maps.Keys(l.executor.mine[u]), mig.ComparePlacements) {
			doc.Made = append(doc.Made, state.Made{GPU: u, Placement: m})
		}
	}
	if err := l.journal.store.Save(doc); err != nil {
		return status.Because(status.FilesFailed, err)
	}
	// The CDI file of an allocation whose container was created records it, unless the file was
	// removed.
	var need []state.Allocation
	for _, c := range l.ledger.Allocations() {
		if !c.Adopted && !l.offering.front.Started(c.ID) || l.gates.removed[c.ID] {
			need = append(need, recordOf(&c))
		}
	}
	return status.Because(status.FilesFailed, l.journal.trim(need))
}
