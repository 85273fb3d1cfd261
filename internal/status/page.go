// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"fmt"
	"html"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"example.com/gpu-agent/pkg/topology"
)

//go:embed page.css
var style string

// PagePolicy is the page's Content-Security-Policy: its own style and its icon, and
// nothing else from anywhere. A style attribute would be refused, so there is
// none: what has a measure is drawn in SVG.
var PagePolicy = func() string {
	sum := sha256.Sum256([]byte(style))
	return "default-src 'none'; style-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) +
		"'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}()

// WriteHTML draws the Status as one page that needs nothing else: no script, no
// font, no picture from elsewhere. now is what ages are counted to. The page is
// XML too, with every text from outside as text: programs can read it, and a
// test that nothing in a Status is taken for markup.
func WriteHTML(w io.Writer, s Status, now time.Time) error {
	p := &sheet{s: s, now: now, byUUID: map[string]int{}, ids: map[string]int{}}
	for i, g := range slices.Backward(s.GPUs) {
		p.byUUID[g.UUID] = i // the first of a name
	}
	p.all()
	_, err := io.WriteString(w, p.out.String())
	return err
}

// sheet is a page being written.
type sheet struct {
	s      Status
	now    time.Time
	byUUID map[string]int // UUID → place in s.GPUs
	ids    map[string]int
	out    strings.Builder
}

// put writes markup in which each {} stands for the next value, which is a
// string or an int, as text or as part of an attribute.
func (p *sheet) put(markup string, values ...any) {
	for _, v := range values {
		before, after, ok := strings.Cut(markup, "{}")
		if !ok {
			panic("status: more values than places in " + markup)
		}
		p.out.WriteString(before)
		switch v := v.(type) {
		case int:
			p.out.WriteString(strconv.Itoa(v))
		case string:
			p.out.WriteString(html.EscapeString(plain(v)))
		default:
			panic(fmt.Sprintf("status: %T is no text", v))
		}
		markup = after
	}
	p.out.WriteString(markup)
}

// plain takes out of a text what no text has: control characters, halves of
// characters, what XML forbids, and what makes the letters around it change
// their order.
func plain(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\ufffe', r == '\uffff', r >= '\u202a' && r <= '\u202e', r >= '\u2066' && r <= '\u2069':
			return '\ufffd'
		}
		return r
	}, oneLine(strings.ToValidUTF8(s, "\ufffd")))
}

// breaking writes a text that is broken after at rather than elsewhere.
func (p *sheet) breaking(s, at string) {
	for i, part := range strings.SplitAfter(s, at) {
		if i > 0 {
			p.put("<wbr/>")
		}
		p.put("{}", part)
	}
}

// id makes an identifier that the page has once.
func (p *sheet) id(prefix string) string {
	p.ids[prefix]++
	return prefix + "-" + strconv.Itoa(p.ids[prefix])
}

func (p *sheet) all() {
	complaints := p.complaints()
	p.put(`<!DOCTYPE html>
<html lang="en" xmlns="http://www.w3.org/1999/xhtml"><head><meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/><meta name="color-scheme" content="light dark"/>
<title>{} – gpu-agent</title>
<link rel="icon" href="data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cg fill='%23{}'%3E%3Crect width='7' height='16' rx='1.5'/%3E%3Crect x='9' width='7' height='7' rx='1.5'/%3E%3Crect x='9' y='9' width='7' height='7' rx='1.5'/%3E%3C/g%3E%3C/svg%3E"/>
<style>`, cmp.Or(p.s.Node, "this node"), iconColor(complaints))
	p.out.WriteString(style)
	p.put("</style></head>\n<body>\n")
	p.top()
	p.put("<main>\n")
	p.attention(complaints)
	p.node()
	p.gpus()
	p.matrix()
	p.put("</main>\n")
	p.put(`<footer><p>gpu-agent {}. The same <a href="?format=json">as JSON</a>, in a terminal by <code>gpu-agent status</code>.</p></footer>`, p.s.Version)
	p.put("\n</body></html>\n")
}

