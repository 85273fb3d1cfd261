// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// daemons are MPS daemons in memory. What has happened is in calls, with the ends of containers.
type daemons struct {
	mu    sync.Mutex
	of    map[gpu.UUID]Daemon
	calls []string
	// told is when the daemons last answered; they do so twice a second, and when Refresh asks. Always
	// if steady is false.
	steady bool
	told   time.Time
	mute   func() bool // whether the daemon does not answer
	began  time.Time
	mark   func() string // what each detach in calls begins with; nil for nothing
}

func (s *daemons) stamp() string {
	if s.mark == nil {
		return ""
	}
	return s.mark()
}

func (s *daemons) with(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *daemons) Daemon(u gpu.UUID) (Daemon, bool) {
	d, ok := s.Daemons()[u]
	return d, ok
}

func (s *daemons) Daemons() map[gpu.UUID]Daemon {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[gpu.UUID]Daemon{}
	for u, d := range s.of {
		switch {
		case d.At.IsZero() && s.steady:
			if time.Since(s.told) >= 500*time.Millisecond {
				s.told = time.Now()
			}
			d.At = s.told
		case d.At.IsZero():
			d.At = time.Now()
		}
		d.Clients = maps.Clone(d.Clients)
		out[u] = d
	}
	return out
}

func (s *daemons) Detach(_ context.Context, u gpu.UUID, clients []int) (detached, timedOut int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mute != nil && s.mute() {
		s.calls = append(s.calls, fmt.Sprint(s.stamp(), "timeout ", clients))
		if len(clients)%2 == 0 {
			return 0, 0, errors.New("the supervisor is away")
		}
		return 0, len(clients), nil
	}
	s.calls = append(s.calls, fmt.Sprint(s.stamp(), "detach ", clients))
	for _, pid := range clients {
		if s.of[u].Clients[pid] {
			delete(s.of[u].Clients, pid)
			detached++
		}
	}
	return detached, 0, nil
}

func (s *daemons) Refresh() {
	time.AfterFunc(20*time.Millisecond, func() { s.with(func() { s.told = time.Now() }) })
}

func (s *daemons) Suspect(u gpu.UUID, why string) {
	s.with(func() { s.calls = append(s.calls, "suspect "+string(u)+" "+why) })
}

func (s *daemons) Now() time.Duration { return time.Hour + time.Since(s.began) }

// shared is a meter with words about shares.
type shared struct {
	*meter
	said     map[int]lib.Compute
	starting time.Duration
}

func (m *shared) Compute(of map[lib.Process]lib.Compute) (time.Duration, error) {
	m.w.mu.Lock()
	defer m.w.mu.Unlock()
	for p := range of {
		of[p] = m.said[int(p.PID)]
	}
	return m.starting, nil
}

// pagesOf has a shared meter for each container.
type pagesOf map[string]*shared

func (p pagesOf) Meter(key string, u gpu.UUID) (Meter, error) {
	if m := p[key]; m != nil && u == gpu0 {
		return m, nil
	}
	return nil, gpu.ErrNotFound
}

// shareWorld has a container with a share of GPU 0, with processes that are clients.
func shareWorld(s *daemons, id string, percent int, pids ...int) (*world, pagesOf) {
	w := newWorld()
	w.container(id, pids, 8*gib, gpu0)
	m := &shared{meter: &meter{w: w, quiet: true}, said: map[int]lib.Compute{}}
	for i := range w.allocations[0].Grants {
		w.allocations[0].Grants[i].Compute = compute.Share{Ceiling: percent}
	}
	s.of = map[gpu.UUID]Daemon{gpu0: {Percent: 100, PID: 900, Servers: []int{901}, Clients: map[int]bool{}}}
	for _, pid := range pids {
		w.uses(pid, gpu0, gib)
		s.of[gpu0].Clients[pid] = true
		m.said[pid] = lib.Compute{SMs: 20}
	}
	// The server of the daemon is in a container of another pod, without an allocation.
	w.container("mps", []int{901}, 0)
	w.uses(901, gpu0, gib)
	return w, pagesOf{w.allocations[0].ID: m}
}

