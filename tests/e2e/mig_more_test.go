// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

// The node loses its power and starts anew, with another boot ID and without an
// instance; four of its cards have lost their mode as well. What was fixed is made
// again, the controllers' pods come back, each on an instance of its own, and
// nothing is left of those that the kubelet rejected.
func TestMIGReboot(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	const partitions = head + `    - devices: [0, 1]
      mode: mig
      geometry: {3g.40gb: 1, 1g.10gb: 3}
    - devices: [2]
      mode: mig
      profiles: [1g.20gb]
    - devices: [4, 5]
      mode: mig
      geometry: {2g.20gb: 3}
    - devices: [6]
      mode: mig
      profiles: [4g.40gb]
    - devices: [3, 7]
      mode: whole
`
	one, two, three, wide, four := lab.MIG("1g.10gb"), lab.MIG("2g.20gb"), lab.MIG("3g.40gb"), lab.MIG("1g.20gb"), lab.MIG("4g.40gb")
	offers := map[string]int{one: 6, two: 6, three: 2, wide: 4, four: 1, lab.GPU: 2}
	world := migWorld
	world.Model = model // whose mode takes no reset, and is lost with the power
	world.World += "gpus:\n"
	for index := 4; index < gpus; index++ {
		world.World += fmt.Sprintf("  - {index: %d, model: %s}\n", index, migModel)
	}
	b := beginMIG(t, world, partitions, offers)
	looks := b.looks()
	b.offersAll(offers)

	replicas := map[string]struct {
		resource string
		count    int
	}{"ones": {one, 4}, "twos": {two, 3}, "wides": {wide, 2}, "four": {four, 1}, "whole": {lab.GPU, 1}}
	total := 0
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		for name := range replicas {
			if err := node.DeleteReplicas(ctx, name); err != nil {
				b.Error(err)
			}
		}
	})
	for name, r := range replicas {
		total += r.count
		b.must(node.CreateReplicas(b.ctx, lab.Pod{Name: name, Containers: []lab.Container{{Resources: map[string]int{r.resource: 1}}}}, r.count))
	}
	bare := b.pod("bare", three, 1)
	b.must(bare.Running(b.ctx))
	// apart waits until each has its pods, and checks that each of these has an
	// instance of its own.
	apart := func() map[uint64]string {
		b.Helper()
		var up []lab.ListedPod
		b.must(lab.Await(b.ctx, 2*time.Minute, "the controllers' pods", func(ctx context.Context) error {
			list, err := node.Pods(ctx, "replicas")
			if err != nil {
				return err
			}
			up = up[:0]
			var others []string
			for _, p := range list {
				if p.Containers["main"].Ready {
					up = append(up, p)
				} else {
					others = append(others, p.String())
				}
			}
			if len(up) != total {
				return fmt.Errorf("%d run, want %d; %s", len(up), total, strings.Join(others, "; "))
			}
			return nil
		}))
		users := map[uint64]string{}
		for _, p := range up {
			if strings.HasPrefix(p.Name, "whole-") {
				b.one(b.inside(p.RunningPod, ""))
				continue
			}
			has := b.insideMIG(p.RunningPod, "")
			if len(has) != 1 {
				b.Fatalf("%s has %v, want one instance", p.Name, has)
			}
			if other := users[has[0].compute.Serial]; other != "" {
				b.Errorf("%s and %s both have %s", other, p.Name, has[0])
			}
			users[has[0].compute.Serial] = p.Name
		}
		return users
	}
	before := apart()
	b.claimsBecome(total + 1)

	off := func(ctx context.Context) error {
		if err := driver.Reboot(ctx); err != nil {
			return err
		}
		stands, err := driver.Look(ctx)
		if err != nil {
			return err
		}
		for _, g := range stands {
			if keeps := g.Index == 4 || g.Index == 5 || g.Index == 6; g.MIG.Enabled != keeps || len(g.MIG.Instances) > 0 {
				return fmt.Errorf("after the reboot GPU %d has MIG %v and %d instances", g.Index, g.MIG.Enabled, len(g.MIG.Instances))
			}
		}
		return nil
	}
	began := time.Now()
	b.must(node.Reboot(b.ctx, off))
	up := time.Now()
	b.must(agent.Ready(b.ctx))
	b.offersAll(offers)
	b.Logf("the machine was away for %.1f s; all was on offer again %.1f s after the kubelet's first word; %s", up.Sub(began).Seconds(), time.Since(up).Seconds(), looks)
	b.state("applied")
	after := apart()
	b.Logf("the controllers' pods were back %.1f s after the kubelet's first word; %s", time.Since(up).Seconds(), looks)
	for serial, name := range after {
		if old := before[serial]; old != "" {
			b.Errorf("%s has an instance that %s had before the reboot: nothing was rebooted", name, old)
		}
	}
	b.must(driver.Read(b.ctx))
	for index, want := range map[int]map[string]int{
		0: {"3g.40gb": 1, "1g.10gb": 3}, 1: {"3g.40gb": 1, "1g.10gb": 3}, 4: {"2g.20gb": 3}, 5: {"2g.20gb": 3},
		2: {"1g.20gb": 2}, 6: {"4g.40gb": 1},
	} {
		if err := cut(index, want); err != nil {
			b.Error(err)
		}
	}
	if s, err := bare.State(b.ctx); err != nil || s.Phase != "Failed" {
		b.Errorf("the pod without a controller is %s (%v), want it to be rejected", s, err)
	} else {
		b.Logf("the pod without a controller: %s", s)
	}
	// The rejected ones are still there, and have nothing.
	b.claimsBecome(total)
	b.must(lab.Await(b.ctx, waitLong, "the CDI files of those that run", func(ctx context.Context) error {
		files, err := agent.CDIFiles(ctx)
		if err == nil && len(files) != total {
			err = fmt.Errorf("there are %v, want %d", files, total)
		}
		return err
	}))
}

