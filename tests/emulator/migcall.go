// SPDX-License-Identifier: Apache-2.0

package emulator

import (
	"cmp"
	"slices"
)

// Placement is a run of slots: memory slices of a GPU for a GPU instance, compute
// slices of a GPU instance for a compute instance.
type Placement struct {
	Start, Size uint32
}

// mayChangeLocked says whether the process may make and take away instances,
// change modes, and look at all of it.
func (p *process) mayChangeLocked(g *gpu) bool {
	return p.root && (p.can == nil || p.can(g.minor, -1, -1))
}

// seesAllLocked says whether the process may know what is on all of a GPU.
func (p *process) seesAllLocked(g *gpu) bool { return !g.mig.on || p.mayChangeLocked(g) }

// seesLocked says whether the process has access to a MIG device.
func (p *process) seesLocked(ci *computeInstance) bool {
	minor := ci.gi.gpu.minor
	return p.can == nil || p.can(minor, -1, -1) || p.can(minor, ci.gi.id, -1) && p.can(minor, ci.gi.id, ci.id)
}

// devicesLocked are a GPU's MIG devices by index, with gaps where none is: as the
// driver numbers them for who has access to all, and one after the other for who
// has access to some.
func (s *Session) devicesLocked(g *gpu) map[int]*computeInstance {
	all := g.computesLocked()
	slices.SortFunc(all, func(a, b *computeInstance) int { return cmp.Compare(a.index, b.index) })
	full := s.p.can == nil || s.p.can(g.minor, -1, -1)
	devices := map[int]*computeInstance{}
	for _, ci := range all {
		switch {
		case full:
			devices[ci.index] = ci
		case s.p.seesLocked(ci):
			devices[len(devices)] = ci
		}
	}
	return devices
}

func (s *Session) migIndexLocked(ci *computeInstance) int {
	for i, other := range s.devicesLocked(ci.gi.gpu) {
		if other == ci {
			return i
		}
	}
	return ci.index // its device node went meanwhile
}

// MIGMode says whether MIG is on now and after the next reset. A GPU that
// cannot do MIG answers NotSupported.
func (s *Session) MIGMode(h Handle) (current, pending bool, r Return) {
	modes, r := device(s, "nvmlDeviceGetMigMode", h, func(g *gpu) ([2]bool, Return) {
		if g.MIG == nil {
			return [2]bool{}, NotSupported
		}
		return [2]bool{g.mig.on, g.mig.pending}, Success
	})
	return modes[0], modes[1], r
}

// SetMIGMode turns MIG on or off. activation says whether the mode is in force
// now: on Ampere never, but for a mode that is already; the answer is
// ResetRequired then, or InUse where processes hold up a reset. Later GPUs change
// at once, or not at all while processes are on them. MIG is not turned off over
// instances.
func (s *Session) SetMIGMode(h Handle, mode uint32) (activation, r Return) {
	return device(s, "nvmlDeviceSetMigMode", h, func(g *gpu) (Return, Return) {
		w, on := s.p.w, mode == 1
		may := func() Return {
			switch {
			case mode > 1:
				return InvalidArgument
			case g.MIG == nil:
				return NotSupported
			case !s.p.mayChangeLocked(g):
				return NoPermission
			case w.unloaded:
				return DriverNotLoaded
			case g.lost || g.unplugged:
				return GPUIsLost
			case !on && len(g.mig.instances) > 0:
				return InUse
			case on != g.mig.on && !g.MIG.ModeNeedsReset && w.usersLocked(g, -1, -1):
				return InUse
			}
			return Success
		}
		var seconds float64
		if g.MIG != nil && !g.MIG.ModeNeedsReset && on != g.mig.on {
			seconds = w.mig.ModeSeconds
		}
		r := s.operateLocked(g, seconds, may, func() {
			switch {
			case !g.MIG.ModeNeedsReset || on == g.mig.on:
				w.setModeLocked(g, on)
			case w.usersLocked(g, -1, -1):
				activation = InUse
				g.mig.pending = on
			default:
				activation = ResetRequired
				g.mig.pending = on
			}
			w.touchLocked()
		})
		return activation, r
	})
}

// MaxMIGDevices is the most MIG devices that a GPU can carry; none unless MIG is
// on.
func (s *Session) MaxMIGDevices(h Handle) (int, Return) {
	return device(s, "nvmlDeviceGetMaxMigDeviceCount", h, func(g *gpu) (int, Return) {
		if g.MIG == nil || !g.mig.on {
			return 0, Success
		}
		return g.MIG.Devices, Success
	})
}

