// SPDX-License-Identifier: Apache-2.0

package emulator

import (
	"cmp"
	"fmt"
	"slices"
)

// Level is how far apart two GPUs are on the PCI bus, with the numbers of
// nvmlGpuTopologyLevel_t.
type Level uint32

// The levels that the world has.
const (
	LevelSame     Level = 0  // one board
	LevelSwitch   Level = 10 // one bridge at most on either side of what they share: PIX
	LevelSwitches Level = 20 // more than one, below a bridge that they share: PXB
	LevelHost     Level = 30 // one host bridge: PHB
	LevelNode     Level = 40 // one NUMA node: NODE
	LevelSystem   Level = 50 // SYS
)

// CommonAncestor is the nearest thing on the PCI bus that two GPUs share.
func (s *Session) CommonAncestor(a, b Handle) (Level, Return) {
	return device(s, "nvmlDeviceGetTopologyCommonAncestor", a, func(g *gpu) (Level, Return) {
		other, r := s.gpuLocked(b)
		if r != Success {
			return 0, r
		}
		return level(g, other), Success
	})
}

func level(a, b *gpu) Level {
	if a == b {
		return LevelSame
	}
	return distance(a.path, b.path, a.numa, b.numa)
}

// distance is between two devices below their bridges.
func distance(a, b []string, numaA, numaB int) Level {
	shared := 0
	for shared < min(len(a), len(b)) && a[shared] == b[shared] {
		shared++
	}
	switch {
	case numaA != numaB:
		return LevelSystem
	case shared == 0:
		return LevelNode
	case shared == 1: // the host bridge
		return LevelHost
	case max(len(a), len(b))-shared <= 1:
		return LevelSwitch
	}
	return LevelSwitches
}

// NearestGPUs lists the GPUs at one level from a GPU, without itself.
func (s *Session) NearestGPUs(h Handle, l Level) ([]Handle, Return) {
	return device(s, "nvmlDeviceGetTopologyNearestGpus", h, func(g *gpu) ([]Handle, Return) {
		var out []Handle
		for _, other := range s.p.gpus {
			if other != g && level(g, other) == l {
				out = append(out, Handle(other.slot))
			}
		}
		return out, Success
	})
}

// CPUAffinity is the CPUs near a GPU, as the words of a set: of its NUMA node, or
// of that node's whole socket.
func (s *Session) CPUAffinity(h Handle, socket bool) ([]uint64, Return) {
	return device(s, "nvmlDeviceGetCpuAffinity", h, func(g *gpu) ([]uint64, Return) {
		return words(s.p.w.board.near(g.numa, socket)), Success
	})
}

// MemoryAffinity is the NUMA nodes whose memory is near a GPU, likewise.
func (s *Session) MemoryAffinity(h Handle, socket bool) ([]uint64, Return) {
	return device(s, "nvmlDeviceGetMemoryAffinity", h, func(g *gpu) ([]uint64, Return) {
		return words(s.p.w.board.nodes(g.numa, socket)), Success
	})
}

func words(set []int) []uint64 {
	var out []uint64
	for _, n := range set {
		for n/64 >= len(out) {
			out = append(out, 0)
		}
		out[n/64] |= 1 << (n % 64)
	}
	return out
}

// maxNVLinks is NVML_NVLINK_MAX_LINKS: a link beyond it is an invalid argument,
// one below it that the GPU lacks is not supported.
const maxNVLinks = 36

// LinkSpec joins a GPU to another one, or to the NVSwitches.
type LinkSpec struct {
	GPU    int  `yaml:"gpu"`
	To     int  `yaml:"to"`
	Switch bool `yaml:"switch"`
	Lanes  int  `yaml:"lanes"`
	// Back is how many of the lanes the GPU at the far end takes for active.
	// Default all.
	Back *int `yaml:"back"`
}

type wireKind int

const (
	wireNone wireKind = iota
	wireGPU
	wireSwitch
)

// wire is one end of an NVLink.
type wire struct {
	kind wireKind
	to   int // the GPU's slot, or the NVSwitch's number
	far  int // the link's number at the other end
	down bool
}

// cubeMesh is the lanes between the GPUs of a DGX-1 with V100, each pair once.
var cubeMesh = []LinkSpec{
	{GPU: 0, To: 1, Lanes: 1}, {GPU: 0, To: 2, Lanes: 1}, {GPU: 0, To: 3, Lanes: 2}, {GPU: 0, To: 4, Lanes: 2},
	{GPU: 1, To: 2, Lanes: 2}, {GPU: 1, To: 3, Lanes: 1}, {GPU: 1, To: 5, Lanes: 2},
	{GPU: 2, To: 3, Lanes: 2}, {GPU: 2, To: 6, Lanes: 1},
	{GPU: 3, To: 7, Lanes: 1},
	{GPU: 4, To: 5, Lanes: 1}, {GPU: 4, To: 6, Lanes: 1}, {GPU: 4, To: 7, Lanes: 2},
	{GPU: 5, To: 6, Lanes: 2}, {GPU: 5, To: 7, Lanes: 1},
	{GPU: 6, To: 7, Lanes: 2},
}

