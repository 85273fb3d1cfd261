// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"fmt"
	"html"
	"strings"
	"time"
)

// What a plot looks like, in pixels.
const (
	plotWidth, plotLeft, plotRight = 960, 62, 940
	plotTop, panelGap              = 84, 62
)

// Title is that of a plot of so many Jobs.
func Title(jobs int) string {
	return fmt.Sprintf("%d Jobs on two sites: on-prem first, then the cloud, and back", jobs)
}

// panel is one of a plot's diagrams, each above the next.
type panel struct {
	title, color string
	// whole is what its axis goes to, and step where it has lines.
	whole, step, height int
	value               func(Sample) int
	// outline is drawn as a line over the area; nil for none.
	outline func(Sample) int
	// full is where a line says that there is no more; 0 for none.
	full   int
	legend string
}

// Plot draws the record as an SVG: what is held of both sites over time, how many cloud GPUs
// are paid for, how many Jobs wait, and when Jobs came back from the cloud. What a site has
// is in GiB.
func (r *Record) Plot(title string, has [2]int) []byte {
	const perGPU = 80
	most := perGPU
	waiting := 4
	for _, s := range r.Samples {
		most = max(most, s.Sites[Cloud].GPUs*perGPU, s.Sites[Cloud].GiB)
		waiting = max(waiting, s.Waiting)
	}
	panels := []panel{
		{title: "On-prem, GiB held", color: "#2a6f97", whole: has[OnPrem] + 10, step: 40, height: 140,
			value: func(s Sample) int { return s.Sites[OnPrem].GiB }, full: has[OnPrem], legend: fmt.Sprintf("all that it has: %d GiB", has[OnPrem])},
		{title: "Cloud, GiB held", color: "#e07a1f", whole: most + 10, step: perGPU, height: 140,
			value:   func(s Sample) int { return s.Sites[Cloud].GiB },
			outline: func(s Sample) int { return s.Sites[Cloud].GPUs * perGPU }, legend: "GPUs that are paid for, 80 GiB each"},
		{title: "Jobs that wait", color: "#6c757d", whole: waiting, step: max((waiting+3)/4, 1), height: 70, value: func(s Sample) int { return s.Waiting }},
	}
	height := plotTop + 34
	for _, p := range panels {
		height += p.height + panelGap
	}
	height -= panelGap
	d := &drawing{record: r, height: height}
	d.add(`<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %[2]d" font-family="Helvetica, Arial, sans-serif" font-size="13">`, plotWidth, height)
	d.add(`<rect width="100%%" height="100%%" fill="white"/>`)
	d.text(plotLeft, 30, "start", "#222", 17, title)
	top := plotTop
	for i, p := range panels {
		d.panel(p, top, i == len(panels)-1)
		if i == int(OnPrem) {
			d.returns(top, p.height)
		}
		top += p.height + panelGap
	}
	d.add(`</svg>`)
	return []byte(d.String())
}

// drawing is a plot in the making.
type drawing struct {
	strings.Builder
	record *Record
	height int
}

func (d *drawing) add(format string, args ...any) { fmt.Fprintf(d, format+"\n", args...) }

func (d *drawing) text(x, y float64, anchor, color string, size int, words string) {
	d.add(`<text x="%.1f" y="%.1f" text-anchor="%s" fill="%s" font-size="%d">%s</text>`, x, y, anchor, color, size, html.EscapeString(words))
}

// x is where a time is.
func (d *drawing) x(at time.Duration) float64 {
	return plotLeft + (plotRight-plotLeft)*float64(at)/float64(max(d.record.Ended, 1))
}

func (d *drawing) panel(p panel, top int, last bool) {
	bottom := float64(top + p.height)
	y := func(value int) float64 { return bottom - float64(p.height)*float64(value)/float64(p.whole) }
	d.text(plotLeft, float64(top)-12, "start", p.color, 14, p.title)
	for value := 0; value <= p.whole; value += p.step {
		d.add(`<line x1="%d" x2="%d" y1="%.1f" y2="%[3]f" stroke="#e3e3e3"/>`, plotLeft, plotRight, y(value))
		d.text(plotLeft-8, y(value)+4, "end", "#555", 12, fmt.Sprint(value))
	}
	d.add(`<path d="%s" fill="%s" fill-opacity="0.35" stroke="%[2]s" stroke-width="1.5"/>`, d.steps(p.value, y, true), p.color)
	// A legend stands at the right end of the title's line, with a piece of its line.
	const line = `<line x1="%.1f" x2="%.1f" y1="%.1f" y2="%.1f" stroke="%s" stroke-width="1.5" stroke-dasharray="%s"/>`
	style, dash := "#b3261e", "6 4"
	if p.outline != nil {
		style, dash = "#7a3e00", "none"
		d.add(`<path d="%s" fill="none" stroke="%s" stroke-width="1.5"/>`, d.steps(p.outline, y, false), style)
	}
	if p.full > 0 {
		d.add(line, float64(plotLeft), float64(plotRight), y(p.full), y(p.full), style, dash)
	}
	if p.legend != "" {
		d.text(plotRight, float64(top)-12, "end", style, 12, p.legend)
		from := float64(plotRight) - 6.4*float64(len(p.legend)) - 34
		d.add(line, from, from+26, float64(top)-16, float64(top)-16, style, dash)
	}
	every := 30 * time.Second
	for d.record.Ended/every > 12 {
		every *= 2
	}
	for at := time.Duration(0); at <= d.record.Ended; at += every {
		d.add(`<line x1="%.1f" x2="%[1]f" y1="%.1f" y2="%.1f" stroke="#999"/>`, d.x(at), bottom, bottom+5)
		if last {
			d.text(d.x(at), bottom+20, "middle", "#555", 12, fmt.Sprintf("%.0f s", at.Seconds()))
		}
	}
}

// steps is the path of a value over time, which stays as it is until the next sample. A
// closed one runs along the bottom back to its beginning.
func (d *drawing) steps(value func(Sample) int, y func(int) float64, closed bool) string {
	var out strings.Builder
	fmt.Fprintf(&out, "M%.1f %.1f", d.x(0), y(0))
	before := 0
	for _, s := range d.record.Samples {
		if v := value(s); v != before {
			fmt.Fprintf(&out, " H%.1f V%.1f", d.x(s.At), y(v))
			before = v
		}
	}
	fmt.Fprintf(&out, " H%.1f", d.x(d.record.Ended))
	if closed {
		fmt.Fprintf(&out, " V%.1f Z", y(0))
	}
	return out.String()
}

// returns marks in the panel of on-prem when Jobs came back from the cloud.
func (d *drawing) returns(top, height int) {
	line := 0
	for _, h := range d.record.Jobs {
		if at, ok := h.Return(); ok {
			line++
			d.add(`<line x1="%.1f" x2="%[1]f" y1="%d" y2="%d" stroke="#2e7d32" stroke-width="1.5" stroke-dasharray="2 3"/>`, d.x(at), top, top+height)
			x, anchor := d.x(at)+4, "start"
			if x > plotRight-110 { // the words would leave the picture
				x, anchor = d.x(at)-4, "end"
			}
			d.text(x, float64(top+height-6-14*((line-1)%4)), anchor, "#1b5e20", 12, h.Name+" comes back")
		}
	}
}

// Return is when the Job ran on-prem after it had run in the cloud.
func (h *History) Return() (at time.Duration, ok bool) {
	was := false
	for _, p := range h.Pods {
		if p.From == 0 {
			continue
		}
		if p.Site == OnPrem && was {
			return p.From, true
		}
		was = was || p.Site == Cloud
	}
	return 0, false
}
