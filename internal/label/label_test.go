// SPDX-License-Identifier: Apache-2.0

package label

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/topology"
)

const model = "NVIDIA A100-SXM4-80GB"

// machine is a node of n GPUs on an NVSwitch, with 12 lanes each.
func machine(n int) *gpu.Inventory {
	inv := &gpu.Inventory{Driver: "580.159.03", CUDA: "13.0", Machine: "DGXA100 920"}
	for i := range n {
		inv.GPUs = append(inv.GPUs, gpu.Device{
			Index: i, UUID: gpu.UUID(fmt.Sprintf("GPU-%d", i)), Model: model, ComputeCapability: "8.0", Memory: 81920, PCIClass: "0x030200",
			Links: []gpu.Link{{Switch: true, NVLink: 12}},
			MIG: gpu.MIG{Capable: true, Profiles: []gpu.Profile{
				{Name: "3g.40gb", Memory: 40192, SMs: 42, Engines: &gpu.Engines{Copy: 3, Decode: 2}},
			}},
		})
	}
	return inv
}

// node is what labels are made of, with a want for each GPU, the last for the
// rest.
func node(inv *gpu.Inventory, wants ...config.Want) Node {
	n := Node{Inventory: inv, Graph: topology.New(inv), Partition: "p"}
	for i := range inv.GPUs {
		if len(wants) > 0 {
			w := wants[min(i, len(wants)-1)]
			w.GPU = inv.GPUs[i].UUID
			n.Wanted = append(n.Wanted, w)
		}
	}
	return n
}

var (
	whole    = config.Want{Mode: config.Whole}
	units    = config.Want{Mode: config.Shared}
	onDemand = config.Want{Mode: config.MIG, OnDemand: true}
)

func fixed(t *testing.T, profile string, n int) config.Want {
	t.Helper()
	name, err := mig.Parse(profile)
	if err != nil {
		t.Fatal(err)
	}
	return config.Want{Mode: config.MIG, Geometry: []mig.Count{{Profile: name, N: n}}}
}