// layWires joins the GPUs as the Spec says.
func layWires(spec Spec, gpus []*gpu) error {
	for _, g := range gpus {
		g.wires = make([]wire, g.NVLinks)
	}
	if len(spec.Links) > 0 {
		return join(gpus, spec.Links)
	}
	var linked []*gpu
	for _, g := range gpus {
		if g.NVLinks > 0 {
			linked = append(linked, g)
		}
	}
	if len(linked) < 2 {
		return nil // nothing to be joined to
	}
	switch spec.NVLink {
	case "", "switch":
		for _, g := range linked {
			for l := range g.wires {
				if g.NVSwitches > 0 {
					g.wires[l] = wire{kind: wireSwitch, to: l % g.NVSwitches, far: g.slot*g.NVLinks + l}
				}
			}
		}
	case "mesh":
		// Whole rounds of all the others, in their order, so that both ends of a link
		// know each other.
		for i, a := range linked {
			for j, b := range linked {
				if i == j {
					continue
				}
				n := len(linked) - 1
				for round := range min(a.NVLinks, b.NVLinks) / n {
					here, there := round*n+placeAmong(j, i), round*n+placeAmong(i, j)
					a.wires[here] = wire{kind: wireGPU, to: b.slot, far: there}
				}
			}
		}
	case "pairs":
		for i := 0; i+1 < len(gpus); i += 2 {
			a, b := gpus[i], gpus[i+1]
			for l := range min(a.NVLinks, b.NVLinks) {
				a.wires[l] = wire{kind: wireGPU, to: b.slot, far: l}
				b.wires[l] = wire{kind: wireGPU, to: a.slot, far: l}
			}
		}
	case "cube":
		if len(gpus) > 8 {
			return fmt.Errorf("nvlink cube: it joins 8 GPUs, not %d", len(gpus))
		}
		var links []LinkSpec
		for _, l := range cubeMesh {
			if l.To < len(gpus) {
				links = append(links, l)
			}
		}
		return join(gpus, links)
	}
	return nil
}

// placeAmong is the place of number n among all but one of the numbers.
func placeAmong(n, but int) int {
	if n > but {
		return n - 1
	}
	return n
}

// join uses the links of each GPU in the order of the list.
func join(gpus []*gpu, links []LinkSpec) error {
	used := make([]int, len(gpus))
	take := func(slot int) (int, error) {
		if used[slot] >= gpus[slot].NVLinks {
			return 0, fmt.Errorf("links: GPU %d, %s, has only %d", slot, gpus[slot].Name, gpus[slot].NVLinks)
		}
		used[slot]++
		return used[slot] - 1, nil
	}
	for _, l := range links {
		back := l.Lanes
		if l.Back != nil {
			back = *l.Back
		}
		switch {
		case l.GPU < 0 || l.GPU >= len(gpus) || !l.Switch && (l.To < 0 || l.To >= len(gpus)):
			return fmt.Errorf("links: GPU %d to %d: the world has GPUs 0 to %d", l.GPU, l.To, len(gpus)-1)
		case !l.Switch && l.GPU == l.To:
			return fmt.Errorf("links: GPU %d to itself", l.GPU)
		case l.Lanes < 1 || back < 0 || back > l.Lanes:
			return fmt.Errorf("links: GPU %d to %d: %d lanes, %d of them back", l.GPU, l.To, l.Lanes, back)
		case l.Switch && gpus[l.GPU].NVSwitches == 0:
			return fmt.Errorf("links: GPU %d: the boards of %s have no NVSwitch", l.GPU, gpus[l.GPU].Name)
		}
		for lane := range l.Lanes {
			here, err := take(l.GPU)
			if err != nil {
				return err
			}
			g := gpus[l.GPU]
			if l.Switch {
				g.wires[here] = wire{kind: wireSwitch, to: here % g.NVSwitches, far: g.slot*g.NVLinks + here}
				continue
			}
			there, err := take(l.To)
			if err != nil {
				return err
			}
			g.wires[here] = wire{kind: wireGPU, to: l.To, far: there}
			gpus[l.To].wires[there] = wire{kind: wireGPU, to: l.GPU, far: here, down: lane >= back}
		}
	}
	return nil
}

// SetLink makes a link of a GPU fail, at both of its ends, or work again; -1 is all
// of the GPU's links. No Xid comes with it.
func (w *World) SetLink(index, link int, up bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	g, err := w.gpuLocked(index)
	if err != nil {
		return err
	}
	if link < -1 || link >= len(g.wires) {
		return fmt.Errorf("GPU %d: link %d: %w (it has links 0 to %d)", index, link, NotFound, len(g.wires)-1)
	}
	found := false
	for l := range g.wires {
		if link >= 0 && l != link || g.wires[l].kind == wireNone {
			continue
		}
		found = true
		g.wires[l].down = !up
		if g.wires[l].kind == wireGPU {
			w.gpus[g.wires[l].to].wires[g.wires[l].far].down = !up
		}
	}
	if !found {
		return fmt.Errorf("GPU %d: link %d: %w: nothing is at its other end", index, link, NotFound)
	}
	w.touchLocked()
	return nil
}

