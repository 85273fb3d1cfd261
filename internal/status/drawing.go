// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/topology"
)

// Sizes in a drawing, in pixels at full size. "Along" is the direction in which the
// GPUs follow each other: left to right, or top to bottom in an upright drawing.
// "Across" is the other one, from the processors to the links.
const (
	edge     = 1  // so that outer lines are not cut off
	boxPad   = 10 // between a NUMA node's frame and what is in it
	boxGap   = 12 // between NUMA nodes
	boxTitle = 40 // two lines
	railSize = 12 // a PCIe switch
	chipSize = 22 // a network card

	emptyBox = 2 // a NUMA node without GPUs is as wide as two of them, for its title
)

// drawing is the picture of a node: its NUMA nodes, the GPUs and network cards on each
// with the PCIe switches that they share, and the NVLinks. The page has two drawings,
// and the style sheet shows one of them: GPUs side by side in a wide window, one below
// the other in a narrow one.
type drawing struct {
	Class         string
	Width, Height int
	Words         string // the same, for screen readers
	Groups        []group

	m       *topology.Matrix
	cards   map[string]*card // by UUID
	upright bool
	boxes   []box
	middle  map[int]int // GPU, by index in the matrix → its middle, along
	arcs    []arc
	// tile is the size of a GPU along, and pitch the distance from one to the next.
	tile, pitch int
	// Positions across: network cards, switches, GPUs, the end of the NUMA nodes'
	// boxes; tileDepth and linked are sizes, of a GPU and of the links.
	chips, rails, tiles, tileDepth, bottom, linked int
	long                                           int // size along
}

// group is a part of a drawing. It is painted in the order of the fields; with an
// Href it is a link.
type group struct {
	Class, Href, Title string
	Rects              []rect
	Paths              []path
	Labels             []label
}

type rect struct {
	Class      string
	X, Y, W, H int
}

type path struct{ Class, D, Title string }

type label struct {
	Class       string
	X, Y        int
	Text, Title string
	Turned      bool // written from top to bottom
}

// Key explains what has no label in the drawings.
func (p *sheet) Key() string {
	d := p.Drawings[0]
	var out []string
	if len(d.arcs) > 0 || len(d.m.Switched) > 0 {
		out = append(out, "Green lines are NVLinks.")
	}
	if d.rails < d.tiles {
		out = append(out, "Grey bars are PCIe switches.")
	}
	return strings.Join(out, " ")
}

// slim is the greatest width of a drawing, in pixels, that fits into a window of 820
// pixels. The style sheet relies on it.
const slim = 780

// Links says in words how GPUs and network cards are connected.
func (p *sheet) Links() []note {
	m := p.Topology
	var out []note
	add := func(tone, format string, args ...any) {
		out = append(out, note{Tone: tone, Text: fmt.Sprintf(format, args...)})
	}
	for _, set := range m.Joined {
		text := ""
		if n := evenly(m, set); n > 0 {
			text = ", " + count(n, "lane", "lanes")
			if len(set) > 2 {
				text += " between any two"
			}
		}
		add("", "NVLink joins GPUs %s%s", spans(set), text)
	}
	if len(m.Joined) == 0 && len(m.GPUs) > 1 {
		add("", "No NVLink joins GPUs: they reach each other over PCIe")
	}
	for _, w := range m.Weak {
		add("warn", "%s", w)
	}
	for _, kind := range []gpu.RDMA{gpu.InfiniBand, gpu.RoCE, gpu.EFA} {
		up, all := 0, 0
		for _, n := range m.NICs {
			if n.Kind == kind {
				all++
				if n.Active {
					up++
				}
			}
		}
		text := ""
		if up < all {
			text = fmt.Sprintf(", %d with a port up", up)
		}
		if all > 0 {
			add("", "RDMA over %s: %s%s", rdmaNames[kind], count(all, "network card", "network cards"), text)
		}
	}
	return out
}

// evenly returns the number of NVLink lanes between any two GPUs of a set; 0 if they
// differ.
func evenly(m *topology.Matrix, set []int) int {
	word := ""
	for i, a := range m.GPUs {
		for j, b := range m.GPUs {
			if i == j || !slices.Contains(set, a.Index) || !slices.Contains(set, b.Index) {
				continue
			}
			c := cellAt(m, i, j)
			if word != "" && word != c {
				return 0
			}
			word = c
		}
	}
	return lanes(word)
}

