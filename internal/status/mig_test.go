// SPDX-License-Identifier: Apache-2.0

package status

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/topology"
)

// placement makes a Placement of "profile@start" or "profile@start.compute".
func placement(uuid, at string, size int, state string, change func(*Placement)) Placement {
	profile, place, _ := strings.Cut(at, "@")
	start, compute, _ := strings.Cut(place, ".")
	s := Placement{Device: uuid + "::" + at, Profile: profile, Size: size, State: state,
		Resource: "example.com/mig-" + strings.ReplaceAll(profile, "+", ".")}
	s.Start, _ = strconv.Atoi(start)
	s.CI, _ = strconv.Atoi(compute)
	if change != nil {
		change(&s)
	}
	return s
}

func stands(gi int) func(*Placement) {
	return func(s *Placement) { s.GI, s.UUID = gi, fmt.Sprintf("MIG-00000000-0000-0000-0000-%012d", gi) }
}

func held(gi int, namespace, pod, container string) func(*Placement) {
	return func(s *Placement) {
		if gi >= 0 {
			stands(gi)(s)
		}
		s.Namespace, s.Pod, s.Container = namespace, pod, container
	}
}

// cards has one MIG GPU of each kind that a reader meets.
func cards() Status {
	uuid := func(n int) string { return fmt.Sprintf("GPU-7d1e2f3a-0000-1111-2222-3333444400%02d", n) }
	off, on := false, true
	because := func(reason string) func(*Placement) { return func(s *Placement) { s.Reason = reason } }
	s := Status{
		Node: "gpu-node-2", Version: "v0.1.0", Driver: "580.159.03", CUDA: "13.0", Allocations: 6,
		Partition: Partition{Name: "cut", State: "blocked", Source: "configmap gpu/gpu-partitions", Generation: 2,
			Message: "GPU 1: train/train-3 holds 1g.10gb@5"},
		Watchdog: Watchdog{State: WatchdogRunning},
		Containers: []Container{
			{"dev", "notebook-1", "jupyter", "1a1b2c3d4e5f6071", uuid(0), 0, nil, mib(3000), 4000, "hardware", 0, 1, 0, 0, nil, 0, nil},
			{"dev", "old", "main", "2a1b2c3d4e5f6071", uuid(0), 0, nil, nil, 0, "hardware", 0, 0, 0, 0, nil, 0, nil},
		},
	}
	// On demand: two pods, one whose instance is being made, a warm instance, and
	// the room that is left.
	u := uuid(0)
	s.GPUs = append(s.GPUs, GPU{Index: 0, UUID: u, Model: "NVIDIA A100-SXM4-80GB", MemoryMiB: 81920, Mode: "mig", Health: Healthy,
		Holders: []Holder{
			{"dev", "notebook-1", "jupyter", "example.com/mig-1g.10gb", true, 1, ago(3 * time.Hour), "", nil, true, "", nil, nil, "", ""},
			{"train", "train-8-with-a-long-name-from-a-controller-7c6f8d5b9-x2k4p", "main", "example.com/mig-3g.40gb", true, 1, ago(time.Second), "train/train-7", nil, false, "", nil, nil, "", ""},
			{"", "", "", "example.com/mig-2g.20gb", true, 1, ago(0), "", nil, false, "", nil, nil, "", ""},
			{"dev", "old", "main", "example.com/gpu", false, 1, ago(72 * time.Hour), "", nil, false, "", nil, nil, "", ""},
		},
		MIG: &MIG{Enabled: true, OnDemand: true, Size: 8, Work: "create 3g.40gb@4 since 2026-03-01T11:59:59Z", Placements: []Placement{
			placement(u, "1g.10gb@0", 1, PlacementHeld, held(13, "dev", "notebook-1", "jupyter")),
			placement(u, "1g.10gb+me@0", 1, PlacementCovered, nil),
			placement(u, "7g.80gb@0", 8, PlacementCovered, nil),
			placement(u, "1g.10gb@1", 1, PlacementWarm, stands(9)),
			placement(u, "1g.10gb+me@1", 1, PlacementFree, nil),
			placement(u, "1g.10gb@2", 1, PlacementCovered, nil),
			placement(u, "2g.20gb@2", 2, PlacementMaking, nil),
			placement(u, "3g.40gb@4", 4, PlacementMaking, held(-1, "train", "train-8-with-a-long-name-from-a-controller-7c6f8d5b9-x2k4p", "main")),
			placement(u, "1g.10gb@4", 1, PlacementCovered, nil),
		}}})
	// Fixed, changing from 7 of 1g.10gb to 2 of 3g.40gb, which a pod holds up.
	u = uuid(1)
	busy := GPU{Index: 1, UUID: u, Model: "NVIDIA A100-SXM4-80GB", MemoryMiB: 81920, Mode: "mig", Health: Healthy,
		Blocked: "train/train-3 holds 1g.10gb@5",
		Holders: []Holder{{"train", "train-3", "main", "example.com/mig-1g.10gb", true, 1, ago(50 * time.Hour), "", []string{"train/train-4"}, false, "", nil, nil, "", ""}},
		MIG:     &MIG{Enabled: true, Size: 8}}
	for i := range 7 {
		now := stands(7 + i)
		if i == 5 {
			now = held(12, "train", "train-3", "main")
		}
		busy.MIG.Placements = append(busy.MIG.Placements, placement(u, fmt.Sprintf("1g.10gb@%d", i), 1, PlacementLeaving, now))
	}
	s.GPUs = append(s.GPUs, busy)
	// Splits, a foreign instance, one that cannot be made, and one that could.
	u = uuid(2)
	s.GPUs = append(s.GPUs, GPU{Index: 2, UUID: u, Model: "NVIDIA H100 80GB HBM3", MemoryMiB: 81559, Mode: "mig", Health: Healthy,
		MIG: &MIG{Enabled: true, OnDemand: true, Size: 8, Placements: []Placement{
			placement(u, "1c.3g.40gb@0.0", 4, PlacementWarm, stands(1)),
			placement(u, "2c.3g.40gb@0.1", 4, PlacementHeld, func(s *Placement) { held(1, "web", "web-1", "app")(s); s.CIID, s.UUID = 1, "MIG-two" }),
			placement(u, "1g.10gb@4", 1, PlacementForeign, func(s *Placement) { stands(11)(s); s.Resource, s.Reason = "", "made by somebody else, and busy" }),
			placement(u, "1g.10gb@5", 1, PlacementFailed, because("3 attempts failed, the last one with: insufficient resources")),
			placement(u, "1g.10gb@6", 1, PlacementFree, nil),
			placement(u, "1g.20gb@6", 2, PlacementFree, nil),
			placement(u, "1g.10gb+me@6", 1, PlacementFree, nil),
		}}})
	// Twelve memory slices; and a GPU whose mode waits for a reset.
	u = uuid(3)
	s.GPUs = append(s.GPUs, GPU{Index: 3, UUID: u, Model: "NVIDIA RTX PRO 6000 Blackwell Server Edition", MemoryMiB: 97887, Mode: "mig", Health: Healthy,
		MIG: &MIG{Enabled: true, Size: 12, Placements: []Placement{
			placement(u, "1g.24gb@0", 3, PlacementWarm, stands(3)),
			placement(u, "1g.24gb+me.all@3", 3, PlacementHeld, held(4, "cam", "cam-1", "decode")),
			placement(u, "2g.48gb@6", 6, PlacementWarm, stands(1)),
		}}},
		GPU{Index: 4, UUID: uuid(4), Model: "NVIDIA A30", MemoryMiB: 24576, Mode: "mig", Health: Healthy,
			MIG: &MIG{Pending: &on, Work: "enable MIG mode since 2026-03-01T11:59:59Z"}},
		GPU{Index: 5, UUID: uuid(5), Model: "NVIDIA A30", MemoryMiB: 24576, Mode: "whole", Health: Healthy, Resource: "example.com/gpu", Total: 1, Unhealthy: 1,
			MIG: &MIG{Enabled: true, Pending: &off}})
	return s
}

