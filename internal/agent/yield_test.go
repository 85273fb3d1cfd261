// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

const (
	spotResource = memResource + ".spot"
	twoTiers     = allShared + "      spot: true\n"
	testGrace    = 20 * time.Second
)

// yields ends and evicts, and counts what has given its room back.
type yields struct {
	o      *outside
	grace  time.Duration
	evicts bool

	mu sync.Mutex
	// Guarded by mu: what was done, with the time since began, and what it meets.
	began    time.Time
	done     []string
	budget   bool
	deaf     bool          // what is ended goes on
	slow     time.Duration // that an eviction takes
	counted  []string
	before   func(id string)   // called before an end
	requests []time.Time       // for evictions
	asks     map[string]func() // end the kubelet's requests to start a pod
}

func (y *yields) with(f func()) {
	y.mu.Lock()
	defer y.mu.Unlock()
	f()
}

func (y *yields) note(format string, args ...any) {
	y.mu.Lock()
	defer y.mu.Unlock()
	y.done = append(y.done, fmt.Sprintf(format, args...)+" "+time.Since(y.began).Round(time.Second).String())
}

func (y *yields) list() []string {
	y.mu.Lock()
	defer y.mu.Unlock()
	return slices.Clone(y.done)
}

func (y *yields) End(_ context.Context, c *node.Container) (string, error) {
	if y.before != nil {
		y.before(c.ID)
	}
	gone := false
	y.o.with(func() { gone = y.o.ended[c.ID] })
	if gone {
		return "", gpu.ErrNotFound
	}
	y.note("end %s", c.ID)
	if !y.deaf {
		y.o.exit(c.ID)
	}
	return "test", nil
}

func (y *yields) Detach(_ context.Context, c *node.Container) { y.note("detach %s", c.ID) }

func (y *yields) Evict(_ context.Context, p workload.Pod, grace time.Duration) error {
	y.mu.Lock()
	y.requests = append(y.requests, time.Now())
	budget, slow := y.budget, y.slow
	y.mu.Unlock()
	time.Sleep(slow)
	y.note("evict %s %s %s", p, p.UID, grace.Round(time.Second))
	if budget {
		return fmt.Errorf("evict: %w", agentkube.ErrBudget)
	}
	return nil
}

// counts returns what was counted.
func (y *yields) counts() []string {
	y.mu.Lock()
	defer y.mu.Unlock()
	return slices.Clone(y.counted)
}

func (y *yields) Yielded(way string, took time.Duration) {
	y.mu.Lock()
	defer y.mu.Unlock()
	y.counted = append(y.counted, way+" "+took.Round(time.Second).String())
}

// exit has a container end, whose event the runtime sends.
func (o *outside) exit(id string) {
	var c node.Container
	for _, is := range (runtime{o}).containers() {
		if is.ID == id {
			c = is
		}
	}
	o.with(func() { o.ended[id] = true })
	go func() { o.container <- node.ContainerEvent{Kind: node.EventStopped, Container: c} }()
}

// tiers starts an agent whose room is offered twice, with a spot pod on units 2 and 3 of GPU 0.
func tiers(t *testing.T, grace time.Duration, evicts bool, keeper ...*parks) (*bench, *yields) {
	o := newOutside(2)
	for _, k := range keeper {
		o.parks = k
	}
	y := &yields{o: o, grace: grace, evicts: evicts, asks: map[string]func(){}}
	o.yields = y
	b := start(t, o, t.TempDir(), twoTiers)
	b.hold("batch", spotResource, unitsOn(0, 2, 3)...)
	time.Sleep(2 * time.Second)
	y.began = time.Now()
	return b, y
}

func unitsOn(g int, units ...int) (ids []string) {
	for _, n := range units {
		ids = append(ids, fmt.Sprintf("%s::%d", uuid(g), n))
	}
	return ids
}

