// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

// pace is how often is looked where milliseconds count.
const pace = 3 * time.Millisecond

// ending is the three moments at which something ends.
type ending struct{ container, kubelet, agent time.Time }

func (e ending) String() string {
	return fmt.Sprintf("the container's end to the kubelet's release %d ms, the kubelet's release to the agent's %d ms, together %d ms",
		e.kubelet.Sub(e.container).Milliseconds(), e.agent.Sub(e.kubelet).Milliseconds(), e.agent.Sub(e.container).Milliseconds())
}

// watchEnd waits for a container's end, for the kubelet to let its pod's devices
// go, and for the agent to be left with so many allocations.
func (b *bench) watchEnd(pod *lab.RunningPod, p lab.Process, allocations int) (e ending) {
	b.Helper()
	steps := []func() error{
		func() (err error) {
			_, e.container, err = node.End(b.ctx, time.Minute, p)
			return err
		},
		func() (err error) {
			e.kubelet, err = lab.Moment(b.ctx, waitLong, lab.PodResourcesPace, "the kubelet to let the devices of "+pod.Name+" go", func(ctx context.Context) error {
				list, err := node.Holdings(ctx)
				if err != nil {
					return err
				}
				for _, h := range list {
					if h.Pod == pod.Name {
						return fmt.Errorf("it says that %s has %d of %s", pod.Name, len(h.IDs), h.Resource)
					}
				}
				return nil
			})
			return err
		},
		func() (err error) {
			e.agent, err = lab.Moment(b.ctx, waitLong, pace, fmt.Sprintf("%d allocations", allocations), func(ctx context.Context) error {
				s, err := agent.Status(ctx)
				if err == nil && s.Allocations != allocations {
					err = fmt.Errorf("the agent says: %s", s)
				}
				return err
			})
			return err
		},
	}
	b.must(each(steps, func(f func() error) error { return f() }))
	return e
}

// heldBack holds the runtime's hand on a process, until the function is called or the test
// ends. A container that ignores SIGTERM is killed after a second; so it outlives its pod
// for longer, as one does that is stuck inside a driver.
func (b *bench) heldBack(p lab.Process) (letGo func() error) {
	b.Helper()
	shim, err := node.Shim(p)
	b.must(err)
	b.must(node.Signal(b.ctx, shim, "STOP"))
	letGo = sync.OnceValue(func() error { return node.Signal(context.Background(), shim, "CONT") })
	b.Cleanup(func() {
		if err := letGo(); err != nil {
			b.Error(err)
		}
	})
	return letGo
}

// Allocations end when their containers have ended, and not before: not while an
// image is being pulled, not because their pod's object is gone, and also
// though it stays. Everything runs beside everything else, on GPUs of its own.
// The short form has the pod whose object is gone, alone.
func TestAllocations(t *testing.T) {
	b := begin(t, `version: v1
partitions:
  default:
    - devices: [0, 1]
      mode: shared
    - devices: [2, 3]
      mode: shared
      replicas: 1
    - devices: [4, 5]
      mode: whole
    - devices: [6, 7]
      mode: off
`, map[string]int{lab.Memory: 2 * units, lab.Replicas: 2, lab.GPU: 2})
	b.allocationsBecome(0)

	deaf := b.create(lab.Pod{Name: "deaf", Grace: 30 * time.Second,
		Containers: []lab.Container{{Resources: map[string]int{lab.Replicas: 2}, Then: lab.Deaf}}})
	b.must(deaf.Running(b.ctx))
	if testing.Short() {
		b.allocationsBecome(1)
		b.sub("a pod that was deleted by force", func(b *bench) { b.outlivesItsPod(deaf, 1) })
	} else {
		b.allocationsOfMany(deaf)
	}

	b.must(node.DeletePods(b.ctx))
	b.allocationsBecome(0)
	files, err := agent.CDIFiles(b.ctx)
	b.must(err)
	if len(files) > 0 {
		b.Errorf("there are the CDI files %v, want none", files)
	}
}

