// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"testing"
	"time"

	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
)

// lingering is a world in which processes take their time to end: the driver has
// to take back all of their memory first.
type lingering struct {
	*world
	calls int
}

func (l *lingering) End(_ context.Context, o node.Owner) (string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls++
	return "cgroup.kill", nil
}

// TestOneOffenceIsOne: a container that takes seconds to end has been ended once,
// and its pod has offended once.
func TestOneOffenceIsOne(t *testing.T) {
	w := newWorld()
	l := &lingering{world: w}
	w.container("bad", []int{10}, 4*gib, gpu0)
	w.procs[10].on[gpu0] = 8 * gib
	watchIn(t, w, Worlds{Pages: w, Runtime: l}, Options{EvictAfter: 2}, func(g *Guard, pass func(time.Duration)) {
		pass(5 * time.Second)
		if l.calls == 0 {
			t.Error("nobody was ended")
		}
		if g.State().Kills != 1 || len(w.kinds) != 1 {
			t.Errorf("%d kills, %d told, want one", g.State().Kills, len(w.kinds))
		}
		if len(w.evicted) != 0 {
			t.Errorf("evicted %q after one offence", w.evicted)
		}
	})
}

// TestGoneByItself: who had ended before anybody could end him was not ended.
func TestGoneByItself(t *testing.T) {
	w := newWorld()
	w.container("bad", []int{10}, 4*gib, gpu0)
	w.procs[10].on[gpu0] = 8 * gib
	w.endErr = gpu.ErrNotFound
	watch(t, w, Options{EvictAfter: 1}, func(g *Guard, pass func(time.Duration)) {
		pass(5 * time.Second)
		if g.State().Kills != 0 || len(w.kinds) != 0 || len(w.evicted) != 0 {
			t.Errorf("%d kills, %d told, evicted %v", g.State().Kills, len(w.kinds), w.evicted)
		}
	})
}

// TestIntruderOnIdleGPU: also where nobody has a cap, and looks are seldom.
func TestIntruderOnIdleGPU(t *testing.T) {
	w := newWorld()
	w.container("thief", []int{10}, 0)
	w.procs[10].on[gpu0] = gib
	watch(t, w, Options{EndIntruders: true}, func(_ *Guard, pass func(time.Duration)) {
		pass(30 * time.Second)
		if len(w.ended) != 1 || len(w.events) != 1 {
			t.Errorf("ended %v, events %q", w.ended, w.events)
		}
	})
}

// stuck is a world in which some questions are not answered.
type stuck struct {
	*world
	lists chan struct{}
}

func (s *stuck) Containers(ctx context.Context) ([]node.Container, error) {
	s.mu.Lock()
	lists := s.lists
	s.mu.Unlock()
	if lists != nil {
		select {
		case <-lists:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return s.world.Containers(ctx)
}

// TestCountsNothing: who has memory of which nobody counts anything has got round the
// library, though the allocation has its counters.
func TestCountsNothing(t *testing.T) {
	w := newWorld()
	w.container("a", []int{10}, 4*gib, gpu0)
	m := &meter{w: w}
	w.pages["a"+string(gpu0)] = m
	watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
		for _, c := range []struct {
			nobody bool
			want   memcap.Level
		}{{false, memcap.API}, {true, memcap.Watchdog}, {false, memcap.API}} {
			m.nobody, m.word = c.nobody, m.word+1
			w.uses(10, gpu0, gib)
			pass(2 * time.Second)
			if got := g.State().Containers[0].Guarantee; got != string(c.want) {
				t.Errorf("nobody counts: %v, and its guarantee is %s", c.nobody, got)
			}
		}
	})
}

