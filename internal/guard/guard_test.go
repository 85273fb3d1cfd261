// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
)

const (
	gib  = uint64(1) << 30
	gpu0 = gpu.UUID("GPU-0")
	gpu1 = gpu.UUID("GPU-1")
)

// world is a node in memory.
type world struct {
	mu sync.Mutex
	// Guarded by mu:
	procs       map[int]*proc
	containers  map[string]node.Container
	allocations []ledger.Allocation
	open        map[gpu.UUID]bool
	lends       bool
	pages       map[string]*meter // by container and GPU
	byKey       map[string]*meter // by allocation
	driverErr   error
	hang        bool
	checkErr    error
	refuses     error // what an eviction meets
	endErr      error
	asked       map[gpu.UUID]int
	sized       map[gpu.UUID]int // asked for its memory
	visits      int              // asked for memory, of any GPUs
	lists       int
	rounds      int           // the allocations were asked for
	changed     chan struct{} // made where a guard is run
	events      []string
	ended       []string
	evicted     []string
	deaf        bool // the runtime does not answer
	// lookCost is how many readings that cost something were begun before the driver
	// was asked for GPU 0 for so many times, and costly the most of these.
	lookCost map[int]int
	costly   int
	log      bytes.Buffer
	kinds    []memcap.Kind
	// reowned, if set, runs before the owner of a process is told.
	reowned func(pid int)
	// listing, if set, runs before the processes on a GPU are.
	listing func()
}

type proc struct {
	owner node.Owner
	on    map[gpu.UUID]uint64
	kinds []gpu.ProcessKind
	blind bool  // the driver does not say how much
	err   error // why nobody can say whose it is
}

type meter struct {
	w       *world
	begun   int
	ended   int
	managed uint64
	broken  bool
	closed  bool
	driver  uint64 // what End was told last
	known   bool
	word    uint64        // of the counters
	cost    time.Duration // of each of a reading's two looks
	spent   time.Duration
	quiet   bool
	nobody  bool // has counted anything
	asks    bool // all the time
	undone  uint64
	peak    uint64 // by the count
	// each is what processes count, by PID, and countErr why that cannot be told.
	each     map[int]uint64
	countErr error
}

func (m *meter) counts() int {
	if m.nobody {
		return 0
	}
	return 1
}

func newWorld() *world {
	return &world{procs: map[int]*proc{}, containers: map[string]node.Container{}, pages: map[string]*meter{},
		asked: map[gpu.UUID]int{}, sized: map[gpu.UUID]int{}}
}

// used is what a container has, in bytes; 0 where that is not known.
func used(c status.Container) uint64 {
	if c.UsedMiB == nil {
		return 0
	}
	return *c.UsedMiB << 20
}

// logged is how often something was logged.
func (w *world) logged(what string) int { return strings.Count(w.log.String(), what) }