// claimed has GPUs that claims share. Their pods cannot ask for a resource.
func claimed() Status {
	uuid := func(n int) string { return fmt.Sprintf("GPU-7d1e2f3a-0000-1111-2222-3333444400%02d", n) }
	claim := func(pod, kind string, n int) Holder {
		return Holder{Namespace: "dev", Pod: pod, Container: "main", Resource: "gpus.example.com", Units: n, Kind: kind, Since: ago(time.Hour)}
	}
	class := func(s *Placement) {
		s.Resource, s.DeviceClass = "", "mig-"+s.Profile+".example.com"
	}
	gpu := func(n, used int, change func(*GPU), holders ...Holder) GPU {
		g := GPU{Index: n, UUID: uuid(n), Model: "NVIDIA A100-SXM4-80GB", MemoryMiB: 81920, Mode: Dynamic, API: "dra", Health: Healthy,
			DeviceClass: "gpu-memory.example.com", UnitMiB: 1024, Total: 79, Used: used, Free: 79 - used, Holders: holders,
			MIG: &MIG{Enabled: true, OnDemand: true, Size: 8, Placements: []Placement{placement(uuid(n), "1g.10gb@0", 1, PlacementFree, class)}}}
		if change != nil {
			change(&g)
		}
		return g
	}
	return Status{Node: "gpu-node-3", Version: "v0.1.0", GPUs: []GPU{
		gpu(0, 60, func(g *GPU) { g.MIG.Enabled, g.MIG.Placements[0].State = false, PlacementCovered }, claim("notebook", "units", 60)),
		gpu(1, 79, nil, claim("train", "whole", 1)),
		gpu(2, 10, func(g *GPU) {
			g.MIG.Placements[0] = placement(g.UUID, "1g.10gb@0", 1, PlacementHeld, func(s *Placement) { held(7, "dev", "small", "main")(s); class(s) })
		}, func() Holder { h := claim("small", "placement", 1); h.Instances = true; return h }()),
		gpu(3, 20, func(g *GPU) { g.Mode, g.MIG = Shared, nil }, claim("shared", "units", 20)),
		gpu(4, 1, func(g *GPU) {
			g.Mode, g.MIG, g.UnitMiB, g.Total, g.Free, g.DeviceClass = Shared, nil, 0, 4, 3, "gpu.shared.example.com"
		}, claim("replica", "replica", 1)),
	}}
}

