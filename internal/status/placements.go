// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"example.com/gpu-agent/pkg/mig"
)

// label returns the short name of a MIG device: "3g.40gb@4", "1c.3g.40gb@4.1".
func (s *Placement) label() string {
	at := s.Profile + "@" + strconv.Itoa(s.Start)
	if s.split() {
		at += "." + strconv.Itoa(s.CI)
	}
	return at
}

// split reports whether the device is only a part of its GPU instance.
func (s *Placement) split() bool {
	n, err := mig.Parse(s.Profile)
	return err == nil && n.Compute > 0
}

// GPUInstance returns the profile of the GPU instance that the device belongs to.
func (s *Placement) GPUInstance() string {
	n, err := mig.Parse(s.Profile)
	if err != nil {
		return s.Profile
	}
	return n.GPUInstance().String()
}

// shown returns the devices that exist, are held, or could not be created.
func (m *MIG) shown() []*Placement {
	var out []*Placement
	if m != nil {
		for i := range m.Placements {
			if s := &m.Placements[i]; s.occupies() || s.State == PlacementFailed {
				out = append(out, s)
			}
		}
	}
	return out
}

// switches describes a change of the MIG mode at the next reset; it is empty if the mode stays.
// m may be nil.
func (m *MIG) switches() string {
	switch {
	case m == nil || m.Pending == nil || *m.Pending == m.Enabled:
		return ""
	case *m.Pending:
		return "MIG goes on when the GPU is reset"
	}
	return "MIG goes off when the GPU is reset"
}

// occupies reports whether the device takes up memory slices now: it exists, or it is held.
func (s *Placement) occupies() bool {
	return s.UUID != "" || s.State != PlacementFree && s.State != PlacementCovered && s.State != PlacementFailed
}

// drawnFirst has the states of devices in the order of their claim on the same memory slices.
// During a change, a device that is being created can overlap one that is leaving.
var drawnFirst = []string{
	PlacementHeld, PlacementMaking, PlacementLeaving, PlacementForeign, PlacementWarm, PlacementFailed,
	PlacementCovered, PlacementFree,
}

// cell is one piece of the row. It covers the columns in [from, to); the first one is its
// border.
type cell struct {
	from, to  int
	start     int        // the first memory slice; -1 inside a GPU instance
	Placement *Placement // nil if the memory slice is empty
}

// Columns is the cell's width.
func (c cell) Columns() int { return c.to - c.from }

// size returns the number of memory slices; 0 if it is not known.
func (m *MIG) size() int {
	// No GPU has as many. This limits what a broken Status can make us draw.
	const most = 64
	size := m.Size
	if size == 0 {
		for _, s := range m.Placements {
			size = max(size, s.Start+s.Size)
		}
	}
	return min(max(size, 0), most)
}

// row divides the columns among the devices; wide is the number of columns of a memory slice.
func row(m *MIG, size, wide int) []cell {
	var there []*Placement
	for i := range m.Placements {
		s := &m.Placements[i]
		if s.occupies() && s.Start >= 0 && s.Start < size && s.Size > 0 && s.Size <= size-s.Start {
			there = append(there, s)
		}
	}
	slices.SortStableFunc(there, func(a, b *Placement) int {
		return cmp.Compare(slices.Index(drawnFirst, a.State), slices.Index(drawnFirst, b.State))
	})
	type place struct {
		start, size int
		profile     string
	}
	owner := make([]place, size) // memory slice → GPU instance
	parts := map[place][]*Placement{}
	for _, s := range there {
		at := place{s.Start, s.Size, s.GPUInstance()}
		free := true
		for _, o := range owner[s.Start : s.Start+s.Size] {
			free = free && (o == place{} || o == at)
		}
		if !free {
			continue
		}
		for i := s.Start; i < s.Start+s.Size; i++ {
			owner[i] = at
		}
		parts[at] = append(parts[at], s)
	}
	var cells []cell
	for i := 0; i < size; {
		at := owner[i]
		if at.size == 0 {
			cells = append(cells, cell{i * wide, (i + 1) * wide, i, nil})
			i++
			continue
		}
		i += at.size
		cells = append(cells, divide(cell{at.start * wide, i * wide, at.start, nil}, parts[at])...)
	}
	return cells
}

