// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
)

// count returns how many pods are known to end.
func (e *endings) count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.of)
}

// TestPodEnds: the clients of a pod that the API server names are detached two seconds before its end, and at once
// if that is nearer or over; those of others never. What was detached is counted once.
func TestPodEnds(t *testing.T) {
	for _, c := range []struct {
		name string
		// do is what happens, from the second 0 on.
		do func(pod *ended)
		// want has each call of the daemon, with its time.
		want []string
		// detached and not are what is counted.
		detached, not uint64
	}{
		{"in time", func(p *ended) { p.ends(30) }, []string{"28s detach [10 11]"}, 2, 0},
		{"a second deletion leaves less", func(p *ended) { p.ends(30); p.ends(40); p.ends(5) },
			[]string{"3s detach [10 11]"}, 2, 0},
		{"less than two seconds", func(p *ended) { p.ends(1) }, []string{"0s detach [10 11]"}, 2, 0},
		{"the time is over", func(p *ended) { p.ends(-60) }, []string{"0s detach [10 11]"}, 2, 0},
		{"ends by itself", func(p *ended) { p.ends(30); p.sleep(5); p.leave(); p.gone() }, nil, 0, 0},
		{"forced, without a grace period", func(p *ended) { p.sleep(5); p.gone() },
			[]string{"5s detach [10 11]"}, 2, 0},
		{"forced, within the grace period", func(p *ended) { p.ends(30); p.sleep(5); p.gone() },
			[]string{"5s detach [10 11]"}, 2, 0},
		{"a program begins anew", func(p *ended) { p.ends(30); p.sleep(29.2); p.client(12) },
			[]string{"28s detach [10 11]", "29.5s detach [12]"}, 3, 0},
		{"not known yet", func(p *ended) { p.hide(); p.ends(-1); p.sleep(1.2); p.client(10); p.client(11) },
			[]string{"1.5s detach [10 11]"}, 2, 0},
		{"evicted, too, later", func(p *ended) { p.ends(30); p.evicted(31) }, []string{"28s detach [10 11]"}, 2, 0},
		{"evicted, too, earlier", func(p *ended) { p.evicted(30); p.ends(31) }, []string{"28s detach [10 11]"}, 2, 0},
		{"forced at a start", func(p *ended) { p.hide(); p.sleep(5); p.gone(); p.sleep(0.2); p.client(10) },
			[]string{"5.5s detach [10]"}, 1, 0},
		{"the daemon is silent", func(p *ended) { p.client(12); p.mute(); p.ends(3); p.sleep(1.2); p.gone() },
			[]string{"1s timeout [10 11 12]"}, 0, 3},
		{"the supervisor is away for a while", func(p *ended) { p.mute(); p.ends(3); p.sleep(1.7); p.hear() },
			[]string{"1s timeout [10 11]", "1.5s timeout [10 11]", "2s detach [10 11]"}, 2, 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &daemons{of: map[gpu.UUID]Daemon{gpu0: {Clients: map[int]bool{10: true, 11: true, 20: true}}}}
				w := newWorld()
				w.container("a", []int{10, 11, 12}, gib, gpu0)
				w.container("b", []int{20}, gib, gpu0)
				g := New(Options{Log: discard()},
					Worlds{Driver: w, Allocations: w, Proc: w, Runtime: w, Pages: w, Observer: w, Shares: s})
				began, ctx := time.Now(), t.Context()
				s.mark = func() string { return time.Since(began).String() + " " }
				c.do(&ended{g, s, ctx, began})
				time.Sleep(time.Minute)
				synctest.Wait()
				s.with(func() {
					if !slices.Equal(s.calls, c.want) {
						t.Errorf("%q, want %q", s.calls, c.want)
					}
				})
				if done, not := g.reaper.detaches(); done != c.detached || not != c.not {
					t.Errorf("%d detached and %d not, want %d and %d", done, not, c.detached, c.not)
				}
				if n := g.endings.count(); n > 0 {
					t.Errorf("%d pods stay", n)
				}
			})
		})
	}
}

// ended is pod a, whose container has the processes 10, 11 and 12.
type ended struct {
	g     *Guard
	s     *daemons
	ctx   context.Context
	began time.Time
}

func (p *ended) pod() workload.Pod {
	return workload.Pod{Namespace: "work", Name: "pod-a", UID: "uid-a"}
}

func (p *ended) at(seconds float64) time.Time {
	return p.began.Add(time.Duration(seconds * float64(time.Second)))
}

func (p *ended) ends(at float64)       { p.g.PodEnds(p.ctx, p.pod(), p.at(at)) }
func (p *ended) evicted(at float64)    { p.g.endings.note(p.ctx, p.pod(), p.at(at), false) }
func (p *ended) gone()                 { p.g.PodGone(p.ctx, "uid-a") }
func (p *ended) sleep(seconds float64) { time.Sleep(time.Duration(seconds * float64(time.Second))) }

// leave ends the pod's clients, hide all, and client adds one.
func (p *ended) leave() {
	p.s.with(func() {
		maps.DeleteFunc(p.s.of[gpu0].Clients, func(pid int, _ bool) bool { return pid < 20 })
	})
}

func (p *ended) hide() { p.s.with(func() { clear(p.s.of[gpu0].Clients) }) }

func (p *ended) client(pid int) { p.s.with(func() { p.s.of[gpu0].Clients[pid] = true }) }

// mute has the daemon not answer; for an even number of clients, the supervisor. hear ends that.
func (p *ended) mute() { p.s.with(func() { p.s.mute = func() bool { return true } }) }

func (p *ended) hear() { p.s.with(func() { p.s.mute = nil }) }

// TestEndingsWithoutMPS: on a node without MPS nothing is kept of pods that end.
func TestEndingsWithoutMPS(t *testing.T) {
	w := newWorld()
	g := New(Options{Log: discard()}, Worlds{Driver: w, Allocations: w, Proc: w, Runtime: w, Pages: w, Observer: w})
	g.PodEnds(t.Context(), workload.Pod{UID: "uid-a"}, time.Now())
	g.PodGone(t.Context(), "uid-a")
	if n := g.endings.count(); n > 0 {
		t.Errorf("%d pods stay", n)
	}
}
