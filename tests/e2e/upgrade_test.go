// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

// Labels that NVIDIA's GPU operator writes to a node: its upgrade controller the state, its driver
// manager (k8s-driver-manager) those of the operands.
const (
	upgradeState  = "nvidia.com/gpu-driver-upgrade-state"
	operandPrefix = "nvidia.com/gpu.deploy."
	paused        = "paused-for-driver-upgrade"
)

// operands are the labels of a node on which the operator runs some of its components, with a value
// of the administrator's own and one that is switched off.
var operands = map[string]string{
	"operator-validator": "true", "container-toolkit": "true", "dcgm-exporter": "true", "dcgm": "true",
	"device-plugin": "false", "mig-manager": "false", "client": "batch",
}

// operate writes the operands' labels as the driver manager does: all of them in one patch, paused or as
// they were.
func (b *bench) operate(pause bool) {
	b.Helper()
	labels := map[string]string{}
	for name, value := range operands {
		switch {
		case !pause || value == "false":
		case value == "true":
			value = paused
		default:
			value += "_" + paused
		}
		labels[operandPrefix+name] = value
	}
	b.must(node.Label(b.ctx, labels))
}

// upgrade sets the upgrade controller's state.
func (b *bench) upgrade(state string) {
	b.Helper()
	b.must(node.Label(b.ctx, map[string]string{upgradeState: state}))
}

// keepsDriver checks that the agent does not let the driver go, so that nobody can unload it.
func (b *bench) keepsDriver(what string) {
	b.Helper()
	b.must(lab.Holds(b.ctx, time.Second, what+": the agent to keep the driver", func(ctx context.Context) error {
		if err := driver.Unload(ctx); err == nil {
			return errors.New("the driver could be unloaded")
		}
		return nil
	}))
}

// unloads unloads the driver as soon as that is possible.
func (b *bench) unloads(what string) {
	b.Helper()
	began := time.Now()
	_, err := lab.Moment(b.ctx, time.Minute, pace, what+": the driver to be unloaded", driver.Unload)
	b.must(err)
	b.Logf("%s: the driver is free after %d ms", what, time.Since(began).Milliseconds())
}

// served waits until the agent has a version of the driver, and the node offers all.
func (b *bench) served(version string, offers map[string]int) {
	b.Helper()
	b.must(agent.AwaitStatus(b.ctx, time.Minute, "driver "+version, func(s lab.Status) error {
		if s.Driver != version {
			return fmt.Errorf("it is %q", s.Driver)
		}
		return nil
	}))
	b.offers(offers)
	b.state("applied")
}

