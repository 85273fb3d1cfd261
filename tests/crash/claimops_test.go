// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/plane"
)

// claimModes is how the GPUs of a node with claims are laid out where nothing else is said.
var claimModes = []string{"mig", "shared", "dynamic"}

// resident is what the first pod with a claim has, through all operations.
var resident = ask{request: "instance", gpu: 0, profile: "1g.10gb", start: 0}

// settledClaims is a new node with claims on which a pod runs.
func settledClaims(ctx context.Context, t *testing.T, s *plane.Server) (*node, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	n, err := startClaims(t, s, claimModes...)
	if err != nil {
		return nil, err
	}
	_, err = n.claims.bring(ctx, resident)
	if err == nil {
		err = n.settle(ctx)
	}
	if wrong := n.complaints(); err != nil || len(wrong) > 0 {
		err = fmt.Errorf("a new node with claims: %w; %s\n%s", err, strings.Join(wrong, "; "), n.said())
		return nil, errors.Join(err, n.close())
	}
	return n, nil
}

// bring has a pod's container run.
func (c *claimSide) bring(ctx context.Context, asks ...ask) (*claimPod, error) {
	p, err := c.pod(ctx, asks...)
	if err == nil {
		err = c.run(ctx, p)
	}
	return p, err
}

// lay has the GPUs laid out anew. waits are those that cannot follow yet; was is how they
// are laid out still.
func (c *claimSide) lay(modes []string, was string, waits ...int) error {
	c.node.modes, c.node.waits = slices.Clone(modes), map[int]bool{}
	for _, i := range waits {
		c.node.waits[i], c.was[i] = true, was
	}
	return c.node.edit()
}

var (
	share  = ask{request: "share", gpu: 1, gib: 16}
	small  = ask{request: "instance", gpu: 2, profile: "1g.10gb", start: 3}
	large  = ask{request: "instance", gpu: 0, profile: "3g.40gb", start: 4}
	inside = ask{request: "instance", gpu: 0, profile: "1g.10gb", start: 5}
	all    = ask{request: "gpu", gpu: 2}
)

// claimOperations are those of a node whose GPUs are offered through DRA, and around which
// its kubelet may be killed as well.
func claimOperations() []func() operation {
	return []func() operation{
		func() operation {
			var p *claimPod
			return operation{
				name: "prepare a claim and start its pod",
				do: func(ctx context.Context, n *node) (err error) {
					p, err = n.claims.bring(ctx, share, small)
					return err
				},
				after: func(ctx context.Context, n *node) error { return n.claims.end(ctx, p) },
			}
		},
		func() operation {
			// The next claim gets what the one before gives back, at once.
			var p, next *claimPod
			return operation{
				name: "unprepare a claim and prepare the next of the same devices",
				before: func(ctx context.Context, n *node) (err error) {
					p, err = n.claims.bring(ctx, share, small)
					return err
				},
				do: func(ctx context.Context, n *node) (err error) {
					if err = n.claims.end(ctx, p); err == nil {
						next, err = n.claims.bring(ctx, ask{request: "all", gpu: 1, gib: 72}, small)
					}
					return err
				},
				after: func(ctx context.Context, n *node) error { return n.claims.end(ctx, next) },
			}
		},
		func() operation {
			var p *claimPod
			return operation{
				name: "claims that change a GPU's mode there and back",
				do: func(ctx context.Context, n *node) (err error) {
					if p, err = n.claims.bring(ctx, all); err == nil {
						err = n.claims.end(ctx, p)
					}
					if err == nil {
						p, err = n.claims.bring(ctx, small)
					}
					return err
				},
				after: func(ctx context.Context, n *node) error { return n.claims.end(ctx, p) },
			}
		},
		func() operation {
			// What stands idle makes way, and is nobody else's after a kill.
			var p *claimPod
			return operation{
				name: "claims whose instances take each other's place",
				do: func(ctx context.Context, n *node) (err error) {
					if p, err = n.claims.bring(ctx, large); err == nil {
						err = n.claims.end(ctx, p)
					}
					if err == nil {
						p, err = n.claims.bring(ctx, inside)
					}
					return err
				},
				after: func(ctx context.Context, n *node) error { return n.claims.end(ctx, p) },
			}
		},
		func() operation {
			var p *claimPod
			return operation{
				name: "edit of a held GPU and of a free one",
				before: func(ctx context.Context, n *node) (err error) {
					p, err = n.claims.bring(ctx, share)
					return err
				},
				do: func(_ context.Context, n *node) error {
					return n.claims.lay([]string{"mig", "whole", "shared"}, "shared", 1)
				},
				after: func(ctx context.Context, n *node) error {
					return errors.Join(n.claims.end(ctx, p), n.claims.lay(claimModes, ""))
				},
			}
		},
		func() operation {
			var p *claimPod
			return operation{
				name: "end of the claim that an edit waits for",
				before: func(ctx context.Context, n *node) (err error) {
					if p, err = n.claims.bring(ctx, share, small); err == nil {
						err = n.claims.lay([]string{"mig", "whole", "dynamic"}, "shared", 1)
					}
					return err
				},
				do: func(ctx context.Context, n *node) error {
					clear(n.waits)
					return n.claims.end(ctx, p)
				},
				after: func(_ context.Context, n *node) error { return n.claims.lay(claimModes, "") },
			}
		},
		func() operation {
			// The scheduler has given it out before it could see the edit.
			var p *claimPod
			return operation{
				name: "edit of a GPU of which a claim is promised something",
				do: func(ctx context.Context, n *node) (err error) {
					if p, err = n.claims.pod(ctx, small); err == nil {
						err = n.claims.lay([]string{"mig", "shared", "shared"}, "dynamic", 2)
					}
					if err == nil {
						err = n.claims.run(ctx, p)
					}
					return err
				},
				after: func(ctx context.Context, n *node) error {
					return errors.Join(n.claims.end(ctx, p), n.claims.lay(claimModes, ""))
				},
			}
		},
	}
}

