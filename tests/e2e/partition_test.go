// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"path"
	"regexp"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/lab"
)

// waitLong is for what is bounded by the agent's own patience: a claim is not
// judged within 30 s of its Allocate.
const waitLong = 90 * time.Second

// choose sets the label that chooses the node's partition; "" removes it.
func (b *bench) choose(partition string) {
	b.Helper()
	b.must(node.Label(b.ctx, map[string]string{lab.PartitionLabel: partition}))
}

// The node's label chooses the partition, and its change is followed at once.
func TestPartitionByNodeLabel(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, allShared+`  research:
    - devices: [0, 1, 2]
      mode: whole
    - devices: [3, 4, 5, 6, 7]
      mode: off
  classes:
    - devices: all
      mode: shared
      replicas: 2
`, map[string]int{lab.Memory: gpus * units})

	b.choose("research")
	b.offers(map[string]int{lab.GPU: 3})
	b.state("applied")
	b.choose("nowhere")
	if message := b.state("invalid"); !strings.Contains(message, "nowhere") {
		b.Errorf("the node says %q, want the name of the partition that there is not", message)
	}
	b.offers(map[string]int{lab.GPU: 3})

	b.choose("classes")
	b.offers(map[string]int{lab.Replicas: 2 * gpus})
	b.state("applied")

	b.choose("")
	b.offers(map[string]int{lab.Memory: gpus * units})
	b.state("applied")

	b.choose("research")
	b.offers(map[string]int{lab.GPU: 3})
	_, has := b.running("a", lab.GPU, 1)
	if g := b.one(has); g.Index > 2 {
		b.Errorf("the pod has GPU %d, which research leaves off", g.Index)
	}
}

// A file with a mistake changes nothing: what was in force stays, and the node
// says what is wrong and where.
func TestBadConfigMap(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, allShared, map[string]int{lab.Memory: gpus * units})
	pod, _ := b.running("a", lab.Memory, 8)
	before := b.life(pod)
	for _, c := range []struct{ name, file, want string }{
		{"an unknown key", "version: v1\npartitions:\n  default:\n    - devices: all\n      mode: shared\n      replica: 4\n", "config.yaml:6: "},
		{"not YAML", "version: v1\npartitions:\n  default: [\n", "config.yaml:"},
		{"no replica", "version: v1\npartitions:\n  default:\n    - devices: all\n      mode: shared\n      replicas: 0\n", "config.yaml:6: replicas"},
		{"a GPU that is not there", "version: v1\npartitions:\n  default:\n    - devices: [0, 1, 2, 3, 4, 5, 6, 7]\n      mode: shared\n    - devices: [8]\n      mode: whole\n", "config.yaml:6: "},
		{"a geometry that no GPU can have", "version: v1\npartitions:\n  default:\n    - devices: all\n      mode: mig\n      geometry: {1g.10gb: 8}\n", "config.yaml:4: GPUs 0-7: 8x1g.10gb"},
	} {
		b.sub(c.name, func(b *bench) {
			b.partitions(c.file)
			b.must(lab.Await(b.ctx, waitLong, "the node to say what is wrong", func(ctx context.Context) error {
				s, err := node.State(ctx)
				if err != nil {
					return err
				}
				if state, message := s.Labels[lab.StateLabel], s.Annotations[lab.MessageAnnotation]; state != "invalid" || !strings.Contains(message, c.want) {
					return fmt.Errorf("it says %s: %q, want invalid: %q", state, message, c.want)
				}
				return nil
			}))
			b.must(node.AwaitEvent(b.ctx, "Node", "", nodeName, "warns of "+c.want, func(e lab.Event) bool {
				return e.Type == "Warning" && e.Reason == "GPUPartitionInvalid" && strings.Contains(e.Message, c.want)
			}))
		})
	}
	b.offers(map[string]int{lab.Memory: gpus * units})
	b.lives(before, pod)
	b.sub("the last good one still serves", func(b *bench) { b.running("b", lab.Memory, 8) })
	b.sub("mended", func(b *bench) {
		b.partitions(allShared)
		if message := b.state("applied"); message != "" {
			b.Errorf("the node says %q, want nothing", message)
		}
	})
}

