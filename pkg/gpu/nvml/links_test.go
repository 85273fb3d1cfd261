// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"

	"example.com/gpu-agent/pkg/gpu"
)

// far is what stands at the far end of a link.
type far struct {
	up     bool
	sw     bool
	peer   string // PCI address
	mbps   uint32
	state  uint32 // of the field; 0 follows up
	silent bool   // the driver tells nothing of its far end
}

// linked is a driver whose GPUs have NVLinks.
type linked struct {
	t       *testing.T
	links   []far
	version uint32
	counted int         // links that the driver knows at all; 0: as many as there are
	old     bool        // it does not know the fields of each link
	liar    bool        // its field says that all links are up
	mute    bool        // it fails to read fields
	fail    nvml.Return // what questions about links answer, if not success
	calls   map[string]int
}

func (l *linked) at(number int) (far, nvml.Return) {
	if l.fail != nvml.SUCCESS {
		return far{}, l.fail
	}
	if number >= len(l.links) {
		if number < l.counted {
			return far{}, nvml.ERROR_NOT_SUPPORTED
		}
		return far{}, nvml.ERROR_INVALID_ARGUMENT
	}
	return l.links[number], nvml.SUCCESS
}

func (l *linked) device() nvml.Device {
	count := func(call string) { l.calls[call]++ }
	return &mock.Device{
		GetNvLinkStateFunc: func(number int) (nvml.EnableState, nvml.Return) {
			count("state")
			f, ret := l.at(number)
			if f.up {
				return nvml.FEATURE_ENABLED, ret
			}
			return nvml.FEATURE_DISABLED, ret
		},
		GetNvLinkVersionFunc: func(number int) (uint32, nvml.Return) {
			count("version")
			_, ret := l.at(number)
			return l.version, ret
		},
		GetNvLinkRemoteDeviceTypeFunc: func(number int) (nvml.IntNvLinkDeviceType, nvml.Return) {
			count("type")
			f, ret := l.at(number)
			if !f.up || f.silent {
				return 0, nvml.ERROR_NOT_SUPPORTED
			}
			if f.sw {
				return nvml.NVLINK_DEVICE_TYPE_SWITCH, ret
			}
			return nvml.NVLINK_DEVICE_TYPE_GPU, ret
		},
		GetNvLinkRemotePciInfoFunc: func(number int) (nvml.PciInfo, nvml.Return) {
			count("remote")
			f, ret := l.at(number)
			if !f.up || f.silent {
				return nvml.PciInfo{}, nvml.ERROR_NOT_SUPPORTED
			}
			var pci nvml.PciInfo
			for i, c := range f.peer {
				pci.BusId[i] = int8(c)
			}
			return pci, ret
		},
		GetFieldValuesFunc: func(values []nvml.FieldValue) nvml.Return {
			count("fields")
			if l.fail != nvml.SUCCESS || l.mute {
				return cmp.Or(l.fail, nvml.ERROR_UNKNOWN)
			}
			for i := range values {
				v := &values[i]
				f, ret := l.at(int(v.ScopeId))
				n := uint32(0)
				switch v.FieldId {
				case nvml.FI_DEV_NVLINK_GET_STATE:
					if n = f.state; n == 0 && (f.up || l.liar) {
						n = nvml.NVLINK_STATE_ACTIVE
					}
				case nvml.FI_DEV_NVLINK_GET_SPEED:
					n = f.mbps
				case nvml.FI_DEV_NVLINK_SPEED_MBPS_COMMON:
					n = 25781
				default:
					l.t.Errorf("field %d", v.FieldId)
				}
				if l.old && v.FieldId >= nvml.FI_DEV_NVLINK_GET_SPEED {
					ret = nvml.ERROR_INVALID_ARGUMENT
				}
				v.NvmlReturn, v.ValueType = uint32(ret), uint32(nvml.VALUE_TYPE_UNSIGNED_INT)
				binary.NativeEndian.PutUint32(v.Value[:], n)
			}
			return nvml.SUCCESS
		},
	}
}

func linkedDriver(t *testing.T, missing ...string) *components {
	return newComponents(&session{
		lib: &mock.Interface{ExtensionsFunc: func() nvml.ExtendedInterface { return without(missing) }},
		log: slog.New(slog.DiscardHandler),
	})
}

// three GPUs, of which the first one's links are read.
func three() []gpu.Device {
	gpus := make([]gpu.Device, 3)
	for i := range gpus {
		gpus[i] = gpu.Device{Index: i, UUID: gpu.UUID(fmt.Sprintf("GPU-%d", i)), PCI: fmt.Sprintf("00000000:0%d:00.0", i+1)}
	}
	return gpus
}

