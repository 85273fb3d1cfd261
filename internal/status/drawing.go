// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"example.com/gpu-agent/pkg/topology"
)

// node shows what the machine is: a drawing, and beside it its links and what
// there is on offer. The drawing has its NUMA nodes, on each the GPUs and network cards
// with the PCIe switches they share, and the NVLinks. There are two drawings of
// which the style shows one: side by side where there is room, and one below the
// other where there is not.
func (p *sheet) node() {
	if !p.hasNode() {
		return
	}
	m := p.s.Topology
	drawn := m != nil && len(m.GPUs) > 0
	p.put("<section aria-labelledby=\"node\"><h2 id=\"node\">Node</h2>\n")
	wide := &drawing{}
	if drawn {
		wide = newDrawing(p, m, false)
	}
	p.put(`<div class="node {}">`, map[bool]string{true: "broad", false: "slim"}[wide.along > slim])
	if drawn {
		p.put("<div><figure>")
		wide.draw("side")
		newDrawing(p, m, true).draw("stack")
		if key := wide.key(); key != "" {
			p.put("<figcaption class=\"fine\">{}</figcaption>", key)
		}
		p.put("</figure>\n")
		p.links(m)
		p.put("</div>")
	}
	p.put("<div class=\"beside\">")
	p.offers()
	p.put("</div></div></section>\n")
}

// hasNode tells whether there is anything to be shown of the node as a whole.
func (p *sheet) hasNode() bool {
	return p.s.Topology != nil && len(p.s.Topology.GPUs) > 0 ||
		slices.ContainsFunc(p.s.GPUs, func(g GPU) bool { return g.Resource != "" || g.MIG != nil })
}

// key explains what has no name in the drawing.
func (d *drawing) key() string {
	var out []string
	if len(d.arcs) > 0 || len(d.m.Switched) > 0 {
		out = append(out, "Green lines are NVLinks.")
	}
	if d.rails < d.tiles {
		out = append(out, "Grey bars are PCIe switches.")
	}
	return strings.Join(out, " ")
}

// slim is the width in pixels, of a drawing side by side, to which windows of 820
// pixels have room for it; the style knows that.
const slim = 780

// links says in words what the drawing shows.
func (p *sheet) links(m *topology.Matrix) {
	p.put("<h3>Links</h3><ul class=\"links\">")
	for _, set := range m.Joined {
		p.put("<li>NVLink joins GPUs {}", spans(set))
		if word, ok := p.evenly(m, set); ok && lanes(word) > 0 {
			p.put(", {}", count(lanes(word), "lane", "lanes"))
			if len(set) > 2 {
				p.put(" between any two")
			}
		}
		p.put(".</li>")
	}
	if len(m.Joined) == 0 && len(m.GPUs) > 1 {
		p.put("<li>No NVLink joins GPUs: they reach each other over PCIe.</li>")
	}
	for _, w := range m.Weak {
		p.put(`<li class="warn">{}.</li>`, w)
	}
	for _, kind := range []string{"infiniband", "roce", "efa"} {
		up, all := 0, 0
		for _, n := range m.NICs {
			if string(n.Kind) == kind {
				all++
				if n.Active {
					up++
				}
			}
		}
		if all > 0 {
			text := count(all, "network card", "network cards")
			if up < all {
				text += fmt.Sprintf(", %d with a port up", up)
			}
			p.put("<li>RDMA over {}: {}.</li>", kindName(kind), text)
		}
	}
	p.put("</ul>\n")
}

// evenly returns the word that stands for every pair of a set, if one does.
func (p *sheet) evenly(m *topology.Matrix, set []int) (string, bool) {
	word := ""
	for i, a := range m.GPUs {
		for j, b := range m.GPUs {
			if i == j || !slices.Contains(set, a.Index) || !slices.Contains(set, b.Index) {
				continue
			}
			if c := cellAt(m, i, j); word == "" {
				word = c
			} else if word != c {
				return "", false
			}
		}
	}
	return word, word != ""
}

// lanes is the number in "NV18"; 0 where there is none.
func lanes(cell string) int {
	n, _ := strconv.Atoi(strings.TrimPrefix(cell, "NV"))
	return n
}

