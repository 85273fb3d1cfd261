// SPDX-License-Identifier: Apache-2.0

package desk

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// MIGView is what a view knows of a GPU whose devices are MIG slots, beside the
// devices: what can stand there, and what does.
type MIGView struct {
	// Card judges which slots can stand together.
	Card *mig.Card
	// Occupied are slots that stand, that no claim has and that may neither go
	// nor be given out: used by somebody unknown, or under change.
	Occupied []mig.Slot
	// Kept are slots that stand and may not go, but may be given out: instances
	// that somebody else has made.
	Kept []mig.Slot
	// Warm are slots that stand idle and may go; they take nobody's room.
	Warm []mig.Slot
}

// room is what is taken of a MIG GPU at one moment.
type room struct {
	card *mig.Card // nil: not known
	// taken is what may not go, each slot once, in place order.
	taken []taken
	// slots is the same without the rest.
	slots []mig.Slot
	held  []device
}

// taken is a slot that may not go.
type taken struct {
	slot mig.Slot
	// free says that it stands, that no claim has it and that one may.
	free   bool
	reason string // for whoever lacks the room; made when it is asked for
}

// device names a device of any resource.
type device struct{ resource, id string }

// roomsLocked finds out what is taken of each of these GPUs.
func (d *Desk) roomsLocked(gpus []gpu.UUID) map[gpu.UUID]*room {
	rooms := make(map[gpu.UUID]*room, len(gpus))
	for _, u := range gpus {
		m := d.base.MIG[u]
		r := &room{card: m.Card}
		for _, s := range m.Occupied {
			r.take(s, false)
		}
		for _, s := range m.Kept {
			r.take(s, true)
		}
		rooms[u] = r
	}
	for _, c := range d.claims {
		if c.Kind() != ledger.Placement {
			continue
		}
		for i := range c.Grants {
			g := &c.Grants[i]
			r := rooms[g.GPU]
			if r == nil {
				continue
			}
			r.held = append(r.held, device{c.Resource, c.IDs[i]})
			// One of unknown size cannot stand: its GPU has no such profile, or
			// nobody knows yet what it has.
			if g.Slot.Size > 0 {
				r.take(g.Slot, false)
			}
		}
	}
	for _, r := range rooms {
		slices.SortFunc(r.taken, func(a, b taken) int { return mig.CompareSlots(a.slot, b.slot) })
		r.slots = make([]mig.Slot, len(r.taken))
		for i := range r.taken {
			r.slots[i] = r.taken[i].slot
		}
	}
	return rooms
}

func (r *room) take(s mig.Slot, free bool) {
	for i := range r.taken {
		if t := &r.taken[i]; t.slot == s {
			t.free = t.free && free
			return
		}
	}
	r.taken = append(r.taken, taken{slot: s, free: free})
}

// has reports whether a claim has the device.
func (r *room) has(resource, id string) bool {
	for i := range r.held {
		if r.held[i].id == id && r.held[i].resource == resource {
			return true
		}
	}
	return false
}

// beside is what a slot has to stand beside: all that is taken, but for itself
// where it stands and may be given out. counted says that it is.
func (r *room) beside(s mig.Slot) (others []mig.Slot, counted bool) {
	for i := range r.taken {
		if t := &r.taken[i]; t.slot == s && t.free {
			return slices.Concat(r.slots[:i], r.slots[i+1:]), true
		}
	}
	return r.slots, false
}

// lacks is why a slot that no claim has cannot be given out, empty where it can.
func (r *room) lacks(s mig.Slot) string {
	if r.card == nil {
		return "what can stand on its GPU is not known"
	}
	others, _ := r.beside(s)
	if r.card.Fits(others, s) {
		return ""
	}
	for i := range r.taken {
		t := &r.taken[i]
		if t.slot == s && t.free || r.card.Fits(r.slots[i:i+1], s) {
			continue
		}
		if t.reason == "" {
			t.reason = "its room is taken by " + t.slot.String()
		}
		return t.reason
	}
	if len(others) == 0 {
		return "its GPU has no such slot"
	}
	// Each alone would leave it room.
	var names []string
	for _, t := range others {
		names = append(names, t.String())
	}
	return "its room is taken by " + strings.Join(names, ", ")
}