// guaranteed has the kubelet give a guaranteed pod these units. started is when its container was let in.
func (b *bench) guaranteed(pod string, ids ...string) (started func() time.Duration) {
	b.t.Helper()
	b.with(func() { b.outside.ended[pod+"c"] = true }) // it has no container yet
	b.allocate(pod, memResource, ids...)
	began := time.Now()
	in := make(chan time.Duration, 1)
	ctx, cancel := context.WithCancel(b.t.Context())
	b.t.Cleanup(cancel)
	b.yields.with(func() { b.yields.asks[pod] = cancel })
	go func() {
		for ctx.Err() == nil {
			if b.front.Prepare(ctx, memResource, ids) == nil {
				in <- time.Since(began)
				return
			}
		}
	}()
	return func() time.Duration {
		select {
		case at := <-in:
			in <- at
			return at
		default:
			return -1
		}
	}
}

// remove has a pod end, with all that it had.
func (b *bench) remove(pod string) {
	b.yields.with(func() {
		if stop := b.yields.asks[pod]; stop != nil {
			stop()
		}
	})
	b.with(func() {
		b.holdings = slices.DeleteFunc(b.holdings, func(h node.Holding) bool { return h.Pod == pod })
	})
	b.loop.witnesses.Ask()
	synctest.Wait()
}

func (b *bench) eventsOf(of string) (out []string) {
	b.with(func() {
		for _, e := range b.events {
			if strings.Contains(e, of) {
				out = append(out, e)
			}
		}
	})
	return out
}

// notice returns by when the programs of an allocation are told that they end. Its file and its page say the same.
func (p *pages) notice(t *testing.T, resource string, ids []string) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	by, asks := p.notices[cdi.Key(resource, ids)], p.control[cdi.Key(resource, ids)]
	if (asks == lib.ControlYield) == by.IsZero() || asks&^lib.ControlYield != 0 {
		t.Errorf("the page asks %#x of them, and the notice says %v", asks, by)
	}
	return by
}

func equal(t *testing.T, what string, got, want []string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s: %q, want %q", what, got, want)
	}
}

// Without the right to evict, the grace runs, and then the container is ended. Its programs see by when, its pod is told
// to whom the room goes, and the guaranteed container starts at once after that.
func TestSpotIsEndedAfterItsGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, y := tiers(t, testGrace, false)
		defer b.end()
		spot := unitsOn(0, 2, 3)
		b.hold("beside", spotResource, unitsOn(1, 0)...)
		started := b.guaranteed("api", unitsOn(0, 1, 2)...)
		time.Sleep(testGrace - time.Second)
		equal(t, "within the grace", y.list(), nil)
		if by := b.caps.notice(t, spotResource, spot); by.Sub(y.began.Add(testGrace)).Abs() > 100*time.Millisecond {
			t.Errorf("its programs are told %v, want %v", by, y.began.Add(testGrace))
		}
		if by := b.caps.notice(t, spotResource, unitsOn(1, 0)); !by.IsZero() {
			t.Errorf("one whose room is not wanted is told %v", by)
		}
		if at := started(); at >= 0 {
			t.Fatalf("the guaranteed container starts after %v beside the spot one", at)
		}
		time.Sleep(3 * time.Second)
		equal(t, "after the grace", y.list(), []string{"end batchc 20s"})
		if at := started(); at < testGrace || at > testGrace+2*time.Second {
			t.Errorf("the guaranteed container starts after %v", at)
		}
		equal(t, "counted", y.counts(), []string{"ended 20s"})
		if e := b.eventsOf(" Yielded: "); len(e) != 1 || !strings.HasPrefix(e[0], "batch Normal ") || !strings.Contains(e[0], "it was given to ns/api; it ends by ") {
			t.Errorf("told %q", e)
		}
		// The kubelet starts it again, and it waits at its gate.
		if err := b.prepare(spotResource, spot...); err == nil || !strings.Contains(err.Error(), "wanted by ns/api") {
			t.Errorf("its next container: %v", err)
		}
		b.remove("api")
		time.Sleep(2 * time.Second)
		if err := b.prepare(spotResource, spot...); err != nil {
			t.Errorf("after the guaranteed pod has ended: %v", err)
		}
		if by := b.caps.notice(t, spotResource, spot); !by.IsZero() {
			t.Errorf("its next container is told %v", by)
		}
	})
}