// sized has GPU 0 with so many SMs.
type sized struct{ *world }

func (w sized) Offered() []gpu.Device {
	return []gpu.Device{{UUID: gpu0, SMs: 80}, {UUID: gpu1, Index: 1}}
}

func heldOf(g *Guard) string {
	for _, c := range g.State().Containers {
		if c.Compute != nil {
			return c.Compute.String()
		}
	}
	return ""
}

func (w *world) said(reason status.Reason) (n int) {
	for _, e := range w.events {
		if strings.Contains(e, " "+string(reason)+": ") {
			n++
		}
	}
	return n
}

// TestHeldToAShare: a container is held to its ceiling while the driver, the daemon and its page agree, and
// the reason why it is not is told as soon as they do not.
func TestHeldToAShare(t *testing.T) {
	s := &daemons{began: time.Now()}
	w, pages := shareWorld(s, "a", 25, 10, 11)
	m := pages[w.allocations[0].ID]
	watchIn(t, w, Worlds{Pages: pages, Runtime: w, Shares: s, Allocations: sized{w}}, Options{}, func(g *Guard, pass func(time.Duration)) {
		look := func(want string) {
			t.Helper()
			pass(2 * DefaultEvery)
			if got := heldOf(g); got != want {
				t.Errorf("%q, want %q", got, want)
			}
		}
		pass(time.Second)
		look("ceiling 25 %")
		if n := g.State().On[gpu0].Intruders; n != 0 || w.said(status.Intruder) != 0 {
			t.Errorf("%d intruders, %q", n, w.events)
		}
		pass(time.Minute)
		look("ceiling 25 %")
		s.with(func() { d := s.of[gpu0]; d.Trouble = "the daemon has ended"; s.of[gpu0] = d })
		look("none: the daemon has ended")
		s.with(func() { d := s.of[gpu0]; d.Trouble = ""; s.of[gpu0] = d })
		look("ceiling 25 %")
		m.said[11] = lib.Compute{SMs: 21}
		m.word++ // the page has changed
		look("none: process 11 has 21 SMs, and its share is 20 of 80")
		m.said[11] = lib.Compute{SMs: 20}
		look("ceiling 25 %")
		delete(w.procs, 10)
		delete(w.procs, 11)
		look("none: no process yet")
	})
}

// profiled has GPU 0 with a MIG profile of 98 SMs. An A100 has that, and 108 in all.
type profiled struct {
	*world
	sms int
}

func (w profiled) Offered() []gpu.Device {
	d := gpu.Device{UUID: gpu0, SMs: w.sms}
	d.MIG.Profiles = []gpu.Profile{{SMs: 98}}
	return []gpu.Device{d}
}

// TestSMsOfTheCard: a share is of the SMs that the card has, not of those that MIG can give. A card of which
// the driver does not tell them holds nobody.
func TestSMsOfTheCard(t *testing.T) {
	for all, want := range map[int]string{108: "ceiling 25 %", 0: "none: the driver does not tell how many SMs the GPU has"} {
		s := &daemons{began: time.Now()}
		w, pages := shareWorld(s, "a", 25, 10)
		pages[w.allocations[0].ID].said[10] = lib.Compute{SMs: 27} // of 98 it would be 25 at most
		watchIn(t, w, Worlds{Pages: pages, Runtime: w, Shares: s, Allocations: profiled{w, all}}, Options{}, func(g *Guard, pass func(time.Duration)) {
			if pass(time.Second); heldOf(g) != want {
				t.Errorf("%d SMs: %q, want %q", all, heldOf(g), want)
			}
		})
	}
}

