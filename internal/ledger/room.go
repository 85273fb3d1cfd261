// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"slices"
	"strings"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// MIG is what is known of a GPU in MIG mode besides its allocations: which instances exist, and
// which can exist side by side.
type MIG struct {
	// Card judges which placements can exist side by side; nil if that is not known.
	Card *mig.Card
	// Occupied are instances that may neither be destroyed nor given out, and that no allocation
	// has: their user is unknown, or they are under change.
	Occupied []mig.Placement
	// Kept are instances that may be given out, but not destroyed: another program made them.
	Kept []mig.Placement
	// Warm are idle instances that may be destroyed. They take no room.
	Warm []mig.Placement
}

// SetMIG sets which instances exist and can exist on the GPUs in MIG mode. It also sets the sizes
// of placements that allocations have without one.
func (l *Ledger) SetMIG(gpus map[gpu.UUID]MIG) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rooms = gpus
	for _, a := range l.allocations {
		a.Grants = sized(a.Grants, gpus)
	}
	l.yieldLocked()
}

// sized returns grants with the sizes of placements that the cards know. It returns the same slice
// if there is nothing to add, and otherwise a copy, since others may read the slice.
func sized(grants []Grant, by map[gpu.UUID]MIG) []Grant {
	out, copied := grants, false
	for i := range grants {
		p, ok := piece.Sized(grants[i].Piece, by[grants[i].GPU].Card)
		if !ok {
			continue
		}
		if !copied {
			out, copied = slices.Clone(grants), true
		}
		out[i].Piece = p
	}
	return out
}

// Room is what is taken of a GPU with MIG at one moment.
type Room struct {
	// Card is nil if it is not known what can exist on the GPU.
	Card *mig.Card
	// Placements are those whose instances may not be destroyed, and those of allocations, each
	// once, in place order.
	Placements []mig.Placement

	taken []taken // the same as Placements, with what else is known of them
	held  []held
}

// held is a placement that an allocation has, and the resource that it was asked for as.
type held struct {
	resource  string
	placement mig.Placement
}

// taken is a placement that nothing may be placed over.
type taken struct {
	placement mig.Placement
	// free is true if an instance exists there, no allocation has it, and one may take it.
	free   bool
	reason string // what Lacks returns for it; made at its first use
}

// Rooms returns what is taken of each of these GPUs, for an allocation of a tier: a guaranteed one has
// the room of spot allocations, too, and a spot one the instances of allocations that lend, as they are.
func (l *Ledger) Rooms(gpus []gpu.UUID, of Tier) map[gpu.UUID]*Room {
	l.mu.Lock()
	defer l.mu.Unlock()
	rooms := make(map[gpu.UUID]*Room, len(gpus))
	for _, u := range gpus {
		m := l.rooms[u]
		r := &Room{Card: m.Card}
		for _, s := range m.Occupied {
			r.take(s, false)
		}
		for _, s := range m.Kept {
			r.take(s, true)
		}
		rooms[u] = r
	}
	for _, a := range l.allocations {
		if of == Guaranteed && a.Tier != Guaranteed {
			continue
		}
		for i := range a.Grants {
			g := &a.Grants[i]
			r := rooms[g.GPU]
			at, ok := g.Placement()
			if !ok || g.NoRoom || r == nil {
				continue
			}
			if a.Free(of) { // its instance may be given out as it is, and not destroyed
				if at.Size > 0 {
					r.take(at, true)
				}
				continue
			}
			r.held = append(r.held, held{a.Resource, at})
			// A placement of unknown size takes no room: the GPU has no such profile, or its
			// profiles are not known yet.
			if at.Size > 0 {
				r.take(at, false)
			}
		}
	}
	for _, r := range rooms {
		slices.SortFunc(r.taken, func(a, b taken) int { return mig.ComparePlacements(a.placement, b.placement) })
		r.Placements = make([]mig.Placement, len(r.taken))
		for i := range r.taken {
			r.Placements[i] = r.taken[i].placement
		}
	}
	return rooms
}

