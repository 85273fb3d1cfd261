// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	goruntime "runtime"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"tags.cncf.io/container-device-interface/specs-go"
)

// gatekeeper writes the CDI files of allocations, with their limit pages, and takes them
// away: without its file the runtime makes no container. It belongs to the loop's
// goroutine. Use newGatekeeper.
type gatekeeper struct {
	domain string
	// unit is Options.MemoryUnit, and openCaps is Options.OpenCaps.
	unit     gpu.MiB
	openCaps bool
	files    Files
	caps     Caps
	driver   Driver
	observer Observer
	log      *slog.Logger
	ledger   *ledger.Ledger
	// started reports whether the container of an allocation has been started.
	started func(id string) bool
	// record writes an allocation down whose file is about to go.
	record   func(state.Allocation) error
	supplies *supplies
	pages    *pageSweeper

	made    map[string]string // of what the files of allocations of MIG devices were made
	removed map[string]bool   // allocations whose file is gone: the journal alone has them
	swept   bool              // no file of an ended allocation is left
}

func newGatekeeper(o *Options, w *Worlds, l *ledger.Ledger, started func(string) bool,
	record func(state.Allocation) error, wake func()) *gatekeeper {
	return &gatekeeper{domain: o.Domain, unit: o.MemoryUnit, openCaps: o.OpenCaps, log: o.Log,
		files: w.Files, caps: w.Caps, driver: w.Driver, observer: w.Observer,
		ledger: l, started: started, record: record,
		supplies: &supplies{driver: w.Driver, caps: w.Caps, log: o.Log, of: firstEpoch},
		pages:    &pageSweeper{caps: w.Caps, wake: wake, going: map[string]chan struct{}{}},
		made:     map[string]string{}, removed: map[string]bool{}}
}

// adoptFiles takes over the allocations of a predecessor from their CDI files, by takeOver.
func (k *gatekeeper) adoptFiles(takeOver func(id string, r ledger.Record, given, file time.Time) error) {
	keys, err := k.files.List()
	if err != nil {
		k.log.Warn("cannot list the CDI files of earlier allocations; the kubelet's word must do", "err", err)
		return
	}
	for _, key := range keys {
		spec, err := k.files.Read(key)
		if err == nil {
			var text string
			if _, text, err = cdi.ReadRecord(spec, k.domain); err == nil {
				written, _ := k.files.Written(key) // the zero time is no help, and no harm
				var r ledger.Record
				if r, err = ledger.ReadRecord(text); err == nil {
					err = takeOver(key, r, time.Time{}, written)
				}
			}
		}
		if err != nil {
			k.log.Warn("cannot take an allocation over from its CDI file; "+
				"it is made again when its container starts again",
				"key", key, "err", err)
		}
	}
	// Those without a file are in the journal alone, and stay there.
	for _, c := range k.ledger.Allocations() {
		if _, exists := slices.BinarySearch(keys, c.ID); !exists {
			k.removed[c.ID] = true
		}
	}
}

// write opens the gate of every allocation that may have its container made: the
// CDI file stands, and nobody is left on its devices. It shuts the gate of one
// that may not, by taking the file away. Why a gate stays shut is added to trouble,
// by the allocation's key, where nothing is said there yet.
func (k *gatekeeper) write(on *ground, allocations []ledger.Allocation, trouble map[string]status.Cause) error {
	var errs []error
	opened := false
	defer func() {
		if opened {
			goruntime.Gosched() // whoever waits for a gate answers the kubelet before the rest of the round
		}
	}()
	for i := range allocations {
		c := &allocations[i]
		if why := on.shutBecause(c); why != (status.Cause{}) && trouble[c.ID] == (status.Cause{}) {
			trouble[c.ID] = why
		}
		failed := func(err error) {
			trouble[c.ID] = status.CauseOf(err, status.FilesFailed)
			errs = append(errs, fmt.Errorf("the CDI file of allocation %s (%s): %w", c.ID, c.Holder, err))
		}
		shut := on.inOtherMode(c) || c.Superseded
		if c.Kind().InMIG() && !c.Superseded {
			if slices.ContainsFunc(c.GPUs(), on.unread) {
				continue // what the process before this one wrote stands
			}
			instances, stand := on.instancesOf(c)
			shut = !stand
			if gate := gateOf(instances); stand && c.IsOpen() && k.made[c.ID] != gate {
				k.ledger.Shut(c.ID) // other instances at the same places
				c.Phase = ledger.Taken
			}
		}
		switch {
		case c.Phase == ledger.Waiting && c.Twice && !shut:
			// The file is as good for the one that was let through, which may be reading it.
		case shut, slices.ContainsFunc(c.GPUs(), on.faulty), c.Phase == ledger.Waiting,
			// Given to the next pod, and nobody can say whether the one before
			// is dead: the file is of that one.
			c.Phase == ledger.Reserved && c.Fresh:
			k.ledger.Shut(c.ID)
			if !k.removed[c.ID] {
				if c.Adopted || c.Owner == ledger.DRA || k.started(c.ID) {
					// The file was the record of the allocation, and its container may live
					// on while its pod is deleted by force: then nobody else knows
					// which devices it has.
					if err := k.record(recordOf(c)); err != nil {
						failed(err)
						continue
					}
				}
				if err := k.files.Remove(c.ID); err != nil {
					failed(err)
					continue
				}
				k.removed[c.ID] = true
			}
			if c.Superseded {
				k.ledger.Gone(c.ID)
			}
		case c.IsOpen(), c.Phase == ledger.Reserved, on.parts == nil, on.unsliced(c):
		default:
			if err := k.writeFile(on, c); err != nil {
				failed(err)
				continue
			}
			delete(k.removed, c.ID)
			opened = k.ledger.SetOpen(c.ID, c.Epoch) || opened
		}
	}
	return status.Because(status.FilesFailed, errors.Join(errs...))
}

