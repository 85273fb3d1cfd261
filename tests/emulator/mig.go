// SPDX-License-Identifier: Apache-2.0

package emulator

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"math/bits"
	"slices"
	"time"
)

// MIGSpec says how the driver of a world deals with MIG.
type MIGSpec struct {
	// Seconds that the hardware takes for one call that makes or takes away a GPU
	// instance or a compute instance, and for a change of mode (by the call where
	// it is at once, by the reset where one is needed). A GPU does one at a time;
	// all else goes on meanwhile. Default 0.
	CreateSeconds  float64 `yaml:"createSeconds"`
	DestroySeconds float64 `yaml:"destroySeconds"`
	ModeSeconds    float64 `yaml:"modeSeconds"`
	// PlacementsNeedMode makes the driver tell placements only while MIG is on,
	// as some do.
	PlacementsNeedMode bool `yaml:"placementsNeedMode"`
}

func (s MIGSpec) validate() error {
	for name, v := range map[string]float64{"createSeconds": s.CreateSeconds, "destroySeconds": s.DestroySeconds, "modeSeconds": s.ModeSeconds} {
		if !(v >= 0 && v <= 3600) {
			return fmt.Errorf("mig: %s %v: want 0 to 3600 seconds", name, v)
		}
	}
	return nil
}

// mig is what a GPU has of MIG beside its table; guarded by World.mu.
type mig struct {
	on, pending bool
	instances   []*gpuInstance // by id
	// mirror turns over the tree that ids are taken from, see gpuInstanceID;
	// epoch counts how often it was drawn.
	mirror uint32
	epoch  uint64
	// working says that the hardware is at something that takes its time.
	working bool
}

// gpuInstance is a GPU instance; guarded by World.mu.
type gpuInstance struct {
	gpu      *gpu
	id       int
	serial   uint64
	profile  *MIGProfile
	start    uint32             // memory slice
	computes []*computeInstance // by id
}

// computeInstance is a compute instance, which is what a program has as a MIG
// device; guarded by World.mu.
type computeInstance struct {
	gi      *gpuInstance
	id      int
	serial  uint64
	profile ComputeProfile
	start   uint32 // compute slice within the GPU instance
	index   int    // among the GPU's MIG devices; it stays for life
	uuid    string
}

// ComputeProfile is a kind of compute instance of some GPU instance. Its number
// for creation is that of its NVML_COMPUTE_INSTANCE_PROFILE_*, as on all cards
// so far.
type ComputeProfile struct {
	Name   string // without the word MIG: 1c.3g.40gb, or 3g.40gb for the whole of it
	ID     uint32
	Slices uint32
	SMs    uint32
	// Starts are the compute slices an instance may begin at; as many can stand.
	Starts []uint32
}

// mostComputeProfiles is NVML_COMPUTE_INSTANCE_PROFILE_COUNT of the newest
// nvml.h known.
const mostComputeProfiles = 9

// computeSlices are what NVML_COMPUTE_INSTANCE_PROFILE_* stand for, in order; 0
// is a profile that no card of the models has.
var computeSlices = [mostComputeProfiles]uint32{1, 2, 3, 4, 7, 0, 0, 0, 0}

// compute is a GPU instance's compute profile of a number. Which there are, and
// where, is as nvidia-smi mig -lcip and -lcipp list them: the whole, and parts
// that fit twice or leave at most one slice; a part begins at a multiple of its
// size, one of three slices at a multiple of four.
func (g *gpu) compute(p *MIGProfile, number uint32) (ComputeProfile, bool) {
	if number >= mostComputeProfiles {
		return ComputeProfile{}, false
	}
	n := computeSlices[number]
	if n == 0 || n > p.Slices || n < p.Slices && 2*n > p.Slices+1 {
		return ComputeProfile{}, false
	}
	c := ComputeProfile{Name: p.Name, ID: number, Slices: n, SMs: p.SMs}
	step := n
	if n == 3 {
		step = 4
	}
	if n < p.Slices {
		c.Name = fmt.Sprintf("%dc.%s", n, p.Name)
		c.SMs = g.sliceSMs(n)
	} else {
		step = n
	}
	for start := uint32(0); start+n <= p.Slices; start += step {
		c.Starts = append(c.Starts, start)
	}
	return c, true
}

