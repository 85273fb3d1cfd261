// SPDX-License-Identifier: Apache-2.0

package emulator

import (
	"cmp"
	"embed"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// NUMASpec is a NUMA node of the machine.
type NUMASpec struct {
	// CPUs is the kernel's list of its processors, "0-55,112-167"; empty for memory
	// without any. Where it has two ranges of one length, the second is the
	// hyperthreads of the first.
	CPUs string `yaml:"cpus" json:"cpus"`
	// MemoryMiB is the host's memory there. Default 64 GiB.
	MemoryMiB uint64 `yaml:"memoryMiB" json:"memoryMiB"`
	// Socket is the processor that the node is a part of. Default: one of its own.
	Socket *int `yaml:"socket" json:"socket"`
}

// Kinds of RDMA network cards.
const (
	InfiniBand = "infiniband"
	RoCE       = "roce"
	EFA        = "efa"
)

// NICSpec is an RDMA network card, or one function of it.
type NICSpec struct {
	Name string `yaml:"name" json:"name"` // the kernel's, mlx5_0
	Kind string `yaml:"kind" json:"kind"`
	// Path is as in GPUSpec.
	Path string `yaml:"path" json:"path"`
	// NUMA is the node of its slot, default that of what it shares a host bridge
	// with, else none.
	NUMA *int `yaml:"numa" json:"numa"`
	// Down says that no cable is in it.
	Down bool `yaml:"down" json:"down"`
}

// FabricSpec is the NVLink fabric that all GPUs of the machine belong to, as their
// fabric manager tells the driver.
type FabricSpec struct {
	// Cluster is the domain's UUID; empty for a fabric that ends at the machine.
	Cluster string `yaml:"cluster" json:"cluster"`
	Clique  uint32 `yaml:"clique" json:"clique"`
	// State is completed (default), in-progress or not-started.
	State string `yaml:"state" json:"state"`
}

// The tables under topologies/ are worlds; their comments say where each is from.
//
//go:embed topologies/*.yaml
var topologyFiles embed.FS

// Topologies lists the names that Spec.Topology takes.
func Topologies() []string {
	var names []string
	files, _ := fs.Glob(topologyFiles, "topologies/*.yaml")
	for _, f := range files {
		names = append(names, strings.TrimSuffix(path.Base(f), ".yaml"))
	}
	slices.Sort(names)
	return names
}

// Machine is the world that a word names: a number of GPUs of a model, such as
// 8xH100-80GB, or one of Topologies.
func Machine(word string) (Spec, error) {
	if slices.Contains(Topologies(), word) {
		return Spec{Topology: word}, nil
	}
	count, model, _ := strings.Cut(word, "x")
	n, err := strconv.Atoi(count)
	if err != nil || n < 1 || n > MaxGPUs || !slices.Contains(Models(), model) {
		return Spec{}, fmt.Errorf("machine %q: want up to %d GPUs of a model, such as 8xH100-80GB, or a machine; models are %s, machines are %s",
			word, MaxGPUs, strings.Join(Models(), ", "), strings.Join(Topologies(), ", "))
	}
	return Spec{Count: n, Model: model}, nil
}

// LoadTopology reads one of Topologies.
func LoadTopology(name string) (Spec, error) {
	data, err := topologyFiles.ReadFile("topologies/" + name + ".yaml")
	if err != nil {
		return Spec{}, fmt.Errorf("topology %q: want one of %s", name, strings.Join(Topologies(), ", "))
	}
	var s Spec
	if err := decodeStrict(data, &s); err != nil {
		return Spec{}, fmt.Errorf("read topology %s: %w", name, err)
	}
	return s, nil
}

// onTopology lays what a Spec says over the topology that it names.
func (s Spec) onTopology() (Spec, error) {
	if s.Topology == "" {
		return s, nil
	}
	base, err := LoadTopology(s.Topology)
	if err != nil {
		return Spec{}, err
	}
	if s.Count > base.Count {
		return Spec{}, fmt.Errorf("count %d: topology %s has %d GPUs", s.Count, s.Topology, base.Count)
	}
	s.Model = cmp.Or(s.Model, base.Model)
	s.Count = cmp.Or(s.Count, base.Count)
	s.Machine = cmp.Or(s.Machine, base.Machine)
	s.Vendor = cmp.Or(s.Vendor, base.Vendor)
	if s.NUMA == nil {
		s.NUMA = base.NUMA
	}
	if s.NICs == nil {
		s.NICs = base.NICs
	}
	if s.Fabric == nil {
		s.Fabric = base.Fabric
	}
	if s.Switches == nil {
		s.Switches = base.Switches
	}
	if s.Links == nil && s.NVLink == "" {
		s.NVLink = base.NVLink
		for _, l := range base.Links {
			if l.GPU < s.Count && (l.Switch || l.To < s.Count) {
				s.Links = append(s.Links, l)
			}
		}
	}
	s.GPUs = slices.Clone(s.GPUs)
	for _, b := range base.GPUs {
		if b.Index >= s.Count {
			continue
		}
		at := slices.IndexFunc(s.GPUs, func(g GPUSpec) bool { return g.Index == b.Index })
		if at < 0 {
			s.GPUs = append(s.GPUs, b)
			continue
		}
		g := &s.GPUs[at]
		if g.Path == "" && g.PCI == "" {
			g.Path = b.Path
		}
		if g.NUMA == nil {
			g.NUMA = b.NUMA
		}
	}
	return s, nil
}

var (
	hostBridge = regexp.MustCompile(`^pci[0-9a-f]{4}:[0-9a-f]{2}$`)
	function   = regexp.MustCompile(`^[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]$`)
	fabricID   = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
)

// splitPath reads a path below /sys/devices: the host bridge, other bridges, and
// the device itself, which is cut off.
func splitPath(s string) (bridges []string, device string, err error) {
	parts := strings.Split(s, "/")
	last := len(parts) - 1
	ok := last >= 1 && hostBridge.MatchString(parts[0])
	for _, p := range parts[1:] {
		ok = ok && function.MatchString(p)
	}
	if !ok {
		return nil, "", fmt.Errorf("path %q: want a host bridge, bridges and the device itself, such as pci0000:15/0000:15:01.0/0000:1b:00.0", s)
	}
	return parts[:last], parts[last], nil
}

// NIC is an RDMA network card of the machine.
type NIC struct {
	Name   string `json:"name"`
	Kind   string `json:"kind"`
	Path   string `json:"path"`
	NUMA   int    `json:"numa"` // -1 is none
	Active bool   `json:"active"`
}

// board is the machine that the GPUs are in. It never changes.
type board struct {
	named           bool // by a topology or NUMA nodes of the Spec's own
	machine, vendor string
	numa            []NUMASpec
	cpus            [][]int // of each node
	nics            []NIC
	switches        []string // paths of the NVSwitches
	fabric          *FabricSpec
}

const (
	// cpusPerNode is the size of NUMA nodes that nobody described.
	cpusPerNode    = 64
	defaultNodeMiB = 64 << 10
	maxCPUs        = 8192
)

// parseCPUs reads the kernel's form of a set, "0-3,8", in ascending order.
func parseCPUs(list string) ([]int, error) {
	var out []int
	if list == "" {
		return nil, nil
	}
	for part := range strings.SplitSeq(list, ",") {
		first, last, isRange := strings.Cut(part, "-")
		a, err := strconv.Atoi(first)
		b := a
		if err == nil && isRange {
			b, err = strconv.Atoi(last)
		}
		if err != nil || a < 0 || b < a || b >= maxCPUs || len(out) > 0 && a <= out[len(out)-1] {
			return nil, fmt.Errorf("cpus %q: want a list such as 0-55,112-167", list)
		}
		for n := a; n <= b; n++ {
			out = append(out, n)
		}
	}
	return out, nil
}

// newBoard builds the machine around its GPUs, whose addresses and nodes are known,
// and gives those a path that have none.
func newBoard(spec Spec, gpus []*gpu) (*board, error) {
	b := &board{
		named:   spec.Topology != "" || spec.NUMA != nil,
		machine: cmp.Or(spec.Machine, "GPU server"), vendor: cmp.Or(spec.Vendor, "Emulated"),
		numa: slices.Clone(spec.NUMA), fabric: spec.Fabric,
	}
	if spec.NUMA == nil {
		nodes := 1
		for _, g := range gpus {
			nodes = max(nodes, g.numa+1)
		}
		for n := range nodes {
			b.numa = append(b.numa, NUMASpec{CPUs: fmt.Sprintf("%d-%d", n*cpusPerNode, (n+1)*cpusPerNode-1)})
		}
	}
	owner := map[int]int{}
	for n := range b.numa {
		node := &b.numa[n]
		cpus, err := parseCPUs(node.CPUs)
		if err != nil {
			return nil, fmt.Errorf("NUMA node %d: %w", n, err)
		}
		for _, c := range cpus {
			if other, taken := owner[c]; taken {
				return nil, fmt.Errorf("NUMA node %d: cpus: CPU %d is of node %d", n, c, other)
			}
			owner[c] = n
		}
		b.cpus = append(b.cpus, cpus)
		node.MemoryMiB = cmp.Or(node.MemoryMiB, defaultNodeMiB)
		if node.Socket == nil {
			node.Socket = &n
		}
	}
	if len(owner) == 0 {
		return nil, fmt.Errorf("numa: a machine has CPUs")
	}
	for _, g := range gpus {
		if g.numa >= len(b.numa) {
			return nil, fmt.Errorf("GPU %d: numa %d: the machine has nodes 0 to %d", g.slot, g.numa, len(b.numa)-1)
		}
	}
	if err := layPaths(gpus); err != nil {
		return nil, err
	}
	if err := b.layNICs(spec, gpus); err != nil {
		return nil, err
	}
	if err := b.laySwitches(spec, gpus); err != nil {
		return nil, err
	}
	if f := b.fabric; f != nil {
		if f.Cluster != "" && !fabricID.MatchString(f.Cluster) {
			return nil, fmt.Errorf("fabric: cluster %q: want a UUID in lower case", f.Cluster)
		}
		if _, ok := fabricStates[f.State]; !ok {
			return nil, fmt.Errorf("fabric: state %q: want completed, in-progress or not-started", f.State)
		}
	}
	return b, b.oneOfEach(gpus)
}

// layPaths hangs the GPUs that have no path on the PCI bus: two neighbours of one
// node behind one switch, each two on a host bridge of their own.
func layPaths(gpus []*gpu) error {
	type group struct {
		domain     uint32
		numa, pair int
	}
	at, taken, members := map[group]uint32{}, map[[2]uint32]bool{}, map[group]uint32{}
	for _, g := range gpus {
		if g.path != nil {
			continue
		}
		key := group{g.pci.Domain, g.numa, g.slot / 2}
		if g.pci.Bus < 4 {
			g.path = []string{fmt.Sprintf("pci%04x:%02x", g.pci.Domain, g.pci.Bus)} // a slot of the processor's own
			continue
		}
		base, ok := at[key]
		for next := g.pci.Bus - 3; !ok; next-- {
			base = next
			if ok = !taken[[2]uint32{g.pci.Domain, base}]; !ok && next == 0 {
				return fmt.Errorf("GPU %d: there is no room for its bridges before %s: give its path", g.slot, g.pci)
			}
		}
		at[key] = base
		taken[[2]uint32{g.pci.Domain, base}] = true
		g.path = []string{
			fmt.Sprintf("pci%04x:%02x", g.pci.Domain, base),
			fmt.Sprintf("%04x:%02x:01.0", g.pci.Domain, base),                   // root port
			fmt.Sprintf("%04x:%02x:00.0", g.pci.Domain, base+1),                 // the switch's upstream port
			fmt.Sprintf("%04x:%02x:%02x.0", g.pci.Domain, base+2, members[key]), // and a downstream one
		}
		members[key]++
	}
	return nil
}

func (b *board) layNICs(spec Spec, gpus []*gpu) error {
	names := map[string]bool{}
	for _, n := range spec.NICs {
		if n.Name == "" || strings.ContainsAny(n.Name, "/ ") || names[n.Name] {
			return fmt.Errorf("nics: name %q: want one name for each", n.Name)
		}
		names[n.Name] = true
		if !slices.Contains([]string{InfiniBand, RoCE, EFA}, n.Kind) {
			return fmt.Errorf("nics: %s: kind %q: want %s, %s or %s", n.Name, n.Kind, InfiniBand, RoCE, EFA)
		}
		bridges, _, err := splitPath(n.Path)
		if err != nil {
			return fmt.Errorf("nics: %s: %w", n.Name, err)
		}
		nic := NIC{Name: n.Name, Kind: n.Kind, Path: n.Path, NUMA: -1, Active: !n.Down}
		if n.NUMA != nil {
			nic.NUMA = *n.NUMA
		} else if i := slices.IndexFunc(gpus, func(g *gpu) bool { return g.path[0] == bridges[0] }); i >= 0 {
			nic.NUMA = gpus[i].numa
		}
		if nic.NUMA >= len(b.numa) {
			return fmt.Errorf("nics: %s: numa %d: the machine has nodes 0 to %d", n.Name, nic.NUMA, len(b.numa)-1)
		}
		b.nics = append(b.nics, nic)
	}
	return nil
}

// switchAddress is where an NVSwitch stands on the PCI bus of a board that is not
// described.
func switchAddress(n int) PCI { return PCI{Bus: 0x02, Device: uint32(n), DeviceID: nvswitchDevice} }

// laySwitches finds the NVSwitches: those that the Spec has, or as many as the model
// with most of them wants, where any link ends at one.
func (b *board) laySwitches(spec Spec, gpus []*gpu) error {
	count := 0
	for _, g := range gpus {
		for _, w := range g.wires {
			if w.kind == wireSwitch {
				count = max(count, g.NVSwitches)
			}
		}
	}
	if count == 0 {
		return nil
	}
	if spec.Switches != nil {
		for _, at := range spec.Switches {
			if _, _, err := splitPath(at); err != nil {
				return fmt.Errorf("switches: %w", err)
			}
			if _, ok := parsePCI(path.Base(at)); !ok {
				return fmt.Errorf("switches: path %q: want the device's function 0", at)
			}
		}
		b.switches = spec.Switches
		return nil
	}
	for n := range count {
		b.switches = append(b.switches, "pci0000:01/0000:01:01.0/"+switchAddress(n).Sysfs())
	}
	return nil
}

// switchPCI is an NVSwitch's address as the driver gives it: zeros for one that the
// machine does not see.
func (b *board) switchPCI(n int) PCI {
	if len(b.switches) == 0 {
		return PCI{}
	}
	p, _ := parsePCI(path.Base(b.switches[n%len(b.switches)]))
	p.DeviceID = nvswitchDevice
	return p
}

// oneOfEach holds that no two devices have one address, and that none is a bridge.
func (b *board) oneOfEach(gpus []*gpu) error {
	seen := map[string]string{}
	add := func(what, address string) error {
		if other := seen[address]; other != "" {
			return fmt.Errorf("%s has the PCI address %s, and so has %s", what, address, other)
		}
		seen[address] = what
		return nil
	}
	var all [][]string
	for _, g := range gpus {
		if err := add(fmt.Sprintf("GPU %d", g.slot), g.pci.Sysfs()); err != nil {
			return err
		}
		all = append(all, g.path)
	}
	for _, n := range b.nics {
		if err := add(n.Name, path.Base(n.Path)); err != nil {
			return err
		}
		all = append(all, strings.Split(path.Dir(n.Path), "/"))
	}
	for n, s := range b.switches {
		if err := add(fmt.Sprintf("NVSwitch %d", n), path.Base(s)); err != nil {
			return err
		}
		all = append(all, strings.Split(path.Dir(s), "/"))
	}
	for _, bridges := range all {
		for _, address := range bridges[1:] {
			if what := seen[address]; what != "" {
				return fmt.Errorf("%s has the PCI address %s, which is a bridge's", what, address)
			}
		}
	}
	return nil
}

// near is the CPUs of a NUMA node, or of its whole socket; all of them where the
// node is none.
func (b *board) near(node int, socket bool) []int {
	var out []int
	for _, n := range b.nodes(node, socket) {
		out = append(out, b.cpus[n]...)
	}
	slices.Sort(out)
	return out
}

// nodes is the NUMA nodes that memory for a node's device is best taken from.
func (b *board) nodes(node int, socket bool) []int {
	var out []int
	for n := range b.numa {
		if node < 0 || n == node || socket && *b.numa[n].Socket == *b.numa[node].Socket {
			out = append(out, n)
		}
	}
	return out
}

// BoardState is the machine in a State.
type BoardState struct {
	// Named says that the world describes its machine; another one's CPUs are
	// made up.
	Named   bool       `json:"named"`
	Machine string     `json:"machine"`
	Vendor  string     `json:"vendor"`
	NUMA    []NUMASpec `json:"numa"`
	NICs    []NIC      `json:"nics"`
	// Paths of the GPUs, by index, and of the NVSwitches, below /sys/devices.
	Paths    []string    `json:"paths"`
	Switches []string    `json:"switches"`
	Fabric   *FabricSpec `json:"fabric,omitempty"`
	// Links are of each GPU, by index.
	Links [][]LinkState `json:"links"`
}

func (w *World) boardStateLocked() BoardState {
	b := w.board
	s := BoardState{Named: b.named, Machine: b.machine, Vendor: b.vendor, NUMA: b.numa, NICs: b.nics, Switches: b.switches, Fabric: b.fabric}
	for _, g := range w.gpus {
		s.Paths = append(s.Paths, strings.Join(g.path, "/")+"/"+g.pci.Sysfs())
		s.Links = append(s.Links, w.linkStatesLocked(g))
	}
	return s
}
