// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/agent"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/plane"
)

// lifeWorkers is how many nodes live at once.
const lifeWorkers = 4

// TestLifeOfANode follows a Node, as a watch of a real API server shows it, through what a
// node meets, and kills the agent around each of its writes to the Node and to the GPUNode,
// or around some: before the request goes out, and when the server has done it. The agent
// has the rights of the manifests, and is held to their policies.
//
// After each step and each kill, the condition GPUReady, the startup taint, the annotation
// for Cluster Autoscaler and the cordon are what they should be. GPUReady becomes True only
// while the kubelet has the devices, the taint goes only then and never comes back, and the
// cleanup leaves nothing, also where it is killed.
func TestLifeOfANode(t *testing.T) {
	trace(t)
	if _, err := programs(); err != nil {
		t.Fatal(err)
	}
	began, ctx, s := time.Now(), inOrder(t), startPlane(t)
	triesPoints(t)
	installManifests(t, s)
	steps := lifeSteps()
	var next, ran, tried atomic.Int64
	var workers sync.WaitGroup
	var mu sync.Mutex
	told := map[string]int{}
	for range fewer(lifeWorkers) {
		workers.Go(func() {
			w := claimWorker{fresh: func() (*node, error) { return settledObject(ctx, t, s) }}
			w.ended = func(n *node) {
				of, err := n.object.judge()
				if err != nil {
					t.Errorf("%s: %v", n.object.name, err)
				}
				mu.Lock()
				defer mu.Unlock()
				for what, count := range of {
					told[what] += count
				}
			}
			for i := next.Add(1); int(i) <= len(steps); i = next.Add(1) {
				op := steps[i-1]()
				var changes, back []change
				t.Run(strings.ReplaceAll(op.name, " ", "_"), func(t *testing.T) {
					ran.Add(1)
					changes = w.through(ctx, t, op)
					if w.node != nil {
						back = w.node.back
					}
					tried.Add(int64(w.kill(ctx, t, op, changes)))
				})
				if op.back == nil {
					continue
				}
				op = op.back()
				t.Run(strings.ReplaceAll(op.name, " ", "_"), func(t *testing.T) {
					if changes == nil { // the other one was not run
						back = w.through(ctx, t, op)
					}
					knowsKinds(t, back)
					tried.Add(int64(w.kill(ctx, t, op, back)))
				})
			}
			if err := w.end(); err != nil {
				t.Error(err)
			}
		})
	}
	workers.Wait()
	t.Logf("seed %d: %d kills, %.1f s; %s", *seed, tried.Load(), time.Since(began).Seconds(), counted(told))
	for _, want := range []string{" → True Offered", "True Offered → False GPUUnhealthy", "False GPUUnhealthy → True Offered", "True Offered → False DriverLetGo", "taint gone"} {
		if told[want] == 0 && int(ran.Load()) == len(steps) && !t.Failed() {
			t.Errorf("%q never came: the steps do not meet what they are for", want)
		}
	}
}

// settledObject is a new node that has been registered and is ready.
func settledObject(ctx context.Context, t *testing.T, s *plane.Server) (*node, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	n, err := startObject(t, s)
	if err != nil {
		return nil, err
	}
	err = n.settle(ctx)
	if wrong := n.complaints(); err != nil || len(wrong) > 0 {
		err = fmt.Errorf("a new node: %w; %s\n%s", err, strings.Join(wrong, "; "), n.said())
		return nil, errors.Join(err, n.close())
	}
	return n, nil
}

// deed is something that is done to a node.
type deed func(context.Context, *node) error

