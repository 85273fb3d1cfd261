// SPDX-License-Identifier: Apache-2.0

package lib_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/tests/emulator"
)

func inMode(count int) emulator.Spec {
	spec := emulator.Spec{Model: "A100-SXM4-80GB", Count: count}
	for i := range count {
		spec.GPUs = append(spec.GPUs, emulator.GPUSpec{Index: i, MIG: true})
	}
	return spec
}

// Every profile of every model reads alike in all forms of the struct, by the
// enum and by the number.
func TestMIGProfiles(t *testing.T) {
	for _, model := range emulator.Models() {
		t.Run(model, func(t *testing.T) {
			m, err := emulator.LoadModel(model)
			if err != nil {
				t.Fatal(err)
			}
			d := device(t, start(t, emulator.Spec{Model: model, Count: 1}).open(t), 0)
			if m.MIG == nil {
				for what, r := range map[string]nvml.Return{
					"set mode":  second(d.SetMigMode(1)),
					"profile":   second(d.GetGpuInstanceProfileInfo(0)),
					"device":    second(d.GetMigDeviceHandleByIndex(0)),
					"instances": second(d.GetGpuInstances(&nvml.GpuInstanceProfileInfo{InstanceCount: 1})),
				} {
					want(t, what, r, nvml.ERROR_NOT_SUPPORTED)
				}
				_, _, r := d.GetMigMode()
				want(t, "mode", r, nvml.ERROR_NOT_SUPPORTED)
				return
			}
			profiles := map[int]emulator.MIGProfile{}
			for _, p := range m.MIG.Profiles {
				profiles[int(p.Enum)] = p
			}
			for enum := range nvml.GPU_INSTANCE_PROFILE_COUNT {
				if p, has := profiles[enum]; has {
					testProfile(t, d, enum, p)
				} else {
					want(t, fmt.Sprint("profile ", enum), second(d.GetGpuInstanceProfileInfo(enum)), nvml.ERROR_NOT_SUPPORTED)
				}
			}
			want(t, "the end of profiles", second(d.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_COUNT)), nvml.ERROR_INVALID_ARGUMENT)
			want(t, "the end of profiles, v3", second(d.GetGpuInstanceProfileInfoV(nvml.GPU_INSTANCE_PROFILE_COUNT).V3()), nvml.ERROR_INVALID_ARGUMENT)
			want(t, "no such number", second(d.GetGpuInstanceProfileInfoByIdV(1000).V3()), nvml.ERROR_INVALID_ARGUMENT)
		})
	}
}

func testProfile(t *testing.T, d nvml.Device, enum int, p emulator.MIGProfile) {
	t.Helper()
	v1, r := d.GetGpuInstanceProfileInfo(enum)
	ok(t, r, "profile")
	want(t, p.Name, v1, nvml.GpuInstanceProfileInfo{
		Id: p.ID, SliceCount: p.Slices, InstanceCount: p.Max, MultiprocessorCount: p.SMs, CopyEngineCount: p.Copy,
		DecoderCount: p.Decode, EncoderCount: p.Encode, JpegCount: p.JPEG, OfaCount: p.OFA, MemorySizeMB: p.MemoryMiB,
	})
	for what, get := range map[string]func() (nvml.GpuInstanceProfileInfo_v2, nvml.Return){
		"v2": d.GetGpuInstanceProfileInfoV(enum).V2, "v2 by number": d.GetGpuInstanceProfileInfoByIdV(int(p.ID)).V2,
	} {
		v2, r := get()
		ok(t, r, what)
		want(t, what+": name", text(v2.Name[:]), "MIG "+p.Name)
		v2.Name = [96]int8{}
		want(t, what, v2, nvml.GpuInstanceProfileInfo_v2{
			Id: p.ID, SliceCount: p.Slices, InstanceCount: p.Max, MultiprocessorCount: p.SMs, CopyEngineCount: p.Copy,
			DecoderCount: p.Decode, EncoderCount: p.Encode, JpegCount: p.JPEG, OfaCount: p.OFA, MemorySizeMB: p.MemoryMiB,
		})
	}
	for what, get := range map[string]func() (nvml.GpuInstanceProfileInfo_v3, nvml.Return){
		"v3": d.GetGpuInstanceProfileInfoV(enum).V3, "v3 by number": d.GetGpuInstanceProfileInfoByIdV(int(p.ID)).V3,
	} {
		v3, r := get()
		ok(t, r, what)
		// As the driver writes it, eight bytes too late; see nvml_mig.c.
		want(t, what+": name", text(v3.Name[:]), "")
		want(t, what+": name of the other form", text(v3.Name[8:]), fmt.Sprintf("MIG %dg.0gb", p.Max))
		v3.Name = [96]int8{}
		want(t, what, v3, nvml.GpuInstanceProfileInfo_v3{
			Id: p.ID, SliceCount: p.Slices, InstanceCount: p.Max, MultiprocessorCount: p.SMs, CopyEngineCount: p.Copy,
			DecoderCount: p.Decode, EncoderCount: p.Encode, JpegCount: p.JPEG, OfaCount: p.OFA, MemorySizeMB: p.MemoryMiB,
		})
	}
	var places []nvml.GpuInstancePlacement
	for _, at := range p.Starts {
		places = append(places, nvml.GpuInstancePlacement{Start: at, Size: p.Size})
	}
	got, r := d.GetGpuInstancePossiblePlacements(&v1)
	ok(t, r, "placements")
	want(t, p.Name+": placements", fmt.Sprint(got), fmt.Sprint(places))
	want(t, "capacity with MIG off", second(d.GetGpuInstanceRemainingCapacity(&v1)), nvml.ERROR_NOT_SUPPORTED)
	want(t, "creation with MIG off", second(d.CreateGpuInstance(&v1)), nvml.ERROR_NOT_SUPPORTED)
}

