// SPDX-License-Identifier: Apache-2.0

package page

import (
	"fmt"
	"reflect"
	"strings"
	"time"

	"example.com/gpu-agent/internal/obs"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/topology"
)

// noon is when the pages are drawn.
var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// nodes are what the page is looked at with.
func nodes() map[string]obs.Status {
	mesh := status("dgx1-3", machine{name: "NVIDIA DGX-1", model: "Tesla V100-SXM2-32GB", memory: 32768, gpus: 8, perSwitch: 2, nicsPerSwitch: 1, links: cubeMesh})
	sixteen := status("dgx2-1", machine{name: "NVIDIA DGX-2", model: "Tesla V100-SXM3-32GB", memory: 32768, gpus: 16, perSwitch: 2, nicsPerSwitch: 1, links: switched(6, 25781)})
	pcie := status("pcie-1", machine{name: "PowerEdge R750xa", model: "NVIDIA L40S", memory: 46068, gpus: 4, perSwitch: 1, links: func(int) []gpu.Link { return nil }})
	return map[string]obs.Status{
		"rich": rich(), "mesh": mesh, "sixteen": sixteen, "pcie": pcie, "hostile": hostile(rich()), "busy": busy(),
		"nothing": {Node: "new-node", Version: "v0.1.0", Watchdog: obs.Watchdog{State: obs.WatchdogOff, Reason: "no driver answers"},
			Hardware: "the driver's library cannot be loaded, since 2026-03-01T11:59:00Z"},
	}
}

// machine is a computer with two NUMA nodes.
type machine struct {
	name, model              string
	memory                   gpu.MiB
	gpus                     int
	perSwitch, nicsPerSwitch int // GPUs and network cards on a PCIe switch
	storage                  int // network cards beside the GPUs, on each NUMA node
	links                    func(i int) []gpu.Link
}

func (m machine) inventory() *gpu.Inventory {
	inv := &gpu.Inventory{Driver: "580.159.03", CUDA: "13.0", Machine: m.name,
		NUMA: []gpu.NUMANode{{ID: 0, CPUs: "0-55,112-167"}, {ID: 1, CPUs: "56-111,168-223"}}}
	nic := func(numa int, pci string, path ...string) {
		inv.NICs = append(inv.NICs, gpu.NIC{Name: fmt.Sprintf("mlx5_%d", len(inv.NICs)), Kind: gpu.InfiniBand, PCI: pci,
			NUMA: &numa, Path: path, Active: len(inv.NICs) != 3})
	}
	for i := range m.gpus {
		numa := i * 2 / m.gpus
		group := i / m.perSwitch
		host, port := fmt.Sprintf("pci0000:%02x", 0x10+16*group), fmt.Sprintf("00%02x:00:01.0", 0x10+16*group)
		inv.GPUs = append(inv.GPUs, gpu.Device{Index: i, Minor: i, UUID: gpu.UUID(fmt.Sprintf("GPU-8a34c1f0-51f2-4f7e-9d1b-0c5f2f6e4a%02d", i)),
			PCI: fmt.Sprintf("00000000:%02x:00.0", 0x1b+12*i), Model: m.model, Memory: m.memory, NUMA: &numa, CPUs: inv.NUMA[numa].CPUs,
			Path: []string{host, port, fmt.Sprintf("00%02x:02:%02x.0", 0x10+16*group, i%m.perSwitch)}, Links: m.links(i)})
		if i%m.perSwitch == 0 {
			for k := range m.nicsPerSwitch {
				nic(numa, fmt.Sprintf("00%02x:1c:%02x.0", 0x10+i, k), host, port, fmt.Sprintf("00%02x:02:%02x.0", 0x10+16*group, 16+k))
			}
		}
		if (i+1)*2%m.gpus == 0 {
			for k := range m.storage {
				nic(numa, fmt.Sprintf("00f%d:00:0%d.0", numa, k), fmt.Sprintf("pci0000:f%d", numa), fmt.Sprintf("0000:f%d:0%d.0", numa, k))
			}
		}
	}
	return inv
}

func switched(lanes, speed int) func(int) []gpu.Link {
	return func(int) []gpu.Link { return []gpu.Link{{Switch: true, NVLink: lanes, Version: 4, LaneMBps: speed}} }
}

