// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"slices"

	"example.com/gpu-agent/pkg/gpu"
)

// Bounds beyond what any board has (18 lanes of 100,000 MB/s so far). They keep sums of nonsense
// within 64 bits.
const (
	maxLanes    = 1 << 10
	maxLaneMBps = 1 << 20
)

// NUMA is whether two devices are on one NUMA node.
type NUMA int

// Unknown is the zero value. In comparisons it is between the other two, since either may be
// true.
const (
	Unknown NUMA = iota
	Same
	Different
)

func (n NUMA) String() string { return [...]string{"unknown", "same", "different"}[n] }

// Level is the farthest thing on the PCI way between two devices, from near to far. The words of
// `nvidia-smi topo -m` are in brackets.
type Level int

const (
	LevelUnknown  Level = iota
	LevelSelf           // the device itself (X)
	LevelSwitch         // one bridge, or the two sides of one switch (PIX)
	LevelSwitches       // several switches below one root port (PXB)
	LevelHost           // one host bridge above both (PHB)
	LevelNode           // two host bridges of one NUMA node (NODE)
	LevelSystem         // two NUMA nodes (SYS)
)

// String returns the level's word in the matrix.
func (l Level) String() string {
	return [...]string{"N/A", "X", "PIX", "PXB", "PHB", "NODE", "SYS"}[l]
}

// Pair is how two GPUs are connected. In the zero Pair nothing is known.
type Pair struct {
	// NVLink is the number of lanes between the two: the direct ones, or through a switch the
	// lower of the two numbers that each has to it. It is 0 if Switch is true and the driver did
	// not count them.
	NVLink int
	// Switch is true if an NVSwitch connects them.
	Switch bool
	// MBps is the speed of all these lanes together in each direction, in MB/s (10^6 bytes); 0 if
	// not known.
	MBps int
	NUMA NUMA
	// Distance is the distance of their NUMA nodes in the worse direction, in the measure of
	// gpu.NUMANode. It is 0 if not known, and if they are on one node.
	Distance int
	// Level is the way over the PCI bus, even if NVLink connects the two.
	Level Level
}

// Linked reports whether NVLink connects the two, directly or through a switch.
func (p Pair) Linked() bool { return p.NVLink > 0 || p.Switch }

// Graph is the connections between a node's GPUs, from one inventory. It does not change, and may
// be used by several goroutines at once.
type Graph struct {
	inv   *gpu.Inventory // a copy, since the caller may change its own
	at    map[gpu.UUID]int
	pairs [][]Pair
	// ends[i][j] is the lanes to j that GPU i itself reports, and ends[i][i] its lanes to
	// switches.
	ends [][]lanes
	// weights is pairs as numbers. byLanes is true if they count lanes, since a speed is not
	// known.
	weights [][]weight
	byLanes bool
}

// lanes are the NVLink lanes of a link as one of its ends reports them. mbps is their speed in
// one direction, in MB/s.
type lanes struct {
	count, mbps int
	sw          bool // to a switch, even if not counted
	noSpeed     bool // the speed of some lanes is not known
}

func (l *lanes) add(link gpu.Link) {
	n := min(max(link.NVLink, 0), maxLanes-l.count)
	l.count += n
	l.mbps += n * min(max(link.LaneMBps, 0), maxLaneMBps)
	l.sw = l.sw || link.Switch
	l.noSpeed = l.noSpeed || link.NVLink > 0 && link.LaneMBps <= 0
}

// speed returns the speed of all lanes together, or 0 if that of any is not known.
func (l *lanes) speed() int {
	if l.noSpeed {
		return 0
	}
	return l.mbps
}

// lesser returns the lanes and speed that work of a link whose ends report a and b: a lane needs
// both of its ends. If only one end knows the speed, that counts.
func lesser(a, b *lanes) (count, mbps int) {
	if b.count < a.count || b.count == a.count && b.speed() < a.speed() {
		a, b = b, a
	}
	if a.count == b.count && a.speed() == 0 {
		a = b
	}
	return a.count, a.speed()
}