// With the right to evict, the pod is evicted at once, with what is left of the grace. Where a budget forbids that, the
// container is ended at the same time as without the right.
func TestSpotIsEvicted(t *testing.T) {
	for _, test := range []struct {
		name          string
		budget, obeys bool
		done, counted []string
	}{
		{"it ends in time", false, true, []string{"evict ns/batch uid-batch 20s 0s"}, []string{"evicted 10s"}},
		{"it does not", false, false, []string{"evict ns/batch uid-batch 20s 0s", "end batchc 20s"}, []string{"ended 20s"}},
		{"a budget forbids it", true, false, []string{"evict ns/batch uid-batch 20s 0s", "evict ns/batch uid-batch 15s 5s",
			"evict ns/batch uid-batch 10s 10s", "evict ns/batch uid-batch 5s 15s", "end batchc 20s"}, []string{"ended 20s"}},
		{"by itself", true, true, []string{"evict ns/batch uid-batch 20s 0s", "evict ns/batch uid-batch 15s 5s"}, []string{"left 10s"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b, y := tiers(t, testGrace, true)
				defer b.end()
				y.budget = test.budget
				started := b.guaranteed("api", unitsOn(0, 2)...)
				time.Sleep(9900 * time.Millisecond)
				if test.obeys {
					b.exit("batchc")
				}
				time.Sleep(12 * time.Second)
				equal(t, "done", y.list(), test.done)
				equal(t, "counted", y.counts(), test.counted)
				if started() < 0 {
					t.Error("the guaranteed container has not started")
				}
			})
		})
	}
}

// An agent that starts anew within the grace goes on with the same grace.
func TestRestartWithinTheGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, y := tiers(t, testGrace, false)
		b.guaranteed("api", unitsOn(0, 2)...)
		time.Sleep(12 * time.Second)
		b.end()
		time.Sleep(3 * time.Second)
		b = start(t, b.outside, b.dir, twoTiers)
		defer b.end()
		time.Sleep(4 * time.Second)
		equal(t, "within the grace", y.list(), nil)
		time.Sleep(2 * time.Second)
		equal(t, "after it", y.list(), []string{"end batchc 20s"})
	})
}

// A guaranteed pod that ends before the grace does takes nothing away: the spot container goes on, and its programs see
// that they may. The next request has a grace of its own.
func TestSpotKeepsWhatIsNotWantedAnyLonger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const grace = time.Minute
		b, y := tiers(t, grace, false)
		defer b.end()
		b.guaranteed("api", unitsOn(0, 2)...)
		time.Sleep(40 * time.Second)
		if by := b.caps.notice(t, spotResource, unitsOn(0, 2, 3)); by.IsZero() {
			t.Error("its programs are not told")
		}
		b.remove("api")
		time.Sleep(grace)
		equal(t, "afterwards", y.list(), nil)
		equal(t, "counted", y.counts(), nil)
		if by := b.caps.notice(t, spotResource, unitsOn(0, 2, 3)); !by.IsZero() {
			t.Errorf("its programs are told %v", by)
		}
		y.began = time.Now()
		b.guaranteed("api-2", unitsOn(0, 3)...)
		time.Sleep(grace - time.Second)
		equal(t, "within the next grace", y.list(), nil)
		time.Sleep(2 * time.Second)
		equal(t, "after it", y.list(), []string{"end batchc 1m0s"})
	})
}

