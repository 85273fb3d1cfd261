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

// Sizes in the drawing, in pixels at full size.
const (
	edge     = 1  // so that outer lines are not cut off
	boxPad   = 10 // between a NUMA node's frame and what is in it
	boxGap   = 12 // between NUMA nodes
	boxTitle = 40 // two lines
	railSize = 12 // width of a PCIe switch

	chipHigh, chipWide   = 22, 66 // a network card that shares a switch with GPUs
	apartHigh, apartWide = 28, 69 // one that does not, with the gap after it
	tileHigh, tileWide   = 38, 136
	tilePitch            = 46 // from one GPU to the next
)

// drawing is the picture of a node. Its NUMA nodes are one below the other. Each shows, from
// left to right, network cards, the PCIe switches that they share with GPUs, GPUs and NVLinks.
// It is narrow enough for a telephone.
type drawing struct {
	Width, Height int
	Words         string // a description for screen readers
	Groups        []group

	m      *topology.Matrix
	known  map[string]tile // by UUID
	boxes  []box
	middle map[int]int // y of a GPU's middle, by index in the matrix
	arcs   []arc
	// x of switches, GPUs, and the right edge of the NUMA nodes' boxes.
	rails, tiles, right int
	linked              int // width of the arcs
}

// group is a part of a drawing. Its fields are painted in their order here.
type group struct {
	Class  string
	Card   *link // the card that the group links to; nil if Class is set
	Title  string
	Rects  []rect
	Paths  []path
	Labels []label
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

// key explains what has no label in the drawing.
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

// linkNotes describes in words how GPUs and network cards are connected.
func linkNotes(m *topology.Matrix) []note {
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

// evenly returns the number of NVLink lanes between any two GPUs of a set; 0 if the pairs
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

// newDrawing draws a matrix. known has the GPUs of the node's status, by UUID.
func newDrawing(m *topology.Matrix, known map[string]tile) *drawing {
	d := &drawing{m: m, known: known, middle: map[int]int{}, boxes: boxes(m)}
	d.measure()
	d.spread()
	d.findArcs()
	d.linked = edge
	for _, a := range d.arcs {
		d.linked = max(d.linked, d.reach(a)+8)
	}
	d.Width = d.right + d.linked
	if len(m.Switched) > 0 {
		d.Width += 16 + 26
	}
	d.Words = d.inWords()
	for _, b := range d.boxes {
		d.box(b)
	}
	d.links()
	// Links to cards come last and in order, which is the order of the Tab key.
	for _, b := range d.boxes {
		for _, s := range b.switches {
			for _, g := range s.gpus {
				d.gpu(g)
			}
		}
	}
	return d
}

// measure sets all horizontal positions.
func (d *drawing) measure() {
	nics, switches := false, false
	for _, b := range d.boxes {
		for _, s := range b.switches {
			nics = nics || len(s.nics) > 0
			switches = switches || s.shared()
		}
	}
	d.rails = edge + boxPad
	if nics {
		d.rails += chipWide + 8
	}
	d.tiles = d.rails
	if switches {
		d.tiles += railSize + 8
	}
	d.right = d.tiles + tileWide + boxPad
}

// spread sets all vertical positions.
func (d *drawing) spread() {
	at := edge
	for i := range d.boxes {
		b := &d.boxes[i]
		b.from = at
		rows := (len(b.apart) + d.perRow() - 1) / d.perRow()
		at += boxPad + boxTitle + rows*apartHigh
		for j := range b.switches {
			s := &b.switches[j]
			s.from = at
			for k, g := range s.gpus {
				d.middle[g] = at + k*tilePitch + tileHigh/2
			}
			at += max(len(s.gpus), len(s.nics)) * tilePitch
			s.to = at - (tilePitch - tileHigh)
			b.to = s.to
		}
		if len(b.switches) == 0 {
			b.to = at
		}
		b.to += boxPad
		at = b.to + boxGap
	}
	d.Height = at - boxGap + edge
}

// perRow returns how many network cards without a near GPU fit into one row.
func (d *drawing) perRow() int { return max((d.right-2*boxPad)/apartWide, 1) }

// arc is a direct NVLink between the GPUs a and b (indexes in the matrix). from and to are the
// heights at which it ends on each.
type arc struct{ a, b, lanes, from, to int }

// findArcs finds the NVLinks that go through no switch. The ends of one GPU's links are beside
// each other, in the order of the GPUs that they lead to.
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
		gap := min(10, (tileHigh-8)/max(n-1, 1))
		// On each side the link to the nearest GPU ends outermost, so that no two links cross
		// here.
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

// reach returns how far an arc extends to the right, in pixels.
func (d *drawing) reach(a arc) int {
	const least, most = 14, 64
	return least + (most-least)*(max(a.from, a.to)-min(a.from, a.to))/max(d.Height, 1)
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
	frame := rect{"box", edge, b.from, d.right - edge, b.to - b.from}
	g := group{Rects: []rect{frame}}
	x, room := frame.X+boxPad, d.right-2*boxPad
	g.Labels = append(g.Labels, label{Class: "strong", X: x, Y: b.from + 20, Text: clip(b.title, room)})
	if b.cpus != "" {
		g.Labels = append(g.Labels, label{
			Class: "muted", X: x, Y: b.from + 37, Text: clip(b.cpus, room), Title: b.cpus,
		})
	}
	var nics []group
	for i, nic := range b.apart {
		left, top := x+i%d.perRow()*apartWide, b.from+boxTitle+boxPad+i/d.perRow()*apartHigh
		nics = append(nics, d.nic(nic, left, top, apartWide-8))
	}
	for _, s := range b.switches {
		if s.shared() {
			g.Rects = append(g.Rects, rect{"rail", d.rails, s.from, railSize, s.to - s.from})
			for _, i := range s.gpus {
				g.Paths = append(g.Paths, wire(d.rails+railSize, d.tiles, d.middle[i]))
			}
		}
		for k, nic := range s.nics {
			middle := s.from + k*tilePitch + tileHigh/2
			g.Paths = append(g.Paths, wire(x+chipWide, d.rails, middle))
			nics = append(nics, d.nic(nic, x, middle-chipHigh/2, chipWide))
		}
	}
	d.Groups = append(append(d.Groups, g), nics...)
}

// wire returns a horizontal line.
func wire(from, to, y int) path { return path{Class: "wire", D: fmt.Sprintf("M%d %dH%d", from, y, to)} }

// nic draws a network card at x, y.
func (d *drawing) nic(i, x, y, width int) group {
	n := d.m.NICs[i-len(d.m.GPUs)]
	class := "nic"
	if !n.Active {
		class += " down"
	}
	return group{Class: class, Title: n.Name + ": " + kindName(n), Rects: []rect{{"", x, y, width, chipHigh}},
		Labels: []label{{Class: "middle", X: x + width/2, Y: y + 15, Text: clip(n.Name, width-4)}}}
}

// nvlink returns the style class of a line for a number of lanes.
func nvlink(lanes int) string { return "nvlink w" + strconv.Itoa(min(1+lanes/2, 5)) }

// links draws the NVLinks between GPUs, and the NVSwitch.
func (d *drawing) links() {
	var g group
	end := d.tiles + tileWide
	for _, a := range d.arcs {
		far := end + boxPad + d.reach(a)*4/3
		g.Paths = append(g.Paths, path{
			nvlink(a.lanes),
			fmt.Sprintf("M%d %dC%d %d %d %d %d %d", end, a.from, far, a.from, far, a.to, end, a.to),
			fmt.Sprintf("GPU %d to GPU %d: %s", d.m.GPUs[a.a].Index, d.m.GPUs[a.b].Index, laneWord(a.lanes)),
		})
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
	at := d.right + d.linked + 16 // x of the switch
	for i := range d.m.GPUs {
		if d.switched(i) {
			class := nvlink(own[i])
			if own[i] < most {
				class += " weak"
			}
			g.Paths = append(g.Paths, path{Class: class, D: fmt.Sprintf("M%d %dH%d", end, d.middle[i], at)})
		}
	}
	d.Groups = append(d.Groups, g)
	if len(middles) == 0 {
		return
	}
	first := slices.Min(middles) - tileHigh/2
	high := max(slices.Max(middles)+tileHigh/2-first, 80)
	text := "NVSwitch"
	if most > 0 && high > 240 {
		text += ", " + laneWord(most) + " to each GPU"
	}
	d.Groups = append(d.Groups, group{Rects: []rect{{"nvswitch", at - edge, first, 26 - edge, high}},
		Labels: []label{{Class: "strong middle", X: at + 8, Y: first + high/2, Text: text, Turned: true}}})
}

func laneWord(n int) string {
	if n == 0 {
		return "NVLink"
	}
	return count(n, "NVLink lane", "NVLink lanes")
}

// tile is a GPU in the drawing.
type tile struct {
	index       int
	card        *link // nil if the page has no card for it
	title       string
	tone, state string
	// bar draws what is held of the GPU, within a rectangle.
	bar func(x, y, width, height int) []rect
}

func newTile(g *GPU, card *link) tile {
	t := tile{index: g.Index, card: card, bar: g.segments}
	t.tone, t.state = tileState(g)
	t.title = fmt.Sprintf("GPU %d: %s, %s", g.Index, modeName(g), cmp.Or(g.Health, "nothing known"))
	if g.MIG.drawn(g.Mode) && g.MIG.Enabled {
		t.bar = g.MIG.cells
	}
	return t
}

// gpu draws a GPU, with a link to its card.
func (d *drawing) gpu(i int) {
	at := d.m.GPUs[i]
	t, known := d.known[string(at.UUID)]
	if !known {
		t = newTile(&GPU{Index: at.Index, UUID: string(at.UUID)}, nil)
	}
	frame := rect{strings.TrimSpace("tile " + t.tone), d.tiles, d.middle[i] - tileHigh/2, tileWide, tileHigh}
	bar := rect{"free", frame.X + 6, frame.Y + frame.H - 14, frame.W - 12, 7}
	end := cmp.Or(t.tone, "muted") + " end"
	d.Groups = append(d.Groups, group{
		Card: t.card, Title: t.title,
		Rects: append([]rect{frame, bar}, t.bar(bar.X, bar.Y, bar.W, bar.H)...),
		Labels: []label{
			{Class: "strong", X: frame.X + 8, Y: frame.Y + 17, Text: "GPU " + strconv.Itoa(t.index)},
			{Class: end, X: frame.X + frame.W - 8, Y: frame.Y + 17, Text: clip(t.state, frame.W-66)},
		},
	})
}

// tileState returns the word for a GPU in the drawing, and its tone.
func tileState(g *GPU) (tone, state string) {
	switch {
	case g.Health != "" && g.Health != Healthy:
		return "bad", "fault"
	case g.Blocked != "":
		return "warn", "waits"
	case g.MIG.drawn(g.Mode) && g.MIG.Enabled:
		held := 0
		for i := range g.MIG.Placements {
			if s := &g.MIG.Placements[i]; s.Held() {
				held++
			}
		}
		return "", strconv.Itoa(held) + " MIG"
	case g.UnitMiB > 0:
		return "", measure(g, g.Used) + "/" + measure(g, g.Total) + "\u00a0GiB"
	case g.Mode == Shared:
		return "", strconv.Itoa(g.Used) + " of " + strconv.Itoa(g.Total)
	case g.Mode == Off:
		return "", "off"
	case g.Used > 0:
		return "", "held"
	case g.Total > 0:
		return "", "free"
	}
	return "", cmp.Or(string(g.Mode), "–")
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
		class := map[string]string{
			PlacementHeld: "held", PlacementWarm: "idle", PlacementFailed: "gone",
		}[c.Placement.State]
		out = append(out, rect{cmp.Or(class, "busy"), x + from, y, max(to-from-1, 1), height})
	}
	return out
}