// sliceSMs is what so many compute slices have: as many as the smallest GPU
// instance of that many.
func (g *gpu) sliceSMs(slices uint32) uint32 {
	var sms uint32
	for _, p := range g.MIG.Profiles {
		if p.Slices == slices && (sms == 0 || p.SMs < sms) {
			sms = p.SMs
		}
	}
	return sms
}

// engines are the media engines that a profile takes: of all instances
// together no more than the GPU has, which is what decides how many media
// extensions can stand.
func (p *MIGProfile) engines() [4]uint32 { return [4]uint32{p.Decode, p.Encode, p.JPEG, p.OFA} }

// engines are those of the GPU: an instance of all of it has them all.
func (t *MIGTable) engines() [4]uint32 {
	var most [4]uint32
	for i := range t.Profiles {
		for k, n := range t.Profiles[i].engines() {
			most[k] = max(most[k], n)
		}
	}
	return most
}

// fitsLocked says whether an instance can stand beside those that do. The place
// must be one of the profile's.
func (g *gpu) fitsLocked(p *MIGProfile, start uint32) bool {
	used := p.engines()
	var same uint32
	for _, gi := range g.mig.instances {
		if start < gi.start+gi.profile.Size && gi.start < start+p.Size {
			return false
		}
		if gi.profile.ID == p.ID {
			same++
		}
		for k, n := range gi.profile.engines() {
			used[k] += n
		}
	}
	for k, most := range g.MIG.engines() {
		if used[k] > most {
			return false
		}
	}
	return same < p.Max
}

// roomLocked is where the driver itself would put an instance: at the end of the
// card, whatever that leaves for others.
func (g *gpu) roomLocked(p *MIGProfile) (start uint32, ok bool) {
	for _, at := range p.Starts {
		if g.fitsLocked(p, at) && (!ok || at > start) {
			start, ok = at, true
		}
	}
	return start, ok
}

// capacityLocked is how many more instances of a profile can be made.
func (g *gpu) capacityLocked(p *MIGProfile) int {
	before := g.mig.instances
	defer func() { g.mig.instances = before }()
	n := 0
	for _, at := range p.Starts { // which do not overlap in any table
		if g.fitsLocked(p, at) {
			g.mig.instances = append(slices.Clone(g.mig.instances), &gpuInstance{profile: p, start: at})
			n++
		}
	}
	return n
}

// gpuInstanceID numbers a place. Ids are the nodes of a binary tree in the order
// of its levels, the whole card at its root and an eighth of it at its leaves, so
// that of two instances none is the other's ancestor. Which child is which half
// is drawn anew whenever the card has been empty: nobody can tell the place from
// the id.
func (g *gpu) gpuInstanceID(p *MIGProfile, start uint32) int {
	levels := bits.Len32(uint32(g.MIG.Slots)/p.Size) - 1
	index := start / p.Size
	id := 0
	for level := levels - 1; level >= 0; level-- {
		child := index >> level & 1
		child ^= g.mig.mirror >> id & 1
		id = 2*id + 1 + int(child)
	}
	return id
}

func (g *gpu) drawLocked() {
	g.mig.epoch++
	h := sha256.Sum256(fmt.Appendf(nil, "%s/%d", g.uuid, g.mig.epoch))
	g.mig.mirror = binary.LittleEndian.Uint32(h[:])
}

// migUUID names a compute instance by its place alone: made again, it has the
// same name.
func migUUID(gi *gpuInstance, start uint32, slices uint32) string {
	h := sha256.Sum256(fmt.Appendf(nil, "%s/%d:%d/%d:%d", gi.gpu.uuid, gi.start, gi.profile.Size, start, slices))
	h[6] = h[6]&0x0f | 0x50
	h[8] = h[8]&0x3f | 0x80
	return fmt.Sprintf("MIG-%x-%x-%x-%x-%x", h[0:4], h[4:6], h[6:8], h[8:10], h[10:16])
}