// TestOutsideMPS: a process that is no client is named as soon as the daemon has told its clients after the
// process was seen, and its container is ended if the operator wants that. A client that has nothing on its
// page is named after a while.
func TestOutsideMPS(t *testing.T) {
	for _, end := range []bool{false, true} {
		for _, kind := range []string{"outside", "silent"} {
			t.Run(fmt.Sprint(kind, end), func(t *testing.T) {
				s := &daemons{began: time.Now()}
				w, pages := shareWorld(s, "a", 25, 10)
				m := pages[w.allocations[0].ID]
				watchIn(t, w, Worlds{Pages: pages, Runtime: w, Shares: s, Allocations: sized{w}}, Options{EndIntruders: end}, func(g *Guard, pass func(time.Duration)) {
					pass(time.Second)
					w.procs[12] = &proc{owner: node.Owner{ID: "a", PodUID: "uid-a", Start: 12}, on: map[gpu.UUID]uint64{gpu0: gib}}
					if kind == "silent" {
						s.with(func() { s.of[gpu0].Clients[12] = true })
						pass(silentGrace / 2)
					} else {
						m.said[12] = lib.Compute{SMs: 80} // what a container writes helps it to nothing
						s.with(func() { d := s.of[gpu0]; d.At = time.Now().Add(-time.Second); s.of[gpu0] = d })
						pass(3 * DefaultEvery)
					}
					if n := w.said(status.Intruder); n != 0 {
						t.Errorf("it was named before it is sure: %q", w.events)
					}
					if got := heldOf(g); !strings.HasPrefix(got, "none: process 12 ") {
						t.Errorf("held %q", got)
					}
					s.with(func() { d := s.of[gpu0]; d.At = time.Time{}; s.of[gpu0] = d })
					if kind == "silent" {
						pass(silentGrace)
					} else {
						pass(2 * DefaultEvery)
					}
					if n := w.said(status.Intruder); n != 1 || !strings.Contains(w.events[0], "process [12] on GPU 0") {
						t.Errorf("it was named %d times: %q", n, w.events)
					}
					if got := slices.Contains(w.ended, "a"); got != end {
						t.Errorf("ended %v, want %v", w.ended, end)
					}
					if !end && g.State().On[gpu0].Intruders != 1 {
						t.Errorf("%+v", g.State().On[gpu0])
					}
					pass(time.Minute)
					if n := w.said(status.Intruder); n != 1 {
						t.Errorf("it was named %d times", n)
					}
				})
			})
		}
	}
}

// TestStuckServer: a process that has been in cuInit for long tells of a server that may serve nobody. A
// container's word is not looked into again and again.
func TestStuckServer(t *testing.T) {
	s := &daemons{began: time.Now()}
	w, pages := shareWorld(s, "a", 25, 10)
	m := pages[w.allocations[0].ID]
	watchIn(t, w, Worlds{Pages: pages, Runtime: w, Shares: s, Allocations: sized{w}}, Options{}, func(g *Guard, pass func(time.Duration)) {
		s.began = time.Now()
		suspicions := func() (n int) {
			s.with(func() { n = len(s.calls) })
			return n
		}
		pass(time.Second)
		m.starting = s.Now()
		m.word++
		pass(stuckAfter - time.Second)
		if n := suspicions(); n != 0 {
			t.Errorf("too early: %q", s.calls)
		}
		pass(2*time.Second + baselineFor)
		if n := suspicions(); n != 1 || !strings.HasPrefix(s.calls[0], "suspect GPU-0 a program has waited") {
			t.Errorf("%q", s.calls)
		}
		pass(stuckEvery / 2)
		if n := suspicions(); n != 1 {
			t.Errorf("said %d times", n)
		}
		pass(stuckEvery)
		if n := suspicions(); n != 2 {
			t.Errorf("said %d times", n)
		}
	})
}

