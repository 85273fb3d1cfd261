// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"example.com/gpu-agent/pkg/compute"
)

// TextOptions are the options of WriteText.
type TextOptions struct {
	// Width is the terminal's width in columns. Less than 60 counts as 60, and 0 as 80.
	Width int
	// Color turns on the terminal's colours. They only repeat what the words say.
	Color bool
	// ASCII draws bars from '#' and '.'.
	ASCII bool
	// Now is the time up to which ages are counted. If it is zero, ages are left out.
	Now time.Time
}

// WriteText writes the Status for people: first the node, then a block for each GPU,
// then the memory of each container. The only errors are those of w.
func WriteText(w io.Writer, s Status, o TextOptions) error {
	if o.Width == 0 {
		o.Width = 80
	}
	o.Width = max(o.Width, 60)
	p := &printer{TextOptions: o}
	p.head(s)
	for i := range s.GPUs {
		p.gpu(&s, &s.GPUs[i])
	}
	if len(s.GPUs) == 0 {
		p.line("no GPU")
	}
	p.containers(s)
	p.shares(s)
	_, err := io.WriteString(w, p.out.String())
	return err
}

const (
	bold   = "1"
	faint  = "2"
	red    = "31"
	green  = "32"
	yellow = "33"
	indent = "       "
)

// toneColors are the terminal's colours for the tones, which on the page are classes.
var toneColors = map[string]string{"ok": green, "held": green, "warn": yellow, "bad": red, "none": faint}

type printer struct {
	TextOptions
	out strings.Builder
}

func (p *printer) line(s string) {
	p.out.WriteString(strings.TrimRight(s, " "))
	p.out.WriteByte('\n')
}

// paint returns s on one line, in a colour.
func (p *printer) paint(code, s string) string {
	s = oneLine(s)
	if !p.Color || s == "" || code == "" {
		return s
	}
	return "\x1b[" + code + "m" + s + "\x1b[0m"
}

// fit shortens s to a number of columns. It counts one column for each character, since the
// names of Kubernetes objects are ASCII.
func (p *printer) fit(s string, columns int) string {
	s = oneLine(s)
	if utf8.RuneCountInString(s) <= columns {
		return s
	}
	more := "…"
	if p.ASCII {
		more = "~"
	}
	return string([]rune(s)[:max(columns-1, 0)]) + more
}

// oneLine replaces control characters and others that are not printed, so that a text from outside can
// neither move the cursor nor turn the direction of the line.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if !strconv.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
}

// wrapped writes s in as many lines as it needs, with indent before each.
func (p *printer) wrapped(indent, color, s string) {
	for _, line := range words(s, p.Width-len(indent)) {
		p.line(indent + p.paint(color, line))
	}
}

// pad makes s as wide as a column. If the width is negative, s is aligned to the right.
func (p *printer) pad(color, s string, width int) string {
	s = p.fit(s, max(width, -width))
	space := strings.Repeat(" ", max(width, -width)-utf8.RuneCountInString(s))
	if width < 0 {
		return space + p.paint(color, s)
	}
	return p.paint(color, s) + space
}

// widths returns the widths of a table's columns.
func widths(rows [][]string) []int {
	var out []int
	for _, row := range rows {
		out = append(out, make([]int, len(row)-len(out))...)
		for i, cell := range row {
			out[i] = max(out[i], utf8.RuneCountInString(cell))
		}
	}
	return out
}

// columns returns the widths of a table's columns, in the form that pad takes. The first column
// is as narrow as it must be, and the others are aligned to the right.
func (p *printer) columns(indent string, rows [][]string) []int {
	out := widths(rows)
	room := p.Width - len(indent)
	for i, w := range out[1:] {
		room -= 2 + w
		out[i+1] = -w
	}
	out[0] = max(min(out[0], room), 8)
	return out
}

// row writes a line of a table, each cell in its colour.
func (p *printer) row(indent string, widths []int, cells []string, colors ...string) {
	line := indent
	for i, cell := range cells {
		if i > 0 {
			line += "  "
		}
		line += p.pad(colors[i], cell, widths[i])
	}
	p.line(line)
}

