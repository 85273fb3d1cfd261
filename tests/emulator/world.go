// SPDX-License-Identifier: Apache-2.0

package emulator

import (
	"cmp"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// NotMIG is what the driver puts where a GPU or compute instance's number
// would stand and MIG is off.
const NotMIG = 0xFFFFFFFF

// XidGPULost is the Xid that a GPU raises when it falls off the bus.
const XidGPULost = 79

// World is one node's GPUs and the driver that speaks for them. Its methods
// are what the operator of the emulator does to the hardware; what programs
// see of it they get through a Session.
type World struct {
	cuda  int
	dmem  bool     // the kernel has the dmem controller
	lacks []string // Spec.NotSupported
	board *board
	mig   MIGSpec
	sleep func(d time.Duration, dead <-chan struct{})
	boot  uint64 // names this world

	mu sync.Mutex
	// Guarded by mu:
	driver   string
	unloaded bool
	gpus     []*gpu
	procs    []*Process
	busy     []busyTime
	faults   []*fault
	sessions map[*process]struct{}
	books    map[containerOn]uint64 // the most that each container has had, in bytes
	mps      map[int]*mpsServer     // by PID
	sets     map[uint32]*eventSet
	lastSet  uint32
	shares   map[uint64]*share
	lastID   uint64
	ops      []MIGOp // the last changes of modes and instances
	lastOp   uint64
	layout   uint64        // counts the same
	changed  chan struct{} // closed, and a new one made, at every change that somebody may wait for
	// generation numbers the states that static answers depend on; it is
	// copied into every session's page.
	generation uint64

	slots    map[string]int
	names    []string
	ended    []uint64 // calls of sessions that have ended, by slot
	baseline []uint64 // calls before the last reset, by slot
}

// gpu is one GPU. Its slot, the place in World.gpus, is its handle and never
// changes.
type gpu struct {
	*Model
	slot  int
	uuid  string
	minor int
	pci   PCI
	path  []string // the host bridge, then each bridge
	numa  int      // -1 is none
	wires []wire   // by link; guarded by the world's mu
	major int      // of the compute capability
	cc    int      // minor of the compute capability

	// charged is what programs have allocated through CUDA, and peak the most
	// that was ever used since the last ResetPeak; both in bytes.
	charged, peak uint64
	// limits are of cgroups, and dmemMin is what those above them guarantee, by name
	// and in bytes.
	limits  []*limit
	dmemMin map[string]uint64

	ecc       bool
	lost      bool
	unplugged bool
	health    Health
	timeSlice TimeSlice
	setup     Setup
	mig       mig
}

// PCI is a GPU's place on the PCI bus and its identity there, device and
// subsystem with the vendor in the low half, as NVML gives them.
type PCI struct {
	Domain, Bus, Device uint32
	DeviceID            uint32
	SubsystemID         uint32
}

// String is the address as NVML writes it, 00000000:07:00.0.
func (p PCI) String() string { return fmt.Sprintf("%08X:%02X:%02X.0", p.Domain, p.Bus, p.Device) }

// Sysfs is the address as the kernel writes it, 0000:07:00.0.
func (p PCI) Sysfs() string { return fmt.Sprintf("%04x:%02x:%02x.0", p.Domain, p.Bus, p.Device) }

// parsePCI reads an address in any of the forms that the driver takes:
// domain:bus:device.function with a domain of 4 or 8 digits, or none.
func parsePCI(s string) (PCI, bool) {
	s, function, ok := strings.Cut(s, ".")
	if ok && function != "0" {
		return PCI{}, false
	}
	parts := strings.Split(s, ":")
	if len(parts) == 2 {
		parts = append([]string{"0"}, parts...)
	}
	if len(parts) != 3 {
		return PCI{}, false
	}
	var n [3]uint32
	for i, p := range parts {
		v, err := strconv.ParseUint(p, 16, 32)
		if err != nil {
			return PCI{}, false
		}
		n[i] = uint32(v)
	}
	return PCI{Domain: n[0], Bus: n[1], Device: n[2]}, true
}

// TimeSlice is how long a process may keep a GPU from the next one, in the
// steps of nvidia-smi compute-policy.
type TimeSlice uint32

// The steps that the driver knows.
const (
	TimeSliceDefault TimeSlice = iota
	TimeSliceShort
	TimeSliceMedium
	TimeSliceLong
)

func (t TimeSlice) String() string {
	return [...]string{"default", "short", "medium", "long"}[t]
}

// New makes the world of a Spec.
func New(spec Spec) (*World, error) {
	spec, err := spec.onTopology()
	if err != nil {
		return nil, err
	}
	spec = spec.withDefaults()
	if err := spec.validate(); err != nil {
		return nil, err
	}
	cuda, err := cudaNumber(spec.CUDA)
	if err != nil {
		return nil, err
	}
	w := &World{
		driver:   spec.Driver,
		cuda:     cuda,
		dmem:     spec.Dmem,
		lacks:    spec.NotSupported,
		mig:      spec.MIG,
		sleep:    sleep,
		sessions: map[*process]struct{}{},
		books:    map[containerOn]uint64{},
		mps:      map[int]*mpsServer{},
		sets:     map[uint32]*eventSet{},
		shares:   map[uint64]*share{},
		changed:  make(chan struct{}),
		slots:    map[string]int{},
		ended:    make([]uint64, PageWords),
		baseline: make([]uint64, PageWords),
	}
	var b [8]byte
	rand.Read(b[:])
	w.boot = binary.LittleEndian.Uint64(b[:])
	w.generation = w.boot // so that no answer of an earlier world holds

	for i := range spec.Count {
		g, err := newGPU(spec, i)
		if err != nil {
			return nil, err
		}
		w.gpus = append(w.gpus, g)
	}
	for i, g := range w.gpus {
		for _, other := range w.gpus[:i] {
			switch {
			case g.uuid == other.uuid:
				return nil, fmt.Errorf("GPUs %d and %d have one UUID, %s", other.slot, i, g.uuid)
			case g.minor == other.minor:
				return nil, fmt.Errorf("GPUs %d and %d have one minor, %d", other.slot, i, g.minor)
			case g.pci.String() == other.pci.String():
				return nil, fmt.Errorf("GPUs %d and %d have one PCI address, %s", other.slot, i, g.pci)
			}
		}
	}
	if err := layWires(spec, w.gpus); err != nil {
		return nil, err
	}
	if w.board, err = newBoard(spec, w.gpus); err != nil {
		return nil, err
	}
	return w, nil
}

func newGPU(spec Spec, index int) (*gpu, error) {
	var o GPUSpec
	if at := slices.IndexFunc(spec.GPUs, func(g GPUSpec) bool { return g.Index == index }); at >= 0 {
		o = spec.GPUs[at]
	}
	name := spec.Model
	if o.Model != "" {
		name = o.Model
	}
	m, err := LoadModel(name)
	if err != nil {
		return nil, fmt.Errorf("GPU %d: %w", index, err)
	}
	if o.MemoryMiB != 0 {
		m.MemoryMiB = o.MemoryMiB
	}
	if o.ReservedMiB != 0 {
		m.ReservedMiB = o.ReservedMiB
	}
	if m.ReservedMiB >= m.MemoryMiB {
		return nil, fmt.Errorf("GPU %d: %d MiB reserved of %d MiB leave nothing", index, m.ReservedMiB, m.MemoryMiB)
	}
	if spec.ContextMiB != 0 {
		m.ContextMiB = spec.ContextMiB
	}
	if m.ContextMiB == 0 {
		m.ContextMiB = defaultContextMiB
	}
	m.NotSupported = slices.Concat(m.NotSupported, o.NotSupported)
	if err := checkCalls(m.NotSupported); err != nil {
		return nil, fmt.Errorf("GPU %d: %w", index, err)
	}
	g := &gpu{Model: m, slot: index, ecc: o.ECC == nil || *o.ECC, lost: o.Lost, unplugged: o.Unplugged, uuid: o.UUID, minor: index}
	if _, err := fmt.Sscanf(m.ComputeCapability, "%d.%d", &g.major, &g.cc); err != nil {
		return nil, fmt.Errorf("model %s: compute capability %q: %w", name, m.ComputeCapability, err)
	}
	if o.MIG && m.MIG == nil {
		return nil, fmt.Errorf("GPU %d: model %s cannot do MIG", index, name)
	}
	g.mig.on, g.mig.pending = o.MIG, o.MIG
	g.setup = freshSetup(g.ecc, true)
	if g.uuid == "" {
		g.uuid = uuid(spec.Seed, index)
	}
	if spec.Minors == "reversed" {
		g.minor = spec.Count - 1 - index
	}
	if o.Minor != nil {
		g.minor = *o.Minor
	}
	// Few GPUs are spread over the board as on real ones, and the second half
	// hangs off the second CPU.
	g.pci = PCI{Bus: buses[index*MaxGPUs/spec.Count]}
	if o.PCI != "" {
		p, ok := parsePCI(o.PCI)
		if !ok {
			return nil, fmt.Errorf("GPU %d: pci %q: want an address such as 00000000:07:00.0", index, o.PCI)
		}
		g.pci = p
	}
	if o.Path != "" {
		bridges, device, err := splitPath(o.Path)
		if err != nil {
			return nil, fmt.Errorf("GPU %d: %w", index, err)
		}
		p, ok := parsePCI(device)
		if !ok || o.PCI != "" && p.String() != g.pci.String() {
			return nil, fmt.Errorf("GPU %d: path %q: it does not end at a GPU, or at another one than pci says", index, o.Path)
		}
		g.pci, g.path = p, bridges
	}
	g.pci.DeviceID, g.pci.SubsystemID = m.PCIDevice, m.PCISubsystem
	if spec.Count > 1 && index >= spec.Count/2 {
		g.numa = 1
	}
	if o.NUMA != nil {
		g.numa = *o.NUMA
	}
	return g, nil
}

// Boot names this world: handles do not outlive it.
func (w *World) Boot() uint64 { return w.boot }

// DriverVersion is the driver's version, such as 580.159.03.
func (w *World) DriverVersion() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.driver
}