// spans writes sorted numbers as people do: "0-3, 5".
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

// Measures of a drawing, in its own units, which are pixels where it is shown at
// full size. Along is the direction in which GPUs follow each other: from left
// to right, or upright from top to bottom; across is from the processors to the
// links.
const (
	edge     = 1  // for the outer lines
	boxPad   = 10 // between a NUMA node's frame and what is in it
	boxGap   = 12 // between NUMA nodes
	boxTitle = 40 // two lines
	railSize = 12 // a PCIe switch
	chipSize = 22 // a network card

	emptyBox = 2 // GPUs that there is room for in a NUMA node without any: its title needs it
)

// box is a NUMA node and what hangs on it.
type box struct {
	title, cpus string
	switches    []pciSwitch
	apart       []int // network cards that are near no GPU, by place in the matrix
	from, to    int   // along
}

// pciSwitch is GPUs and network cards that reach each other without the
// processor.
type pciSwitch struct {
	gpus, nics []int // by place in the matrix
	from, to   int   // along
}

// drawing is one of a node, laid out.
type drawing struct {
	p       *sheet
	m       *topology.Matrix
	upright bool
	boxes   []box
	middle  map[int]int // GPU by place in the matrix → its middle, along
	arcs    []arc
	// tile is a GPU's size along, and pitch from one to the next one.
	tile, pitch int
	// Where things are across: network cards, switches, GPUs, the end of the
	// boxes, the links.
	chips, rails, tiles, tileDepth, bottom, linked int
	along, across                                  int // size of it all
}

func newDrawing(p *sheet, m *topology.Matrix, upright bool) *drawing {
	d := &drawing{p: p, m: m, upright: upright, middle: map[int]int{}}
	d.boxes = boxes(m)
	switch n := len(m.GPUs); {
	case upright:
		d.tile, d.pitch, d.tileDepth = 38, 46, 136
	case n <= 4:
		d.tile, d.pitch, d.tileDepth = 112, 122, 62
	case n <= 8:
		d.tile, d.pitch, d.tileDepth = 80, 88, 62
	default:
		d.tile, d.pitch, d.tileDepth = 64, 69, 62
	}
	nics, switches := false, false
	for _, b := range d.boxes {
		for _, s := range b.switches {
			nics = nics || len(s.nics) > 0
			switches = switches || len(s.nics)+len(s.gpus) > 1
		}
	}
	d.chips = edge + boxPad
	if !upright {
		rows := 0
		for _, b := range d.boxes {
			rows = max(rows, d.rowsOf(b))
		}
		d.chips += boxTitle + rows*(chipSize+6)
	}
	d.rails = d.chips
	if nics {
		d.rails += map[bool]int{true: 74, false: chipSize + 8}[upright]
	}
	d.tiles = d.rails
	if switches {
		d.tiles += railSize + 8
	}
	d.bottom = d.tiles + d.tileDepth + boxPad
	at := edge
	for i := range d.boxes {
		b := &d.boxes[i]
		b.from = at
		at += boxPad
		if upright {
			at += boxTitle + d.rowsOf(*b)*(chipSize+6)
		}
		for j := range b.switches {
			s := &b.switches[j]
			s.from = at
			n := max(len(s.gpus), len(s.nics))
			for k, g := range s.gpus {
				d.middle[g] = at + k*d.pitch + d.tile/2
			}
			at += n * d.pitch
			s.to = at - (d.pitch - d.tile)
		}
		if len(b.switches) == 0 && !upright {
			at += emptyBox*d.pitch - (d.pitch - d.tile)
		} else if len(b.switches) > 0 {
			at -= d.pitch - d.tile
		}
		at += boxPad
		b.to = at
		at += boxGap
	}
	d.along = at - boxGap + edge
	d.findArcs()
	d.across = d.bottom + d.linkRoom()
	return d
}

// perRow is how many network cards that are near no GPU stand beside each other.
func (d *drawing) perRow(b box) int {
	if d.upright {
		return max((d.bottom-2*boxPad)/d.chip(), 1)
	}
	columns := 0
	for _, s := range b.switches {
		columns += max(len(s.gpus), len(s.nics))
	}
	if columns == 0 {
		columns = emptyBox
	}
	return max(columns*d.pitch/d.chip(), 1)
}