// The life of an instance, with every struct of it.
func TestMIGInstances(t *testing.T) {
	n := start(t, inMode(2))
	api := n.open(t)
	d := device(t, api, 1)
	profile, r := d.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_3_SLICE)
	ok(t, r, "profile")
	capacity := func(left int) {
		t.Helper()
		c, r := d.GetGpuInstanceRemainingCapacity(&profile)
		ok(t, r, "capacity")
		want(t, "capacity", c, left)
	}
	capacity(2)
	gi, r := d.CreateGpuInstanceWithPlacement(&profile, &nvml.GpuInstancePlacement{Start: 4, Size: 4})
	ok(t, r, "create")
	capacity(1)
	info, r := gi.GetInfo()
	ok(t, r, "info")
	st := n.world.State().GPUs[1].MIG.Instances[0]
	want(t, "id", int(info.Id), st.ID)
	want(t, "its device", info.Device, d)
	want(t, "its profile", info.ProfileId, profile.Id)
	want(t, "its placement", info.Placement, nvml.GpuInstancePlacement{Start: 4, Size: 4})
	list, r := d.GetGpuInstances(&profile)
	ok(t, r, "list")
	want(t, "list", fmt.Sprint(list), fmt.Sprint([]nvml.GpuInstance{gi}))
	same, r := d.GetGpuInstanceById(st.ID)
	ok(t, r, "by id")
	want(t, "by id", same, gi)

	// A split: one slice, then two.
	var made []nvml.ComputeInstance
	for _, c := range []struct {
		number   int
		name     string
		sms      uint32
		count    uint32
		places   string
		take     *nvml.ComputeInstancePlacement
		capacity int // afterwards
	}{
		{nvml.COMPUTE_INSTANCE_PROFILE_1_SLICE, "MIG 1c.3g.40gb", 14, 3, "[{0 1} {1 1} {2 1}]", &nvml.ComputeInstancePlacement{Start: 2, Size: 1}, 2},
		{nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, "MIG 2c.3g.40gb", 28, 1, "[{0 2}]", nil, 0},
	} {
		cp, r := gi.GetComputeInstanceProfileInfo(c.number, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		ok(t, r, c.name)
		slices := uint32(c.number + 1)
		want(t, c.name, cp, nvml.ComputeInstanceProfileInfo{
			Id: uint32(c.number), SliceCount: slices, InstanceCount: c.count, MultiprocessorCount: c.sms, SharedCopyEngineCount: 3, SharedDecoderCount: 2,
		})
		v2, r := gi.GetComputeInstanceProfileInfoV(c.number, 0).V2()
		ok(t, r, "v2")
		v3, r := gi.GetComputeInstanceProfileInfoV(c.number, 0).V3()
		ok(t, r, "v3")
		want(t, "v2 name", text(v2.Name[:]), c.name)
		want(t, "v3 name", text(v3.Name[:]), c.name)
		want(t, "v2", fmt.Sprint(v2.Version, v2.Id, v2.SliceCount, v2.InstanceCount, v2.MultiprocessorCount, v2.SharedCopyEngineCount, v2.SharedDecoderCount),
			fmt.Sprint(nvml.STRUCT_VERSION(v2, 2), c.number, slices, c.count, c.sms, 3, 2))
		want(t, "v3", fmt.Sprint(v3.Version, v3.Id, v3.SliceCount, v3.InstanceCount, v3.MultiprocessorCount, v3.SharedCopyEngineCount, v3.SharedDecoderCount, v3.Capabilities),
			fmt.Sprint(nvml.STRUCT_VERSION(v3, 3), c.number, slices, c.count, c.sms, 3, 2, 0))
		places, r := gi.GetComputeInstancePossiblePlacements(&cp)
		ok(t, r, "placements")
		want(t, "placements", fmt.Sprint(places), c.places)
		var ci nvml.ComputeInstance
		if c.take != nil {
			ci, r = gi.CreateComputeInstanceWithPlacement(&cp, c.take)
		} else {
			ci, r = gi.CreateComputeInstance(&cp)
		}
		ok(t, r, "create "+c.name)
		made = append(made, ci)
		left, r := gi.GetComputeInstanceRemainingCapacity(&cp)
		ok(t, r, "capacity")
		want(t, "capacity", left, c.capacity)
		got, r := gi.GetComputeInstances(&cp)
		ok(t, r, "list")
		want(t, "list", fmt.Sprint(got), fmt.Sprint([]nvml.ComputeInstance{ci}))
		byID, r := gi.GetComputeInstanceById(len(made) - 1)
		ok(t, r, "by id")
		want(t, "by id", byID, ci)
	}
	for i, at := range []nvml.ComputeInstancePlacement{{Start: 2, Size: 1}, {Start: 0, Size: 2}} {
		info, r := made[i].GetInfo()
		ok(t, r, "info")
		want(t, "info", info, nvml.ComputeInstanceInfo{Device: d, GpuInstance: gi, Id: uint32(i), ProfileId: uint32(i), Placement: at})
	}
	whole, r := gi.GetComputeInstanceProfileInfo(nvml.COMPUTE_INSTANCE_PROFILE_3_SLICE, 0)
	ok(t, r, "the whole")
	want(t, "no room", second(gi.CreateComputeInstance(&whole)), nvml.ERROR_INSUFFICIENT_RESOURCES)

	// The devices that they are.
	most, r := d.GetMaxMigDeviceCount()
	ok(t, r, "most devices")
	want(t, "most devices", most, 7)
	for i, c := range computes(n, 1) {
		m, r := d.GetMigDeviceHandleByIndex(i)
		ok(t, r, "device")
		is, r := m.IsMigDeviceHandle()
		ok(t, r, "is MIG")
		want(t, "is MIG", is, true)
		parent, r := m.GetDeviceHandleFromMigDeviceHandle()
		ok(t, r, "parent")
		want(t, "parent", parent, d)
		name, r := m.GetName()
		ok(t, r, "name")
		want(t, "name", name, "NVIDIA A100-SXM4-80GB MIG "+c.Profile)
		uuid, r := m.GetUUID()
		ok(t, r, "UUID")
		want(t, "UUID", uuid, c.UUID)
		found, r := api.DeviceGetHandleByUUID(uuid)
		ok(t, r, "by UUID")
		want(t, "by UUID", found, m)
		index, r := m.GetIndex()
		ok(t, r, "index")
		want(t, "index", index, i)
		giID, r := m.GetGpuInstanceId()
		ok(t, r, "GPU instance id")
		want(t, "GPU instance id", giID, st.ID)
		ciID, r := m.GetComputeInstanceId()
		ok(t, r, "compute instance id")
		want(t, "compute instance id", ciID, c.ID)
		a, r := m.GetAttributes()
		ok(t, r, "attributes")
		want(t, "attributes", a, nvml.DeviceAttributes{
			MultiprocessorCount: uint32(14 * c.Size), SharedCopyEngineCount: 3, SharedDecoderCount: 2,
			GpuInstanceSliceCount: 3, ComputeInstanceSliceCount: uint32(c.Size), MemorySizeMB: 40192,
		})
		memory, r := m.GetMemoryInfo_v2()
		ok(t, r, "memory")
		want(t, "memory", memory.Total, 40192<<20)
		v1, r := m.GetMemoryInfo()
		ok(t, r, "memory v1")
		want(t, "memory v1", v1.Free, 40192<<20)
	}
	is, r := d.IsMigDeviceHandle()
	ok(t, r, "the GPU is MIG")
	want(t, "the GPU is MIG", is, false)

	// Busy, and listed with its ids.
	sleep := sleeper(t)
	if err := n.world.AddProcess(emulator.Process{PID: sleep.Process.Pid, GPU: 1, GI: st.ID, CI: 1, Kind: emulator.Compute, MiB: 5}); err != nil {
		t.Fatal(err)
	}
	for what, h := range map[string]nvml.Device{"the GPU": d, "the device": must(d.GetMigDeviceHandleByIndex(1))} {
		list, r := h.GetComputeRunningProcesses()
		ok(t, r, "processes")
		want(t, "processes of "+what, fmt.Sprint(list), fmt.Sprint([]nvml.ProcessInfo{{Pid: uint32(sleep.Process.Pid), UsedGpuMemory: 5 << 20, GpuInstanceId: uint32(st.ID), ComputeInstanceId: 1}}))
	}
	if list, _ := must(d.GetMigDeviceHandleByIndex(0)).GetComputeRunningProcesses(); len(list) != 0 {
		t.Errorf("processes of the other device: %v", list)
	}
	want(t, "the busy one", made[1].Destroy(), nvml.ERROR_IN_USE)
	want(t, "the other", made[0].Destroy(), nvml.SUCCESS)
	want(t, "the GPU instance", gi.Destroy(), nvml.ERROR_IN_USE)
	n.world.EndProcess(sleep.Process.Pid)
	want(t, "the busy one, idle", made[1].Destroy(), nvml.SUCCESS)
	want(t, "again", made[1].Destroy(), nvml.ERROR_INVALID_ARGUMENT)
	want(t, "the GPU instance", gi.Destroy(), nvml.SUCCESS)
	want(t, "again", gi.Destroy(), nvml.ERROR_INVALID_ARGUMENT)
	_, r = gi.GetInfo()
	want(t, "its info", r, nvml.ERROR_INVALID_ARGUMENT)
	want(t, "its id", second(d.GetGpuInstanceById(st.ID)), nvml.ERROR_NOT_FOUND)
	want(t, "its device", second(d.GetMigDeviceHandleByIndex(1)), nvml.ERROR_NOT_FOUND)
	capacity(2)
	for range 2 {
		_, r := d.CreateGpuInstance(&profile)
		ok(t, r, "create anywhere")
	}
	want(t, "once too often", second(d.CreateGpuInstance(&profile)), nvml.ERROR_INSUFFICIENT_RESOURCES)
	want(t, "the other GPU", len(n.world.State().GPUs[0].MIG.Instances), 0)
}

