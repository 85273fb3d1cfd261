// SPDX-License-Identifier: Apache-2.0

package lib_test

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/tests/emulator"
)

func TestLinks(t *testing.T) {
	n := start(t, emulator.Spec{Topology: "dgx-1"})
	api := n.open(t)
	a, b, far := device(t, api, 0), device(t, api, 3), device(t, api, 5)
	linkField := func(d nvml.Device, id, link uint32) string {
		t.Helper()
		v := []nvml.FieldValue{{FieldId: id, ScopeId: link}}
		ok(t, d.GetFieldValues(v), "field")
		if r := nvml.Return(v[0].NvmlReturn); r != nvml.SUCCESS {
			return r.Error()
		}
		return fmt.Sprint(binary.LittleEndian.Uint32(v[0].Value[:4]))
	}
	p2p := func(d, e nvml.Device, index nvml.GpuP2PCapsIndex) nvml.GpuP2PStatus {
		t.Helper()
		s, r := d.GetP2PStatus(e, index)
		ok(t, r, "P2P")
		return s
	}
	peer := func(link int) string {
		t.Helper()
		p, r := a.GetNvLinkRemotePciInfo(link)
		if r != nvml.SUCCESS {
			return r.Error()
		}
		return text(p.BusId[:])
	}
	state := func(link int) nvml.EnableState {
		t.Helper()
		s, r := a.GetNvLinkState(link)
		ok(t, r, "state")
		return s
	}
	look := func(up bool, speed, address string) {
		t.Helper()
		on := map[bool]nvml.EnableState{true: nvml.FEATURE_ENABLED, false: nvml.FEATURE_DISABLED}[up]
		want(t, "state of link 2", state(2), on)
		want(t, "its speed", linkField(a, nvml.FI_DEV_NVLINK_GET_SPEED, 2), speed)
		want(t, "its speed by the old number", linkField(a, nvml.FI_DEV_NVLINK_SPEED_MBPS_L2, 0), speed)
		want(t, "its state", linkField(a, nvml.FI_DEV_NVLINK_GET_STATE, 2), map[bool]string{true: "1", false: "0"}[up])
		want(t, "its peer", peer(2), address)
	}
	b0, r := b.GetPciInfo()
	ok(t, r, "PCI")
	look(true, "25781", text(b0.BusId[:]))
	version, r := a.GetNvLinkVersion(2)
	ok(t, r, "version")
	want(t, "version", version, uint32(nvml.NVLINK_VERSION_2_0))
	want(t, "version by its field", linkField(a, nvml.FI_DEV_NVLINK_GET_VERSION, 2), "2")
	want(t, "links", linkField(a, nvml.FI_DEV_NVLINK_LINK_COUNT, 0), "6")
	want(t, "common speed", linkField(a, nvml.FI_DEV_NVLINK_SPEED_MBPS_COMMON, 0), "25781")
	want(t, "number at the far end", linkField(b, nvml.FI_DEV_NVLINK_REMOTE_NVLINK_ID, 0), "2")
	want(t, "a link that the card lacks", linkField(a, nvml.FI_DEV_NVLINK_GET_STATE, 6), nvml.ERROR_NOT_SUPPORTED.Error())
	want(t, "a link that no card has", linkField(a, nvml.FI_DEV_NVLINK_GET_STATE, 36), nvml.ERROR_INVALID_ARGUMENT.Error())
	want(t, "joined", p2p(a, b, nvml.P2P_CAPS_INDEX_NVLINK), nvml.P2P_STATUS_OK)
	want(t, "not joined", p2p(a, far, nvml.P2P_CAPS_INDEX_NVLINK), nvml.P2P_STATUS_NOT_SUPPORTED)
	want(t, "over the bus", p2p(a, far, nvml.P2P_CAPS_INDEX_READ), nvml.P2P_STATUS_OK)

	if err := n.world.SetLink(3, 0, false); err != nil {
		t.Fatal(err)
	}
	look(false, "0", nvml.ERROR_NOT_SUPPORTED.Error())
	want(t, "joined by the other link", p2p(a, b, nvml.P2P_CAPS_INDEX_NVLINK), nvml.P2P_STATUS_OK)
	if err := n.world.SetLink(0, -1, false); err != nil {
		t.Fatal(err)
	}
	want(t, "joined by none", p2p(b, a, nvml.P2P_CAPS_INDEX_NVLINK), nvml.P2P_STATUS_NOT_SUPPORTED)
	want(t, "common speed of none", linkField(a, nvml.FI_DEV_NVLINK_SPEED_MBPS_COMMON, 0), "0")
	if err := n.world.SetLink(0, -1, true); err != nil {
		t.Fatal(err)
	}
	look(true, "25781", text(b0.BusId[:]))
}