func TestReadLinks(t *testing.T) {
	const one, two, nobody = "00000000:02:00.0", "00000000:03:00.0", "00000000:0F:00.0"
	peers := []far{{up: true, peer: two, mbps: 25000}, {up: true, peer: one, mbps: 25000}, {up: true, peer: one, mbps: 25000}, {peer: one}}
	for _, c := range []struct {
		name    string
		driver  linked
		missing []string
		want    []gpu.Link
		again   map[string]int // calls of a second reading
	}{
		{
			"peers, one lane down", linked{links: peers, version: 5}, nil,
			[]gpu.Link{{To: 1, NVLink: 2, Version: 3, LaneMBps: 25000}, {To: 2, NVLink: 1, Version: 3, LaneMBps: 25000}},
			map[string]int{"fields": 1},
		},
		{
			"a switch", linked{links: slices.Repeat([]far{{up: true, sw: true, mbps: 26562}}, 18), version: 6, counted: 36}, nil,
			[]gpu.Link{{Switch: true, NVLink: 18, Version: 4, LaneMBps: 26562}},
			map[string]int{"fields": 1},
		},
		{
			"a switch and a peer", linked{links: []far{{up: true, sw: true}, {up: true, peer: two}}, version: 7}, nil,
			[]gpu.Link{{To: 2, NVLink: 1, Version: 5}, {Switch: true, NVLink: 1, Version: 5}},
			map[string]int{"fields": 1},
		},
		{
			"R470: a call for each link, one speed for all", linked{links: peers, version: 2, old: true}, nil,
			[]gpu.Link{{To: 1, NVLink: 2, Version: 2, LaneMBps: 25781}, {To: 2, NVLink: 1, Version: 2, LaneMBps: 25781}},
			map[string]int{"state": 4},
		},
		{
			"without what may be missing", linked{links: peers}, []string{"nvmlDeviceGetFieldValues", "nvmlDeviceGetNvLinkVersion", "nvmlDeviceGetNvLinkRemoteDeviceType"},
			[]gpu.Link{{To: 1, NVLink: 2}, {To: 2, NVLink: 1}},
			map[string]int{"state": 4},
		},
		{
			"a field that disagrees is not asked again", linked{links: peers, version: 4, liar: true}, nil,
			[]gpu.Link{{To: 1, NVLink: 2, Version: 3, LaneMBps: 25000}, {To: 2, NVLink: 1, Version: 3, LaneMBps: 25000}},
			map[string]int{"state": 4},
		},
		{
			"a link that sleeps, and one that carries nothing", linked{version: 6, links: []far{
				{up: true, peer: one, state: nvml.NVLINK_STATE_SLEEP, mbps: 26562}, {up: true, peer: one, state: nvml.NVLINK_STATE_ACTIVE_TRAFFIC_DISABLED, mbps: 26562},
			}}, nil,
			[]gpu.Link{{To: 1, NVLink: 1, Version: 4, LaneMBps: 26562}},
			map[string]int{"fields": 1},
		},
		{
			"lanes of two speeds", linked{version: 3, links: []far{{up: true, peer: one, mbps: 25000}, {up: true, peer: one, mbps: 20000}, {up: true, peer: one}}}, nil,
			[]gpu.Link{{To: 1, NVLink: 3, Version: 2, LaneMBps: 22500}},
			map[string]int{"fields": 1},
		},
		{
			"to the processor, to itself and to another guest's GPU", linked{version: 99, links: []far{
				{up: true, peer: nobody}, {up: true, peer: "00000000:01:00.0"}, {up: true, peer: two},
			}}, nil,
			[]gpu.Link{{To: 2, NVLink: 1}},
			map[string]int{"fields": 1},
		},
		{
			"one whose end is not told is asked about again", linked{links: []far{{up: true, silent: true, mbps: 1}}, version: 6}, nil, nil,
			map[string]int{"fields": 2, "version": 1, "type": 1, "remote": 1},
		},
		{"no NVLink: nothing is asked twice", linked{counted: 36}, nil, nil, map[string]int{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			world := c.driver
			world.t, world.calls = t, map[string]int{}
			d, h, gpus := linkedDriver(t, c.missing...), world.device(), three()
			if got := d.links.lanesOf(h, &gpus[0]).joined(0, gpus); !slices.Equal(got, c.want) {
				t.Errorf("links %+v, want %+v", got, c.want)
			}
			clear(world.calls)
			if got := d.links.lanesOf(h, &gpus[0]).joined(0, gpus); !slices.Equal(got, c.want) {
				t.Errorf("then links %+v, want %+v", got, c.want)
			}
			if fmt.Sprint(world.calls) != fmt.Sprint(c.again) {
				t.Errorf("the second reading took the calls %v, want %v", world.calls, c.again)
			}
		})
	}
}