// cubeMesh is how the eight GPUs of a DGX-1 are joined: two squares with their
// diagonals, and an edge from each corner to its like.
func cubeMesh(i int) []gpu.Link {
	lanes := map[[2]int]int{{0, 1}: 1, {0, 2}: 1, {0, 3}: 2, {1, 2}: 2, {1, 3}: 1, {2, 3}: 2}
	var out []gpu.Link
	for j := range 8 {
		n := 0
		switch {
		case i/4 == j/4 && i != j:
			n = lanes[[2]int{min(i, j) % 4, max(i, j) % 4}]
		case i%4 == j%4 && i != j:
			n = map[bool]int{true: 2, false: 1}[i%4 < 2]
		}
		if n > 0 {
			out = append(out, gpu.Link{To: j, NVLink: n, Version: 2, LaneMBps: 25781})
		}
	}
	return out
}

func ago(d time.Duration) *time.Time {
	at := noon.Add(-d)
	return &at
}

// status is a node all of whose GPUs are whole, and the first one held.
func status(name string, m machine) obs.Status {
	inv := m.inventory()
	matrix := topology.New(inv).Matrix()
	s := obs.Status{Node: name, Version: "v0.1.0", Machine: inv.Machine, Driver: inv.Driver, CUDA: inv.CUDA, Claims: 1,
		Partition: obs.Partition{Name: "default", State: "applied", Source: "configmap gpu-agent/gpu-partitions", Generation: 1},
		Watchdog:  obs.Watchdog{State: obs.WatchdogRunning}, Topology: &matrix}
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		s.GPUs = append(s.GPUs, obs.GPUStatus{Index: d.Index, UUID: string(d.UUID), Model: d.Model, MemoryMiB: uint64(d.Memory), PCI: d.PCI, NUMA: d.NUMA,
			Mode: "whole", Resource: "example.com/gpu", Total: 1, Free: 1, Health: obs.Healthy})
	}
	hold(&s, 0, "dev", "notebook", "jupyter", 1, 3*time.Hour, nil, 0)
	return s
}

// hold gives units of a GPU to a container, and says what it uses of its memory.
func hold(s *obs.Status, at int, namespace, pod, container string, units int, since time.Duration, used *uint64, refusals uint64) {
	g := &s.GPUs[at]
	g.Used += units
	g.Free -= units
	g.Holders = append(g.Holders, obs.Holder{Namespace: namespace, Pod: pod, Container: container, Resource: g.Resource, Units: units, Since: ago(since)})
	c := obs.ContainerStatus{Namespace: namespace, Pod: pod, Container: container, Claim: fmt.Sprintf("%016x", len(s.Containers)), GPU: g.UUID, Index: g.Index,
		UsedMiB: used, Guarantee: "hardware", Refusals: refusals, Processes: 1}
	if used != nil {
		c.PeakMiB = min(*used*5/4, g.MemoryMiB)
	}
	if g.Mode == "shared" {
		limit := uint64(units) * g.UnitMiB
		if g.UnitMiB == 0 {
			limit = g.MemoryMiB / uint64(g.Total)
		}
		c.CapMiB, c.Guarantee = &limit, "api"
		c.PeakMiB = min(c.PeakMiB, limit)
	}
	s.Containers = append(s.Containers, c)
}