// words breaks s at spaces into lines of a number of columns. Reasons are written this way, so
// that they are never cut short.
func words(s string, columns int) []string {
	var lines []string
	line := ""
	for _, word := range strings.Fields(oneLine(s)) {
		switch {
		case line == "":
			line = word
		case utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) <= columns:
			line += " " + word
		default:
			lines = append(lines, line)
			line = word
		}
	}
	if line != "" {
		lines = append(lines, line)
	}
	return lines
}

func (p *printer) head(s Status) {
	facts := "gpu-agent " + s.Version
	if s.Driver != "" {
		facts += ", driver " + s.Driver
	}
	if s.CUDA != "" {
		facts += ", CUDA " + s.CUDA
	}
	p.line(p.paint(bold, p.fit(s.Node, p.Width)))
	p.line(p.fit(facts, p.Width))
	t := s.Partition
	if t.State == "" {
		p.line("no partition")
	} else {
		name, state := join(" ", "partition", t.Name)+": ", t.State
		if t.Reason != "" {
			state += " (" + string(t.Reason) + ")"
		}
		name = p.fit(name, p.Width-utf8.RuneCountInString(state))
		p.line(name + p.paint(toneColors[stateTone(t.State)], p.fit(state, p.Width)))
	}
	p.wrapped("  ", toneColors[stateTone(t.State)], t.Message)
	if t.Source != "" {
		p.line(p.paint(faint, p.fit(fmt.Sprintf("from %s, generation %d", t.Source, t.Generation), p.Width)))
	}
	if done := ended(s.Watchdog); done != "" {
		p.wrapped("", yellow, "watchdog: "+done)
	}
	p.notes("", s.notes())
	if s.Topology != nil && len(s.Topology.Joined) > 0 {
		var sets []string
		for _, set := range s.Topology.Joined {
			sets = append(sets, "GPUs "+spans(set))
		}
		p.wrapped("", "", "NVLink joins "+strings.Join(sets, " and "))
	}
}

func (p *printer) notes(indent string, all []note) {
	for _, n := range all {
		p.wrapped(indent, toneColors[n.Tone], n.Text)
	}
}

func (p *printer) gpu(s *Status, g *GPU) {
	p.line("")
	title := fmt.Sprintf("GPU %-2d ", g.Index)
	mode := cmp.Or(string(g.Mode), "no partition")
	if g.API != "" {
		mode += " (" + g.API + ")"
	}
	if g.MIG != nil && g.MIG.OnDemand {
		mode += " on demand"
	}
	if g.Compute != "" {
		mode += ", " + g.Compute
	}
	health, color := g.Health, green
	if g.Health != Healthy {
		color = red
	}
	facts := join("  ", g.Model, amount(g.MemoryMiB), mode)
	p.line(p.paint(bold, title) + p.fit(facts, p.Width-len(title)-2-len(health)) + "  " + p.paint(color, health))
	names := []string{join("  ", g.UUID, g.asked())}
	if utf8.RuneCountInString(names[0]) > p.Width-len(indent) {
		names = []string{g.UUID, g.asked()} // a long domain has a line of its own
	}
	for _, name := range names {
		p.line(indent + p.paint(faint, p.fit(name, p.Width-len(indent))))
	}
	if g.asked() != "" && (g.MIG == nil || g.Total > 0) {
		p.use(g)
	}
	devices, others := s.tenants(g, p.Now)
	if g.MIG != nil {
		p.mig(g, devices)
	}
	p.notes(indent, g.notes(p.Now))
	p.holders(others)
}

// ended describes what the watchdog has done; it is empty if that is nothing.
func ended(w Watchdog) string {
	if w.Kills == 0 && w.Intruders == 0 {
		return ""
	}
	return count(w.Kills, "container", "containers") + " ended, " +
		count(w.Intruders, "intruder", "intruders") + " found"
}