// TestTwoContainersOfAnAllocation: one page counts for both, so what the driver says of
// both is held against it, and each is judged by its own.
func TestTwoContainersOfAnAllocation(t *testing.T) {
	w := newWorld()
	w.container("a", []int{10}, 4*gib, gpu0)
	w.container("b", []int{20}, 0)
	b := w.containers["b"]
	b.Annotations = w.containers["a"].Annotations
	w.containers["b"] = b
	m := &meter{w: w}
	w.pages["a"+string(gpu0)] = m
	watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
		w.uses(10, gpu0, gib)
		w.uses(20, gpu0, 2*gib)
		pass(3 * time.Second)
		if !m.known || m.driver != 3*gib {
			t.Errorf("the counters are held against %d MiB (known: %v), the allocation has 3 GiB", m.driver>>20, m.known)
		}
		if c := g.State().Containers; len(c) != 1 || used(c[0]) != 3*gib {
			t.Errorf("the allocation is shown as %+v", c)
		}
		if len(w.ended) != 0 {
			t.Errorf("ended %v, and nobody was over", w.ended)
		}
	})
}

// TestSlowRuntime: a runtime that does not answer hides new containers and holds
// up nothing else.
func TestSlowRuntime(t *testing.T) {
	w := newWorld()
	s := &stuck{world: w}
	w.container("bad", []int{20}, 4*gib, gpu0)
	watchIn(t, w, Worlds{Pages: w, Runtime: s}, Options{}, func(g *Guard, pass func(time.Duration)) {
		w.uses(20, gpu0, gib)
		pass(time.Second)
		s.lists = make(chan struct{})
		w.container("new", []int{10}, 4*gib, gpu0)
		w.uses(10, gpu0, 8*gib)
		pass(20 * time.Second)
		w.uses(20, gpu0, 8*gib)
		pass(time.Second)
		if len(w.ended) != 1 || w.ended[0] != "bad" {
			t.Errorf("ended %v, want bad", w.ended)
		}
		close(s.lists)
		pass(5 * time.Second)
		if len(w.ended) != 2 {
			t.Errorf("ended %v, want the other one, too, now that it is listed", w.ended)
		}
	})
}

// TestHalfKnown: a process that nobody can say anything of makes a container's
// figure too small, and a count that is held against it too large.
func TestHalfKnown(t *testing.T) {
	w := newWorld()
	w.container("a", []int{10, 11}, 4*gib, gpu0)
	m := &meter{w: w}
	w.pages["a"+string(gpu0)] = m
	watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
		w.uses(10, gpu0, gib)
		w.uses(11, gpu0, gib)
		pass(time.Second)
		if !m.known || m.driver != 2*gib {
			t.Errorf("it has %d (known: %v)", m.driver, m.known)
		}
		w.reowned = func(pid int) {
			if pid == 11 {
				w.procs[pid].err = errors.New("too many open files")
			}
		}
		pass(time.Second)
		if m.known {
			t.Errorf("it has %d for sure, says the guard, and has not seen all of it", m.driver)
		}
	})
}

// TestNoAnswerNoFigure: what the driver said an hour ago is not what there is.
func TestNoAnswerNoFigure(t *testing.T) {
	w := newWorld()
	w.container("a", []int{10}, 4*gib, gpu0)
	watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
		w.uses(10, gpu0, gib)
		pass(time.Second)
		w.driverErr = gpu.ErrDriver
		pass(time.Second)
		if c := g.State().Containers; len(c) != 1 || c[0].UsedMiB != nil {
			t.Errorf("%+v", c)
		}
	})
}

// TestBadCounters: counters that turn out to be nonsense hold nobody to anything,
// and others that come in their place do.
func TestBadCounters(t *testing.T) {
	w := newWorld()
	w.container("a", []int{10}, 4*gib, gpu0)
	m := &meter{w: w}
	w.pages["a"+string(gpu0)] = m
	watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
		w.uses(10, gpu0, gib)
		pass(time.Second)
		m.broken = true
		pass(3 * time.Second)
		if c := g.State().Containers; c[0].Guarantee != string(memcap.Watchdog) {
			t.Errorf("with nonsense: %+v", c[0])
		}
		m.broken = false
		pass(10 * time.Second)
		if c := g.State().Containers; c[0].Guarantee != string(memcap.API) {
			t.Errorf("mended: %+v", c[0])
		}
	})
}