// claimStarts are starts of the agent on a node with claims.
func claimStarts() []func() operation {
	start := func(name string, do, then func(context.Context, *node, *claimPod) error) func() operation {
		return func() operation {
			var p *claimPod
			step := func(f func(context.Context, *node, *claimPod) error) func(context.Context, *node) error {
				if f == nil {
					return nil
				}
				return func(ctx context.Context, n *node) error { return f(ctx, n, p) }
			}
			return operation{
				name: name, start: true,
				before: func(ctx context.Context, n *node) (err error) {
					p, err = n.claims.bring(ctx, share, small)
					return err
				},
				do: step(do), then: step(then),
				after: func(ctx context.Context, n *node) error { return n.claims.end(ctx, p) },
			}
		}
	}
	lost := func(_ context.Context, n *node, _ *claimPod) error {
		return errors.Join(n.claims.clearIdle(), lib.Unmount(n.state), empty(n.cdi), empty(n.state))
	}
	return []func() operation{
		start("start with prepared claims", nil, nil),
		start("start after all its files and its records of claims were lost", lost, nil),
		start("start after the kubelet's account of claims was lost", forget, startPods),
		start("start after the kubelet's account and all its own files were lost", func(ctx context.Context, n *node, p *claimPod) error {
			return errors.Join(forget(ctx, n, p), lost(ctx, n, p))
		}, startPods),
		start("start after a reboot", reboot, func(ctx context.Context, n *node, _ *claimPod) error {
			for _, p := range n.claims.all() {
				if err := n.claims.run(ctx, p); err != nil {
					return err
				}
			}
			return nil
		}),
	}
}

// clearIdle destroys the instances that nobody has: an agent without its records would keep
// them as somebody else's, and offer nothing in their place.
func (c *claimSide) clearIdle() (err error) {
	held := map[string]bool{}
	for _, p := range c.all() {
		for _, a := range p.asks {
			for _, id := range c.ids(a) {
				held[id] = true
			}
		}
	}
	for i, g := range c.node.world.State().GPUs {
		stand, _ := standing(g)
		for _, in := range stand {
			if !held[in.id] {
				err = errors.Join(err, c.node.world.DestroyInstance(i, in.start))
			}
		}
	}
	return err
}

// reboot is the machine's: containers, instances and what lies in memory are gone, files
// are not.
func reboot(_ context.Context, n *node, _ *claimPod) error {
	n.kubelet.Kill()
	for _, p := range n.claims.all() {
		n.runtime.remove(p.Pod)
	}
	boot := fmt.Sprintf("8a6b0a3e-0f5c-4c9d-9d4e-%012d\n", n.edits)
	return errors.Join(n.world.Reboot(true), lib.Unmount(n.state), empty(n.cdi),
		os.WriteFile(filepath.Join(n.proc, "sys/kernel/random/boot_id"), []byte(boot), 0o644), n.kubelet.Start())
}

// forget has the kubelet start without its account of claims.
func forget(_ context.Context, n *node, _ *claimPod) error {
	n.kubelet.Kill()
	return errors.Join(n.kubelet.LoseClaims(), n.kubelet.Start())
}

// startPods is what a kubelet does with pods that run, when it needs a new sandbox for
// them: their claims are prepared again. What their containers have is theirs before that.
func startPods(ctx context.Context, n *node, _ *claimPod) error {
	if err := n.settle(ctx); err != nil {
		return err
	}
	for _, p := range n.claims.all() {
		if err := n.claims.prepare(ctx, p); err != nil {
			return err
		}
	}
	return nil
}

// killKubelet ends the kubelet, which starts again at once and deletes the node's slices.
func killKubelet(n *node) {
	n.kubelet.Kill()
	if err := n.kubelet.Start(); err != nil {
		n.breaks("the kubelet does not start again: %v", err)
	}
}

const (
	// claimWorkers is how many nodes claims are tried on at once.
	claimWorkers = 4
	// sampledClaims is how many changes of an operation there is a kill at, without -long and
	// -short.
	sampledClaims = 2
)