func (p *sheet) top() {
	s := p.s
	p.put("<header>\n<div><p class=\"kind\">GPU node")
	if !p.now.IsZero() {
		now := p.now.UTC()
		p.put(` as of <time datetime="{}">{}</time>`, now.Format(time.RFC3339), now.Format("2006-01-02 15:04:05")+" UTC")
	}
	p.put("</p><h1>{}</h1></div>\n<nav aria-label=\"On this page\">", cmp.Or(s.Node, "(no name)"))
	if p.hasNode() {
		p.put(`<a href="#node">Node</a> `)
	}
	p.put(`<a href="#gpus">GPUs</a>`)
	if s.Topology != nil && len(s.Topology.GPUs) > 0 {
		p.put(` <a href="#matrix">Matrix</a>`)
	}
	p.put("</nav>\n<dl class=\"facts\">")
	p.fact("GPUs", p.cards())
	p.fact("Machine", s.Machine)
	p.fact("Driver", s.Driver)
	p.fact("CUDA", s.CUDA)
	switch t := s.Partition; {
	case t.State == "":
		p.fact("Partition", "none")
	default:
		p.put(`<div><dt>Partition</dt><dd>{} <span class="badge {}">{}</span>`, t.Name, stateTone(t.State), t.State)
		if t.Source != "" {
			p.put(`<span class="small">{}, generation {}</span>`, t.Source, strconv.FormatUint(t.Generation, 10))
		}
		p.put("</dd></div>")
	}
	switch w := s.Watchdog; w.State {
	case "":
	case WatchdogRunning:
		text := "running"
		if w.Kills > 0 || w.Intruders > 0 {
			text += fmt.Sprintf("; %s ended, %s found", many(w.Kills, "container", "containers"), many(w.Intruders, "intruder", "intruders"))
		}
		p.fact("Watchdog", text)
	default:
		p.put(`<div><dt>Watchdog</dt><dd><span class="badge warn">{}</span></dd></div>`, w.State)
	}
	p.fact("Claims", strconv.Itoa(s.Claims))
	p.put("</dl>\n</header>\n")
}

func (p *sheet) fact(name, value string) {
	if value != "" {
		p.put("<div><dt>{}</dt><dd>{}</dd></div>", name, value)
	}
}

func many(n uint64, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return strconv.FormatUint(n, 10) + " " + more
}

// card is a kind of GPU.
type card struct{ model, memory string }

func (c card) String() string { return strings.Join(compact([]string{c.model, c.memory}), ", ") }

// cards counts the kinds of GPUs: "8 × NVIDIA H100 80GB HBM3, 79.6 GiB".
func (p *sheet) cards() string {
	var kinds []card
	number := map[card]int{}
	for _, g := range p.s.GPUs {
		k := card{g.Model, amount(g.MemoryMiB)}
		if number[k] == 0 {
			kinds = append(kinds, k)
		}
		number[k]++
	}
	var out []string
	for _, k := range kinds {
		out = append(out, fmt.Sprintf("%d × %s", number[k], cmp.Or(k.String(), "of unknown model")))
	}
	return cmp.Or(strings.Join(out, "; "), "none")
}

// alike tells whether all GPUs are of one kind, which is then said once.
func (p *sheet) alike() bool {
	for _, g := range p.s.GPUs {
		if g.Model != p.s.GPUs[0].Model || g.MemoryMiB != p.s.GPUs[0].MemoryMiB {
			return false
		}
	}
	return true
}

// complaint is something that people should look at.
type complaint struct {
	tone string // "bad" or "warn"
	gpu  int    // place in s.GPUs, -1 where it is the node's
	text string
}

