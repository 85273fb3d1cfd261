// SPDX-License-Identifier: Apache-2.0

package emulator

func (f *frame) putHandle(h Handle) { f.putU32(uint32(h)) }

func (f *frame) putPlacement(p Placement) { f.putU32(p.Start, p.Size) }

func putList[T any](f *frame, write func(T)) func([]T) {
	return func(list []T) {
		f.putInt(len(list))
		for _, v := range list {
			write(v)
		}
	}
}

// withU32 is a call with one number for an argument. Answers hold until modes or
// instances change, where nothing but the world decides them; what a process has
// access to may change by its device nodes alone.
func withU32[T any](static bool, ask func(s *Session, h Handle, n uint32) (T, Return), write func(*frame, T)) call {
	return call{static: static, serve: func(s *Session, f *frame) Return {
		n := f.u32()
		if f.bad {
			return InvalidArgument
		}
		v, r := ask(s, f.handle, n)
		return put(v, r, func(v T) { write(f, v) })
	}}
}

// plain is a call without arguments.
func plain[T any](static bool, ask func(s *Session, h Handle) (T, Return), write func(*frame, T)) call {
	return call{static: static, serve: func(s *Session, f *frame) Return {
		v, r := ask(s, f.handle)
		return put(v, r, func(v T) { write(f, v) })
	}}
}

// creation takes a profile's number and, with place, where.
func creation(create func(s *Session, h Handle, profile uint32, at *Placement) (Handle, Return), place bool) call {
	return call{serve: func(s *Session, f *frame) Return {
		profile := f.u32()
		var at *Placement
		if place {
			at = &Placement{f.u32(), f.u32()}
		}
		if f.bad {
			return InvalidArgument
		}
		h, r := create(s, f.handle, profile, at)
		return put(h, r, f.putHandle)
	}}
}

func putProfile(f *frame, p MIGProfile) {
	f.putU32(p.ID, p.Slices, p.Max, p.SMs, p.Copy, p.Decode, p.Encode, p.JPEG, p.OFA, bit(p.Display))
	f.putU64(p.MemoryMiB)
	f.putStr("MIG " + p.Name)
}

func putInfo(f *frame, i InstanceInfo) {
	f.putHandle(i.Device)
	f.putHandle(i.Parent)
	f.putU32(i.ID, i.Profile)
	f.putPlacement(i.Placement)
}

func putHandles(f *frame, list []Handle)       { putList(f, f.putHandle)(list) }
func putPlacements(f *frame, list []Placement) { putList(f, f.putPlacement)(list) }

var (
	gpuProfile     = withU32(true, (*Session).MIGProfile, putProfile)
	gpuPlacements  = withU32(true, (*Session).GPUInstancePlacements, putPlacements)
	computeInfo    = plain(true, (*Session).ComputeInstanceInfo, putInfo)
	computeProfile = call{static: true, serve: func(s *Session, f *frame) Return {
		number, engines := f.u32(), f.u32()
		if f.bad {
			return InvalidArgument
		}
		c, r := s.ComputeProfile(f.handle, number, engines)
		return put(c, r, func(c ComputeProfileInfo) {
			f.putU32(c.ID, c.Slices, uint32(len(c.Starts)), c.SMs, c.In.Copy, c.In.Decode, c.In.Encode, c.In.JPEG, c.In.OFA, bit(c.In.Display))
			f.putStr("MIG " + c.Name)
		})
	}}
)

func destruction(destroy func(*Session, Handle) Return) call {
	return call{serve: func(s *Session, f *frame) Return { return destroy(s, f.handle) }}
}

