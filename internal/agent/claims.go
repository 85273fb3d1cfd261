// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"tags.cncf.io/container-device-interface/specs-go"
)

// granted has a round come for a new claim, which writes it down: the kubelet
// waits for its answer, and has the claim in its own checkpoint a moment later.
func (a *Agent) granted(c *ledger.Allocation) {
	a.grantsMu.Lock()
	a.grants = append(a.grants, recordOf(c))
	a.grantsMu.Unlock()
	a.wakeSoon()
}

// writeGrants writes the claims down that were granted since the last round.
func (a *Agent) writeGrants() {
	a.grantsMu.Lock()
	grants := a.grants
	a.grants = nil
	a.grantsMu.Unlock()
	for _, c := range grants {
		if err := a.store.Append(c); err != nil {
			a.ration.Log(slog.LevelWarn, "cannot write a claim down; the kubelet's checkpoint must do", nil, "resource", c.Resource, "err", err)
			a.trim = true // the journal is written anew, as soon as that can be done
		}
		a.written++
	}
}

// recordOf is what the journal says of a claim. When one that was adopted was
// allocated is not known; zero has the next process adopt it too.
func recordOf(c *ledger.Allocation) state.Claim {
	record := state.Claim{Key: c.ID, Record: c.Record()}
	if !c.Adopted {
		record.Allocated = c.Taken
	}
	return record
}

// adoptFiles takes over the claims of a predecessor from their CDI files.
func (a *Agent) adoptFiles() {
	keys, err := a.files.List()
	if err != nil {
		a.log.Warn("cannot list the CDI files of earlier claims; the kubelet's word must do", "err", err)
		return
	}
	for _, key := range keys {
		spec, err := a.files.Read(key)
		if err == nil {
			var text string
			if _, text, err = cdi.ReadRecord(spec, a.opts.Domain); err == nil {
				written, _ := a.files.Written(key) // the zero time is no help, and no harm
				var r ledger.Record
				if r, err = ledger.ReadRecord(text); err == nil {
					err = a.takeOver(key, r, time.Time{}, written)
				}
			}
		}
		if err != nil {
			a.log.Warn("cannot take a claim over from its CDI file; it is made again when its container starts again", "key", key, "err", err)
		}
	}
}

// takeOver has an allocation of the process before this one in the ledger again, by
// way of the front-end that it is of, where that has to know more of it than the ledger.
func (a *Agent) takeOver(id string, r ledger.Record, taken, file time.Time) error {
	var err error
	if r.Owner == ledger.DevicePlugin {
		err = a.front.Found(id, r, taken, file)
	} else {
		_, err = a.ledger.Found(id, r, taken)
	}
	if err == nil {
		a.ledger.Filed(id, file)
	}
	return err
}

// writeClaims opens the gate of every claim that may have its container made: the
// CDI file stands, and nobody is left on its devices. It shuts the gate of one
// that may not, by taking the file away. Why a gate stays shut is added to trouble,
// by the claim's key, where nothing is said there yet.
func (a *Agent) writeClaims(claims []ledger.Allocation, trouble map[string]status.Cause) error {
	var errs []error
	for i := range claims {
		c := &claims[i]
		if why := a.shutBecause(c); why != (status.Cause{}) && trouble[c.ID] == (status.Cause{}) {
			trouble[c.ID] = why
		}
		failed := func(err error) {
			trouble[c.ID] = status.CauseOf(err, status.FilesFailed)
			errs = append(errs, fmt.Errorf("the CDI file of claim %s (%s): %w", c.ID, c.Holder, err))
		}
		shut := false
		if c.Kind() == ledger.Placement {
			if slices.ContainsFunc(c.GPUs(), a.unread) {
				continue // what the process before this one wrote stands
			}
			instances, stand := a.instancesOf(c)
			shut = !stand
			if gate := gateOf(instances); stand && c.IsOpen() && a.gates[c.ID] != gate {
				a.ledger.Shut(c.ID) // other instances at the same places
				c.Phase = ledger.Taken
			}
		}
		switch {
		case shut, slices.ContainsFunc(c.GPUs(), a.faulty), c.Phase == ledger.Waiting,
			// Given to the next pod, and nobody can say whether the one before
			// is dead: the file is of that one.
			c.Phase == ledger.Reserved && c.Fresh:
			a.ledger.Shut(c.ID)
			if !a.removed[c.ID] {
				if c.Adopted || a.front.Started(c.ID) {
					// The file was the record of the claim, and its container may live
					// on while its pod is deleted by force: then nobody else knows
					// which devices it has.
					if err := a.store.Append(recordOf(c)); err != nil {
						failed(err)
						continue
					}
					a.written++
				}
				if err := a.files.Remove(c.ID); err != nil {
					failed(err)
					continue
				}
				a.removed[c.ID] = true
			}
		case c.IsOpen(), c.Phase == ledger.Reserved, a.reader.parts == nil:
		default:
			if err := a.writeClaim(c); err != nil {
				failed(err)
				continue
			}
			delete(a.removed, c.ID)
			a.ledger.SetOpen(c.ID, c.Epoch)
		}
	}
	return status.Because(status.FilesFailed, errors.Join(errs...))
}