// Just before the end it is looked again: whose container it is, and whether its room is wanted still.
func TestNoOtherContainerIsEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, y := tiers(t, testGrace, false)
		defer b.end()
		key := cdi.Key(spotResource, unitsOn(0, 2, 3))
		name := cdi.AnnotationName("example.com", key)
		// A container of another pod has the annotation of the allocation: it was there before the allocation.
		b.with(func() {
			b.old = append(b.old, node.Container{ID: "other", PodUID: "uid-other", Namespace: "ns", Pod: "other", Name: "c", Running: true,
				Annotations: map[string]string{name: b.outside.granted[name]}})
		})
		b.guaranteed("api", unitsOn(0, 2)...)
		time.Sleep(testGrace + 5*time.Second)
		if done := y.list(); !slices.Equal(done, []string{"end batchc 20s"}) {
			t.Errorf("done %q: a container of another pod was ended", done)
		}
	})
}

// A pod that also has something guaranteed is not evicted: that would end what is guaranteed. Its spot container alone
// is ended.
func TestGuaranteedContainerOfTheSamePod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, y := tiers(t, testGrace, true)
		defer b.end()
		ids := unitsOn(1, 0)
		b.hold("batch", memResource, ids...) // another container of the pod
		b.with(func() { b.holdings[len(b.holdings)-1].Container = "service" })
		time.Sleep(9 * time.Second)
		y.began = time.Now()
		b.guaranteed("api", unitsOn(0, 2)...)
		time.Sleep(testGrace + 2*time.Second)
		equal(t, "done", y.list(), []string{"end batchc 20s"})
	})
}

// What a look decides is looked at again when it is done: a yield that is over by then ends nothing.
func TestEndIsDecidedAnew(t *testing.T) {
	b := &yielder{ledger: ledger.New(func() {}, time.Now)}
	now := time.Now()
	for name, a := range map[string]ledger.Allocation{
		"guaranteed":           {Epoch: 3, Yield: ledger.Yield{Since: now, To: []string{"g"}}},
		"of an unknown tier":   {Tier: "reserved", Epoch: 3, Yield: ledger.Yield{Since: now, To: []string{"g"}}},
		"not asked":            {Tier: ledger.Spot, Epoch: 3},
		"asked again":          {Tier: ledger.Spot, Epoch: 3, Yield: ledger.Yield{Since: now.Add(time.Second), To: []string{"g"}}},
		"given to another pod": {Tier: ledger.Spot, Epoch: 4, Yield: ledger.Yield{Since: now, To: []string{"g"}}},
	} {
		if (&yield{epoch: 3, since: now}).stands(&a) {
			t.Errorf("an allocation that is %s stands", name)
		}
	}
	if b.wants(&yield{id: "gone", epoch: 3, since: now}) {
		t.Error("the room of no allocation is wanted")
	}
	e := &ender{kill: func(context.Context, *node.Container) (string, error) { return "test", nil }, log: slog.New(slog.DiscardHandler)}
	for _, stands := range []bool{false, true} {
		if e.endOne(t.Context(), &node.Container{ID: "c"}, &endCause{stands: func() bool { return stands }}, &try{}) != stands {
			t.Errorf("a container is ended: %v, and its reason stands: %v", !stands, stands)
		}
	}
}