// What claims share is shown by its memory, and by the names that claims ask by: no cells of a MIG mode
// that nobody has, and no resource.
func TestClaimsAreShownAsPodsAskForThem(t *testing.T) {
	s := claimed()
	got := text(t, s, TextOptions{ASCII: true, Width: 120, Now: noon})
	blocks := strings.Split(got, "\nGPU ")[1:]
	if len(blocks) != len(s.GPUs) {
		t.Fatalf("%d GPUs in\n%s", len(blocks), got)
	}
	for i, want := range [][]string{
		{"60/79 GiB", "gpu-memory.example.com", "60 GiB"},
		{"79/79 GiB", "1 GPU"},
		{"10/79 GiB", "|1g.10gb"},
		{"20/79 GiB", "20 GiB"},
		{"1/4 replicas", "gpu.shared.example.com", "1 replica"},
	} {
		for _, w := range want {
			if !strings.Contains(blocks[i], w) {
				t.Errorf("no %q of GPU %s", w, blocks[i])
			}
		}
		if cells := strings.Contains(blocks[i], "+0--"); cells != (i == 2) {
			t.Errorf("cells drawn: %v, of GPU %s", cells, blocks[i])
		}
	}
	if strings.Contains(got, "gpus.example.com") {
		t.Errorf("the driver's name is taken for a resource:\n%s", got)
	}
	s.Topology = &topology.Matrix{}
	for i := range s.GPUs {
		s.Topology.GPUs = append(s.Topology.GPUs, topology.MatrixGPU{Index: i, UUID: gpu.UUID(s.GPUs[i].UUID)})
	}
	page := htmlOf(t, s)
	sound(t, page)
	for want, n := range map[string]int{
		`<table class="slots">`: 1, `<div class="use">`: 5, `<code>gpu-memory.example.com</code> <span class="small">by claim</span> <span class="small">1 GiB each</span>`: 1,
		`<code>mig-1g.10gb.example.com</code> <span class="small">by claim</span>`: 1, ">60/79\u00a0GiB<": 1, ">79/79\u00a0GiB<": 1, ">1 MIG<": 1,
		`<rect class="held" x="0" y="0" width="1000" height="10"/>`: 1, "gpus.example.com": 0,
	} {
		if got := strings.Count(page, want); got != n {
			t.Errorf("the page has %q %d times, want %d", want, got, n)
		}
	}
}

func TestMIGText(t *testing.T) {
	golden(t, "status-mig-100.txt", text(t, cards(), TextOptions{Width: 100, Now: noon}))
	golden(t, "status-mig-ascii.txt", text(t, cards(), TextOptions{ASCII: true}))
	golden(t, "status-mig-color.txt", text(t, cards(), TextOptions{Width: 133, Color: true, Now: noon}))
}

