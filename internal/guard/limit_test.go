// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// limiter is a driver that limits containers, in memory. Its world's lock guards
// it.
type limiter struct {
	w     *world
	err   map[gpu.UUID]error
	held  map[string]uint64 // by GPU and cgroup
	asked []string          // each call
}

func (l *limiter) Limit(_ context.Context, u gpu.UUID, o node.Owner, bytes uint64) error {
	l.w.mu.Lock()
	defer l.w.mu.Unlock()
	at := string(u) + o.Cgroup
	l.asked = append(l.asked, fmt.Sprintf("%s=%d", at, int64(bytes)/int64(gib)))
	if err := l.err[u]; err != nil {
		return err
	}
	if l.held[at] = bytes; bytes == lib.None {
		delete(l.held, at)
	}
	return nil
}

// limited runs a guard on a world whose driver limits containers.
func limited(t *testing.T, w *world, f func(g *Guard, l *limiter, pass func(time.Duration))) {
	t.Helper()
	l := &limiter{w: w, err: map[gpu.UUID]error{}, held: map[string]uint64{}}
	for _, p := range w.procs {
		p.owner.V2, p.owner.Cgroup = true, "/"+p.owner.ID
	}
	watchIn(t, w, Worlds{Pages: w, Runtime: w, Limiter: l}, Options{}, func(g *Guard, pass func(time.Duration)) { f(g, l, pass) })
}

func levels(g *Guard) string {
	var out []string
	for _, c := range g.State().Containers {
		out = append(out, fmt.Sprintf("%s %d %s", c.Pod, c.Index, c.Guarantee))
	}
	return strings.Join(out, ", ")
}

// TestLimit: the driver is told of each container once that is seen on a GPU with
// a cap, again when the cap is another one, and now and then.
func TestLimit(t *testing.T) {
	w := newWorld()
	w.container("a", []int{10, 11}, 4*gib, gpu0, gpu1)
	w.container("b", []int{20}, 8*gib, gpu0)
	w.container("whole", []int{30}, lib.None, gpu1)
	w.container("thief", []int{40}, 0)
	limited(t, w, func(g *Guard, l *limiter, pass func(time.Duration)) {
		pass(10 * time.Second)
		if len(l.asked) != 0 || levels(g) != "pod-a 0 api, pod-b 0 api, pod-a 1 api, pod-whole 1 hardware" {
			t.Errorf("before anybody was seen: asked %q, %s", l.asked, levels(g))
		}
		w.uses(10, gpu0, gib)
		w.uses(11, gpu0, gib)
		w.uses(20, gpu0, gib)
		w.uses(30, gpu1, gib)
		w.uses(40, gpu0, gib)
		pass(20 * time.Second)
		want := map[string]uint64{"GPU-0/a": 4 * gib, "GPU-0/b": 8 * gib}
		if len(l.asked) != 2 || !maps.Equal(l.held, want) {
			t.Errorf("asked %q, held %v, want %v", l.asked, l.held, want)
		}
		if got := levels(g); got != "pod-a 0 driver, pod-b 0 driver, pod-a 1 api, pod-whole 1 hardware" {
			t.Error(got)
		}

		w.recap(8*gib, 6*gib)
		pass(time.Second)
		if len(l.asked) != 3 || l.held["GPU-0/b"] != 6*gib {
			t.Errorf("another cap: asked %q, held %v", l.asked, l.held)
		}
		w.recap(6*gib, lib.None)
		pass(time.Second)
		if _, held := l.held["GPU-0/b"]; held || len(l.asked) != 4 {
			t.Errorf("no cap: asked %q, held %v", l.asked, l.held)
		}

		clear(l.held) // as by a driver that is loaded anew
		pass(limitEvery)
		if l.held["GPU-0/a"] != 4*gib {
			t.Errorf("after %v: held %v", limitEvery, l.held)
		}
	})
}

// TestLimitUnable: a GPU whose driver cannot is not asked again for an hour.
func TestLimitUnable(t *testing.T) {
	for name, err := range map[string]error{"an old driver": gpu.ErrNotSupported, "not root": gpu.ErrNoPermission} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			w.container("a", []int{10}, 4*gib, gpu0, gpu1)
			w.container("b", []int{20}, 4*gib, gpu0)
			limited(t, w, func(g *Guard, l *limiter, pass func(time.Duration)) {
				l.err[gpu0] = fmt.Errorf("set it: %w", err)
				w.uses(10, gpu0, gib)
				w.uses(20, gpu0, gib)
				w.uses(10, gpu1, gib)
				pass(50 * time.Second)
				slices.Sort(l.asked)
				if len(l.asked) != 2 || !strings.HasPrefix(l.asked[0], "GPU-0") || l.asked[1] != "GPU-1/a=4" {
					t.Errorf("asked %q, want once of each GPU", l.asked)
				}
				// They have no counters, either.
				if got := levels(g); got != "pod-a 0 watchdog, pod-b 0 watchdog, pod-a 1 driver" {
					t.Error(got)
				}
				delete(l.err, gpu0)
				pass(time.Hour)
				if got := levels(g); got != "pod-a 0 driver, pod-b 0 driver, pod-a 1 driver" {
					t.Errorf("after an hour: %s", got)
				}
			})
		})
	}
}