// mostProfiles is NVML_GPU_INSTANCE_PROFILE_COUNT of the newest nvml.h known:
// profiles beyond it are invalid, those below that a GPU lacks not supported.
const mostProfiles = 18

// MIGProfile is the profile that a NVML_GPU_INSTANCE_PROFILE_* stands for.
func (s *Session) MIGProfile(h Handle, enum uint32) (MIGProfile, Return) {
	return device(s, "nvmlDeviceGetGpuInstanceProfileInfoV", h, func(g *gpu) (MIGProfile, Return) {
		if enum >= mostProfiles {
			return MIGProfile{}, InvalidArgument
		}
		return g.profile(NotSupported, func(p *MIGProfile) bool { return p.Enum == enum })
	})
}

// MIGProfileByID is the profile with the number that creation takes.
func (s *Session) MIGProfileByID(h Handle, id uint32) (MIGProfile, Return) {
	return device(s, "nvmlDeviceGetGpuInstanceProfileInfoByIdV", h, func(g *gpu) (MIGProfile, Return) {
		return g.profile(InvalidArgument, func(p *MIGProfile) bool { return p.ID == id })
	})
}

func (g *gpu) profile(missing Return, match func(*MIGProfile) bool) (MIGProfile, Return) {
	if g.MIG == nil {
		return MIGProfile{}, NotSupported
	}
	for i := range g.MIG.Profiles {
		if match(&g.MIG.Profiles[i]) {
			return g.MIG.Profiles[i], Success
		}
	}
	return MIGProfile{}, missing
}

// byID is the profile of a number, nil where the GPU has none.
func (g *gpu) byID(id uint32) *MIGProfile {
	for i := range g.MIG.Profiles {
		if g.MIG.Profiles[i].ID == id {
			return &g.MIG.Profiles[i]
		}
	}
	return nil
}

// GPUInstancePlacements are the places that a profile's instances can have,
// whatever stands there.
func (s *Session) GPUInstancePlacements(h Handle, profile uint32) ([]Placement, Return) {
	return device(s, "nvmlDeviceGetGpuInstancePossiblePlacements_v2", h, func(g *gpu) ([]Placement, Return) {
		switch {
		case g.MIG == nil || s.p.w.mig.PlacementsNeedMode && !g.mig.on:
			return nil, NotSupported
		case !s.p.mayChangeLocked(g):
			return nil, NoPermission
		}
		p := g.byID(profile)
		if p == nil {
			return nil, InvalidArgument
		}
		var out []Placement
		for _, start := range p.Starts {
			out = append(out, Placement{start, p.Size})
		}
		return out, Success
	})
}

// inMode answers a privileged call about the instances of a GPU in MIG mode, for
// a profile by its number.
func inMode[T any](s *Session, call string, h Handle, profile uint32, answer func(g *gpu, p *MIGProfile) (T, Return)) (T, Return) {
	return device(s, call, h, func(g *gpu) (T, Return) {
		var none T
		if r := s.p.modeLocked(g); r != Success {
			return none, r
		}
		p := g.byID(profile)
		if p == nil {
			return none, InvalidArgument
		}
		return answer(g, p)
	})
}

// modeLocked says whether the process may deal with a GPU's instances.
func (p *process) modeLocked(g *gpu) Return {
	switch {
	case g.MIG == nil || !g.mig.on:
		return NotSupported
	case !p.mayChangeLocked(g):
		return NoPermission
	}
	return Success
}

// GPUInstanceCapacity is how many more instances of a profile can be made now.
func (s *Session) GPUInstanceCapacity(h Handle, profile uint32) (int, Return) {
	return inMode(s, "nvmlDeviceGetGpuInstanceRemainingCapacity", h, profile, func(g *gpu, p *MIGProfile) (int, Return) {
		return g.capacityLocked(p), Success
	})
}

// CreateGPUInstance makes a GPU instance of a profile by its number: at a place,
// or with nil wherever the driver likes, which is the end of the card. There is
// no room where anything that stands overlaps, the profile's count is reached or
// the media engines are given out.
func (s *Session) CreateGPUInstance(h Handle, profile uint32, at *Placement) (Handle, Return) {
	call := "nvmlDeviceCreateGpuInstance"
	if at != nil {
		call = "nvmlDeviceCreateGpuInstanceWithPlacement"
	}
	return inMode(s, call, h, profile, func(g *gpu, p *MIGProfile) (Handle, Return) {
		w := s.p.w
		if at != nil && (at.Size != p.Size || !slices.Contains(p.Starts, at.Start)) {
			return NoHandle, InvalidArgument
		}
		start := func() (uint32, bool) {
			if at != nil {
				return at.Start, g.fitsLocked(p, at.Start)
			}
			return g.roomLocked(p)
		}
		made := NoHandle
		r := s.operateLocked(g, w.mig.CreateSeconds, func() Return {
			if r := s.stillLocked(g); r != Success {
				return r
			}
			if _, ok := start(); !ok {
				return InsufficientResources
			}
			return Success
		}, func() {
			where, _ := start()
			made = w.createLocked(g, p, where).handle()
		})
		return made, r
	})
}