// New returns the graph of an inventory's links, NUMA nodes and PCI paths. inv may be nil.
//
// If the ends of a link report different numbers of lanes, the lower one counts, since a lane
// works only if both of its ends do. If only one end reports the link, that counts. Of two GPUs
// with the same UUID or index, the first counts.
func New(inv *gpu.Inventory) *Graph {
	g := &Graph{inv: new(gpu.Inventory), at: make(map[gpu.UUID]int)}
	if inv == nil {
		return g
	}
	*g.inv = *inv
	g.inv.GPUs = slices.Clone(inv.GPUs)
	g.inv.NICs = slices.Clone(inv.NICs)
	g.inv.NUMA = slices.Clone(inv.NUMA)

	n := len(inv.GPUs)
	byIndex := make(map[int]int, n)
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		if _, again := g.at[d.UUID]; !again && d.UUID != "" {
			g.at[d.UUID] = i
		}
		if _, again := byIndex[d.Index]; !again {
			byIndex[d.Index] = i
		}
	}

	g.ends = make([][]lanes, n)
	for i := range inv.GPUs {
		g.ends[i] = make([]lanes, n)
		for _, l := range inv.GPUs[i].Links {
			if l.Switch {
				g.ends[i][i].add(l)
			} else if j, ok := byIndex[l.To]; ok && j != i {
				g.ends[i][j].add(l)
			}
		}
	}

	// A GPU without a UUID, or with that of an earlier one, is in no set.
	named := func(i int) bool {
		at, ok := g.at[inv.GPUs[i].UUID]
		return ok && at == i
	}
	g.pairs = make([][]Pair, n)
	for i := range n {
		g.pairs[i] = make([]Pair, n)
		for j := range n {
			if i != j {
				p := g.pair(i, j)
				g.pairs[i][j] = p
				g.byLanes = g.byLanes || p.Linked() && p.MBps == 0 && named(i) && named(j)
			}
		}
	}
	g.weights = make([][]weight, n)
	for i := range n {
		g.weights[i] = make([]weight, n)
		for j := range n {
			if i != j {
				g.weights[i][j] = g.pairs[i][j].weigh(g.byLanes)
			}
		}
	}
	return g
}

func (g *Graph) pair(i, j int) Pair {
	a, b := placeOf(&g.inv.GPUs[i]), placeOf(&g.inv.GPUs[j])
	p := Pair{NUMA: a.numaTo(b), Distance: max(g.distance(a, b), g.distance(b, a)), Level: g.level(a, b)}
	there, back := &g.ends[i][j], &g.ends[j][i]
	via, viaToo := &g.ends[i][i], &g.ends[j][j]
	switch {
	case there.count > 0 && back.count > 0:
		p.NVLink, p.MBps = lesser(there, back)
	case there.count > 0:
		p.NVLink, p.MBps = there.count, there.speed()
	case back.count > 0:
		p.NVLink, p.MBps = back.count, back.speed()
	case via.sw && viaToo.sw:
		p.Switch = true
		p.NVLink, p.MBps = lesser(via, viaToo)
	}
	return p
}

// Between returns how two GPUs are connected, in either order. It is the zero Pair if one of them
// is unknown or both are the same.
func (g *Graph) Between(a, b gpu.UUID) Pair {
	i, ok := g.at[a]
	j, ok2 := g.at[b]
	if !ok || !ok2 {
		return Pair{}
	}
	return g.pairs[i][j]
}

// place is where a device is on the machine.
type place struct {
	path []string
	numa *int
}

func placeOf(d *gpu.Device) place { return place{d.Path, d.NUMA} }
func placeOfNIC(n *gpu.NIC) place { return place{n.Path, n.NUMA} }

// numaTo compares two NUMA nodes. A negative node is none, as the kernel writes it.
func (p place) numaTo(o place) NUMA {
	switch {
	case p.numa == nil || o.numa == nil || *p.numa < 0 || *o.numa < 0:
		return Unknown
	case *p.numa == *o.numa:
		return Same
	}
	return Different
}

// distance returns the firmware's distance from one NUMA node to a different one, or 0 if not
// known.
func (g *Graph) distance(a, b place) int {
	if a.numaTo(b) != Different {
		return 0
	}
	at := func(p place) int {
		return slices.IndexFunc(g.inv.NUMA, func(n gpu.NUMANode) bool { return n.ID == *p.numa })
	}
	from, to := at(a), at(b)
	if from < 0 || to < 0 || to >= len(g.inv.NUMA[from].Distances) {
		return 0
	}
	return min(max(g.inv.NUMA[from].Distances[to], 0), maxDistance)
}

// level compares the ways from the processor to two devices. The common bridges decide; without
// any, NUMA nodes do.
func (g *Graph) level(a, b place) Level {
	shared := 0
	for shared < min(len(a.path), len(b.path)) && a.path[shared] == b.path[shared] {
		shared++
	}
	// A path begins with the host bridge. A switch is one bridge upwards and one bridge downwards
	// for each of its slots. So two devices on one switch have at most one bridge each that is
	// not common.
	switch below := max(len(a.path), len(b.path)) - shared; {
	case shared > 1 && below <= 1:
		return LevelSwitch
	case shared > 1:
		return LevelSwitches
	case shared == 1:
		return LevelHost
	}
	switch n := a.numaTo(b); {
	case n == Different:
		return LevelSystem
	case n == Same, len(g.inv.NUMA) == 1:
		return LevelNode
	}
	return LevelUnknown
}