// TestDetachBeforeEveryEnd: of 1,000 containers that are ended at random, under load and by daemons that
// answer or do not, no client is ended that the daemon was not told of first. What was not answered is
// counted.
func TestDetachBeforeEveryEnd(t *testing.T) {
	r := rand.New(rand.NewPCG(42, 7))
	s := &daemons{of: map[gpu.UUID]Daemon{gpu0: {Clients: map[int]bool{}}, gpu1: {Clients: map[int]bool{}}}}
	s.mute = func() bool { return r.IntN(5) == 0 }
	w := newWorld()
	var log guardLog
	log.Logger = discard()
	h := &offenceHandler{reaper: &reaper{proc: w, runtime: ender{w, s}, shares: s, log: &log}, cluster: w, observer: w,
		ending: map[string]bool{}, ended: map[string]bool{}}
	log.ration = rationed()
	clients, pid := map[string][]int{}, 100
	for i := range 1000 {
		id := fmt.Sprint("c", i)
		var pids []int
		for range r.IntN(4) {
			pid++
			pids = append(pids, pid)
			s.with(func() { s.of[[]gpu.UUID{gpu0, gpu1}[r.IntN(2)]].Clients[pid] = true })
		}
		pid++
		w.with(func() { w.container(id, append(slices.Clone(pids), pid), gib, gpu0) }) // the last one is no client
		clients[id] = pids
	}
	var running sync.WaitGroup
	places := make(chan struct{}, 8)
	for _, i := range r.Perm(1000) {
		places <- struct{}{}
		running.Go(func() {
			defer func() { <-places }()
			id := fmt.Sprint("c", i)
			var c node.Container
			var evidence memcap.Process
			w.with(func() {
				c = w.containers[id]
				for p, is := range w.procs {
					if is.owner.ID == id && (evidence.PID == 0 || p < evidence.PID) {
						evidence = memcap.Process{PID: p, Start: is.owner.Start, Container: id, Bytes: gib, Known: true}
					}
				}
			})
			owner, _ := w.Container(evidence.PID)
			h.end(t.Context(), &c, memcap.Verdict{Kind: memcap.Intruder, Container: id, GPU: gpu0, First: time.Now(),
				Processes: []memcap.Process{evidence}}, map[int]node.Owner{evidence.PID: owner})
		})
	}
	running.Wait()
	told, ended, timeouts := map[int]bool{}, 0, uint64(0)
	for _, call := range s.calls {
		word, rest, _ := strings.Cut(call, " ")
		if word == "end" {
			ended++
			for _, p := range clients[rest] {
				if !told[p] {
					t.Errorf("%s was ended before client %d was detached", rest, p)
				}
			}
			continue
		}
		for _, f := range strings.Fields(strings.Trim(rest, "[]")) {
			var p int
			fmt.Sscan(f, &p)
			told[p] = true
			if word == "timeout" {
				timeouts++
			}
		}
	}
	all := 0
	for _, pids := range clients {
		all += len(pids)
	}
	done, not := h.detaches()
	if ended != 1000 || all < 1000 || not != timeouts || int(done+not) != all || not == 0 {
		t.Errorf("%d ended; of %d clients %d were detached and %d not, want %d", ended, all, done, not, timeouts)
	}
}

// ender notes ends among the calls.
type ender struct {
	*world
	s *daemons
}

func (e ender) End(ctx context.Context, o node.Owner) (string, error) {
	e.s.with(func() { e.s.calls = append(e.s.calls, "end "+o.ID) })
	return e.world.End(ctx, o)
}