func (k *gatekeeper) writeFile(on *ground, c *ledger.Allocation) error {
	over, err := k.overlay(on, c)
	if err != nil {
		return err
	}
	parts, names := on.parts.Parts, c.GPUs()
	gate := ""
	if c.Kind().InMIG() {
		instances, stand := on.instancesOf(c)
		if !stand {
			return fmt.Errorf("an instance is gone: %w", gpu.ErrNotFound)
		}
		if parts, names, err = k.instanceParts(&on.parts.Parts, instances); err != nil {
			return err
		}
		gate = gateOf(instances)
	}
	spec, err := cdi.Spec(k.domain, c.ID, parts, names, over)
	if err != nil {
		return err
	}
	record, err := json.Marshal(c.Record())
	if err != nil {
		return err
	}
	if err := cdi.Record(spec, k.domain, string(record)); err != nil {
		return err
	}
	// A file of the holder before has the same words, and would keep its age: a
	// successor must see that this one is of the last Allocate.
	if written, err := k.files.Written(c.ID); err == nil && !c.Adopted && written.Before(c.Given) {
		if err := k.files.Remove(c.ID); err != nil {
			return err
		}
	}
	if err := k.files.Write(c.ID, spec); err != nil {
		return err
	}
	if gate != "" {
		k.made[c.ID] = gate
		if !c.Asked.IsZero() {
			k.observer.Wish(piece.At(c.Grants[0].Piece).Profile.String(), time.Since(c.Asked))
		}
	}
	return nil
}

// lookForFiles finds the allocations whose CDI file somebody has taken away, and those
// whose counters their containers have made useless: who starts next gets new ones.
func (k *gatekeeper) lookForFiles() error {
	keys, err := k.files.List()
	if err != nil {
		return status.Because(status.FilesFailed, err)
	}
	for _, c := range k.ledger.Allocations() {
		if _, stands := slices.BinarySearch(keys, c.ID); c.IsOpen() && !stands {
			k.log.Warn("the CDI file of an allocation is gone; it is written again",
				"allocation", c.ID, "pod", c.Holder.String())
			k.ledger.Shut(c.ID)
			continue
		}
		if !c.IsOpen() {
			continue
		}
		if sound, err := k.caps.Sound(c.ID); err == nil && !sound {
			k.log.Warn("the counters of an allocation's cap are spoilt; its container's next start gets new ones",
				"allocation", c.ID, "pod", c.Holder.String())
			k.ledger.Shut(c.ID)
		}
	}
	return nil
}

// instanceParts is what containers need of MIG instances: the node of the GPU, and
// those of the capabilities without which the driver shows them nothing of it.
func (k *gatekeeper) instanceParts(of *cdi.Parts, instances []instance) (cdi.Parts, []gpu.UUID, error) {
	parts := cdi.Parts{Common: of.Common, Devices: map[gpu.UUID]specs.ContainerEdits{}}
	var names []gpu.UUID
	for _, i := range instances {
		edits, ok := of.Devices[i.gpu.UUID]
		if !ok {
			return parts, nil, fmt.Errorf("the driver's parts have no %s: %w", i.gpu.UUID, gpu.ErrNotFound)
		}
		nodes, err := k.driver.Capabilities(i.gpu.Minor, i.in.GI, i.in.CI)
		if err != nil {
			return parts, nil, err
		}
		edits.DeviceNodes = append(slices.Clone(edits.DeviceNodes), nodes...)
		parts.Devices[i.in.UUID] = edits
		names = append(names, i.in.UUID)
	}
	return parts, names, nil
}

// sweep removes the CDI files that no allocation and no container has, once after
// allocations ended, and not before the witnesses have been heard. used reports whether a
// container has an allocation.
func (k *gatekeeper) sweep(heard bool, used func(id string) bool) error {
	if k.swept && !k.pages.failed.Load() || !heard {
		return nil
	}
	keys, err := k.files.List()
	if err != nil {
		return status.Because(status.FilesFailed, err)
	}
	allocations := k.ledger.Allocations()
	live := func(key string) bool {
		_, ok := slices.BinarySearchFunc(allocations, key,
			func(c ledger.Allocation, k string) int { return strings.Compare(c.ID, k) })
		return ok
	}
	var errs []error
	kept := false // for a container whose allocation nobody knows; its end ends no allocation
	for _, key := range keys {
		switch {
		case live(key):
		case used(key):
			kept = true
		default:
			errs = append(errs, k.files.Remove(key))
		}
	}
	maps.DeleteFunc(k.made, func(key string, _ string) bool { return !live(key) })
	maps.DeleteFunc(k.removed, func(key string, _ bool) bool { return !live(key) })
	errs = append(errs, k.sweepCaps(func(key string) bool {
		kept = kept || !live(key) && used(key)
		return live(key) || used(key)
	}))
	err = errors.Join(errs...)
	k.swept = err == nil && !kept
	return status.Because(status.FilesFailed, err)
}