// stillLocked asks again, after a wait, what stands before any change.
func (s *Session) stillLocked(g *gpu) Return {
	switch {
	case s.p.w.unloaded:
		return DriverNotLoaded
	case g.lost || g.unplugged:
		return GPUIsLost
	}
	return s.p.modeLocked(g)
}

// DestroyGPUInstance takes a GPU instance away, but not over compute instances or
// processes.
func (s *Session) DestroyGPUInstance(gi Handle) Return {
	_, r := about(s, "nvmlGpuInstanceDestroy", gi, aboutInstance, func(t target) (struct{}, Return) {
		w := s.p.w
		return struct{}{}, s.operateLocked(t.g, w.mig.DestroySeconds, func() Return {
			if r := s.stillLocked(t.g); r != Success {
				return r
			}
			switch {
			case !slices.Contains(t.g.mig.instances, t.gi):
				return InvalidArgument
			case len(t.gi.computes) > 0 || w.usersLocked(t.g, t.gi.id, -1):
				return InUse
			}
			return Success
		}, func() { w.destroyLocked(t.gi) })
	})
	return r
}

// GPUInstances are those of a profile, by id.
func (s *Session) GPUInstances(h Handle, profile uint32) ([]Handle, Return) {
	return inMode(s, "nvmlDeviceGetGpuInstances", h, profile, func(g *gpu, p *MIGProfile) ([]Handle, Return) {
		var out []Handle
		for _, gi := range g.mig.instances {
			if gi.profile == p {
				out = append(out, gi.handle())
			}
		}
		return out, Success
	})
}

// GPUInstanceByID finds a GPU instance; who may not deal with all finds those
// that it has access to.
func (s *Session) GPUInstanceByID(h Handle, id uint32) (Handle, Return) {
	return device(s, "nvmlDeviceGetGpuInstanceById", h, func(g *gpu) (Handle, Return) {
		if g.MIG == nil || !g.mig.on {
			return NoHandle, NotSupported
		}
		gi := g.instanceLocked(int(int32(id)))
		if !s.p.mayChangeLocked(g) && (gi == nil || !slices.ContainsFunc(gi.computes, s.p.seesLocked)) {
			return NoHandle, NoPermission
		}
		if gi == nil {
			return NoHandle, NotFound
		}
		return gi.handle(), Success
	})
}

// InstanceInfo is what stands where. Parent is the GPU instance of a compute
// instance.
type InstanceInfo struct {
	Device    Handle
	Parent    Handle
	ID        uint32
	Profile   uint32 // the number that creation takes
	Placement Placement
}

// GPUInstanceInfo describes a GPU instance.
func (s *Session) GPUInstanceInfo(gi Handle) (InstanceInfo, Return) {
	return about(s, "nvmlGpuInstanceGetInfo", gi, aboutInstance, func(t target) (InstanceInfo, Return) {
		return InstanceInfo{
			Device: Handle(t.g.slot), Parent: NoHandle, ID: uint32(t.gi.id), Profile: t.gi.profile.ID,
			Placement: Placement{t.gi.start, t.gi.profile.Size},
		}, Success
	})
}

// ComputeProfileInfo is a compute profile in a GPU instance; engines are shared
// by all of the instance.
type ComputeProfileInfo struct {
	ComputeProfile
	In MIGProfile
}

// ComputeProfile is the profile that a NVML_COMPUTE_INSTANCE_PROFILE_* stands for
// in a GPU instance. There is one engine profile, 0.
func (s *Session) ComputeProfile(gi Handle, number, engines uint32) (ComputeProfileInfo, Return) {
	return about(s, "nvmlGpuInstanceGetComputeInstanceProfileInfoV", gi, aboutInstance, func(t target) (ComputeProfileInfo, Return) {
		if number >= mostComputeProfiles || engines > 0 {
			return ComputeProfileInfo{}, InvalidArgument
		}
		c, ok := t.g.compute(t.gi.profile, number)
		if !ok {
			return ComputeProfileInfo{}, NotSupported
		}
		return ComputeProfileInfo{c, *t.gi.profile}, Success
	})
}