// A GPU with a holder keeps its cut, says who holds it, takes nobody new, and
// follows by itself when the holder has ended.
func TestBusyGPUIsNotRecut(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := begin(t, allShared, map[string]int{lab.Memory: gpus * units})
	pod, has := b.running("busy", lab.Memory, 24)
	before := b.life(pod)
	g := b.one(has)
	b.partitions("version: v1\npartitions:\n  default:\n    - devices: all\n      mode: whole\n")

	// The pod's name is there as soon as the kubelet has told it.
	b.must(lab.Await(b.ctx, waitLong, "the node to name the holder", func(ctx context.Context) error {
		s, err := node.State(ctx)
		if err != nil {
			return err
		}
		want := regexp.MustCompile(fmt.Sprintf(`^GPU %d \(%s\) stays shared.* %s\b`, g.Index, g.UUID, pod))
		if state, message := s.Labels[lab.StateLabel], s.Annotations[lab.MessageAnnotation]; state != "blocked" || !want.MatchString(message) {
			return fmt.Errorf("it says %s: %q, want blocked: %s", state, message, want)
		}
		return nil
	}))
	// Of the held GPU only the holder's own units are left.
	b.offers(map[string]int{lab.GPU: gpus - 1, lab.Memory: 24})
	if _, err := b.pod("late", lab.Memory, 1).Unschedulable(b.ctx); err != nil {
		b.Error(err)
	}
	_, other := b.running("whole", lab.GPU, 1)
	if b.one(other).UUID == g.UUID {
		b.Errorf("GPU %d is given out whole while a pod holds a part of it", g.Index)
	}
	b.lives(before, pod)

	b.must(pod.Delete(b.ctx))
	b.must(agent.AwaitStatus(b.ctx, waitLong, "the change to finish by itself", func(s lab.Status) error {
		if s.Partition.State != "applied" || s.GPUs[g.Index].Mode != "whole" {
			return fmt.Errorf("GPU %d is %s and the partition %s", g.Index, s.GPUs[g.Index].Mode, s.Partition.State)
		}
		return nil
	}))
	b.offers(map[string]int{lab.GPU: gpus})
}

// The driver is found where it is said to be, by the overlay for drivers that
// come in a container, and CDI files name the host's path of it. Another driver
// with other GPUs stands at /, so that a mix-up shows.
func TestDriverRootElsewhere(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	const root = "/run/nvidia/driver"
	b := prepare(t)
	other, err := node.LayDriver(b.ctx, lab.DriverOptions{Root: root, Model: "A100-SXM4-40GB", Count: 2})
	b.must(err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if err := node.DeletePods(ctx); err != nil {
			t.Error(err)
		}
		usual, err := deploy(ctx, lab.DeployOptions{Partitions: allShared})
		if err != nil {
			t.Errorf("deploy the agent as it was: %v", err)
		} else {
			agent = usual
		}
		if err := other.Remove(ctx); err != nil {
			t.Error(err)
		}
	})
	b.must(agent.Reset(b.ctx, allShared))
	elsewhere, err := deploy(b.ctx, lab.DeployOptions{Overlay: "driver-container", Partitions: allShared})
	b.must(err)
	agent = elsewhere
	// The usual driver's GPUs have gone without a reboot: they would be missed.
	b.must(agent.Reset(b.ctx, allShared))

	// 40,960 MiB less the driver's own are 39 units.
	b.offers(map[string]int{lab.Memory: 2 * 39})
	b.must(agent.AwaitStatus(b.ctx, time.Minute, "the GPUs of the driver at "+root, func(s lab.Status) error {
		if len(s.GPUs) != 2 || s.GPUs[0].UUID != other.GPUs[0].UUID || s.GPUs[1].UUID != other.GPUs[1].UUID {
			return fmt.Errorf("it has %v, want %v", s.GPUs, other.GPUs)
		}
		return nil
	}))
	pod := b.pod("a", lab.Memory, 24)
	b.must(pod.Running(b.ctx))
	g := b.one(b.insideOf(other, pod, ""))

	seen, err := pod.Inside(b.ctx, "")
	b.must(err)
	mounted := 0
	for target, source := range seen.Mounts {
		if !strings.HasPrefix(path.Base(target), "lib") {
			continue
		}
		mounted++
		// Seen from inside, a mount's source is its path on the file system of
		// /run, which is one of its own; so is the agent's directory.
		from := strings.TrimPrefix(root, "/run") + "/"
		if capped := path.Base(target); path.Dir(target) != path.Dir(lib.RealCUDA) &&
			(strings.HasPrefix(capped, "libcuda.so.") || strings.HasPrefix(capped, "libnvidia-ml.so.")) {
			from = "/cap/" // the cap's stand in their place, and they are beside
		}
		if !strings.HasPrefix(source, from) {
			b.Errorf("%s comes from %s, want it from below %s", target, source, from)
		}
	}
	if mounted == 0 || seen.Mounts[lib.RealCUDA] == "" {
		b.Errorf("no library of the driver is mounted: %v", seen.Mounts)
	}
	files, err := agent.CDIFiles(b.ctx)
	b.must(err)
	if len(files) != 1 {
		b.Fatalf("the CDI files are %v, want one", files)
	}
	spec, err := node.Exec(b.ctx, "cat", "/var/run/cdi/"+files[0])
	b.must(err)
	for _, want := range []string{root + "/usr/lib/x86_64-linux-gnu/libcuda.so." + other.Version, root + g.Device()} {
		if !strings.Contains(string(spec), `"`+want+`"`) {
			b.Errorf("the CDI file does not name %s:\n%s", want, spec)
		}
	}
}