// divide splits a GPU instance's cell among its compute instances.
func divide(whole cell, parts []*Placement) []cell {
	n, _ := mig.Parse(parts[0].Profile)
	if n.Compute == 0 || whole.to-whole.from < 2*n.Slices {
		whole.Placement = parts[0]
		return []cell{whole}
	}
	placements := make([]*Placement, n.Slices) // by compute slice
	for _, s := range parts {
		if c, _ := mig.Parse(s.Profile); s.CI >= 0 && s.CI < n.Slices && placements[s.CI] == nil {
			for i := s.CI; i < min(s.CI+max(c.Compute, 1), n.Slices); i++ {
				placements[i] = s
			}
		}
	}
	var cells []cell
	column := func(i int) int { return whole.from + (whole.to-whole.from)*i/n.Slices }
	for i := 0; i < n.Slices; {
		end := i + 1
		for placements[i] != nil && end < n.Slices && placements[end] == placements[i] {
			end++
		}
		cells = append(cells, cell{column(i), column(end), -1, placements[i]})
		i = end
	}
	cells[0].start = whole.start
	return cells
}

// Held reports whether the device has a holder, even if the kubelet has not named it yet.
func (s *Placement) Held() bool {
	return s.Pod != "" || s.State == PlacementHeld || s.State == PlacementMaking
}

// holder returns the entry in g.Holders for a MIG device; nil if there is none. The entry has
// the holder's age.
func (g *GPU) holder(s *Placement) *Holder {
	for i := range g.Holders {
		h := &g.Holders[i]
		if h.Namespace == s.Namespace && h.Pod == s.Pod && h.Container == s.Container && h.Resource == s.Resource {
			return h
		}
	}
	return nil
}

// Others returns the holders without a MIG device: those from before the GPU was put into MIG
// mode.
func (g *GPU) Others() []Holder {
	if g.MIG == nil {
		return g.Holders
	}
	type name struct{ namespace, pod, container, resource string }
	placements := map[name]bool{}
	for i := range g.MIG.Placements {
		if s := &g.MIG.Placements[i]; s.Held() {
			placements[name{s.Namespace, s.Pod, s.Container, s.Resource}] = true
		}
	}
	return slices.DeleteFunc(slices.Clone(g.Holders), func(h Holder) bool {
		return placements[name{h.Namespace, h.Pod, h.Container, h.Resource}]
	})
}

// freePlacements lists the free placements by profile: "1g.10gb@0,1,2 3g.40gb@0". Each of them
// could be created now, but creating one excludes those that overlap it. m may be nil.
func freePlacements(m *MIG) string {
	if m == nil {
		return ""
	}
	var profiles []string
	starts := map[string][]string{}
	for i := range m.Placements {
		if s := &m.Placements[i]; s.State == PlacementFree {
			if starts[s.Profile] == nil {
				profiles = append(profiles, s.Profile)
			}
			starts[s.Profile] = append(starts[s.Profile], strings.TrimPrefix(s.label(), s.Profile+"@"))
		}
	}
	slices.SortStableFunc(profiles, func(a, b string) int {
		x, errX := mig.Parse(a)
		y, errY := mig.Parse(b)
		if errX != nil || errY != nil {
			return strings.Compare(a, b)
		}
		return mig.Compare(x, y)
	})
	var out []string
	for _, profile := range profiles {
		out = append(out, fmt.Sprintf("%s@%s", profile, strings.Join(starts[profile], ",")))
	}
	return strings.Join(out, " ")
}

// Offer counts the devices of a resource: held, free, and neither of the two.
type Offer struct {
	// Resource is the name of the resource, or of the DeviceClass if Claims is true.
	Resource              string
	Held, Free, Unhealthy int
	// Claims is true if pods ask by a claim.
	Claims bool
}

// Offers counts the GPU's devices by resource. MIG devices are counted by placement:
// free ones may exclude each other. Names are valid UTF-8, and none occurs twice.
func (g *GPU) Offers() []Offer {
	var out []Offer
	of := func(resource string) *Offer {
		resource = strings.ToValidUTF8(resource, "\ufffd")
		at := slices.IndexFunc(out, func(o Offer) bool { return o.Resource == resource })
		if at < 0 {
			at, out = len(out), append(out, Offer{Resource: resource})
		}
		return &out[at]
	}
	if g.asked() != "" {
		o := of(g.asked())
		o.Held, o.Free, o.Unhealthy, o.Claims = g.Used, g.Free, g.Unhealthy, g.Resource == ""
	}
	if g.MIG == nil {
		return out
	}
	for i := range g.MIG.Placements {
		s := &g.MIG.Placements[i]
		name := cmp.Or(s.Resource, s.DeviceClass)
		if name == "" || name == g.asked() { // the GPU's own resource is counted above
			continue
		}
		o := of(name)
		switch o.Claims = s.Resource == ""; {
		case s.Held():
			o.Held++
		case s.State == PlacementFree || s.State == PlacementWarm:
			o.Free++
		default:
			o.Unhealthy++
		}
	}
	return out
}