// complaints is everything that is not as it should be, the worst first.
func (p *sheet) complaints() []complaint {
	var all []complaint
	add := func(tone string, gpu int, text string) { all = append(all, complaint{tone, gpu, text}) }
	s := p.s
	if s.Hardware != "" {
		add("bad", -1, "Hardware work waits: "+s.Hardware)
	}
	switch t := s.Partition; {
	case t.State != "" && stateTone(t.State) != "ok":
		text := "The partition is " + t.State
		if t.Message != "" {
			text += ": " + t.Message
		}
		add(stateTone(t.State), -1, text)
	case t.Message != "":
		add("warn", -1, t.Message)
	}
	if w := s.Watchdog; w.State == WatchdogOff {
		add("warn", -1, "The watchdog is off: "+w.Reason)
	}
	for _, one := range s.Policies {
		switch one.State {
		case PolicyMissing:
			add("bad", -1, one.Reason)
		case PolicyUnknown:
			add("warn", -1, one.Reason)
		}
	}
	for i, g := range s.GPUs {
		if g.Health != Healthy {
			add("bad", i, cmp.Or(g.Reason, g.Health)+p.since(g.Since, ", since ")+needs(g.Needs))
		}
		if g.Intruders > 0 {
			add("bad", i, fmt.Sprintf("used by %s without a claim", count(g.Intruders, "process", "processes")))
		}
		if g.Unlisted > 0 {
			add("bad", i, fmt.Sprintf("used by %s of containers that the runtime does not list", count(g.Unlisted, "process", "processes")))
		}
		if g.Blocked != "" {
			add("warn", i, "a change waits: "+g.Blocked)
		}
		if g.NoPod > 0 {
			add("warn", i, fmt.Sprintf("used by %s of no pod", count(g.NoPod, "process", "processes")))
		}
		if g.MIG != nil {
			if m := g.MIG; m.Pending != nil && *m.Pending != m.Enabled {
				add("warn", i, "MIG goes "+onOff(*m.Pending)+" when the GPU is reset")
			}
			for j := range g.MIG.Slots {
				if slot := &g.MIG.Slots[j]; slot.State == SlotFailed {
					add("warn", i, slot.label()+" could not be made: "+slot.Reason)
				}
			}
		}
	}
	for _, c := range s.Containers {
		if c.over() {
			at, ok := p.byUUID[c.GPU]
			if !ok {
				at = -1
			}
			add("bad", at, fmt.Sprintf("%s uses %s of %s GiB", who(c.Namespace, c.Pod, c.Container), gib(c.UsedMiB), gib(c.CapMiB)))
		}
	}
	if s.Topology != nil {
		for _, w := range s.Topology.Weak {
			add("warn", -1, w)
		}
	}
	slices.SortStableFunc(all, func(a, b complaint) int { return strings.Compare(a.tone, b.tone) })
	return all
}

func needs(what string) string {
	if what == "" {
		return ""
	}
	return "; needs a " + what
}

func onOff(on bool) string {
	if on {
		return "on"
	}
	return "off"
}

// stateTone is how grave a partition's state is.
func stateTone(state string) string {
	switch stateColor(state) {
	case green:
		return "ok"
	case red:
		return "bad"
	}
	return "warn"
}

func iconColor(all []complaint) string {
	switch {
	case len(all) == 0:
		return "1d7a45"
	case all[0].tone == "bad":
		return "c5362b"
	}
	return "b97a00"
}

func (p *sheet) since(at *time.Time, before string) string {
	if at == nil || p.now.IsZero() {
		return ""
	}
	return before + age(p.now.Sub(*at))
}

func (p *sheet) attention(all []complaint) {
	if len(all) == 0 {
		if len(p.s.GPUs) > 0 {
			p.put(`<p class="well"><span class="badge ok">all well</span> {} healthy, nothing waits.</p>`+"\n", count(len(p.s.GPUs), "GPU is", "GPUs are"))
		}
		return
	}
	p.put("<section class=\"attention\" aria-labelledby=\"attention\">\n<h2 id=\"attention\">Needs a look</h2>\n<ul>")
	for _, c := range all {
		word := map[string]string{"bad": "fault", "warn": "notice"}[c.tone]
		p.put(`<li><span class="badge {}">{}</span> <span>`, c.tone, word)
		if c.gpu >= 0 {
			p.put(`<a href="#gpu-{}">GPU {}</a> `, c.gpu, p.s.GPUs[c.gpu].Index)
		}
		p.put("{}</span></li>\n", c.text)
	}
	p.put("</ul></section>\n")
}

// who names a container.
func who(namespace, pod, container string) string {
	if pod == "" {
		return "(not yet named by the kubelet)"
	}
	return namespace + "/" + pod + "/" + container
}

// offer is what the node has of one resource.
type offer struct {
	gpus            []int // indices
	used, free, out int
	unit            string // what one device is, where that is not said by the name
}