func (d *drawing) rowsOf(b box) int {
	n := d.perRow(b)
	return (len(b.apart) + n - 1) / n
}

// chip is what a network card takes along, in the row of those apart.
func (d *drawing) chip() int { return max(d.pitch, 69) }

// boxes puts the parts of a node in their NUMA nodes.
func boxes(m *topology.Matrix) []box {
	n := len(m.GPUs) + len(m.NICs)
	where := func(i int) int {
		at := (*int)(nil)
		if i < len(m.GPUs) {
			at = m.GPUs[i].NUMA
		} else {
			at = m.NICs[i-len(m.GPUs)].NUMA
		}
		if at == nil || *at < 0 {
			return -1
		}
		return *at
	}
	// What is on one PCIe switch has one number.
	group := make([]int, n)
	for i := range group {
		group[i] = i
	}
	for i := range n {
		for j := range i {
			if c := cellAt(m, i, j); (c == "PIX" || c == "PXB" || onSwitch(m, i, j)) && where(i) == where(j) && group[i] != group[j] {
				from, to := group[i], group[j]
				for k := range group {
					if group[k] == from {
						group[k] = to
					}
				}
			}
		}
	}
	var numbers []int
	for i := range n {
		if !slices.Contains(numbers, where(i)) {
			numbers = append(numbers, where(i))
		}
	}
	slices.SortFunc(numbers, func(a, b int) int { // what is on no known node last
		return cmp.Compare(uint(a), uint(b))
	})
	var out []box
	for _, number := range numbers {
		b := box{title: "NUMA node " + strconv.Itoa(number)}
		if number < 0 {
			b.title = "no NUMA node"
			if len(numbers) == 1 {
				b.title = "one processor domain"
			}
		}
		for _, node := range m.NUMA {
			if node.ID == number && node.CPUs != "" {
				b.cpus = "CPUs " + node.CPUs
			}
		}
		at := map[int]int{} // group → place in b.switches
		for i := range m.GPUs {
			if where(i) != number {
				continue
			}
			k, ok := at[group[i]]
			if !ok {
				k = len(b.switches)
				at[group[i]] = k
				b.switches = append(b.switches, pciSwitch{})
			}
			b.switches[k].gpus = append(b.switches[k].gpus, i)
		}
		for i := len(m.GPUs); i < n; i++ {
			if where(i) != number {
				continue
			}
			if k, ok := at[group[i]]; ok {
				b.switches[k].nics = append(b.switches[k].nics, i)
			} else {
				b.apart = append(b.apart, i)
			}
		}
		out = append(out, b)
	}
	return out
}

// onSwitch tells whether two GPUs whose cell speaks of NVLink are near to each
// other on the PCI bus all the same: a network card says so that is near both.
func onSwitch(m *topology.Matrix, i, j int) bool {
	near := func(c string) bool { return c == "PIX" || c == "PXB" }
	if i >= len(m.GPUs) || j >= len(m.GPUs) || cellTone(cellAt(m, i, j)) != "nv" {
		return false
	}
	for k := len(m.GPUs); k < len(m.GPUs)+len(m.NICs); k++ {
		if near(cellAt(m, i, k)) && near(cellAt(m, j, k)) {
			return true
		}
	}
	return false
}

// arc is a direct link, between places in the matrix, and where it ends, along.
type arc struct{ a, b, lanes, from, to int }