// Two reasons end a container once at a time, and one end that fails is followed by another, which is told.
func TestEndsOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var told logBuffer
		log := slog.New(slog.NewTextHandler(&told, nil))
		var tries, ended atomic.Int32
		var answers atomic.Bool
		e := newEnder(&Worlds{End: func(context.Context, *node.Container) (string, error) {
			tries.Add(1)
			time.Sleep(3 * time.Second)
			if !answers.Load() {
				return "", errors.New("no answer")
			}
			return "test", nil
		}}, log, brief.NewRation(log, time.Now, time.AfterFunc))
		c, why := &node.Container{ID: "c"}, &endCause{why: "for a test", stands: func() bool { return true }}
		begin := func() bool {
			return e.begin(t.Context(), c, why, time.Now(), func(is bool) {
				if is {
					ended.Add(1)
				}
			})
		}
		if !begin() || begin() {
			t.Error("it is ended twice at once, or not at all")
		}
		time.Sleep(4 * time.Second)
		if tries.Load() != 1 || ended.Load() != 0 || strings.Contains(told.String(), "ended a container") {
			t.Errorf("%d tries, %d have ended it, and the log has %s", tries.Load(), ended.Load(), &told)
		}
		for range 2 {
			if answers.Store(true); !begin() {
				t.Error("it is not tried again")
			}
			time.Sleep(4 * time.Second)
		}
		if got := strings.Count(told.String(), "ended a container of the spot tier for a test"); ended.Load() != 2 || got != 1 {
			t.Errorf("%d tries have ended it, and the log has it %d times: %s", ended.Load(), got, &told)
		}
		for i := range 3 * endsAtOnce {
			e.begin(t.Context(), &node.Container{ID: fmt.Sprint(i)}, why, time.Now(), func(bool) {})
		}
		synctest.Wait()
		e.mu.Lock()
		going := e.going
		e.mu.Unlock()
		if going != endsAtOnce {
			t.Errorf("%d containers are ended at once", going)
		}
		time.Sleep(2 * endForgotten)
		e.begin(t.Context(), &node.Container{ID: "another"}, why, time.Now(), func(bool) {})
		e.mu.Lock()
		if len(e.tries) != 1 {
			t.Errorf("%d ends are remembered", len(e.tries))
		}
		e.mu.Unlock()
		time.Sleep(4 * time.Second)
	})
}

// A container with a share through MPS is detached two seconds before its end, so that its neighbours go on.
func TestClientsAreDetachedWithinTheGrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(1)
		o.mps = newSupervised()
		y := &yields{o: o, grace: testGrace, asks: map[string]func(){}}
		o.yields = y
		b := start(t, o, t.TempDir(), twoTiers+"      compute: mps\n")
		defer b.end()
		time.Sleep(time.Minute) // the daemon starts
		b.hold("batch", spotResource, unitsOn(0, 2)...)
		b.hold("beside", spotResource, unitsOn(0, 1)...)
		time.Sleep(2 * time.Second)
		y.began = time.Now()
		b.guaranteed("api", unitsOn(0, 2)...)
		time.Sleep(testGrace + 2*time.Second)
		equal(t, "done", y.list(), []string{"detach batchc 18s", "end batchc 20s"})
	})
}

// A spot request over a guaranteed allocation is refused, and the Node has an Event of it: the kubelet does not tell
// which pod it was.
func TestSpotRefusalIsNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, _ := tiers(t, testGrace, false)
		defer b.end()
		b.guaranteed("api", unitsOn(1, 0)...)
		if _, err := b.source(spotResource).Allocate(unitsOn(1, 0)); err == nil || !strings.Contains(err.Error(), "a guaranteed pod has its room") {
			t.Errorf("over a guaranteed allocation: %v", err)
		}
		if e := b.eventsOf("SpotRefused"); len(e) != 1 || !strings.HasPrefix(e[0], "Normal SpotRefused: a pod that asks for 1 of "+spotResource+" is refused: ") || strings.Contains(e[0], "api") {
			t.Errorf("told %q", e)
		}
		if _, err := b.source(memResource).Allocate(unitsOn(7, 0)); err == nil {
			t.Error("a device of no GPU is given out")
		}
		equal(t, "told of guaranteed pods", b.eventsOf("SpotRefused")[1:], nil)
	})
}