// lanes returns the number in "NV18"; 0 if there is none.
func lanes(cell string) int {
	n, _ := strconv.Atoi(strings.TrimPrefix(cell, "NV"))
	return n
}

func newDrawing(m *topology.Matrix, cards map[string]*card, upright bool) *drawing {
	d := &drawing{Class: "side", m: m, cards: cards, upright: upright, middle: map[int]int{}, boxes: boxes(m)}
	if upright {
		d.Class = "stack"
	}
	d.measure()
	d.spread()
	d.findArcs()
	d.Width, d.Height = d.place(d.long, d.bottom+d.linkRoom())
	d.Words = d.inWords()
	for _, b := range d.boxes {
		d.box(b)
	}
	d.links()
	// Links come last and in order, which is the order of the Tab key.
	for _, b := range d.boxes {
		for _, s := range b.switches {
			for _, g := range s.gpus {
				d.gpu(g)
			}
		}
	}
	return d
}

// measure sets all positions across, and the size of a GPU.
func (d *drawing) measure() {
	switch n := len(d.m.GPUs); {
	case d.upright:
		d.tile, d.pitch, d.tileDepth = 38, 46, 136
	case n <= 4:
		d.tile, d.pitch, d.tileDepth = 112, 122, 62
	case n <= 8:
		d.tile, d.pitch, d.tileDepth = 80, 88, 62
	default:
		d.tile, d.pitch, d.tileDepth = 64, 69, 62
	}
	nics, switches, rows := false, false, 0
	for _, b := range d.boxes {
		rows = max(rows, d.rowsOf(b))
		for _, s := range b.switches {
			nics = nics || len(s.nics) > 0
			switches = switches || s.shared()
		}
	}
	d.chips = edge + boxPad
	if !d.upright {
		d.chips += boxTitle + rows*(chipSize+6)
	}
	d.rails = d.chips
	switch {
	case nics && d.upright:
		d.rails += 74
	case nics:
		d.rails += chipSize + 8
	}
	d.tiles = d.rails
	if switches {
		d.tiles += railSize + 8
	}
	d.bottom = d.tiles + d.tileDepth + boxPad
}

// spread sets all positions along.
func (d *drawing) spread() {
	at := edge
	for i := range d.boxes {
		b := &d.boxes[i]
		b.from = at
		at += boxPad
		if d.upright {
			at += boxTitle + d.rowsOf(*b)*(chipSize+6)
		}
		for j := range b.switches {
			s := &b.switches[j]
			s.from = at
			for k, g := range s.gpus {
				d.middle[g] = at + k*d.pitch + d.tile/2
			}
			at += max(len(s.gpus), len(s.nics)) * d.pitch
			s.to = at - (d.pitch - d.tile)
		}
		if len(b.switches) == 0 && !d.upright {
			at += emptyBox*d.pitch - (d.pitch - d.tile)
		} else if len(b.switches) > 0 {
			at -= d.pitch - d.tile
		}
		at += boxPad
		b.to = at
		at += boxGap
	}
	d.long = at - boxGap + edge
}

// perRow is how many of a box's network cards that are near no GPU fit into one row.
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

// chip is the width of a network card that is near no GPU, with the gap after it.
func (d *drawing) chip() int { return max(d.pitch, 69) }

// arc is a direct NVLink from a to b (indexes in the matrix), and the positions of its
// ends, along.
type arc struct{ a, b, lanes, from, to int }