func must[T any](v T, r nvml.Return) T {
	if r != nvml.SUCCESS {
		panic(r)
	}
	return v
}

// computes are the compute instances of a GPU's first GPU instance.
func computes(n *node, gpu int) []emulator.ComputeInstanceState {
	return n.world.State().GPUs[gpu].MIG.Instances[0].Compute
}

func TestMIGMode(t *testing.T) {
	n := start(t, emulator.Spec{Count: 2, GPUs: []emulator.GPUSpec{{Index: 1, Model: "A30"}}})
	api := n.open(t)
	for i, c := range []struct {
		name             string
		activation       nvml.Return
		current, pending int
	}{{"Hopper", nvml.SUCCESS, 1, 1}, {"Ampere", nvml.ERROR_RESET_REQUIRED, 0, 1}} {
		d := device(t, api, i)
		activation, r := d.SetMigMode(nvml.DEVICE_MIG_ENABLE)
		ok(t, r, c.name)
		want(t, c.name+": activation", activation, c.activation)
		current, pending, r := d.GetMigMode()
		ok(t, r, "mode")
		want(t, c.name, [2]int{current, pending}, [2]int{c.current, c.pending})
	}
	if err := n.world.Reset(1); err != nil {
		t.Fatal(err)
	}
	current, pending, r := device(t, api, 1).GetMigMode()
	ok(t, r, "mode")
	want(t, "Ampere, reset", [2]int{current, pending}, [2]int{1, 1})
	_, r = device(t, api, 0).SetMigMode(2)
	want(t, "a mode that is none", r, nvml.ERROR_INVALID_ARGUMENT)
}

