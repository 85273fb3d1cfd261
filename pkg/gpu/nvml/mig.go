// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml/internal/ctxlock"
)

const (
	// mostProfiles bounds the loop over profile numbers. A driver ends it itself (after 18 GPU
	// instance profiles today, and 9 compute instance profiles); the bound is for a driver that
	// does not.
	mostProfiles = 256
	// mostReadings bounds how often the instances are read again because one went away meanwhile,
	// or a call failed.
	mostReadings = 5
	// mostCrossed bounds how often they are read again because of this process's own work on that
	// GPU. Each piece of work takes 0.1 to 1 s and a reading some milliseconds, so few readings
	// in a row meet work.
	mostCrossed = 100
)

// migSide reads and changes the MIG side of GPUs.
type migSide struct {
	*session
	// processes lists the processes on a GPU.
	processes func(nvml.Device) ([]gpu.Process, error)
	profiles  profiles
}

func newMIGSide(s *session, processes func(nvml.Device) ([]gpu.Process, error)) *migSide {
	return &migSide{session: s, processes: processes, profiles: profiles{
		boards: map[gpu.UUID]board{}, whole: map[board][]gpu.Profile{}, compute: map[computeKey][]computeProfile{},
	}}
}

func (m *migSide) MIG(ctx context.Context, u gpu.UUID) (gpu.MIG, error) {
	what := "read the MIG side of " + string(u)
	return work(ctx, m.session, u, what, onGPU(m.session, u, func(h nvml.Device) (gpu.MIG, error) {
		return m.mig(h, u)
	}))
}

// work runs f with the lock of one GPU held.
func work[T any](ctx context.Context, s *session, u gpu.UUID, what string, f func() (T, error)) (T, error) {
	value, err := ctxlock.Do(ctx, s.locks.ofGPU(u), what, func() (T, error) {
		var none T
		if err := s.locks.handles.RLock(ctx); err != nil {
			return none, fmt.Errorf("%s: %w: the driver is being initialised anew", what, err)
		}
		defer s.locks.handles.RUnlock()
		return open(s, what, f)()
	}, nil)
	return value, s.explained(err)
}

// profiles remembers the MIG profiles of GPUs. They do not change, and some cards are slow to
// read them.
type profiles struct {
	mu sync.Mutex
	// Guarded by mu:
	boards  map[gpu.UUID]board
	whole   map[board][]gpu.Profile
	compute map[computeKey][]computeProfile
}

// board is a kind of card. All cards of one kind have the same profiles. The PCI ID alone does
// not tell the kind: profiles of the same PCI ID may have different names.
type board struct {
	pci, subsystem, model string
	memory                gpu.MiB
}

// see records what kind of card a GPU is.
func (p *profiles) see(d *gpu.Device) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.boards[d.UUID] = board{d.PCIDevice, d.PCISubsystem, d.Model, d.Memory}
}

func (m *migSide) see(d *gpu.Device) { m.profiles.see(d) }

// computeKey identifies a GPU instance profile of a GPU.
type computeKey struct {
	gpu gpu.UUID
	id  int
}

// computeProfile is a kind of compute instance within a GPU instance.
type computeProfile struct {
	id, slices, max int
	engines         int // copy engines and media engines together
}

// mig reads a GPU's MIG side. It is the zero value if the GPU is not capable of MIG.
func (side *migSide) mig(h nvml.Device, u gpu.UUID) (gpu.MIG, error) {
	current, pending, ret := h.GetMigMode()
	if told, err := nvmlDeviceGetMigMode.told("read the MIG mode of "+string(u), ret); !told {
		return gpu.MIG{}, err
	}
	m := gpu.MIG{Capable: true, Enabled: current == nvml.DEVICE_MIG_ENABLE}
	if pending != current {
		p := pending == nvml.DEVICE_MIG_ENABLE
		m.Pending = &p
	}
	var err error
	if m.Profiles, err = side.knownProfiles(h, u); err != nil || !m.Enabled {
		return m, err
	}
	m.Instances, err = side.instances(h, u, m.Profiles)
	return m, err
}