// offers is a table of what the node has on offer, by resource.
func (p *sheet) offers() {
	sums := map[string]*offer{}
	mig := false
	of := func(resource string, g GPU) *offer {
		o := sums[resource]
		if o == nil {
			o = &offer{}
			sums[resource] = o
		}
		if !slices.Contains(o.gpus, g.Index) {
			o.gpus = append(o.gpus, g.Index)
		}
		return o
	}
	for _, g := range p.s.GPUs {
		if g.Resource != "" {
			o := of(g.Resource, g)
			o.used, o.free, o.out = o.used+g.Used, o.free+g.Free, o.out+g.Unhealthy
			switch {
			case g.UnitMiB > 0 && g.UnitMiB%1024 == 0:
				o.unit = strconv.FormatUint(g.UnitMiB/1024, 10) + " GiB each"
			case g.UnitMiB > 0:
				o.unit = strconv.FormatUint(g.UnitMiB, 10) + " MiB each"
			}
		}
		if g.MIG == nil {
			continue
		}
		for i := range g.MIG.Slots {
			slot := &g.MIG.Slots[i]
			if slot.Resource == "" {
				continue
			}
			mig = true
			switch o := of(slot.Resource, g); {
			case slot.Held():
				o.used++
			case slot.State == SlotWarm || slot.State == SlotFree:
				o.free++
			default:
				o.out++
			}
		}
	}
	if len(sums) == 0 {
		return
	}
	p.put(`<h3 id="offers">On offer</h3>
<div class="scroll" role="region" aria-labelledby="offers" tabindex="0"><table class="offers"><caption>What pods can ask for; out is what is neither held nor to be had.`)
	if mig {
		p.put(` MIG devices are counted by place: free ones may exclude each other.`)
	}
	p.put(`</caption>
<thead><tr><th scope="col">Resource</th><th scope="col">GPUs</th><th scope="col" class="n">Held</th><th scope="col" class="n">Free</th><th scope="col" class="n">Out</th></tr></thead><tbody>
`)
	for _, name := range slices.Sorted(maps.Keys(sums)) {
		o := sums[name]
		slices.Sort(o.gpus)
		p.put(`<tr><th scope="row"><code>{}</code>`, name)
		if o.unit != "" {
			p.put(` <span class="small">{}</span>`, o.unit)
		}
		p.put(`</th><td>{}</td><td class="n">{}</td><td class="n">{}</td><td class="n">{}</td></tr>`+"\n", spans(o.gpus), o.used, o.free, o.out)
	}
	p.put("</tbody></table></div>\n")
}

func (p *sheet) gpus() {
	p.put("<section aria-labelledby=\"gpus\"><h2 id=\"gpus\">GPUs</h2>\n")
	if len(p.s.GPUs) == 0 {
		p.put("<p>No GPU.</p>\n")
	}
	p.put("<div class=\"cards\">\n")
	for i := range p.s.GPUs {
		p.gpu(i)
	}
	p.put("</div></section>\n")
}

func (p *sheet) gpu(at int) {
	g := p.s.GPUs[at]
	tone := "ok"
	switch {
	case g.Health != Healthy:
		tone = "bad"
	case g.Blocked != "" || g.Intruders > 0 || g.Unlisted > 0 || g.NoPod > 0:
		tone = "warn"
	}
	p.put("<article class=\"card {}\" id=\"gpu-{}\" aria-labelledby=\"gpu-{}-name\">\n<div class=\"title\"><h3 id=\"gpu-{}-name\">GPU {}</h3> <p>{}</p>",
		tone, at, at, at, g.Index, modeName(g))
	p.put(` <span class="badge {}">{}</span></div>`+"\n", map[bool]string{true: "ok", false: "bad"}[g.Health == Healthy], g.Health)
	facts := []string{}
	if !p.alike() {
		facts = append(facts, g.Model, amount(g.MemoryMiB))
	}
	if g.NUMA != nil && *g.NUMA >= 0 {
		facts = append(facts, "NUMA node "+strconv.Itoa(*g.NUMA))
	}
	if g.PCI != "" {
		facts = append(facts, "PCI "+g.PCI)
	}
	p.put(`<p class="fine">{}</p>`, strings.Join(compact(append(facts, g.Resource)), " · "))
	p.put(`<p class="fine"><code>{}</code></p>`+"\n", g.UUID)
	if g.Reason != "" {
		p.put(`<p class="say bad">{}</p>`, g.Reason+p.since(g.Since, ", since ")+needs(g.Needs))
	}
	if g.Blocked != "" {
		p.put(`<p class="say warn">A change waits: {}</p>`, g.Blocked)
	}
	if g.Intruders > 0 {
		p.put(`<p class="say bad">Used by {} without a claim</p>`, count(g.Intruders, "process", "processes"))
	}
	if g.Unlisted > 0 {
		p.put(`<p class="say bad">Used by {} of containers that the runtime does not list</p>`, count(g.Unlisted, "process", "processes"))
	}
	if g.NoPod > 0 {
		p.put(`<p class="say warn">Used by {} of no pod</p>`, count(g.NoPod, "process", "processes"))
	}
	if g.Resource != "" && g.Total > 1 {
		p.use(g)
	}
	rows := p.rows(g)
	if g.MIG != nil {
		p.mig(g)
		rows = p.devices(g, rows)
	}
	p.holders(g, rows)
	p.put("</article>\n")
}