// A link fails and returns slower; meanwhile the driver is silent once. Where it
// leads is kept, by address: the peer has another index in the end.
func TestLinkFailsAndReturns(t *testing.T) {
	for _, old := range []bool{false, true} {
		world := &linked{t: t, calls: map[string]int{}, version: 5, old: old, links: []far{{up: true, peer: three()[2].PCI, mbps: 25000}, {up: true, peer: three()[2].PCI, mbps: 25000}}}
		d, h, gpus := linkedDriver(t), world.device(), three()
		step := func(name string, want ...gpu.Link) {
			t.Helper()
			if old {
				for i := range want {
					want[i].LaneMBps = 25781
				}
			}
			if got := d.links.lanesOf(h, &gpus[0]).joined(0, gpus); !slices.Equal(got, want) {
				t.Errorf("%s (fields %v): %+v, want %+v", name, !old, got, want)
			}
		}
		step("whole", gpu.Link{To: 2, NVLink: 2, Version: 3, LaneMBps: 25000})
		world.links[1].up, world.mute = false, true
		step("one down, and fields are not told", gpu.Link{To: 2, NVLink: 1, Version: 3, LaneMBps: 25000})
		world.mute = false
		step("one down", gpu.Link{To: 2, NVLink: 1, Version: 3, LaneMBps: 25000})
		world.fail = nvml.ERROR_UNKNOWN
		step("nothing is told", gpu.Link{To: 2, NVLink: 1, Version: 3, LaneMBps: 25000})
		world.fail = nvml.SUCCESS
		world.links[0].up = false
		step("both down")
		gpus[1], gpus[2] = gpus[2], gpus[1]
		gpus[1].Index, gpus[2].Index = 1, 2
		world.links[0].up, world.links[1].up, world.links[1].mbps = true, true, 15000
		step("back", gpu.Link{To: 1, NVLink: 2, Version: 3, LaneMBps: 20000})
		gpus[1].Gone = true
		step("the peer is gone")
	}
}

// A GPU without links is not asked again, until its MIG mode changes (a driver may
// hide them meanwhile), it has moved, or the driver was initialised anew.
func TestLinksAreCountedAgain(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(d *components, dev *gpu.Device) error
	}{
		{"another MIG mode", func(_ *components, dev *gpu.Device) error { dev.MIG.Enabled = true; return nil }},
		{"another address", func(_ *components, dev *gpu.Device) error { dev.PCI = "00000000:0a:00.0"; return nil }},
		{"initialised anew", func(d *components, _ *gpu.Device) error { return d.initialised() }},
	} {
		world := &linked{t: t, calls: map[string]int{}, counted: 12}
		d, h, gpus := linkedDriver(t), world.device(), three()
		d.lib.(*mock.Interface).InitFunc = func() nvml.Return { return nvml.SUCCESS }
		for _, want := range []int{0, 0, 1} {
			if want > 0 {
				if err := c.do(d, &gpus[0]); err != nil {
					t.Fatal(err)
				}
			}
			if got := d.links.lanesOf(h, &gpus[0]).joined(0, gpus); len(got) != want {
				t.Errorf("%s: links %+v, want %d", c.name, got, want)
			}
			world.links = []far{{up: true, sw: true}}
		}
	}
}

func TestFabric(t *testing.T) {
	cluster := [16]uint8{0x1e, 0x4d, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}
	before := &gpu.Fabric{Cluster: "as it was", Clique: 1}
	for _, c := range []struct {
		name string
		info nvml.GpuFabricInfo
		ret  nvml.Return
		want string
	}{
		{"taken up", nvml.GpuFabricInfo{ClusterUuid: cluster, CliqueId: 7, State: nvml.GPU_FABRIC_STATE_COMPLETED}, nvml.SUCCESS, "1e4d0001-0203-0405-0607-08090a0b0c0d.7"},
		{"not yet", nvml.GpuFabricInfo{ClusterUuid: cluster, CliqueId: 7, State: nvml.GPU_FABRIC_STATE_IN_PROGRESS}, nvml.SUCCESS, "none"},
		{"in vain", nvml.GpuFabricInfo{ClusterUuid: cluster, CliqueId: 7, State: nvml.GPU_FABRIC_STATE_COMPLETED, Status: uint32(nvml.ERROR_UNKNOWN)}, nvml.SUCCESS, "none"},
		{"of its own machine", nvml.GpuFabricInfo{State: nvml.GPU_FABRIC_STATE_COMPLETED}, nvml.SUCCESS, "none"},
		{"before Hopper", nvml.GpuFabricInfo{}, nvml.ERROR_NOT_SUPPORTED, "none"},
		{"no answer", nvml.GpuFabricInfo{}, nvml.ERROR_UNKNOWN, "as it was.1"},
	} {
		h := &mock.Device{GetGpuFabricInfoFunc: func() (nvml.GpuFabricInfo, nvml.Return) { return c.info, c.ret }}
		got := "none"
		if f := linkedDriver(t, "nvmlDeviceGetGpuFabricInfoV").links.fabric(h, before); f != nil {
			got = fmt.Sprintf("%s.%d", f.Cluster, f.Clique)
		}
		if got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
	if f := linkedDriver(t, "nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetGpuFabricInfo").links.fabric(&mock.Device{}, before); f != nil {
		t.Errorf("a driver without the call: %+v", f)
	}
}

// Every version that the header names has a generation.
func TestGeneration(t *testing.T) {
	want := []int{0, 1, 2, 2, 3, 3, 4, 5, 6, 0}
	for version, want := range want {
		if got := generation(uint32(version)); got != want {
			t.Errorf("version %d: %d, want %d", version, got, want)
		}
	}
	if nvml.NVLINK_VERSION_6_0 != 8 {
		t.Error(errors.New("the header's enumeration has changed"))
	}
}