// knownProfiles returns a GPU's profiles. The caller may change the result.
func (m *migSide) knownProfiles(h nvml.Device, u gpu.UUID) ([]gpu.Profile, error) {
	m.profiles.mu.Lock()
	kind := cmp.Or(m.profiles.boards[u], board{model: string(u)}) // without an inventory, a kind of its own
	known := m.profiles.whole[kind]
	m.profiles.mu.Unlock()
	if known != nil {
		return cloneProfiles(known), nil
	}
	list, err := m.readProfiles(h, u)
	if err != nil || !complete(list) {
		return list, err
	}
	m.profiles.mu.Lock()
	defer m.profiles.mu.Unlock()
	m.profiles.whole[kind] = cloneProfiles(list)
	return list, nil
}

func cloneProfiles(list []gpu.Profile) []gpu.Profile {
	list = slices.Clone(list)
	for i := range list {
		p := &list[i]
		p.Placements, p.Engines = slices.Clone(p.Placements), cloned(p.Engines)
	}
	return list
}

// complete reports whether all is known of the profiles. Some drivers show placements only while
// MIG is on.
func complete(profiles []gpu.Profile) bool {
	untold := func(p gpu.Profile) bool { return len(p.Placements) == 0 }
	return len(profiles) > 0 && !slices.ContainsFunc(profiles, untold)
}

// readProfiles reads the profiles number by number, up to the first number that is an invalid
// argument. Their names are the driver's own, since names computed from sizes are wrong on some
// boards. Before R510 the driver has no names, and the result is empty.
func (m *migSide) readProfiles(h nvml.Device, u gpu.UUID) ([]gpu.Profile, error) {
	if !m.has(nvmlDeviceGetGpuInstanceProfileInfoV) {
		return nil, nil
	}
	var list []gpu.Profile
	for number := range mostProfiles {
		p, ret := profile(h, number)
		if ret == nvml.ERROR_INVALID_ARGUMENT {
			break
		}
		told, err := nvmlDeviceGetGpuInstanceProfileInfoV.told(fmt.Sprintf("read MIG profile %d of %s", number, u), ret)
		if err != nil {
			return nil, err
		}
		if !told {
			continue // it belongs to another model
		}
		places, ret := h.GetGpuInstancePossiblePlacements(&nvml.GpuInstanceProfileInfo{Id: uint32(p.ID)})
		if told, _ := nvmlDeviceGetGpuInstancePossiblePlacements.told("read the placements", ret); told {
			for _, at := range places {
				p.Placements = append(p.Placements, gpu.Placement{Start: int(at.Start), Size: int(at.Size)})
			}
			slices.SortFunc(p.Placements, func(a, b gpu.Placement) int { return cmp.Compare(a.Start, b.Start) })
		}
		list = append(list, p)
	}
	return list, nil
}

// profile reads one profile, by version 2 of the function. On an H200, driver 580.159.04 answers
// the newer version 3 with names that are empty or wrong ("MIG 7g.0gb" for 1g.18gb). This package
// needs none of the figures that only version 3 has.
func profile(h nvml.Device, number int) (gpu.Profile, nvml.Return) {
	info, ret := h.GetGpuInstanceProfileInfoV(number).V2()
	return gpu.Profile{
		Name: profileName(info.Name[:]), ID: int(info.Id), Memory: gpu.MiB(info.MemorySizeMB),
		Slices: int(info.SliceCount), SMs: int(info.MultiprocessorCount), Max: int(info.InstanceCount),
		Engines: &gpu.Engines{
			Copy: int(info.CopyEngineCount), Decode: int(info.DecoderCount), Encode: int(info.EncoderCount),
			JPEG: int(info.JpegCount), OFA: int(info.OfaCount),
		},
	}, ret
}

// profileName removes the prefix "MIG " that some drivers put before "1g.10gb".
func profileName(c []int8) string { return strings.TrimPrefix(text(c), "MIG ") }