// Unload takes the driver out of the kernel: every call answers
// DriverNotLoaded. It refuses while a process has the driver initialised or
// memory on a GPU, and names all of them.
func (w *World) Unload() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.unloaded {
		return fmt.Errorf("unload the driver: %w", DriverNotLoaded)
	}
	if pids := w.clientsLocked(); len(pids) > 0 {
		return fmt.Errorf("unload the driver: %w by processes %v", InUse, pids)
	}
	w.unloaded = true
	for _, g := range w.gpus {
		w.clearMIGLocked(g)
	}
	w.touchLocked()
	return nil
}

// clientsLocked are the PIDs of the programs that have the driver open, and of
// all that have memory on a GPU.
func (w *World) clientsLocked() []int {
	var pids []int
	for p := range w.sessions {
		if p.refs > 0 {
			pids = append(pids, p.pid)
		}
	}
	for _, p := range w.processesLocked() {
		pids = append(pids, p.PID)
	}
	slices.Sort(pids)
	return slices.Compact(pids)
}

// Upgrade puts another version in place of a driver that is not loaded.
func (w *World) Upgrade(version string) error {
	if !driverVersion.MatchString(version) {
		return fmt.Errorf("driver %q: want a version such as 580.159.03", version)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.unloaded {
		return fmt.Errorf("driver %s: %w: %s is loaded", version, InUse, w.driver)
	}
	w.driver = version
	return nil
}

// Load puts the driver into the kernel again. GPUs begin anew, but for those
// that are lost, which it does not find the way back to.
func (w *World) Load() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.unloaded {
		return fmt.Errorf("driver %s is loaded", w.driver)
	}
	w.unloaded = false
	for _, g := range w.gpus {
		w.freshLocked(g, false)
	}
	w.touchLocked()
	return nil
}

