// SPDX-License-Identifier: Apache-2.0

package page

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/topology"
)

// noon is when the pages are drawn.
var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// nodes are what the page is looked at with.
func nodes(t *testing.T) map[string]status.Status {
	t.Helper()
	return map[string]status.Status{
		"rich": rich(t), "busy": busy(t), "hostile": hostile(rich(t)),
		"mesh": wholes("dgx1-3", machine(t, "v100-dgx1")), "sixteen": wholes("dgx2-1", machine(t, "v100-dgx2")),
		"pcie": wholes("pcie-1", machine(t, "rtx-pro-6000")), "pairs": wholes("pairs-1", machine(t, "a30")), "rack": wholes("rack-7", machine(t, "gb200")),
		"nothing": {Node: "new-node", Version: "v0.1.0", Watchdog: status.Watchdog{State: status.WatchdogOff, Reason: "no driver answers"},
			Hardware: "the driver's library cannot be loaded, since 2026-03-01T11:59:00Z"},
	}
}

// machine is one of the recorded ones.
func machine(t *testing.T, name string) *gpu.Inventory {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", "testdata", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	inv, err := config.ReadInventory(data)
	if err != nil {
		t.Fatal(err)
	}
	return inv
}

func ago(d time.Duration) *time.Time {
	at := noon.Add(-d)
	return &at
}

// wholes is a node all of whose GPUs are whole, and the first one held.
func wholes(name string, inv *gpu.Inventory) status.Status {
	matrix := topology.New(inv).Matrix()
	s := status.Status{Node: name, Version: "v0.1.0", Machine: inv.Machine, Driver: inv.Driver, CUDA: inv.CUDA, Allocations: 1,
		Partition: status.Partition{Name: "default", State: "applied", Source: "configmap gpu-agent/gpu-partitions", Generation: 1},
		Watchdog:  status.Watchdog{State: status.WatchdogRunning}, Topology: &matrix}
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		s.GPUs = append(s.GPUs, status.GPU{Index: d.Index, UUID: string(d.UUID), Model: d.Model, MemoryMiB: uint64(d.Memory), PCI: d.PCI, NUMA: d.NUMA,
			Mode: "whole", Resource: "example.com/gpu", Total: 1, Free: 1, Health: status.Healthy})
	}
	hold(&s, 0, "dev", "notebook", "jupyter", 1, 3*time.Hour, nil, 0)
	return s
}