// createLocked makes a GPU instance; whether it can stand there has been asked.
func (w *World) createLocked(g *gpu, p *MIGProfile, start uint32) *gpuInstance {
	if len(g.mig.instances) == 0 {
		g.drawLocked()
	}
	gi := &gpuInstance{gpu: g, id: g.gpuInstanceID(p, start), profile: p, start: start}
	gi.serial = w.noteLocked(MIGOp{GPU: g.slot, Op: "create", Profile: p.Name, Start: int(start), CI: -1, GI: gi.id})
	g.mig.instances = append(g.mig.instances, gi)
	slices.SortFunc(g.mig.instances, func(a, b *gpuInstance) int { return cmp.Compare(a.id, b.id) })
	w.rearrangedLocked()
	return gi
}

// computeFitsLocked says whether a compute instance can stand beside those that
// do.
func (gi *gpuInstance) computeFitsLocked(c ComputeProfile, start uint32) bool {
	return !slices.ContainsFunc(gi.computes, func(ci *computeInstance) bool {
		return start < ci.start+ci.profile.Slices && ci.start < start+c.Slices
	})
}

// createComputeLocked makes a compute instance with the lowest free id.
func (w *World) createComputeLocked(gi *gpuInstance, c ComputeProfile, start uint32) *computeInstance {
	ci := &computeInstance{gi: gi, profile: c, start: start, uuid: migUUID(gi, start, c.Slices)}
	for slices.ContainsFunc(gi.computes, func(o *computeInstance) bool { return o.id == ci.id }) {
		ci.id++
	}
	taken := map[int]bool{}
	for _, other := range gi.gpu.computesLocked() {
		taken[other.index] = true
	}
	for taken[ci.index] {
		ci.index++
	}
	ci.serial = w.noteLocked(MIGOp{GPU: gi.gpu.slot, Op: "create", Profile: c.Name, Start: int(gi.start), CI: int(start), GI: gi.id})
	gi.computes = append(gi.computes, ci)
	slices.SortFunc(gi.computes, func(a, b *computeInstance) int { return cmp.Compare(a.id, b.id) })
	w.rearrangedLocked()
	return ci
}

func (w *World) destroyLocked(gi *gpuInstance) {
	g := gi.gpu
	g.mig.instances = slices.DeleteFunc(g.mig.instances, func(o *gpuInstance) bool { return o == gi })
	w.noteLocked(MIGOp{GPU: g.slot, Op: "destroy", Profile: gi.profile.Name, Start: int(gi.start), CI: -1, GI: gi.id, Of: gi.serial})
	w.rearrangedLocked()
}

func (w *World) destroyComputeLocked(ci *computeInstance) {
	gi := ci.gi
	gi.computes = slices.DeleteFunc(gi.computes, func(o *computeInstance) bool { return o == ci })
	w.noteLocked(MIGOp{GPU: gi.gpu.slot, Op: "destroy", Profile: ci.profile.Name, Start: int(gi.start), CI: int(ci.start), GI: gi.id, Of: ci.serial})
	w.rearrangedLocked()
}

// clearMIGLocked takes all instances from a GPU at once, as a reset does.
func (w *World) clearMIGLocked(g *gpu) {
	for len(g.mig.instances) > 0 {
		gi := g.mig.instances[0]
		for len(gi.computes) > 0 {
			w.destroyComputeLocked(gi.computes[0])
		}
		w.destroyLocked(gi)
	}
}

// setModeLocked puts a mode in force.
func (w *World) setModeLocked(g *gpu, on bool) {
	g.mig.pending = on
	if g.mig.on == on {
		return
	}
	g.mig.on = on
	op := "disable"
	if on {
		op = "enable"
	}
	w.noteLocked(MIGOp{GPU: g.slot, Op: op, CI: -1, GI: -1})
	w.rearrangedLocked()
}

// rearrangedLocked marks a change of modes or instances.
func (w *World) rearrangedLocked() {
	w.layout++
	w.touchLocked()
}