// touchLocked marks a change: answers that programs have kept are stale, and
// whoever waits looks again.
func (w *World) touchLocked() {
	w.generation++
	for p := range w.sessions {
		atomic.StoreUint64(&p.page[0], w.generation)
	}
	w.wakeLocked()
}

// gpuLocked is a GPU that is plugged in.
func (w *World) gpuLocked(index int) (*gpu, error) {
	if index < 0 || index >= len(w.gpus) {
		return nil, fmt.Errorf("GPU %d: %w (the world has GPUs 0 to %d)", index, NotFound, len(w.gpus)-1)
	}
	if w.gpus[index].unplugged {
		return nil, fmt.Errorf("GPU %d: %w: it is not plugged in", index, NotFound)
	}
	return w.gpus[index], nil
}

// Lose drops a GPU off the bus: whoever listens gets Xid 79, and from then on
// every call about it answers GPUIsLost. Its processes lose their memory with
// it.
func (w *World) Lose(index int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	g, err := w.gpuLocked(index)
	if err != nil {
		return err
	}
	if g.lost {
		return fmt.Errorf("GPU %d: %w already", index, GPUIsLost)
	}
	w.raiseLocked(place{g.slot, -1, -1}, EventXid, XidGPULost)
	w.loseLocked(g)
	return nil
}

func (w *World) loseLocked(g *gpu) {
	g.lost = true
	w.vanishLocked(g)
}

