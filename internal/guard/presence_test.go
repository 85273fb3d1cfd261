// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"maps"
	"slices"
	"testing"
	"time"

	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// The guard says which allocations have processes on a GPU, how old that is, and when it is not sure. A driver that
// does not answer makes the answer older, and never one in which nobody is there.
func TestPresence(t *testing.T) {
	w := newWorld()
	w.container("a", []int{10, 11}, 4*gib, gpu0)
	w.container("b", []int{20}, 4*gib, gpu0)
	w.uses(10, gpu0, gib)
	key := func(id string) string { return cdi.Key("example.com/gpu-mem", []string{id}) }
	watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
		if _, ok := g.Presence(gpu0); ok {
			t.Error("it is known before the first look")
		}
		is := func(what string, sure bool, on ...string) {
			t.Helper()
			var want []string
			for _, id := range on {
				want = append(want, key(id))
			}
			slices.Sort(want)
			p, ok := g.Presence(gpu0)
			if got := slices.Sorted(maps.Keys(p.On)); !ok || p.Sure != sure || !slices.Equal(got, want) || time.Since(p.At) > 6*time.Second {
				t.Errorf("%s: %v (sure %v, %v old), want %v (sure %v)", what, got, p.Sure, time.Since(p.At), want, sure)
			}
		}
		pass(time.Minute)
		is("one that computes", true, "a")
		pass(time.Minute)
		is("after a minute in which nothing happened", true, "a")
		w.uses(20, gpu0, gib)
		pass(6 * time.Second)
		is("another one", true, "a", "b")
		delete(w.procs[10].on, gpu0)
		pass(6 * time.Second)
		is("after its end", true, "b")

		w.procs[20].err = errors.New("no such cgroup")
		pass(6 * time.Second)
		is("a process whose container is not known", false)
		w.procs[20].err = nil
		c := w.containers["b"]
		c.CDIUnknown = true
		w.containers["b"] = c
		pass(20 * time.Second)
		is("a container whose devices are not known", false, "b")
		delete(w.containers, "b")
		pass(20 * time.Second)
		is("a container that the runtime does not list", false)
		delete(w.procs, 20)
		pass(6 * time.Second)
		is("nobody", true)

		// Of a GPU without a cap it is as new where holders lend, and otherwise a minute old.
		w.container("whole", nil, lib.None, gpu1)
		for _, w.lends = range []bool{true, false} {
			pass(2 * time.Minute)
			oldest := time.Duration(0)
			for range 90 {
				pass(time.Second)
				if p, ok := g.Presence(gpu1); ok {
					oldest = max(oldest, time.Since(p.At))
				}
			}
			if w.lends != (oldest < 12*time.Second) {
				t.Errorf("holders lend: %v, and who is on the GPU is up to %v old", w.lends, oldest)
			}
		}

		before, _ := g.Presence(gpu0)
		w.driverErr = gpu.ErrTimeout
		pass(time.Minute)
		if p, ok := g.Presence(gpu0); !ok || time.Since(p.At) < 55*time.Second || p.At.Before(before.At) {
			t.Errorf("of a driver that does not answer: %+v, before %+v", p, before)
		}
		w.driverErr = nil
		w.container("c", []int{30}, 4*gib, gpu0)
		w.procs[30].owner = node.Owner{PodUID: "uid-c", Start: 30}
		w.uses(30, gpu0, gib)
		pass(20 * time.Second)
		is("a process in a pod's cgroup and in no container's", false)
	})
	w.container("d", nil, 4*gib, gpu0)
	w.checkErr = errors.New("another PID namespace")
	watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
		pass(time.Minute)
		if p, ok := g.Presence(gpu0); ok {
			t.Errorf("of a guard that does not run: %+v", p)
		}
	})
}