// findArcs finds the NVLinks that do not go through a switch. Those of one GPU end
// beside each other, in the order of their other ends.
func (d *drawing) findArcs() {
	ends := map[int][]int{} // GPU → the other ends
	for i := range d.m.GPUs {
		for j := range d.m.GPUs {
			if i != j && means(cellAt(d.m, i, j)) == legend[0] && (!d.switched(i) || !d.switched(j)) {
				ends[i] = append(ends[i], j)
			}
		}
		slices.SortStableFunc(ends[i], func(a, b int) int { return cmp.Compare(d.middle[a], d.middle[b]) })
	}
	end := func(i, other int) int {
		n := len(ends[i])
		gap := min(10, (d.tile-8)/max(n-1, 1))
		// On each side the link to the nearest GPU ends outermost, so that no two
		// of them cross here.
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

// depth is how far an arc reaches across.
func (d *drawing) depth(a arc) int {
	most := map[bool]int{true: 64, false: 104}[d.upright]
	steps := max(a.from, a.to) - min(a.from, a.to)
	return 14 + (most-14)*steps/max(d.long, 1)
}

// linkRoom is the size of all links, across.
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

func (d *drawing) rect(class string, along, across, long, deep int) rect {
	x, y := d.place(along, across)
	w, h := d.place(long, deep)
	return rect{class, x, y, w, h}
}

func (d *drawing) line(class string, along, across, along2, across2 int) path {
	x, y := d.place(along, across)
	x2, y2 := d.place(along2, across2)
	return path{Class: class, D: fmt.Sprintf("M%d %dL%d %d", x, y, x2, y2)}
}

// inWords describes the drawing for screen readers.
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

// clip shortens a text of 12 pixels' height to a width in pixels.
func clip(s string, room int) string {
	const perMille = 600 // width of a letter in a wide typeface, of its height
	fits := max(room*1000/(12*perMille), 1)
	r := []rune(s)
	if len(r) <= fits {
		return s
	}
	return string(r[:fits-1]) + "…"
}

func (d *drawing) box(b box) {
	frame := d.rect("box", b.from, edge, b.to-b.from, d.bottom-edge)
	g := group{Rects: []rect{frame}}
	room, _ := d.place(b.to-b.from, d.bottom)
	room -= 2 * boxPad
	g.Labels = append(g.Labels, label{Class: "strong", X: frame.X + boxPad, Y: frame.Y + 20, Text: clip(b.title, room)})
	if b.cpus != "" {
		g.Labels = append(g.Labels, label{Class: "muted", X: frame.X + boxPad, Y: frame.Y + 37, Text: clip(b.cpus, room), Title: b.cpus})
	}
	var nics []group
	n := d.perRow(b)
	for i, nic := range b.apart {
		nics = append(nics, d.nic(nic, frame.X+boxPad+i%n*d.chip(), frame.Y+boxTitle+boxPad+i/n*(chipSize+6), d.chip()-(d.pitch-d.tile)))
	}
	for _, s := range b.switches {
		if s.shared() {
			g.Rects = append(g.Rects, d.rect("rail", s.from, d.rails, s.to-s.from, railSize))
			for _, i := range s.gpus {
				g.Paths = append(g.Paths, d.line("wire", d.middle[i], d.rails+railSize, d.middle[i], d.tiles))
			}
		}
		for k, nic := range s.nics {
			middle := s.from + k*d.pitch + d.tile/2
			if d.upright {
				g.Paths = append(g.Paths, d.line("wire", middle, d.chips+66, middle, d.rails))
				nics = append(nics, d.nic(nic, d.chips, middle-chipSize/2, 66))
			} else {
				g.Paths = append(g.Paths, d.line("wire", middle, d.chips+chipSize, middle, d.rails))
				nics = append(nics, d.nic(nic, s.from+k*d.pitch, d.chips, d.tile))
			}
		}
	}
	d.Groups = append(append(d.Groups, g), nics...)
}

// nic draws a network card at x, y.
func (d *drawing) nic(i, x, y, width int) group {
	n := d.m.NICs[i-len(d.m.GPUs)]
	class := "nic"
	if !n.Active {
		class += " down"
	}
	return group{Class: class, Title: n.Name + ": " + kindName(n), Rects: []rect{{"", x, y, width, chipSize}},
		Labels: []label{{Class: "middle", X: x + width/2, Y: y + 15, Text: clip(n.Name, width-4)}}}
}

// nvlink is the style of a line that stands for a number of lanes.
func nvlink(lanes int) string { return "nvlink w" + strconv.Itoa(min(1+lanes/2, 5)) }

// links draws the NVLinks between GPUs, and the NVSwitch.
func (d *drawing) links() {
	var g group
	end := d.tiles + d.tileDepth
	for _, a := range d.arcs {
		deep := end + boxPad + d.depth(a)*4/3
		x, y := d.place(a.from, end)
		x1, y1 := d.place(a.from, deep)
		x2, y2 := d.place(a.to, deep)
		x3, y3 := d.place(a.to, end)
		g.Paths = append(g.Paths, path{nvlink(a.lanes), fmt.Sprintf("M%d %dC%d %d %d %d %d %d", x, y, x1, y1, x2, y2, x3, y3),
			fmt.Sprintf("GPU %d to GPU %d: %s", d.m.GPUs[a.a].Index, d.m.GPUs[a.b].Index, laneWord(a.lanes))})
	}
	var middles []int
	own, most := map[int]int{}, 0 // GPU → its lanes to the NVSwitch
	for i := range d.m.GPUs {
		if !d.switched(i) {
			continue
		}
		for j := range d.m.GPUs {
			if j != i && d.switched(j) {
				own[i] = max(own[i], lanes(cellAt(d.m, i, j)))
			}
		}
		most = max(most, own[i])
		middles = append(middles, d.middle[i])
	}
	across := d.bottom + d.linked + 16 // where the switch is
	for i := range d.m.GPUs {
		if d.switched(i) {
			class := nvlink(own[i])
			if own[i] < most {
				class += " weak"
			}
			g.Paths = append(g.Paths, d.line(class, d.middle[i], end, d.middle[i], across))
		}
	}
	d.Groups = append(d.Groups, g)
	if len(middles) == 0 {
		return
	}
	first := slices.Min(middles) - d.tile/2
	long := max(slices.Max(middles)+d.tile/2-first, 80)
	text := "NVSwitch"
	if most > 0 && long > 240 {
		text += ", " + laneWord(most) + " to each GPU"
	}
	x, y := d.place(first+long/2, across+12)
	if d.upright {
		x -= 4
	} else {
		y += 4
	}
	d.Groups = append(d.Groups, group{Rects: []rect{d.rect("nvswitch", first, across-edge, long, 26-edge)},
		Labels: []label{{Class: "strong middle", X: x, Y: y, Text: text, Turned: d.upright}}})
}

func laneWord(n int) string {
	if n == 0 {
		return "NVLink"
	}
	return count(n, "NVLink lane", "NVLink lanes")
}

// gpu draws a GPU, with a link to its card.
func (d *drawing) gpu(i int) {
	at := d.m.GPUs[i]
	g := &GPU{Index: at.Index, UUID: string(at.UUID)}
	var out group
	if c := d.cards[g.UUID]; c != nil {
		g, out.Href = c.GPU, "#gpu-"+strconv.Itoa(c.At)
	}
	tone, state := tileState(g)
	tile := d.rect(strings.TrimSpace("tile "+tone), d.middle[i]-d.tile/2, d.tiles, d.tile, d.tileDepth)
	out.Title = fmt.Sprintf("GPU %d: %s, %s", g.Index, modeName(g), cmp.Or(g.Health, "nothing known"))
	word := label{Class: cmp.Or(tone, "muted"), X: tile.X + 6, Y: tile.Y + 36, Text: clip(state, tile.W-8)}
	name := label{Class: "strong", X: tile.X + 6, Y: tile.Y + 18, Text: "GPU " + strconv.Itoa(g.Index)}
	if d.upright {
		name.X, name.Y = tile.X+8, tile.Y+17
		word = label{Class: word.Class + " end", X: tile.X + tile.W - 8, Y: name.Y, Text: clip(state, tile.W-66)}
	}
	out.Labels = []label{name, word}
	bar := rect{"free", tile.X + 6, tile.Y + tile.H - 14, tile.W - 12, 7}
	out.Rects = []rect{tile, bar}
	if g.MIG != nil && g.MIG.Enabled {
		out.Rects = append(out.Rects, g.MIG.cells(bar.X, bar.Y, bar.W, bar.H)...)
	} else {
		out.Rects = append(out.Rects, g.segments(bar.X, bar.Y, bar.W, bar.H)...)
	}
	d.Groups = append(d.Groups, out)
}

// tileState is the word for a GPU in the drawing, and its tone.
func tileState(g *GPU) (tone, state string) {
	switch {
	case g.Health != "" && g.Health != Healthy:
		return "bad", "fault"
	case g.Blocked != "":
		return "warn", "waits"
	case g.MIG != nil && g.MIG.Enabled:
		held := 0
		for i := range g.MIG.Placements {
			if s := &g.MIG.Placements[i]; s.Held() {
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

// cells draws the MIG devices into a rectangle.
func (m *MIG) cells(x, y, width, height int) []rect {
	size := m.size()
	var out []rect
	for _, c := range row(m, size, cellColumns) {
		if c.Placement == nil {
			continue
		}
		from, to := c.from*width/(size*cellColumns), c.to*width/(size*cellColumns)
		class := map[string]string{PlacementHeld: "held", PlacementWarm: "idle", PlacementFailed: "gone"}[c.Placement.State]
		out = append(out, rect{cmp.Or(class, "busy"), x + from, y, max(to-from-1, 1), height})
	}
	return out
}