// modeName says how a GPU is cut; of one that is not, who has it.
func modeName(g GPU) string {
	switch {
	case g.Mode == "whole" && g.Used > 0:
		return "whole, held"
	case g.Mode == "whole" && g.Free > 0:
		return "whole, free"
	case g.Mode == "whole" && g.Unhealthy > 0:
		return "whole, withdrawn"
	case g.Mode == "":
		return "no partition"
	case g.Mode == "mig" && g.MIG != nil && g.MIG.OnDemand:
		return "MIG on demand"
	case g.Mode == "mig":
		return "MIG"
	case g.Mode == "shared" && g.UnitMiB > 0:
		return "shared by memory"
	case g.Mode == "shared":
		return "shared by replicas"
	}
	return g.Mode
}

// use draws who holds how much of a GPU, and says it in figures.
func (p *sheet) use(g GPU) {
	p.put(`<div class="use">`)
	p.bar("bar", g)
	p.put(`<p><strong>{}</strong> of {} held`, measure(g, g.Used), measure(g, g.Total)+unitName(g, g.Total))
	if g.Free > 0 {
		p.put(", {} free", measure(g, g.Free))
	}
	if g.Unhealthy > 0 {
		p.put(`, <span class="out">{} withdrawn</span>`, measure(g, g.Unhealthy))
	}
	p.put("</p></div>\n")
}

// bar draws a GPU's devices: a piece for each holder, what is withdrawn, and the
// rest. Words beside it say the same, so that to a screen reader it is not
// there.
func (p *sheet) bar(class string, g GPU) {
	const wide = 1000
	p.put(`<svg class="{}" viewBox="0 0 {} 10" preserveAspectRatio="none" aria-hidden="true" focusable="false"><rect class="free" width="{}" height="10"/>`, class, wide, wide)
	p.segments(g, 0, 0, wide, 10)
	p.put("</svg>")
}

// segments are the pieces of a bar: rectangles from x on, of width and height.
func (p *sheet) segments(g GPU, x, y, width, height int) {
	at := 0
	piece := func(class string, units int) {
		from, to := share(at, g.Total, width), share(min(at+units, g.Total), g.Total, width)
		if to > from {
			// A line of the ground between two holders.
			gap := 0
			if from > 0 {
				gap = max(width/250, 1)
			}
			p.put(`<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>`, class, x+from+gap, y, max(to-from-gap, 1), height)
		}
		at += units
	}
	left := g.Used
	for i, h := range g.Holders {
		if h.Resource == g.Resource && left > 0 {
			n := min(max(h.Units, 0), left)
			piece([]string{"held", "held b"}[i%2], n)
			left -= n
		}
	}
	if left > 0 {
		piece("held", left)
	}
	if g.Unhealthy > 0 {
		at = max(g.Total-g.Unhealthy, at)
		piece("gone", g.Unhealthy)
	}
}

// tenant is a line of a GPU's table: what a container holds, and its memory.
type tenant struct {
	name   string
	holds  string
	age    string
	waits  string
	memory *Container // nil where nobody has looked
	holder *Holder
	most   *uint64 // MiB that it can have where it has no cap; nil where that is not known
}