// vanishLocked takes a GPU from its processes and from every session, which
// finds it again only by a new Init.
func (w *World) vanishLocked(g *gpu) {
	for p := range w.sessions {
		p.dead[g] = true
		maps.DeleteFunc(p.charged, func(at place, _ uint64) bool { return at.gpu == g.slot })
	}
	maps.DeleteFunc(w.shares, func(_ uint64, s *share) bool { return s.gpu == g })
	g.charged = 0
	w.procs = slices.DeleteFunc(w.procs, func(p *Process) bool { return p.GPU == g.slot })
	w.touchLocked()
}

// Restore brings a lost GPU back, empty, as a power cycle does. Sessions that
// knew it while it was lost find it again only by a new Init.
func (w *World) Restore(index int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	g, err := w.gpuLocked(index)
	if err != nil {
		return err
	}
	if !g.lost {
		return fmt.Errorf("GPU %d is not lost", index)
	}
	g.lost = false
	w.freshLocked(g, false)
	w.touchLocked()
	return nil
}

// Reset makes a GPU begin anew, as nvidia-smi --gpu-reset does. It refuses a
// GPU that has processes, and a lost one, which no software reaches.
func (w *World) Reset(index int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	g, err := w.gpuLocked(index)
	if err != nil {
		return err
	}
	if g.lost {
		return fmt.Errorf("reset GPU %d: %w", index, GPUIsLost)
	}
	var pids []int
	for _, p := range w.processesLocked() {
		if p.GPU == index {
			pids = append(pids, p.PID)
		}
	}
	if len(pids) > 0 {
		return fmt.Errorf("reset GPU %d: %w by processes %v", index, InUse, slices.Compact(pids))
	}
	if g.mig.working {
		return fmt.Errorf("reset GPU %d: %w: an instance is being made or taken away", index, InUse)
	}
	w.noteLocked(MIGOp{GPU: g.slot, Op: "reset", CI: -1, GI: -1})
	w.freshLocked(g, true)
	w.touchLocked()
	return nil
}

// Unplug takes a GPU out of the machine. Sessions that have it get GPUIsLost
// from every call about it, without an Xid; a new Init does not find it, and
// numbers the others without it.
func (w *World) Unplug(index int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	g, err := w.gpuLocked(index)
	if err != nil {
		return err
	}
	g.unplugged = true
	w.clearMIGLocked(g)
	w.vanishLocked(g)
	return nil
}

// Plug puts an unplugged GPU back into its place, sound and empty. Sessions
// find it by a new Init.
func (w *World) Plug(index int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if g, err := w.gpuLocked(index); err == nil {
		return fmt.Errorf("GPU %d (%s) is plugged in", index, g.uuid)
	} else if index < 0 || index >= len(w.gpus) {
		return err
	}
	g := w.gpus[index]
	g.unplugged, g.lost = false, false
	w.freshLocked(g, false)
	w.touchLocked()
	return nil
}

// State is what `gpu-emulator show` prints: all of the world at one moment.
type State struct {
	Driver    string     `json:"driver"`
	Loaded    bool       `json:"loaded"`
	CUDA      int        `json:"cuda"`
	GPUs      []GPUState `json:"gpus"`
	Processes []Process  `json:"processes"`
	// MPS are the MPS servers.
	MPS []MPSServer `json:"mps,omitempty"`
	// Parked are the processes that are locked, checkpointed, or broken by that.
	Parked   []Parked `json:"parked,omitempty"`
	Faults   []Fault  `json:"faults"`
	Sessions []int    `json:"sessions"` // PIDs of the programs that have the driver open
	// Board is the machine, with the links of its GPUs.
	Board BoardState `json:"board"`
	// DmemMin is what cgroups guarantee to those below them, because a soft limit was
	// set there once; by GPU and Name.
	DmemMin []DmemMin `json:"dmemMin,omitempty"`
	// Limits are those of cgroups, by GPU and Name.
	Limits []CgroupLimit `json:"limits,omitempty"`
	// Books are the most that the processes of each container have had together, also
	// of containers that have ended.
	Books []ContainerUse `json:"books,omitempty"`
	// MIGOps are the last changes of modes and instances, in the order they took
	// effect.
	MIGOps []MIGOp `json:"migOps"`
}

// DmemMin is the dmem.min of a cgroup for a GPU.
type DmemMin struct {
	GPU    int    `json:"gpu"`
	Cgroup string `json:"cgroup"` // its Name
	Bytes  uint64 `json:"bytes"`
}