// instances lists the instances of a GPU in MIG mode, by placement: one entry for each compute
// instance, and one with CI -1 and no UUID for a GPU instance without any. An instance that comes
// or goes meanwhile may be missing or not.
func (m *migSide) instances(h nvml.Device, u gpu.UUID, profiles []gpu.Profile) (list []gpu.Instance, err error) {
	own := m.locks.ofGPU(u)
	for failed, crossed := 0, 0; failed < mostReadings && crossed < mostCrossed; {
		before := own.Moves()
		// If an instance goes away between two calls about it, the second call fails, though the
		// GPU is sound. Also, any of the dozens of calls may fail once. A GPU that cannot be read
		// takes no new pods, so all is read again.
		list, err = m.readInstances(h, u, profiles)
		if !errors.Is(err, gpu.ErrNotFound) && !errors.Is(err, gpu.ErrInvalid) && !errors.Is(err, gpu.ErrDriver) {
			break
		}
		if own.Moves() == before {
			failed++
		} else {
			crossed++
		}
	}
	return list, err
}

func (m *migSide) readInstances(h nvml.Device, u gpu.UUID, profiles []gpu.Profile) ([]gpu.Instance, error) {
	standing, err := m.gpuInstances(h, u, profiles)
	if err != nil || len(standing) == 0 {
		return nil, err
	}
	devices, err := m.devices(h, u, standing)
	if err != nil {
		return nil, err
	}
	processes, err := m.processes(h)
	if err != nil {
		return nil, fmt.Errorf("list the processes on %s: %w", u, err)
	}
	var all []gpu.Instance
	for _, s := range standing {
		own := gpu.Instance{Profile: s.profile.Name, Placement: s.at, GI: s.id, CI: -1}
		empty := true
		for _, in := range devices {
			if in.GI != s.id {
				continue
			}
			empty = false
			in.Busy = slices.ContainsFunc(processes, func(p gpu.Process) bool { return p.GI == in.GI && p.CI == in.CI })
			all = append(all, in)
		}
		if empty {
			all = append(all, own)
		}
	}
	slices.SortFunc(all, func(a, b gpu.Instance) int {
		return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(a.GI, b.GI),
			cmp.Compare(a.CIStart, b.CIStart), cmp.Compare(a.CI, b.CI))
	})
	return all, nil
}

// gpuInstance is a GPU instance that exists.
type gpuInstance struct {
	gi      nvml.GpuInstance
	id      int
	profile gpu.Profile
	at      gpu.Placement
}

// gpuInstances lists the GPU instances on a GPU. The driver lists them profile by profile. A
// profile that has no room beside the instances found so far is left out.
func (m *migSide) gpuInstances(h nvml.Device, u gpu.UUID, profiles []gpu.Profile) ([]gpuInstance, error) {
	var found []gpuInstance
	for _, p := range profiles {
		if len(p.Placements) > 0 && !slices.ContainsFunc(p.Placements, func(at gpu.Placement) bool {
			return !slices.ContainsFunc(found, func(s gpuInstance) bool { return overlap(s.at, at) })
		}) {
			continue
		}
		own, err := m.gpuInstancesOf(h, u, p)
		if err != nil {
			return nil, err
		}
		found = append(found, own...)
	}
	return found, nil
}

func overlap(a, b gpu.Placement) bool { return a.Start < b.Start+b.Size && b.Start < a.Start+a.Size }

// gpuInstancesOf lists the GPU instances of one profile.
func (m *migSide) gpuInstancesOf(h nvml.Device, u gpu.UUID, p gpu.Profile) ([]gpuInstance, error) {
	list, ret := h.GetGpuInstances(&nvml.GpuInstanceProfileInfo{Id: uint32(p.ID), InstanceCount: uint32(p.Max)})
	if err := nvmlDeviceGetGpuInstances.failed(fmt.Sprintf("list the %s instances of %s", p.Name, u), ret); err != nil {
		return nil, err
	}
	var found []gpuInstance
	for _, gi := range list {
		s, err := describe(gi, fmt.Sprintf("a %s instance of %s", p.Name, u))
		if err != nil {
			return nil, err
		}
		if s.profile.ID != p.ID {
			return nil, fmt.Errorf("a %s instance of %s: %w: its number %d belongs to another one now",
				p.Name, u, gpu.ErrNotFound, s.id)
		}
		s.profile = p
		found = append(found, s)
	}
	return found, nil
}

