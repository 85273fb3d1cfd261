// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"example.com/gpu-agent/pkg/mig"
)

// mig draws a GPU's memory slots as a row of cells, each as wide as its share of
// the memory; then a line for each device that stands or is held; then what
// could be made in the room that is left.
func (p *page) mig(g GPU) {
	m := g.MIG
	if m.Pending != nil && *m.Pending != m.Enabled {
		word := "off"
		if *m.Pending {
			word = "on"
		}
		p.wrapped(yellow, "MIG goes "+word+" when the GPU is reset")
	}
	if m.Work != "" {
		p.wrapped(yellow, "now: "+m.Work)
	}
	p.cells(m)
	p.slots(g)
	if free := couldStand(m.Slots); free != "" {
		p.wrapped(faint, "could be made: "+free)
	}
}

func (p *page) wrapped(color, text string) {
	for _, line := range words(text, p.Width-len(indent)) {
		p.line(indent + p.paint(color, line))
	}
}

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
	slot     *Slot
}

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
		whole.slot = parts[0]
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

// cells draws the row: profile, state and holder of each.
func (p *page) cells(m *MIG) {
	size := m.size()
	// Wider than this, the eye has to travel.
	const widest = 14
	wide := 0
	if size > 0 {
		wide = min((p.Width-len(indent)-1)/size, widest)
	}
	if wide < 3 || len(m.Slots) == 0 {
		return // no room to draw, or nothing to
	}
	corners, bar, dash, nothing := [6]string{"┌", "┬", "┐", "└", "┴", "┘"}, "│", "─", "·"
	if p.ASCII {
		corners, bar, dash, nothing = [6]string{"+", "+", "+", "+", "+", "+"}, "|", "-", "."
	}
	row := row(m, size, wide)
	border := func(first, middle, last string, numbers bool) {
		var line strings.Builder
		for i, c := range row {
			if i == 0 {
				line.WriteString(first)
			} else {
				line.WriteString(middle)
			}
			number := ""
			if numbers && c.start >= 0 {
				number = strconv.Itoa(c.start)
			}
			line.WriteString(number + strings.Repeat(dash, max(c.to-c.from-1-len(number), 0)))
		}
		p.line(indent + line.String() + last)
	}
	content := func(text func(s *Slot) (string, string)) {
		var line strings.Builder
		for _, c := range row {
			words, color := nothing, faint
			if c.slot != nil {
				words, color = text(c.slot)
			}
			words = p.fit(words, c.to-c.from-1)
			line.WriteString(bar + p.paint(color, words) + strings.Repeat(" ", c.to-c.from-1-utf8.RuneCountInString(words)))
		}
		p.line(indent + line.String() + bar)
	}
	border(corners[0], corners[1], corners[2], true)
	content(func(s *Slot) (string, string) { return s.Profile, bold })
	content(func(s *Slot) (string, string) { return s.State, slotColor(s.State) })
	content(func(s *Slot) (string, string) { return s.Pod, "" })
	border(corners[3], corners[4], corners[5], false)
}

func slotColor(state string) string {
	switch state {
	case SlotHeld, SlotWarm, SlotFree:
		return green
	case SlotFailed:
		return red
	case SlotCovered:
		return faint
	}
	return yellow
}

// slots lists what stands, is held, or has something to be said about it.
func (p *page) slots(g GPU) {
	type line struct{ label, state, who, age, waits, reason string }
	var lines []line
	var widths [4]int
	for i := range g.MIG.Slots {
		s := &g.MIG.Slots[i]
		if !s.there() && s.State != SlotFailed {
			continue
		}
		l := line{label: s.label(), state: s.State, reason: s.Reason}
		if s.Held() {
			l.who = "(not yet named by the kubelet)"
			if s.Pod != "" {
				l.who = s.Namespace + "/" + s.Pod + "/" + s.Container
			}
			if h := g.holder(s); h != nil {
				l.waits = h.Waits
				if h.Since != nil && !p.Now.IsZero() {
					l.age = age(p.Now.Sub(*h.Since))
				}
			}
		}
		lines = append(lines, l)
		for i, text := range []string{l.label, l.state, l.who, l.age} {
			widths[i] = max(widths[i], utf8.RuneCountInString(text))
		}
	}
	widths[0], widths[1] = min(widths[0], 20), min(widths[1], 8)
	// A word of why stands in the line of what nobody holds, where it fits.
	room := p.Width - len(indent) - widths[0] - widths[1] - widths[3] - 6
	for i := range lines {
		if l := &lines[i]; l.who == "" && utf8.RuneCountInString(l.reason) <= room {
			l.who, l.reason = l.reason, ""
			widths[2] = max(widths[2], utf8.RuneCountInString(l.who))
		}
	}
	widths[2] = min(widths[2], room)
	pad := func(color, s string, width int) string {
		s = p.fit(s, width)
		return p.paint(color, s) + strings.Repeat(" ", width-utf8.RuneCountInString(s))
	}
	for _, l := range lines {
		text := indent + pad("", l.label, widths[0]) + "  " + pad(slotColor(l.state), l.state, widths[1])
		if l.who != "" {
			text += "  " + pad("", l.who, widths[2])
		}
		if l.age != "" {
			text += "  " + strings.Repeat(" ", widths[3]-len(l.age)) + p.paint(faint, l.age)
		}
		p.line(text)
		if l.waits != "" {
			l.reason = strings.TrimPrefix(l.reason+"; waits for the end of "+l.waits, "; ")
		}
		for _, more := range words(l.reason, p.Width-len(indent)-2) {
			p.line(indent + "  " + p.paint(yellow, more))
		}
	}
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
func couldStand(list []Slot) string {
	var profiles []string
	starts := map[string][]string{}
	for i := range list {
		if s := &list[i]; s.State == SlotFree {
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