// TestLimitWithoutDmem: where the kernel's controller is not enabled for containers,
// that is said once, for all of them, and they are tried again once a minute; the
// driver holds them when it is enabled.
func TestLimitWithoutDmem(t *testing.T) {
	w := newWorld()
	w.container("a", []int{10}, 4*gib, gpu0)
	w.container("b", []int{20}, 4*gib, gpu0)
	limited(t, w, func(g *Guard, l *limiter, pass func(time.Duration)) {
		l.err[gpu0] = fmt.Errorf("look at it: %w", node.ErrNoDmem)
		w.uses(10, gpu0, gib)
		w.uses(20, gpu0, gib)
		pass(10*time.Minute - time.Second)
		if n := len(l.asked); n != 20 {
			t.Errorf("two containers were tried %d times in ten minutes, want once a minute", n)
		}
		if n := w.logged("cannot limit the memory of containers"); n != 1 {
			t.Errorf("it was said %d times, want once", n)
		}
		delete(l.err, gpu0)
		pass(limitEvery)
		if got := levels(g); got != "pod-a 0 driver, pod-b 0 driver" {
			t.Errorf("after it was enabled: %s", got)
		}
	})
}

// TestLimitOfNobody: a container that the driver cannot find is on its way out, unless
// it goes on using the GPU: then something is wrong, and the log says so.
func TestLimitOfNobody(t *testing.T) {
	w := newWorld()
	w.container("a", []int{10}, 4*gib, gpu0)
	limited(t, w, func(_ *Guard, l *limiter, pass func(time.Duration)) {
		const said = "does not limit the memory of a container"
		l.err[gpu0] = fmt.Errorf("limit it: %w", gpu.ErrNotFound)
		w.uses(10, gpu0, gib)
		pass(limitGone*limitRetry - time.Second)
		if n := w.logged(said); n != 0 {
			t.Errorf("it was said %d times of a container that may be about to end", n)
		}
		pass(2 * time.Minute)
		if n := w.logged(said); n != 1 {
			t.Errorf("it was said %d times of one that is still there, want once", n)
		}
	})
}

// TestLimitFails: what failed is tried again, and not at every look; a level that
// the driver does not confirm any more is not published.
func TestLimitFails(t *testing.T) {
	w := newWorld()
	w.container("a", []int{10}, 4*gib, gpu0)
	w.pages["a"+string(gpu0)] = &meter{w: w}
	limited(t, w, func(g *Guard, l *limiter, pass func(time.Duration)) {
		l.err[gpu0] = gpu.ErrDriver
		w.uses(10, gpu0, gib)
		pass(limitRetry - time.Second)
		if len(l.asked) != 1 || levels(g) != "pod-a 0 "+string(memcap.API) {
			t.Errorf("asked %q, %s", l.asked, levels(g))
		}
		delete(l.err, gpu0)
		pass(2 * time.Second)
		if len(l.asked) != 2 || levels(g) != "pod-a 0 "+string(memcap.Driver) {
			t.Errorf("asked %q, %s", l.asked, levels(g))
		}
		l.err[gpu0] = gpu.ErrTimeout
		pass(limitEvery)
		if levels(g) != "pod-a 0 "+string(memcap.API) {
			t.Errorf("after it failed to confirm: %s", levels(g))
		}
	})
}

// hooks has the outcomes of hooks. Its world's lock guards it.
type hooks struct {
	w   *world
	all []lib.Outcome
	err error
}

func (h *hooks) Outcomes() ([]lib.Outcome, error) {
	h.w.mu.Lock()
	defer h.w.mu.Unlock()
	return slices.Clone(h.all), h.err
}

// set notes that a hook has set a limit for a container, for the allocation of the container owner.
func (h *hooks) set(container, owner string, u gpu.UUID, own, sum uint64) {
	h.all = append(h.all, lib.Outcome{Container: container, Key: cdi.Key("example.com/gpu-mem", []string{owner}),
		Cgroup: "/" + container, Limits: []lib.Held{{GPU: u, Own: own, Sum: sum}}})
}