// containers writes a table of each container's cap, use and peak, in GiB. A dash
// is shown for what is not known.
func (p *printer) containers(s Status) {
	list := s.Containers
	if len(list) == 0 {
		return
	}
	instances := map[[4]string]bool{}
	for _, g := range s.GPUs {
		if g.MIG == nil {
			continue
		}
		for _, placement := range g.MIG.Placements {
			instances[[4]string{g.UUID, placement.Namespace, placement.Pod, placement.Container}] = placement.Pod != ""
		}
	}
	rows := [][]string{{"memory in GiB", "GPU", "cap", "used", "peak", "refused", "held by"}}
	for _, c := range list {
		limit, refused := "whole", "-"
		if instances[[4]string{c.GPU, c.Namespace, c.Pod, c.Container}] {
			limit = "MIG"
		}
		if c.CapMiB != nil {
			limit, refused = gib(c.CapMiB), c.refused()
		}
		peak := &c.PeakMiB
		if !c.HasPeak() {
			peak = nil
		}
		rows = append(rows, []string{
			who(c.Namespace, c.Pod, c.Container), strconv.Itoa(c.Index), limit, gib(c.UsedMiB), gib(peak), refused,
			c.Guarantee,
		})
	}
	widths := p.columns("", rows)
	widths[6] = -widths[6] // to the left
	p.line("")
	for i, row := range rows {
		colors := make([]string, len(row))
		if i == 0 {
			colors = slices.Repeat([]string{faint}, len(row))
		} else if list[i-1].over() {
			colors[3] = red
		}
		p.row("", widths, row, colors...)
	}
}

// shares writes a table of the containers that have a share of the SMs of their own: how large it is, and how
// strongly it is held. Below one that is not held stands the reason.
func (p *printer) shares(s Status) {
	rows := [][]string{{"share of the compute", "GPU", "", "held"}}
	var of []compute.Held
	for _, c := range s.Containers {
		if c.Compute == nil {
			continue
		}
		of = append(of, *c.Compute)
		rows = append(rows, []string{who(c.Namespace, c.Pod, c.Container), strconv.Itoa(c.Index),
			strconv.Itoa(c.ComputePercent) + " %", string(c.Compute.Guarantee)})
	}
	if len(of) == 0 {
		return
	}
	widths := p.columns("", rows)
	widths[3] = -widths[3] // to the left
	p.line("")
	p.row("", widths, rows[0], slices.Repeat([]string{faint}, len(rows[0]))...)
	for i, row := range rows[1:] {
		p.row("", widths, row, "", "", "", "")
		if of[i].Guarantee == compute.None {
			p.wrapped("  ", yellow, cmp.Or(of[i].Reason, "no reason is known"))
		}
	}
}

// over reports whether a container is known to use more than its cap.
func (c Container) over() bool {
	return c.CapMiB != nil && c.UsedMiB != nil && *c.UsedMiB > *c.CapMiB
}

// refused returns the number of refusals. The container reports it, so more digits than a
// million has are not worth their room.
func (c Container) refused() string {
	if c.Refusals > 1e6 {
		return "1000000+"
	}
	return strconv.FormatUint(c.Refusals, 10)
}

// who returns a container's full name.
func who(namespace, pod, container string) string {
	if pod == "" {
		return "(not yet named by the kubelet)"
	}
	return namespace + "/" + pod + "/" + container
}

// gib returns MiB as GiB. A container can write any number into its counters, so one that no
// GPU can have is cut off.
func gib(mib *uint64) string {
	const most = 9999 * 1024
	switch {
	case mib == nil:
		return "-"
	case *mib > most:
		return "9999+"
	}
	return strconv.FormatFloat(float64(*mib)/1024, 'f', 1, 64)
}

func count[N int | uint64](n N, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprint(n, " ", many)
}

// use writes a bar of what is held, and the figures beside it.
func (p *printer) use(g *GPU) {
	const cells = 24
	used := share(g.Used, g.Total, cells)
	bad := min(share(g.Unhealthy, g.Total, cells), cells-used)
	full, none, broken := "█", "░", "▒"
	if p.ASCII {
		full, none, broken = "#", ".", "x"
	}
	bar := strings.Repeat(full, used) + p.paint(red, strings.Repeat(broken, bad)) +
		p.paint(faint, strings.Repeat(none, cells-used-bad))
	figures := []string{measure(g, g.Used) + "/" + measure(g, g.Total) + unitName(g, g.Total)}
	if g.Unhealthy > 0 {
		figures = append(figures, measure(g, g.Free)+" free", measure(g, g.Unhealthy)+" withdrawn")
	}
	p.line(indent + bar + "  " + p.fit(strings.Join(figures, ", "), p.Width-len(indent)-cells-2))
}

// share returns part/whole as a number of cells. Any part above zero has at least one cell, and
// any part below the whole leaves at least one free. So only a full bar looks full.
func share(part, whole, cells int) int {
	if part <= 0 || whole <= 0 {
		return 0
	}
	if part >= whole {
		return cells
	}
	return min(max((part*cells+whole/2)/whole, 1), cells-1)
}

