// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
)

// operation is something that the agent does while it may be killed. It begins
// and ends on a settled node on which one pod runs.
type operation struct {
	name string
	// before and after bring the node to where do starts, and back; nil is
	// nothing. Nobody is killed during them.
	before, after func(context.Context, *node) error
	// do is what the world does; it waits for the agent where the world would.
	do func(context.Context, *node) error
	// back, if set, is the operation whose do is after: what it changes is counted with this one.
	back func() operation
	// start says that the process to be killed is one that begins with do, and then is
	// what the world does after that; nil is nothing.
	start bool
	then  func(context.Context, *node) error
	// begin, if set, starts that process in place of an agent.
	begin func(n *node, k int) *tracee
	// strike, if set, is what happens at the change in place of the agent's end.
	strike func(*node)
	// workers is how many nodes it is tried on at once, many where a kill is
	// followed by half a minute of waiting: so long an allocation is kept that no witness
	// speaks of. Each agent takes three inotify instances, of which Linux gives a
	// user 128.
	workers int
}

// operations keep what they need between their steps in variables of their own,
// so each is made for one node.
func operations() []func() operation {
	return []func() operation{
		func() operation {
			var p *pod
			return operation{
				name: "allocate and start a pod", workers: 6,
				do: func(ctx context.Context, n *node) (err error) {
					if p, err = n.admit(ctx, 4, "main"); err != nil {
						return err
					}
					return n.run(ctx, p)
				},
				after: func(_ context.Context, n *node) error { n.stop(p); return nil },
			}
		},
		func() operation {
			var p *pod
			return operation{
				name: "an init container's devices for its pod's app container", workers: 6,
				do: func(ctx context.Context, n *node) (err error) {
					if p, err = n.admit(ctx, 4, "init", "main"); err != nil {
						return err
					}
					return n.run(ctx, p)
				},
				after: func(_ context.Context, n *node) error { n.stop(p); return nil },
			}
		},
		func() operation {
			var p *pod
			return operation{
				name: "prune after a pod's end", workers: 3,
				before: func(ctx context.Context, n *node) (err error) {
					if p, err = n.admit(ctx, 4, "main"); err != nil {
						return err
					}
					return n.run(ctx, p)
				},
				do: func(_ context.Context, n *node) error { n.stop(p); return nil },
			}
		},
		func() operation {
			// There is room beside what the first one has, and its container hangs until
			// all is over.
			var hung, next *pod
			return operation{
				name: "the next pod beside one deleted by force that hangs", workers: 6,
				before: func(ctx context.Context, n *node) (err error) {
					if hung, err = n.admit(ctx, 4, "main"); err != nil {
						return err
					}
					return n.run(ctx, hung)
				},
				do: func(ctx context.Context, n *node) (err error) {
					n.force(hung)
					if next, err = n.admit(ctx, 3, "main"); err != nil {
						return err
					}
					return n.run(ctx, next)
				},
				after: func(_ context.Context, n *node) error {
					n.stop(hung)
					n.stop(next)
					return nil
				},
			}
		},
		func() operation {
			return operation{
				name: "change of a held GPU and of a free one", workers: 2,
				do:    changeHeld,
				after: changeBack,
			}
		},
		func() operation {
			var p *pod
			return operation{
				name: "end of the holder that a change waits for", workers: 9,
				before: func(ctx context.Context, n *node) (err error) {
					if p, err = n.admit(ctx, units, "main"); err != nil {
						return err
					}
					if err := n.run(ctx, p); err != nil {
						return err
					}
					gpu := holding{ids: n.allocation(p, "main").IDs}.gpu()
					for i, g := range n.gpus {
						if g.UUID == gpu {
							n.modes[i] = "whole"
						}
					}
					return n.edit()
				},
				do:    func(_ context.Context, n *node) error { n.stop(p); return nil },
				after: changeBack,
			}
		},
		func() operation {
			return operation{
				name: "start with holders", workers: 2,
				start: true,
			}
		},
		func() operation {
			return operation{
				name: "start while a change waits for holders", workers: 2,
				before: changeHeld,
				start:  true,
				after:  changeBack,
			}
		},
		func() operation {
			return operation{
				name: "start with a partition of too many devices", workers: 2,
				before: func(_ context.Context, n *node) error {
					n.excess = true
					return n.edit()
				},
				start: true,
				after: func(_ context.Context, n *node) error {
					n.excess = false
					return n.edit()
				},
			}
		},
		func() operation {
			return operation{
				name: "start after all its files were lost", workers: 2,
				// The running container's CDI file is lost too: it is not asked
				// for before the container starts again.
				start: true,
				do: func(_ context.Context, n *node) error {
					return errors.Join(lib.Unmount(n.state), empty(n.cdi), empty(n.state))
				},
			}
		},
	}
}

