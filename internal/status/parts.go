// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"time"

	"example.com/gpu-agent/pkg/topology"
)

// The parts of the page, in their order there.

// page writes the whole page.
func (m *markup) page(s *Status, now time.Time) {
	cards := newCards(s, now)
	notes := pageNotes(s, cards)
	offers, hasMIG := allOffers(s.GPUs)
	var picture *drawing // nil while the connections are not known
	var rows []matrixRow
	if t := s.Topology; t != nil && len(t.GPUs) > 0 {
		picture, rows = newDrawing(t, tiles(cards)), newMatrix(t)
	}
	node := picture != nil || len(offers) > 0
	m.head(s.Node, iconColor(notes))
	m.put("<body>\n<header>\n")
	m.title(s.Node, now)
	m.nav(node, len(rows) > 0)
	m.facts(s)
	m.put("</header>\n<main>\n")
	m.attention(notes, len(cards))
	if node {
		m.put(`<section aria-labelledby="node"><h2 id="node">Node</h2>` + "\n" + `<div class="node">`)
		m.figure(picture)
		m.put(`<div class="beside">`)
		m.offers(offers, hasMIG)
		m.links(picture)
		m.put("</div></div></section>\n")
	}
	m.cards(cards)
	m.matrix(rows, s.Topology)
	m.put("</main>\n"+`<footer><p>gpu-agent {}. The same <a href="?format=json">as JSON</a>, `+
		"in a terminal by <code>gpu-agent status</code>.</p></footer>\n</body></html>\n", s.Version)
}

func (m *markup) head(node string, color constant) {
	m.put("<!DOCTYPE html>\n" +
		`<html lang="en" xmlns="http://www.w3.org/1999/xhtml"><head><meta charset="utf-8"/>` + "\n" +
		`<meta name="viewport" content="width=device-width, initial-scale=1"/>` +
		`<meta name="color-scheme" content="light dark"/>` + "\n")
	m.put("<title>{} – gpu-agent</title>\n", cmp.Or(node, "this node"))
	m.put(`<link rel="icon" href="data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E` +
		`%3Cg fill='%23`)
	m.put(color)
	m.put(`'%3E%3Crect width='7' height='16' rx='1.5'/%3E%3Crect x='9' width='7' height='7' rx='1.5'/%3E` +
		`%3Crect x='9' y='9' width='7' height='7' rx='1.5'/%3E%3C/g%3E%3C/svg%3E"/>` + "\n<style>")
	m.put(constant(style))
	m.put("</style></head>\n")
}

func (m *markup) title(node string, now time.Time) {
	m.put(`<div><p class="kind">GPU node`)
	if !now.IsZero() {
		m.put(` as of <time datetime="{}">{} UTC</time>`,
			now.Format("2006-01-02T15:04:05Z"), now.Format("2006-01-02 15:04:05"))
	}
	m.put("</p><h1>{}</h1></div>\n", cmp.Or(node, "(no name)"))
}

func (m *markup) nav(node, matrix bool) {
	m.put(`<nav aria-label="On this page">`)
	if node {
		m.put(`<a href="#node">Node</a> `)
	}
	m.put(`<a href="#gpus">GPUs</a>`)
	if matrix {
		m.put(` <a href="#matrix">Matrix</a>`)
	}
	m.put("</nav>\n")
}

func (m *markup) facts(s *Status) {
	m.put(`<dl class="facts"><div><dt>GPUs</dt><dd>{}</dd></div>`, kinds(s.GPUs))
	m.given(`<div><dt>Machine</dt><dd>{}</dd></div>`, s.Machine)
	m.given(`<div><dt>Driver</dt><dd>{}</dd></div>`, s.Driver)
	m.given(`<div><dt>CUDA</dt><dd>{}</dd></div>`, s.CUDA)
	m.partition(&s.Partition)
	switch s.Watchdog.State {
	case "":
	case WatchdogRunning:
		m.put(`<div><dt>Watchdog</dt><dd>running`)
		m.given(`; {}`, ended(s.Watchdog))
		m.put(`</dd></div>`)
	default:
		m.put(`<div><dt>Watchdog</dt><dd><span class="badge warn">{}</span></dd></div>`, s.Watchdog.State)
	}
	m.put("<div><dt>Allocations</dt><dd>{}</dd></div></dl>\n", s.Allocations)
}

func (m *markup) partition(p *Partition) {
	m.put(`<div><dt>Partition</dt><dd>`)
	if p.State == "" {
		m.put(`none`)
	} else {
		m.put(`{} <span class="badge {}">{}</span>`, p.Name, stateTone(p.State), p.State)
		if p.Source != "" {
			m.put(`<span class="small">{}, generation {}</span>`, p.Source, p.Generation)
		}
	}
	m.put(`</dd></div>`)
}