// findArcs lists the NVLinks that do not go through a switch. Those of one GPU
// end beside each other, in the order of their other ends.
func (d *drawing) findArcs() {
	ends := map[int][]int{} // GPU → the other ends
	for i := range d.m.GPUs {
		for j := range d.m.GPUs {
			if i != j && cellTone(cellAt(d.m, i, j)) == "nv" && (!d.switched(i) || !d.switched(j)) {
				ends[i] = append(ends[i], j)
			}
		}
		slices.SortStableFunc(ends[i], func(a, b int) int { return cmp.Compare(d.middle[a], d.middle[b]) })
	}
	end := func(i, other int) int {
		n := len(ends[i])
		gap := min(10, (d.tile-8)/max(n-1, 1))
		// The nearest of those to one side goes to the outer place, so that
		// no two of them cross here.
		list := ends[i]
		left := slices.IndexFunc(list, func(j int) bool { return d.middle[j] > d.middle[i] })
		if left < 0 {
			left = n
		}
		k := slices.Index(list, other)
		if k < left {
			k = left - 1 - k
		} else {
			k = left + (n - 1 - k)
		}
		return d.middle[i] + (2*k-(n-1))*gap/2
	}
	for i := range d.m.GPUs {
		for _, j := range ends[i] {
			if i < j {
				d.arcs = append(d.arcs, arc{i, j, lanes(cellAt(d.m, i, j)), end(i, j), end(j, i)})
			}
		}
	}
}

func (d *drawing) switched(i int) bool { return slices.Contains(d.m.Switched, d.m.GPUs[i].Index) }

// depth is how far an arc goes away from the GPUs.
func (d *drawing) depth(a arc) int {
	most := map[bool]int{true: 64, false: 104}[d.upright]
	steps := max(a.from, a.to) - min(a.from, a.to)
	return 14 + (most-14)*steps/max(d.along, 1)
}

// linkRoom is how much room the links take, across.
func (d *drawing) linkRoom() int {
	room := edge
	for _, a := range d.arcs {
		room = max(room, d.depth(a)+8)
	}
	d.linked = room
	if len(d.m.Switched) > 0 {
		room += 16 + 26
	}
	return room
}

// place turns along and across into x and y.
func (d *drawing) place(along, across int) (x, y int) {
	if d.upright {
		return across, along
	}
	return along, across
}

func (d *drawing) rect(class string, along, across, long, deep int) {
	x, y := d.place(along, across)
	w, h := d.place(long, deep)
	d.p.put(`<rect class="{}" x="{}" y="{}" width="{}" height="{}" rx="4"/>`, class, x, y, w, h)
}

func (d *drawing) line(class string, along, across, along2, across2 int) {
	x, y := d.place(along, across)
	x2, y2 := d.place(along2, across2)
	d.p.put(`<path class="{}" d="M{} {}L{} {}"/>`, class, x, y, x2, y2)
}

func (d *drawing) draw(class string) {
	p := d.p
	w, h := d.place(d.along, d.across)
	title, desc := p.id("drawing"), p.id("drawing")
	p.put(`<svg class="drawing {}" width="{}" height="{}" viewBox="0 0 {} {}" role="group" aria-labelledby="{} {}" focusable="false"><title id="{}">The node's GPUs and how they are connected</title><desc id="{}">{}</desc>`+"\n",
		class, w, h, w, h, title, desc, title, desc, d.inWords())
	for _, b := range d.boxes {
		d.box(b)
	}
	d.links()
	// What can be followed comes last and in order.
	for _, b := range d.boxes {
		for _, s := range b.switches {
			for _, g := range s.gpus {
				d.gpu(g)
			}
		}
	}
	p.put("</svg>\n")
}

// inWords describes the drawing to those who do not see it.
func (d *drawing) inWords() string {
	var out []string
	for _, b := range d.boxes {
		var gpus []int
		nics := len(b.apart)
		for _, s := range b.switches {
			for _, g := range s.gpus {
				gpus = append(gpus, d.m.GPUs[g].Index)
			}
			nics += len(s.nics)
		}
		slices.Sort(gpus)
		text := b.title + ": "
		if len(gpus) > 0 {
			text += "GPUs " + spans(gpus)
		}
		if nics > 0 {
			if len(gpus) > 0 {
				text += " and "
			}
			text += count(nics, "network card", "network cards")
		}
		out = append(out, text+".")
	}
	return strings.Join(out, " ") + " The table Matrix has every pair."
}

// clip shortens a text to what fits into so many pixels at 12 pixels' height.
func clip(s string, room int) string {
	const perMille = 600 // of the height, for a letter of a wide typeface
	fits := max(room*1000/(12*perMille), 1)
	r := []rune(plain(s))
	if len(r) <= fits {
		return s
	}
	return string(r[:fits-1]) + "…"
}