// What go-nvml cannot ask: versions that are none, pointers to nothing, arrays
// that are too small, handles that were never given out.
func TestMIGStructs(t *testing.T) {
	n := start(t, inMode(1))
	runC(t, n, `
	nvmlDevice_t d;
	nvmlGpuInstance_t gi, other = {(void *)&d};
	nvmlComputeInstance_t ci, none = {(void *)&d};
	unsigned int n = 0, id;
	nvmlReturn_t status;
	nvmlGpuInstancePlacement_t at = {0, 4}, places[8];
	nvmlComputeInstancePlacement_t slices[8], slice = {0, 1};
	nvmlGpuInstanceInfo_t info;
	nvmlComputeInstanceInfo_t cinfo;
	CHECK(nvmlGpuInstanceDestroy(other), NVML_ERROR_UNINITIALIZED);
	CHECK(nvmlComputeInstanceDestroy(none), NVML_ERROR_UNINITIALIZED);
	CHECK(nvmlInit_v2(), NVML_SUCCESS);
	CHECK(nvmlDeviceGetHandleByIndex_v2(0, &d), NVML_SUCCESS);
	CHECK(nvmlDeviceSetMigMode(d, 1, NULL), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceSetMigMode(d, 1, &status), NVML_SUCCESS);
	CHECK(nvmlDeviceCreateGpuInstance(d, 9, NULL), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceCreateGpuInstanceWithPlacement(d, 9, NULL, &gi), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceCreateGpuInstanceWithPlacement(d, 9, &at, NULL), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceCreateGpuInstanceWithPlacement(d, 9, &at, &gi), NVML_SUCCESS);
	CHECK(nvmlDeviceCreateGpuInstanceWithPlacement(d, 9, &at, &gi), NVML_ERROR_INSUFFICIENT_RESOURCES);
	at.start = 1;
	CHECK(nvmlDeviceCreateGpuInstanceWithPlacement(d, 9, &at, &gi), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceGetGpuInstances(d, 9, NULL, &n), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceGetGpuInstances(d, 9, &gi, NULL), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceGetGpuInstances(d, 9, &gi, &n), NVML_SUCCESS);
	CHECK(n, 1);
	CHECK(nvmlDeviceGetGpuInstances(d, 19, &gi, &n), NVML_SUCCESS);
	CHECK(n, 0);
	CHECK(nvmlGpuInstanceGetInfo(other, &info), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlGpuInstanceGetInfo(gi, NULL), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlGpuInstanceGetInfo(gi, &info), NVML_SUCCESS);
	CHECK(info.placement.size, 4);
	CHECK(nvmlDeviceGetGpuInstanceById(d, info.id, &gi), NVML_SUCCESS);
	CHECK(nvmlDeviceGetGpuInstanceById(d, 14, &gi), NVML_ERROR_NOT_FOUND);
	CHECK(nvmlDeviceGetGpuInstancePossiblePlacements_v2(d, 19, NULL, &n), NVML_SUCCESS);
	CHECK(n, 7);
	n = 6;
	CHECK(nvmlDeviceGetGpuInstancePossiblePlacements_v2(d, 19, places, &n), NVML_ERROR_INSUFFICIENT_SIZE);
	CHECK(n, 7);
	CHECK(nvmlDeviceGetGpuInstancePossiblePlacements(d, 19, places, &n), NVML_SUCCESS);
	CHECK(places[6].start, 6);

	nvmlComputeInstanceProfileInfo_t v1;
	nvmlComputeInstanceProfileInfo_v2_t v2 = {.version = nvmlComputeInstanceProfileInfo_v2};
	nvmlComputeInstanceProfileInfo_v3_t v3 = {.version = nvmlComputeInstanceProfileInfo_v3};
	CHECK(nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, 0, 0, NULL), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, 0, 1, &v1), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, 9, 0, &v1), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlGpuInstanceGetComputeInstanceProfileInfo(gi, 4, 0, &v1), NVML_ERROR_NOT_SUPPORTED);
	CHECK(nvmlGpuInstanceGetComputeInstanceProfileInfoV(gi, 0, 0, &v2), NVML_SUCCESS);
	CHECK(strcmp(v2.name, "MIG 1c.3g.40gb"), 0);
	CHECK(nvmlGpuInstanceGetComputeInstanceProfileInfoV(gi, 2, 0, (void *)&v3), NVML_SUCCESS);
	CHECK(strcmp(v3.name, "MIG 3g.40gb"), 0);
	CHECK(v3.capabilities, 0);
	v2.version = nvmlGpuInstanceProfileInfo_v2;
	CHECK(nvmlGpuInstanceGetComputeInstanceProfileInfoV(gi, 0, 0, &v2), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	v2.version = 0;
	CHECK(nvmlGpuInstanceGetComputeInstanceProfileInfoV(gi, 0, 0, &v2), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	nvmlGpuInstanceProfileInfo_v2_t g2 = {.version = 0};
	CHECK(nvmlDeviceGetGpuInstanceProfileInfoByIdV(d, 9, &g2), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceGetGpuInstanceProfileInfoByIdV(d, 9, NULL), NVML_ERROR_INVALID_ARGUMENT);

	CHECK(nvmlGpuInstanceCreateComputeInstance(gi, 0, NULL), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlGpuInstanceCreateComputeInstance(other, 0, &ci), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlGpuInstanceCreateComputeInstanceWithPlacement(gi, 0, NULL, &ci), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlGpuInstanceCreateComputeInstanceWithPlacement(gi, 0, &slice, &ci), NVML_SUCCESS);
	CHECK(nvmlGpuInstanceCreateComputeInstanceWithPlacement(gi, 0, &slice, &ci), NVML_ERROR_INSUFFICIENT_RESOURCES);
	n = 2;
	CHECK(nvmlGpuInstanceGetComputeInstancePossiblePlacements(gi, 0, slices, &n), NVML_ERROR_INSUFFICIENT_SIZE);
	CHECK(nvmlGpuInstanceGetComputeInstancePossiblePlacements(gi, 0, slices, &n), NVML_SUCCESS);
	CHECK(slices[2].start, 2);
	CHECK(nvmlGpuInstanceGetComputeInstances(gi, 0, &ci, NULL), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlGpuInstanceGetComputeInstances(gi, 0, &ci, &n), NVML_SUCCESS);
	CHECK(n, 1);
	CHECK(nvmlComputeInstanceGetInfo_v2(none, &cinfo), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlComputeInstanceGetInfo_v2(ci, &cinfo), NVML_SUCCESS);
	CHECK(cinfo.placement.size, 1);
	CHECK(cinfo.gpuInstance.handle == gi.handle, 1);
	/* The first version's struct ends before the placement. */
	memset(&cinfo, 0x55, sizeof cinfo);
	CHECK(nvmlComputeInstanceGetInfo(ci, &cinfo), NVML_SUCCESS);
	CHECK(cinfo.profileId, 0);
	CHECK(cinfo.placement.size, 0x55555555);

	nvmlDevice_t mig, parent;
	char s[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
	nvmlDeviceAttributes_t a;
	CHECK(nvmlDeviceGetMigDeviceHandleByIndex(d, 0, NULL), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceGetMigDeviceHandleByIndex(d, 0, &mig), NVML_SUCCESS);
	CHECK(nvmlDeviceGetUUID(mig, s, 40), NVML_ERROR_INSUFFICIENT_SIZE);
	CHECK(nvmlDeviceGetUUID(mig, s, sizeof s), NVML_SUCCESS);
	CHECK(strncmp(s, "MIG-", 4), 0);
	nvmlUUID_t by = {.version = nvmlUUID_v1, .type = NVML_UUID_TYPE_BINARY};
	nvmlDevice_t found = {NULL};
	for (int i = 4, n = 0; n < 16; i += 2) {
		unsigned int byte;
		if (s[i] == '-')
			i++;
		sscanf(s + i, "%2x", &byte);
		by.value.bytes[n++] = (unsigned char)byte;
	}
	CHECK(nvmlDeviceGetHandleByUUIDV(&by, &found), NVML_SUCCESS);
	CHECK(found.handle == mig.handle, 1);
	by.value.bytes[0] ^= 1;
	CHECK(nvmlDeviceGetHandleByUUIDV(&by, &found), NVML_ERROR_NOT_FOUND);
	CHECK(nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig, &parent), NVML_SUCCESS);
	CHECK(parent.handle == d.handle, 1);
	CHECK(nvmlDeviceGetAttributes_v2(mig, NULL), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceGetAttributes_v2(d, &a), NVML_ERROR_NOT_SUPPORTED);
	CHECK(nvmlDeviceGetMinorNumber(mig, &id), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlDeviceGetNumFans(mig, &id), NVML_ERROR_NOT_SUPPORTED);
	nvmlProcessInfo_t p[2];
	n = 2;
	CHECK(nvmlDeviceGetComputeRunningProcesses_v3(mig, &n, p), NVML_SUCCESS);
	CHECK(n, 0);
	CHECK(nvmlGpuInstanceDestroy(gi), NVML_ERROR_IN_USE);
	CHECK(nvmlComputeInstanceDestroy(ci), NVML_SUCCESS);
	CHECK(nvmlDeviceGetUUID(mig, s, sizeof s), NVML_ERROR_INVALID_ARGUMENT); /* kept answers are gone too */
	CHECK(nvmlGpuInstanceDestroy(gi), NVML_SUCCESS);
	CHECK(nvmlGpuInstanceDestroy(gi), NVML_ERROR_INVALID_ARGUMENT);
	CHECK(nvmlShutdown(), NVML_SUCCESS);
	CHECK(nvmlGpuInstanceDestroy(gi), NVML_ERROR_UNINITIALIZED);
`)
	want(t, "instances", len(n.world.State().GPUs[0].MIG.Instances), 0)
}

