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

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"tags.cncf.io/container-device-interface/specs-go"
)

// gatekeeper writes the CDI files of allocations, with their limit pages, and takes them
// away: without its file the runtime makes no container. It belongs to the loop's
// goroutine. Use newGatekeeper.
type gatekeeper struct {
	domain   string
	unit     gpu.MiB
	openCaps bool
	files    Files
	caps     Caps
	driver   Driver
	observer Observer
	log      *slog.Logger
	ledger   *ledger.Ledger
	front    *deviceplugin.FrontEnd
	claims   *claims
	// These know what files are made of.
	reader   *reader
	layouts  *layouts
	executor *executor
	slices   *timeSlices
	journal  *journal
	pages    *pageSweeper
	// witnesses say who has what.
	witnesses *deviceplugin.Witnesses

	made    map[string]string // of what the files of allocations of MIG devices were made
	removed map[string]bool   // allocations whose file is gone: the journal alone has them
	swept   bool              // no file of an ended allocation is left
}

// adoptFiles takes over the allocations of a predecessor from their CDI files.
func (k *gatekeeper) adoptFiles() {
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
					err = k.takeOver(key, r, time.Time{}, written)
				}
			}
		}
		if err != nil {
			k.log.Warn("cannot take an allocation over from its CDI file; it is made again when its container starts again", "key", key, "err", err)
		}
	}
	// Those without a file are in the journal alone, and stay there.
	for _, c := range k.ledger.Allocations() {
		if _, exists := slices.BinarySearch(keys, c.ID); !exists {
			k.removed[c.ID] = true
		}
	}
}

// takeOver has an allocation of the process before this one in the ledger again, by
// way of the front-end that it is of, where that has to know more of it than the ledger.
func (k *gatekeeper) takeOver(id string, r ledger.Record, given, file time.Time) error {
	var err error
	switch {
	case r.Owner == ledger.DevicePlugin:
		err = k.front.Found(id, r, given, file)
	case r.Owner == ledger.DRA && k.claims.front != nil:
		err = k.claims.found(id, r, given)
	default:
		_, err = k.ledger.Found(id, r, given)
	}
	if err == nil {
		k.ledger.Filed(id, file)
	}
	return err
}