func (w *world) with(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

// container runs with so much of some GPUs; none is a container without an allocation.
func (w *world) container(id string, pids []int, limit uint64, gpus ...gpu.UUID) {
	c := node.Container{ID: id, PodUID: "uid-" + id, Namespace: "work", Pod: "pod-" + id, Name: "main", Running: true, Annotations: map[string]string{}}
	if len(gpus) > 0 {
		key := cdi.Key("example.com/gpu-mem", []string{id})
		c.Annotations[cdi.AnnotationName("example.com", key)] = "example.com/gpu-mem"
		w.allocations = append(w.allocations, ledger.Allocation{ID: key, Resource: "example.com/gpu-mem", Grants: grantsOn(gpus, limit),
			Holder: ledger.Holder{Pod: workload.Pod{Namespace: "work", Name: "pod-" + id}}})
		slices.SortFunc(w.allocations, func(a, b ledger.Allocation) int { return strings.Compare(a.ID, b.ID) })
	}
	w.containers[id] = c
	for _, pid := range pids {
		w.procs[pid] = &proc{owner: node.Owner{ID: id, PodUID: c.PodUID, Start: uint64(pid)}, on: map[gpu.UUID]uint64{}}
	}
}

// grantsOn has something of each of these GPUs, with this cap.
func grantsOn(gpus []gpu.UUID, limit uint64) (out []ledger.Grant) {
	for _, u := range gpus {
		out = append(out, ledger.Grant{GPU: u, Piece: piece.Units{Set: piece.SetOf([]int{0})}, Cap: piece.CapOf(limit)})
	}
	return out
}

func (w *world) uses(pid int, u gpu.UUID, bytes uint64) {
	w.procs[pid].on[u] = bytes
}

func (w *world) Processes(ctx context.Context, u gpu.UUID) ([]gpu.Process, error) {
	w.mu.Lock()
	w.asked[u]++
	if w.listing != nil {
		w.listing()
	}
	hang, err := w.hang, w.driverErr
	var out []gpu.Process
	for pid, p := range w.procs {
		if b, ok := p.on[u]; ok {
			kinds := p.kinds
			if kinds == nil {
				kinds = []gpu.ProcessKind{gpu.Compute}
			}
			for _, k := range kinds {
				out = append(out, gpu.Process{PID: pid, Kind: k, Bytes: b, Known: !p.blind, GI: -1, CI: -1})
			}
		}
	}
	w.mu.Unlock()
	slices.SortFunc(out, func(a, b gpu.Process) int { return a.PID - b.PID })
	if hang {
		<-ctx.Done()
		return nil, gpu.ErrTimeout
	}
	return out, err
}

func (w *world) Offered() []gpu.Device { return []gpu.Device{{UUID: gpu0}, {UUID: gpu1, Index: 1}} }

func (w *world) Changed() <-chan struct{} { return w.changed }

// stir tells the guard that something may have changed.
func (w *world) stir() {
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

func (w *world) Lends(gpu.UUID) bool { return w.lends }

func (w *world) Open(u gpu.UUID) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.open[u]
}

func (w *world) Allocations() []ledger.Allocation {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rounds++
	return slices.Clone(w.allocations)
}

// recap gives those another cap who have so much.
func (w *world) recap(from, to uint64) {
	for i := range w.allocations {
		c := &w.allocations[i]
		if gpus := c.GPUs(); c.Cap(gpus[0]).Bytes == from {
			c.Grants = grantsOn(gpus, to)
		}
	}
}

func (w *world) Container(pid int) (node.Owner, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.reowned != nil {
		w.reowned(pid)
	}
	p := w.procs[pid]
	switch {
	case p == nil:
		return node.Owner{}, gpu.ErrNotFound
	case p.err != nil:
		return node.Owner{}, p.err
	case p.owner.ID == "":
		return p.owner, gpu.ErrNotFound
	}
	return p.owner, nil
}

// Inside has each process in a namespace of its container's, by the host's PID.
func (w *world) Inside(pid int) (namespace, inner uint64, err error) {
	o, err := w.Container(pid)
	for _, b := range []byte(o.ID) {
		namespace = namespace<<8 + uint64(b)
	}
	return namespace, uint64(pid), err
}

func (w *world) Check() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.checkErr
}

func (w *world) Containers(context.Context) ([]node.Container, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lists++
	if w.deaf {
		return nil, errors.New("no answer")
	}
	var out []node.Container
	for _, c := range w.containers {
		out = append(out, c)
	}
	return out, nil
}

func (w *world) End(_ context.Context, o node.Owner) (string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.endErr != nil {
		return "", w.endErr
	}
	w.ended = append(w.ended, o.ID)
	delete(w.containers, o.ID)
	for pid, p := range w.procs {
		if p.owner.ID == o.ID {
			delete(w.procs, pid)
		}
	}
	return "cgroup.kill", nil
}

func (w *world) Meter(key string, u gpu.UUID) (Meter, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if m := w.byKey[key]; m != nil && !m.broken {
		return m, nil
	}
	for id := range w.containers {
		if m := w.pages[id+string(u)]; m != nil && cdi.Key("example.com/gpu-mem", []string{id}) == key {
			return m, nil
		}
	}
	return nil, gpu.ErrNotFound
}

func (m *meter) Begin() error {
	m.w.mu.Lock()
	defer m.w.mu.Unlock()
	m.begun++
	if m.spent = m.cost; m.cost > 0 {
		if m.w.lookCost == nil {
			m.w.lookCost = map[int]int{}
		}
		m.w.lookCost[m.w.asked[gpu0]]++
		m.w.costly = max(m.w.costly, m.w.lookCost[m.w.asked[gpu0]])
	}
	if m.broken {
		return errors.New("broken")
	}
	return nil
}