// describe reads a GPU instance: of its profile only the ID.
func describe(gi nvml.GpuInstance, what string) (gpuInstance, error) {
	info, ret := gi.GetInfo()
	return gpuInstance{
		gi: gi, id: int(info.Id), profile: gpu.Profile{ID: int(info.ProfileId)},
		at: gpu.Placement{Start: int(info.Placement.Start), Size: int(info.Placement.Size)},
	}, nvmlGpuInstanceGetInfo.failed("read "+what, ret)
}

// devices lists the compute instances in GPU instances; the driver calls them MIG devices. Busy
// is not set.
func (m *migSide) devices(h nvml.Device, u gpu.UUID, in []gpuInstance) ([]gpu.Instance, error) {
	most, ret := h.GetMaxMigDeviceCount()
	if err := nvmlDeviceGetMaxMigDeviceCount.failed("count the MIG devices of "+string(u), ret); err != nil {
		return nil, err
	}
	room := 0 // compute slices without a device so far
	for _, s := range in {
		room += s.profile.Slices
	}
	var all []gpu.Instance
	for seat := 0; seat < most && room > 0; seat++ {
		dev, ret := h.GetMigDeviceHandleByIndex(seat)
		if ret == nvml.ERROR_NOT_FOUND || ret == nvml.ERROR_INVALID_ARGUMENT {
			continue // no device has this index
		}
		what := fmt.Sprintf("MIG device %d of %s", seat, u)
		if err := nvmlDeviceGetMigDeviceHandleByIndex.failed("find "+what, ret); err != nil {
			return nil, err
		}
		gi, ret := dev.GetGpuInstanceId()
		if err := nvmlDeviceGetGpuInstanceId.failed("read the GPU instance of "+what, ret); err != nil {
			return nil, err
		}
		at := slices.IndexFunc(in, func(s gpuInstance) bool { return s.id == gi })
		if at < 0 {
			continue // the GPU instance was created after the list was read
		}
		found, computeSlices, err := m.migDevice(dev, what, in[at])
		if err != nil {
			return nil, err
		}
		all = append(all, found)
		room -= computeSlices
	}
	return all, nil
}

// migDevice reads a MIG device in a GPU instance, and its number of compute slices.
func (m *migSide) migDevice(
	dev nvml.Device, what string, s gpuInstance,
) (in gpu.Instance, computeSlices int, err error) {
	in = gpu.Instance{Profile: s.profile.Name, Placement: s.at, GI: s.id}
	var ret nvml.Return
	if in.CI, ret = dev.GetComputeInstanceId(); ret != nvml.SUCCESS {
		return in, 0, nvmlDeviceGetComputeInstanceId.failed("read the compute instance of "+what, ret)
	}
	uuid, ret := dev.GetUUID()
	if err := nvmlDeviceGetUUID.failed("read the UUID of "+what, ret); err != nil {
		return in, 0, err
	}
	in.UUID = gpu.UUID(uuid)
	if s.profile.Slices <= 1 {
		return in, 1, nil
	}
	a, ret := dev.GetAttributes()
	if err := nvmlDeviceGetAttributes.failed("read the attributes of "+what, ret); err != nil {
		return in, 0, err
	}
	computeSlices = int(a.ComputeInstanceSliceCount)
	if a.ComputeInstanceSliceCount >= a.GpuInstanceSliceCount {
		return in, computeSlices, nil
	}
	in.Profile = fmt.Sprintf("%dc.%s", computeSlices, s.profile.Name)
	ci, ret := s.gi.GetComputeInstanceById(in.CI)
	if err := nvmlGpuInstanceGetComputeInstanceById.failed("find the compute instance of "+what, ret); err != nil {
		return in, 0, err
	}
	info, ret := ci.GetInfo()
	in.CIStart = int(info.Placement.Start)
	return in, computeSlices, nvmlComputeInstanceGetInfo.failed("read the compute instance of "+what, ret)
}
