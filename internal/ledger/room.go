// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"slices"
	"strings"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// MIG is what stands and can stand on a GPU whose pieces are placements, beside the
// allocations.
type MIG struct {
	// Card judges which placements can stand together.
	Card *mig.Card
	// Occupied are placements that stand, that no allocation has and that may neither go
	// nor be given out: used by somebody unknown, or under change.
	Occupied []mig.Placement
	// Kept are placements that stand and may not go, but may be given out: instances
	// that somebody else has made.
	Kept []mig.Placement
	// Warm are placements that stand idle and may go; they take nobody's room.
	Warm []mig.Placement
}

// SetMIG says what stands and can stand on the GPUs whose pieces are placements.
// Placements of allocations that were known without their size learn it.
func (l *Ledger) SetMIG(gpus map[gpu.UUID]MIG) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rooms = gpus
	for _, a := range l.allocations {
		a.Grants = sized(a.Grants, gpus)
	}
}

// sized returns grants with the sizes of placements that cards know: the slice itself
// where there is nothing to add, since others may read it.
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
	// Card is nil where it is not known what can stand on the GPU.
	Card *mig.Card
	// Placements are those that may not go, each once, in place order.
	Placements []mig.Placement

	taken []taken // the same with the rest
	held  []held
}

// held is a placement that an allocation has, and the resource that it was asked for as.
type held struct {
	resource  string
	placement mig.Placement
}

// taken is a placement that may not go.
type taken struct {
	placement mig.Placement
	// free says that it stands, that no allocation has it and that one may.
	free   bool
	reason string // for whoever lacks the room; made when it is asked for
}

// Rooms finds out what is taken of each of these GPUs.
func (l *Ledger) Rooms(gpus []gpu.UUID) map[gpu.UUID]*Room {
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
		for i := range a.Grants {
			g := &a.Grants[i]
			r := rooms[g.GPU]
			at, ok := g.Placement()
			if !ok || g.NoRoom || r == nil {
				continue
			}
			r.held = append(r.held, held{a.Resource, at})
			// One of unknown size cannot stand: its GPU has no such profile, or
			// nobody knows yet what it has.
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

// Has reports whether an allocation has a placement, under that name of a resource.
func (r *Room) Has(resource string, s mig.Placement) bool {
	return slices.ContainsFunc(r.held, func(h held) bool {
		return h.resource == resource && piece.SamePlace(h.placement, s)
	})
}

// Free are the placements that stand, that may not go and that may be given out.
func (r *Room) Free() (out []mig.Placement) {
	for i := range r.taken {
		if r.taken[i].free {
			out = append(out, r.taken[i].placement)
		}
	}
	return out
}

// Beside is what a placement has to stand beside: all that is taken, but for itself
// where it stands and may be given out. counted says that it is.
func (r *Room) Beside(s mig.Placement) (others []mig.Placement, counted bool) {
	for i := range r.taken {
		if t := &r.taken[i]; t.placement == s && t.free {
			return slices.Concat(r.Placements[:i], r.Placements[i+1:]), true
		}
	}
	return r.Placements, false
}

// Lacks is why a placement that no allocation has cannot be given out, empty where it can.
func (r *Room) Lacks(s mig.Placement) string {
	if r.Card == nil {
		return "what can stand on its GPU is not known"
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
	// Each alone would leave it room.
	var names []string
	for _, t := range others {
		names = append(names, t.String())
	}
	return "its room is taken by " + strings.Join(names, ", ")
}

// Overlap reports whether two sets of grants have something in common: a piece of the
// same GPU, or pieces of it of two kinds, or placements of which one has no room beside
// the other.
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

// clash reports whether two pieces of one GPU cannot both be had; card is nil where it is not
// known.
func clash(card *mig.Card, a, b *Grant) bool {
	switch {
	case a.NoRoom || b.NoRoom:
		return false
	case a.TimeSlice != "" && b.TimeSlice != "" && a.TimeSlice != b.TimeSlice:
		return true // of the GPU
	}
	return piece.Clash(a.Piece, b.Piece, card)
}