// Instances that somebody else made are given out where they fit, reported where
// they are in the way, and never taken away but on request.
func TestMIGForeignInstances(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	const partitions = head + `    - devices: [0]
      mode: mig
      profiles: [1g.10gb, 3g.40gb, 4g.40gb]
    - devices: [1]
      mode: mig
      geometry: {3g.40gb: 2}
    - devices: [2]
      mode: mig
      geometry: {2g.20gb: 1, 1g.10gb: 1}
    - devices: [3, 4, 5, 6, 7]
      mode: off
`
	one, two, three, four := lab.MIG("1g.10gb"), lab.MIG("2g.20gb"), lab.MIG("3g.40gb"), lab.MIG("4g.40gb")
	b := prepare(t)
	b.swap(migWorld)
	for index := range 3 {
		b.must(driver.MIG(b.ctx, index, true))
	}
	theirs := []struct {
		gpu     int
		profile string
		start   int
	}{{0, "1g.10gb", 0}, {0, "3g.40gb", 4}, {1, "2g.20gb", 2}, {2, "2g.20gb", 2}}
	for _, i := range theirs {
		b.must(driver.MakeInstance(b.ctx, i.gpu, i.profile, i.start))
	}
	serials := map[string]uint64{}
	for _, i := range b.instances() {
		serials[fmt.Sprint(i.gpu.Index, i.compute.Profile, i.in.Start)] = i.compute.Serial
	}
	// stay checks that theirs still stand, but for some GPU's.
	stay := func(but ...int) error {
		stands, err := driver.Look(b.ctx)
		if err != nil {
			return err
		}
		for _, i := range theirs {
			at, ok := find(instancesOf(stands), placement{stands[i.gpu].UUID, i.profile, i.start, -1})
			if !slices.Contains(but, i.gpu) && (!ok || at.compute.Serial != serials[fmt.Sprint(i.gpu, i.profile, i.start)]) {
				return fmt.Errorf("%s@%d of GPU %d, which was somebody else's, is not there any more", i.profile, i.start, i.gpu)
			}
		}
		return nil
	}
	b.must(agent.Reset(b.ctx, partitions))

	b.sub("kept", func(b *bench) {
		says := b.state("blocked")
		if !strings.Contains(says, driver.GPUs[1].UUID) || !strings.Contains(says, "2g.20gb@2") {
			b.Errorf("the node says %q, want the GPU and the instance in the way named", says)
		}
		b.must(node.AwaitEvent(b.ctx, "Node", "", nodeName, "names the instance in the way", func(e lab.Event) bool {
			return strings.Contains(e.Message, driver.GPUs[1].UUID) && strings.Contains(e.Message, "2g.20gb@2")
		}))
		// GPU 2 has got what it lacked. On GPU 0 the placements beside theirs are on
		// offer, and theirs: 1g at 0 to 3 beside the 3g, that, and no 4g.
		b.must(lab.Await(b.ctx, time.Minute, "GPU 2 to be completed", func(ctx context.Context) error {
			if err := driver.Read(ctx); err != nil {
				return err
			}
			return cut(2, map[string]int{"2g.20gb": 1, "1g.10gb": 1})
		}))
		b.offersAll(map[string]int{one: 4 + 1, two: 1, three: 1})
		pod := b.pod("theirs", three, 1)
		b.must(pod.Running(b.ctx))
		if has := b.insideMIG(pod, ""); len(has) != 1 || has[0].compute.Serial != serials[fmt.Sprint(0, "3g.40gb", 4)] {
			b.Errorf("the pod has %v, want the instance that was there", has)
		}
		if message, err := b.pod("wide", four, 1).Unschedulable(b.ctx); err != nil {
			b.Error(err)
		} else {
			b.Logf("a pod of 4g.40gb: %s", message)
		}
		b.must(node.DeletePods(b.ctx))
		b.claimsBecome(0)
		b.must(stay())
	})

	b.sub("reclaimed", func(b *bench) {
		b.redeploy(lab.DeployOptions{Partitions: partitions,
			Env: map[string]string{"GPU_AGENT_FOREIGN_INSTANCES": "reclaim", "GPU_AGENT_IDLE_INSTANCE_TTL": "4s"}})
		b.stands(map[int]string{1: "3g.40gb@0 3g.40gb@4"})
		b.state("applied")
		pod := b.pod("wide", four, 1)
		b.must(pod.Running(b.ctx))
		has := b.insideMIG(pod, "")
		if len(has) != 1 || has[0].gpu.Index != 0 || has[0].compute.Profile != "4g.40gb" {
			b.Errorf("the pod has %v, want 4g.40gb on GPU 0", has)
		}
		b.must(lab.Holds(b.ctx, 6*time.Second, "an instance that is held, for longer than idle ones stand", func(ctx context.Context) error {
			stands, err := driver.Look(ctx)
			if err != nil {
				return err
			}
			if !slices.ContainsFunc(instancesOf(stands), func(i instance) bool { return i.compute.Serial == has[0].compute.Serial }) {
				return errors.New("it is gone")
			}
			return nil
		}))
		b.must(pod.Delete(b.ctx))
		ended := time.Now()
		b.must(lab.Await(b.ctx, waitLong, "the idle instance to go", func(ctx context.Context) error {
			stands, err := driver.Look(ctx)
			if err != nil {
				return err
			}
			if slices.ContainsFunc(instancesOf(stands), func(i instance) bool { return i.compute.Serial == has[0].compute.Serial }) {
				return errors.New("it stands")
			}
			return nil
		}))
		b.Logf("an idle instance was gone %.1f s after its pod's deletion, with --idle-instance-ttl 4s", time.Since(ended).Seconds())
		// A fixed geometry is never idle.
		b.must(driver.Read(b.ctx))
		b.must(stand(1, "3g.40gb@0 3g.40gb@4"))
		b.must(stay(0, 1))
	})
}