// holders writes a line for each holder. It leaves out those that only the watchdog knows.
func (p *printer) holders(list []tenant) {
	list = slices.DeleteFunc(list, func(t tenant) bool { return t.Holds == "" })
	rows := make([][]string, len(list))
	for i, t := range list {
		rows[i] = []string{t.Name, t.Holds, t.Age}
	}
	if len(rows) == 0 {
		return
	}
	widths := p.columns(indent, rows)
	for i, row := range rows {
		p.row(indent, widths, row, "", "", faint)
		if b := list[i].Beside; b != "" {
			p.wrapped(indent+"  ", faint, "shared with "+b)
		}
		if k := list[i].Kept; k != "" {
			p.wrapped(indent+"  ", faint, k)
		}
		if y := list[i].Yields; y != "" {
			p.wrapped(indent+"  ", yellow, y)
		}
		if k := list[i].Parked; k != "" {
			p.wrapped(indent+"  ", faint, k)
		}
		if w := list[i].Waits; w != "" {
			p.wrapped(indent+"  ", yellow, "waits for the end of "+w)
		}
	}
}

// holds returns how much of a GPU a holder has, through either front-end.
func (h *Holder) holds(g *GPU) string {
	switch h.Kind {
	case "whole":
		return "1 GPU"
	case "placement":
		return count(h.Units, "MIG device", "MIG devices")
	case "replica":
		return count(h.Units, "replica", "replicas")
	case "units":
		if g.UnitMiB == 0 {
			return count(h.Units, "memory unit", "memory units")
		}
		return measure(g, h.Units) + unitName(g, h.Units)
	}
	return h.units(g)
}

// units returns how much of a GPU a holder has.
func (h *Holder) units(g *GPU) string {
	if h.Resource != g.Resource {
		// MIG devices, or something from before the GPU's layout changed.
		return strconv.Itoa(h.Units) + " " + h.Resource[strings.LastIndexByte(h.Resource, '/')+1:]
	}
	return measure(g, h.Units) + unitName(g, h.Units)
}

// unitName returns the unit of what measure returns, for n devices.
func unitName(g *GPU, n int) string {
	if g.UnitMiB > 0 {
		return " GiB"
	}
	switch g.Mode {
	case Whole:
		return " GPU"
	case Shared:
		if n == 1 {
			return " replica"
		}
		return " replicas"
	case Unset, InMIG, Dynamic, Off:
		return ""
	}
	return " of mode " + string(g.Mode)
}

// measure returns a number of a GPU's devices. If they are units of memory, it returns GiB,
// with as many digits as the unit needs.
func measure(g *GPU, n int) string {
	if g.UnitMiB == 0 {
		return strconv.Itoa(n)
	}
	gib := float64(uint64(n)*g.UnitMiB) / 1024
	if g.UnitMiB%1024 == 0 {
		return strconv.FormatFloat(gib, 'f', 0, 64)
	}
	return strconv.FormatFloat(gib, 'f', 1, 64)
}

func amount(mib uint64) string {
	if mib == 0 {
		return ""
	}
	return strconv.FormatFloat(float64(mib)/1024, 'f', 1, 64) + " GiB"
}

// age returns a duration in one unit, as kubectl does.
func age(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(max(d, 0).Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// since returns the time from at to now; it is empty if either is unknown.
func since(at *time.Time, now time.Time) string {
	if at == nil || now.IsZero() {
		return ""
	}
	return age(now.Sub(*at))
}

// join is strings.Join without the empty strings.
func join(sep string, list ...string) string {
	return strings.Join(slices.DeleteFunc(list, func(s string) bool { return s == "" }), sep)
}

// spans returns sorted numbers as ranges: "0-3, 5".
func spans(list []int) string {
	var out []string
	for i := 0; i < len(list); {
		j := i
		for j+1 < len(list) && list[j+1] == list[j]+1 {
			j++
		}
		text := strconv.Itoa(list[i])
		switch {
		case j == i+1:
			text += ", " + strconv.Itoa(list[j])
		case j > i:
			text += "-" + strconv.Itoa(list[j])
		}
		out = append(out, text)
		i = j + 1
	}
	return strings.Join(out, ", ")
}