func (r *Room) take(s mig.Placement, free bool) {
	for i := range r.taken {
		if t := &r.taken[i]; t.placement == s {
			t.free = t.free && free
			return
		}
	}
	r.taken = append(r.taken, taken{placement: s, free: free})
}

// Has reports whether an allocation has a placement, asked for as this resource.
func (r *Room) Has(resource string, s mig.Placement) bool {
	return slices.ContainsFunc(r.held, func(h held) bool {
		return h.resource == resource && piece.SamePlace(h.placement, s)
	})
}

// Free returns the placements of instances that may be given out, but not destroyed.
func (r *Room) Free() (out []mig.Placement) {
	for i := range r.taken {
		if r.taken[i].free {
			out = append(out, r.taken[i].placement)
		}
	}
	return out
}

// Beside returns the placements that a new one has to fit beside: all that are taken, but not the
// placement itself if it is free. counted is true if it is.
func (r *Room) Beside(s mig.Placement) (others []mig.Placement, counted bool) {
	for i := range r.taken {
		if t := &r.taken[i]; t.placement == s && t.free {
			return slices.Concat(r.Placements[:i], r.Placements[i+1:]), true
		}
	}
	return r.Placements, false
}

// Lacks returns why a placement that no allocation has cannot be given out; empty if it can.
func (r *Room) Lacks(s mig.Placement) string {
	if r.Card == nil {
		return "it is not known what can exist on its GPU"
	}
	others, _ := r.Beside(s)
	if r.Card.Fits(others, s) {
		return ""
	}
	for i := range r.taken {
		t := &r.taken[i]
		if t.placement == s && t.free || r.Card.Fits(r.Placements[i:i+1], s) {
			continue
		}
		if t.reason == "" {
			t.reason = "its room is taken by " + t.placement.String()
		}
		return t.reason
	}
	if len(others) == 0 {
		return "its GPU has no such placement"
	}
	// Each of them alone would leave room for it.
	var names []string
	for _, t := range others {
		names = append(names, t.String())
	}
	return "its room is taken by " + strings.Join(names, ", ")
}

// alters reports whether grants have a placement in the room of MIG instances that others have, and not one of these
// instances.
func alters(rooms map[gpu.UUID]MIG, grants, others []Grant) bool {
	return slices.ContainsFunc(grants, func(x Grant) bool {
		return slices.ContainsFunc(others, func(y Grant) bool {
			a, isA := x.Placement()
			b, isB := y.Placement()
			return x.GPU == y.GPU && isA && isB && !piece.SamePlace(a, b) && clash(rooms[x.GPU].Card, &x, &y)
		})
	})
}

// Overlap reports whether two sets of grants conflict on a GPU: they have the same piece of it,
// pieces of two kinds, two time slices, turns and a share of the SMs, or placements that do not fit side by
// side.
func (l *Ledger) Overlap(a, b []Grant) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return overlap(l.rooms, a, b)
}

func overlap(rooms map[gpu.UUID]MIG, a, b []Grant) bool {
	return slices.ContainsFunc(a, func(x Grant) bool {
		return slices.ContainsFunc(b, func(y Grant) bool { return x.GPU == y.GPU && clash(rooms[x.GPU].Card, &x, &y) })
	})
}

// clash reports whether two grants of one GPU exclude each other. card is nil if it is not known.
func clash(card *mig.Card, a, b *Grant) bool {
	switch {
	case a.NoRoom || b.NoRoom:
		return false
	case a.TimeSlice != "" && b.TimeSlice != "" && a.TimeSlice != b.TimeSlice:
		return true // a GPU has one time slice
	case a.turns() != b.turns() && a.Cap.Known && b.Cap.Known:
		return true // containers that take turns do not run beside clients of MPS
	}
	return piece.Clash(a.Piece, b.Piece, card)
}