// rows joins the holders of a GPU with what the watchdog knows of their memory.
func (p *sheet) rows(g GPU) []tenant {
	var memory []*Container
	for i := range p.s.Containers {
		if c := &p.s.Containers[i]; c.GPU == g.UUID {
			memory = append(memory, c)
		}
	}
	var out []tenant
	var most *uint64
	if g.MIG == nil && g.MemoryMiB > 0 {
		most = &g.MemoryMiB
	}
	for i := range g.Holders {
		h := &g.Holders[i]
		t := tenant{name: who(h.Namespace, h.Pod, h.Container), holds: measure(g, h.Units) + unitName(g, h.Units),
			age: p.since(h.Since, ""), waits: h.Waits, holder: h, most: most}
		if h.Resource != g.Resource {
			// From before the GPU's mode changed, or MIG devices.
			t.holds = strconv.Itoa(h.Units) + " " + h.Resource[strings.LastIndexByte(h.Resource, '/')+1:]
		}
		if at := slices.IndexFunc(memory, func(c *Container) bool {
			return c.Namespace == h.Namespace && c.Pod == h.Pod && c.Container == h.Container
		}); at >= 0 {
			t.memory = memory[at]
			memory = slices.Delete(memory, at, at+1)
		}
		out = append(out, t)
	}
	for _, c := range memory {
		out = append(out, tenant{name: who(c.Namespace, c.Pod, c.Container), holds: "–", memory: c, most: most})
	}
	return out
}

// holders is the table of who is on a GPU.
func (p *sheet) holders(g GPU, rows []tenant) {
	if len(rows) == 0 {
		return
	}
	p.put(`<table class="holders"><caption class="away">Who holds GPU {}</caption><thead><tr><th scope="col">Container</th><th scope="col">Holds</th><th scope="col">GPU memory</th><th scope="col" class="n">For</th></tr></thead><tbody>`+"\n", g.Index)
	for _, t := range rows {
		p.put(`<tr><th scope="row">`)
		p.breaking(t.name, "/")
		if t.waits != "" {
			p.put(` <span class="small warn">waits for the end of {}</span>`, t.waits)
		}
		p.put(`</th><td>{}</td><td>`, t.holds)
		p.memory(t)
		p.put(`</td><td class="n">{}</td></tr>`+"\n", cmp.Or(t.age, "–"))
	}
	p.put("</tbody></table>\n")
}

// memory is a cell: what a container uses of what it may use.
func (p *sheet) memory(t tenant) {
	c := t.memory
	if c == nil {
		p.put("–")
		return
	}
	most := c.CapMiB
	if most == nil {
		most = t.most
	}
	var more []string
	switch {
	case c.UsedMiB == nil && c.CapMiB != nil:
		p.put("cap {} GiB", gib(c.CapMiB))
		more = append(more, "use not known")
	case c.UsedMiB == nil:
		p.put("use not known")
	case most == nil:
		p.put("{} GiB", gib(c.UsedMiB))
	default:
		tone := "held"
		if c.over() {
			tone = "over"
		}
		p.put(`<span class="{}">{} of {} GiB</span>`, map[string]string{"held": "in", "over": "bad"}[tone], gib(c.UsedMiB), gib(most))
		p.put(` <svg class="gauge" viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true" focusable="false"><rect class="free" width="1000" height="10"/><rect class="{}" width="{}" height="10"/></svg>`,
			tone, share(int(min(*c.UsedMiB, 1<<40)), int(min(*most, 1<<40)), 1000))
	}
	if c.HasPeak() && c.PeakMiB > 0 {
		more = append(more, "peak "+gib(&c.PeakMiB)+" GiB")
	}
	if c.Refusals > 0 {
		refused := strconv.FormatUint(min(c.Refusals, 1e6), 10)
		if c.Refusals > 1e6 {
			refused += "+"
		}
		more = append(more, refused+" refused")
	}
	if c.Uncounted > 0 {
		more = append(more, strconv.FormatUint(c.Uncounted, 10)+" not counted")
	}
	if c.CapMiB != nil && c.Guarantee != "" {
		more = append(more, "cap by "+c.Guarantee)
	}
	if len(more) > 0 {
		p.put(` <span class="small">{}</span>`, strings.Join(more, ", "))
	}
}