func TestOwn(t *testing.T) {
	all := map[string]string{
		"gpu.model": "NVIDIA-A100-SXM4-80GB", "gpu.memory": "81920", "gpu.count": "4", "gpu.mode": "whole", "gpu.partition.active": "p",
		"gpu.joined": "4", "gpu.nvlink": "12", "gpu.rdma": "none", "gpu.driver-version": "580.159.03", "gpu.cuda-version": "13.0",
	}
	for _, test := range []struct {
		name   string
		wants  []config.Want
		change func(*Node)
		// differs from all; empty is absent.
		differs map[string]string
	}{
		{"whole", []config.Want{whole}, nil, nil},
		{"shared", []config.Want{units}, nil, map[string]string{"gpu.mode": "shared"}},
		{"mixed", []config.Want{whole, units}, nil, map[string]string{"gpu.mode": "mixed"}},
		{"MIG has no NVLink", []config.Want{onDemand, whole}, nil, map[string]string{"gpu.mode": "mixed", "gpu.joined": "3"}},
		{"all MIG", []config.Want{onDemand}, nil, map[string]string{"gpu.mode": "mig", "gpu.joined": "1", "gpu.nvlink": ""}},
		{"MIG on its way out", []config.Want{whole}, func(n *Node) { n.Inventory.GPUs[0].MIG.Enabled = true }, nil},
		{"nobody decides", nil, func(n *Node) { n.Partition = "" }, map[string]string{"gpu.mode": "", "gpu.partition.active": ""}},
		{"nobody decides, MIG stands", []config.Want{{}}, func(n *Node) { n.Inventory.GPUs[1].MIG.Enabled = true }, map[string]string{"gpu.mode": "mig", "gpu.joined": "3"}},
		{"a lane is down", []config.Want{whole}, func(n *Node) { n.Inventory.GPUs[2].Links[0].NVLink = 11 }, map[string]string{"gpu.nvlink": "11"}},
		{"all of a GPU's links are down", []config.Want{whole}, func(n *Node) { n.Inventory.GPUs[2].Links = nil }, map[string]string{"gpu.joined": "3"}},
		{"no NVLink", []config.Want{whole}, func(n *Node) {
			for i := range n.Inventory.GPUs {
				n.Inventory.GPUs[i].Links = nil
			}
		}, map[string]string{"gpu.joined": "1", "gpu.nvlink": ""}},
		{"a chain that MIG parts", []config.Want{whole, onDemand, whole}, func(n *Node) {
			for i := range n.Inventory.GPUs {
				n.Inventory.GPUs[i].Links = nil
			}
			n.Inventory.GPUs[0].Links = []gpu.Link{{To: 1, NVLink: 4}}
			n.Inventory.GPUs[1].Links = []gpu.Link{{To: 0, NVLink: 4}, {To: 2, NVLink: 4}}
			n.Inventory.GPUs[2].Links = []gpu.Link{{To: 1, NVLink: 4}}
		}, map[string]string{"gpu.mode": "mixed", "gpu.joined": "1", "gpu.nvlink": ""}},
		{"a GPU has gone", []config.Want{whole}, func(n *Node) { n.Inventory.GPUs[3].Gone, n.Inventory.GPUs[3].Fault = true, "gone" }, map[string]string{"gpu.count": "3", "gpu.joined": "3"}},
		{"a GPU has a fault", []config.Want{whole}, func(n *Node) { n.Inventory.GPUs[3].Fault = "Xid 79" }, map[string]string{"gpu.joined": "3"}},
		{"two models", []config.Want{whole}, func(n *Node) {
			n.Inventory.GPUs[0].Model, n.Inventory.GPUs[0].Memory = "NVIDIA T4", 15360
		}, nil},
		{"two models, half and half", []config.Want{whole}, func(n *Node) {
			for i := range 2 {
				n.Inventory.GPUs[i].Model, n.Inventory.GPUs[i].Memory = "NVIDIA T4", 15360
			}
		}, map[string]string{"gpu.model": "NVIDIA-T4", "gpu.memory": "15360"}},
		{"networks", []config.Want{whole}, func(n *Node) {
			n.Inventory.NICs = []gpu.NIC{{Kind: gpu.RoCE, Active: true}, {Kind: gpu.InfiniBand, Active: true}}
		}, map[string]string{"gpu.rdma": "infiniband"}},
		{"a network without a cable", []config.Want{whole}, func(n *Node) {
			n.Inventory.NICs = []gpu.NIC{{Kind: gpu.RoCE, Active: true}, {Kind: gpu.InfiniBand}}
		}, map[string]string{"gpu.rdma": "roce"}},
		{"no cable at all", []config.Want{whole}, func(n *Node) { n.Inventory.NICs = []gpu.NIC{{Kind: gpu.EFA}} }, map[string]string{"gpu.rdma": "efa"}},
		{"a fabric", []config.Want{whole}, func(n *Node) {
			n.Inventory.GPUs[0].Fabric = &gpu.Fabric{Cluster: "aaaa-bb", Clique: 7}
			n.Inventory.GPUs[2].Fabric = &gpu.Fabric{Cluster: "aaaa-bb", Clique: 7}
		}, map[string]string{"gpu.nvlink-domain": "aaaa-bb.7"}},
		{"two fabrics", []config.Want{whole}, func(n *Node) {
			n.Inventory.GPUs[0].Fabric = &gpu.Fabric{Cluster: "aaaa-bb", Clique: 7}
			n.Inventory.GPUs[2].Fabric = &gpu.Fabric{Cluster: "aaaa-bb", Clique: 8}
		}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			n := node(machine(4), test.wants...)
			if test.change != nil {
				test.change(&n)
				n.Graph = topology.New(n.Inventory)
			}
			want := maps.Clone(all)
			for name, v := range test.differs {
				if want[name] = v; v == "" {
					delete(want, name)
				}
			}
			got := map[string]string{}
			for key, v := range Own("example.com", n) {
				got[strings.TrimPrefix(key, "example.com/")] = v
			}
			equal(t, got, want)
		})
	}
}