// straight checks that a row of cells is a table: every line of it is as wide as
// the others, and a border stands where the lines around it have theirs.
func straight(t *testing.T, page string) {
	t.Helper()
	var top []rune
	for _, l := range strings.Split(page, "\n") {
		line := []rune(strings.TrimRight(l, " "))
		switch {
		case len(line) <= len(indent):
		case line[len(indent)] == '┌':
			top = line
		case line[len(indent)] == '│' || line[len(indent)] == '└':
			if len(line) != len(top) {
				t.Errorf("%d columns below %d:\n%s\n%s", len(line), len(top), string(top), string(line))
				continue
			}
			for i, r := range top {
				if edge := strings.ContainsRune("┌┬┐", r); edge != strings.ContainsRune("│└┴┘", line[i]) {
					t.Errorf("column %d is %q below %q:\n%s\n%s", i, line[i], r, string(top), string(line))
				}
			}
		}
	}
}

// Whatever a driver, or an agent of another version, says of its placements: the text
// fits, the row is straight.
func TestOddPlacements(t *testing.T) {
	draw := rand.New(rand.NewPCG(5, 5))
	pick := func(list ...string) string { return list[draw.IntN(len(list))] }
	number := func() int {
		if draw.IntN(40) == 0 {
			return []int{-1, math.MaxInt, math.MinInt, 100, math.MaxInt - 3}[draw.IntN(5)]
		}
		return draw.IntN(9)
	}
	rounds := 2000
	if testing.Short() {
		rounds = 400 // make test-all has all
	}
	for range rounds {
		m := &MIG{Enabled: true, OnDemand: draw.IntN(2) == 0, Size: []int{0, 4, 8, 12, 24, 1 << 40}[draw.IntN(6)], Work: pick("", "reset \x1b[2J")}
		for range draw.IntN(12) {
			m.Placements = append(m.Placements, Placement{
				Device: pick("d", "e\xff", "e\xfe"), Resource: pick("", "example.com/mig-1g.10gb", "example.com/gpu"),
				Profile: pick("1g.10gb", "3g.40gb", "1c.3g.40gb", "2c.3g.40gb", "1c.99g.1gb", "", "\xff", "\xfe", "a\nb"),
				Start:   number(), Size: number(), CI: number(), State: pick(append(PlacementStates, "", "new\x1bword of later")...),
				UUID: pick("", "MIG-1", "MIG-2"), GI: number(), Pod: pick("", "pod", strings.Repeat("long", 30)), Reason: pick("", "why\nnot"),
			})
		}
		s := Status{GPUs: []GPU{{UUID: "GPU-1", Health: Healthy, Resource: pick("", "example.com/gpu"), MIG: m,
			Holders: []Holder{{Pod: "pod", Resource: "example.com/gpu"}, {Pod: "pod", Resource: "example.com/gpu"}, {Resource: "example.com/mig-1g.10gb"}}}}}
		for _, width := range []int{60, 80, 100} {
			page := text(t, s, TextOptions{Width: width, Now: noon})
			straight(t, page)
			for _, line := range strings.Split(page, "\n") {
				if utf8.RuneCountInString(line) > width || strings.ContainsAny(line, "\x1b\t") {
					t.Errorf("width %d: %q", width, line)
				}
			}
		}
	}
	straight(t, text(t, cards(), TextOptions{Width: 100}))
}

// While one device is to be where another one still stands, the row shows the
// one that is to be, and the list both.
func TestRowOfAChange(t *testing.T) {
	m := &MIG{Enabled: true, Size: 8, Placements: []Placement{
		placement("GPU-1", "1g.10gb@0", 1, PlacementWarm, stands(1)),
		placement("GPU-1", "1g.10gb@1", 1, PlacementLeaving, stands(2)),
		placement("GPU-1", "3g.40gb@0", 4, PlacementMaking, nil),
		placement("GPU-1", "1g.10gb@4", 1, PlacementFree, nil),
	}}
	page := text(t, Status{GPUs: []GPU{{UUID: "GPU-1", Mode: "mig", Health: Healthy, MIG: m}}}, TextOptions{Width: 100})
	_, page, _ = strings.Cut(page, "┌")
	drawn, list, _ := strings.Cut(page, "┘")
	for what, want := range map[string]bool{"3g.40gb": true, "1g.10gb": false, "·": true} {
		if strings.Contains(drawn, what) != want {
			t.Errorf("the row has %s: %v, want %v:\n%s", what, !want, want, page)
		}
	}
	for _, what := range []string{"3g.40gb@0  making", "1g.10gb@0  warm", "1g.10gb@1  leaving", "could be made: 1g.10gb@4"} {
		if !strings.Contains(list, what) {
			t.Errorf("the list lacks %q:\n%s", what, list)
		}
	}
}