var migCalls = map[string]call{
	"nvmlDeviceGetMigMode": {static: true, serve: func(s *Session, f *frame) Return {
		current, pending, r := s.MIGMode(f.handle)
		return put([2]bool{current, pending}, r, func(v [2]bool) { f.putU32(bit(v[0]), bit(v[1])) })
	}},
	"nvmlDeviceSetMigMode": withU32(false, func(s *Session, h Handle, mode uint32) (Return, Return) {
		return s.SetMIGMode(h, mode)
	}, func(f *frame, activation Return) { f.putU32(uint32(activation)) }),

	"nvmlDeviceGetGpuInstanceProfileInfo":           gpuProfile,
	"nvmlDeviceGetGpuInstanceProfileInfoV":          gpuProfile,
	"nvmlDeviceGetGpuInstanceProfileInfoByIdV":      withU32(true, (*Session).MIGProfileByID, putProfile),
	"nvmlDeviceGetGpuInstancePossiblePlacements":    gpuPlacements,
	"nvmlDeviceGetGpuInstancePossiblePlacements_v2": gpuPlacements,
	"nvmlDeviceGetGpuInstanceRemainingCapacity":     withU32(true, (*Session).GPUInstanceCapacity, (*frame).putInt),
	"nvmlDeviceCreateGpuInstance":                   creation((*Session).CreateGPUInstance, false),
	"nvmlDeviceCreateGpuInstanceWithPlacement":      creation((*Session).CreateGPUInstance, true),
	"nvmlGpuInstanceDestroy":                        destruction((*Session).DestroyGPUInstance),
	"nvmlDeviceGetGpuInstances":                     withU32(true, (*Session).GPUInstances, putHandles),
	"nvmlDeviceGetGpuInstanceById":                  withU32(false, (*Session).GPUInstanceByID, (*frame).putHandle),
	"nvmlGpuInstanceGetInfo":                        plain(true, (*Session).GPUInstanceInfo, putInfo),

	"nvmlGpuInstanceGetComputeInstanceProfileInfo":        computeProfile,
	"nvmlGpuInstanceGetComputeInstanceProfileInfoV":       computeProfile,
	"nvmlGpuInstanceGetComputeInstanceRemainingCapacity":  withU32(true, (*Session).ComputeCapacity, (*frame).putInt),
	"nvmlGpuInstanceGetComputeInstancePossiblePlacements": withU32(true, (*Session).ComputePlacements, putPlacements),
	"nvmlGpuInstanceCreateComputeInstance":                creation((*Session).CreateComputeInstance, false),
	"nvmlGpuInstanceCreateComputeInstanceWithPlacement":   creation((*Session).CreateComputeInstance, true),
	"nvmlComputeInstanceDestroy":                          destruction((*Session).DestroyComputeInstance),
	"nvmlGpuInstanceGetComputeInstances":                  withU32(true, (*Session).ComputeInstances, putHandles),
	"nvmlGpuInstanceGetComputeInstanceById":               withU32(false, (*Session).ComputeInstanceByID, (*frame).putHandle),
	"nvmlComputeInstanceGetInfo":                          computeInfo,
	"nvmlComputeInstanceGetInfo_v2":                       computeInfo,

	"nvmlDeviceGetMaxMigDeviceCount":               deviceInt((*Session).MaxMIGDevices),
	"nvmlDeviceGetMigDeviceHandleByIndex":          withU32(false, (*Session).MIGDevice, (*frame).putHandle),
	"nvmlDeviceGetDeviceHandleFromMigDeviceHandle": plain(true, (*Session).GPUOfMIGDevice, (*frame).putHandle),
	"nvmlDeviceIsMigDeviceHandle": plain(true, func(s *Session, h Handle) (uint32, Return) {
		is, r := s.IsMIGDevice(h)
		return bit(is), r
	}, func(f *frame, v uint32) { f.putU32(v) }),
	"nvmlDeviceGetGpuInstanceId":     deviceInt((*Session).GPUInstanceID),
	"nvmlDeviceGetComputeInstanceId": deviceInt((*Session).ComputeInstanceID),
	"nvmlDeviceGetAttributes":        attributes,
	"nvmlDeviceGetAttributes_v2":     attributes,
}

var attributes = plain(true, (*Session).Attributes, func(f *frame, a Attributes) {
	f.putU32(a.SMs, a.Copy, a.Decode, a.Encode, a.JPEG, a.OFA, a.GPUSlices, a.ComputeSlices)
	f.putU64(a.MemoryMiB)
})
