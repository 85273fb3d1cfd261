// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/pkg/gpu"
)

// mostProfiles bounds the walk over profile numbers. The driver says itself
// where they end (18 today); the bound is for one that never does.
const mostProfiles = 256

// mig reads a GPU's MIG side. Profiles are taken from known if that has them:
// they cannot change, and reading them is slow on some cards.
func (d *Driver) mig(h nvml.Device, u gpu.UUID, known gpu.MIG) (gpu.MIG, error) {
	current, pending, ret := h.GetMigMode()
	if ret == nvml.ERROR_NOT_SUPPORTED {
		return gpu.MIG{}, nil
	}
	if err := failed("read the MIG mode of "+string(u), ret); err != nil {
		return gpu.MIG{}, err
	}
	m := gpu.MIG{Capable: true, Enabled: current == nvml.DEVICE_MIG_ENABLE}
	if pending != current {
		p := pending == nvml.DEVICE_MIG_ENABLE
		m.Pending = &p
	}
	m.Profiles = clone(gpu.Device{MIG: known}).MIG.Profiles
	if !complete(m.Profiles) {
		var err error
		if m.Profiles, err = d.profiles(h, u); err != nil {
			return m, err
		}
	}
	if !m.Enabled {
		return m, nil
	}
	var err error
	m.Instances, err = d.instances(h, u, m.Profiles)
	return m, err
}

// complete reports whether all is known of the profiles. Some drivers tell
// placements only while MIG is on.
func complete(profiles []gpu.Profile) bool {
	return len(profiles) > 0 && !slices.ContainsFunc(profiles, func(p gpu.Profile) bool { return len(p.Placements) == 0 })
}

// profiles walks the driver's profile numbers until it says that there are no
// more. Names are the driver's own: names computed from sizes are wrong on
// some boards. Before R510 the driver tells no names and there are none here.
func (d *Driver) profiles(h nvml.Device, u gpu.UUID) ([]gpu.Profile, error) {
	if !d.has("nvmlDeviceGetGpuInstanceProfileInfoV") {
		return nil, nil
	}
	var profiles []gpu.Profile
	for number := range mostProfiles {
		p, ret := profile(h, number)
		if ret == nvml.ERROR_INVALID_ARGUMENT {
			break
		}
		if ret == nvml.ERROR_NOT_SUPPORTED {
			continue // another model has it
		}
		if err := failed(fmt.Sprintf("read MIG profile %d of %s", number, u), ret); err != nil {
			return nil, err
		}
		places, ret := h.GetGpuInstancePossiblePlacements(&nvml.GpuInstanceProfileInfo{Id: uint32(p.ID)})
		if ret == nvml.SUCCESS {
			for _, at := range places {
				p.Placements = append(p.Placements, gpu.Placement{Start: int(at.Start), Size: int(at.Size)})
			}
			slices.SortFunc(p.Placements, func(a, b gpu.Placement) int { return cmp.Compare(a.Start, b.Start) })
		}
		profiles = append(profiles, p)
	}
	return profiles, nil
}

// profile reads one profile, in the newest form that the driver has.
func profile(h nvml.Device, number int) (gpu.Profile, nvml.Return) {
	info := h.GetGpuInstanceProfileInfoV(number)
	v3, ret := info.V3()
	if ret == nvml.SUCCESS {
		return gpu.Profile{
			Name: profileName(v3.Name[:]), ID: int(v3.Id), Memory: gpu.MiB(v3.MemorySizeMB),
			Slices: int(v3.SliceCount), Max: int(v3.InstanceCount),
		}, ret
	}
	// A driver that does not know version 3 may call it an invalid argument, as
	// it calls a number past the end: version 2 tells the two apart.
	v2, ret := info.V2()
	return gpu.Profile{
		Name: profileName(v2.Name[:]), ID: int(v2.Id), Memory: gpu.MiB(v2.MemorySizeMB),
		Slices: int(v2.SliceCount), Max: int(v2.InstanceCount),
	}, ret
}

// profileName drops the word that some drivers put before "1g.10gb".
func profileName(c []int8) string { return strings.TrimPrefix(text(c), "MIG ") }

// instances lists what stands on a GPU in MIG mode, by placement: one entry
// for each compute instance, and one with CI -1 and no UUID for a GPU instance
// that has none.
func (d *Driver) instances(h nvml.Device, u gpu.UUID, profiles []gpu.Profile) ([]gpu.Instance, error) {
	type place struct{ gi, ci int }
	type compute struct {
		ci   int
		uuid gpu.UUID
		part string // "1c." where it has only some of the slices
	}
	within := map[int][]compute{}
	most, ret := h.GetMaxMigDeviceCount()
	if err := failed("count the MIG devices of "+string(u), ret); err != nil {
		return nil, err
	}
	for i := range most {
		dev, ret := h.GetMigDeviceHandleByIndex(i)
		if ret == nvml.ERROR_NOT_FOUND || ret == nvml.ERROR_INVALID_ARGUMENT {
			continue // an empty seat
		}
		if err := failed(fmt.Sprintf("find MIG device %d of %s", i, u), ret); err != nil {
			return nil, err
		}
		gi, ret := dev.GetGpuInstanceId()
		if err := failed(fmt.Sprintf("read the GPU instance of MIG device %d of %s", i, u), ret); err != nil {
			return nil, err
		}
		ci, ret := dev.GetComputeInstanceId()
		if err := failed(fmt.Sprintf("read the compute instance of MIG device %d of %s", i, u), ret); err != nil {
			return nil, err
		}
		uuid, ret := dev.GetUUID()
		if err := failed(fmt.Sprintf("read the UUID of MIG device %d of %s", i, u), ret); err != nil {
			return nil, err
		}
		c := compute{ci: ci, uuid: gpu.UUID(uuid)}
		if a, ret := dev.GetAttributes(); ret == nvml.SUCCESS && a.ComputeInstanceSliceCount < a.GpuInstanceSliceCount {
			c.part = fmt.Sprintf("%dc.", a.ComputeInstanceSliceCount)
		}
		within[gi] = append(within[gi], c)
	}
	busy := map[place]bool{}
	processes, err := d.processes(h, u)
	if err != nil {
		return nil, err
	}
	for _, p := range processes {
		busy[place{p.GI, p.CI}] = true
	}

	var all []gpu.Instance
	for _, p := range profiles {
		standing, ret := h.GetGpuInstances(&nvml.GpuInstanceProfileInfo{Id: uint32(p.ID), InstanceCount: uint32(p.Max)})
		if err := failed(fmt.Sprintf("list the %s instances of %s", p.Name, u), ret); err != nil {
			return nil, err
		}
		for _, gi := range standing {
			info, ret := gi.GetInfo()
			if err := failed(fmt.Sprintf("read a %s instance of %s", p.Name, u), ret); err != nil {
				return nil, err
			}
			at := gpu.Placement{Start: int(info.Placement.Start), Size: int(info.Placement.Size)}
			id := int(info.Id)
			if len(within[id]) == 0 {
				all = append(all, gpu.Instance{Profile: p.Name, Placement: at, GI: id, CI: -1})
			}
			for _, c := range within[id] {
				all = append(all, gpu.Instance{
					Profile: c.part + p.Name, Placement: at, GI: id, CI: c.ci, UUID: c.uuid, Busy: busy[place{id, c.ci}],
				})
			}
		}
	}
	slices.SortFunc(all, func(a, b gpu.Instance) int {
		return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(a.GI, b.GI), cmp.Compare(a.CI, b.CI))
	})
	return all, nil
}