// Layout counts the changes of MIG modes and instances: whoever shows them
// elsewhere looks here whether there was one.
func (w *World) Layout() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.layout
}

// MIGOp is one change that took effect: of a mode, a GPU instance (CI is -1) or a
// compute instance (CI is its first slice).
type MIGOp struct {
	// Serial numbers the changes of a world; a creation's is the instance's own.
	Serial  uint64 `json:"serial"`
	GPU     int    `json:"gpu"`
	Op      string `json:"op"` // create, destroy, enable, disable, reset
	Profile string `json:"profile,omitempty"`
	Start   int    `json:"start"`
	CI      int    `json:"ci"`
	GI      int    `json:"gi"`           // id, -1 where it is about none
	Of      uint64 `json:"of,omitempty"` // of a destroy: the serial of what went
	// Seconds is what the hardware was at it, by the clock: on a busy machine more
	// than the world says that it takes.
	Seconds float64 `json:"seconds,omitempty"`
}

// MIGOps are the changes after one of them, by its serial, that the world still
// knows; 0 is all.
func (w *World) MIGOps(after uint64) []MIGOp {
	w.mu.Lock()
	defer w.mu.Unlock()
	i, _ := slices.BinarySearchFunc(w.ops, after+1, func(op MIGOp, serial uint64) int { return cmp.Compare(op.Serial, serial) })
	return slices.Clone(w.ops[i:])
}

// mostOps bounds the history of a world.
const mostOps = 10_000

func (w *World) noteLocked(op MIGOp) uint64 {
	w.lastOp++
	op.Serial = w.lastOp
	if len(w.ops) >= mostOps {
		w.ops = slices.Delete(w.ops, 0, mostOps/10)
	}
	w.ops = append(w.ops, op)
	return op.Serial
}

// computesLocked are a GPU's compute instances, by the ids.
func (g *gpu) computesLocked() []*computeInstance {
	var all []*computeInstance
	for _, gi := range g.mig.instances {
		all = append(all, gi.computes...)
	}
	return all
}

func (g *gpu) instanceLocked(id int) *gpuInstance {
	for _, gi := range g.mig.instances {
		if gi.id == id {
			return gi
		}
	}
	return nil
}

func (gi *gpuInstance) computeLocked(id int) *computeInstance {
	if gi == nil {
		return nil
	}
	for _, ci := range gi.computes {
		if ci.id == id {
			return ci
		}
	}
	return nil
}

// usersLocked says whether a process is on a GPU, or, with ids that are not
// negative, on an instance of it.
func (w *World) usersLocked(g *gpu, gi, ci int) bool {
	return slices.ContainsFunc(w.processesLocked(), func(p Process) bool {
		return p.GPU == g.slot && (gi < 0 || p.GI == gi) && (ci < 0 || p.CI == ci)
	})
}

// operateLocked does one thing to a GPU's instances or mode: as soon as the
// hardware is free, after the time that it takes. may is asked before and after
// that time; what it refuses does not happen. Waiting, it lets go of the world's
// mutex. A caller that dies waiting for its turn has not called; one that dies
// later is not gone before its call is done, which is at once then.
func (s *Session) operateLocked(g *gpu, seconds float64, may func() Return, do func()) Return {
	w := s.p.w
	for g.mig.working {
		changed := w.changed
		w.mu.Unlock()
		gone := false
		select {
		case <-changed:
		case <-s.p.done:
			gone = true
		}
		w.mu.Lock()
		if gone {
			return Unknown
		}
	}
	if r := may(); r != Success {
		return r
	}
	began := time.Now()
	if seconds > 0 {
		g.mig.working = true
		w.mu.Unlock()
		w.sleep(time.Duration(seconds*float64(time.Second)), s.p.done)
		w.mu.Lock()
		g.mig.working = false
		w.wakeLocked()
		if r := may(); r != Success {
			return r
		}
	}
	took, last := time.Since(began), w.lastOp
	do()
	if seconds > 0 && w.lastOp > last {
		w.ops[len(w.ops)-1].Seconds = took.Seconds()
	}
	return Success
}