// write opens the gate of every allocation that may have its container made: the
// CDI file stands, and nobody is left on its devices. It shuts the gate of one
// that may not, by taking the file away. Why a gate stays shut is added to trouble,
// by the allocation's key, where nothing is said there yet.
func (k *gatekeeper) write(allocations []ledger.Allocation, trouble map[string]status.Cause) error {
	var errs []error
	opened := false
	defer func() {
		if opened {
			goruntime.Gosched() // whoever waits for a gate answers the kubelet before the rest of the round
		}
	}()
	for i := range allocations {
		c := &allocations[i]
		if why := k.shutBecause(c); why != (status.Cause{}) && trouble[c.ID] == (status.Cause{}) {
			trouble[c.ID] = why
		}
		failed := func(err error) {
			trouble[c.ID] = status.CauseOf(err, status.FilesFailed)
			errs = append(errs, fmt.Errorf("the CDI file of allocation %s (%s): %w", c.ID, c.Holder, err))
		}
		shut := k.inOtherMode(c) || c.Superseded
		if c.Kind().InMIG() && !c.Superseded {
			if slices.ContainsFunc(c.GPUs(), k.unread) {
				continue // what the process before this one wrote stands
			}
			instances, stand := k.instancesOf(c)
			shut = !stand
			if gate := gateOf(instances); stand && c.IsOpen() && k.made[c.ID] != gate {
				k.ledger.Shut(c.ID) // other instances at the same places
				c.Phase = ledger.Taken
			}
		}
		switch {
		case c.Phase == ledger.Waiting && c.Twice && !shut:
			// The file is as good for the one that was let through, which may be reading it.
		case shut, slices.ContainsFunc(c.GPUs(), k.faulty), c.Phase == ledger.Waiting,
			// Given to the next pod, and nobody can say whether the one before
			// is dead: the file is of that one.
			c.Phase == ledger.Reserved && c.Fresh:
			k.ledger.Shut(c.ID)
			if !k.removed[c.ID] {
				if c.Adopted || c.Owner == ledger.DRA || k.front.Started(c.ID) {
					// The file was the record of the allocation, and its container may live
					// on while its pod is deleted by force: then nobody else knows
					// which devices it has.
					if err := k.journal.append(recordOf(c)); err != nil {
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
		case c.IsOpen(), c.Phase == ledger.Reserved, k.reader.parts == nil, k.unsliced(c):
		default:
			if err := k.writeFile(c); err != nil {
				failed(err)
				continue
			}
			delete(k.removed, c.ID)
			opened = k.ledger.SetOpen(c.ID, c.Epoch) || opened
		}
	}
	return status.Because(status.FilesFailed, errors.Join(errs...))
}

func (k *gatekeeper) writeFile(c *ledger.Allocation) error {
	over, err := k.overlay(c)
	if err != nil {
		return err
	}
	parts, names := k.reader.parts.Parts, c.GPUs()
	gate := ""
	if c.Kind().InMIG() {
		instances, stand := k.instancesOf(c)
		if !stand {
			return fmt.Errorf("an instance is gone: %w", gpu.ErrNotFound)
		}
		if parts, names, err = k.instanceParts(instances); err != nil {
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

// unsliced reports whether the driver has yet to be asked for a time slice that an
// allocation has.
func (k *gatekeeper) unsliced(c *ledger.Allocation) bool {
	return slices.ContainsFunc(c.Grants, func(g ledger.Grant) bool { return !k.slices.stands(g) })
}

// faulty reports whether the driver cannot say what a container would need of a
// GPU.
func (k *gatekeeper) faulty(u gpu.UUID) bool {
	d := k.reader.inv.ByUUID(u)
	return d == nil || d.Fault != ""
}

// unread reports whether this process has not seen yet what stands on a GPU.
func (k *gatekeeper) unread(u gpu.UUID) bool {
	d := k.reader.inv.ByUUID(u)
	return d != nil && d.Fault == "" && !d.MIG.Capable
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
			k.log.Warn("the CDI file of an allocation is gone; it is written again", "allocation", c.ID, "pod", c.Holder.String())
			k.ledger.Shut(c.ID)
			continue
		}
		if !c.IsOpen() {
			continue
		}
		if sound, err := k.caps.Sound(c.ID); err == nil && !sound {
			k.log.Warn("the counters of an allocation's cap are spoilt; its container's next start gets new ones", "allocation", c.ID, "pod", c.Holder.String())
			k.ledger.Shut(c.ID)
		}
	}
	return nil
}

// instanceParts is what containers need of MIG instances: the node of the GPU, and
// those of the capabilities without which the driver shows them nothing of it.
func (k *gatekeeper) instanceParts(instances []instance) (cdi.Parts, []gpu.UUID, error) {
	parts := cdi.Parts{Common: k.reader.parts.Common, Devices: map[gpu.UUID]specs.ContainerEdits{}}
	var names []gpu.UUID
	for _, i := range instances {
		edits, ok := k.reader.parts.Devices[i.gpu.UUID]
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
// allocations ended, and not before the witnesses have been heard.
func (k *gatekeeper) sweep() error {
	if k.swept && !k.pages.failed.Load() || !k.witnesses.Heard() {
		return nil
	}
	keys, err := k.files.List()
	if err != nil {
		return status.Because(status.FilesFailed, err)
	}
	allocations := k.ledger.Allocations()
	live := func(key string) bool {
		_, ok := slices.BinarySearchFunc(allocations, key, func(c ledger.Allocation, k string) int { return strings.Compare(c.ID, k) })
		return ok
	}
	var errs []error
	kept := false // for a container whose allocation nobody knows; its end ends no allocation
	for _, key := range keys {
		switch {
		case live(key):
		case k.witnesses.Used(key):
			kept = true
		default:
			errs = append(errs, k.files.Remove(key))
		}
	}
	maps.DeleteFunc(k.made, func(key string, _ string) bool { return !live(key) })
	maps.DeleteFunc(k.removed, func(key string, _ bool) bool { return !live(key) })
	errs = append(errs, k.sweepCaps(func(key string) bool {
		kept = kept || !live(key) && k.witnesses.Used(key)
		return live(key) || k.witnesses.Used(key)
	}))
	err = errors.Join(errs...)
	k.swept = err == nil && !kept
	return status.Because(status.FilesFailed, err)
}