// lifeSteps are what a node meets. Each begins and ends on a node that is ready and that
// nobody uses.
func lifeSteps() []func() operation {
	// there and back are two steps, each with the other as its way back, done once for both.
	there := func(name string, do deed, back string, undo deed) func() operation {
		return func() operation {
			return operation{name: name, do: do, after: undo, back: func() operation { return operation{name: back, before: do, do: undo} }}
		}
	}
	// The ends of pods take longest, where the agent is killed: they come first.
	steps := []func() operation{podSteps("a pod comes", "the last pod ends", 4), podSteps("the node is full", "it is empty again", units, units)}
	steps = append(steps, there("all GPUs are unhealthy", func(_ context.Context, n *node) error {
		n.object.ready = "False GPUUnhealthy"
		return errors.Join(n.world.Xid(0, 95), n.world.Xid(1, 95))
	}, "they are back", func(_ context.Context, n *node) error {
		n.object.ready = "True Offered"
		return errors.Join(n.world.SetHealth(0, emulator.Health{}), n.world.SetHealth(1, emulator.Health{}))
	}))
	release := func(value any) fields {
		return fields{"metadata": fields{"labels": fields{domain + "/" + agent.ReleaseLabel: value}}, "spec": fields{"unschedulable": value != nil}}
	}
	steps = append(steps, there("the driver is let go", func(_ context.Context, n *node) error {
		n.object.ready = "False DriverLetGo"
		return n.object.write(release("true"))
	}, "the driver is back", func(_ context.Context, n *node) error {
		n.object.ready = "True Offered"
		return n.object.write(release(nil))
	}))
	cordon := func(value any) fields {
		return fields{"metadata": fields{"annotations": fields{domain + "/" + agent.CordonAnnotation: value}}}
	}
	steps = append(steps, there("all GPUs are cordoned", func(_ context.Context, n *node) error {
		n.object.cordoned, n.object.ready = true, "True GPUCordoned"
		return n.object.write(cordon("all"))
	}, "the cordon is taken back", func(_ context.Context, n *node) error {
		n.object.cordoned, n.object.ready = false, "True Offered"
		return n.object.write(cordon(nil))
	}))
	return append(steps,
		func() operation {
			return operation{name: "boot", start: true, do: func(_ context.Context, n *node) error {
				n.kubelet.Kill()
				return errors.Join(lib.Unmount(n.state), empty(n.cdi), empty(n.state), n.object.register())
			}, then: func(ctx context.Context, n *node) error {
				// The kubelet's device manager comes after the agent has something to say.
				err := n.object.await(ctx, "a word of the agent", func(s *sight) bool { return s.Metadata.Labels[domain+"/"+agent.StateLabel] != "" })
				return errors.Join(err, n.kubelet.Start())
			}}
		},
		func() operation {
			return operation{name: "the node is registered anew", do: func(_ context.Context, n *node) error { return n.object.register() }}
		},
		func() operation {
			return operation{name: "another version of the agent", do: func(ctx context.Context, n *node) error { return n.update(ctx) }}
		},
		func() operation {
			return operation{name: "cleanup", start: true, begin: func(n *node, k int) *tracee { return n.object.clean(n, k) },
				then: func(_ context.Context, n *node) error {
					err := n.object.isClean()
					n.begin(0)
					return err
				}}
		},
	)
}

// podSteps are that pods with so many units each come, and that they end.
func podSteps(come, end string, counts ...int) func() operation {
	make := func(of func(start, stop deed) operation) func() operation {
		return func() operation {
			var pods []*pod
			return of(func(ctx context.Context, n *node) error {
				pods = nil
				for _, count := range counts {
					p, err := n.admit(ctx, count, "main")
					if err == nil {
						pods = append(pods, p)
						err = n.run(ctx, p)
					}
					if err != nil {
						return err
					}
				}
				return nil
			}, func(_ context.Context, n *node) error {
				for _, p := range pods {
					n.stop(p)
				}
				return nil
			})
		}
	}
	back := make(func(start, stop deed) operation { return operation{name: end, before: start, do: stop} })
	return make(func(start, stop deed) operation { return operation{name: come, do: start, after: stop, back: back} })
}

// update ends the agent as its DaemonSet does, and starts the next one.
func (n *node) update(ctx context.Context) error {
	n.mu.Lock()
	n.ending = true
	p := n.process
	n.mu.Unlock()
	_ = unix.PidfdSendSignal(p.pidfd, unix.SIGTERM, nil, 0) // it may have been killed
	select {
	case <-p.done:
	case <-ctx.Done():
		return fmt.Errorf("the agent does not end: %w", ctx.Err())
	}
	n.guard.Wait()
	n.begin(0)
	return nil
}
