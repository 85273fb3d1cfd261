// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/pkg/gpu"
)

// place returns an instance's placement in words: 3g.40gb@4, or 1c.3g.40gb@4.1 for a split.
func place(profile string, start, ci int) string {
	if _, compute := split(profile); compute > 0 {
		return fmt.Sprintf("%s@%d.%d", profile, start, ci)
	}
	return fmt.Sprintf("%s@%d", profile, start)
}

// split splits 1c.3g.40gb into the GPU instance's profile and the number of compute slices. The
// number is 0 for a profile that has all of its GPU instance.
func split(profile string) (whole string, compute int) {
	if c, rest, ok := strings.Cut(profile, "c."); ok {
		if n, err := strconv.Atoi(c); err == nil {
			return rest, n
		}
	}
	return profile, 0
}

func (m *migSide) CreateInstance(
	ctx context.Context, u gpu.UUID, profile string, at gpu.Placement, ci int,
) (gpu.Instance, error) {
	what := fmt.Sprintf("create %s on %s", place(profile, at.Start, ci), u)
	return work(ctx, m.session, u, what, onGPU(m.session, u, func(h nvml.Device) (gpu.Instance, error) {
		return m.createInstance(h, u, profile, at, ci)
	}))
}

func (m *migSide) createInstance(
	h nvml.Device, u gpu.UUID, profile string, at gpu.Placement, ci int,
) (in gpu.Instance, err error) {
	p, computeSlices, err := m.profileOf(h, u, profile)
	if err != nil {
		return in, err
	}

	// Usually nothing exists there, so the creation is tried first.
	var s gpuInstance
	gi, ret := h.CreateGpuInstanceWithPlacement(&nvml.GpuInstanceProfileInfo{Id: uint32(p.ID)},
		&nvml.GpuInstancePlacement{Start: uint32(at.Start), Size: uint32(at.Size)})
	if ret == nvml.SUCCESS {
		defer func() { err = undone(err, nvmlGpuInstanceDestroy, gi.Destroy, "GPU instance") }()
		if s, err = describe(gi, "the GPU instance made for it"); err != nil {
			return in, err
		}
		s.profile = p
	} else {
		own, listed := m.gpuInstancesOf(h, u, p)
		i := slices.IndexFunc(own, func(s gpuInstance) bool { return s.at == at })
		if listed != nil || i < 0 {
			return in, advised(nvmlDeviceCreateGpuInstanceWithPlacement.refused(ret), p)
		}
		s = own[i]
		if in, err = m.inPlace(h, u, s, computeSlices, ci); err != nil || in.GI == s.id {
			return in, err
		}
	}
	return m.createCompute(u, s, computeSlices, ci)
}

// undone destroys what was created before err. It does nothing if err is nil. If that fails too,
// the error names what is left behind.
func undone(err error, f *function, destroy func() nvml.Return, what string) error {
	if err == nil {
		return nil
	}
	if left := f.failed("destroy it again", destroy()); left != nil {
		return fmt.Errorf("%w; the %s made for it is left behind: %w", err, what, left)
	}
	return err
}

// advised adds to a refusal what the reader can do.
func advised(err error, p gpu.Profile) error {
	switch {
	case errors.Is(err, gpu.ErrNoRoom):
		return fmt.Errorf("%w; destroy the instances there, or those that take the card's last room for a %s",
			err, p.Name)
	case errors.Is(err, gpu.ErrInvalid) && len(p.Placements) > 0:
		return fmt.Errorf("%w; its placements (start and size in memory slices) are %v", err, p.Placements)
	case errors.Is(err, gpu.ErrNotSupported):
		return fmt.Errorf("%w; is MIG mode on?", err)
	}
	return err
}