// attention lists the notes. Without notes it writes that the GPUs are well.
func (m *markup) attention(notes []note, gpus int) {
	if len(notes) == 0 {
		if gpus > 0 {
			m.put(`<p class="well"><span class="badge ok">all well</span> {} healthy, nothing waits.</p>`+"\n",
				count(gpus, "GPU is", "GPUs are"))
		}
		return
	}
	m.put(`<section class="attention" aria-labelledby="attention">` + "\n" +
		`<h2 id="attention">Needs attention</h2>` + "\n<ul>")
	for _, n := range notes {
		word := "notice"
		if n.Tone == "bad" {
			word = "fault"
		}
		m.put(`<li><span class="badge {}">{}</span> <span>`, n.Tone, word)
		if n.Card != nil {
			m.put(`<a href="#gpu-{}">GPU {}</a> `, n.Card.At, n.Card.Index)
		}
		m.put("{}</span></li>\n", n.Text)
	}
	m.put("</ul></section>\n")
}

// figure shows the drawing; d is nil if there is none.
func (m *markup) figure(d *drawing) {
	if d == nil {
		return
	}
	m.put(`<div><figure>`)
	m.drawing(d)
	m.given(`<figcaption class="fine">{}</figcaption>`, d.key())
	m.put(`</figure></div>`)
}

func (m *markup) drawing(d *drawing) {
	m.put(`<svg class="drawing" width="{}" height="{}" viewBox="0 0 {} {}" role="group" `+
		`aria-labelledby="drawing-title drawing-words" focusable="false">`, d.Width, d.Height, d.Width, d.Height)
	m.put(`<title id="drawing-title">The node's GPUs and how they are connected</title>`+
		`<desc id="drawing-words">{}</desc>`+"\n", d.Words)
	for _, g := range d.Groups {
		m.group(&g)
	}
	m.put("</svg>\n")
}

func (m *markup) group(g *group) {
	if g.Card != nil {
		m.put(`<a href="#gpu-{}">`, g.Card.At)
	} else {
		m.put(`<g class="{}">`, g.Class)
	}
	m.given(`<title>{}</title>`, g.Title)
	m.rects(g.Rects)
	for _, p := range g.Paths {
		m.put(`<path class="{}" d="{}">`, p.Class, p.D)
		m.given(`<title>{}</title>`, p.Title)
		m.put(`</path>`)
	}
	for _, l := range g.Labels {
		if l.Turned {
			m.put(`<text class="{}" transform="translate({} {}) rotate(90)">{}`, l.Class, l.X, l.Y, l.Text)
		} else {
			m.put(`<text class="{}" x="{}" y="{}">{}`, l.Class, l.X, l.Y, l.Text)
		}
		m.given(`<title>{}</title>`, l.Title)
		m.put(`</text>`)
	}
	if g.Card != nil {
		m.put("</a>\n")
	} else {
		m.put("</g>\n")
	}
}

func (m *markup) rects(list []rect) {
	for _, r := range list {
		m.put(`<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>`, r.Class, r.X, r.Y, r.W, r.H)
	}
}

func (m *markup) offers(list []*nodeOffer, hasMIG bool) {
	if len(list) == 0 {
		return
	}
	m.put(`<h3 id="offers">On offer</h3>` + "\n" +
		`<div class="scroll" role="region" aria-labelledby="offers" tabindex="0"><table class="offers">` +
		`<caption>What pods can ask for. Out counts devices that are neither held nor free.`)
	if hasMIG {
		m.put(` MIG devices are counted by place: free ones may exclude each other.`)
	}
	m.put("</caption>\n" + `<thead><tr><th scope="col">Resource</th><th scope="col">GPUs</th>` +
		`<th scope="col" class="n">Held</th><th scope="col" class="n">Free</th><th scope="col" class="n">Out</th>` +
		"</tr></thead><tbody>\n")
	for _, o := range list {
		m.put(`<tr><th scope="row"><code>{}</code>`, o.Resource)
		if o.Claims {
			m.put(` <span class="small">by claim</span>`)
		}
		m.given(` <span class="small">{} each</span>`, o.Unit)
		m.put(`</th><td>{}</td><td class="n">{}</td><td class="n">{}</td><td class="n">{}</td></tr>`+"\n",
			spans(o.GPUs), o.Held, o.Free, o.Unhealthy)
	}
	m.put("</tbody></table></div>\n")
}