func (a *Agent) writeClaim(c *ledger.Allocation) error {
	over, err := a.overlay(c)
	if err != nil {
		return err
	}
	parts, names := a.reader.parts.Parts, c.GPUs()
	gate := ""
	if c.Kind() == ledger.Placement {
		instances, stand := a.instancesOf(c)
		if !stand {
			return fmt.Errorf("an instance is gone: %w", gpu.ErrNotFound)
		}
		if parts, names, err = a.instanceParts(instances); err != nil {
			return err
		}
		gate = gateOf(instances)
	}
	spec, err := cdi.Spec(a.opts.Domain, c.ID, parts, names, over)
	if err != nil {
		return err
	}
	record, err := json.Marshal(c.Record())
	if err != nil {
		return err
	}
	if err := cdi.Record(spec, a.opts.Domain, string(record)); err != nil {
		return err
	}
	// A file of the holder before has the same words, and would keep its age: a
	// successor must see that this one is of the last Allocate.
	if written, err := a.files.Written(c.ID); err == nil && !c.Adopted && written.Before(c.Taken) {
		if err := a.files.Remove(c.ID); err != nil {
			return err
		}
	}
	if err := a.files.Write(c.ID, spec); err != nil {
		return err
	}
	if gate != "" {
		a.gates[c.ID] = gate
		if !c.Asked.IsZero() {
			a.observer.Wish(c.Grants[0].Slot.Profile.String(), time.Since(c.Asked))
		}
	}
	return nil
}

// faulty reports whether the driver cannot say what a container would need of a
// GPU.
func (a *Agent) faulty(u gpu.UUID) bool {
	d := a.reader.inv.ByUUID(u)
	return d == nil || d.Fault != ""
}

// unread reports whether this process has not seen yet what stands on a GPU.
func (a *Agent) unread(u gpu.UUID) bool {
	d := a.reader.inv.ByUUID(u)
	return d != nil && d.Fault == "" && !d.MIG.Capable
}

// lookForFiles finds the claims whose CDI file somebody has taken away, and those
// whose counters their containers have made useless: who starts next gets new ones.
func (a *Agent) lookForFiles() error {
	keys, err := a.files.List()
	if err != nil {
		return status.Because(status.FilesFailed, err)
	}
	for _, c := range a.ledger.Allocations() {
		if _, stands := slices.BinarySearch(keys, c.ID); c.IsOpen() && !stands {
			a.log.Warn("the CDI file of a claim is gone; it is written again", "claim", c.ID, "pod", c.Holder.String())
			a.ledger.Shut(c.ID)
			continue
		}
		if !c.IsOpen() {
			continue
		}
		if sound, err := a.caps.Sound(c.ID); err == nil && !sound {
			a.log.Warn("the counters of a claim's cap are spoilt; its container's next start gets new ones", "claim", c.ID, "pod", c.Holder.String())
			a.ledger.Shut(c.ID)
		}
	}
	return nil
}

// instanceParts is what containers need of MIG instances: the node of the GPU, and
// those of the capabilities without which the driver shows them nothing of it.
func (a *Agent) instanceParts(instances []instance) (cdi.Parts, []gpu.UUID, error) {
	parts := cdi.Parts{Common: a.reader.parts.Common, Devices: map[gpu.UUID]specs.ContainerEdits{}}
	var names []gpu.UUID
	for _, i := range instances {
		edits, ok := a.reader.parts.Devices[i.gpu.UUID]
		if !ok {
			return parts, nil, fmt.Errorf("the driver's parts have no %s: %w", i.gpu.UUID, gpu.ErrNotFound)
		}
		nodes, err := a.driver.Capabilities(i.gpu.Minor, i.in.GI, i.in.CI)
		if err != nil {
			return parts, nil, err
		}
		edits.DeviceNodes = append(slices.Clone(edits.DeviceNodes), nodes...)
		parts.Devices[i.in.UUID] = edits
		names = append(names, i.in.UUID)
	}
	return parts, names, nil
}

// noteReleases takes note that allocations have ended, through whichever front-end:
// their files are to go, and their lines in the journal, since a successor would take
// those for holders.
func (a *Agent) noteReleases() {
	if n := a.ledger.Released(); n != a.released {
		a.released, a.swept, a.trim = n, false, true
	}
}

// sweep removes the CDI files that no claim and no container has, once after
// claims ended, and not before the witnesses have been heard.
func (a *Agent) sweep() error {
	a.noteReleases()
	if a.swept || !a.witnesses.Heard() {
		return nil
	}
	keys, err := a.files.List()
	if err != nil {
		return status.Because(status.FilesFailed, err)
	}
	claims := a.ledger.Allocations()
	live := func(key string) bool {
		_, ok := slices.BinarySearchFunc(claims, key, func(c ledger.Allocation, k string) int { return strings.Compare(c.ID, k) })
		return ok
	}
	var errs []error
	kept := false // for a container whose claim nobody knows; its end ends no claim
	for _, key := range keys {
		switch {
		case live(key):
		case a.witnesses.Used(key):
			kept = true
		default:
			errs = append(errs, a.files.Remove(key))
		}
	}
	maps.DeleteFunc(a.gates, func(key string, _ string) bool { return !live(key) })
	maps.DeleteFunc(a.removed, func(key string, _ bool) bool { return !live(key) })
	errs = append(errs, a.sweepCaps(func(key string) bool {
		kept = kept || !live(key) && a.witnesses.Used(key)
		return live(key) || a.witnesses.Used(key)
	}))
	err = errors.Join(errs...)
	a.swept = err == nil && !kept
	return status.Because(status.FilesFailed, err)
}
