// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
)

// another is a container that has the allocation of one that is there, in the same pod.
func (w *world) another(id, of string, pids ...int) {
	c := w.containers[of]
	c.ID, c.Name, c.Running, c.Annotations = id, id, true, maps.Clone(c.Annotations)
	w.containers[id] = c
	for _, pid := range pids {
		w.procs[pid] = &proc{owner: node.Owner{ID: id, PodUID: c.PodUID, Start: uint64(pid)}, on: map[gpu.UUID]uint64{}}
	}
}

// ends has a container end, which the runtime goes on to list.
func (w *world) ends(id string) {
	c := w.containers[id]
	c.Running = false
	w.containers[id] = c
	maps.DeleteFunc(w.procs, func(_ int, p *proc) bool { return p.owner.ID == id })
}

// TestOneReaderOfAnAllocationsCounters: an init container that has ended is listed yet while
// its successor runs. They have the same counters, which are read once in a look: who
// waits for a reading is not told of one that was begun before.
func TestOneReaderOfAnAllocationsCounters(t *testing.T) {
	w := newWorld()
	w.container("init", []int{10}, 4*gib, gpu0)
	m := &meter{w: w}
	w.pages["init"+string(gpu0)] = m
	watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
		w.uses(10, gpu0, gib)
		pass(time.Second)
		w.ends("init")
		w.another("main", "init", 20)
		w.uses(20, gpu0, 2*gib)
		pass(2 * time.Second)
		asked, begun := w.asked[gpu0], m.begun
		pass(4 * time.Second)
		if looks, readings := w.asked[gpu0]-asked, m.begun-begun; readings != looks || looks == 0 {
			t.Errorf("%d readings of one page in %d looks", readings, looks)
		}
		if m.driver != 2*gib || !m.known {
			t.Errorf("the counters are held against %d MiB, the successor has 2 GiB", m.driver>>20)
		}
		if c := g.State().Containers; len(c) != 1 || used(c[0]) != 2*gib || c[0].Processes != 1 || c[0].Container != "main" {
			t.Errorf("the allocation is shown as %+v", c)
		}
	})
}

// TestSuccessorNotListedYet: the runtime lists an init container that has ended, and
// not yet its successor, which uses the GPU. What the allocation has is not known then, so
// its counters are held against nothing: against the 0 bytes of the one that is listed
// the ceiling would rise by all that the successor has.
func TestSuccessorNotListedYet(t *testing.T) {
	w := newWorld()
	w.container("init", []int{10}, 4*gib, gpu0)
	m := &meter{w: w}
	w.pages["init"+string(gpu0)] = m
	watch(t, w, Options{}, func(_ *Guard, pass func(time.Duration)) {
		w.uses(10, gpu0, gib)
		pass(time.Second)
		w.ends("init")
		w.another("main", "init", 20)
		w.uses(20, gpu0, 2*gib)
		late := w.containers["main"]
		delete(w.containers, "main")
		before := m.ended
		pass(3 * time.Second)
		if m.ended != before {
			t.Errorf("%d readings, the last one with %d MiB (known: %v): its successor has 2 GiB", m.ended-before, m.driver>>20, m.known)
		}
		w.containers["main"] = late
		pass(time.Second)
		if m.ended == before || m.driver != 2*gib || !m.known {
			t.Errorf("%d readings when it is listed, with %d MiB", m.ended-before, m.driver>>20)
		}
	})
}

// TestOtherPodOfAnAllocationNotListedYet: two pods share an allocation. What it has is not known
// while the runtime does not list a container of the second pod yet, or has not told what that
// was created with; after a while it is somebody else's.
func TestOtherPodOfAnAllocationNotListedYet(t *testing.T) {
	w := newWorld()
	w.container("first", nil, 4*gib, gpu0)
	key := w.allocations[0].ID
	w.allocations[0].Owner = ledger.DRA
	delete(w.containers, "first")
	w.claim("a", key, 10)
	m := &meter{w: w}
	w.byKey = map[string]*meter{key: m}
	watch(t, w, Options{}, func(_ *Guard, pass func(time.Duration)) {
		w.uses(10, gpu0, gib)
		pass(time.Second)
		read := func(when string, want bool, of uint64) {
			t.Helper()
			before := m.ended
			pass(time.Second)
			if (m.ended > before) != want || want && m.driver != of {
				t.Errorf("%s: %d readings, the last one with %d MiB", when, m.ended-before, m.driver>>20)
			}
		}
		read("alone", true, gib)
		w.claim("b", key, 20)
		late := w.containers["b"]
		delete(w.containers, "b")
		w.uses(20, gpu0, 2*gib)
		pass(0)
		read("not listed", false, 0)
		untold := late
		untold.CDI, untold.CDIUnknown, untold.Created = nil, true, time.Now()
		w.containers["b"] = untold
		read("not told", false, 0)
		w.containers["b"] = late
		pass(listEvery)
		read("known", true, 3*gib)
		w.claim("c", "0123456789abcdef", 30)
		delete(w.containers, "c")
		w.uses(30, gpu0, gib)
		pass(2 * unlistedGrace)
		read("one that is never listed", true, 3*gib)
	})
}

