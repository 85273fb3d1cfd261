// SPDX-License-Identifier: Apache-2.0

package status

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// mig writes a GPU's memory slices as a row of cells, then a line for each device that exists
// or is held, then the free placements.
func (p *printer) mig(g *GPU, devices []tenant) {
	m := g.MIG
	if m.Work != "" {
		p.wrapped(indent, yellow, "now: "+m.Work)
	}
	if m.drawn(g.Mode) {
		p.cells(m)
	}
	p.placements(devices)
	if free := freePlacements(m); free != "" {
		p.wrapped(indent, faint, "could be made: "+free)
	}
}

// cells draws the row, with the profile, state and holder of each device.
func (p *printer) cells(m *MIG) {
	size := m.size()
	// Columns for one memory slice, at most. Wider rows are hard to read.
	const widest = 14
	wide := 0
	if size > 0 {
		wide = min((p.Width-len(indent)-1)/size, widest)
	}
	if wide < 3 || len(m.Placements) == 0 {
		return // too narrow, or nothing to draw
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
	content := func(text func(s *Placement) (string, string)) {
		var line strings.Builder
		for _, c := range row {
			words, color := nothing, faint
			if c.Placement != nil {
				words, color = text(c.Placement)
			}
			line.WriteString(bar + p.pad(color, words, c.to-c.from-1))
		}
		p.line(indent + line.String() + bar)
	}
	border(corners[0], corners[1], corners[2], true)
	content(func(s *Placement) (string, string) { return s.Profile, bold })
	content(func(s *Placement) (string, string) { return s.State, toneColors[placementTone(s.State)] })
	content(func(s *Placement) (string, string) { return s.Pod, "" })
	border(corners[3], corners[4], corners[5], false)
}

// placements writes a line for each device that exists, is held, or could not be created.
func (p *printer) placements(devices []tenant) {
	rows, reasons := make([][]string, len(devices)), make([]string, len(devices))
	for i, d := range devices {
		rows[i] = []string{d.Placement.label(), d.Placement.State, d.Name, d.Age}
		reasons[i] = d.Placement.Reason
		if d.Beside != "" {
			reasons[i] = join("; ", reasons[i], "shared with "+d.Beside)
		}
		reasons[i] = join("; ", reasons[i], d.Kept)
		reasons[i] = join("; ", reasons[i], d.Yields, d.Parked)
		if d.Waits != "" {
			reasons[i] = join("; ", reasons[i], "waits for the end of "+d.Waits)
		}
	}
	if len(rows) == 0 {
		return
	}
	widths := widths(rows)
	widths[0], widths[1] = min(widths[0], 20), min(widths[1], 8)
	// If the device has no holder, a short reason goes into the holder's column.
	room := p.Width - len(indent) - widths[0] - widths[1] - widths[3] - 6
	for i, row := range rows {
		if n := utf8.RuneCountInString(reasons[i]); row[2] == "" && n <= room {
			row[2], reasons[i] = reasons[i], ""
			widths[2] = max(widths[2], n)
		}
	}
	widths[2], widths[3] = min(widths[2], room), -widths[3]
	for i, row := range rows {
		p.row(indent, widths, row, "", toneColors[placementTone(row[1])], "", faint)
		p.wrapped(indent+"  ", yellow, reasons[i])
	}
}