// links describes the drawing in words; d is nil if there is none.
func (m *markup) links(d *drawing) {
	if d == nil {
		return
	}
	m.put(`<h3>Links</h3><ul class="links">`)
	for _, n := range linkNotes(d.m) {
		m.put(`<li`)
		m.given(` class="{}"`, n.Tone)
		m.put(`>{}.</li>`, n.Text)
	}
	m.put("</ul>\n")
}

func (m *markup) cards(list []*card) {
	m.put(`<section aria-labelledby="gpus"><h2 id="gpus">GPUs</h2>` + "\n")
	if len(list) == 0 {
		m.put("<p>No GPU.</p>\n")
	}
	m.put(`<div class="cards">` + "\n")
	for _, c := range list {
		m.card(c)
	}
	m.put("</div></section>\n")
}

func (m *markup) card(c *card) {
	health := "bad"
	if c.Health == Healthy {
		health = "ok"
	}
	m.put(`<article class="card {}" id="gpu-{}" aria-labelledby="gpu-{}-name">`+"\n", c.Tone, c.At, c.At)
	m.put(`<div class="title"><h3 id="gpu-{}-name">GPU {}</h3> <p>{}</p> <span class="badge {}">{}</span></div>`+"\n",
		c.At, c.Index, modeName(c.GPU), health, c.Health)
	m.put(`<p class="fine">{}</p><p class="fine"><code>{}</code></p>`+"\n", c.Facts, c.UUID)
	for _, n := range c.Notes {
		m.put(`<p class="say {}">{}</p>`, n.Tone, n.Text)
	}
	if c.asked() != "" && c.Total > 1 {
		m.use(c.GPU)
	}
	if c.MIG != nil {
		m.given(`<p class="say warn">Now: {}</p>`, c.MIG.Work)
		if c.MIG.drawn(c.Mode) {
			m.slots(c.Index, c.MIG)
		}
	}
	m.devices(c.Index, c.Devices)
	m.given(`<p class="fine after">Could be made: {}</p>`+"\n", freePlacements(c.MIG))
	m.tenants(c.Index, c.Tenants)
	m.put("</article>\n")
}

// use shows how much of a GPU is held, as a bar and in words. The bar is hidden from screen
// readers, since the words have the same figures.
func (m *markup) use(g *GPU) {
	m.put(`<div class="use"><svg class="bar" viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true" ` +
		`focusable="false"><rect class="free" width="1000" height="10"/>`)
	m.rects(g.segments(0, 0, 1000, 10))
	m.put(`</svg><p><strong>{}</strong> of {} held`, measure(g, g.Used), measure(g, g.Total)+unitName(g, g.Total))
	if g.Free > 0 {
		m.put(`, {} free`, measure(g, g.Free))
	}
	if g.Unhealthy > 0 {
		m.put(`, <span class="out">{} withdrawn</span>`, measure(g, g.Unhealthy))
	}
	m.put("</p></div>\n")
}

// slots shows a GPU's memory slices as cells, each as wide as its share of the memory.
func (m *markup) slots(gpu int, of *MIG) {
	size := of.size()
	if size == 0 || len(of.Placements) == 0 {
		return
	}
	m.put(`<table class="slots"><caption class="away">Memory slices of GPU {}</caption><colgroup><col span="{}"/>`+
		`</colgroup><thead><tr>`, gpu, size*cellColumns)
	for i := range size {
		m.put(`<th scope="col" colspan="{}">{}</th>`, cellColumns, i)
	}
	m.put(`</tr></thead><tbody><tr>`)
	for _, c := range row(of, size, cellColumns) {
		if c.Placement == nil {
			m.put(`<td colspan="{}" class="none"><span class="away">empty</span></td>`, c.Columns())
			continue
		}
		m.put(`<td colspan="{}" class="{}"><b>`, c.Columns(), placementTone(c.Placement.State))
		m.broken(".", c.Placement.Profile)
		m.put(`</b> <span>{}</span></td>`, c.Placement.State)
	}
	m.put("</tr></tbody></table>\n")
}

func (m *markup) devices(gpu int, list []tenant) {
	if len(list) == 0 {
		return
	}
	m.put(`<table class="holders devices"><caption class="away">MIG devices of GPU {}</caption><thead><tr>`+
		`<th scope="col">Device</th><th scope="col">Container</th><th scope="col">GPU memory</th>`+
		`<th scope="col" class="n">For</th></tr></thead><tbody>`+"\n", gpu)
	for i := range list {
		p := list[i].Placement
		m.put(`<tr><th scope="row">{} <span class="small {}-word">{}</span></th><td>`,
			p.label(), placementTone(p.State), p.State)
		m.who(&list[i])
		m.given(` <span class="small">{}</span>`, p.Reason)
		m.put(`</td>`)
		m.memory(list[i].Memory)
		m.put(`<td class="n">{}</td></tr>`+"\n", cmp.Or(list[i].Age, "–"))
	}
	m.put("</tbody></table>\n")
}