// changeHeld makes whole GPUs of the one that the first pod holds a part of,
// which has to wait, and of the next one.
func changeHeld(_ context.Context, n *node) error {
	at := n.heldIndex()
	n.modes[at], n.modes[(at+1)%gpus] = "whole", "whole"
	return n.edit()
}

func changeBack(_ context.Context, n *node) error {
	n.modes = slices.Repeat([]string{"shared"}, gpus)
	return n.edit()
}

func empty(dir string) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
	}
	return err
}

// heldIndex is the index of the GPU that the first pod holds a part of.
func (n *node) heldIndex() int {
	for _, h := range n.held() {
		for i, g := range n.gpus {
			if g.UUID == h.gpu() {
				return i
			}
		}
	}
	return 0
}

// settled is a new node on which a pod runs.
func settled(ctx context.Context, m *machine) (*node, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	n, err := startNode(m, slices.Repeat([]string{"shared"}, gpus)...)
	if err != nil {
		return nil, err
	}
	p, err := n.admit(ctx, 2, "main")
	if err == nil {
		err = n.run(ctx, p)
	}
	if err == nil {
		err = n.settle(ctx)
	}
	if wrong := n.complaints(); err != nil || len(wrong) > 0 {
		err = fmt.Errorf("a new node: %w; %s\n%s", err, strings.Join(wrong, "; "), n.said())
		return nil, errors.Join(err, n.close())
	}
	return n, nil
}

// maxFailures is how many points of an operation may fail before the rest is
// not tried any more: each may take all of patience.
const maxFailures = 4

// lendable is how many nodes operations are tried on at once.
const lendable = 18

// TestKilledAtEachChange does each operation once, counts the changes that the agent makes
// meanwhile to its directories, and does it again with the agent killed at the first change,
// then at the second, and so on until the operation makes no more; at some of them with
// -short.
func TestKilledAtEachChange(t *testing.T) {
	t.Parallel()
	m := startMachine(t, emulator.Spec{Model: model, Count: gpus})
	triesPoints(t)
	nodes := newPool(fewer(lendable), freshNode(m))
	for _, make := range operations() {
		killAtEach(t, make, nodes)
	}
}

// freshNode makes nodes of a machine, on which a pod runs and which remember pods of long ago.
func freshNode(m *machine) func(context.Context) (*node, error) {
	return func(ctx context.Context) (*node, error) {
		n, err := settled(ctx, m)
		if err == nil {
			err = n.kubelet.Outlive(outlived(n.gpus)...)
		}
		return n, err
	}
}

// fewer is how many nodes there are where there would be n: a third of them where no more than a
// third of the points is tried.
func fewer(n int) int {
	if c := chosen(); c.all || len(c.changed) > 0 {
		return n
	}
	return (n + parts - 1) / parts
}