// hooked runs a guard beside hooks.
func hooked(t *testing.T, w *world, f func(g *Guard, l *limiter, h *hooks, pass func(time.Duration))) {
	t.Helper()
	l := &limiter{w: w, err: map[gpu.UUID]error{}, held: map[string]uint64{}}
	h := &hooks{w: w}
	for _, p := range w.procs {
		p.owner.V2, p.owner.Cgroup = true, "/"+p.owner.ID
	}
	watchIn(t, w, Worlds{Pages: w, Runtime: w, Limiter: l, Outcomes: h}, Options{},
		func(g *Guard, pass func(time.Duration)) { f(g, l, h, pass) })
}

// TestHookSetsTheLimit: the guarantee is the driver's as soon as a hook has read the limit back, before the container
// is on the GPU, and as long as the container lives and the driver confirms the limit.
func TestHookSetsTheLimit(t *testing.T) {
	w := newWorld()
	w.container("a", []int{10}, 4*gib, gpu0)
	w.container("b", nil, 8*gib, gpu0)
	hooked(t, w, func(g *Guard, l *limiter, h *hooks, pass func(time.Duration)) {
		pass(10 * time.Second)
		h.set("a", "a", gpu0, 4*gib, 4*gib)
		pass(2 * time.Second)
		if got := levels(g); got != "pod-a 0 driver, pod-b 0 api" || len(l.asked) != 0 {
			t.Errorf("after the hook: %s, asked %q", got, l.asked)
		}
		// A driver that was loaded anew has forgotten it, though the container has not used the GPU yet.
		pass(limitEvery)
		if l.held["GPU-0/a"] != 4*gib {
			t.Errorf("it was not set again: %v", l.held)
		}
		l.err[gpu0] = gpu.ErrTimeout
		pass(limitEvery)
		if got := levels(g); got != "pod-a 0 api, pod-b 0 api" {
			t.Errorf("the driver confirms nothing: %s", got)
		}
		delete(l.err, gpu0)
		pass(2 * limitRetry)
		w.uses(10, gpu0, gib)
		pass(2 * time.Second)
		if got := levels(g); got != "pod-a 0 driver, pod-b 0 api" {
			t.Errorf("on the GPU: %s", got)
		}

		delete(w.containers, "a")
		delete(w.procs, 10)
		h.all = nil
		pass(20 * time.Second)
		if got := levels(g); got != "pod-a 0 api, pod-b 0 api" {
			t.Errorf("after its end: %s", got)
		}
	})
}

// TestHookFailed: a container that a hook could not limit has the library's guarantee, and the log says why, once. An
// outcome that cannot be read takes no other away.
func TestHookFailed(t *testing.T) {
	w := newWorld()
	w.container("a", nil, 4*gib, gpu0)
	w.container("b", nil, 4*gib, gpu0)
	hooked(t, w, func(g *Guard, _ *limiter, h *hooks, pass func(time.Duration)) {
		h.set("b", "b", gpu0, 4*gib, 4*gib)
		h.all = append(h.all, lib.Outcome{Container: "a", Key: cdi.Key("example.com/gpu-mem", []string{"a"}), Failed: "NVML error 999"})
		h.err = errors.New("one is spoilt")
		pass(time.Minute)
		if got := levels(g); got != "pod-a 0 api, pod-b 0 driver" {
			t.Error(got)
		}
		if n, m := w.logged("NVML error 999"), w.logged("one is spoilt"); n != 1 || m != 1 {
			t.Errorf("logged %d and %d times, want once each", n, m)
		}
	})
}

// TestHooksOfAClaim: the driver holds each container of an allocation to the cap, and not all of them together.
func TestHooksOfAClaim(t *testing.T) {
	w := newWorld()
	w.container("a", nil, 4*gib, gpu0)
	hooked(t, w, func(g *Guard, _ *limiter, h *hooks, pass func(time.Duration)) {
		h.set("a", "a", gpu0, 4*gib, 4*gib)
		pass(2 * time.Second)
		if got := levels(g); got != "pod-a 0 driver" {
			t.Errorf("one container: %s", got)
		}
		h.set("b", "a", gpu0, 4*gib, 4*gib)
		pass(2 * time.Second)
		if got := levels(g); got != "pod-a 0 api" {
			t.Errorf("two containers: %s", got)
		}
		h.all = h.all[1:]
		pass(2 * time.Second)
		if got := levels(g); got != "pod-a 0 driver" {
			t.Errorf("the other alone: %s", got)
		}
	})
}