// lay lays what is taken of GPUs over the devices of a resource that are on them,
// and the faults over that. It returns shown, the list as it was, where no device
// differs from that.
func lay(shown, base []Device, resource string, rooms map[gpu.UUID]*room, faults *faults) []Device {
	out := shown
	var r *room
	for i := range base {
		if i == 0 || base[i].GPU != base[i-1].GPU { // lists go by GPU
			r = rooms[base[i].GPU]
		}
		if r == nil {
			continue
		}
		dev := base[i]
		if why, bad := faults.of(&dev); bad {
			dev.Healthy, dev.Leaving, dev.Reason = false, false, why
		} else if dev.Healthy && !r.has(resource, dev.ID) {
			// A device that leaves is Healthy for its holder's sake alone.
			why := dev.Reason
			if !dev.Leaving {
				why = r.lacks(dev.Slot)
			}
			if dev.Leaving || why != "" {
				dev.Healthy, dev.Leaving, dev.Reason = false, false, why
			}
		}
		if dev == out[i] {
			continue
		}
		if &out[0] == &shown[0] {
			out = slices.Clone(shown)
		}
		out[i] = dev
	}
	return out
}

// movedLocked shows what claims have taken of MIG GPUs, or given back, since it
// was called last.
func (d *Desk) movedLocked() {
	if len(d.moved) == 0 {
		return
	}
	rooms := d.roomsLocked(d.moved)
	d.moved = d.moved[:0]
	var v *View
	for i := range d.view.Resources {
		r := &d.view.Resources[i]
		if r.Kind != ledger.Placement || len(r.Devices) == 0 {
			continue
		}
		devices := lay(r.Devices, d.base.Resources[i].Devices, r.Name, rooms, &d.faults)
		if &devices[0] == &r.Devices[0] {
			continue
		}
		if v == nil {
			v = d.view.copyAs(d.view.Gen + 1)
		}
		v.Resources[i].Devices = devices
		if !slices.EqualFunc(r.Devices, devices, sameWord) {
			d.tellLocked(r.Name)
		}
	}
	if v != nil {
		d.view = v
	}
}

// slotGPUs are the GPUs that a view lists slots of, each once.
func (v *View) slotGPUs() (out []gpu.UUID) {
	for i := range v.Resources {
		if r := &v.Resources[i]; r.Kind == ledger.Placement {
			for j := range r.Devices {
				if u := r.Devices[j].GPU; !slices.Contains(out, u) {
					out = append(out, u)
				}
			}
		}
	}
	return out
}

// sizeLocked completes the placements of claims that were known by their IDs alone.
func (d *Desk) sizeLocked() {
	for _, c := range d.claims {
		c.Grants = sized(c.Grants, d.base.MIG)
	}
}

// sized returns grants with the sizes of placements that cards know: the slice itself
// where there is nothing to add, since others may read it.
func sized(grants []ledger.Grant, by map[gpu.UUID]MIGView) []ledger.Grant {
	out, copied := grants, false
	for i := range grants {
		g := &grants[i]
		card := by[g.GPU].Card
		if g.Kind != ledger.Placement || g.Slot.Size > 0 || card == nil {
			continue
		}
		s, ok := card.Slot(g.Slot.Profile, g.Slot.Start, g.Slot.CI)
		if !ok {
			continue
		}
		if !copied {
			out, copied = slices.Clone(grants), true
		}
		out[i].Slot = s
	}
	return out
}

// placeOf is where a placement is.
func placeOf(g *ledger.Grant) mig.Place { return mig.Place{GPU: g.GPU, Slot: g.Slot} }

// togetherLocked checks that slots of one request, each of which could be had,
// can be had together.
func (d *Desk) togetherLocked(r *Resource, ids []string) error {
	var gpus []gpu.UUID
	for _, id := range ids {
		gpus = append(gpus, r.Devices[r.index[id]].GPU)
	}
	rooms := d.roomsLocked(gpus)
	standing := map[gpu.UUID][]mig.Slot{}
	for _, id := range ids {
		dev := &r.Devices[r.index[id]]
		room := rooms[dev.GPU]
		if room.has(r.Name, id) {
			continue // taken has it
		}
		if standing[dev.GPU] == nil {
			standing[dev.GPU] = slices.Clone(room.slots)
		}
		if _, counted := room.beside(dev.Slot); counted {
			continue
		}
		if !room.card.Fits(standing[dev.GPU], dev.Slot) {
			return fmt.Errorf("device %s cannot stand beside the others of this request on %s: %w", id, dev.GPU, gpu.ErrNoRoom)
		}
		standing[dev.GPU] = append(standing[dev.GPU], dev.Slot)
	}
	return nil
}

