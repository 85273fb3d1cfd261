// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"path"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/lab"
)

// waitLong is for what is bounded by the agent's own patience: an allocation is not
// judged within 30 s of its Allocate.
const waitLong = 90 * time.Second

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
