// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/lab"
)

var beforeProgram = flag.String("before", "", "the gpu-agent that TestRollback rolls back to, with nvidia-cdi-hook "+
	"beside it (default, with -long alone: the commit before is built)")

// TestRollback goes back to the agent of the commit before, and forth again, while pods come and go. Each agent
// comes to the truth with what the other has left. What runs has the pages and the CDI file that it began with.
func TestRollback(t *testing.T) {
	if !*long && *beforeProgram == "" {
		t.Skip("-long is not set, nor -before: the program of the commit before takes a minute to build")
	}
	older := *beforeProgram
	if older == "" {
		older = buildAt(t, "HEAD^")
	}
	m := startMachine(t, emulator.Spec{Model: model, Count: gpus})
	newer := m.agent
	takeTurns(t, m, append([]string{newer}, slices.Repeat([]string{older, newer}, 4)...)...)
}

// TestUpgradeFromTheFirstRelease begins with the agent of the first release, as its tag builds it, upgrades to
// today's while pods come and go, goes back, and upgrades again.
func TestUpgradeFromTheFirstRelease(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: the program of the release takes a minute to build")
	}
	older := buildAt(t, lab.FirstRelease)
	m := startMachine(t, emulator.Spec{Model: model, Count: gpus})
	newer := m.agent
	takeTurns(t, m, older, newer, older, newer)
}

// takeTurns has agents take over from each other, with a pod that stays from the first one on, and others that
// come and go. Each comes to the truth with what those before it have left.
func takeTurns(t *testing.T, m *machine, agents ...string) {
	t.Helper()
	m.agent = agents[0]
	ctx := inOrder(t)
	n, err := settled(ctx, m)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.close(); err != nil {
			t.Error(err)
		}
	})
	held, err := n.admit(ctx, 1, "init", "main")
	if err == nil {
		err = n.run(ctx, held)
	}
	if err != nil {
		t.Fatal(err)
	}
	for i, agent := range agents[1:] {
		// The load goes on while the one agent ends and the other one starts.
		loaded, cancel := context.WithCancel(ctx)
		var runs atomic.Int64
		over := make(chan []*pod, 1)
		go func() { over <- n.load(loaded, &runs) }()
		if err := poll(ctx, "a pod of the load to run", func() error { return least(&runs, 1) }); err != nil {
			t.Error(err)
		}
		n.end()
		m.agent = agent
		n.begin(0)
		before := runs.Load()
		err := poll(ctx, "two pods more", func() error { return least(&runs, before+2) })
		cancel()
		pods := <-over
		n.forgetUnborn()
		if err == nil {
			err = n.settle(ctx)
		}
		if err != nil {
			t.Fatalf("turn %d, %s: %v\n%s", i, agent, err, n.said())
		}
		for _, p := range pods {
			n.stop(p)
		}
		if err := n.settle(ctx); err != nil {
			t.Fatalf("turn %d, %s, when the load has ended: %v\n%s", i, agent, err, n.said())
		}
	}
	if wrong := n.complaints(); len(wrong) > 0 {
		t.Error(strings.Join(wrong, "\n"))
	}
}

func least(have *atomic.Int64, want int64) error {
	if n := have.Load(); n < want {
		return fmt.Errorf("there were %d, want %d", n, want)
	}
	return nil
}

// load lets pods come and go until ctx ends, two at a time, and returns those that are there then.
func (n *node) load(ctx context.Context, runs *atomic.Int64) (pods []*pod) {
	for ctx.Err() == nil {
		if len(pods) > 1 {
			n.stop(pods[0])
			pods = pods[1:]
		}
		p, err := n.admit(ctx, 1, "main")
		if err == nil && n.run(ctx, p) == nil {
			pods = append(pods, p)
			runs.Add(1)
		}
	}
	return pods
}

// buildAt builds the programs of a commit or tag, and returns the agent's path. It skips the test, and says what is
// not tried, if the clone does not have it.
func buildAt(t *testing.T, revision string) string {
	t.Helper()
	kit, err := lab.NewKit(nil)
	if err != nil {
		t.Fatal(err)
	}
	dir, cache := t.TempDir(), t.TempDir()
	err = kit.Sources(t.Context(), revision, dir)
	if errors.Is(err, gpu.ErrNotFound) {
		t.Skip("not tried with an older agent: ", err)
	}
	if err == nil {
		err = kit.Run(t.Context(), "make", "--no-print-directory", "-s", "-C", dir, "build", "CACHE="+cache)
	}
	if err != nil {
		t.Fatalf("build %s: %v", revision, err)
	}
	return filepath.Join(cache, "bin", "gpu-agent")
}
