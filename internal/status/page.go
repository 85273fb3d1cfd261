// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/topology"
)

//go:embed page.css
var style string

// PagePolicy is the page's Content-Security-Policy. It allows the page's own style
// sheet and icon, and nothing else: no script, no style attribute, nothing loaded.
var PagePolicy = func() string {
	sum := sha256.Sum256([]byte(style))
	return "default-src 'none'; style-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) +
		"'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}()

// WriteHTML writes the Status as a web page that needs no other file. Ages are counted to now;
// if it is zero, they are left out. The page is XML as well as HTML, and no text in the Status
// becomes markup. WriteHTML draws the whole page before it writes to w, and returns w's error.
func WriteHTML(w io.Writer, s Status, now time.Time) error {
	var m markup
	m.page(&s, now.UTC())
	_, err := io.WriteString(w, sanitize(m.b.String()))
	return err
}

// card is a GPU's part of the page.
type card struct {
	*GPU
	At      int    // index in Status.GPUs, also part of the element's ID
	Tone    string // "ok", "warn" or "bad"
	Facts   string
	Notes   []note
	Devices []tenant // MIG devices that exist, are held, or could not be created
	Tenants []tenant // the other holders
}

// link leads to a GPU's part of the page: its index in Status.GPUs, and the GPU's own index.
type link struct{ At, Index int }

// link returns the link to the card.
func (c *card) link() *link { return &link{c.At, c.Index} }

func newCards(s *Status, now time.Time) []*card {
	var cards []*card
	for i := range s.GPUs {
		cards = append(cards, newCard(s, i, now))
	}
	return cards
}

// cardLinks returns the links to cards by UUID. If a UUID occurs twice, the link leads to the
// first.
func cardLinks(cards []*card) map[string]*link {
	out := map[string]*link{}
	for _, c := range cards {
		if out[c.UUID] == nil {
			out[c.UUID] = c.link()
		}
	}
	return out
}

// tiles returns the cards' tiles in the drawing, by UUID; the first, if a UUID occurs twice.
func tiles(cards []*card) map[string]tile {
	out := map[string]tile{}
	for _, c := range cards {
		if _, twice := out[c.UUID]; !twice {
			out[c.UUID] = newTile(c.GPU, c.link())
		}
	}
	return out
}

func newCard(s *Status, at int, now time.Time) *card {
	g := &s.GPUs[at]
	c := &card{GPU: g, At: at, Tone: "ok"}
	c.Notes = g.notes(now)
	switch {
	case g.Health != Healthy:
		c.Tone = "bad"
	case len(c.Notes) > 0:
		c.Tone = "warn"
	}
	facts := []string{}
	// If all GPUs are of one kind, the page names it once, at the top.
	if slices.ContainsFunc(s.GPUs, func(o GPU) bool { return o.kind() != g.kind() }) {
		facts = append(facts, g.Model, amount(g.MemoryMiB))
	}
	if n := nodeNumber(g.NUMA); n != "" {
		facts = append(facts, "NUMA node "+n)
	}
	if g.PCI != "" {
		facts = append(facts, "PCI "+g.PCI)
	}
	c.Facts = join(" · ", append(facts, g.asked())...)
	c.Devices, c.Tenants = s.tenants(g, now)
	return c
}

// asked returns the name by which pods ask for the GPU's devices: a resource or a DeviceClass. It is
// empty if the devices have several names, and if there are none.
func (g *GPU) asked() string { return cmp.Or(g.Resource, g.DeviceClass) }

// kind returns the GPU's model and memory, which are the same for all GPUs of a kind.
func (g *GPU) kind() string { return join(", ", g.Model, amount(g.MemoryMiB)) }

// kinds counts the kinds of GPUs: "8 × NVIDIA H100 80GB HBM3, 79.6 GiB".
func kinds(gpus []GPU) string {
	var kinds []string
	number := map[string]int{}
	for i := range gpus {
		k := gpus[i].kind()
		if number[k]++; number[k] == 1 {
			kinds = append(kinds, k)
		}
	}
	for i, k := range kinds {
		kinds[i] = fmt.Sprintf("%d × %s", number[k], cmp.Or(k, "of unknown model"))
	}
	return cmp.Or(strings.Join(kinds, "; "), "none")
}

// pageNotes returns everything that needs attention on the node, the worst first.
func pageNotes(s *Status, cards []*card) []note {
	all := s.notes()
	add := func(tone, text string, to *link) { all = append(all, note{tone, text, to}) }
	switch t := s.Partition; {
	case t.State != "" && stateTone(t.State) != "ok":
		add(stateTone(t.State), "The partition is "+join(": ", t.State, t.Message), nil)
	case t.Message != "":
		add("warn", t.Message, nil)
	}
	for _, c := range cards {
		for _, n := range c.Notes {
			if n.Tone != "ok" {
				add(n.Tone, n.Text, c.link())
			}
		}
		for _, d := range c.Devices {
			if d.Placement.State == PlacementFailed {
				add("warn", d.Placement.label()+" could not be made: "+d.Placement.Reason, c.link())
			}
		}
	}
	links := cardLinks(cards)
	for _, c := range s.Containers {
		if c.over() {
			text := fmt.Sprintf("%s uses %s of %s GiB",
				who(c.Namespace, c.Pod, c.Container), gib(c.UsedMiB), gib(c.CapMiB))
			add("bad", text, links[c.GPU])
		}
	}
	slices.SortStableFunc(all, func(a, b note) int { return strings.Compare(a.Tone, b.Tone) })
	return all
}

// iconColor is the colour of the page's icon.
func iconColor(notes []note) constant {
	switch {
	case len(notes) == 0:
		return "1d7a45"
	case notes[0].Tone == "bad":
		return "c5362b"
	}
	return "b97a00"
}

// nodeOffer is the sum of what the node's GPUs offer of one resource.
type nodeOffer struct {
	Offer
	GPUs []int  // indices, sorted
	Unit string // the size of one device, if it is an amount of memory
	// Claims is true if pods ask by a claim.
	Claims bool
}

// allOffers adds up what the GPUs offer, by resource. hasMIG is true if MIG devices are among
// it.
func allOffers(gpus []GPU) (offers []*nodeOffer, hasMIG bool) {
	sums := map[string]*nodeOffer{}
	for i := range gpus {
		g := &gpus[i]
		for _, o := range g.Offers() {
			sum := sums[o.Resource]
			if sum == nil {
				sum = &nodeOffer{Offer: Offer{Resource: o.Resource}}
				sums[o.Resource] = sum
			}
			sum.Claims = sum.Claims || o.Claims
			sum.Held, sum.Free, sum.Unhealthy = sum.Held+o.Held, sum.Free+o.Free, sum.Unhealthy+o.Unhealthy
			if !slices.Contains(sum.GPUs, g.Index) {
				sum.GPUs = append(sum.GPUs, g.Index)
				slices.Sort(sum.GPUs)
			}
			switch {
			case o.Resource != g.asked():
				hasMIG = true
			case g.UnitMiB > 0 && g.UnitMiB%1024 == 0:
				sum.Unit = strconv.FormatUint(g.UnitMiB/1024, 10) + " GiB"
			case g.UnitMiB > 0:
				sum.Unit = strconv.FormatUint(g.UnitMiB, 10) + " MiB"
			}
		}
	}
	return slices.SortedFunc(maps.Values(sums), func(a, b *nodeOffer) int {
		return strings.Compare(a.Resource, b.Resource)
	}), hasMIG
}

// modeName returns a GPU's layout in words. For a whole GPU it adds whether it is held.
func modeName(g *GPU) string {
	if g.API != "" {
		of := *g
		of.API = ""
		return modeName(&of) + ", by " + g.API
	}
	if g.Compute != "" {
		of := *g
		of.Compute = ""
		return modeName(&of) + ", " + g.Compute
	}
	switch g.Mode {
	case Unset:
		return "no partition"
	case Whole:
		switch {
		case g.Used > 0:
			return "whole, held"
		case g.Free > 0:
			return "whole, free"
		case g.Unhealthy > 0:
			return "whole, withdrawn"
		}
	case Shared:
		if g.UnitMiB > 0 {
			return "shared by memory"
		}
		return "shared by replicas"
	case InMIG:
		if g.MIG != nil && g.MIG.OnDemand {
			return "MIG on demand"
		}
		return "MIG"
	case Dynamic, Off:
	default:
		return "mode " + string(g.Mode) + ", which is not known"
	}
	return string(g.Mode)
}

// segments returns the pieces of a bar: one for each holder, and one for what is withdrawn.
func (g *GPU) segments(x, y, width, height int) []rect {
	var out []rect
	at := 0
	piece := func(class string, units int) {
		from, to := share(at, g.Total, width), share(min(at+units, g.Total), g.Total, width)
		if to > from {
			// A thin gap between two holders.
			gap := 0
			if from > 0 {
				gap = max(width/250, 1)
			}
			out = append(out, rect{class, x + from + gap, y, max(to-from-gap, 1), height})
		}
		at += units
	}
	left := g.Used
	for i, h := range g.Holders {
		if (h.Resource == g.Resource || h.Kind != "") && left > 0 {
			n := min(max(h.Units, 0), left)
			if h.Kind == "whole" {
				n = left
			}
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
	return out
}

// cellColumns is the number of table columns for one memory slice. Twelve of them are
// enough to divide any GPU instance into its compute instances.
const cellColumns = 12

// matrixRow describes how one GPU or network card is connected to each of the others.
type matrixRow struct {
	Name, NUMA, CPUs string
	Cells            []string
}

func newMatrix(m *topology.Matrix) []matrixRow {
	var rows []matrixRow
	for _, g := range m.GPUs {
		rows = append(rows, matrixRow{Name: "GPU" + strconv.Itoa(g.Index), NUMA: nodeNumber(g.NUMA), CPUs: g.CPUs})
	}
	for i, n := range m.NICs {
		rows = append(rows, matrixRow{Name: "NIC" + strconv.Itoa(i), NUMA: nodeNumber(n.NUMA)})
	}
	for i := range rows {
		for j := range rows {
			rows[i].Cells = append(rows[i].Cells, cellAt(m, i, j))
		}
	}
	return rows
}

// nearness explains a word in the matrix.
type nearness struct{ Tone, Word, Means string }

// legend explains all words, from near to far.
var legend = []nearness{
	{"nv", "NV#", "NVLink, # lanes"},
	{"pix", "PIX", "one PCIe bridge between them"},
	{"pxb", "PXB", "several PCIe bridges, but no host bridge"},
	{"phb", "PHB", "one PCIe host bridge, at the processor"},
	{"node", "NODE", "several host bridges of one NUMA node"},
	{"sys", "SYS", "the link between NUMA nodes"},
}

func means(cell string) nearness {
	if strings.HasPrefix(cell, "NV") {
		return legend[0]
	}
	if i := slices.IndexFunc(legend, func(n nearness) bool { return n.Word == cell }); i > 0 {
		return legend[i]
	}
	return nearness{Tone: "self"}
}

// legendOf explains the words that occur in a matrix.
func legendOf(rows []matrixRow) []nearness {
	return slices.DeleteFunc(slices.Clone(legend), func(n nearness) bool {
		return !slices.ContainsFunc(rows, func(row matrixRow) bool {
			return slices.ContainsFunc(row.Cells, func(c string) bool { return means(c) == n })
		})
	})
}

func cellAt(m *topology.Matrix, i, j int) string {
	if i < len(m.Cells) && j < len(m.Cells[i]) {
		return m.Cells[i][j]
	}
	return ""
}

// nodeNumber returns the number of a NUMA node; it is empty if the number is unknown.
func nodeNumber(n *int) string {
	if n == nil || *n < 0 {
		return ""
	}
	return strconv.Itoa(*n)
}

// kindName returns the kind of a network card, and adds whether it is down.
func kindName(n topology.MatrixNIC) string {
	kind := cmp.Or(rdmaNames[n.Kind], string(n.Kind), "RDMA")
	if !n.Active {
		kind += ", no port up"
	}
	return kind
}

var rdmaNames = map[gpu.RDMA]string{gpu.InfiniBand: "InfiniBand", gpu.RoCE: "RoCE", gpu.EFA: "EFA"}