// sleep lets some time pass, unless dead is closed before.
func sleep(d time.Duration, dead <-chan struct{}) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-dead:
	}
}

// CapabilityMinor is the minor of the device node that gives access to a GPU
// instance (ci -1) or a compute instance, by the GPU's own minor: the module
// numbers 15 GPU instances of 8 compute instances a GPU when it is loaded, after
// nodes 1 and 2, mig/config and mig/monitor.
func CapabilityMinor(gpu, gi, ci int) int { return 3 + (gpu*15+gi)*9 + ci + 1 }

// MIGState is a GPU's MIG side in a State; GPUs that cannot do MIG have none.
type MIGState struct {
	Enabled   bool               `json:"enabled"`
	Pending   bool               `json:"pending"` // the mode after the next reset
	Instances []GPUInstanceState `json:"instances"`
}

// GPUInstanceState is a GPU instance in a State.
type GPUInstanceState struct {
	ID      int    `json:"gi"`
	Profile string `json:"profile"`
	Start   int    `json:"start"` // in memory slices, like Size
	Size    int    `json:"size"`
	Minor   int    `json:"minor"`  // of the node that gives access to it
	Serial  uint64 `json:"serial"` // no other creation ever has it
	// Compute are the compute instances in it, by id.
	Compute []ComputeInstanceState `json:"computes"`
}

// ComputeInstanceState is a compute instance in a State.
type ComputeInstanceState struct {
	ID      int    `json:"ci"`
	Profile string `json:"profile"`
	Start   int    `json:"start"` // in compute slices of the GPU instance, like Size
	Size    int    `json:"size"`
	Minor   int    `json:"minor"`
	Serial  uint64 `json:"serial"`
	Index   int    `json:"index"` // among the GPU's MIG devices
	UUID    string `json:"uuid"`
	PIDs    []int  `json:"pids,omitempty"` // of the processes on it
}

func (w *World) migStateLocked(g *gpu, processes []Process) *MIGState {
	if g.MIG == nil {
		return nil
	}
	s := &MIGState{Enabled: g.mig.on, Pending: g.mig.pending, Instances: []GPUInstanceState{}}
	for _, gi := range g.mig.instances {
		i := GPUInstanceState{
			ID: gi.id, Profile: gi.profile.Name, Start: int(gi.start), Size: int(gi.profile.Size),
			Minor: CapabilityMinor(g.minor, gi.id, -1), Serial: gi.serial, Compute: []ComputeInstanceState{},
		}
		for _, ci := range gi.computes {
			c := ComputeInstanceState{
				ID: ci.id, Profile: ci.profile.Name, Start: int(ci.start), Size: int(ci.profile.Slices),
				Minor: CapabilityMinor(g.minor, gi.id, ci.id), Serial: ci.serial, Index: ci.index, UUID: ci.uuid,
			}
			for _, p := range processes {
				if p.GPU == g.slot && p.GI == gi.id && p.CI == ci.id {
					c.PIDs = append(c.PIDs, p.PID)
				}
			}
			c.PIDs = slices.Compact(c.PIDs)
			i.Compute = append(i.Compute, c)
		}
		s.Instances = append(s.Instances, i)
	}
	return s
}

// handLocked is a GPU whose MIG side the operator can change.
func (w *World) handLocked(index int) (*gpu, error) {
	g, err := w.gpuLocked(index)
	switch {
	case err != nil:
		return nil, err
	case g.MIG == nil:
		return nil, fmt.Errorf("GPU %d: MIG: %w", index, NotSupported)
	case w.unloaded:
		return nil, fmt.Errorf("GPU %d: MIG: %w", index, DriverNotLoaded)
	case g.lost:
		return nil, fmt.Errorf("GPU %d: MIG: %w", index, GPUIsLost)
	case g.mig.working:
		return nil, fmt.Errorf("GPU %d: MIG: %w: an operation is under way", index, InUse)
	}
	return g, nil
}