// rich is the node of the README's picture.
func rich() obs.Status {
	s := status("gpu-node-1", machine{name: "NVIDIA DGX H100", model: "NVIDIA H100 80GB HBM3", memory: 81559, gpus: 8, perSwitch: 1, nicsPerSwitch: 1, storage: 1, links: switched(18, 26562)})
	s.Claims = 10
	s.Partition.Name, s.Partition.Generation = "research", 4
	mib := func(n uint64) *uint64 { return &n }
	g := &s.GPUs[0] // nobody has it yet
	g.Used, g.Free, g.Holders, s.Containers = 0, 1, nil, nil
	slice(g, obs.MIGStatus{Enabled: true, OnDemand: true, Size: 8}, map[string]string{
		"1g.10gb@0": "dev/notebook-linus/jupyter", "1g.10gb@1": "", "3g.40gb@4": "train/eval-12/main"})
	s.Containers = append(s.Containers,
		obs.ContainerStatus{Namespace: "dev", Pod: "notebook-linus", Container: "jupyter", Claim: "a", GPU: g.UUID, UsedMiB: mib(3200), PeakMiB: 5900, Guarantee: "hardware", Processes: 1},
		obs.ContainerStatus{Namespace: "train", Pod: "eval-12", Container: "main", Claim: "b", GPU: g.UUID, UsedMiB: mib(31000), PeakMiB: 33100, Guarantee: "hardware", Processes: 1})

	g = &s.GPUs[1]
	g.Mode, g.Resource, g.UnitMiB, g.Total, g.Free = "shared", "example.com/gpu-mem", 1024, 79, 79
	hold(&s, 1, "dev", "notebook-ada", "jupyter", 24, 3*time.Hour, mib(11340), 0)
	hold(&s, 1, "dev", "notebook-grace", "jupyter", 16, 26*time.Hour, mib(15870), 12)
	hold(&s, 1, "web", "embedder-7c6f8d5b9-x2k4p", "server", 8, 50*time.Hour, mib(6020), 0)

	g = &s.GPUs[2]
	g.Mode, g.Resource, g.Total, g.Free = "shared", "example.com/gpu.shared", 4, 4
	hold(&s, 2, "web", "api-6d4b75cb6d-hx9vd", "server", 1, 9*time.Hour, mib(9800), 0)
	hold(&s, 2, "web", "api-6d4b75cb6d-p2m7c", "server", 1, 9*time.Hour, mib(10100), 0)

	for i := 4; i < 8; i++ {
		hold(&s, i, "train", "llama-70b-0", "trainer", 1, 7*time.Hour, mib(uint64(74000+100*i)), 0)
	}
	g = &s.GPUs[3]
	g.Health, g.Reason, g.Class, g.Since, g.Needs = "unhealthy", "Xid 95: uncontained memory error", "memory", ago(40*time.Minute), "reset"
	g.Free, g.Unhealthy = 0, 1
	return s
}

// slice cuts a GPU by MIG; instances is who has which, nobody if empty.
func slice(g *obs.GPUStatus, m obs.MIGStatus, instances map[string]string) {
	g.Mode, g.Resource, g.Total, g.Free = "mig", "", 0, 0
	g.MIG = &m
	for _, p := range []struct {
		profile string
		size    int
		starts  []int
	}{{"1g.10gb", 1, []int{0, 1, 2, 3, 4, 5, 6}}, {"1g.20gb", 2, []int{0, 2, 4, 6}}, {"2g.20gb", 2, []int{0, 2, 4}}, {"3g.40gb", 4, []int{0, 4}}, {"7g.80gb", 8, []int{0}}} {
		for _, start := range p.starts {
			at := fmt.Sprintf("%s@%d", p.profile, start)
			slot := obs.SlotStatus{Device: g.UUID + "::" + at, Resource: "example.com/mig-" + p.profile, Profile: p.profile, Start: start, Size: p.size, State: obs.SlotFree}
			if holder, ok := instances[at]; ok {
				slot.State, slot.UUID, slot.GI = obs.SlotWarm, "MIG-"+at, len(m.Slots)+1
				if holder != "" {
					slot.State = obs.SlotHeld
					part := strings.Split(holder, "/")
					slot.Namespace, slot.Pod, slot.Container = part[0], part[1], part[2]
					g.Holders = append(g.Holders, obs.Holder{Namespace: part[0], Pod: part[1], Container: part[2], Resource: slot.Resource, Units: 1, Since: ago(2 * time.Hour)})
				}
			} else {
				for other, holder := range instances {
					var first, size int
					fmt.Sscanf(other[strings.Index(other, "@"):], "@%d", &first)
					size = map[string]int{"1": 1, "2": 2, "3": 4}[other[:1]]
					if holder != "" && start < first+size && first < start+p.size {
						slot.State, slot.Reason = obs.SlotCovered, "its room is taken"
					}
				}
			}
			g.MIG.Slots = append(g.MIG.Slots, slot)
		}
	}
}