// TestAllocationGivenAgain: the counters are made anew where an allocation is given to somebody
// else, while a container of who had it is still listed. The new ones are read as soon
// as the old ones turn out not to be the allocation's any more.
func TestAllocationGivenAgain(t *testing.T) {
	w := newWorld()
	w.container("old", []int{10}, 4*gib, gpu0)
	was, is := &meter{w: w}, &meter{w: w}
	w.pages["old"+string(gpu0)] = was
	watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
		w.uses(10, gpu0, gib)
		pass(3 * time.Second)
		w.ends("old")
		w.another("new", "old", 20)
		c := w.containers["new"]
		c.PodUID, c.Pod = "uid-new", "pod-new"
		w.containers["new"] = c
		w.procs[20].owner.PodUID = c.PodUID
		was.broken = true
		w.pages["old"+string(gpu0)] = is
		w.uses(20, gpu0, 2*gib)
		pass(600 * time.Millisecond)
		if !was.closed || is.ended == 0 || is.driver != 2*gib {
			t.Errorf("the old counters are closed: %v; %d readings of the new ones, with %d MiB", was.closed, is.ended, is.driver>>20)
		}
		if n := w.logged("cannot read an allocation's counters"); n != 0 {
			t.Errorf("it was logged %d times that counters make no sense", n)
		}
	})
}

// TestTwoContainersOfAnAllocationOver: together they have more than the allocation's cap, and none
// of them alone. Nobody counts: the one with the most is ended, and that is enough.
func TestTwoContainersOfAnAllocationOver(t *testing.T) {
	w := newWorld()
	w.container("a", []int{10}, 4*gib, gpu0)
	w.another("b", "a", 20)
	w.pages["a"+string(gpu0)] = &meter{w: w, quiet: true}
	watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
		w.uses(10, gpu0, gib)
		w.uses(20, gpu0, 3*gib)
		pass(10 * time.Second)
		if len(w.ended) != 0 {
			t.Fatalf("ended %v, and they were within the cap", w.ended)
		}
		w.uses(10, gpu0, 2*gib)
		pass(3 * time.Second)
		if !slices.Equal(w.ended, []string{"b"}) {
			t.Errorf("ended %v, want the one that has 3 of 5 GiB", w.ended)
		}
		want := "work/pod-a uid-a CapExceeded: container b of pod work/pod-a uses 3.00 GiB of GPU 0 (GPU-0), and together with the others that share its allocation 5.00 GiB, more than their cap of 4.00 GiB; it is ended"
		if !slices.Equal(w.events, []string{want}) {
			t.Errorf("Events\n%s\nwant\n%s", strings.Join(w.events, "\n"), want)
		}
		if g.State().Kills != 1 {
			t.Errorf("%d kills", g.State().Kills)
		}
	})
}

// claim makes a container of a pod of its own that has, by its CDI device alone, an
// allocation that another container has too.
func (w *world) claim(id, key string, pid int) {
	w.containers[id] = node.Container{ID: id, PodUID: "uid-" + id, Namespace: "work", Pod: "pod-" + id, Name: "main", Running: true,
		CDI: []string{"vendor.io/net=x", cdi.DeviceName("example.com", key)}}
	w.procs[pid] = &proc{owner: node.Owner{ID: id, PodUID: "uid-" + id, Start: uint64(pid)}, on: map[gpu.UUID]uint64{}}
}

// TestTwoPodsOfAnAllocationOver: two pods share an allocation, which their containers have by CDI
// device alone. The one with the largest excess over its own count is ended, though the other
// has more memory; where their counts cannot be told, or are false, the one with more.
func TestTwoPodsOfAnAllocationOver(t *testing.T) {
	for name, c := range map[string]struct {
		counts map[int]uint64
		err    error
		want   string
	}{
		"one goes around its count":   {map[int]uint64{10: 3 * gib}, nil, "b"},
		"nobody counts":               {nil, nil, "a"},
		"the counts cannot be read":   {map[int]uint64{10: 3 * gib}, errors.New("nonsense"), "a"},
		"more is counted than can be": {map[int]uint64{10: 3 * gib, 20: 2 * gib}, nil, "a"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			w.container("first", nil, 4*gib, gpu0)
			key := w.allocations[0].ID
			w.allocations[0].Owner = ledger.DRA
			delete(w.containers, "first")
			w.claim("a", key, 10)
			w.claim("b", key, 20)
			w.byKey = map[string]*meter{key: {w: w, quiet: true, each: c.counts, countErr: c.err}}
			watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
				w.uses(10, gpu0, 3*gib)
				w.uses(20, gpu0, gib)
				pass(10 * time.Second)
				if len(w.ended) != 0 {
					t.Fatalf("ended %v, and they were within the cap", w.ended)
				}
				w.uses(20, gpu0, 2*gib)
				pass(3 * time.Second)
				if !slices.Equal(w.ended, []string{c.want}) {
					t.Errorf("ended %v, want %s", w.ended, c.want)
				}
			})
		})
	}
}