func (m *meter) End(driver uint64, known bool, _ map[lib.Process]uint64) (lib.Reading, error) {
	m.w.mu.Lock()
	defer m.w.mu.Unlock()
	m.ended++
	m.spent += m.cost
	m.driver, m.known = driver, known
	return lib.Reading{Used: driver + m.managed, PeakUsed: m.peak, Counters: lib.Counters{Word: m.word, Asks: m.askedSoFar(), Refusals: 7, Uncounted: 3, Undone: max(m.undone, 5<<20), Processes: m.counts()}, Quiet: m.quiet}, nil
}

// askedSoFar is how often a process has asked: once before each reading, if it asks all the time.
func (m *meter) askedSoFar() uint64 {
	if m.asks {
		return uint64(m.ended)
	}
	return 0
}

func (m *meter) Asked() bool {
	m.w.mu.Lock()
	defer m.w.mu.Unlock()
	return m.asks
}

func (m *meter) Cost() time.Duration { return m.spent }

func (m *meter) Counted(of map[lib.Process]uint64) error {
	m.w.mu.Lock()
	defer m.w.mu.Unlock()
	for p := range of {
		of[p] = m.each[int(p.PID)]
	}
	return m.countErr
}

func (m *meter) Close() error {
	m.w.with(func() { m.closed = true })
	return nil
}

func (w *world) Event(r workload.Pod, _ agentkube.EventType, reason, message string) {
	w.with(func() { w.events = append(w.events, r.String()+" "+r.UID+" "+reason+": "+message) })
}

func (w *world) Evict(_ context.Context, p workload.Pod) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.refuses != nil {
		return w.refuses
	}
	w.evicted = append(w.evicted, p.String()+" "+p.UID)
	return nil
}

func (w *world) Ended(e End) {
	kind := e.Kind
	w.with(func() { w.kinds = append(w.kinds, kind) })
}
func (w *world) Evicted(workload.Pod, int) {}

// watch runs a guard on w while f does its work, which has the world to itself
// but while it lets time pass.
func watch(t *testing.T, w *world, o Options, f func(g *Guard, pass func(time.Duration))) {
	t.Helper()
	watchIn(t, w, Worlds{Pages: w, Runtime: w}, o, f)
}

// watchIn does so with pages, a runtime and a limiter that stand before w's own.
func watchIn(t *testing.T, w *world, before Worlds, o Options, f func(g *Guard, pass func(time.Duration))) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		o.Domain, o.Log = "example.com", slog.New(slog.NewTextHandler(&w.log, nil))
		if before.Allocations == nil {
			before.Allocations = w
		}
		g := New(o, Worlds{Driver: w, Allocations: before.Allocations, Proc: w, Runtime: before.Runtime, Pages: before.Pages, Cluster: w, Observer: w, Limiter: before.Limiter, Outcomes: before.Outcomes, Shares: before.Shares})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		w.changed = make(chan struct{}, 1)
		w.mu.Lock()
		go func() { done <- g.Run(ctx) }()
		f(g, func(d time.Duration) {
			w.mu.Unlock()
			w.stir()
			time.Sleep(d)
			synctest.Wait()
			w.mu.Lock()
		})
		w.mu.Unlock()
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Run ended with %v", err)
		}
		synctest.Wait()
		if n := w.logged("the driver does not limit the memory of a container"); n > 1 {
			t.Errorf("it was logged %d times that a limit failed", n)
		}
		if t.Failed() {
			t.Log(w.log.String())
		}
	})
}

// TestIdle: where nobody has a cap the guard sleeps between its looks for
// intruders, and a cap that is given out wakes it.
func TestIdle(t *testing.T) {
	w := newWorld()
	w.container("whole", []int{30}, lib.None, gpu1)
	watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
		pass(time.Minute)
		if n := w.asked[gpu0] + w.asked[gpu1]; n < 2 || n > 6 || w.rounds > 10 {
			t.Errorf("nobody has a cap: %d rounds in a minute, and the driver was asked %d times for the processes of two GPUs", w.rounds, n)
		}
		if n := w.sized[gpu0]; n < 4 || n > 10 || w.visits > n {
			t.Errorf("nobody has a cap: the driver was asked %d times in a minute how much is used, in %d visits", n, w.visits)
		}
		if w.lists > 8 {
			t.Errorf("the runtime was asked %d times", w.lists)
		}
		w.container("new", []int{10}, 4*gib, gpu0)
		w.uses(10, gpu0, 8*gib)
		pass(time.Second)
		if !slices.Equal(w.ended, []string{"new"}) {
			t.Errorf("ended %v after a second, want new", w.ended)
		}
		w.allocations, w.rounds = nil, 0 // and those who had one are gone
		w.container("whole", nil, lib.None, gpu1)
		pass(time.Minute)
		if w.rounds > 16 { // each of the two GPUs in its own time
			t.Errorf("nobody has a cap again: %d rounds in a minute", w.rounds)
		}
	})
}

