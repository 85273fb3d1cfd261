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

// label is what people call a slot: "3g.40gb@4", "1c.3g.40gb@4.1".
func (s *Slot) label() string {
	at := s.Profile + "@" + strconv.Itoa(s.Start)
	if s.split() {
		at += "." + strconv.Itoa(s.CI)
	}
	return at
}

// split tells whether the device is a part of its GPU instance.
func (s *Slot) split() bool {
	n, err := mig.Parse(s.Profile)
	return err == nil && n.Compute > 0
}

// gpuInstance is the profile of the GPU instance that the device is in.
func (s *Slot) GPUInstance() string {
	n, err := mig.Parse(s.Profile)
	if err != nil {
		return s.Profile
	}
	return n.GPUInstance().String()
}

// shown are the devices that stand, are held, or have something to be said about
// them.
func (m *MIG) shown() []*Slot {
	var out []*Slot
	if m != nil {
		for i := range m.Slots {
			if s := &m.Slots[i]; s.there() || s.State == SlotFailed {
				out = append(out, s)
			}
		}
	}
	return out
}

// switches says that the mode changes with the next reset; empty where it does not.
func (m *MIG) switches() string {
	switch {
	case m == nil || m.Pending == nil || *m.Pending == m.Enabled:
		return ""
	case *m.Pending:
		return "MIG goes on when the GPU is reset"
	}
	return "MIG goes off when the GPU is reset"
}

// there tells whether the device takes room now: it stands, or somebody has it.
func (s *Slot) there() bool {
	return s.UUID != "" || s.State != SlotFree && s.State != SlotCovered && s.State != SlotFailed
}

// drawnFirst is who gets the cells where two claim the same memory: while a
// change is under way, a device that is to be stands beside one that goes.
var drawnFirst = []string{SlotHeld, SlotMaking, SlotLeaving, SlotForeign, SlotWarm, SlotFailed, SlotCovered, SlotFree}

// cell is a piece of the row: columns from and to, of which the first one is
// the border.
type cell struct {
	from, to int
	start    int // the memory slot; -1 inside a GPU instance
	Slot     *Slot
}

// Columns is how wide it is.
func (c cell) Columns() int { return c.to - c.from }

// size is the number of memory slots, as far as it is known.
func (m *MIG) size() int {
	// More than any card has: what draws a slot each must come to an end.
	const most = 64
	size := m.Size
	if size == 0 {
		for _, s := range m.Slots {
			size = max(size, s.Start+s.Size)
		}
	}
	return min(max(size, 0), most)
}

// row divides the columns among the slots; wide is the columns of one memory
// slot.
func row(m *MIG, size, wide int) []cell {
	var there []*Slot
	for i := range m.Slots {
		if s := &m.Slots[i]; s.there() && s.Start >= 0 && s.Start < size && s.Size > 0 && s.Size <= size-s.Start {
			there = append(there, s)
		}
	}
	slices.SortStableFunc(there, func(a, b *Slot) int {
		return cmp.Compare(slices.Index(drawnFirst, a.State), slices.Index(drawnFirst, b.State))
	})
	type place struct {
		start, size int
		profile     string
	}
	owner := make([]place, size) // memory slot → GPU instance
	parts := map[place][]*Slot{}
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

// divide gives each compute instance its part of the GPU instance's cell.
func divide(whole cell, parts []*Slot) []cell {
	n, _ := mig.Parse(parts[0].Profile)
	if n.Compute == 0 || whole.to-whole.from < 2*n.Slices {
		whole.Slot = parts[0]
		return []cell{whole}
	}
	slots := make([]*Slot, n.Slices) // by compute slice
	for _, s := range parts {
		if c, _ := mig.Parse(s.Profile); s.CI >= 0 && s.CI < n.Slices && slots[s.CI] == nil {
			for i := s.CI; i < min(s.CI+max(c.Compute, 1), n.Slices); i++ {
				slots[i] = s
			}
		}
	}
	var cells []cell
	column := func(i int) int { return whole.from + (whole.to-whole.from)*i/n.Slices }
	for i := 0; i < n.Slices; {
		end := i + 1
		for slots[i] != nil && end < n.Slices && slots[end] == slots[i] {
			end++
		}
		cells = append(cells, cell{column(i), column(end), -1, slots[i]})
		i = end
	}
	cells[0].start = whole.start
	return cells
}

// held tells whether somebody has the device, named or not.
func (s *Slot) Held() bool {
	return s.Pod != "" || s.State == SlotHeld || s.State == SlotMaking
}

// holder finds the holder of a slot among the GPU's, where its age is; nil
// where there is none.
func (g *GPU) holder(s *Slot) *Holder {
	for i := range g.Holders {
		h := &g.Holders[i]
		if h.Namespace == s.Namespace && h.Pod == s.Pod && h.Container == s.Container && h.Resource == s.Resource {
			return h
		}
	}
	return nil
}

// others are the holders that no slot has: those of before the GPU was cut.
func (g *GPU) Others() []Holder {
	if g.MIG == nil {
		return g.Holders
	}
	type name struct{ namespace, pod, container, resource string }
	slots := map[name]bool{}
	for i := range g.MIG.Slots {
		if s := &g.MIG.Slots[i]; s.Held() {
			slots[name{s.Namespace, s.Pod, s.Container, s.Resource}] = true
		}
	}
	return slices.DeleteFunc(slices.Clone(g.Holders), func(h Holder) bool {
		return slots[name{h.Namespace, h.Pod, h.Container, h.Resource}]
	})
}

// couldStand names the free slots, profile by profile: "1g.10gb@0,1,2 3g.40gb@0".
// Each could be made; two that overlap exclude each other.
func couldStand(m *MIG) string {
	if m == nil {
		return ""
	}
	var profiles []string
	starts := map[string][]string{}
	for i := range m.Slots {
		if s := &m.Slots[i]; s.State == SlotFree {
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

// Offer is how many devices of a resource are held, how many can be had now, and
// how many are neither.
type Offer struct {
	Resource              string
	Held, Free, Unhealthy int
}

// Offers counts the GPU's devices by resource. MIG devices are counted by place:
// free ones may exclude each other. Names are valid UTF-8, and each is there once.
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
	if g.Resource != "" {
		o := of(g.Resource)
		o.Held, o.Free, o.Unhealthy = g.Used, g.Free, g.Unhealthy
	}
	if g.MIG == nil {
		return out
	}
	for i := range g.MIG.Slots {
		switch s := &g.MIG.Slots[i]; {
		case s.Resource == "" || s.Resource == g.Resource: // the latter's are counted already
		case s.Held():
			of(s.Resource).Held++
		case s.State == SlotFree || s.State == SlotWarm:
			of(s.Resource).Free++
		default:
			of(s.Resource).Unhealthy++
		}
	}
	return out
}