func TestAffinity(t *testing.T) {
	n := start(t, emulator.Spec{Topology: "dgx-a100"})
	api := n.open(t)
	d := device(t, api, 0) // node 3: 48-63,176-191
	const (
		all  = 0xffff
		room = 32 // go-nvml makes a word of 8 of them
	)
	node := func(words []uint, r nvml.Return) []uint {
		t.Helper()
		ok(t, r, "affinity")
		return words
	}
	set := func(words ...uint) string { return fmt.Sprintf("%x", words) }
	want(t, "CPUs", set(node(d.GetCpuAffinity(room))...), set(all<<48, 0, all<<48, 0))
	want(t, "CPUs of the node", set(node(d.GetCpuAffinityWithinScope(room, nvml.AFFINITY_SCOPE_NODE))...), set(all<<48, 0, all<<48, 0))
	want(t, "CPUs of the socket", set(node(d.GetCpuAffinityWithinScope(room, nvml.AFFINITY_SCOPE_SOCKET))...), set(^uint(0), 0, ^uint(0), 0))
	want(t, "CPUs where there is little room", set(node(d.GetCpuAffinity(8))...), set(all<<48))
	want(t, "memory", set(node(d.GetMemoryAffinity(8, nvml.AFFINITY_SCOPE_NODE))...), set(1<<3))
	want(t, "memory of the socket", set(node(d.GetMemoryAffinity(8, nvml.AFFINITY_SCOPE_SOCKET))...), set(1<<0|1<<1|1<<2|1<<3))
	if _, r := d.GetMemoryAffinity(1, 2); r != nvml.ERROR_INVALID_ARGUMENT {
		t.Errorf("memory of what there is not: %v", r)
	}
}

func TestFabric(t *testing.T) {
	const cluster = "6ba61ed52c6b4b6f9f0b5f6d6a9b1c72"
	none := strings.Repeat("0", len(cluster))
	for _, c := range []struct {
		spec    emulator.Spec
		ret     nvml.Return
		state   uint8
		clique  uint32
		cluster string
	}{
		{emulator.Spec{Topology: "nvl72"}, nvml.SUCCESS, nvml.GPU_FABRIC_STATE_COMPLETED, 32766, cluster},
		{emulator.Spec{Topology: "dgx-h100"}, nvml.SUCCESS, nvml.GPU_FABRIC_STATE_COMPLETED, 0, none},
		{emulator.Spec{Topology: "nvl72", Fabric: &emulator.FabricSpec{State: "in-progress", Clique: 3}}, nvml.SUCCESS, nvml.GPU_FABRIC_STATE_IN_PROGRESS, 0, none},
		{emulator.Spec{Topology: "dgx-a100"}, nvml.ERROR_NOT_SUPPORTED, 0, 0, ""},
	} {
		t.Run(c.spec.Topology, func(t *testing.T) {
			api := start(t, c.spec).open(t)
			d := device(t, api, 1)
			v1, r1 := d.GetGpuFabricInfo()
			v2, r2 := d.GetGpuFabricInfoV().V2()
			want(t, "outcome", [2]nvml.Return{r1, r2}, [2]nvml.Return{c.ret, c.ret})
			if c.ret != nvml.SUCCESS {
				return
			}
			want(t, "state", [2]uint8{v1.State, v2.State}, [2]uint8{c.state, c.state})
			want(t, "clique", [2]uint32{v1.CliqueId, v2.CliqueId}, [2]uint32{c.clique, c.clique})
			want(t, "status", [2]uint32{v1.Status, v2.Status}, [2]uint32{})
			want(t, "cluster", fmt.Sprintf("%x", v1.ClusterUuid[:]), c.cluster)
			want(t, "cluster of the other form", v2.ClusterUuid, v1.ClusterUuid)
		})
	}
}