// A ConfigMap written for NVIDIA's MIG manager is taken as it is, and its entries
// are chosen by the node's label.
func TestMIGManagerConfigMap(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	one, two, three := lab.MIG("1g.10gb"), lab.MIG("2g.20gb"), lab.MIG("3g.40gb")
	b := beginMIG(t, migWorld, allShared, map[string]int{lab.Memory: gpus * units})
	file, err := os.ReadFile(filepath.Join(kit.Root, "internal", "config", "testdata", "nvidia-mig-manager.yaml"))
	b.must(err)
	b.partitions(string(file))
	b.choose("all-disabled")
	b.offersAll(map[string]int{lab.GPU: gpus})
	b.state("applied")

	b.choose("all-1g.10gb")
	b.offersAll(map[string]int{one: 7 * gpus})
	b.state("applied")
	// One that has its place in the next geometry, too: a half of the GPU is for
	// 3g.40gb, and beside 1g.10gb at 4 to 6 there is no room for all of the rest.
	pod, has := b.holder("a", one, func(i instance) bool { return i.in.Start < 4 })
	before := b.processes(pod)

	// Around an instance that is held.
	b.choose("all-balanced")
	b.offersAll(map[string]int{one: 2 * gpus, two: gpus, three: gpus})
	b.state("applied")
	if now := b.insideMIG(pod, ""); len(now) != 1 || now[0].compute.Serial != has.compute.Serial {
		b.Errorf("the pod had %v and has %v", has, now)
	}

	b.choose("all-1g.5gb")
	if says := b.state("invalid"); !strings.Contains(says, "config.yaml:") || !strings.Contains(says, "1g.5gb") {
		b.Errorf("the node says %q, want the line and the profile that these GPUs lack", says)
	}
	b.offersAll(map[string]int{one: 2 * gpus, two: gpus, three: gpus})

	b.choose("all-disabled")
	b.offersAll(map[string]int{lab.GPU: gpus - 1, one: 1})
	if says := b.state("blocked"); !strings.Contains(says, pod.String()) {
		b.Errorf("the node says %q, want the holder's name", says)
	}
	if err := hurt(before); err != nil {
		b.Error(err)
	}
	b.must(pod.Delete(b.ctx))
	b.offersAll(map[string]int{lab.GPU: gpus})
	b.state("applied")
	b.must(driver.Read(b.ctx))
	for index := range gpus {
		if err := stand(index, "off"); err != nil {
			b.Error(err)
		}
	}
	b.running("whole", lab.GPU, 2)
}
