// SPDX-License-Identifier: Apache-2.0

package status

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// TextOptions choose how WriteText draws.
type TextOptions struct {
	// Width is the terminal's, in columns; less than 60 counts as 60, and zero
	// as 80.
	Width int
	// Color uses the terminal's colours. They repeat what the words say.
	Color bool
	// ASCII draws bars from '#' and '.'.
	ASCII bool
	// Now, if set, is what the age of a holder is counted to; else ages are
	// left out.
	Now time.Time
}

// WriteText draws the Status for people: first the node, then a block a GPU,
// then the memory of each container.
func WriteText(w io.Writer, s Status, o TextOptions) error {
	if o.Width == 0 {
		o.Width = 80
	}
	o.Width = max(o.Width, 60)
	p := &page{TextOptions: o}
	p.head(s)
	for _, g := range s.GPUs {
		p.gpu(g)
	}
	if len(s.GPUs) == 0 {
		p.line("no GPU")
	}
	p.containers(s)
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

type page struct {
	TextOptions
	out strings.Builder
}

func (p *page) line(s string) {
	p.out.WriteString(strings.TrimRight(s, " "))
	p.out.WriteByte('\n')
}

func (p *page) paint(code, s string) string {
	if !p.Color || s == "" || code == "" {
		return s
	}
	return "\x1b[" + code + "m" + s + "\x1b[0m"
}

// fit shortens s to the given columns. One character is one column: names of
// Kubernetes objects are ASCII.
func (p *page) fit(s string, columns int) string {
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

// oneLine makes sure that no text from outside moves the cursor.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r >= 0x7f && r < 0xa0 {
			return ' '
		}
		return r
	}, s)
}

// words breaks s at spaces into lines of the given columns, and is how reasons
// are shown: they are for reading, so they are never cut.
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

func (p *page) head(s Status) {
	facts := []string{"gpu-agent " + s.Version}
	if s.Driver != "" {
		facts = append(facts, "driver "+s.Driver)
	}
	if s.CUDA != "" {
		facts = append(facts, "CUDA "+s.CUDA)
	}
	p.line(p.paint(bold, p.fit(s.Node, p.Width)))
	p.line(p.fit(strings.Join(facts, ", "), p.Width))
	t := s.Partition
	if t.State == "" {
		p.line("no partition")
	} else {
		text := fmt.Sprintf("partition %s: ", t.Name)
		if t.Name == "" {
			text = "partition: "
		}
		p.line(text + p.paint(stateColor(t.State), t.State))
	}
	for _, line := range words(t.Message, p.Width-2) {
		p.line("  " + p.paint(stateColor(t.State), line))
	}
	if s.Hardware != "" {
		for _, line := range words("hardware work waits: "+s.Hardware, p.Width) {
			p.line(p.paint(red, line))
		}
	}
	if t.Source != "" {
		p.line(p.paint(faint, p.fit(fmt.Sprintf("from %s, generation %d", t.Source, t.Generation), p.Width)))
	}
	p.watchdog(s.Watchdog)
	for _, one := range s.Policies {
		color := yellow
		if one.State == PolicyMissing {
			color = red
		}
		if one.State != PolicyHeld {
			for _, line := range words(one.Reason, p.Width) {
				p.line(p.paint(color, line))
			}
		}
	}
	p.joined(s)
}

// joined says which GPUs NVLink joins, and where links are down.
func (p *page) joined(s Status) {
	if s.Topology == nil {
		return
	}
	var sets []string
	for _, set := range s.Topology.Joined {
		sets = append(sets, "GPUs "+spans(set))
	}
	if len(sets) > 0 {
		for _, line := range words("NVLink joins "+strings.Join(sets, " and "), p.Width) {
			p.line(line)
		}
	}
	for _, w := range s.Topology.Weak {
		for _, line := range words(w, p.Width) {
			p.line(p.paint(yellow, line))
		}
	}
}

func stateColor(state string) string {
	switch state {
	case "applied":
		return green
	case "failed", "invalid":
		return red
	}
	return yellow
}