// within answers a privileged call about a GPU instance, for a compute profile.
func within[T any](s *Session, call string, gi Handle, profile uint32, answer func(t target, c ComputeProfile) (T, Return)) (T, Return) {
	return about(s, call, gi, aboutInstance, func(t target) (T, Return) {
		var none T
		if !s.p.mayChangeLocked(t.g) {
			return none, NoPermission
		}
		if profile >= mostComputeProfiles {
			return none, InvalidArgument
		}
		c, ok := t.g.compute(t.gi.profile, profile)
		if !ok {
			return none, NotSupported
		}
		return answer(t, c)
	})
}

// ComputeCapacity is how many more compute instances of a profile a GPU instance
// has room for.
func (s *Session) ComputeCapacity(gi Handle, profile uint32) (int, Return) {
	return within(s, "nvmlGpuInstanceGetComputeInstanceRemainingCapacity", gi, profile, func(t target, c ComputeProfile) (int, Return) {
		n := 0
		for _, start := range c.Starts {
			if t.gi.computeFitsLocked(c, start) {
				n++
			}
		}
		return n, Success
	})
}

// ComputePlacements are the places that compute instances of a profile can have.
func (s *Session) ComputePlacements(gi Handle, profile uint32) ([]Placement, Return) {
	return within(s, "nvmlGpuInstanceGetComputeInstancePossiblePlacements", gi, profile, func(_ target, c ComputeProfile) ([]Placement, Return) {
		var out []Placement
		for _, start := range c.Starts {
			out = append(out, Placement{start, c.Slices})
		}
		return out, Success
	})
}

// CreateComputeInstance makes a compute instance: at a place, or with nil at the
// first that is free.
func (s *Session) CreateComputeInstance(gi Handle, profile uint32, at *Placement) (Handle, Return) {
	call := "nvmlGpuInstanceCreateComputeInstance"
	if at != nil {
		call = "nvmlGpuInstanceCreateComputeInstanceWithPlacement"
	}
	return within(s, call, gi, profile, func(t target, c ComputeProfile) (Handle, Return) {
		w := s.p.w
		starts := c.Starts
		if at != nil {
			if at.Size != c.Slices || !slices.Contains(c.Starts, at.Start) {
				return NoHandle, InvalidArgument
			}
			starts = []uint32{at.Start}
		}
		free := func() int {
			return slices.IndexFunc(starts, func(start uint32) bool { return t.gi.computeFitsLocked(c, start) })
		}
		made := NoHandle
		r := s.operateLocked(t.g, w.mig.CreateSeconds, func() Return {
			if r := s.stillLocked(t.g); r != Success {
				return r
			}
			switch {
			case !slices.Contains(t.g.mig.instances, t.gi):
				return InvalidArgument
			case free() < 0:
				return InsufficientResources
			}
			return Success
		}, func() { made = w.createComputeLocked(t.gi, c, starts[free()]).handle() })
		return made, r
	})
}

// DestroyComputeInstance takes a compute instance away, but not from under a
// process.
func (s *Session) DestroyComputeInstance(ci Handle) Return {
	_, r := about(s, "nvmlComputeInstanceDestroy", ci, aboutCompute, func(t target) (struct{}, Return) {
		w := s.p.w
		return struct{}{}, s.operateLocked(t.g, w.mig.DestroySeconds, func() Return {
			if r := s.stillLocked(t.g); r != Success {
				return r
			}
			switch {
			case !slices.Contains(t.gi.computes, t.ci):
				return InvalidArgument
			case w.usersLocked(t.g, t.gi.id, t.ci.id):
				return InUse
			}
			return Success
		}, func() { w.destroyComputeLocked(t.ci) })
	})
	return r
}

// ComputeInstances are those of a profile in a GPU instance, by id.
func (s *Session) ComputeInstances(gi Handle, profile uint32) ([]Handle, Return) {
	return within(s, "nvmlGpuInstanceGetComputeInstances", gi, profile, func(t target, c ComputeProfile) ([]Handle, Return) {
		var out []Handle
		for _, ci := range t.gi.computes {
			if ci.profile.ID == c.ID {
				out = append(out, ci.handle())
			}
		}
		return out, Success
	})
}