// Every call about MIG meets the faults of its exported name, and is counted.
func TestMIGFaults(t *testing.T) {
	n := start(t, inMode(1))
	d := device(t, n.open(t), 0)
	profile := must(d.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_1_SLICE))
	gi := must(d.CreateGpuInstance(&profile))
	cp := must(gi.GetComputeInstanceProfileInfo(0, 0))
	ci := must(gi.CreateComputeInstance(&cp))
	m := must(d.GetMigDeviceHandleByIndex(0))
	place, slice := &nvml.GpuInstancePlacement{Start: 0, Size: 1}, &nvml.ComputeInstancePlacement{Start: 0, Size: 1}
	for call, do := range map[string]func() nvml.Return{
		"nvmlDeviceGetMigMode":                                func() nvml.Return { _, _, r := d.GetMigMode(); return r },
		"nvmlDeviceSetMigMode":                                func() nvml.Return { return second(d.SetMigMode(1)) },
		"nvmlDeviceGetGpuInstanceProfileInfo":                 func() nvml.Return { return second(d.GetGpuInstanceProfileInfo(0)) },
		"nvmlDeviceGetGpuInstanceProfileInfoV":                func() nvml.Return { return second(d.GetGpuInstanceProfileInfoV(0).V3()) },
		"nvmlDeviceGetGpuInstanceProfileInfoByIdV":            func() nvml.Return { return second(d.GetGpuInstanceProfileInfoByIdV(19).V3()) },
		"nvmlDeviceGetGpuInstancePossiblePlacements*":         func() nvml.Return { return second(d.GetGpuInstancePossiblePlacements(&profile)) },
		"nvmlDeviceGetGpuInstanceRemainingCapacity":           func() nvml.Return { return second(d.GetGpuInstanceRemainingCapacity(&profile)) },
		"nvmlDeviceCreateGpuInstance":                         func() nvml.Return { return second(d.CreateGpuInstance(&profile)) },
		"nvmlDeviceCreateGpuInstanceWithPlacement":            func() nvml.Return { return second(d.CreateGpuInstanceWithPlacement(&profile, place)) },
		"nvmlGpuInstanceDestroy":                              gi.Destroy,
		"nvmlDeviceGetGpuInstances":                           func() nvml.Return { return second(d.GetGpuInstances(&profile)) },
		"nvmlDeviceGetGpuInstanceById":                        func() nvml.Return { return second(d.GetGpuInstanceById(7)) },
		"nvmlGpuInstanceGetInfo":                              func() nvml.Return { return second(gi.GetInfo()) },
		"nvmlGpuInstanceGetComputeInstanceProfileInfo":        func() nvml.Return { return second(gi.GetComputeInstanceProfileInfo(0, 0)) },
		"nvmlGpuInstanceGetComputeInstanceProfileInfoV":       func() nvml.Return { return second(gi.GetComputeInstanceProfileInfoV(0, 0).V2()) },
		"nvmlGpuInstanceGetComputeInstanceRemainingCapacity":  func() nvml.Return { return second(gi.GetComputeInstanceRemainingCapacity(&cp)) },
		"nvmlGpuInstanceGetComputeInstancePossiblePlacements": func() nvml.Return { return second(gi.GetComputeInstancePossiblePlacements(&cp)) },
		"nvmlGpuInstanceCreateComputeInstance":                func() nvml.Return { return second(gi.CreateComputeInstance(&cp)) },
		"nvmlGpuInstanceCreateComputeInstanceWithPlacement":   func() nvml.Return { return second(gi.CreateComputeInstanceWithPlacement(&cp, slice)) },
		"nvmlComputeInstanceDestroy":                          ci.Destroy,
		"nvmlGpuInstanceGetComputeInstances":                  func() nvml.Return { return second(gi.GetComputeInstances(&cp)) },
		"nvmlGpuInstanceGetComputeInstanceById":               func() nvml.Return { return second(gi.GetComputeInstanceById(0)) },
		"nvmlComputeInstanceGetInfo*":                         func() nvml.Return { return second(ci.GetInfo()) },
		"nvmlDeviceGetMaxMigDeviceCount":                      func() nvml.Return { return second(d.GetMaxMigDeviceCount()) },
		"nvmlDeviceGetMigDeviceHandleByIndex":                 func() nvml.Return { return second(d.GetMigDeviceHandleByIndex(0)) },
		"nvmlDeviceGetDeviceHandleFromMigDeviceHandle":        func() nvml.Return { return second(m.GetDeviceHandleFromMigDeviceHandle()) },
		"nvmlDeviceIsMigDeviceHandle":                         func() nvml.Return { return second(m.IsMigDeviceHandle()) },
		"nvmlDeviceGetGpuInstanceId":                          func() nvml.Return { return second(m.GetGpuInstanceId()) },
		"nvmlDeviceGetComputeInstanceId":                      func() nvml.Return { return second(m.GetComputeInstanceId()) },
		"nvmlDeviceGetAttributes*":                            func() nvml.Return { return second(m.GetAttributes()) },
	} {
		n.world.ResetCalls()
		zero := 0
		if err := n.world.Inject(emulator.Fault{Call: call, GPU: &zero, Code: 888}); err != nil {
			t.Fatal(err)
		}
		want(t, call, do(), nvml.Return(888))
		n.world.Clear()
		if calls := n.world.Calls(0); len(calls) != 1 || !strings.HasPrefix(calls[0].Call, strings.TrimSuffix(call, "*")) || calls[0].Count != 1 {
			t.Errorf("%s: counted %v", call, calls)
		}
	}
	want(t, "nothing happened", len(n.world.State().GPUs[0].MIG.Instances[0].Compute), 1)
}

// One program's threads at several GPUs at once.
func TestMIGFromManyThreads(t *testing.T) {
	n := start(t, inMode(8))
	api := n.open(t)
	var all sync.WaitGroup
	for i := range 8 {
		d := device(t, api, i)
		all.Go(func() {
			for range 20 {
				var made []nvml.GpuInstance
				for {
					profile, r := d.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_1_SLICE)
					if r != nvml.SUCCESS {
						t.Errorf("profile: %v", r)
						return
					}
					gi, r := d.CreateGpuInstance(&profile)
					if r == nvml.ERROR_INSUFFICIENT_RESOURCES {
						break
					}
					if r != nvml.SUCCESS {
						t.Errorf("create: %v", r)
						return
					}
					made = append(made, gi)
				}
				if len(made) != 7 {
					t.Errorf("made %d", len(made))
				}
				for _, gi := range made {
					if r := gi.Destroy(); r != nvml.SUCCESS {
						t.Errorf("destroy: %v", r)
					}
				}
			}
		})
	}
	all.Wait()
}