// Names has each label that there is, and no other.
func TestNamesAreWhatOwnWrites(t *testing.T) {
	n := node(machine(4), whole)
	n.Inventory.NICs = []gpu.NIC{{Kind: gpu.EFA}}
	n.Inventory.GPUs[0].Fabric = &gpu.Fabric{Cluster: "aaaa-bb", Clique: 7}
	var got []string
	for _, key := range slices.Sorted(maps.Keys(Own("example.com", n))) {
		got = append(got, strings.TrimPrefix(key, "example.com/"))
	}
	if !slices.Equal(got, Names) {
		t.Errorf("a node of which everything is known has the labels\n%q, want\n%q", got, Names)
	}
}

// Of a link's failure on a machine without a switch both GPUs tell.
func TestOwnWithoutLinksKnown(t *testing.T) {
	n := node(machine(2), whole)
	n.Graph = nil
	got := Own("example.com", n)
	for _, name := range []string{"gpu.joined", "gpu.nvlink"} {
		if v, there := got["example.com/"+name]; there {
			t.Errorf("%s is %q of links that nobody knows", name, v)
		}
	}
}

func TestNVIDIA(t *testing.T) {
	for _, test := range []struct {
		name   string
		wants  []config.Want
		change func(*gpu.Inventory)
		// want are some of the labels; empty is absent.
		want map[string]string
	}{
		{"whole", []config.Want{whole}, nil, map[string]string{
			"gpu.product": "NVIDIA-A100-SXM4-80GB", "gpu.replicas": "1", "gpu.sharing-strategy": "none", "mig.strategy": "", "mig.capable": "true", "gfd.timestamp": ""}},
		{"units have no word", []config.Want{units}, nil, map[string]string{"gpu.product": "NVIDIA-A100-SXM4-80GB", "gpu.replicas": "1", "gpu.sharing-strategy": "none"}},
		{"replicas", []config.Want{{Mode: config.Shared, Replicas: 4}}, nil, map[string]string{
			"gpu.product": "NVIDIA-A100-SXM4-80GB-SHARED", "gpu.replicas": "4", "gpu.sharing-strategy": "time-slicing", "mps.capable": "false"}},
		{"replicas through MPS", []config.Want{{Mode: config.Shared, Replicas: 4, Compute: compute.Sharing{MPS: true}}}, nil, map[string]string{
			"gpu.product": "NVIDIA-A100-SXM4-80GB-SHARED", "gpu.replicas": "4", "gpu.sharing-strategy": "mps", "mps.capable": "true"}},
		{"replicas through MPS on some", []config.Want{{Mode: config.Shared, Replicas: 4, Compute: compute.Sharing{MPS: true}}, {Mode: config.Shared, Replicas: 4}}, nil, map[string]string{
			"gpu.replicas": "4", "gpu.sharing-strategy": "time-slicing", "mps.capable": "true"}},
		{"replicas on some", []config.Want{{Mode: config.Shared, Replicas: 4}, whole}, nil, map[string]string{
			"gpu.product": "NVIDIA-A100-SXM4-80GB", "gpu.replicas": "1", "gpu.sharing-strategy": "none"}},
		{"replicas beside MIG", []config.Want{onDemand, {Mode: config.Shared, Replicas: 4}}, nil, map[string]string{
			"gpu.replicas": "4", "mig.strategy": "mixed", "gpu.count": "4"}},
		{"on demand, nothing is counted", []config.Want{onDemand}, func(inv *gpu.Inventory) {
			inv.GPUs[0].MIG.Enabled = true
			inv.GPUs[0].MIG.Instances = []gpu.Instance{{Profile: "3g.40gb", Placement: gpu.Placement{Start: 0, Size: 4}}}
		}, map[string]string{"mig.strategy": "mixed", "mig-3g.40gb.count": "", "mig-3g.40gb.product": "", "gpu.replicas": "0"}},
		{"fixed", []config.Want{fixed(t, "3g.40gb", 2), whole}, nil, map[string]string{
			"mig.strategy": "mixed", "mig-3g.40gb.count": "2", "mig-3g.40gb.memory": "40192", "mig-3g.40gb.multiprocessors": "42",
			"mig-3g.40gb.engines.copy": "3", "mig-3g.40gb.engines.ofa": "0", "mig-3g.40gb.slices.gi": "3", "mig-3g.40gb.slices.ci": "3",
			"mig-3g.40gb.product": "NVIDIA-A100-SXM4-80GB-MIG-3g.40gb", "mig-3g.40gb.replicas": "1", "gpu.replicas": "1"}},
		{"split", []config.Want{fixed(t, "1c.3g.40gb", 3)}, nil, map[string]string{
			"mig-1c.3g.40gb.count": "12", "mig-1c.3g.40gb.multiprocessors": "14", "mig-1c.3g.40gb.slices.ci": "1", "mig-1c.3g.40gb.memory": "40192"}},
		{"a profile that nobody has described", []config.Want{fixed(t, "1g.10gb+me", 1)}, nil, map[string]string{
			"mig-1g.10gb.me.count": "4", "mig-1g.10gb.me.memory": "", "mig-1g.10gb.me.engines.copy": "", "mig-1g.10gb.me.product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb.me"}},
		{"MIG wanted with no instance", []config.Want{{Mode: config.MIG}}, nil, map[string]string{"mig.strategy": "mixed", "gpu.replicas": "0"}},
		{"a name that is too long for its suffix", []config.Want{{Mode: config.Shared, Replicas: 2}}, func(inv *gpu.Inventory) {
			for i := range inv.GPUs {
				inv.GPUs[i].Model = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition 2nd"
			}
		}, map[string]string{"gpu.product": "NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstation-Edition-SHARED"}},
		{"a machine with a strange name", []config.Want{whole}, func(inv *gpu.Inventory) { inv.Machine = " (O.E.M.) " }, map[string]string{"gpu.machine": "O.E.M"}},
		{"a machine without a name", []config.Want{whole}, func(inv *gpu.Inventory) { inv.Machine = "" }, map[string]string{"gpu.machine": "unknown"}},
		{"a driver of two numbers", []config.Want{whole}, func(inv *gpu.Inventory) { inv.Driver = "581.15" }, map[string]string{
			"cuda.driver-version.full": "581.15", "cuda.driver-version.minor": "15"}},
		{"outputs", []config.Want{whole}, func(inv *gpu.Inventory) {
			for i := range inv.GPUs {
				inv.GPUs[i].PCIClass = "0x030000"
			}
		}, map[string]string{"gpu.mode": "graphics"}},
		{"outputs on one", []config.Want{whole}, func(inv *gpu.Inventory) { inv.GPUs[1].PCIClass = "0x030000" }, map[string]string{"gpu.mode": "unknown"}},
		{"Ada", []config.Want{whole}, func(inv *gpu.Inventory) {
			for i := range inv.GPUs {
				inv.GPUs[i].ComputeCapability = "8.9"
			}
		}, map[string]string{"gpu.family": "ada-lovelace", "gpu.compute.minor": "9"}},
		{"a virtual GPU", []config.Want{whole}, func(inv *gpu.Inventory) {
			inv.GPUs[0].VGPU = &gpu.VGPU{HostDriver: "570.133.20", HostBranch: "r570_00"}
		}, map[string]string{"vgpu.present": "true", "vgpu.host-driver-version": "570.133.20", "vgpu.host-driver-branch": "r570_00"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			inv := machine(4)
			if test.change != nil {
				test.change(inv)
			}
			got := NVIDIA(node(inv, test.wants...))
			for name, want := range test.want {
				v, there := got["nvidia.com/"+name]
				if v != want || there != (want != "") {
					t.Errorf("%s=%q (%v), want %q", name, v, there, want)
				}
			}
		})
	}
}

