// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/tests/lab"
)

// What fits no single GPU is refused, whatever the node's sum is, with what
// could be had.
func TestRefusal(t *testing.T) {
	b := begin(t, `version: v1
partitions:
  default:
    - devices: [0, 1]
      mode: shared
    - devices: [2, 3, 4, 5, 6, 7]
      mode: off
`, map[string]int{lab.Memory: 2 * units})

	refused := func(b *bench, name string, asked, largest int, on ...lab.GPUInfo) {
		b.Helper()
		pod := b.pod(name, lab.Memory, asked)
		s, err := pod.Refused(b.ctx)
		b.must(err)
		if s.Reason != "UnexpectedAdmissionError" {
			b.Errorf("the reason is %q, want UnexpectedAdmissionError", s.Reason)
		}
		message := regexp.MustCompile(fmt.Sprintf(`%s: %d units asked for.* the largest free block is %d units, on (GPU-[0-9a-f-]+); ask for at most %d`,
			regexp.QuoteMeta(lab.Memory), asked, largest, largest))
		found := message.FindStringSubmatch(s.Message)
		if found == nil {
			b.Fatalf("the user reads %q, want %s", s.Message, message)
		}
		if !slices.ContainsFunc(on, func(g lab.GPUInfo) bool { return g.UUID == found[1] }) {
			b.Errorf("the block is said to be on %s, want one of %v", found[1], on)
		}
	}
	b.sub("more than a GPU has", func(b *bench) {
		refused(b, "huge", 100, units, driver.GPUs[0], driver.GPUs[1])
	})
	if testing.Short() {
		return // that the kubelet hands the reason on was seen
	}
	b.sub("more than is free", func(b *bench) {
		_, first := b.running("a", lab.Memory, 50)
		_, second := b.running("b", lab.Memory, 60)
		if x, y := b.one(first), b.one(second); x.Index != 0 || y.Index != 1 {
			b.Fatalf("the two pods are on GPUs %d and %d, want 0 and 1", x.Index, y.Index)
		}
		refused(b, "large", 40, 29, driver.GPUs[0])
	})
	b.sub("a refused pod holds nothing", func(b *bench) {
		_, rest := b.running("c", lab.Memory, 29)
		if g := b.one(rest); g.Index != 0 {
			b.Errorf("the pod that takes the rest of GPU 0 is on GPU %d", g.Index)
		}
	})
}

// The kubelet gives an init container's units to the app container again, and a
// request lives on one GPU: an init container that asks for fewer ties the pod to a
// GPU that was chosen for the few. One that asks for as many does not.
func TestInitContainerTiesPodToGPU(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, `version: v1
partitions:
  default:
    - devices: [0, 1]
      mode: shared
    - devices: [2, 3, 4, 5, 6, 7]
      mode: off
`, map[string]int{lab.Memory: 2 * units})
	_, has := b.running("holder", lab.Memory, 60)
	fuller := b.one(has)
	pod := func(name string, init int) *lab.RunningPod {
		return b.create(lab.Pod{Name: name, Init: []lab.Container{{Name: "init", Resources: map[string]int{lab.Memory: init}}},
			Containers: []lab.Container{{Resources: map[string]int{lab.Memory: 24}}}})
	}
	s, err := pod("fewer", 4).Refused(b.ctx)
	b.must(err)
	if want := fmt.Sprintf("on %s this pod already holds 4 units; it can have %d there in all", fuller.UUID, units-60); !strings.Contains(s.Message, want) {
		b.Errorf("a pod whose init container asks for 4 of 24 units reads %q, want %q in it", s.Message, want)
	}
	b.Logf("the user reads: %s", s.Message)
	as := pod("as-many", 24)
	b.must(as.Running(b.ctx))
	if g := b.one(b.inside(as, "")); g.UUID == fuller.UUID {
		b.Errorf("a pod of 24 units runs on GPU %d, which has %d left", g.Index, units-60)
	}
}