// cellColumns divide a memory slot: every split of a GPU instance into up to
// seven compute instances comes near enough.
const cellColumns = 12

// mig draws a GPU's memory slots, as a table whose cells are as wide as their
// share of the memory.
func (p *sheet) mig(g GPU) {
	m := g.MIG
	if m.Pending != nil && *m.Pending != m.Enabled {
		p.put(`<p class="say warn">MIG goes {} when the GPU is reset</p>`, onOff(*m.Pending))
	}
	if m.Work != "" {
		p.put(`<p class="say warn">Now: {}</p>`, m.Work)
	}
	size := m.size()
	if size == 0 || len(m.Slots) == 0 {
		return
	}
	p.put(`<table class="slots"><caption class="away">Memory slots of GPU {}</caption><colgroup><col span="{}"/></colgroup><thead><tr>`, g.Index, size*cellColumns)
	for i := range size {
		p.put(`<th scope="col" colspan="{}">{}</th>`, cellColumns, i)
	}
	p.put("</tr></thead><tbody><tr>")
	for _, c := range row(m, size, cellColumns) {
		if c.slot == nil {
			p.put(`<td colspan="{}" class="none"><span class="away">empty</span></td>`, c.to-c.from)
			continue
		}
		p.put(`<td colspan="{}" class="{}"><b>`, c.to-c.from, slotTone(c.slot.State))
		p.breaking(c.slot.Profile, ".")
		p.put("</b> <span>{}</span></td>", c.slot.State)
	}
	p.put("</tr></tbody></table>\n")
}

func slotTone(state string) string {
	switch state {
	case SlotHeld:
		return "held"
	case SlotWarm, SlotFree:
		return "ok"
	case SlotFailed:
		return "bad"
	case SlotCovered:
		return "none"
	}
	return "warn"
}

// devices is the table of the MIG devices that stand, are held, or have
// something to be said about them, and what could be made. It returns the
// tenants that have none of them.
func (p *sheet) devices(g GPU, rows []tenant) []tenant {
	var shown []*Slot
	for i := range g.MIG.Slots {
		if s := &g.MIG.Slots[i]; s.there() || s.State == SlotFailed {
			shown = append(shown, s)
		}
	}
	if len(shown) > 0 {
		p.put(`<table class="holders devices"><caption class="away">MIG devices of GPU {}</caption><thead><tr><th scope="col">Device</th><th scope="col">Container</th><th scope="col">GPU memory</th><th scope="col" class="n">For</th></tr></thead><tbody>`+"\n", g.Index)
	}
	for _, s := range shown {
		var t tenant
		if s.Held() {
			t.name = who(s.Namespace, s.Pod, s.Container)
			h := g.holder(s)
			at := slices.IndexFunc(rows, func(r tenant) bool { return r.holder != nil && r.holder == h })
			if at < 0 {
				at = slices.IndexFunc(rows, func(r tenant) bool {
					c := r.memory
					return r.holder == nil && c != nil && c.Namespace == s.Namespace && c.Pod == s.Pod && c.Container == s.Container
				})
			}
			if at >= 0 {
				name := t.name
				t, rows = rows[at], slices.Delete(slices.Clone(rows), at, at+1)
				t.name = name
			}
		}
		p.put(`<tr><th scope="row">{} <span class="small {}">{}</span></th><td>`, s.label(), slotTone(s.State)+"-word", s.State)
		p.breaking(cmp.Or(t.name, "–"), "/")
		if t.waits != "" {
			p.put(` <span class="small warn">waits for the end of {}</span>`, t.waits)
		}
		if s.Reason != "" {
			p.put(` <span class="small">{}</span>`, s.Reason)
		}
		p.put("</td><td>")
		p.memory(t)
		p.put(`</td><td class="n">{}</td></tr>`+"\n", cmp.Or(t.age, "–"))
	}
	if len(shown) > 0 {
		p.put("</tbody></table>\n")
	}
	if free := couldStand(g.MIG.Slots); free != "" {
		p.put(`<p class="fine after">Could be made: {}</p>`+"\n", free)
	}
	// A container with several devices of one resource is one holder and has
	// several lines above.
	return slices.DeleteFunc(rows, func(r tenant) bool {
		return r.holder != nil && slices.ContainsFunc(shown, func(s *Slot) bool { return s.Held() && g.holder(s) == r.holder })
	})
}