// NVIDIA's operator upgrades the driver: the labels of its upgrade controller and of its driver manager,
// in the order in which they write them. The agent lets the driver go when it is to be unloaded and no
// sooner, and takes it up when it may. A pod that is not drained lives on, and has the new driver's
// libraries when its container starts anew. An upgrade that fails, and is rolled back, leaves every pod
// as it was.
func TestOperatorUpgradesTheDriver(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	offers := map[string]int{lab.Memory: units, lab.GPU: 2}
	b := begin(t, `version: v1
partitions:
  default:
    - {devices: [0], mode: shared}
    - {devices: [1, 2], mode: whole}
    - {devices: [3, 4, 5, 6, 7], mode: off}
`, offers)
	old := driver.Version
	const next = "580.211.01"
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		labels := map[string]string{upgradeState: ""}
		for name := range operands {
			labels[operandPrefix+name] = ""
		}
		err := errors.Join(node.Label(ctx, labels), node.Cordon(ctx, false))
		_ = driver.LoadDriver(ctx, old) // refused where it is loaded
		if err != nil {
			b.Error(err)
		}
	})
	b.operate(false)
	stays := b.pod("stays", lab.Memory, 24) // without a process on the GPU, and not drained
	drained := b.pod("drained", lab.GPU, 1)
	b.must(stays.Running(b.ctx))
	b.must(drained.Running(b.ctx))
	before := b.life(stays)

	b.sub("by the upgrade controller", func(b *bench) {
		both := b.life(stays, drained)
		for _, state := range []string{"upgrade-required", "cordon-required", "wait-for-jobs-required", "pod-deletion-required"} {
			b.upgrade(state)
			if state == "cordon-required" {
				b.must(node.Cordon(b.ctx, true))
			}
			b.keepsDriver(state)
		}
		b.lives(both, stays, drained)
		b.must(drained.Delete(b.ctx))
		b.must(drained.Gone(b.ctx))
		b.upgrade("drain-required")
		b.says("drain-required")
		b.upgrade("pod-restart-required")
		// The driver's pod starts, and the driver manager first.
		b.operate(true)
		b.unloads("pod-restart-required")
		b.operate(false) // before the driver is there
		b.must(lab.Holds(b.ctx, time.Second, "the agent to wait for the driver", func(ctx context.Context) error {
			s, err := agent.Status(ctx)
			if err == nil && !strings.Contains(fmt.Sprint(s), "let go") {
				err = errors.New(fmt.Sprint(s))
			}
			return err
		}))
		b.must(driver.LoadDriver(b.ctx, next))
		b.upgrade("validation-required")
		b.served(next, offers)
		b.upgrade("uncordon-required")
		b.must(node.Cordon(b.ctx, false))
		b.upgrade("upgrade-done")
		b.lives(before, stays)
		after := b.pod("after", lab.GPU, 1)
		b.must(after.Running(b.ctx))
		b.library(after, next)
		b.must(after.Delete(b.ctx))
		// What runs keeps the libraries that it has; its next start has the new ones.
		b.library(stays, old)
		b.must(stays.RestartContainer(b.ctx, ""))
		b.library(stays, next)
		before = b.life(stays)
	})

	b.sub("by the driver manager alone", func(b *bench) {
		b.upgrade("")
		b.operate(true)
		b.unloads("operands are paused")
		b.operate(false) // the driver manager is done, and the driver's container installs the driver
		_, err := agent.AwaitWord(b.ctx, "failed", "no NVIDIA driver")
		b.must(err)
		b.lives(before, stays)
		b.must(driver.LoadDriver(b.ctx, old))
		b.served(old, offers)
		b.lives(before, stays)
	})

	b.sub("a failed upgrade is rolled back", func(b *bench) {
		b.must(node.Cordon(b.ctx, true))
		b.upgrade("drain-required")
		b.upgrade("pod-restart-required")
		b.operate(true)
		b.unloads("pod-restart-required")
		b.operate(false)
		b.upgrade("upgrade-failed") // the new driver could not be built; there is none
		b.lives(before, stays)
		b.must(node.Cordon(b.ctx, false))
		// There are no devices, so the scheduler keeps new pods, and says why.
		waits := b.pod("waits", lab.GPU, 1)
		says, err := waits.Unschedulable(b.ctx)
		b.must(err)
		if !strings.Contains(says, lab.GPU) {
			b.Errorf("a pod is told %q", says)
		}
		// The administrator names the old version again: the driver's pod starts anew.
		b.operate(true)
		b.operate(false)
		b.must(driver.LoadDriver(b.ctx, old))
		b.upgrade("upgrade-done")
		b.served(old, map[string]int{lab.Memory: units, lab.GPU: 2})
		b.must(waits.Running(b.ctx))
		b.lives(before, stays)
	})
}

// says waits until the agent says that it has let the driver go, and why.
func (b *bench) says(why string) {
	b.Helper()
	_, err := agent.AwaitWord(b.ctx, "pending", why)
	b.must(err)
}

// library checks which version of the driver's library a container has.
func (b *bench) library(pod *lab.RunningPod, version string) {
	b.Helper()
	out, err := pod.Exec(b.ctx, "main", "sh", "-c", "grep -o 'libcuda\\.so\\.[0-9.]*' /proc/self/mountinfo | sort -u")
	b.must(err)
	found := map[string]bool{}
	for name := range strings.FieldsSeq(string(out)) {
		found[strings.TrimPrefix(name, "libcuda.so.")] = true
	}
	delete(found, "1")
	delete(found, "1.")
	if want := map[string]bool{version: true}; !maps.Equal(found, want) {
		b.Errorf("%s has the driver's libraries %v, want %v", pod, found, want)
	}
}
