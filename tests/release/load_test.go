// SPDX-License-Identifier: Apache-2.0

package release

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"example.com/gpu-agent/tests/lab"
)

const (
	giB   = 1 << 30
	piece = 256 << 20
)

// tenant is a pod that keeps what it has of a GPU.
type tenant struct {
	*bench
	pod     *lab.RunningPod
	process lab.Process
	probe   *lab.Probe
	units   int
	taken   uint64
	// newest is the ID of what was taken last.
	newest uint64
}

// tenant starts a pod that fills its cap.
func (b *bench) tenant(name string, units int) *tenant {
	b.Helper()
	ctx := b.Context()
	mount, err := lab.ProbeMount(ctx)
	must(b.T, err)
	pod, err := b.node.CreatePod(ctx, lab.Pod{Name: name, Containers: []lab.Container{{Resources: map[string]int{lab.Memory: units}, Mounts: []lab.Mount{mount}}}})
	must(b.T, err)
	must(b.T, pod.Running(ctx))
	x := &tenant{bench: b, pod: pod, units: units}
	x.process, err = pod.Process(ctx, "main")
	must(b.T, err)
	x.probe, err = pod.Probe(ctx, "", nil)
	must(b.T, err)
	b.Cleanup(func() { x.probe.Close() })
	x.taken = x.take()
	if most := uint64(units) * giB; x.taken > most || x.taken < most-giB {
		b.Errorf("pod %s with %d GiB could take %d MiB", name, units, x.taken>>20)
	}
	return x
}

// take takes all that the cap leaves, and returns how much that was.
func (x *tenant) take() uint64 {
	x.Helper()
	a, err := x.probe.Ask("take cuMemAlloc_v2 %d %d", piece, 1000)
	must(x.T, err)
	if a.Result() != lab.OutOfMemory {
		x.Errorf("pod %s with %d GiB: %s", x.pod.Name, x.units, a)
	}
	n := a.Bytes("count")
	if n > 0 {
		x.newest = a.Bytes("id") + n - 1
	}
	return n * piece
}

// unhurt checks that the container and its program run on under the same cap.
func (x *tenant) unhurt() {
	x.Helper()
	if !x.node.Lives(x.process) {
		x.Errorf("the container of pod %s does not run any more as %s", x.pod.Name, x.process)
		return
	}
	s, err := x.pod.State(x.Context())
	must(x.T, err)
	for name, c := range s.Containers {
		if c.Restarts > 0 {
			x.Errorf("container %s of pod %s was started again %d times", name, x.pod.Name, c.Restarts)
		}
	}
	if n := x.take(); n > 0 {
		x.Errorf("pod %s has its %d GiB and could take %d MiB more", x.pod.Name, x.units, n>>20)
	}
	a, err := x.probe.Ask("give %d", x.newest)
	must(x.T, err)
	if a.Result() != lab.Success {
		x.Errorf("pod %s cannot give back what it took: %s", x.pod.Name, a)
	}
	if n := x.take(); n != piece {
		x.Errorf("pod %s gave %d MiB back and can take %d", x.pod.Name, piece>>20, n>>20)
	}
}

// churn are pods that come and go, one after another.
type churn struct {
	*bench
	stop context.CancelFunc
	over sync.WaitGroup
	done atomic.Int64
}

func (b *bench) churn(units int) *churn {
	ctx, stop := context.WithCancel(b.Context())
	c := &churn{bench: b, stop: stop}
	c.over.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			if err := c.one(ctx, fmt.Sprintf("churn-%d", i), units); err != nil && ctx.Err() == nil {
				c.Errorf("a pod that came meanwhile: %v", err)
			}
			c.done.Add(1)
		}
	})
	b.Cleanup(c.end)
	return c
}

func (c *churn) one(ctx context.Context, name string, units int) error {
	pod, err := c.node.CreatePod(ctx, lab.Pod{Name: name, Containers: []lab.Container{{Resources: map[string]int{lab.Memory: units}}}})
	if err == nil {
		err = pod.Running(ctx)
	}
	if err == nil {
		err = pod.Delete(ctx)
	}
	if err == nil {
		err = pod.Gone(ctx)
	}
	return err
}

func (c *churn) end() {
	c.stop()
	c.over.Wait()
}