func (d *drawing) box(b box) {
	p := d.p
	long := b.to - b.from
	d.rect("box", b.from, edge, long, d.bottom-edge)
	x, y := d.place(b.from, edge)
	room, _ := d.place(long-2*boxPad, d.bottom-2*boxPad)
	p.put(`<text class="strong" x="{}" y="{}">{}</text>`, x+boxPad, y+20, clip(b.title, room))
	if b.cpus != "" {
		p.put(`<text class="muted" x="{}" y="{}">{}<title>{}</title></text>`, x+boxPad, y+37, clip(b.cpus, room), b.cpus)
	}
	n := d.perRow(b)
	for i, nic := range b.apart {
		d.nic(nic, x+boxPad+i%n*d.chip(), y+boxTitle+boxPad+i/n*(chipSize+6), d.chip()-(d.pitch-d.tile))
	}
	for _, s := range b.switches {
		if len(s.gpus)+len(s.nics) > 1 {
			d.rect("rail", s.from, d.rails, s.to-s.from, railSize)
		}
		for _, g := range s.gpus {
			if len(s.gpus)+len(s.nics) > 1 {
				d.line("wire", d.middle[g], d.rails+railSize, d.middle[g], d.tiles)
			}
		}
		for k, nic := range s.nics {
			middle := s.from + k*d.pitch + d.tile/2
			if d.upright {
				d.line("wire", middle, d.chips+66, middle, d.rails)
				d.nic(nic, d.chips, middle-chipSize/2, 66)
			} else {
				d.line("wire", middle, d.chips+chipSize, middle, d.rails)
				d.nic(nic, s.from+k*d.pitch, d.chips, d.tile)
			}
		}
	}
	p.put("\n")
}

// nic draws a network card at x, y.
func (d *drawing) nic(i, x, y, width int) {
	n := d.m.NICs[i-len(d.m.GPUs)]
	state := ""
	if !n.Active {
		state = ", no port up"
	}
	d.p.put(`<g class="nic{}"><title>{}: {}{}</title><rect x="{}" y="{}" width="{}" height="{}" rx="3"/><text x="{}" y="{}" text-anchor="middle">{}</text></g>`,
		map[bool]string{true: "", false: " down"}[n.Active], n.Name, kindName(string(n.Kind)), state, x, y, width, chipSize, x+width/2, y+15, clip(n.Name, width-4))
}

// links draws the lanes between GPUs, and the switch.
func (d *drawing) links() {
	p := d.p
	end := d.tiles + d.tileDepth
	for _, a := range d.arcs {
		from, to := a.from, a.to
		deep := end + boxPad + d.depth(a)*4/3
		x, y := d.place(from, end)
		x1, y1 := d.place(from, deep)
		x2, y2 := d.place(to, deep)
		x3, y3 := d.place(to, end)
		p.put(`<path class="nvlink w{}" d="M{} {}C{} {} {} {} {} {}"><title>GPU {} to GPU {}: {}</title></path>`,
			min(1+a.lanes/2, 5), x, y, x1, y1, x2, y2, x3, y3, d.m.GPUs[a.a].Index, d.m.GPUs[a.b].Index, laneWord(a.lanes))
	}
	first, last := d.along, 0
	text, most := "NVSwitch", 0
	own := map[int]int{} // GPU → its lanes to the switch
	for i := range d.m.GPUs {
		for j := range d.m.GPUs {
			if j != i && d.switched(i) && d.switched(j) {
				own[i] = max(own[i], lanes(cellAt(d.m, i, j)))
			}
		}
		most = max(most, own[i])
	}
	for i := range d.m.GPUs {
		if !d.switched(i) {
			continue
		}
		first, last = min(first, d.middle[i]), max(last, d.middle[i])
		class := "nvlink w" + strconv.Itoa(min(1+own[i]/2, 5))
		if own[i] < most {
			class += " weak"
		}
		d.line(class, d.middle[i], end, d.middle[i], d.bottom+d.linked+16)
	}
	if first > last {
		return
	}
	long := max(last-first+d.tile, 80)
	d.rect("nvswitch", first-d.tile/2, d.bottom+d.linked+16-edge, long, 26-edge)
	if most > 0 && long > 240 {
		text += ", " + laneWord(most) + " to each GPU"
	}
	x, y := d.place(first-d.tile/2+long/2, d.bottom+d.linked+16+12)
	if d.upright {
		p.put(`<text class="strong on" text-anchor="middle" transform="translate({} {}) rotate(90)">{}</text>`, x-4, y, text)
	} else {
		p.put(`<text class="strong on" text-anchor="middle" x="{}" y="{}">{}</text>`, x, y+4, text)
	}
	p.put("\n")
}

