// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
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
	b.allocationsBecome(total + 1)

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
	b.allocationsBecome(total)
	b.must(lab.Await(b.ctx, waitLong, "the CDI files of those that run", func(ctx context.Context) error {
		files, err := agent.CDIFiles(ctx)
		if err == nil && len(files) != total {
			err = fmt.Errorf("there are %v, want %d", files, total)
		}
		return err
	}))
}