// ComputeInstanceByID finds a compute instance of a GPU instance; who may not deal
// with all finds those that it has access to.
func (s *Session) ComputeInstanceByID(gi Handle, id uint32) (Handle, Return) {
	return about(s, "nvmlGpuInstanceGetComputeInstanceById", gi, aboutInstance, func(t target) (Handle, Return) {
		ci := t.gi.computeLocked(int(int32(id)))
		if !s.p.mayChangeLocked(t.g) && (ci == nil || !s.p.seesLocked(ci)) {
			return NoHandle, NoPermission
		}
		if ci == nil {
			return NoHandle, NotFound
		}
		return ci.handle(), Success
	})
}

// ComputeInstanceInfo describes a compute instance.
func (s *Session) ComputeInstanceInfo(ci Handle) (InstanceInfo, Return) {
	return about(s, "nvmlComputeInstanceGetInfo_v2", ci, aboutCompute, func(t target) (InstanceInfo, Return) {
		return InstanceInfo{
			Device: Handle(t.g.slot), Parent: t.gi.handle(), ID: uint32(t.ci.id), Profile: t.ci.profile.ID,
			Placement: Placement{t.ci.start, t.ci.profile.Slices},
		}, Success
	})
}

// MIGDevice finds a GPU's MIG device by its index, among those that the process
// has access to.
func (s *Session) MIGDevice(h Handle, index uint32) (Handle, Return) {
	return device(s, "nvmlDeviceGetMigDeviceHandleByIndex", h, func(g *gpu) (Handle, Return) {
		switch {
		case g.MIG == nil:
			return NoHandle, NotSupported
		case index >= uint32(g.MIG.Devices):
			return NoHandle, InvalidArgument
		}
		ci := s.devicesLocked(g)[int(index)]
		if ci == nil {
			return NoHandle, NotFound
		}
		return ci.device(), Success
	})
}

func (s *Session) migByUUID(uuid string) (Handle, Return) {
	return node(s, "nvmlDeviceGetHandleByUUID", func(*World) (Handle, Return) {
		for _, g := range s.p.gpus {
			for _, ci := range g.computesLocked() {
				switch {
				case ci.uuid != uuid || !s.p.seesLocked(ci):
				case s.p.dead[g]:
					return NoHandle, GPUIsLost
				default:
					return ci.device(), Success
				}
			}
		}
		return NoHandle, NotFound
	})
}

// IsMIGDevice says whether a handle is a MIG device's.
func (s *Session) IsMIGDevice(h Handle) (bool, Return) {
	return about(s, "nvmlDeviceIsMigDeviceHandle", h, 0, func(t target) (bool, Return) { return t.ci != nil, Success })
}

// migDevice answers a call about a MIG device, and no GPU.
func migDevice[T any](s *Session, call string, h Handle, answer func(ci *computeInstance) T) (T, Return) {
	return about(s, call, h, 0, func(t target) (T, Return) {
		if t.ci == nil {
			var none T
			return none, InvalidArgument
		}
		return answer(t.ci), Success
	})
}

// GPUOfMIGDevice is the GPU that a MIG device is on.
func (s *Session) GPUOfMIGDevice(h Handle) (Handle, Return) {
	return migDevice(s, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", h, func(ci *computeInstance) Handle {
		return Handle(ci.gi.gpu.slot)
	})
}

// GPUInstanceID is the id of a MIG device's GPU instance.
func (s *Session) GPUInstanceID(h Handle) (int, Return) {
	return migDevice(s, "nvmlDeviceGetGpuInstanceId", h, func(ci *computeInstance) int { return ci.gi.id })
}

// ComputeInstanceID is the id of a MIG device's compute instance.
func (s *Session) ComputeInstanceID(h Handle) (int, Return) {
	return migDevice(s, "nvmlDeviceGetComputeInstanceId", h, func(ci *computeInstance) int { return ci.id })
}

// Attributes are what a MIG device has: its multiprocessors, and the GPU
// instance's engines and memory, which it shares.
type Attributes struct {
	SMs, Copy, Decode, Encode, JPEG, OFA uint32
	GPUSlices, ComputeSlices             uint32
	MemoryMiB                            uint64
}

// Attributes describes a MIG device. Of a GPU that has no such shares the driver
// says nothing.
func (s *Session) Attributes(h Handle) (Attributes, Return) {
	return about(s, "nvmlDeviceGetAttributes_v2", h, 0, func(t target) (Attributes, Return) {
		if t.ci == nil {
			return Attributes{}, NotSupported
		}
		p := t.gi.profile
		return Attributes{
			SMs: t.ci.profile.SMs, Copy: p.Copy, Decode: p.Decode, Encode: p.Encode, JPEG: p.JPEG, OFA: p.OFA,
			GPUSlices: p.Slices, ComputeSlices: t.ci.profile.Slices, MemoryMiB: p.MemoryMiB,
		}, Success
	})
}