// TestNobodyHasAnything: a node with nothing on it asked the driver every ten seconds how
// much memory of each GPU is used, half of what the agent took there.
func TestNobodyHasAnything(t *testing.T) {
	w := newWorld()
	watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
		pass(5 * time.Minute)
		if n := w.visits; n < 10 || n > 12 {
			t.Errorf("the driver was asked %d times in five minutes how much is used", n)
		}
		w.container("stray", []int{10}, 0)
		w.uses(10, gpu0, gib)
		pass(restEvery + 20*time.Second)
		if n := len(w.events); n != 1 {
			t.Errorf("%d Events of an intruder, want one: %v", n, w.events)
		}
		w.container("whole", []int{30}, lib.None, gpu1)
		w.uses(10, gpu0, 0)
		pass(time.Minute)
		w.visits = 0
		if pass(5 * time.Minute); w.visits < 29 {
			t.Errorf("somebody has a GPU: the driver was asked %d times in five minutes how much is used", w.visits)
		}
	})
}

// TestOver: who has twice his cap is ended within a second, with an Event that
// says all, and his neighbours run on.
func TestOver(t *testing.T) {
	w := newWorld()
	w.container("bad", []int{10, 11}, 4*gib, gpu0)
	w.container("good", []int{20}, 4*gib, gpu0)
	w.container("whole", []int{30}, lib.None, gpu1)
	watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
		w.uses(10, gpu0, 2*gib)
		w.uses(20, gpu0, 4*gib)
		w.uses(30, gpu1, 70*gib)
		pass(11 * time.Second)
		if len(w.ended) != 0 || len(w.events) != 0 {
			t.Fatalf("ended %v, events %v with everybody within his cap", w.ended, w.events)
		}
		w.uses(11, gpu0, 6*gib) // together 8
		pass(time.Second)
		if !slices.Equal(w.ended, []string{"bad"}) {
			t.Errorf("ended %v, want bad alone", w.ended)
		}
		want := "work/pod-bad uid-bad CapExceeded: container main of pod work/pod-bad uses 8.00 GiB of GPU 0 (GPU-0), more than its cap of 4.00 GiB; it is ended"
		if !slices.Equal(w.events, []string{want}) {
			t.Errorf("events\n%s\nwant\n%s", strings.Join(w.events, "\n"), want)
		}
		if len(w.kinds) != 1 || g.State().Kills != 1 {
			t.Errorf("%v ended, %d counted", w.kinds, g.State().Kills)
		}
		pass(time.Minute)
		if len(w.ended) != 1 || len(w.events) != 1 {
			t.Errorf("afterwards ended %v, events %v", w.ended, w.events)
		}
	})
}

// TestOneProcessInTwoLists: its memory counts once.
func TestOneProcessInTwoLists(t *testing.T) {
	w := newWorld()
	w.container("a", []int{10}, 4*gib, gpu0)
	w.procs[10].kinds = []gpu.ProcessKind{gpu.Compute, gpu.Graphics}
	watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
		w.uses(10, gpu0, 3*gib)
		pass(10 * time.Second)
		if len(w.ended) != 0 {
			t.Error("ended for memory that was counted twice")
		}
		if c := g.State().Containers; len(c) != 1 || used(c[0]) != 3*gib || c[0].Processes != 1 {
			t.Errorf("containers %+v", c)
		}
	})
}