func (m *markup) tenants(gpu int, list []tenant) {
	if len(list) == 0 {
		return
	}
	m.put(`<table class="holders"><caption class="away">Who holds GPU {}</caption><thead><tr>`+
		`<th scope="col">Container</th><th scope="col">Holds</th><th scope="col">GPU memory</th>`+
		`<th scope="col" class="n">For</th></tr></thead><tbody>`+"\n", gpu)
	for i := range list {
		m.put(`<tr><th scope="row">`)
		m.who(&list[i])
		m.put(`</th><td>{}</td>`, cmp.Or(list[i].Holds, "–"))
		m.memory(list[i].Memory)
		m.put(`<td class="n">{}</td></tr>`+"\n", cmp.Or(list[i].Age, "–"))
	}
	m.put("</tbody></table>\n")
}

func (m *markup) who(t *tenant) {
	m.broken("/", cmp.Or(t.Name, "–"))
	m.given(` <span class="small">shared with {}</span>`, t.Beside)
	m.given(` <span class="small">{}</span>`, t.Kept)
	m.given(` <span class="small warn">{}</span>`, t.Yields)
	m.given(` <span class="small">{}</span>`, t.Parked)
	m.given(` <span class="small warn">waits for the end of {}</span>`, t.Waits)
}

// memory writes the cell of a container's memory; of is nil if nothing is known of it.
func (m *markup) memory(of *memory) {
	switch {
	case of == nil:
		m.put(`<td>–</td>`)
		return
	case of.Tone == "":
		m.put(`<td>{}`, of.Text)
	case of.Tone == "over":
		m.put(`<td><span class="bad">{}</span>`, of.Text)
	default:
		m.put(`<td><span>{}</span>`, of.Text)
	}
	if of.Tone != "" {
		m.put(` <svg class="gauge" viewBox="0 0 1000 10" preserveAspectRatio="none" aria-hidden="true" `+
			`focusable="false"><rect class="free" width="1000" height="10"/>`+
			`<rect class="{}" width="{}" height="10"/></svg>`, of.Tone, of.Width)
	}
	m.given(` <span class="small">{}</span>`, of.More)
	m.put(`</td>`)
}

func (m *markup) matrix(rows []matrixRow, t *topology.Matrix) {
	if len(rows) == 0 {
		return
	}
	m.put(`<section aria-labelledby="matrix"><h2 id="matrix">Matrix</h2>` + "\n" +
		`<p class="fine">How each pair of GPUs and RDMA network cards is connected, ` +
		"as <code>nvidia-smi topo -m</code> shows it.</p>\n" +
		`<div class="scroll" role="region" aria-labelledby="matrix" tabindex="0"><table class="matrix">` +
		`<caption class="away">Connections between GPUs and network cards</caption>` + "\n<thead><tr><td></td>")
	for _, r := range rows {
		m.put(`<th scope="col">{}</th>`, r.Name)
	}
	m.put(`<th scope="col">NUMA</th><th scope="col" class="l">CPUs</th></tr></thead><tbody>` + "\n")
	for _, r := range rows {
		m.put(`<tr><th scope="row">{}</th>`, r.Name)
		for _, c := range r.Cells {
			m.put(`<td class="c-{}">{}</td>`, means(c).Tone, c)
		}
		m.put(`<td>{}</td><td class="l">{}</td></tr>`+"\n", cmp.Or(r.NUMA, "–"), cmp.Or(r.CPUs, "–"))
	}
	m.put("</tbody></table></div>\n" + `<dl class="legend">`)
	for _, n := range legendOf(rows) {
		m.put(`<div><dt class="c-{}">{}</dt><dd>{}</dd></div>`, n.Tone, n.Word, n.Means)
	}
	m.put(`</dl>`)
	m.nics(t.NICs)
	m.put("</section>\n")
}

func (m *markup) nics(list []topology.MatrixNIC) {
	if len(list) == 0 {
		return
	}
	m.put(`<p class="fine">`)
	for i, n := range list {
		if i > 0 {
			m.put(` · `)
		}
		m.put(`NIC{}: {} ({})`, i, n.Name, kindName(n))
	}
	m.put(`</p>`)
}