// While a change is under way modes and instances come and go, and no label does.
func TestNothingFlickersDuringAChange(t *testing.T) {
	want := []config.Want{fixed(t, "3g.40gb", 2), whole}
	var first Node
	for step, change := range []func(*gpu.Inventory){
		func(*gpu.Inventory) {},
		func(inv *gpu.Inventory) { pending := true; inv.GPUs[0].MIG.Pending = &pending },
		func(inv *gpu.Inventory) { inv.GPUs[0].MIG.Enabled = true },
		func(inv *gpu.Inventory) {
			inv.GPUs[0].MIG.Enabled = true
			inv.GPUs[0].MIG.Instances = []gpu.Instance{{Profile: "3g.40gb"}}
		},
		func(inv *gpu.Inventory) { inv.GPUs[1].MIG.Enabled = true }, // was cut before, and is to be whole
		// MIG takes a card's NVLinks away.
		func(inv *gpu.Inventory) { inv.GPUs[0].MIG.Enabled, inv.GPUs[0].Links = true, nil },
	} {
		inv := machine(4)
		change(inv)
		now := node(inv, want...)
		if step == 0 {
			first = now
		}
		t.Run(fmt.Sprint(step), func(t *testing.T) {
			equal(t, Own("example.com", now), Own("example.com", first))
			equal(t, NVIDIA(now), NVIDIA(first))
		})
	}
}