// CgroupLimit is the limit of a cgroup on a GPU, in bytes.
type CgroupLimit struct {
	GPU    int    `json:"gpu"`
	Cgroup string `json:"cgroup"` // its Name
	Soft   uint64 `json:"soft"`
	Hard   uint64 `json:"hard"`
}

// ContainerUse is the most that a container has had on a GPU, in bytes.
type ContainerUse struct {
	Container string `json:"container"`
	GPU       int    `json:"gpu"`
	Peak      uint64 `json:"peak"`
}

// GPUState is one GPU in a State.
type GPUState struct {
	Index       int    `json:"index"`
	Minor       int    `json:"minor"`
	UUID        string `json:"uuid"`
	PCI         string `json:"pci"`
	PCIDevice   PCIID  `json:"pciDevice"`
	Subsystem   PCIID  `json:"pciSubsystem"`
	Model       string `json:"model"`
	MemoryMiB   uint64 `json:"memoryMiB"`
	ReservedMiB uint64 `json:"reservedMiB"`
	UsedMiB     uint64 `json:"usedMiB"`
	PeakMiB     uint64 `json:"peakMiB"`
	NUMA        int    `json:"numa"`
	TimeSlice   string `json:"timeSlice"`
	Lost        bool   `json:"lost"`
	Unplugged   bool   `json:"unplugged"`
	ECC         bool   `json:"ecc"`
	Health      Health `json:"health"`
	Setup       Setup  `json:"setup"`
	// MIG is nil where the card cannot do it.
	MIG *MIGState `json:"mig,omitempty"`
}

// PCIID is a device's number with its vendor's in the low half, written as
// the field writes it: 0x233010DE.
type PCIID uint32

// MarshalText writes the number in hexadecimal.
func (id PCIID) MarshalText() ([]byte, error) { return fmt.Appendf(nil, "0x%08X", uint32(id)), nil }

// UnmarshalText reads the number back.
func (id *PCIID) UnmarshalText(text []byte) error {
	v, err := strconv.ParseUint(string(text), 0, 32)
	*id = PCIID(v)
	return err
}

// State returns a copy of all there is to see, in a fixed order.
func (w *World) State() State {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.buryLocked()
	s := State{Driver: w.driver, Loaded: !w.unloaded, CUDA: w.cuda, Processes: w.processesLocked(), MPS: w.mpsServersLocked(), Parked: w.parkedLocked(), Board: w.boardStateLocked(), MIGOps: slices.Clone(w.ops)}
	for _, g := range w.gpus {
		s.GPUs = append(s.GPUs, GPUState{
			Index: g.slot, Minor: g.minor, UUID: g.uuid,
			PCI: g.pci.String(), PCIDevice: PCIID(g.pci.DeviceID), Subsystem: PCIID(g.pci.SubsystemID),
			Model: g.Name, MemoryMiB: g.MemoryMiB, ReservedMiB: g.ReservedMiB, UsedMiB: w.usedLocked(g) >> 20, PeakMiB: g.peak >> 20,
			NUMA: g.numa, TimeSlice: g.timeSlice.String(), Lost: g.lost, Unplugged: g.unplugged, ECC: g.ecc, Health: g.health, Setup: g.setup,
			MIG: w.migStateLocked(g, s.Processes),
		})
	}
	for _, g := range w.gpus {
		for _, name := range slices.Sorted(maps.Keys(g.dmemMin)) {
			s.DmemMin = append(s.DmemMin, DmemMin{g.slot, name, g.dmemMin[name]})
		}
	}
	for _, g := range w.gpus {
		for _, l := range g.limits {
			s.Limits = append(s.Limits, CgroupLimit{g.slot, l.group.Name(), l.soft, l.hard})
		}
	}
	slices.SortFunc(s.Limits, func(a, b CgroupLimit) int {
		return cmp.Or(cmp.Compare(a.GPU, b.GPU), strings.Compare(a.Cgroup, b.Cgroup))
	})
	for at, peak := range w.books {
		s.Books = append(s.Books, ContainerUse{at.container, at.gpu, peak})
	}
	slices.SortFunc(s.Books, func(a, b ContainerUse) int {
		return cmp.Or(strings.Compare(a.Container, b.Container), cmp.Compare(a.GPU, b.GPU))
	})
	for _, f := range w.faults {
		s.Faults = append(s.Faults, f.Fault)
	}
	for p := range w.sessions {
		if p.refs > 0 {
			s.Sessions = append(s.Sessions, p.pid)
		}
	}
	slices.Sort(s.Sessions)
	return s
}