// busy has everything that can be wrong at a time.
func busy() obs.Status {
	links := func(i int) []gpu.Link {
		lanes := map[bool]int{true: 11, false: 12}[i == 5]
		return switched(lanes, 25781)(i)
	}
	s := status("gpu-node-2", machine{name: "DGXA100 920-23687-2530-000", model: "NVIDIA A100-SXM4-80GB", memory: 81920, gpus: 8, perSwitch: 2, nicsPerSwitch: 2, storage: 1, links: links})
	s.Partition = obs.Partition{Name: "a-partition-with-a-rather-long-name-for-the-night", State: "blocked", Source: "configmap gpu-agent/gpu-partitions", Generation: 18446744073709551615,
		Message: "GPU 2: train/train-3 holds 40 units of gpu-mem; the GPU becomes whole when the pod has ended"}
	s.Watchdog = obs.Watchdog{State: obs.WatchdogOff, Reason: "the agent is not in the initial PID namespace, so the driver would hide processes from it; set hostPID: true"}
	s.Hardware = "create 3g.40gb@4 on GPU 1 has not come back, since 2026-03-01T11:58:12Z"
	on := true
	mib := func(n uint64) *uint64 { return &n }
	slice(&s.GPUs[1], obs.MIGStatus{Enabled: true, Size: 8, Work: "create 3g.40gb@4 since 2026-03-01T11:58:12Z"}, map[string]string{
		"1g.10gb@0": "dev/a/main", "1g.10gb@1": "dev/b-with-a-long-name-from-a-controller-7c6f8d5b9-x2k4p/main", "1g.10gb@2": "", "1g.10gb@3": "dev/d/main", "1g.10gb@4": "", "1g.10gb@5": "dev/f/main", "1g.10gb@6": "dev/g/main"})
	for i := range s.GPUs[1].MIG.Slots {
		switch slot := &s.GPUs[1].MIG.Slots[i]; slot.Start {
		case 2:
			slot.State = obs.SlotLeaving
		case 3:
			slot.State, slot.UUID = obs.SlotMaking, ""
		case 4:
			slot.State, slot.Reason = obs.SlotForeign, "made by somebody else, and busy"
		case 5:
			if slot.Size == 1 {
				slot.State, slot.UUID, slot.Reason = obs.SlotFailed, "", "3 attempts failed, the last one with: insufficient resources"
			}
		}
	}
	s.GPUs[1].Holders[1].Waits = "dev/the-one-before/main"
	g := &s.GPUs[2]
	g.Mode, g.Resource, g.UnitMiB, g.Total, g.Free, g.Blocked = "shared", "example.com/gpu-mem", 512, 158, 138, "train/train-3 holds 40 units of gpu-mem"
	g.Unhealthy = 20
	hold(&s, 2, "train", "train-3", "main", 40, 90*time.Second, mib(21000), 1<<63)
	hold(&s, 2, "", "", "", 8, time.Second, nil, 0)
	for i := range 12 {
		hold(&s, 2, "many", fmt.Sprintf("worker-%d", i), "main", 2, time.Duration(i)*time.Minute, mib(1000), 0)
	}
	g = &s.GPUs[3]
	g.Mode, g.Resource, g.Total, g.Free = "off", "", 0, 0
	g = &s.GPUs[4]
	g.Intruders, g.NoPod = 3, 1
	g = &s.GPUs[6]
	g.Health, g.Reason, g.Since, g.Needs = "unhealthy", "Xid 79: GPU has fallen off the bus; Xid 48: double bit ECC error", ago(49*time.Hour), "reset"
	g.Free, g.Unhealthy = 0, 1
	g = &s.GPUs[7]
	g.MIG = &obs.MIGStatus{Pending: &on, Work: "enable MIG mode since 2026-03-01T11:59:59Z"}
	return s
}

// hostile is a Status whose every free text is markup, nonsense, and long.
func hostile(s obs.Status) obs.Status {
	const evil = `"><script>alert(1)</script><img src=x onerror=alert(2)>'&amp;&#0;` + "\x00\x1b[31m\u202e\xff"
	words := map[string]bool{"Mode": true, "State": true, "Health": true, "Profile": true, "Kind": true, "UUID": true, "GPU": true}
	var walk func(v reflect.Value)
	walk = func(v reflect.Value) {
		switch v.Kind() {
		case reflect.Pointer:
			if !v.IsNil() && v.Type() != reflect.TypeFor[*time.Time]() {
				walk(v.Elem())
			}
		case reflect.Slice:
			for i := range v.Len() {
				walk(v.Index(i))
			}
		case reflect.Struct:
			for i := range v.NumField() {
				if !words[v.Type().Field(i).Name] {
					walk(v.Field(i))
				}
			}
		case reflect.String:
			v.SetString(v.String() + evil + strings.Repeat("W", 120))
		}
	}
	s.GPUs[0].Blocked, s.Hardware, s.Partition.Message, s.GPUs[3].Model = "x", "x", "x", "x"
	walk(reflect.ValueOf(&s).Elem())
	return s
}