func (p *page) gpu(g GPU) {
	p.line("")
	title := fmt.Sprintf("GPU %-2d ", g.Index)
	facts := []string{g.Model, amount(g.MemoryMiB), g.Mode}
	if g.Mode == "" {
		facts[2] = "no partition"
	}
	if g.MIG != nil && g.MIG.OnDemand {
		facts[2] += " on demand"
	}
	health, color := g.Health, green
	if g.Health != Healthy {
		color = red
	}
	text := strings.Join(compact(facts), "  ")
	p.line(p.paint(bold, title) + p.fit(text, p.Width-len(title)-2-len(health)) + "  " + p.paint(color, health))
	p.line(indent + p.paint(faint, p.fit(strings.Join(compact([]string{g.UUID, g.Resource}), "  "), p.Width-len(indent))))
	if g.Resource != "" && (g.MIG == nil || g.Total > 0) {
		p.use(g)
	}
	if g.MIG != nil {
		p.mig(g)
	}
	reason := g.Reason
	if g.Since != nil && !p.Now.IsZero() {
		reason += " (" + age(p.Now.Sub(*g.Since)) + ")"
	}
	for _, line := range words(reason, p.Width-len(indent)) {
		p.line(indent + p.paint(red, line))
	}
	if g.Blocked != "" {
		for _, line := range words("blocked: "+g.Blocked, p.Width-len(indent)) {
			p.line(indent + p.paint(yellow, line))
		}
	}
	p.holders(g)
	if g.Intruders > 0 {
		p.line(indent + p.paint(red, fmt.Sprintf("used by %s without a claim", count(g.Intruders, "process", "processes"))))
	}
	if g.Unlisted > 0 {
		p.line(indent + p.paint(red, fmt.Sprintf("used by %s of unlisted containers", count(g.Unlisted, "process", "processes"))))
	}
	if g.NoPod > 0 {
		p.line(indent + p.paint(yellow, fmt.Sprintf("used by %s of no pod", count(g.NoPod, "process", "processes"))))
	}
}

// watchdog says what is not as it should be: nothing while it is at work and
// has had nothing to do.
func (p *page) watchdog(w Watchdog) {
	text := ""
	switch {
	case w.State == WatchdogOff:
		text = "watchdog off: " + w.Reason
	case w.Kills > 0 || w.Intruders > 0:
		text = fmt.Sprintf("watchdog: %s ended, %s found", count(int(w.Kills), "container", "containers"), count(int(w.Intruders), "intruder", "intruders"))
	}
	for _, line := range words(text, p.Width) {
		p.line(p.paint(yellow, line))
	}
}

// containers draws a table: what each may use, uses, and has used, in GiB. What
// is not known is a dash.
func (p *page) containers(s Status) {
	list := s.Containers
	if len(list) == 0 {
		return
	}
	instances := map[[4]string]bool{}
	for _, g := range s.GPUs {
		if g.MIG == nil {
			continue
		}
		for _, slot := range g.MIG.Slots {
			instances[[4]string{g.UUID, slot.Namespace, slot.Pod, slot.Container}] = slot.Pod != ""
		}
	}
	rows := [][]string{{"memory in GiB", "GPU", "cap", "used", "peak", "refused", "held by"}}
	for _, c := range list {
		name := "(not yet named by the kubelet)"
		if c.Pod != "" {
			name = c.Namespace + "/" + c.Pod + "/" + c.Container
		}
		limit, refused := "whole", "-"
		if instances[[4]string{c.GPU, c.Namespace, c.Pod, c.Container}] {
			limit = "MIG"
		}
		if c.CapMiB != nil {
			limit, refused = gib(c.CapMiB), strconv.FormatUint(min(c.Refusals, 1e6), 10)
			if c.Refusals > 1e6 {
				refused += "+"
			}
		}
		peak := &c.PeakMiB
		if !c.HasPeak() {
			peak = nil
		}
		rows = append(rows, []string{name, strconv.Itoa(c.Index), limit, gib(c.UsedMiB), gib(peak), refused, c.Guarantee})
	}
	widths := make([]int, len(rows[0]))
	rest := 0
	for column := range widths {
		for _, row := range rows {
			widths[column] = max(widths[column], utf8.RuneCountInString(row[column]))
		}
		if column > 0 {
			rest += 2 + widths[column]
		}
	}
	widths[0] = max(min(widths[0], p.Width-rest), 8)
	p.line("")
	for i, row := range rows {
		name := p.fit(row[0], widths[0])
		line := name + strings.Repeat(" ", widths[0]-utf8.RuneCountInString(name))
		for column, cell := range row[1:6] {
			line += "  " + strings.Repeat(" ", widths[column+1]-utf8.RuneCountInString(cell))
			if over := i > 0 && column == 2 && list[i-1].over(); over {
				cell = p.paint(red, cell)
			}
			line += cell
		}
		line += "  " + row[6]
		if i == 0 {
			line = p.paint(faint, line)
		}
		p.line(line)
	}
}

