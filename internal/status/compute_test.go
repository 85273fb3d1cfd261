// SPDX-License-Identifier: Apache-2.0

package status

import (
	"bytes"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/compute"
)

// throughMPS is a node with a GPU that is shared through MPS: a container that is held to its share, one that is
// not, and one on another GPU, whose containers take turns.
func throughMPS() Status {
	none := compute.NoneFor("process 4711 is no client of MPS")
	return Status{
		Node: "n", Partition: Partition{Name: "p", State: "applied"}, Watchdog: Watchdog{State: WatchdogRunning},
		GPUs: []GPU{
			{UUID: "GPU-0", Model: "NVIDIA H100 80GB HBM3", MemoryMiB: 81559, Mode: Shared, Compute: "mps, factor 2, max 80 %", Resource: "example.com/gpu-mem", UnitMiB: 1024,
				Total: 79, Used: 28, Free: 51, Health: Healthy, Holders: []Holder{
					{"dev", "held", "main", "example.com/gpu-mem", false, 20, nil, "", nil, false, "", nil, nil, "", ""},
					{"dev", "loose", "main", "example.com/gpu-mem", false, 8, nil, "", nil, false, "", nil, nil, "", ""}}},
			{Index: 1, UUID: "GPU-1", Model: "NVIDIA H100 80GB HBM3", MemoryMiB: 81559, Mode: Shared, Resource: "example.com/gpu-mem", UnitMiB: 1024, Total: 79, Used: 1, Free: 78, Health: Healthy,
				Holders: []Holder{{"dev", "turns", "main", "example.com/gpu-mem", false, 1, nil, "", nil, false, "", nil, nil, "", ""}}},
		},
		Containers: []Container{
			{Namespace: "dev", Pod: "held", Container: "main", GPU: "GPU-0", CapMiB: mib(20480), UsedMiB: mib(1024), Guarantee: "api", ComputePercent: 51, Compute: &compute.Held{Guarantee: compute.Ceiling, Ceiling: 51}},
			{Namespace: "dev", Pod: "loose", Container: "main", GPU: "GPU-0", CapMiB: mib(8192), UsedMiB: mib(1024), Guarantee: "api", ComputePercent: 21, Compute: &none},
			{Namespace: "dev", Pod: "turns", Container: "main", GPU: "GPU-1", Index: 1, CapMiB: mib(1024), UsedMiB: mib(1024), Guarantee: "api"},
		},
	}
}

// The text and the page say how a GPU's compute is shared, how strongly each container is held to its share, and
// why one is not.
func TestComputeIsShown(t *testing.T) {
	s := throughMPS()
	var text bytes.Buffer
	if err := WriteText(&text, s, TextOptions{Width: 120, ASCII: true}); err != nil {
		t.Fatal(err)
	}
	page := htmlOf(t, s)
	sound(t, page)
	words := strings.Join(strings.Fields(text.String()), " ")
	for _, want := range []string{
		"shared, mps, factor 2, max 80 %",
		"share of the compute GPU held dev/held/main 0 51 % ceiling dev/loose/main 0 21 % none process 4711 is no client of MPS",
	} {
		if !strings.Contains(words, want) {
			t.Errorf("the text lacks %q:\n%s", want, &text)
		}
	}
	for _, want := range []string{"mps, factor 2, max 80 %", "compute: ceiling 51 %", "compute: none: process 4711 is no client of MPS"} {
		if strings.Count(page, want) != 1 {
			t.Errorf("the page has %q not once:\n%s", want, page)
		}
	}
	for n, want := range map[int]bool{0: false, 1: false, 2: true} {
		const mixed = "3 processes are clients of its MPS server, which end with its pod; pods of 2 namespaces share it, and a fault of one may end all"
		s.GPUs[0].MPS = &MPS{Clients: 3, Namespaces: n}
		text.Reset()
		if err := WriteText(&text, s, TextOptions{Width: 200, ASCII: true}); err != nil || strings.Contains(text.String(), mixed) != want {
			t.Errorf("pods of %d namespaces: %v\n%s", n, err, &text)
		}
		if page := htmlOf(t, s); strings.Contains(page, mixed) != want || strings.Contains(page, "namespaces share") != want {
			t.Errorf("the page, with pods of %d namespaces:\n%s", n, page)
		}
	}
	s.GPUs[0].MPS, s.Containers = nil, s.Containers[2:]
	text.Reset()
	if err := WriteText(&text, s, TextOptions{Width: 120, ASCII: true}); err != nil || strings.Contains(text.String(), "compute") {
		t.Errorf("without a share there is a table of shares: %v\n%s", err, &text)
	}
}