// TestClaimsKilledAtEachChange does what is done with claims, counts the changes that the
// agent makes meanwhile to its directories and to what it has at the API server, and does it
// again with the agent killed, or the kubelet, at each of them, or at some.
func TestClaimsKilledAtEachChange(t *testing.T) {
	// Not beside the others: nodes take more inotify instances than there are for all.
	trace(t)
	if _, err := programs(); err != nil {
		t.Fatal(err)
	}
	began, ctx, s := time.Now(), inOrder(t), startPlane(t)
	triesPoints(t)
	todo := slices.Concat(claimOperations(), claimStarts())
	var next, tried atomic.Int64
	var workers sync.WaitGroup
	for range fewer(claimWorkers) {
		workers.Go(func() {
			w := claimWorker{fresh: func() (*node, error) { return settledClaims(ctx, t, s) }}
			for i := next.Add(1); int(i) <= len(todo); i = next.Add(1) {
				op := todo[i-1]()
				var changes []change
				t.Run(strings.ReplaceAll(op.name, " ", "_"), func(t *testing.T) {
					changes = w.through(ctx, t, op)
					tried.Add(int64(w.kill(ctx, t, op, changes)))
				})
				if op.start {
					continue
				}
				op.name, op.strike = killedKubelet+op.name, killKubelet
				t.Run(strings.ReplaceAll(op.name, " ", "_"), func(t *testing.T) {
					if changes == nil { // the other one was not run
						changes = w.through(ctx, t, op)
					}
					tried.Add(int64(w.kill(ctx, t, op, changes)))
				})
			}
			if err := w.end(); err != nil {
				t.Error(err)
			}
		})
	}
	workers.Wait()
	t.Logf("seed %d: %d kills, %.1f s", *seed, tried.Load(), time.Since(began).Seconds())
}

// killedKubelet is before the name of an operation where the kubelet is killed.
const killedKubelet = "with the kubelet killed: "

// claimWorker has a node on which one operation is tried after another.
type claimWorker struct {
	fresh func() (*node, error)
	node  *node
	// ended, if set, is told of each node before it is closed.
	ended func(*node)
}

func (w *claimWorker) end() (err error) {
	if w.node != nil {
		if w.ended != nil {
			w.ended(w.node)
		}
		err = w.node.close()
	}
	w.node = nil
	return err
}

// through does an operation without a kill, and returns the changes that were made meanwhile;
// none if it failed.
func (w *claimWorker) through(ctx context.Context, t *testing.T, op operation) []change {
	changes, _, ok := w.once(ctx, t, op, 0)
	if !ok {
		return nil
	}
	knowsKinds(t, changes)
	return changes
}

// kill does an operation with a kill at each of the changes that it has, or at some. It
// returns the number of kills.
func (w *claimWorker) kill(ctx context.Context, t *testing.T, op operation, changes []change) (kills int) {
	began, failures := time.Now(), 0
	for _, k := range chosen().sample(*seed, op.name, kindsOf(changes)) {
		if failures == maxFailures || ctx.Err() != nil {
			break
		}
		_, killed, ok := w.once(ctx, t, op, k)
		if killed {
			kills++
		}
		if !ok {
			failures++
		}
	}
	t.Logf("%d kills, %.1f s", kills, time.Since(began).Seconds())
	return kills
}

// once does an operation with a kill at its k-th change, or without one for 0. After a failure
// there is a new node.
func (w *claimWorker) once(ctx context.Context, t *testing.T, op operation, k int) (changes []change, killed, ok bool) {
	if w.node == nil {
		var err error
		if w.node, err = w.fresh(); err != nil {
			t.Error(err)
			return nil, false, false
		}
	}
	changes, killed, err := w.node.try(ctx, op, k)
	if k == 0 {
		t.Logf("changes: %s", w.node.list(changes))
	}
	if err != nil {
		at := "not killed"
		if killed {
			at = "killed before " + w.node.list(changes[k-1:k])
		}
		t.Errorf("k = %d, %s: %v\n%s", k, at, err, w.node.said())
		if err := w.end(); err != nil {
			t.Error(err)
		}
	}
	return changes, killed, err == nil
}

// sample is at which changes of an operation there is a kill, of which there is one of each of
// these kinds in turn: with -long at each of them, else at sampledClaims, which are of as many
// kinds as they can be; and with -short at those of the latter that are chosen.
func (c choice) sample(seed uint64, operation string, of []kind) (ks []int) {
	if *long {
		for i := range of {
			ks = append(ks, i+1)
		}
		return ks
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(operation)) // it never fails
	rng := rand.New(rand.NewPCG(seed, h.Sum64()))
	points := map[kind][]int{}
	for i, kind := range of {
		points[kind] = append(points[kind], i+1)
	}
	kinds := slices.Sorted(maps.Keys(points))
	rng.Shuffle(len(kinds), func(i, j int) { kinds[i], kinds[j] = kinds[j], kinds[i] })
	for drawn := 0; drawn < min(sampledClaims, len(of)); {
		for _, kind := range kinds {
			if len(points[kind]) == 0 || drawn == sampledClaims {
				continue
			}
			at := rng.IntN(len(points[kind]))
			k := points[kind][at]
			points[kind] = slices.Delete(points[kind], at, at+1)
			if drawn++; c.tries(operation, drawn, kind) {
				ks = append(ks, k)
			}
		}
	}
	return ks
}