// matrix is how near each pair of GPUs and network cards is.
func (p *sheet) matrix() {
	m := p.s.Topology
	if m == nil || len(m.GPUs) == 0 {
		return
	}
	p.put(`<section aria-labelledby="matrix"><h2 id="matrix">Matrix</h2>
<p class="fine">How each pair of GPUs and RDMA network cards is connected, as <code>nvidia-smi topo -m</code> shows it.</p>
<div class="scroll" role="region" aria-labelledby="matrix" tabindex="0"><table class="matrix"><caption class="away">Connections between GPUs and network cards</caption>
<thead><tr><td></td>`)
	names := rowNames(m)
	for i, n := range names {
		p.put(`<th scope="col" class="{}">{}</th>`, map[bool]string{true: "nic", false: "gpu"}[i >= len(m.GPUs)], n)
	}
	p.put(`<th scope="col">NUMA</th><th scope="col" class="l">CPUs</th></tr></thead><tbody>` + "\n")
	for i, n := range names {
		p.put(`<tr><th scope="row">{}</th>`, n)
		for j := range names {
			cell := cellAt(m, i, j)
			p.put(`<td class="c-{}">{}</td>`, cellTone(cell), cell)
		}
		cpus, numa := "", (*int)(nil)
		if i < len(m.GPUs) {
			cpus, numa = m.GPUs[i].CPUs, m.GPUs[i].NUMA
		} else {
			numa = m.NICs[i-len(m.GPUs)].NUMA
		}
		p.put(`<td>{}</td><td class="l">{}</td></tr>`+"\n", nodeNumber(numa), cmp.Or(cpus, "–"))
	}
	p.put("</tbody></table></div>\n<dl class=\"legend\">")
	for _, l := range legend {
		if slices.ContainsFunc(m.Cells, func(row []string) bool {
			return slices.ContainsFunc(row, func(c string) bool { return cellTone(c) == l.tone })
		}) {
			p.put(`<div><dt class="c-{}">{}</dt><dd>{}</dd></div>`, l.tone, l.word, l.means)
		}
	}
	p.put("</dl>")
	if len(m.NICs) > 0 {
		p.put("<p class=\"fine\">")
		for i, n := range m.NICs {
			if i > 0 {
				p.put(" · ")
			}
			p.put("{}: {} ({}{})", names[len(m.GPUs)+i], n.Name, kindName(string(n.Kind)), map[bool]string{true: "", false: ", no port up"}[n.Active])
		}
		p.put("</p>")
	}
	p.put("</section>\n")
}

// legend explains the matrix's words, near to far.
var legend = []struct{ tone, word, means string }{
	{"nv", "NV#", "NVLink, # lanes"},
	{"pix", "PIX", "one PCIe bridge between them"},
	{"pxb", "PXB", "several PCIe bridges, but no host bridge"},
	{"phb", "PHB", "one PCIe host bridge, at the processor"},
	{"node", "NODE", "several host bridges of one NUMA node"},
	{"sys", "SYS", "the link between NUMA nodes"},
}

func cellTone(cell string) string {
	if strings.HasPrefix(cell, "NV") {
		return "nv"
	}
	for _, l := range legend[1:] {
		if cell == l.word {
			return l.tone
		}
	}
	return "self"
}

func cellAt(m *topology.Matrix, i, j int) string {
	if i < len(m.Cells) && j < len(m.Cells[i]) {
		return m.Cells[i][j]
	}
	return ""
}

// rowNames are the names of the matrix's rows and columns.
func rowNames(m *topology.Matrix) []string {
	var names []string
	for _, g := range m.GPUs {
		names = append(names, "GPU"+strconv.Itoa(g.Index))
	}
	for i := range m.NICs {
		names = append(names, "NIC"+strconv.Itoa(i))
	}
	return names
}

func nodeNumber(n *int) string {
	if n == nil || *n < 0 {
		return "–"
	}
	return strconv.Itoa(*n)
}

func kindName(kind string) string {
	switch kind {
	case "infiniband":
		return "InfiniBand"
	case "roce":
		return "RoCE"
	case "efa":
		return "EFA"
	}
	return cmp.Or(kind, "RDMA")
}