// Link is what stands at the far end of one of a GPU's NVLinks.
type Link struct {
	Active bool
	Switch bool // an NVSwitch, else a GPU
	Remote PCI
	// Far is the link's number at the other end.
	Far int
}

// NVLink describes one of a GPU's links. A link without a far end is not
// active.
func (s *Session) NVLink(h Handle, link int) (Link, Return) {
	return device(s, "nvmlDeviceGetNvLinkState", h, func(g *gpu) (Link, Return) {
		switch {
		case link < 0 || link >= maxNVLinks:
			return Link{}, InvalidArgument
		case link >= g.NVLinks:
			return Link{}, NotSupported
		}
		return s.p.w.linkLocked(g, link), Success
	})
}

// nvswitchDevice is the PCI identity of the NVSwitch of Ampere and Hopper
// boards.
const nvswitchDevice = 0x22A310DE

func (w *World) linkLocked(g *gpu, link int) Link {
	l := g.wires[link]
	if l.kind == wireNone || !w.trainedLocked(g, l) {
		return Link{}
	}
	if l.kind == wireSwitch {
		return Link{Active: true, Switch: true, Remote: w.board.switchPCI(l.to), Far: l.far}
	}
	return Link{Active: true, Remote: w.gpus[l.to].pci, Far: l.far}
}

// trainedLocked says whether a link works, as its own end sees it: one of or to a GPU
// that is gone does not.
func (w *World) trainedLocked(g *gpu, l wire) bool {
	if l.down || g.unplugged || g.lost {
		return false
	}
	if l.kind == wireGPU {
		return !w.gpus[l.to].unplugged && !w.gpus[l.to].lost
	}
	return slices.ContainsFunc(w.gpus, func(other *gpu) bool {
		return other != g && !other.unplugged && other.NVLinks > 0
	})
}

// The numbers of nvmlGpuP2PCapsIndex_t and nvmlGpuP2PStatus_t.
const (
	p2pNVLink       = 2
	p2pAtomics      = 3
	p2pOK           = 0
	p2pNotSupported = 5
)

// P2PStatus says whether two GPUs reach each other in one way. Over the PCI bus
// they do on every board of the models here; NVLink and atomics want a link.
func (s *Session) P2PStatus(a, b Handle, index uint32) (uint32, Return) {
	return device(s, "nvmlDeviceGetP2PStatus", a, func(g *gpu) (uint32, Return) {
		other, r := s.gpuLocked(b)
		if r != Success {
			return 0, r
		}
		if (index == p2pNVLink || index == p2pAtomics) && min(s.p.w.lanesLocked(g, other), s.p.w.lanesLocked(other, g)) == 0 {
			return p2pNotSupported, Success
		}
		return p2pOK, Success
	})
}

// nvlinkVersions are the numbers of nvmlNvlinkVersion_t, and laneMBps what one link
// carries in each direction in MB/s, as drivers show it: by generation.
var (
	nvlinkVersions = map[int]uint32{1: 1, 2: 2, 3: 4, 4: 6, 5: 7}
	laneMBps       = map[int]uint32{1: 19531, 2: 25781, 3: 25000, 4: 26562, 5: 53125}
)

// fabricStates are the numbers of NVML_GPU_FABRIC_STATE_*.
var fabricStates = map[string]uint32{"": 3, "completed": 3, "in-progress": 2, "not-started": 1}

// Fabric is what the driver knows of the NVLink fabric that a GPU belongs to. The
// cluster's UUID is empty where there is none.
type Fabric struct {
	Cluster string
	Clique  uint32
	State   uint32 // NVML_GPU_FABRIC_STATE_*
}

// Fabric reads a GPU's part in a fabric, which a machine without a fabric manager
// does not have.
func (s *Session) Fabric(h Handle) (Fabric, Return) {
	return device(s, "nvmlDeviceGetGpuFabricInfoV", h, func(g *gpu) (Fabric, Return) {
		f := s.p.w.board.fabric
		if f == nil {
			return Fabric{}, NotSupported
		}
		state := fabricStates[cmp.Or(g.setup.Fabric, f.State)]
		if state != fabricStates["completed"] {
			return Fabric{State: state}, Success
		}
		return Fabric{Cluster: f.Cluster, Clique: f.Clique, State: state}, Success
	})
}

// LinkState is one of a GPU's links in a State.
type LinkState struct {
	// To is the GPU at the other end, -1 where that is an NVSwitch or nothing.
	To     int  `json:"to"`
	Switch bool `json:"switch,omitempty"`
	Up     bool `json:"up"`
}

func (w *World) linkStatesLocked(g *gpu) []LinkState {
	var out []LinkState
	for _, l := range g.wires {
		s := LinkState{To: -1, Switch: l.kind == wireSwitch, Up: l.kind != wireNone && w.trainedLocked(g, l)}
		if l.kind == wireGPU {
			s.To = l.to
		}
		out = append(out, s)
	}
	return out
}