// hold gives units of a GPU to a container, and says what it uses of its memory.
func hold(s *status.Status, at int, namespace, pod, container string, units int, since time.Duration, used *uint64, refusals uint64) {
	g := &s.GPUs[at]
	g.Used += units
	g.Free -= units
	g.Holders = append(g.Holders, status.Holder{Namespace: namespace, Pod: pod, Container: container, Resource: g.Resource, Units: units, Since: ago(since)})
	c := status.Container{Namespace: namespace, Pod: pod, Container: container, Allocation: fmt.Sprintf("%016x", len(s.Containers)), GPU: g.UUID, Index: g.Index,
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
func rich(t *testing.T) status.Status {
	t.Helper()
	inv := machine(t, "h100-80")
	inv.NICs[2].Active = false
	s := wholes("gpu-node-1", inv)
	s.Allocations = 10
	s.Partition.Name, s.Partition.Generation = "research", 4
	mib := func(n uint64) *uint64 { return &n }
	g := &s.GPUs[0] // nobody has it yet
	g.Used, g.Free, g.Holders, s.Containers = 0, 1, nil, nil
	slice(g, status.MIG{Enabled: true, OnDemand: true, Size: 8}, map[string]string{
		"1g.10gb@0": "dev/notebook-linus/jupyter", "1g.10gb@1": "", "3g.40gb@4": "train/eval-12/main"})
	s.Containers = append(s.Containers,
		status.Container{Namespace: "dev", Pod: "notebook-linus", Container: "jupyter", Allocation: "a", GPU: g.UUID, UsedMiB: mib(3200), PeakMiB: 5900, Guarantee: "hardware", Processes: 1},
		status.Container{Namespace: "train", Pod: "eval-12", Container: "main", Allocation: "b", GPU: g.UUID, UsedMiB: mib(31000), PeakMiB: 33100, Guarantee: "hardware", Processes: 1})

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
func slice(g *status.GPU, m status.MIG, instances map[string]string) {
	g.Mode, g.Resource, g.Total, g.Free = "mig", "", 0, 0
	g.MIG = &m
	for _, p := range []struct {
		profile string
		size    int
		starts  []int
	}{{"1g.10gb", 1, []int{0, 1, 2, 3, 4, 5, 6}}, {"1g.20gb", 2, []int{0, 2, 4, 6}}, {"2g.20gb", 2, []int{0, 2, 4}}, {"3g.40gb", 4, []int{0, 4}}, {"7g.80gb", 8, []int{0}}} {
		for _, start := range p.starts {
			at := fmt.Sprintf("%s@%d", p.profile, start)
			placement := status.Placement{Device: g.UUID + "::" + at, Resource: "example.com/mig-" + p.profile, Profile: p.profile, Start: start, Size: p.size, State: status.PlacementFree}
			if holder, ok := instances[at]; ok {
				placement.State, placement.UUID, placement.GI = status.PlacementWarm, "MIG-"+at, len(m.Placements)+1
				if holder != "" {
					placement.State = status.PlacementHeld
					part := strings.Split(holder, "/")
					placement.Namespace, placement.Pod, placement.Container = part[0], part[1], part[2]
					g.Holders = append(g.Holders, status.Holder{Namespace: part[0], Pod: part[1], Container: part[2], Resource: placement.Resource, Units: 1, Since: ago(2 * time.Hour)})
				}
			} else {
				for other, holder := range instances {
					var first, size int
					fmt.Sscanf(other[strings.Index(other, "@"):], "@%d", &first)
					size = map[string]int{"1": 1, "2": 2, "3": 4}[other[:1]]
					if holder != "" && start < first+size && first < start+p.size {
						placement.State, placement.Reason = status.PlacementCovered, "its room is taken"
					}
				}
			}
			g.MIG.Placements = append(g.MIG.Placements, placement)
		}
	}
}

// busy has everything that can be wrong at a time.
func busy(t *testing.T) status.Status {
	t.Helper()
	inv := machine(t, "a100-80")
	inv.GPUs[5].Links[0].NVLink-- // one is down
	s := wholes("gpu-node-2", inv)
	s.Partition = status.Partition{Name: "a-partition-with-a-rather-long-name-for-the-night", State: "blocked", Source: "configmap gpu-agent/gpu-partitions", Generation: 18446744073709551615,
		Message: "GPU 2: train/train-3 holds 40 units of gpu-mem; the GPU becomes whole when the pod has ended"}
	s.Watchdog = status.Watchdog{State: status.WatchdogOff, Reason: "the agent is not in the initial PID namespace, so the driver would hide processes from it; set hostPID: true"}
	s.Hardware = "create 3g.40gb@4 on GPU 1 has not come back, since 2026-03-01T11:58:12Z"
	on := true
	mib := func(n uint64) *uint64 { return &n }
	slice(&s.GPUs[1], status.MIG{Enabled: true, Size: 8, Work: "create 3g.40gb@4 since 2026-03-01T11:58:12Z"}, map[string]string{
		"1g.10gb@0": "dev/a/main", "1g.10gb@1": "dev/b-with-a-long-name-from-a-controller-7c6f8d5b9-x2k4p/main", "1g.10gb@2": "", "1g.10gb@3": "dev/d/main", "1g.10gb@4": "", "1g.10gb@5": "dev/f/main", "1g.10gb@6": "dev/g/main"})
	for i := range s.GPUs[1].MIG.Placements {
		switch placement := &s.GPUs[1].MIG.Placements[i]; placement.Start {
		case 2:
			placement.State = status.PlacementLeaving
		case 3:
			placement.State, placement.UUID = status.PlacementMaking, ""
		case 4:
			placement.State, placement.Reason = status.PlacementForeign, "made by somebody else, and busy"
		case 5:
			if placement.Size == 1 {
				placement.State, placement.UUID, placement.Reason = status.PlacementFailed, "", "3 attempts failed, the last one with: insufficient resources"
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
	g.MIG = &status.MIG{Pending: &on, Work: "enable MIG mode since 2026-03-01T11:59:59Z"}
	return s
}

// hostile is a Status whose every free text is markup, nonsense, and long.
func hostile(s status.Status) status.Status {
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