// A change of the layout takes the room of spot pods with the same grace.
func TestLayoutTakesSpotRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, y := tiers(t, testGrace, false)
		defer b.end()
		b.SetFile("p.yaml", []byte(allWhole))
		time.Sleep(testGrace - time.Second)
		equal(t, "within the grace", y.list(), nil)
		if s := b.state(); s != "blocked" {
			t.Errorf("within the grace the partition is %s", s)
		}
		time.Sleep(4 * time.Second)
		equal(t, "after it", y.list(), []string{"end batchc 20s"})
		if e := b.eventsOf(" Yielded: "); len(e) != 1 || !strings.Contains(e[0], "the GPU's layout changes") {
			t.Errorf("told %q", e)
		}
		if s := b.state(); s != "applied" {
			t.Errorf("after it the partition is %s", s)
		}
		// The GPU is whole now, for guaranteed pods. It has no such piece.
		if err := b.prepare(spotResource, unitsOn(0, 2, 3)...); err == nil || !strings.Contains(err.Error(), "its GPU is laid out anew") {
			t.Errorf("after the change: %v", err)
		}
		// It may start again when the GPU has.
		b.SetFile("p.yaml", []byte(twoTiers))
		time.Sleep(2 * time.Second)
		if err := b.prepare(spotResource, unitsOn(0, 2, 3)...); err != nil {
			t.Errorf("after the layout is back: %v", err)
		}
	})
}

// What cannot be ended is tried again every second, and counted when it has ended.
func TestEndThatTakesLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, y := tiers(t, testGrace, false)
		defer b.end()
		y.deaf = true
		b.guaranteed("api", unitsOn(0, 2)...)
		time.Sleep(testGrace + 4500*time.Millisecond)
		equal(t, "done", y.list(), []string{"end batchc 20s", "end batchc 21s", "end batchc 22s", "end batchc 23s", "end batchc 24s"})
		b.exit("batchc")
		time.Sleep(2 * time.Second)
		if got := y.counts(); len(got) != 1 || !strings.HasPrefix(got[0], "ended 2") {
			t.Errorf("counted %q", got)
		}
	})
}

// manySpot starts an agent on whose GPU n spot pods have a unit each, and a guaranteed pod is given the units of all.
func manySpot(t *testing.T, n int) (*bench, *yields) {
	t.Helper()
	o := newOutside(1)
	o.memory, o.unit = newMemory(), 1
	o.inv.GPUs[0].Memory, o.inv.GPUs[0].Reserved = gpu.MiB(n), 0
	y := &yields{o: o, grace: testGrace, evicts: true, asks: map[string]func(){}}
	o.yields = y
	b := start(t, o, t.TempDir(), twoTiers)
	var all []string
	for i := range n {
		id := unitsOn(0, i)[0]
		all = append(all, id)
		b.allocate(fmt.Sprint("p", i), spotResource, id)
	}
	for _, id := range all {
		if err := b.prepare(spotResource, id); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(10 * time.Second)
	y.began = time.Now()
	b.guaranteed("api", all...)
	return b, y
}

// An API server that takes seconds for each eviction keeps no pod waiting for that of another, and is not asked for one
// pod twice meanwhile.
func TestSlowEvictions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 20
		b, y := manySpot(t, n)
		defer b.end()
		y.with(func() { y.slow = evictAgain + 2*time.Second })
		time.Sleep(testGrace - time.Second)
		asked := map[string]int{}
		for _, what := range y.list() {
			asked[strings.Fields(what)[1]]++
		}
		for i := range n {
			if pod := fmt.Sprint("ns/p", i); asked[pod] != 1 {
				t.Errorf("the API server has evicted %s %d times", pod, asked[pod])
			}
		}
	})
}

// Many spot allocations make a bounded number of requests a second, and all of them end in time.
func TestManyYield(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 100
		b, y := manySpot(t, n)
		defer b.end()
		time.Sleep(testGrace)
		y.mu.Lock()
		most := 0
		for i, at := range y.requests {
			for most+i < len(y.requests) && y.requests[most+i].Sub(at) < time.Second {
				most++
			}
		}
		y.mu.Unlock()
		if most > evictRate+evictBurst {
			t.Errorf("%d evictions within a second", most)
		}
		time.Sleep(5 * time.Second)
		left := 0
		b.with(func() {
			for i := range n {
				if !b.outside.ended[fmt.Sprintf("p%dc", i)] {
					left++
				}
			}
		})
		if left > 0 {
			t.Errorf("%d of %d have not ended", left, n)
		}
	})
}