// over tells whether a container is known to use more than its cap.
func (c Container) over() bool {
	return c.CapMiB != nil && c.UsedMiB != nil && *c.UsedMiB > *c.CapMiB
}

// gib writes MiB as GiB. Counters are a container's word and may be any number:
// one that no GPU has is not written out.
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

func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return strconv.Itoa(n) + " " + many
}

// use draws the bar and says in figures what it shows.
func (p *page) use(g GPU) {
	const cells = 24
	used := share(g.Used, g.Total, cells)
	bad := min(share(g.Unhealthy, g.Total, cells), cells-used)
	full, none, broken := "█", "░", "▒"
	if p.ASCII {
		full, none, broken = "#", ".", "x"
	}
	bar := strings.Repeat(full, used) + p.paint(red, strings.Repeat(broken, bad)) + p.paint(faint, strings.Repeat(none, cells-used-bad))
	figures := []string{measure(g, g.Used) + "/" + measure(g, g.Total) + unitName(g, g.Total)}
	if g.Unhealthy > 0 {
		figures = append(figures, measure(g, g.Free)+" free", measure(g, g.Unhealthy)+" withdrawn")
	}
	p.line(indent + bar + "  " + p.fit(strings.Join(figures, ", "), p.Width-len(indent)-cells-2))
}

// share is part/whole in cells. What is not nothing shows, and what is not all
// leaves room: a bar that looks full is full.
func share(part, whole, cells int) int {
	if part <= 0 || whole <= 0 {
		return 0
	}
	if part >= whole {
		return cells
	}
	return min(max((part*cells+whole/2)/whole, 1), cells-1)
}

func (p *page) holders(g GPU) {
	g.Holders = g.Others()
	if len(g.Holders) == 0 {
		return
	}
	names := make([]string, len(g.Holders))
	units := make([]string, len(g.Holders))
	nameWidth, unitWidth, ageWidth := 0, 0, 0
	ages := make([]string, len(g.Holders))
	for i, h := range g.Holders {
		names[i] = "(not yet named by the kubelet)"
		if h.Pod != "" {
			names[i] = h.Namespace + "/" + h.Pod + "/" + h.Container
		}
		units[i] = measure(g, h.Units) + unitName(g, h.Units)
		if h.Resource != g.Resource {
			// From before the GPU's mode changed: its units are not this mode's.
			units[i] = strconv.Itoa(h.Units) + " " + h.Resource[strings.LastIndexByte(h.Resource, '/')+1:]
		}
		if h.Since != nil && !p.Now.IsZero() {
			ages[i] = age(p.Now.Sub(*h.Since))
		}
		nameWidth = max(nameWidth, utf8.RuneCountInString(names[i]))
		unitWidth = max(unitWidth, utf8.RuneCountInString(units[i]))
		ageWidth = max(ageWidth, len(ages[i]))
	}
	room := p.Width - len(indent) - 2 - unitWidth
	if ageWidth > 0 {
		room -= 2 + ageWidth
	}
	nameWidth = min(nameWidth, room)
	for i := range g.Holders {
		name := p.fit(names[i], nameWidth)
		line := indent + name + strings.Repeat(" ", nameWidth-utf8.RuneCountInString(name)) +
			"  " + strings.Repeat(" ", unitWidth-utf8.RuneCountInString(units[i])) + units[i]
		if ages[i] != "" {
			line += "  " + strings.Repeat(" ", ageWidth-len(ages[i])) + p.paint(faint, ages[i])
		}
		p.line(line)
		if w := g.Holders[i].Waits; w != "" {
			for _, more := range words("waits for the end of "+w, p.Width-len(indent)-2) {
				p.line(indent + "  " + p.paint(yellow, more))
			}
		}
	}
}

// unitName is what measure counts, for n of it.
func unitName(g GPU, n int) string {
	switch {
	case g.UnitMiB > 0:
		return " GiB"
	case g.Mode == "whole":
		return " GPU"
	case g.Mode == "shared" && n == 1:
		return " replica"
	case g.Mode == "shared":
		return " replicas"
	}
	return ""
}

// measure writes n devices of a GPU: as GiB where a device is an amount of
// memory, with as many digits as the unit needs.
func measure(g GPU, n int) string {
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

// age is a duration to one unit, as kubectl writes it.
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

func compact(in []string) []string {
	var out []string
	for _, s := range in {
		if s != "" {
			out = append(out, s)
		}
	}
	return out
}