func TestNothingIsKnown(t *testing.T) {
	gone := machine(1)
	gone.GPUs[0].Gone = true
	undescribed := machine(1)
	undescribed.GPUs[0].Model = ""
	for name, inv := range map[string]*gpu.Inventory{"no inventory": nil, "no GPU": {}, "gone": gone, "undescribed": undescribed} {
		n := Node{Inventory: inv, Graph: topology.New(inv), Partition: "p"}
		if own, nvidia := Own("example.com", n), NVIDIA(n); own != nil || nvidia != nil {
			t.Errorf("%s: %v, %v; want nothing", name, own, nvidia)
		}
	}
}

// legal is what the API takes.
var (
	legalValue = regexp.MustCompile(`^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$`)
	legalName  = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`)
)

// Whatever a driver calls things, labels are legal ones, and the same each time.
func FuzzLegal(f *testing.F) {
	f.Add("NVIDIA A100-SXM4-80GB", "580.159.03", "13.0", "DGXA100", "default", "3g.40gb", 4)
	f.Add("-.-", ".", ".", "\x00", "--", "1c.7g.80gb+me.all", 0)
	f.Add(strings.Repeat("ä x", 90), "1.2.3.4", "13", strings.Repeat("_", 70), strings.Repeat("p", 64), "1g.5gb-me", -3)
	f.Fuzz(func(t *testing.T, model, driver, cuda, machineName, partition, profile string, lanes int) {
		inv := machine(3)
		inv.Driver, inv.CUDA, inv.Machine = driver, cuda, machineName
		for i := range inv.GPUs {
			inv.GPUs[i].Model, inv.GPUs[i].ComputeCapability = model, cuda
			inv.GPUs[i].Links[0].NVLink = lanes
			inv.GPUs[i].Fabric = &gpu.Fabric{Cluster: machineName}
			inv.GPUs[i].VGPU = &gpu.VGPU{HostDriver: driver, HostBranch: machineName}
		}
		wants := []config.Want{whole, {Mode: config.Shared, Replicas: lanes}}
		if name, err := mig.Parse(profile); err == nil {
			wants = append(wants, config.Want{Mode: config.MIG, Geometry: []mig.Count{{Profile: name, N: max(lanes, 1)}}})
		}
		n := node(inv, wants...)
		n.Partition = partition
		for _, make := range []func() map[string]string{func() map[string]string { return Own("example.com", n) }, func() map[string]string { return NVIDIA(n) }} {
			labels := make()
			if !maps.Equal(labels, make()) {
				t.Error("not the same twice")
			}
			for key, v := range labels {
				_, name, _ := strings.Cut(key, "/")
				if strings.HasPrefix(key, "example.com/") && !slices.Contains(Names, name) {
					t.Errorf("%s is none of Names", key)
				}
				if len(v) > 63 || !legalValue.MatchString(v) || !legalName.MatchString(name) {
					t.Errorf("%q=%q is no label", key, v)
				}
			}
		}
	})
}

func equal(t *testing.T, got, want map[string]string) {
	t.Helper()
	keys := maps.Clone(want)
	maps.Copy(keys, got)
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		a, have := got[key]
		b, asked := want[key]
		if a != b || have != asked {
			t.Errorf("%s: %q (%v), want %q (%v)", key, a, have, b, asked)
		}
	}
}