func TestIntruder(t *testing.T) {
	for _, end := range []bool{false, true} {
		t.Run(fmt.Sprint("end ", end), func(t *testing.T) {
			w := newWorld()
			w.container("good", []int{20}, 4*gib, gpu0)
			w.container("thief", []int{10}, 0)
			w.container("elsewhere", []int{40}, 4*gib, gpu1)
			w.procs[99] = &proc{owner: node.Owner{Start: 5}, on: map[gpu.UUID]uint64{gpu0: 70 * gib}} // of no pod
			watch(t, w, Options{EndIntruders: end, Own: workload.Pod{Namespace: "gpu", Name: "agent"}}, func(g *Guard, pass func(time.Duration)) {
				w.uses(20, gpu0, 4*gib)
				w.uses(10, gpu0, gib/2)
				w.uses(40, gpu0, gib) // its allocation is on the other one
				pass(20 * time.Second)
				want := []string(nil)
				if end {
					want = []string{"elsewhere", "thief"}
				}
				slices.Sort(w.ended)
				if !slices.Equal(w.ended, want) {
					t.Errorf("ended %v, want %v", w.ended, want)
				}
				slices.Sort(w.events)
				if len(w.events) != 2 || !strings.Contains(w.events[1], "Intruder: container main of pod work/pod-thief uses 0.50 GiB of GPU 0 (GPU-0) without an allocation on it") {
					t.Errorf("events %q", w.events)
				}
				st := g.State()
				if st.On[gpu0].NoPod != 1 || st.Found != 2 || !end && st.On[gpu0].Intruders != 2 {
					t.Errorf("state %+v", st)
				}
				if w.procs[99] == nil || w.procs[20] == nil {
					t.Error("a process of no pod, or a neighbour, was touched")
				}
			})
		})
	}
}

// TestGPUOfTwoPlugins: who has a GPU by another device plugin is no intruder.
func TestGPUOfTwoPlugins(t *testing.T) {
	w := newWorld()
	w.open = map[gpu.UUID]bool{gpu0: true}
	w.container("ours", []int{20}, 4*gib, gpu0)
	w.container("theirs", []int{10}, 0)
	w.procs[10].on[gpu0] = 8 * gib
	watch(t, w, Options{EndIntruders: true}, func(_ *Guard, pass func(time.Duration)) {
		pass(time.Minute)
		if len(w.ended) != 0 || len(w.events) != 0 {
			t.Errorf("ended %v, events %q", w.ended, w.events)
		}
	})
}

// TestSecondOffenceEvicts: and a disruption budget is heeded.
func TestSecondOffenceEvicts(t *testing.T) {
	w := newWorld()
	watch(t, w, Options{EvictAfter: 2}, func(g *Guard, pass func(time.Duration)) {
		for i := range 3 {
			id := fmt.Sprint("c", i)
			w.container(id, []int{10 + i}, 4*gib, gpu0)
			c := w.containers[id]
			c.PodUID, c.Pod = "uid-p", "p" // the same pod's next container
			w.containers[id] = c
			if w.refuses = nil; i == 1 {
				w.refuses = errors.New("not now")
			}
			w.uses(10+i, gpu0, 8*gib)
			pass(2 * time.Second)
			if len(w.ended) != i+1 {
				t.Fatalf("ended %v after offence %d", w.ended, i+1)
			}
		}
		if !slices.Equal(w.evicted, []string{"work/p uid-p"}) {
			t.Errorf("evicted %q, want the pod once: at its third offence, since the second time it was refused", w.evicted)
		}
		if last := w.events[len(w.events)-1]; !strings.Contains(last, "CapEvicted: evicted after 3 offences") {
			t.Errorf("the last event is %q", last)
		}
	})
}

// TestNothingKnownNobodyEnded: figures that the driver does not tell, a driver
// that hangs or fails, and a container that the runtime does not list yet.
func TestNothingKnownNobodyEnded(t *testing.T) {
	for name, spoil := range map[string]func(*world){
		"no figure":               func(w *world) { w.procs[10].blind = true },
		"hang":                    func(w *world) { w.hang = true },
		"failure":                 func(w *world) { w.driverErr = gpu.ErrDriver },
		"not listed":              func(w *world) { delete(w.containers, "bad") },
		"allocation not heard of": func(w *world) { w.allocations = nil },
		"gone in between":         func(w *world) { w.reowned = func(pid int) { w.procs[pid].owner.Start++ } },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			w.container("bad", []int{10}, 4*gib, gpu0)
			w.procs[10].on[gpu0] = 8 * gib
			spoil(w)
			watch(t, w, Options{EndIntruders: true}, func(_ *Guard, pass func(time.Duration)) {
				pass(time.Minute)
				if len(w.ended) != 0 {
					t.Errorf("ended %v", w.ended)
				}
			})
		})
	}
}

