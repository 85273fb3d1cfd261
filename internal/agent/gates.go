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

// gatekeeper writes and removes the CDI files of allocations, with their limit pages. Without its
// file the runtime creates no container: so the file is the gate that lets a container start. It
// belongs to the loop's goroutine. Use newGatekeeper.
type gatekeeper struct {
	domain string
	// stateDir is Options.StateDir.
	stateDir string
	// unit is Options.MemoryUnit, in MiB, and openCaps is Options.OpenCaps.
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
	// record saves an allocation whose file is about to be removed.
	record      func(state.Allocation) error
	driverFiles *driverFiles
	holder      *holder
	pages       *pageSweeper

	fileKeys map[string]string // of each allocation of MIG devices with a file: the fileKey that it was made from
	removed  map[string]bool   // allocations whose file is gone: only the journal has them
	swept    bool              // true if there is no file of an ended allocation
}

func newGatekeeper(o *Options, w *Worlds, l *ledger.Ledger, started func(string) bool,
	record func(state.Allocation) error, wake func()) *gatekeeper {
	return &gatekeeper{domain: o.Domain, stateDir: o.StateDir, unit: o.MemoryUnit, openCaps: o.OpenCaps, log: o.Log,
		files: w.Files, caps: w.Caps, driver: w.Driver, observer: w.Observer,
		ledger: l, started: started, record: record,
		driverFiles: &driverFiles{driver: w.Driver, caps: w.Caps, log: o.Log, of: firstEpoch},
		holder:      newHolder(w.Limits, o.Log),
		pages:       &pageSweeper{caps: w.Caps, wake: wake, going: map[string]chan struct{}{}},
		fileKeys:    map[string]string{}, removed: map[string]bool{}}
}

// adoptFiles takes over the allocations of an earlier process from their CDI files, by takeOver.
func (k *gatekeeper) adoptFiles(takeOver func(id string, r ledger.Record, given, file time.Time) error) {
	keys, err := k.files.List()
	if err != nil {
		k.log.Warn("cannot list the CDI files of earlier allocations; only the kubelet can name them now",
			"err", err)
		return
	}
	for _, key := range keys {
		spec, err := k.files.Read(key)
		if err == nil {
			var text string
			if _, text, err = cdi.ReadRecord(spec, k.domain); err == nil {
				written, _ := k.files.Written(key) // the zero time of an error does no harm
				var r ledger.Record
				if r, err = ledger.ReadRecord(text); err == nil {
					err = takeOver(key, r, time.Time{}, written)
				}
			}
		}
		if err != nil {
			k.log.Warn("cannot take an allocation over from its CDI file; "+
				"a restart of its container makes it again",
				"key", key, "err", err)
		}
	}
	// Allocations without a file are in the journal alone, and stay there.
	for _, c := range k.ledger.Allocations() {
		if _, exists := slices.BinarySearch(keys, c.ID); !exists {
			k.removed[c.ID] = true
		}
	}
}

// write writes the CDI file of every allocation whose container may be created: its devices exist
// and have no other holder. It removes the file of an allocation whose container may not. It adds
// to trouble, by the allocation's key, why a file is missing, unless there is a reason already.
func (k *gatekeeper) write(on *fileInputs, allocations []ledger.Allocation, trouble map[string]status.Cause) error {
	var errs []error
	opened := false
	defer func() {
		if opened {
			goruntime.Gosched() // let PreStartContainer answer the kubelet before the round goes on
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
		noMPS, known := on.withoutMPS(c)
		if !known {
			continue // the file of the last process stays
		}
		if two := on.beside(c, allocations); two != (status.Cause{}) {
			noMPS, trouble[c.ID] = two, two
		}
		shut := on.inOtherMode(c) || c.Superseded
		if c.Kind().InMIG() && !c.Superseded {
			if slices.ContainsFunc(c.GPUs(), on.unread) {
				continue // the file of the last process stays
			}
			instances, stand := on.instancesOf(c)
			shut = !stand
			if gate := fileKey(instances); stand && c.IsOpen() && k.fileKeys[c.ID] != gate {
				k.ledger.Shut(c.ID) // other instances at the same placements
				c.Phase = ledger.Taken
			}
		}
		switch {
		case c.Phase == ledger.Waiting && c.Twice && !shut:
			// The file is also valid for the container that was let through, which may be reading
			// it.
		case shut, slices.ContainsFunc(c.GPUs(), on.faulty), noMPS != (status.Cause{}), c.Phase == ledger.Waiting, c.Phase == ledger.Parked,
			// The kubelet gave the devices to the next pod, and it is not known whether the last
			// pod has ended. The file is the last pod's.
			c.Phase == ledger.Reserved && c.Fresh:
			k.ledger.Shut(c.ID)
			if !k.removed[c.ID] {
				if c.Adopted || c.Owner == ledger.DRA || k.started(c.ID) {
					// The file was the record of the allocation. If the pod is deleted by force,
					// its container may live on, and only this record tells which devices it has.
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

func (k *gatekeeper) writeFile(on *fileInputs, c *ledger.Allocation) error {
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
		gate = fileKey(instances)
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
	// A file of the last holder has the same content, and rewriting it would keep its age. The next
	// process must see that this one belongs to the last Allocate.
	if written, err := k.files.Written(c.ID); err == nil && !c.Adopted && written.Before(c.Given) {
		if err := k.files.Remove(c.ID); err != nil {
			return err
		}
	}
	if err := k.files.Write(c.ID, spec); err != nil {
		return err
	}
	if gate != "" {
		k.fileKeys[c.ID] = gate
		if !c.Asked.IsZero() {
			k.observer.Wish(piece.At(c.Grants[0].Piece).Profile.String(), time.Since(c.Asked))
		}
	}
	return nil
}

// lookForFiles shuts the allocations whose CDI file was removed, and those whose memory counters
// are spoilt. So the file is written again, and the container that starts next gets new counters.
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

// instanceParts returns what containers need of MIG instances: the device node of the GPU, and the
// capability nodes that give access to the instance.
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

// sweep removes the CDI files that have neither an allocation nor a container. It runs once after
// allocations have ended, and not before the witnesses have answered. used reports whether a
// container uses an allocation.
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
	kept := false // of a container without an allocation; no allocation's end will start another sweep
	for _, key := range keys {
		switch {
		case live(key):
		case used(key):
			kept = true
		default:
			errs = append(errs, k.files.Remove(key))
		}
	}
	maps.DeleteFunc(k.fileKeys, func(key string, _ string) bool { return !live(key) })
	maps.DeleteFunc(k.removed, func(key string, _ bool) bool { return !live(key) })
	errs = append(errs, k.sweepCaps(func(key string) bool {
		kept = kept || !live(key) && used(key)
		return live(key) || used(key)
	}))
	err = errors.Join(errs...)
	k.swept = err == nil && !kept
	return status.Because(status.FilesFailed, err)
}