// takersLocked names, for the end of a sentence, who holds the room that a slot
// lacks, if somebody does. Nobody knows whose pod is asking.
func (d *Desk) takersLocked(dev *Device) string {
	if dev.Slot == (mig.Slot{}) {
		return ""
	}
	var names []string
	for _, c := range d.claims {
		if slices.ContainsFunc(c.Grants, func(g ledger.Grant) bool {
			return g.Kind == ledger.Placement && d.clashLocked(placeOf(&g), mig.Place{GPU: dev.GPU, Slot: dev.Slot})
		}) {
			names = append(names, c.Holder.Told("", c.Key))
		}
	}
	if names == nil {
		return ""
	}
	return " (held by " + list(names) + ")"
}

// clashLocked reports whether two places cannot both be taken: one place twice,
// or, as far as it is known what can stand on the GPU, two that have no room
// beside each other.
func (d *Desk) clashLocked(a, b mig.Place) bool {
	if a.GPU != b.GPU {
		return false
	}
	if a.Slot.Profile == b.Slot.Profile && a.Slot.Start == b.Slot.Start && a.Slot.CI == b.Slot.CI {
		return true
	}
	card := d.base.MIG[a.GPU].Card
	return card != nil && a.Slot.Size > 0 && b.Slot.Size > 0 && !card.Fits([]mig.Slot{a.Slot}, b.Slot)
}

// preferSlots chooses on the cards' word: what leaves the most that could still
// be made, over all GPUs, beside what claims have taken by now.
func (d *Desk) preferSlots(v *View, r *Resource, available, must []string, n int) ([]string, error) {
	ids := map[mig.Place]string{}
	place := func(id string) (mig.Place, bool) {
		i, ok := r.index[id]
		if !ok {
			return mig.Place{}, false
		}
		dev := &r.Devices[i]
		p := mig.Place{GPU: dev.GPU, Slot: dev.Slot}
		ids[p] = id
		return p, dev.Healthy && !dev.Leaving
	}
	var gpus []gpu.UUID
	var free, given []mig.Place
	for _, id := range must {
		p, _ := place(id)
		if ids[p] == "" {
			return nil, fmt.Errorf("device %s is not on offer; the node's partition has changed", id)
		}
		given = append(given, p)
		gpus = append(gpus, p.GPU)
	}
	for _, id := range available {
		// Allocate would refuse the others, of which the kubelet has not heard yet.
		if p, ok := place(id); ok {
			free = append(free, p)
			gpus = append(gpus, p.GPU)
		}
	}
	slices.Sort(gpus)
	gpus = slices.Compact(gpus)
	rank := d.rank(v, r)
	slices.SortStableFunc(gpus, func(a, b gpu.UUID) int { return cmp.Compare(rank[a], rank[b]) })

	d.mu.Lock()
	rooms := d.roomsLocked(gpus)
	d.mu.Unlock()
	offers := make([]mig.Offer, 0, len(gpus))
	for _, u := range gpus {
		room := rooms[u]
		if room.card == nil {
			continue
		}
		o := mig.Offer{GPU: u, Card: room.card, Taken: room.slots, Rank: rank[u]}
		for i := range room.taken {
			if t := &room.taken[i]; t.free {
				o.Warm = append(o.Warm, t.slot)
			}
		}
		for _, s := range v.MIG[u].Warm {
			if !slices.Contains(room.slots, s) {
				o.Warm = append(o.Warm, s)
			}
		}
		offers = append(offers, o)
	}
	chosen, err := mig.Prefer(offers, free, given, n)
	if err != nil {
		return nil, err
	}
	out := make([]string, len(chosen))
	for i, p := range chosen {
		out[i] = ids[p]
	}
	return out, nil
}