// killAtEach tries an operation without a kill, and then with one at each change, or at those
// that are chosen.
func killAtEach(t *testing.T, make func() operation, nodes *pool) {
	first := make()
	name := first.name
	t.Run(strings.ReplaceAll(name, " ", "_"), func(t *testing.T) {
		t.Parallel()
		began, ctx := time.Now(), inOrder(t)
		said := func(err error) {
			if err != nil {
				t.Error(err)
			}
		}
		once := func(k int) (changes []change, killed, ok bool) {
			n, err := nodes.take(ctx)
			if err != nil {
				t.Error(err)
				return nil, false, false
			}
			changes, killed, err = n.try(ctx, make(), k)
			if err == nil {
				if k == 0 {
					t.Logf("changes: %s", n.list(changes))
				}
				said(nodes.give(n))
				return changes, killed, true
			}
			at := "not struck"
			if killed {
				at = "struck before " + n.list(changes[k-1:])
			}
			t.Errorf("k = %d, %s: %v\n%s", k, at, err, n.said())
			said(nodes.drop(n))
			return changes, killed, false
		}
		leave := nodes.join()
		changes, _, ok := once(0)
		if !ok {
			said(leave())
			return
		}
		knowsKinds(t, changes)
		todo, all := chosen().of(name, kindsOf(changes)), chosen().all
		var next, failures, kills atomic.Int64
		var over atomic.Bool // a k was not reached
		var workers sync.WaitGroup
		for range fewer(first.workers) {
			leave := nodes.join()
			workers.Go(func() {
				defer func() { said(leave()) }()
				for !over.Load() && failures.Load() < maxFailures {
					k := int(next.Add(1))
					switch {
					case k <= len(todo):
						k = todo[k-1]
					case !all: // else there may be more changes than there were
						return
					}
					_, killed, ok := once(k)
					switch {
					case !ok:
						failures.Add(1)
					case killed:
						kills.Add(1)
					default:
						over.Store(all)
					}
				}
			})
		}
		said(leave()) // not before: its node is lent on
		workers.Wait()
		t.Logf("%s: struck at %d changes of %d, %.1f s", name, kills.Load(), len(changes), time.Since(began).Seconds())
		if failures.Load() >= maxFailures {
			t.Errorf("%s: given up", name)
		}
	})
}

// inOrder is the test's context, which ends soon enough for the test to clean up
// before it would be ended with all of the program.
func inOrder(t *testing.T) context.Context {
	t.Helper()
	limit, ok := t.Deadline()
	if !ok {
		return t.Context()
	}
	ctx, cancel := context.WithDeadline(t.Context(), limit.Add(-20*time.Second))
	t.Cleanup(cancel)
	return ctx
}

// list names changes for people, those in a row that are alike once.
func (n *node) list(changes []change) string {
	var out []string
	for i := 0; i < len(changes); {
		row := 1
		for i+row < len(changes) && changes[i+row] == changes[i] {
			row++
		}
		s := strings.ReplaceAll(changes[i].String(), n.dir, "")
		if row > 1 {
			s += fmt.Sprintf(" (%d times)", row)
		}
		out, i = append(out, s), i+row
	}
	return strings.Join(out, ", ")
}

// try does an operation once, and kills the agent at its k-th change.
func (n *node) try(ctx context.Context, op operation, k int) (changes []change, killed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, 4*patience)
	defer cancel()
	step := func(what string, f func(context.Context, *node) error) {
		if f != nil && err == nil {
			if err = f(ctx, n); err == nil {
				err = n.settle(ctx)
			}
			if err != nil {
				err = fmt.Errorf("%s: %w", what, err)
			}
		}
	}
	step("before", op.before)
	if err != nil {
		return nil, false, err
	}
	n.strike = nil
	if op.strike != nil {
		n.strike = func() { op.strike(n) }
	}
	var armed *tracee
	do := op.do
	if op.start {
		n.end()
		if do == nil {
			do = func(context.Context, *node) error { return nil }
		}
		if err := do(ctx, n); err != nil {
			return nil, false, err
		}
		begin := op.begin
		if begin == nil {
			begin = (*node).begin
		}
		armed = begin(n, k)
		then := op.then
		if then == nil {
			then = func(context.Context, *node) error { return nil }
		}
		step("after the kill", then)
	} else {
		armed = n.arm(k)
		step("after the kill", do)
	}
	changes, killed = armed.seen()
	if !killed {
		armed.arm(0, nil)
	}
	// The same line is in the log at most ten times a minute, so an earlier one counts.
	if errno := n.disk.heal(); errno != 0 && err == nil && !strings.Contains(n.log(), errno.Error()) {
		err = fmt.Errorf("the disk failed with %q, which is in no log of the agent", errno.Error())
	}
	step("back", op.after)
	if op.back != nil {
		n.back, _ = armed.seen()
	}
	if wrong := n.complaints(); len(wrong) > 0 {
		err = errors.Join(err, errors.New(strings.Join(wrong, "\n")))
	}
	return changes, killed, err
}