// SetMIG is the operator's hand: it puts a GPU in or out of MIG mode at once,
// whatever it needs otherwise, without faults and without delay. It refuses a GPU
// with processes, and to end the mode over instances.
func (w *World) SetMIG(index int, on bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	g, err := w.handLocked(index)
	switch {
	case err != nil:
		return err
	case w.usersLocked(g, -1, -1):
		return fmt.Errorf("GPU %d: %w by processes", index, InUse)
	case !on && len(g.mig.instances) > 0:
		return fmt.Errorf("GPU %d: %w: %d GPU instances stand", index, InUse, len(g.mig.instances))
	}
	w.setModeLocked(g, on)
	return nil
}

// CreateInstance is the operator's hand likewise: an instance of a profile, which
// may be a split such as 1c.3g.40gb, at a memory slice, with the first compute
// slice that is free; empty leaves out the compute instance.
func (w *World) CreateInstance(index int, profile string, start int, empty bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	g, err := w.handLocked(index)
	if err != nil {
		return err
	}
	fail := func(r Return) error { return fmt.Errorf("create %s at %d on GPU %d: %w", profile, start, index, r) }
	if !g.mig.on {
		return fail(NotSupported)
	}
	p, c := g.namedLocked(profile)
	if p == nil || start < 0 || !slices.Contains(p.Starts, uint32(start)) {
		return fail(InvalidArgument)
	}
	var gi *gpuInstance
	for _, old := range g.mig.instances {
		if old.profile == p && old.start == uint32(start) && !empty {
			gi = old // with room for one more, it may be
		}
	}
	if gi == nil {
		if !g.fitsLocked(p, uint32(start)) {
			return fail(InsufficientResources)
		}
		gi = w.createLocked(g, p, uint32(start))
	}
	if empty {
		return nil
	}
	for _, slice := range c.Starts {
		if gi.computeFitsLocked(c, slice) {
			w.createComputeLocked(gi, c, slice)
			return nil
		}
	}
	return fail(InsufficientResources)
}

// namedLocked finds the GPU instance profile and the compute profile that an
// instance's name stands for.
func (g *gpu) namedLocked(name string) (*MIGProfile, ComputeProfile) {
	for i := range g.MIG.Profiles {
		for number := range uint32(mostComputeProfiles) {
			if c, ok := g.compute(&g.MIG.Profiles[i], number); ok && c.Name == name {
				return &g.MIG.Profiles[i], c
			}
		}
	}
	return nil, ComputeProfile{}
}

// DestroyInstance is the operator's hand likewise: the GPU instance at a memory
// slot, with all in it. It refuses one that processes are on.
func (w *World) DestroyInstance(index, start int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	g, err := w.handLocked(index)
	if err != nil {
		return err
	}
	for _, gi := range g.mig.instances {
		if int(gi.start) != start {
			continue
		}
		if w.usersLocked(g, gi.id, -1) {
			return fmt.Errorf("destroy %s at %d on GPU %d: %w", gi.profile.Name, start, index, InUse)
		}
		for len(gi.computes) > 0 {
			w.destroyComputeLocked(gi.computes[0])
		}
		w.destroyLocked(gi)
		return nil
	}
	return fmt.Errorf("destroy the instance at %d on GPU %d: %w", start, index, NotFound)
}

// Reboot is the machine off and on again: no instance stands, MIG modes are what
// the cards keep of them, whatever else waits for a reset or a reboot has had it,
// lost GPUs are back and the driver is loaded. It refuses while programs have the
// driver open or processes are on a GPU, but for force, which ends them all.
// Sessions of programs that live on all the same find nothing initialised.
func (w *World) Reboot(force bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if pids := w.clientsLocked(); len(pids) > 0 && !force {
		return fmt.Errorf("reboot: %w by processes %v", InUse, pids)
	}
	for p := range w.sessions {
		w.releaseLocked(p)
		w.dropSetsLocked(p)
		p.refs = 0
	}
	clear(w.shares)
	w.procs = nil
	w.unloaded = false
	for _, g := range w.gpus {
		g.charged = 0
		g.lost = false
		if g.health.Recovery == RecoveryReboot {
			g.health.Recovery = RecoveryNone
		}
		w.freshLocked(g, false)
	}
	w.touchLocked()
	return nil
}