func laneWord(n int) string {
	if n == 0 {
		return "NVLink"
	}
	return count(n, "NVLink lane", "NVLink lanes")
}

// gpu draws a GPU, which leads to all about it.
func (d *drawing) gpu(i int) {
	p := d.p
	g := GPU{Index: d.m.GPUs[i].Index, UUID: string(d.m.GPUs[i].UUID)}
	at, known := p.byUUID[g.UUID]
	if known {
		g = p.s.GPUs[at]
		p.put(`<a href="#gpu-{}">`, at)
	} else {
		p.put("<g>")
	}
	x, y := d.place(d.middle[i]-d.tile/2, d.tiles)
	w, h := d.place(d.tile, d.tileDepth)
	tone, state := tileState(g)
	p.put(`<title>GPU {}: {}, {}</title><rect class="tile {}" x="{}" y="{}" width="{}" height="{}" rx="4"/>`,
		g.Index, modeName(g), cmp.Or(g.Health, "nothing known"), tone, x, y, w, h)
	if d.upright {
		p.put(`<text class="strong" x="{}" y="{}">GPU {}</text><text class="{}" x="{}" y="{}" text-anchor="end">{}</text>`,
			x+8, y+17, g.Index, cmp.Or(tone, "muted"), x+w-8, y+17, clip(state, w-66))
	} else {
		p.put(`<text class="strong" x="{}" y="{}">GPU {}</text><text class="{}" x="{}" y="{}">{}</text>`,
			x+6, y+18, g.Index, cmp.Or(tone, "muted"), x+6, y+36, clip(state, w-8))
	}
	bar := w - 12
	p.put(`<rect class="free" x="{}" y="{}" width="{}" height="7"/>`, x+6, y+h-14, bar)
	switch {
	case g.MIG != nil && g.MIG.Enabled:
		p.cells(g.MIG, x+6, y+h-14, bar, 7)
	default:
		p.segments(g, x+6, y+h-14, bar, 7)
	}
	if known {
		p.put("</a>\n")
	} else {
		p.put("</g>\n")
	}
}

// tileState is a GPU in a word, and whether that is a complaint.
func tileState(g GPU) (tone, state string) {
	switch {
	case g.Health != "" && g.Health != Healthy:
		return "bad", "fault"
	case g.Blocked != "":
		return "warn", "waits"
	case g.MIG != nil && g.MIG.Enabled:
		held := 0
		for i := range g.MIG.Slots {
			if s := &g.MIG.Slots[i]; s.Held() {
				held++
			}
		}
		return "", strconv.Itoa(held) + " MIG"
	case g.UnitMiB > 0:
		return "", measure(g, g.Used) + "/" + measure(g, g.Total) + "\u00a0GiB"
	case g.Mode == "shared":
		return "", strconv.Itoa(g.Used) + " of " + strconv.Itoa(g.Total)
	case g.Mode == "off":
		return "", "off"
	case g.Used > 0:
		return "", "held"
	case g.Total > 0:
		return "", "free"
	}
	return "", cmp.Or(g.Mode, "–")
}

// cells draws the MIG devices that stand, in so much room.
func (p *sheet) cells(m *MIG, x, y, width, height int) {
	size := m.size()
	if size == 0 {
		return
	}
	for _, c := range row(m, size, cellColumns) {
		if c.slot == nil {
			continue
		}
		from, to := c.from*width/(size*cellColumns), c.to*width/(size*cellColumns)
		class := map[string]string{SlotHeld: "held", SlotWarm: "idle", SlotFailed: "gone"}[c.slot.State]
		p.put(`<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>`, cmp.Or(class, "busy"), x+from, y, max(to-from-1, 1), height)
	}
}