// allocationsOfMany is everything, beside a pod that does not hear.
func (b *bench) allocationsOfMany(deaf *lab.RunningPod) {
	b.Helper()
	image, arrive, err := node.LateImage(b.ctx)
	b.must(err)
	arrived := false
	b.Cleanup(func() {
		if !arrived {
			if err := arrive(context.Background()); err != nil {
				b.Error(err)
			}
		}
	})
	pulling := b.create(lab.Pod{Name: "pulling",
		Init:       []lab.Container{{Name: "init", Image: image, Pull: true, Resources: map[string]int{lab.GPU: 1}}},
		Containers: []lab.Container{{Resources: map[string]int{lab.Memory: 20}}}})
	both := b.create(lab.Pod{Name: "both",
		Containers: []lab.Container{{Resources: map[string]int{lab.GPU: 1, lab.Memory: 8}}}})
	b.must(both.Running(b.ctx))
	b.must(pulling.InState(b.ctx, time.Minute, "to be given its devices", func(s lab.PodState) error {
		if s.Phase != "Pending" || s.Containers["init"].ID != "" {
			return fmt.Errorf("%s: %w", s, lab.ErrNever)
		}
		if s.Containers["init"].Waiting == "" {
			return errors.New("it waits for nothing")
		}
		return nil
	}))
	if got := len(b.inside(both, "")); got != 2 {
		b.Errorf("a container with a whole GPU and a share of another sees %d GPUs, want 2", got)
	}
	const held = 5 // pulling has two, both two, deaf one
	b.allocationsBecome(held)
	until := time.Now().Add(36 * time.Second) // an allocation is young for 30 s

	b.sub("a Job that is done", func(b *bench) {
		for _, name := range []string{"job-1", "job-2"} { // the second has the first's units
			job, err := node.CreateJob(b.ctx, lab.Pod{Name: name,
				Containers: []lab.Container{{Resources: map[string]int{lab.Memory: units}, Then: lab.UntilTold}}})
			b.Cleanup(func() {
				if err := node.DeleteJob(context.Background(), name); err != nil {
					b.Error(err)
				}
			})
			b.must(err)
			b.initRuns(job, "main")
			p, err := job.Process(b.ctx, "")
			b.must(err)
			b.allocationsBecome(held + 1)
			b.must(job.Tell(b.ctx, ""))
			b.Logf("%s: %s", name, b.watchEnd(job, p, held))
			// The API server may hear of the end after the agent.
			b.must(job.InState(b.ctx, time.Minute, "to be there and to have succeeded", func(s lab.PodState) error {
				if s.Phase != "Succeeded" {
					return errors.New("it has not")
				}
				return nil
			}))
		}
	})

	b.sub("a pod that was deleted by force", func(b *bench) { b.outlivesItsPod(deaf, held) })

	b.sub("an image that is being pulled", func(b *bench) {
		b.must(lab.Holds(b.ctx, time.Until(until), "while the image is being pulled", func(ctx context.Context) error {
			s, err := agent.Status(ctx)
			if err == nil && s.Allocations != held {
				err = fmt.Errorf("want %d allocations; the agent says: %s", held, s)
			}
			return err
		}))
		arrived = true
		b.must(arrive(b.ctx))
		b.must(pulling.Running(b.ctx))
		if g := b.one(b.inside(pulling, "init")); g.Index != 4 && g.Index != 5 {
			b.Errorf("the init container saw GPU %d, want a whole one", g.Index)
		}
		if g := b.one(b.inside(pulling, "main")); g.Index > 1 {
			b.Errorf("the app container sees GPU %d, want a shared one", g.Index)
		}
		b.allocationsBecome(held)
		p, err := pulling.Process(b.ctx, "")
		b.must(err)
		b.must(pulling.Delete(b.ctx))
		b.Logf("%s", b.watchEnd(pulling, p, held-2))
	})

	b.sub("a whole GPU and a share", func(b *bench) {
		b.must(agent.Kill(b.ctx))
		b.allocationsBecome(held - 2)
		b.must(both.RestartContainer(b.ctx, ""))
		if got := len(b.inside(both, "")); got != 2 {
			b.Errorf("after its restart the container sees %d GPUs, want 2", got)
		}
		p, err := both.Process(b.ctx, "")
		b.must(err)
		b.must(both.Delete(b.ctx))
		b.Logf("%s", b.watchEnd(both, p, held-4))
	})
}

// outlivesItsPod deletes a pod by force whose container goes on, of so many allocations that
// there are. The next pod that asks for the same waits for the container's end.
func (b *bench) outlivesItsPod(deaf *lab.RunningPod, held int) {
	b.Helper()
	old, err := deaf.Process(b.ctx, "")
	b.must(err)
	letGo := b.heldBack(old)
	b.must(deaf.ForceDelete(b.ctx))
	gone := time.Now()
	next := b.pod("next", lab.Replicas, 2) // the same two
	// While it lives, nobody runs beside it. The Event says why.
	span, said := 30*time.Second, ""
	if testing.Short() {
		span = 5 * time.Second
	}
	b.must(lab.Holds(b.ctx, span, "beside the container of a pod that was deleted by force", func(ctx context.Context) error {
		if !node.Lives(old) {
			return errors.New("it has ended, though its runtime cannot end it")
		}
		if p, err := next.Process(ctx, ""); err == nil {
			return fmt.Errorf("the next holder runs as %s beside the previous one, %s", p, old)
		}
		s, err := agent.Status(ctx)
		if err != nil {
			return err
		}
		if s.Allocations != held {
			return fmt.Errorf("there are %d allocations, want %d", s.Allocations, held)
		}
		return nil
	}))
	// The kubelet makes it when the wait for the devices has failed for the first time, which
	// it does after 30 s.
	if !testing.Short() {
		b.must(node.AwaitEvent(b.ctx, "Pod", lab.PodNamespace, "next", "says that its previous holder is still ending", func(e lab.Event) bool {
			said = e.Message
			return strings.Contains(said, "previous holder still ending")
		}))
	}
	b.must(letGo())
	before, ended, err := node.End(b.ctx, time.Minute, old)
	b.must(err)
	b.must(next.Running(b.ctx))
	p, err := next.Process(b.ctx, "")
	b.must(err)
	began, err := node.StartTime(p)
	b.must(err)
	b.Logf("deleted by force, the container lived on for %.1f s; the next one's started %d ms after its end; its Event: %q",
		ended.Sub(gone).Seconds(), began.Sub(ended).Milliseconds(), said)
	if began.Before(before) {
		b.Errorf("the next container started at %s, and the previous one was seen alive at %s", began.Format(time.StampMilli), before.Format(time.StampMilli))
	}
	if got := indexes(b.inside(next, "")); !slices.Equal(got, []int{2, 3}) {
		b.Errorf("the next pod sees the GPUs %v, want 2 and 3", got)
	}
}