// TestEndIsTriedAgain: a runtime that fails today may not tomorrow.
func TestEndIsTriedAgain(t *testing.T) {
	w := newWorld()
	w.container("bad", []int{10}, 4*gib, gpu0)
	w.procs[10].on[gpu0] = 8 * gib
	w.endErr = errors.New("busy")
	watch(t, w, Options{}, func(_ *Guard, pass func(time.Duration)) {
		pass(3 * time.Second)
		w.endErr = nil
		pass(time.Second)
		if len(w.ended) != 1 || len(w.events) != 1 {
			t.Errorf("ended %v, events %q: want one of each", w.ended, w.events)
		}
	})
}

// TestMeters: the library's count is compared with the driver's figure at every
// look, from the moment that it is there.
func TestMeters(t *testing.T) {
	w := newWorld()
	w.container("a", []int{10}, 4*gib, gpu0)
	w.container("old", []int{20}, 4*gib, gpu0)
	m := &meter{w: w, managed: gib, peak: 3 * gib}
	watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
		pass(time.Second)
		if c := g.State().Containers; len(c) != 2 || c[0].Guarantee != string(memcap.API) || c[0].UsedMiB == nil || used(c[0]) != 0 {
			t.Errorf("before they did anything: %+v", c)
		}
		w.uses(20, gpu0, gib) // has no counters: it was started before there was a library
		w.pages["a"+string(gpu0)] = m
		w.uses(10, gpu0, gib)
		pass(4 * time.Second)
		if m.begun < 10 || m.ended != m.begun {
			t.Errorf("%d readings begun and %d ended", m.begun, m.ended)
		}
		c := g.State().Containers
		if len(c) != 2 || used(c[0]) != 2*gib || c[0].Refusals != 7 || c[0].Uncounted != 3 || c[0].UndoneMiB != 5 || c[0].PeakMiB != 3<<10 || c[0].Guarantee != string(memcap.API) {
			t.Errorf("with counters: %+v", c)
		}
		if used(c[1]) != gib || c[1].Guarantee != string(memcap.Watchdog) {
			t.Errorf("without: %+v", c[1])
		}
		m.broken = true
		pass(time.Second)
		if c := g.State().Containers; used(c[0]) != gib {
			t.Errorf("with counters that cannot be read: %+v", c[0])
		}
	})
}

func TestOutsideTheNodesNamespace(t *testing.T) {
	w := newWorld()
	w.container("bad", []int{10}, 4*gib, gpu0)
	w.procs[10].on[gpu0] = 8 * gib
	w.checkErr = fmt.Errorf("set hostPID: true: %w", gpu.ErrNotSupported)
	watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
		pass(time.Minute)
		w.mu.Unlock() // of a guard that is off it asks the world
		st := g.State()
		w.mu.Lock()
		if len(w.ended) != 0 || w.asked[gpu0] != 0 || !strings.Contains(st.Off, "hostPID") {
			t.Errorf("ended %v, %d questions, %+v", w.ended, w.asked[gpu0], st)
		}
		if list := st.Containers; len(list) != 1 || *list[0].CapMiB != 4<<10 || list[0].UsedMiB != nil || list[0].Guarantee != string(memcap.API) {
			t.Errorf("what was granted is %+v, want 4 GiB and no word on their use", list)
		}
		w.checkErr = nil
		pass(20 * time.Second)
		if g.State().Off != "" || len(w.ended) != 1 {
			t.Errorf("when it can see: %+v, ended %v", g.State(), w.ended)
		}
	})
}

// TestUnknownCapIsNotJudged: the caps are those of the grants. Of whom no record says
// how much he may have, nobody can say that he has too much or no allocation.
func TestUnknownCapIsNotJudged(t *testing.T) {
	w := newWorld()
	w.container("a", []int{10}, gib, gpu0)
	w.container("b", []int{20}, gib, gpu1)
	w.allocations[0].Grants[0].Cap = piece.Cap{}
	unknown := w.allocations[0].Grants[0].GPU
	w.uses(10, gpu0, 3*gib)
	w.uses(20, gpu1, 3*gib)
	watch(t, w, Options{EndIntruders: true}, func(_ *Guard, pass func(time.Duration)) {
		pass(30 * time.Second)
		want := "a"
		if unknown == gpu0 {
			want = "b"
		}
		if !slices.Equal(w.ended, []string{want}) {
			t.Errorf("ended %q, want %q alone; the cap on %s is not known", w.ended, want, unknown)
		}
	})
}