// TestContainerOfUnknownDevices: of a container whose CDI devices the runtime does not tell
// nobody knows what it may have. It is no intruder.
func TestContainerOfUnknownDevices(t *testing.T) {
	w := newWorld()
	w.claim("a", "0123456789abcdef", 10)
	c := w.containers["a"]
	c.CDI, c.CDIUnknown = nil, true
	w.containers["a"] = c
	watch(t, w, Options{EndIntruders: true}, func(g *Guard, pass func(time.Duration)) {
		w.uses(10, gpu0, 3*gib)
		pass(30 * time.Second)
		if len(w.ended)+len(w.events) != 0 || g.State().On[gpu0].Intruders != 0 {
			t.Errorf("ended %v, Events %v, %d intruders", w.ended, w.events, g.State().On[gpu0].Intruders)
		}
	})
}

// TestPredecessorThatTakesItsTime: what a container that is ending has yet and what its
// successor has is more than their cap together. When somebody is to be ended for that
// the first one is gone, and so is the offence.
func TestPredecessorThatTakesItsTime(t *testing.T) {
	w := newWorld()
	w.container("init", []int{10}, 4*gib, gpu0)
	w.another("main", "init", 20)
	watch(t, w, Options{}, func(_ *Guard, pass func(time.Duration)) {
		last := 0
		w.reowned = func(pid int) {
			if pid != 10 {
				return
			}
			if last != 0 && w.asked[gpu0]-last != 1 { // once after each look's question, and then by who ends somebody
				delete(w.procs, 10)
			}
			last = w.asked[gpu0]
		}
		w.uses(10, gpu0, 3*gib)
		w.uses(20, gpu0, 4*gib)
		pass(5 * time.Second)
		if len(w.ended) != 0 || w.procs[10] != nil {
			t.Errorf("ended %v; the first one is there: %v", w.ended, w.procs[10] != nil)
		}
	})
}

// TestMomentsBeyondTheCapEndNobody: a memory pool takes more than the cap for moments
// and gives it back at once, and each look falls into such a moment. What the counters
// say of that neither excuses anybody nor condemns: who stays over is ended as ever.
func TestMomentsBeyondTheCapEndNobody(t *testing.T) {
	w := newWorld()
	w.container("a", []int{10}, 4*gib, gpu0)
	w.pages["a"+string(gpu0)] = &meter{w: w, undone: 40 * gib}
	watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
		stays, last := false, time.Time{}
		w.listing = func() { // a look comes a while after the last question, and not at once
			if w.procs[10] == nil {
				return
			}
			if w.uses(10, gpu0, 4*gib); stays || time.Since(last) > 100*time.Millisecond {
				w.uses(10, gpu0, 8*gib)
			}
			last = time.Now()
		}
		pass(time.Minute)
		if len(w.ended) != 0 || len(w.events) != 0 || g.State().Kills != 0 {
			t.Errorf("ended %v, Events %q", w.ended, w.events)
		}
		stays = true
		pass(time.Second)
		if !slices.Equal(w.ended, []string{"a"}) || len(w.events) != 1 {
			t.Errorf("ended %v, Events %q, when it stays over", w.ended, w.events)
		}
	})
}

// TestSharesOfOneGPU: a container with two allocations of one GPU has their sum, and counts
// on the page of the larger one. One that has one of them alone is held to that.
func TestSharesOfOneGPU(t *testing.T) {
	for name, c := range map[string]struct {
		both, one uint64
		want      []string
	}{
		"within the sum":         {7 * gib, 0, nil},
		"beyond the sum":         {8 * gib, 0, []string{"both"}},
		"one within its share":   {4 * gib, 3 * gib, nil},
		"one beyond its share":   {gib, 4 * gib, []string{"one"}},
		"together, by the count": {5 * gib, 3 * gib, []string{"one"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			w.container("large", nil, 4*gib, gpu0)
			w.container("small", nil, 3*gib, gpu0)
			large, small := w.allocations[0].ID, w.allocations[1].ID
			delete(w.containers, "large")
			delete(w.containers, "small")
			w.claim("both", large, 10)
			both := w.containers["both"]
			both.CDI = append(both.CDI, cdi.DeviceName("example.com", small))
			w.containers["both"] = both
			w.claim("one", small, 20)
			home, other := &meter{w: w, quiet: true, each: map[int]uint64{10: 5 * gib}}, &meter{w: w, quiet: true}
			w.byKey = map[string]*meter{large: home, small: other}
			watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
				w.uses(10, gpu0, c.both)
				w.uses(20, gpu0, c.one)
				pass(3 * time.Second)
				if !slices.Equal(w.ended, c.want) {
					t.Errorf("ended %v, want %v", w.ended, c.want)
				}
				if c.want == nil && (home.driver != c.both || other.driver != c.one) {
					t.Errorf("the larger one's page is held against %d MiB, the other one's against %d", home.driver>>20, other.driver>>20)
				}
			})
		})
	}
}
