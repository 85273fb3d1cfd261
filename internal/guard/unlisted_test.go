// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// sandbox has a process in a container that the runtime does not list, in the pod of
// another that it does.
func (w *world) sandbox(pid int, id, pod string) {
	w.procs[pid] = &proc{owner: node.Owner{ID: id, PodUID: "uid-" + pod, Start: uint64(pid)}, on: map[gpu.UUID]uint64{}}
}

// events are those with a reason.
func (w *world) told(reason string) (out []string) {
	for _, e := range w.events {
		if strings.Contains(e, " "+reason+": ") {
			out = append(out, e)
		}
	}
	return out
}

// TestUnlistedContainer: a sandboxed runtime has a pod's processes in a container that
// the runtime does not list. It is counted and told as that, and ended where it has
// more than all containers of its pod may have together.
func TestUnlistedContainer(t *testing.T) {
	w := newWorld()
	w.container("a", nil, 4*gib, gpu0)
	w.container("neighbour", []int{20}, 4*gib, gpu0)
	w.sandbox(10, "sandbox", "a")
	watch(t, w, Options{EndIntruders: true}, func(g *Guard, pass func(time.Duration)) {
		w.uses(10, gpu0, 3*gib)
		w.uses(20, gpu0, gib)
		pass(time.Minute)
		st := g.State()
		if st.On[gpu0].Unlisted != 1 || st.On[gpu0].Intruders != 0 || st.On[gpu0].NoPod != 0 || st.Found != 0 {
			t.Errorf("%d processes are of containers that are not listed, %d of intruders, %d of no pod; want one of the first",
				st.On[gpu0].Unlisted, st.On[gpu0].Intruders, st.On[gpu0].NoPod)
		}
		if c := st.Containers[0]; c.Pod != "pod-a" || c.UsedMiB != nil || c.Guarantee != string(memcap.Watchdog) {
			t.Errorf("what its pod's container has is said to be known: %+v", c)
		}
		if got := w.told(unlistedReason); len(got) != 1 || !strings.HasPrefix(got[0], "work/pod-a uid-a ") || !strings.Contains(got[0], "(sandbox)") || !strings.Contains(got[0], "3.00 GiB") {
			t.Errorf("Events %q, want one of the pod that names container and use", got)
		}
		if len(w.ended) != 0 {
			t.Fatalf("ended %v, which is within its cap", w.ended)
		}
		if w.lists > 50 {
			t.Errorf("in that minute the runtime was asked %d times for its containers", w.lists)
		}
		w.uses(10, gpu0, 8*gib)
		pass(time.Second)
		if len(w.ended) != 1 || w.ended[0] != "sandbox" {
			t.Errorf("ended %v, want the one over the cap", w.ended)
		}
		if got := w.told(overReason); len(got) != 1 || !strings.HasPrefix(got[0], "work/pod-a uid-a ") {
			t.Errorf("Events %q", w.events)
		}
		pass(10 * time.Second)
		if st := g.State(); st.On[gpu0].Unlisted != 0 || st.Kills != 1 {
			t.Errorf("after its end %d processes are not listed, %d kills", st.On[gpu0].Unlisted, st.Kills)
		}
	})
}

// TestUnlistedIsNotEnded: where nobody can tell for sure what a container may have, it
// is told and not ended.
func TestUnlistedIsNotEnded(t *testing.T) {
	for _, c := range []struct {
		name string
		set  func(w *world)
		told int
	}{
		{"of a pod that is not listed either", func(w *world) { w.sandbox(10, "sandbox", "gone") }, 1},
		{"of a pod that holds nothing there", func(w *world) {
			w.container("b", nil, 4*gib, gpu1)
			w.sandbox(10, "sandbox", "b")
		}, 1},
		{"of a pod with a whole GPU", func(w *world) {
			w.container("b", nil, lib.None, gpu0)
			w.sandbox(10, "sandbox", "b")
		}, 0},
		{"within what the pod's containers have together", func(w *world) {
			w.container("b", nil, 4*gib, gpu0)
			c := w.containers["a"]
			c.PodUID = "uid-b"
			w.containers["a"] = c
			w.allocations[0].Holder.Name, w.allocations[1].Holder.Name = "pod-b", "pod-b"
			w.sandbox(10, "sandbox", "b")
		}, 1},
		{"of which the allocation may not be known", func(w *world) {
			w.container("b", nil, 4*gib, gpu0)
			w.sandbox(10, "sandbox", "b")
			w.container("new", nil, 4*gib, gpu0)
			delete(w.containers, "new")
			for i := range w.allocations {
				if w.allocations[i].Holder.Name == "pod-new" {
					w.allocations[i].Holder.Name = "" // the kubelet has not named it yet
				}
			}
		}, 1},
		{"in its pod's cgroup, and in no container's", func(w *world) {
			w.sandbox(10, "", "a")
		}, 1},
		{"on a GPU that others give out too", func(w *world) {
			w.sandbox(10, "sandbox", "gone")
			w.open = map[gpu.UUID]bool{gpu0: true}
		}, 0},
		{"of the runtime that does not answer", func(w *world) {
			w.sandbox(10, "sandbox", "a")
			w.deaf = true
		}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld()
			w.container("a", nil, 4*gib, gpu0)
			c.set(w)
			watch(t, w, Options{EndIntruders: true}, func(g *Guard, pass func(time.Duration)) {
				w.uses(10, gpu0, 8*gib)
				pass(30 * time.Second)
				if len(w.ended) != 0 {
					t.Errorf("ended %v", w.ended)
				}
				if got := w.told(unlistedReason); len(got) != c.told || len(w.events) != c.told {
					t.Errorf("Events %q, want %d", w.events, c.told)
				}
				if n := g.State().On[gpu0].Unlisted; n != 1 && !w.deaf {
					t.Errorf("%d processes are not listed, want one", n)
				}
			})
		})
	}
}

// TestUnlistedForAMoment: a container that the runtime lists only a while after its
// first process has used the GPU is nothing to tell.
func TestUnlistedForAMoment(t *testing.T) {
	w := newWorld()
	w.container("a", []int{10}, 4*gib, gpu0)
	late := w.containers["a"]
	delete(w.containers, "a")
	w.uses(10, gpu0, 3*gib)
	watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
		pass(3 * time.Second)
		w.containers["a"] = late
		pass(10 * time.Second)
		if len(w.events) != 0 || len(w.ended) != 0 || g.State().On[gpu0].Unlisted != 0 {
			t.Errorf("Events %q, ended %v", w.events, w.ended)
		}
	})
}