// TestDetachBeforeEviction: an evicted pod has its grace period. The clients of all of its containers are
// detached two seconds before that ends, if the pod is still there. Without so much time they are detached
// first.
func TestDetachBeforeEviction(t *testing.T) {
	for _, c := range []struct {
		name       string
		grace      time.Duration
		ends       bool // the pod does, after a second
		at, before []string
	}{
		{"no grace", 0, false, []string{"detach [10 11]", "evict work/pod-a"}, nil},
		{"hardly any grace", detachBefore, false, []string{"detach [10 11]", "evict work/pod-a"}, nil},
		{"a grace period", 30 * time.Second, false, []string{"evict work/pod-a"}, []string{"detach [10 11]"}},
		{"ends by itself", 30 * time.Second, true, []string{"evict work/pod-a"}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &daemons{of: map[gpu.UUID]Daemon{gpu0: {Clients: map[int]bool{10: true, 11: true, 20: true}}}}
				w := newWorld()
				w.container("a", []int{10, 11}, gib, gpu0)
				w.container("b", []int{20}, gib, gpu0)
				by := &reaper{proc: w, shares: s, log: &guardLog{Logger: discard(), ration: rationed()}}
				leaving := &endings{reaper: by, of: map[string]*ending{}}
				h := &offenceHandler{reaper: by, endings: leaving, cluster: evicter{w, s}, observer: w}
				a := w.containers["a"]
				a.Grace = c.grace
				h.evict(t.Context(), &a, 3)
				h.evict(t.Context(), &a, 4)
				said := func(what string, want []string) {
					t.Helper()
					synctest.Wait()
					s.with(func() {
						if got := slices.Compact(slices.Clone(s.calls)); !slices.Equal(got, want) {
							t.Errorf("%s: %q, want %q", what, got, want)
						}
						s.calls = nil
					})
				}
				said("at once", c.at)
				time.Sleep(time.Second)
				left := map[string]*node.Container{"a": &a, "b": {ID: "b", PodUID: "uid-b"}}
				if c.ends {
					delete(left, "a")
				}
				h.forget(left)
				time.Sleep(max(0, c.grace-detachBefore-1001*time.Millisecond))
				said("more than two seconds before", nil)
				time.Sleep(time.Second)
				said("after that", c.before)
				time.Sleep(detachBefore + detachAfter)
				if said("later", nil); leaving.count() > 0 {
					t.Errorf("%v stays", leaving.of)
				}
			})
		})
	}
}

// TestOutsideMPSInTwoLooks: a process that is no client is named at the second look at it, although the
// daemon tells its clients more seldom than that.
func TestOutsideMPSInTwoLooks(t *testing.T) {
	s := &daemons{began: time.Now()}
	w, pages := shareWorld(s, "a", 25, 10)
	watchIn(t, w, Worlds{Pages: pages, Runtime: w, Shares: s, Allocations: sized{w}}, Options{}, func(_ *Guard, pass func(time.Duration)) {
		for i := range 20 {
			s.with(func() { s.steady, s.told = true, time.Now().Add(10*time.Millisecond) }) // the next answer is late
			pid := 100 + i
			w.procs[pid] = &proc{owner: node.Owner{ID: "a", PodUID: "uid-a", Start: uint64(pid)}, on: map[gpu.UUID]uint64{gpu0: gib}}
			pass(2 * DefaultEvery)
			if n := w.said(status.Intruder); n != i+1 {
				t.Errorf("after two looks %d of %d processes are named", n, i+1)
				return
			}
			delete(w.procs, pid)
			pass(DefaultEvery)
		}
	})
}

// TestEndForAnother: a container that is ended for another component has its clients detached first, too, also while
// the watchdog does not run.
func TestEndForAnother(t *testing.T) {
	s := &daemons{of: map[gpu.UUID]Daemon{gpu0: {Clients: map[int]bool{10: true, 20: true}}}}
	w := newWorld()
	w.container("a", []int{10, 11}, gib, gpu0)
	w.container("b", []int{20}, gib, gpu0)
	g := New(Options{Log: discard()}, Worlds{Driver: w, Allocations: w, Proc: w, Runtime: ender{w, s}, Pages: w, Observer: w, Shares: s})
	c := w.containers["a"]
	if _, err := g.End(t.Context(), &c); err != nil {
		t.Fatal(err)
	}
	b := w.containers["b"]
	g.Detach(t.Context(), &b)
	if want := []string{"detach [10]", "end a", "detach [20]"}; !slices.Equal(s.calls, want) {
		t.Errorf("%q, want %q", s.calls, want)
	}
}

type evicter struct {
	*world
	s *daemons
}

func (e evicter) Evict(_ context.Context, p workload.Pod) error {
	e.s.with(func() { e.s.calls = append(e.s.calls, "evict "+p.String()) })
	return nil
}

func (e evicter) Event(workload.Pod, agentkube.EventType, string, string) {}

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

func rationed() *brief.Ration { return brief.NewRation(discard(), time.Now, time.AfterFunc) }
