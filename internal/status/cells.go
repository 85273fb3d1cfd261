// SPDX-License-Identifier: Apache-2.0

package status

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// mig writes a GPU's memory slices as a row of cells, then a line for each device that
// exists or is held, then the placements that are free.
func (p *printer) mig(g *GPU) {
	m := g.MIG
	p.wrapped(indent, yellow, m.switches())
	if m.Work != "" {
		p.wrapped(indent, yellow, "now: "+m.Work)
	}
	p.cells(m)
	p.placements(g)
	if free := couldStand(m); free != "" {
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
	content(func(s *Placement) (string, string) { return s.State, placementColor(s.State) })
	content(func(s *Placement) (string, string) { return s.Pod, "" })
	border(corners[3], corners[4], corners[5], false)
}

func placementColor(state string) string {
	switch state {
	case PlacementHeld, PlacementWarm, PlacementFree:
		return green
	case PlacementFailed:
		return red
	case PlacementCovered:
		return faint
	}
	return yellow
}

// placements writes a line for each device that exists, is held, or could not be created.
func (p *printer) placements(g *GPU) {
	shown := g.MIG.shown()
	rows, reasons := make([][]string, len(shown)), make([]string, len(shown))
	for i, s := range shown {
		row := []string{s.label(), s.State, "", ""}
		reasons[i] = s.Reason
		if s.Held() {
			row[2] = who(s.Namespace, s.Pod, s.Container)
			if h := g.holder(s); h != nil {
				row[3] = since(h.Since, p.Now)
				if h.Waits != "" {
					reasons[i] = join("; ", s.Reason, "waits for the end of "+h.Waits)
				}
			}
		}
		rows[i] = row
	}
	if len(rows) == 0 {
		return
	}
	widths := widths(rows)
	widths[0], widths[1] = min(widths[0], 20), min(widths[1], 8)
	// If nobody holds the device, a short reason goes into the holder's column.
	room := p.Width - len(indent) - widths[0] - widths[1] - widths[3] - 6
	for i, row := range rows {
		if n := utf8.RuneCountInString(reasons[i]); row[2] == "" && n <= room {
			row[2], reasons[i] = reasons[i], ""
			widths[2] = max(widths[2], n)
		}
	}
	widths[2] = min(widths[2], room)
	for i, row := range rows {
		line := indent + p.pad("", row[0], widths[0]) + "  " + p.pad(placementColor(row[1]), row[1], widths[1])
		if row[2] != "" {
			line += "  " + p.pad("", row[2], widths[2])
		}
		if row[3] != "" {
			line += "  " + p.pad(faint, row[3], -widths[3])
		}
		p.line(line)
		p.wrapped(indent+"  ", yellow, reasons[i])
	}
}
