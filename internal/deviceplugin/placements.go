// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"fmt"
	"slices"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// room says which devices of a resource have room beside what is taken.
type room interface {
	// knows reports whether it was asked about a GPU.
	knows(gpu.UUID) bool
	// lacks returns why a device that may be given out otherwise has no room; empty if it has. A device that
	// an allocation has through the resource has room. A leaving device is Healthy only for such a holder.
	lacks(*Device) string
}

// placementRoom is the room of MIG devices.
type placementRoom struct {
	resource string
	rooms    map[gpu.UUID]*ledger.Room
}

func (p *placementRoom) knows(u gpu.UUID) bool { return p.rooms[u] != nil }

func (p *placementRoom) lacks(dev *Device) string {
	switch room := p.rooms[dev.GPU]; {
	case room.Has(p.resource, dev.Placement):
		return ""
	case dev.Leaving:
		return dev.Reason
	default:
		return room.Lacks(dev.Placement)
	}
}

// changes reports whether the health of a resource's devices changes with the allocations.
func (r *Resource) changes() bool { return r.Kind.InMIG() || r.Tier == ledger.Spot }

// markHealth returns the devices of a resource with their present health. base has them as they
// were published. It marks those Unhealthy that have no room beside what is taken on their GPU,
// and those that have a fault. A device whose GPU the room does not know stays as in shown, the list
// in force. room is nil if all devices have room. If no device differs from shown, markHealth returns
// shown itself.
func markHealth(shown []Device, base *Resource, room room, faults *faults) []Device {
	out, known := shown, true
	for i, dev := range base.Devices {
		if room != nil && (i == 0 || dev.GPU != base.Devices[i-1].GPU) { // a list has the devices of one GPU together
			known = room.knows(dev.GPU)
		}
		if !known {
			continue
		}
		if why, bad := faults.of(&dev); bad {
			dev.Healthy, dev.Leaving, dev.Reason = false, false, why
		} else if room != nil && dev.Healthy {
			if why := room.lacks(&base.Devices[i]); why != "" { // not &dev, which would be allocated each time
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

// placementGPUs returns the GPUs whose placements an offer lists, each once.
func (o *Offer) placementGPUs() (out []gpu.UUID) {
	for i := range o.Resources {
		if r := &o.Resources[i]; r.Kind.InMIG() {
			for j := range r.Devices {
				if u := r.Devices[j].GPU; !slices.Contains(out, u) {
					out = append(out, u)
				}
			}
		}
	}
	return out
}

// fitTogether returns an error if the placements of one request do not fit beside each other. Each
// of them alone has room. The error wraps gpu.ErrNoRoom.
func fitTogether(l *ledger.Ledger, r *Resource, ids []string) error {
	var gpus []gpu.UUID
	for _, id := range ids {
		gpus = append(gpus, r.Devices[r.index[id]].GPU)
	}
	rooms := l.Rooms(gpus, r.Tier)
	standing := map[gpu.UUID][]mig.Placement{}
	for _, id := range ids {
		dev := &r.Devices[r.index[id]]
		room := rooms[dev.GPU]
		if room.Has(r.Name, dev.Placement) {
			continue // room.Placements has it
		}
		if standing[dev.GPU] == nil {
			standing[dev.GPU] = slices.Clone(room.Placements)
		}
		if _, counted := room.Beside(dev.Placement); counted {
			continue
		}
		if !room.Card.Fits(standing[dev.GPU], dev.Placement) {
			return fmt.Errorf("device %s does not fit beside the others of this request on %s: %w",
				id, dev.GPU, gpu.ErrNoRoom)
		}
		standing[dev.GPU] = append(standing[dev.GPU], dev.Placement)
	}
	return nil
}

// roomHolders names the holders of the room that a placement lacks, to end a sentence with. It is
// empty if there are none. It names no pod, since the asking pod's namespace is not known.
func roomHolders(l *ledger.Ledger, dev *Device) string {
	if dev.Placement == (mig.Placement{}) {
		return ""
	}
	wanted := []ledger.Grant{{GPU: dev.GPU, Piece: piece.Instance(dev.Placement)}}
	held := l.Allocations()
	var names []string
	for i := range held {
		if a := &held[i]; a.Kind().InMIG() && a.Tier == ledger.Guaranteed && l.Overlap(a.Grants, wanted) {
			names = append(names, a.Holder.Told("", a.ID))
		}
	}
	if names == nil {
		return ""
	}
	return " (held by " + list(names) + ")"
}

// preferPlacements chooses the placements after which the most others can still be created, on all
// GPUs together, beside what allocations have taken by now. The cards of the GPUs decide.
func (f *FrontEnd) preferPlacements(v *Offer, r *Resource, available, must []string, n int) ([]string, error) {
	ids := map[mig.Place]string{}
	place := func(id string) (mig.Place, bool) {
		i, ok := r.index[id]
		if !ok {
			return mig.Place{}, false
		}
		dev := &r.Devices[i]
		p := mig.Place{GPU: dev.GPU, Placement: dev.Placement}
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
		// Allocate would refuse the others; the kubelet does not know yet that they are withdrawn.
		if p, ok := place(id); ok {
			free = append(free, p)
			gpus = append(gpus, p.GPU)
		}
	}
	slices.Sort(gpus)
	gpus = slices.Compact(gpus)
	rank := rank(f.ledger, v, r)
	slices.SortStableFunc(gpus, func(a, b gpu.UUID) int { return cmp.Compare(rank[a], rank[b]) })

	overSpot := r.Tier == ledger.Guaranteed && f.ledger.Spots() > 0
	tier := ledger.Spot
	if overSpot {
		tier = ledger.Guaranteed
	}
	offers := f.placementOffers(v, gpus, rank, tier)
	choose := func(free []mig.Place) ([]mig.Place, error) { return mig.Prefer(offers, free, given, n) }
	var chosen []mig.Place
	var err error
	if overSpot {
		chosen, err = f.chooseOverSpot(choose, free, n == len(given)+1)
	} else {
		chosen, err = f.chooseBeforeLent(r, choose, free, ids)
	}
	if err != nil {
		return nil, err
	}
	out := make([]string, len(chosen))
	for i, p := range chosen {
		out[i] = ids[p]
	}
	return out, nil
}

// placementOffers returns what GPUs have beside what is taken for an allocation of a tier.
func (f *FrontEnd) placementOffers(v *Offer, gpus []gpu.UUID, rank map[gpu.UUID]int, t ledger.Tier) []mig.Offer {
	rooms := f.ledger.Rooms(gpus, t)
	offers := make([]mig.Offer, 0, len(gpus))
	for _, u := range gpus {
		room := rooms[u]
		if room.Card == nil {
			continue
		}
		o := mig.Offer{GPU: u, Card: room.Card, Pinned: room.Placements, Warm: room.Free(), Rank: rank[u]}
		for _, s := range v.MIG[u].Warm {
			if !slices.Contains(room.Placements, s) {
				o.Warm = append(o.Warm, s)
			}
		}
		offers = append(offers, o)
	}
	return offers
}
