// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/tests/lab"
)

// A request goes to the fullest GPU that still fits it, so that GPUs stay whole
// for those who need much.
func TestPacking(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, allShared, map[string]int{lab.Memory: gpus * units})
	for _, step := range []struct {
		name  string
		units int
		gpu   int
		why   string
	}{
		{"a", 24, 0, "all are free, and the first comes first"},
		{"b", 24, 0, "24 of its units are in use, which is more than of any other"},
		{"c", 40, 1, "31 are left on the first"},
		{"d", 31, 0, "it fills the first to its last unit"},
		{"e", 30, 1, "39 are left on the second"},
		{"f", 10, 2, "9 are left on the second"},
		{"g", 9, 1, "it fills the second, which is fuller than the third"},
	} {
		pod := b.pod(step.name, lab.Memory, step.units)
		b.must(pod.Running(b.ctx))
		if g := b.one(b.inside(pod, "")); g.Index != step.gpu {
			b.Errorf("pod %s of %d units is on GPU %d, want %d: %s", step.name, step.units, g.Index, step.gpu, step.why)
		}
	}
}

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
	if want := fmt.Sprintf("bound to %s by 4 units of its pod's, where it can have %d in all", fuller.UUID, units-60); !strings.Contains(s.Message, want) {
		b.Errorf("a pod whose init container asks for 4 of 24 units reads %q, want %q in it", s.Message, want)
	}
	b.Logf("the user reads: %s", s.Message)
	as := pod("as-many", 24)
	b.must(as.Running(b.ctx))
	if g := b.one(b.inside(as, "")); g.UUID == fuller.UUID {
		b.Errorf("a pod of 24 units runs on GPU %d, which has %d left", g.Index, units-60)
	}
}

// A replica is a share of a GPU; n of them are of n different GPUs.
func TestReplicas(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, `version: v1
partitions:
  default:
    - devices: all
      mode: shared
      replicas: 4
`, map[string]int{lab.Replicas: 4 * gpus})

	b.sub("different GPUs", func(b *bench) {
		_, three := b.running("three", lab.Replicas, 3)
		if len(three) != 3 {
			b.Errorf("3 replicas show the GPUs %v, want 3 different ones", indexes(three))
		}
		_, all := b.running("all", lab.Replicas, gpus)
		if len(all) != gpus {
			b.Errorf("%d replicas show the GPUs %v, want all of the node's", gpus, indexes(all))
		}
	})
	b.sub("more than there are GPUs", func(b *bench) {
		pod := b.pod("nine", lab.Replicas, gpus+1)
		s, err := pod.Refused(b.ctx)
		b.must(err)
		want := regexp.MustCompile(fmt.Sprintf(`%s: %d replicas asked for, but each is of a different GPU.*; ask for at most %d`,
			regexp.QuoteMeta(lab.Replicas), gpus+1, gpus))
		if !want.MatchString(s.Message) {
			b.Errorf("the user reads %q, want %s", s.Message, want)
		}
	})
}

// A GPU in mode off is offered to nobody.
func TestOff(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, allShared, map[string]int{lab.Memory: gpus * units})
	b.partitions(`version: v1
partitions:
  default:
    - devices: [0, 1, 2, 3, 4, 7]
      mode: off
    - devices: [5, 6]
      mode: shared
`)
	b.offers(map[string]int{lab.Memory: 2 * units})
	if message := b.state("applied"); message != "" {
		b.Errorf("the node says %q, want nothing", message)
	}
	_, first := b.running("a", lab.Memory, units)
	_, second := b.running("b", lab.Memory, units)
	if got := []int{b.one(first).Index, b.one(second).Index}; !slices.Equal(got, []int{5, 6}) {
		b.Errorf("the two pods have GPUs %v, want 5 and 6", got)
	}
	message, err := b.pod("c", lab.Memory, 1).Unschedulable(b.ctx)
	b.must(err)
	if !strings.Contains(message, "Insufficient "+lab.Memory) {
		b.Errorf("the scheduler says %q, want that %s is short", message, lab.Memory)
	}
	s, err := agent.Status(b.ctx)
	b.must(err)
	for _, g := range s.GPUs {
		want := "off"
		if g.Index == 5 || g.Index == 6 {
			want = "shared"
		}
		if g.Mode != want || want == "off" && g.Resource != "" {
			b.Errorf("GPU %d is said to be %s and to offer %q, want %s", g.Index, g.Mode, g.Resource, want)
		}
	}
}

// A set time slice reaches the driver by its own tool; where that is missing,
// the node says so and shares all the same.
func TestTimeSlice(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	const file = `version: v1
partitions:
  default:
    - devices: [0, 1]
      mode: shared
      timeSlice: %s
    - devices: [2, 3, 4, 5, 6, 7]
      mode: shared
`
	b := begin(t, fmt.Sprintf(file, "short"), map[string]int{lab.Memory: gpus * units})
	has := func(b *bench, want string) {
		b.Helper()
		for _, g := range driver.GPUs {
			want := want
			if g.Index > 1 {
				want = "default"
			}
			b.must(lab.Await(b.ctx, waitLong, fmt.Sprintf("time slice %s on GPU %d", want, g.Index), func(ctx context.Context) error {
				got, err := driver.TimeSlice(ctx, g.Index)
				if err == nil && got != want {
					err = fmt.Errorf("the driver has %s", got)
				}
				return err
			}))
		}
	}
	b.sub("set", func(b *bench) { has(b, "short") })
	b.sub("changed", func(b *bench) {
		b.partitions(fmt.Sprintf(file, "long"))
		has(b, "long")
	})
	b.sub("taken back", func(b *bench) {
		b.partitions(allShared)
		has(b, "default")
	})
	b.sub("without the tool", func(b *bench) {
		const tool, away = "/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi.away"
		_, err := node.Exec(b.ctx, "mv", tool, away)
		b.must(err)
		b.Cleanup(func() {
			if _, err := node.Exec(context.Background(), "mv", away, tool); err != nil {
				b.Error(err)
			}
		})
		b.partitions(fmt.Sprintf(file, "medium"))
		b.must(lab.Await(b.ctx, waitLong, "the node to say that the time slice is not supported", func(ctx context.Context) error {
			s, err := node.State(ctx)
			if err != nil {
				return err
			}
			message := s.Annotations[lab.MessageAnnotation]
			if s.Labels[lab.StateLabel] != "applied" || !strings.Contains(message, "timeSlice medium is not supported on GPU 0") {
				return fmt.Errorf("it says %s: %q", s.Labels[lab.StateLabel], message)
			}
			return nil
		}))
		b.offers(map[string]int{lab.Memory: gpus * units})
	})
}