// profileOf finds the GPU instance's profile for a profile or split of that name, and its number
// of compute slices. The error wraps gpu.ErrInvalid if the GPU has no such profile.
func (m *migSide) profileOf(h nvml.Device, u gpu.UUID, name string) (p gpu.Profile, computeSlices int, err error) {
	list, err := m.knownProfiles(h, u)
	if err != nil {
		return p, 0, err
	}
	whole, compute := split(name)
	i := slices.IndexFunc(list, func(p gpu.Profile) bool { return p.Name == whole })
	if i < 0 {
		var have []string
		for _, p := range list {
			have = append(have, p.Name)
		}
		return p, 0, fmt.Errorf("the GPU has no profile %q, but %q: %w", whole, have, gpu.ErrInvalid)
	}
	if p = list[i]; compute == 0 {
		compute = p.Slices
	}
	return p, compute, nil
}

// computeProfiles returns the kinds of compute instances that a GPU instance can hold, in the
// driver's order.
func (m *migSide) computeProfiles(u gpu.UUID, s gpuInstance) ([]computeProfile, error) {
	key := computeKey{u, s.profile.ID}
	m.profiles.mu.Lock()
	known := m.profiles.compute[key]
	m.profiles.mu.Unlock()
	if known != nil {
		return known, nil
	}
	var list []computeProfile
	var none error // the driver's refusal, if it refuses all of them
	for number := range mostProfiles {
		info, ret := s.gi.GetComputeInstanceProfileInfo(number, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		if ret == nvml.ERROR_INVALID_ARGUMENT {
			break
		}
		what := fmt.Sprintf("read compute profile %d of a %s instance", number, s.profile.Name)
		err := nvmlGpuInstanceGetComputeInstanceProfileInfo.failed(what, ret)
		if errors.Is(err, gpu.ErrNotSupported) {
			none = err
			continue // it belongs to another GPU instance profile
		}
		if err != nil {
			return nil, err
		}
		list = append(list, computeProfile{
			id: int(info.Id), slices: int(info.SliceCount), max: max(int(info.InstanceCount), 1),
			engines: int(info.SharedCopyEngineCount + info.SharedDecoderCount + info.SharedEncoderCount +
				info.SharedJpegCount + info.SharedOfaCount),
		})
	}
	if len(list) == 0 && none != nil {
		return nil, none
	}
	m.profiles.mu.Lock()
	defer m.profiles.mu.Unlock()
	m.profiles.compute[key] = list
	return list, nil
}

// compute is a compute instance that exists; start is its first compute slice.
type compute struct {
	id, start int
	computeProfile
}

// computes lists the compute instances in a GPU instance.
func (m *migSide) computes(u gpu.UUID, s gpuInstance) ([]compute, error) {
	list, err := m.computeProfiles(u, s)
	if err != nil {
		return nil, err
	}
	var found []compute
	for _, p := range list {
		of := fmt.Sprintf("compute instances of %d compute slices in GPU instance %d", p.slices, s.id)
		kind := &nvml.ComputeInstanceProfileInfo{Id: uint32(p.id), InstanceCount: uint32(p.max)}
		cis, ret := s.gi.GetComputeInstances(kind)
		if err := nvmlGpuInstanceGetComputeInstances.failed("list the "+of, ret); err != nil {
			return nil, err
		}
		for _, ci := range cis {
			info, ret := ci.GetInfo()
			if err := nvmlComputeInstanceGetInfo.failed("read one of the "+of, ret); err != nil {
				return nil, err
			}
			found = append(found, compute{int(info.Id), int(info.Placement.Start), p})
		}
	}
	return found, nil
}

// inPlace returns the instance whose compute instance begins at compute slice ci and has
// computeSlices. If there is none, its GI is -1.
func (m *migSide) inPlace(h nvml.Device, u gpu.UUID, s gpuInstance, computeSlices, ci int) (gpu.Instance, error) {
	none := gpu.Instance{GI: -1, CI: -1}
	found, err := m.computes(u, s)
	if err != nil {
		return none, err
	}
	i := slices.IndexFunc(found, func(c compute) bool { return c.start == ci && c.slices == computeSlices })
	if i < 0 {
		return none, nil
	}
	all, err := m.readInstances(h, u, []gpu.Profile{s.profile})
	if err != nil {
		return none, err
	}
	for _, in := range all {
		if in.GI == s.id && in.CI == found[i].id {
			return in, nil
		}
	}
	return none, nil
}

// createCompute creates a compute instance in a GPU instance. If it fails later than that, it
// destroys the compute instance again.
func (m *migSide) createCompute(u gpu.UUID, s gpuInstance, computeSlices, ci int) (in gpu.Instance, err error) {
	none := in
	in = gpu.Instance{Profile: s.profile.Name, Placement: s.at, GI: s.id}
	if computeSlices != s.profile.Slices {
		in.Profile = fmt.Sprintf("%dc.%s", computeSlices, s.profile.Name)
	}
	kinds, err := m.computeProfiles(u, s)
	if err != nil {
		return none, err
	}
	// Two kinds may differ only in their engines. A container wants the one with more.
	i := -1
	for n, kind := range kinds {
		if kind.slices == computeSlices && (i < 0 || kind.engines > kinds[i].engines) {
			i = n
		}
	}
	if i < 0 {
		return none, fmt.Errorf("a %s instance has no compute instance of %d compute slices: %w",
			s.profile.Name, computeSlices, gpu.ErrInvalid)
	}
	made, err := m.placeCompute(s, kinds[i], ci)
	if err != nil {
		if errors.Is(err, gpu.ErrNoRoom) {
			err = fmt.Errorf("%w; GPU instance %d has other compute instances there: destroy those", err, s.id)
		}
		return none, err
	}
	defer func() {
		if err = undone(err, nvmlComputeInstanceDestroy, made.Destroy, "compute instance"); err != nil {
			in = none
		}
	}()
	info, ret := made.GetInfo()
	if err := nvmlComputeInstanceGetInfo.failed("read the compute instance", ret); err != nil {
		return none, err
	}
	in.CI, in.CIStart = int(info.Id), int(info.Placement.Start)
	if computeSlices == s.profile.Slices {
		in.CIStart = 0
	} else if in.CIStart != ci {
		return none, fmt.Errorf("this old driver chooses the place itself, and has chosen compute slice %d: %w",
			in.CIStart, gpu.ErrNotSupported)
	}
	return in, nil
}

// placeCompute creates a compute instance that begins at compute slice ci. A driver that cannot
// be given a place chooses one itself. One that has all of its GPU instance has only one place.
func (m *migSide) placeCompute(s gpuInstance, p computeProfile, ci int) (nvml.ComputeInstance, error) {
	kind := &nvml.ComputeInstanceProfileInfo{Id: uint32(p.id)}
	placed := m.has(nvmlGpuInstanceCreateComputeAt) && m.has(nvmlGpuInstanceGetComputePlacements)
	if p.slices == s.profile.Slices || !placed {
		made, ret := s.gi.CreateComputeInstance(kind)
		return made, nvmlGpuInstanceCreateComputeInstance.refused(ret)
	}
	places, ret := s.gi.GetComputeInstancePossiblePlacements(kind)
	if err := nvmlGpuInstanceGetComputePlacements.failed("list the places of compute instances", ret); err != nil {
		return nil, err
	}
	i := slices.IndexFunc(places, func(at nvml.ComputeInstancePlacement) bool { return int(at.Start) == ci })
	if i < 0 {
		return nil, fmt.Errorf("want one of the compute slices (start and size) %v: %w", places, gpu.ErrInvalid)
	}
	made, ret := s.gi.CreateComputeInstanceWithPlacement(kind, &places[i])
	return made, nvmlGpuInstanceCreateComputeAt.refused(ret)
}

func (m *migSide) DestroyInstance(ctx context.Context, u gpu.UUID, in gpu.Instance) error {
	what := fmt.Sprintf("destroy %s on %s", place(in.Profile, in.Start, in.CIStart), u)
	_, err := work(ctx, m.session, u, what, onGPU(m.session, u, func(h nvml.Device) (struct{}, error) {
		return struct{}{}, m.destroyInstance(h, u, in)
	}))
	return err
}

func (m *migSide) destroyInstance(h nvml.Device, u gpu.UUID, in gpu.Instance) error {
	p, computeSlices, err := m.profileOf(h, u, in.Profile)
	if err != nil {
		return err
	}
	gi, ret := h.GetGpuInstanceById(in.GI)
	if err := nvmlDeviceGetGpuInstanceById.failed(fmt.Sprintf("find GPU instance %d", in.GI), sought(ret)); err != nil {
		return err
	}
	s, err := describe(gi, "GPU instance "+strconv.Itoa(in.GI))
	if err != nil {
		return err
	}
	if s.at != in.Placement || s.profile.ID != p.ID {
		return fmt.Errorf("GPU instance %d is another one now (profile number %d at %+v): %w; read the instances anew",
			in.GI, s.profile.ID, s.at, gpu.ErrNotFound)
	}
	s.profile = p
	var others, gone bool
	if in.CI >= 0 {
		others, gone, err = m.destroyCompute(u, s, computeSlices, in)
	}
	if err == nil && !others {
		err = pinned(nvmlGpuInstanceDestroy.refused(gi.Destroy()))
	}
	if err != nil && gone {
		if _, left := m.createCompute(u, s, computeSlices, in.CIStart); left != nil {
			return fmt.Errorf("%w; GPU instance %d is left empty: make its compute instance again: %w",
				err, in.GI, left)
		}
	}
	return err
}

// sought returns the driver's answer to a search by number or name: an invalid number means that
// there is no such thing.
func sought(ret nvml.Return) nvml.Return {
	if ret == nvml.ERROR_INVALID_ARGUMENT {
		return nvml.ERROR_NOT_FOUND
	}
	return ret
}

// destroyCompute destroys a compute instance. others is true if its GPU instance still has
// others. destroyed is true if it destroyed the compute instance, also if it then failed; a
// compute instance that was gone already is no error.
func (m *migSide) destroyCompute(
	u gpu.UUID, s gpuInstance, computeSlices int, in gpu.Instance,
) (others, destroyed bool, err error) {
	ci, ret := s.gi.GetComputeInstanceById(in.CI)
	if ret = sought(ret); ret != nvml.ERROR_NOT_FOUND {
		what := fmt.Sprintf("find compute instance %d", in.CI)
		if err := nvmlGpuInstanceGetComputeInstanceById.failed(what, ret); err != nil {
			return false, false, err
		}
		if computeSlices < s.profile.Slices {
			info, ret := ci.GetInfo()
			if err := nvmlComputeInstanceGetInfo.failed("read its compute instance", ret); err != nil {
				return false, false, err
			}
			if int(info.Placement.Start) != in.CIStart {
				return false, false, fmt.Errorf("compute instance %d begins at compute slice %d now: %w; "+
					"read the instances anew", in.CI, info.Placement.Start, gpu.ErrNotFound)
			}
		}
		if err := pinned(nvmlComputeInstanceDestroy.refused(ci.Destroy())); err != nil {
			return false, false, err
		}
		destroyed = true
	}
	if computeSlices == s.profile.Slices {
		return false, destroyed, nil
	}
	list, err := m.computes(u, s)
	if err != nil {
		return false, destroyed, err
	}
	if slices.ContainsFunc(list, func(c compute) bool { return c.id == in.CI && c.start == in.CIStart }) {
		return false, destroyed, fmt.Errorf("the driver lists compute instance %d but does not find it: %w",
			in.CI, gpu.ErrDriver)
	}
	return len(list) > 0, destroyed, nil
}

// pinned adds to an error about an instance in use what the reader can do.
func pinned(err error) error {
	if errors.Is(err, gpu.ErrInUse) {
		return fmt.Errorf("%w; end what runs on it, and destroy the compute instances in it", err)
	}
	return err
}
