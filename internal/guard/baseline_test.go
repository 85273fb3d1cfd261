// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"slices"
	"testing"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

func (m *meter) Moved(since lib.Reading) (bool, error) {
	m.w.mu.Lock()
	defer m.w.mu.Unlock()
	return m.word != since.Word, nil
}

func (w *world) Memory(_ context.Context, gpus ...gpu.UUID) (map[gpu.UUID]gpu.Memory, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.visits++
	if w.driverErr != nil {
		return nil, w.driverErr
	}
	of := map[gpu.UUID]gpu.Memory{}
	for _, u := range gpus {
		w.sized[u]++
		m := gpu.Memory{}
		for _, p := range w.procs {
			m.Used += gpu.MiB(p.on[u] >> 20)
		}
		of[u] = m
	}
	return of, nil
}

// TestBaseline: while all containers are within their caps and nothing changes, counters are seldom
// read, and the driver is asked as often as ever. A change is seen as soon as without a baseline.
func TestBaseline(t *testing.T) {
	for name, change := range map[string]func(w *world, m *meter){
		"the driver's figure": func(w *world, m *meter) { w.uses(10, gpu0, 5*gib) },
		"another process": func(w *world, m *meter) {
			w.procs[11] = &proc{owner: w.procs[10].owner, on: map[gpu.UUID]uint64{gpu0: 3 * gib}}
		},
		"the counters alone": func(w *world, m *meter) { m.managed, m.word = gib, 8 },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			w.container("a", []int{10}, 4*gib, gpu0)
			m := &meter{w: w, word: 7, quiet: true}
			w.pages["a"+string(gpu0)] = m
			watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
				w.uses(10, gpu0, 2*gib)
				pass(11 * time.Second)
				asked, ended := w.sized[gpu0], m.ended
				pass(10 * time.Second)
				if n := m.ended - ended; n < 1 || n > 3 {
					t.Errorf("%d readings in ten seconds in which nothing changed, want one every five seconds", n)
				}
				if n := w.sized[gpu0] - asked; n < 39 {
					t.Errorf("the driver was asked %d times in ten seconds, want four a second", n)
				}
				ended = m.ended
				change(w, m)
				pass(300 * time.Millisecond)
				if m.ended == ended {
					t.Error("what changed was not looked at")
				}
				pass(700 * time.Millisecond)
				if over := name != "the counters alone"; over != slices.Equal(w.ended, []string{"a"}) {
					t.Errorf("ended %v after a second", w.ended)
				}
			})
		})
	}
}

// TestNoBaseline: a GPU is looked at each time if a container is over its cap, has no exact counters,
// or has lost its allocation.
func TestNoBaseline(t *testing.T) {
	for name, spoil := range map[string]func(w *world, m *meter){
		"something is under way": func(w *world, m *meter) { m.quiet = false },
		"no figure":              func(w *world, m *meter) { w.procs[10].blind = true },
		"no allocation": func(w *world, m *meter) {
			w.allocations = slices.DeleteFunc(w.allocations, func(c ledger.Allocation) bool { return c.Holder.Name == "pod-a" })
		},
		"managed beyond the cap": func(w *world, m *meter) { m.managed = 3 * gib },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			w.container("a", []int{10}, 4*gib, gpu0)
			w.container("b", []int{20}, 4*gib, gpu0)
			m := &meter{w: w, word: 7, quiet: true}
			w.pages["a"+string(gpu0)] = m
			w.pages["b"+string(gpu0)] = &meter{w: w, word: 9, quiet: true}
			watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
				w.uses(10, gpu0, 2*gib)
				w.uses(20, gpu0, 2*gib)
				pass(11 * time.Second)
				spoil(w, m)
				pass(5 * time.Second)
				ended := m.ended
				pass(4 * time.Second)
				if n := m.ended - ended; n < 15 {
					t.Errorf("%d readings in four seconds, want four a second", n)
				}
			})
		})
	}
}
