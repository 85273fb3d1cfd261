// SPDX-License-Identifier: Apache-2.0

package prometheus

import (
	"bytes"
	"cmp"
	"context"
	"encoding/xml"
	"fmt"
	"maps"
	"math"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// The size of a board's picture: a width of 24 parts, and the height of one part.
const (
	part, high = 44, 26
	gap        = 6
	titleHigh  = 20
	legendHigh = 16
)

// palette has the colours of lines, one after the other.
var palette = []string{"#3274d9", "#e0752d", "#37872d", "#a352cc", "#c4162a", "#b5a000", "#0a9a9a", "#8f5b3a", "#6b7785", "#d24c9c"}

// line is one series of a panel.
type line struct {
	name   string
	labels map[string]string
	// values are by the step; NaN where there is none.
	values []float64
}

// Picture draws a board as Grafana lays it out, with what its queries have shown since a time. fill
// returns a query with what Grafana puts in place of its variables. It is no picture by Grafana: it has the
// panels, their places and titles, and the figures.
func (s *Server) Picture(ctx context.Context, b *Board, since time.Time, fill func(expr string) string) ([]byte, error) {
	bottom := 0
	for i := range b.Panels {
		bottom = max(bottom, b.Panels[i].GridPos.Y+b.Panels[i].GridPos.H)
	}
	d := &drawing{now: time.Now(), since: since, steps: 160}
	fmt.Fprintf(&d.out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="Helvetica, Arial, sans-serif" font-size="11">`+"\n",
		24*part, bottom*high+34)
	fmt.Fprintf(&d.out, `<rect width="100%%" height="100%%" fill="#f4f5f5"/>`+"\n")
	d.text(gap, 21, 24*part, "#1f2328", `font-size="16" font-weight="bold"`, b.Title)
	for i := range b.Panels {
		p := &b.Panels[i]
		var lines []line
		for n, t := range p.Targets {
			more, err := s.lines(ctx, d, fill(t.Expr))
			if err != nil {
				return nil, fmt.Errorf("draw %s of %s: %w", p.Title, b.Title, err)
			}
			for j := range more {
				more[j].name = legend(t.LegendFormat, more[j].labels)
				if p.Type == "table" {
					more[j].name = strconv.Itoa(n)
				}
			}
			lines = append(lines, more...)
		}
		d.panel(p, lines)
	}
	d.out.WriteString("</svg>\n")
	return d.out.Bytes(), nil
}

// lines asks for the series of a query.
func (s *Server) lines(ctx context.Context, d *drawing, expr string) ([]line, error) {
	span := d.now.Sub(d.since)
	step := max(span/time.Duration(d.steps), time.Second)
	var answer struct {
		Result []struct {
			Metric map[string]string
			Values [][2]any
		}
	}
	if err := s.ask(ctx, "query_range", url.Values{"query": {expr}, "step": {strconv.FormatFloat(step.Seconds(), 'f', 3, 64)},
		"start": {stamp(d.since)}, "end": {stamp(d.now)}}, &answer); err != nil {
		return nil, err
	}
	n := int(span/step) + 1
	var out []line
	for _, r := range answer.Result {
		one := line{labels: r.Metric, values: slices.Repeat([]float64{math.NaN()}, n)}
		for _, v := range r.Values {
			at, _ := v[0].(float64)
			text, _ := v[1].(string)
			value, err := strconv.ParseFloat(text, 64)
			i := int(math.Round((at - float64(d.since.UnixMilli())/1000) / step.Seconds()))
			if err == nil && i >= 0 && i < n {
				one.values[i] = value
			}
		}
		out = append(out, one)
	}
	slices.SortFunc(out, func(a, b line) int { return strings.Compare(fmt.Sprint(a.labels), fmt.Sprint(b.labels)) })
	return out, nil
}

var variables = regexp.MustCompile(`\{\{\s*(\w+)\s*\}\}`)

// legend returns the name of a series.
func legend(format string, labels map[string]string) string {
	return strings.TrimSpace(variables.ReplaceAllStringFunc(format, func(m string) string { return labels[variables.FindStringSubmatch(m)[1]] }))
}

// last returns the newest value of a series, NaN if it has none.
func (l *line) last() float64 {
	for _, v := range slices.Backward(l.values) {
		if !math.IsNaN(v) {
			return v
		}
	}
	return math.NaN()
}

type drawing struct {
	out        bytes.Buffer
	since, now time.Time
	// steps are how many values a line has, about.
	steps int
}

// text writes a text that is cut to a width in pixels.
func (d *drawing) text(x, y, width int, color, more, text string) {
	if most := max(width/7, 1); utf8.RuneCountInString(text) > most {
		text = string([]rune(text)[:most-1]) + "…"
	}
	fmt.Fprintf(&d.out, `<text x="%d" y="%d" fill="%s" %s>`, x, y, color, more)
	_ = xml.EscapeText(&d.out, []byte(text)) // a buffer takes all
	d.out.WriteString("</text>\n")
}

func (d *drawing) panel(p *Panel, lines []line) {
	x, y, w, h := p.GridPos.X*part, p.GridPos.Y*high+32, p.GridPos.W*part-gap, p.GridPos.H*high-gap
	if p.Type == "row" {
		d.text(x+gap, y+15, w, "#1f2328", `font-size="13" font-weight="bold"`, "▾ "+p.Title)
		return
	}
	fmt.Fprintf(&d.out, `<rect x="%d" y="%d" width="%d" height="%d" rx="2" fill="#fff" stroke="#d8dbdf"/>`+"\n", x, y, w, h)
	d.text(x+gap, y+14, w-gap, "#1f2328", `font-weight="bold"`, p.Title)
	x, y, w, h = x+gap, y+titleHigh, w-2*gap, h-titleHigh-gap
	switch {
	case len(lines) == 0:
		d.text(x+w/2-20, y+h/2, w, "#6b7785", "", "No data")
	case p.Type == "stat":
		d.stat(p, lines, x, y, w, h)
	case p.Type == "table":
		d.table(p, lines, x, y, w, h)
	default:
		d.chart(p, lines, x, y, w, h)
	}
}

// stat writes the newest figures.
func (d *drawing) stat(p *Panel, lines []line, x, y, w, h int) {
	each := w / len(lines)
	for i := range lines {
		d.text(x+i*each, y+h/2+6, each*2, "#37872d", `font-size="22" font-weight="bold"`, figure(p, lines[i].last()))
		if len(lines) > 1 {
			d.text(x+i*each, y+h-4, each, "#6b7785", "", lines[i].name)
		}
	}
}

// column is one of a table's: a label, or the values of a query.
type column struct {
	title, label string
	query        int
}

// columns returns those that a table shows of labels and queries.
func (p *Panel) columns(labels map[string]bool) (out []column) {
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		out = append(out, column{name, name, -1})
	}
	for i := range p.Targets {
		title := "Value"
		if len(p.Targets) > 1 {
			title += " #" + string(rune('A'+i))
		}
		out = append(out, column{title, "", i})
	}
	for _, t := range p.Transformations {
		out = slices.DeleteFunc(out, func(c column) bool { return t.Options.ExcludeByName[c.title] })
		for i := range out {
			out[i].title = cmp.Or(t.Options.RenameByName[out[i].title], out[i].title)
		}
	}
	return out
}

// table writes a line for each set of labels that the queries have now.
func (d *drawing) table(p *Panel, lines []line, x, y, w, h int) {
	rows, labels := map[string]map[int]string{}, map[string]bool{}
	var order []*line
	for i := range lines {
		l := &lines[i]
		key, now := fmt.Sprint(l.labels), l.values[len(l.values)-1]
		for name := range l.labels {
			labels[name] = labels[name] || name != "__name__"
		}
		if math.IsNaN(now) {
			continue
		}
		if rows[key] == nil {
			order, rows[key] = append(order, l), map[int]string{}
		}
		n, _ := strconv.Atoi(l.name) // the query's number
		rows[key][n] = figure(p, now)
	}
	maps.DeleteFunc(labels, func(_ string, shown bool) bool { return !shown })
	columns := p.columns(labels)
	width := w / max(len(columns), 1)
	for i, c := range columns {
		d.text(x+i*width, y+12, width, "#6b7785", "", c.title)
	}
	for r, l := range order[:min(len(order), (h-16)/15)] {
		for i, c := range columns {
			cell := l.labels[c.label]
			if c.query >= 0 {
				cell = cmp.Or(rows[fmt.Sprint(l.labels)][c.query], "-")
			}
			d.text(x+i*width, y+28+r*15, width, "#1f2328", "", cell)
		}
	}
}

// chart draws lines, or areas that are stacked.
func (d *drawing) chart(p *Panel, lines []line, x, y, w, h int) {
	stacked := p.FieldConfig.Defaults.Custom.Stacking.Mode == "normal"
	const axis = 48
	bottom := y + h - 2*legendHigh
	tall := bottom - y - 4
	drawn := make([][]float64, len(lines))
	low, top := 0.0, 0.0
	for i := range lines {
		drawn[i] = slices.Clone(lines[i].values)
		for j, v := range drawn[i] {
			if stacked && i > 0 {
				if math.IsNaN(v) {
					v = 0
				}
				v += max(drawn[i-1][j], 0)
				drawn[i][j] = v
			}
			if !math.IsNaN(v) && !math.IsInf(v, 0) {
				low, top = min(low, v), max(top, v)
			}
		}
	}
	if m := p.FieldConfig.Defaults.Max; m != nil {
		top = max(*m, low+1e-9)
	}
	if top <= low {
		top = low + 1
	}
	for i := range 3 {
		v := low + (top-low)*float64(i)/2
		at := bottom - int(float64(tall)*float64(i)/2)
		fmt.Fprintf(&d.out, `<path d="M%d %dH%d" stroke="#e4e7ea"/>`+"\n", x+axis, at, x+w)
		d.text(x, at+4, axis+14, "#6b7785", "", figure(p, v))
	}
	for i := range lines {
		var path strings.Builder
		pen := "M"
		for j, v := range drawn[i] {
			if math.IsNaN(v) || math.IsInf(v, 0) {
				pen = "M"
				continue
			}
			if j > 0 && j < len(drawn[i])-1 && drawn[i][j-1] == v && drawn[i][j+1] == v && pen == "L" {
				continue // within a level stretch
			}
			at := float64(x+axis) + float64(w-axis)*float64(j)/float64(max(len(drawn[i])-1, 1))
			fmt.Fprintf(&path, "%s%.0f %.0f", pen, at, float64(bottom)-float64(tall)*(min(v, top)-low)/(top-low))
			pen = "L"
		}
		fmt.Fprintf(&d.out, `<path d="%s" fill="none" stroke="%s" stroke-width="1.3"/>`+"\n", path.String(), palette[i%len(palette)])
	}
	d.text(x+axis, bottom+12, 60, "#6b7785", "", d.since.UTC().Format("15:04"))
	d.text(x+w-32, bottom+12, 60, "#6b7785", "", d.now.UTC().Format("15:04"))
	at := x
	for i := range lines {
		name := lines[i].name
		width := min(7*utf8.RuneCountInString(name)+22, 180)
		if at+width > x+w {
			d.text(at, y+h, 40, "#6b7785", "", fmt.Sprintf("+%d", len(lines)-i))
			break
		}
		fmt.Fprintf(&d.out, `<rect x="%d" y="%d" width="10" height="3" fill="%s"/>`+"\n", at, y+h-5, palette[i%len(palette)])
		d.text(at+13, y+h, width-13, "#1f2328", "", name)
		at += width
	}
}

// figure writes a value in the panel's unit.
func figure(p *Panel, v float64) string {
	digits := 2
	if n := p.FieldConfig.Defaults.Decimals; n != nil {
		digits = *n
	}
	plain := func(v float64) string {
		text := strconv.FormatFloat(v, 'f', digits, 64)
		if strings.Contains(text, ".") {
			text = strings.TrimRight(strings.TrimRight(text, "0"), ".")
		}
		return text
	}
	switch {
	case math.IsNaN(v):
		return "-"
	case p.FieldConfig.Defaults.Unit == "percentunit":
		return plain(100*v) + "%"
	case p.FieldConfig.Defaults.Unit == "bytes" && v >= 1<<30:
		return plain(v/(1<<30)) + " GiB"
	case p.FieldConfig.Defaults.Unit == "bytes":
		return plain(v/(1<<20)) + " MiB"
	case p.FieldConfig.Defaults.Unit == "s" && v != 0 && math.Abs(v) < 1:
		return plain(1000*v) + " ms"
	case p.FieldConfig.Defaults.Unit == "s":
		return plain(v) + " s"
	case p.FieldConfig.Defaults.Unit == "ops":
		return plain(v) + "/s"
	}
	return plain(v)
}
