// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/guard"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/state"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

const (
	allLend = "version: v1\npartitions:\n  default:\n    - {devices: all, mode: shared, spot: true, lend: {after: 15m}}\n"
	allSpot = "version: v1\npartitions:\n  default:\n    - {devices: all, mode: shared, spot: true}\n"
)

// programs are the processes of the node's containers, with their pages. A process that comes waits while its pages
// hold newcomers. Two containers never have a process on the same room.
type programs struct {
	t *testing.T
	o *outside

	mu sync.Mutex // guards what follows
	// bits and waits are of pages, waiting and on count processes, by the key of an allocation.
	bits        map[string]uint64
	waits       map[string]uint64
	waiting, on map[string]int
	// blind has the keys of allocations with processes that went around the library.
	blind       map[string]int
	annotations map[string]map[string]string // by pod UID
	silent      error                        // of the runtime, for annotations
	// unsure, stale and off are how the watchdog does not know who is on a GPU: a process is not known, the driver
	// has not answered since, and it does not run.
	unsure, off bool
	stale       time.Time
	broken      error // of pages
	// pageless: its container has no page on which it says that it waits.
	pageless   bool
	came, back time.Time
}

func newPrograms(t *testing.T, o *outside) *programs {
	return &programs{t: t, o: o, bits: map[string]uint64{}, waits: map[string]uint64{}, waiting: map[string]int{}, on: map[string]int{},
		blind: map[string]int{}, annotations: map[string]map[string]string{}}
}

func (p *programs) with(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
}

// come starts a process of an allocation.
func (p *programs) come(key string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.came = time.Now()
	if p.bits[key]&lib.ControlHold != 0 {
		p.waiting[key]++
		p.waits[key]++
		return
	}
	p.enterLocked(key)
}

// enterLocked lets a process onto the GPU.
func (p *programs) enterLocked(key string) {
	p.back = time.Now()
	p.on[key]++
	var mine []string
	p.o.with(func() {
		for _, h := range p.o.holdings {
			if cdi.Key(h.Resource, h.IDs) == key {
				mine = h.IDs
			}
		}
		for _, h := range p.o.holdings {
			if other := cdi.Key(h.Resource, h.IDs); other != key && !p.o.ended[h.Pod+h.Container] && slices.ContainsFunc(h.IDs, func(id string) bool { return slices.Contains(mine, id) }) {
				p.t.Errorf("a process of %v comes to the GPU while the container of %s has %v", mine, h.Pod, h.IDs)
			}
		}
	})
}

func (p *programs) leave(key string) { p.with(func() { p.on[key] = 0 }) }

func (p *programs) SetControl(key string, bits, of uint64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.broken != nil {
		return p.broken
	}
	p.bits[key] = p.bits[key]&^of | bits
	if p.bits[key]&lib.ControlHold == 0 {
		for ; p.waiting[key] > 0; p.waiting[key]-- {
			p.enterLocked(key)
		}
	}
	return nil
}

func (p *programs) Controlled(key string) (uint64, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.broken != nil {
		return 0, p.broken
	}
	return p.bits[key], nil
}

func (p *programs) Newcomers(key string) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.waiting[key], p.broken
}

func (p *programs) Waits(key string) (uint64, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pageless {
		return 0, gpu.ErrNotFound
	}
	return p.waits[key], p.broken
}

func (p *programs) presence(gpu.UUID) (guard.Presence, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	at := time.Now().Add(-4 * time.Second).Truncate(5 * time.Second) // now and then
	if !p.stale.IsZero() {
		at = p.stale
	}
	is := guard.Presence{At: at, Sure: !p.unsure, On: map[string]bool{}}
	for _, of := range []map[string]int{p.on, p.blind} {
		for key, n := range of {
			is.On[key] = is.On[key] || n > 0
		}
	}
	return is, !p.off
}

func (p *programs) annotationsOf(context.Context) (map[string]map[string]string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.annotations), p.silent
}

// lentKind is what a notebook has and lends.
type lentKind struct {
	name, entry string // entry is that of the partition, without spot and lend
	mig         bool
	resource    string
	ids         []string
}

var (
	lentShare = lentKind{"shares", "mode: shared", false, memResource,
		[]string{string(uuid(0)) + "::0", string(uuid(0)) + "::1", string(uuid(0)) + "::2"}}
	lentKinds = []lentKind{lentShare,
		{"whole GPUs", "mode: whole", false, "example.com/gpu", []string{string(uuid(0))}},
		{"MIG on demand", "mode: mig", true, "example.com/mig-3g.40gb", []string{string(uuid(0)) + "::3g.40gb@4"}},
		{"fixed MIG", "mode: mig, geometry: {3g.40gb: 2}", true, "example.com/mig-3g.40gb", []string{string(uuid(0)) + "::3g.40gb@4"}},
	}
)

// lend and keep return the partition with which holders lend, and do not.
func (k *lentKind) lend() string {
	return "version: v1\npartitions:\n  default:\n    - {devices: all, spot: true, lend: {after: 15m}, " + k.entry + "}\n"
}
func (k *lentKind) keep() string {
	return "version: v1\npartitions:\n  default:\n    - {devices: all, spot: true, " + k.entry + "}\n"
}

// lendingNode is a node of one GPU with a notebook that has a part of it, and a spot job.
type lendingNode struct {
	*bench
	*programs
	t             *testing.T
	kind          *lentKind
	spot          string // the resource of the job
	units         []string
	notebook, job string // keys
}

func newLending(t *testing.T, k *lentKind) *lendingNode {
	return newLendingWith(t, k, func(*outside) {})
}

// newLendingWith changes the outside first.
func newLendingWith(t *testing.T, k *lentKind, change func(*outside)) *lendingNode {
	o := newOutside(1)
	if k.mig {
		o = migMachine(1, 0)
	}
	o.memory = newMemory()
	change(o)
	o.programs = newPrograms(t, o)
	spot := k.resource + ".spot"
	n := &lendingNode{programs: o.programs, t: t, kind: k, spot: spot, units: k.ids, notebook: cdi.Key(k.resource, k.ids), job: cdi.Key(spot, k.ids)}
	n.annotations["uid-notebook"] = map[string]string{"kubernetes.io/config.source": "api"}
	n.bench = start(t, o, t.TempDir(), k.lend())
	time.Sleep(5 * time.Second) // a fixed geometry is made
	n.hold("notebook", k.resource, k.ids...)
	return n
}

// pass lets time pass.
func (n *lendingNode) pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// until waits for something, and returns how long that took.
func (n *lendingNode) until(what string, most time.Duration, is func() bool) time.Duration {
	n.t.Helper()
	began := time.Now()
	for !is() {
		if time.Since(began) > most {
			n.t.Fatalf("%s: not within %v: %s\n%s", what, most, n, n.log)
		}
		n.pass(min(max(most/600, 100*time.Millisecond), time.Second))
	}
	return time.Since(began)
}

func (n *lendingNode) String() string {
	a, _ := n.ledger.Get(n.notebook)
	s, _ := n.ledger.Get(n.job)
	n.programs.mu.Lock()
	defer n.programs.mu.Unlock()
	return fmt.Sprintf("lending %v, bits %d, %d wait, %d on the GPU; job %s yields %+v", a.Lending, n.bits[n.notebook], n.waiting[n.notebook], n.on[n.notebook], s.Phase, s.Yield)
}

func (n *lendingNode) lent() bool {
	a, _ := n.ledger.Get(n.notebook)
	return a.Lending
}

func (n *lendingNode) held() (held bool) {
	n.programs.with(func() { held = n.bits[n.notebook]&lib.ControlHold != 0 })
	return held
}

func (n *lendingNode) isOn() (on bool) {
	n.programs.with(func() { on = n.on[n.notebook] > 0 })
	return on
}

func (n *lendingNode) yields() bool {
	s, _ := n.ledger.Get(n.job)
	return s.Yielding()
}

// endJob ends the container of the job, and its pod.
func (n *lendingNode) endJob() {
	n.with(func() {
		n.holdings = slices.DeleteFunc(n.holdings, func(h node.Holding) bool { return h.Pod == "job" })
	})
	n.container <- node.ContainerEvent{Kind: node.EventStopped}
}

func (n *lendingNode) with(f func()) { n.outside.with(f) }

// lends is what the status says of the notebook's lending.
func (n *lendingNode) lends() string {
	for _, h := range n.Status().GPUs[0].Holders {
		if h.Pod == "notebook" {
			return h.Lending
		}
	}
	return "no such holder"
}

func inLending(t *testing.T, f func(n *lendingNode)) {
	t.Helper()
	inLendingOf(t, &lentShare, f)
}

func inLendingOf(t *testing.T, k *lentKind, f func(n *lendingNode)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := newLending(t, k)
		defer func() { n.bench.end() }()
		f(n)
	})
}

// The walk: a notebook is idle, its room is lent, a spot job runs there. A process of the notebook comes and waits; the
// job yields from that moment. When the job has ended, the process goes on.
func TestIdleRoomIsLent(t *testing.T) {
	inLending(t, func(n *lendingNode) {
		n.come(n.notebook)
		n.pass(time.Hour)
		if n.lent() || n.held() {
			t.Fatalf("it lends while it computes: %s", n)
		}
		n.leave(n.notebook)
		n.pass(14 * time.Minute)
		if n.lent() || n.held() {
			t.Fatalf("it lends too soon: %s", n)
		}
		if got := listed(n.front.Offer(), spotResource); got != "0.0x 0.1x 0.2x 0.3" {
			t.Errorf("spot pods may have %s", got)
		}
		n.until("held", 2*time.Minute, n.held)
		if n.lent() {
			t.Error("it lends before the driver was asked again")
		}
		if took := n.until("lent", time.Minute, n.lent); took < lendSettle-lendEvery {
			t.Errorf("it lends %v after newcomers are held: one that came just before may not be on the GPU yet", took)
		}
		if got, words := listed(n.front.Offer(), spotResource), n.lends(); got != "0.0 0.1 0.2 0.3" || words != lendingWords {
			t.Errorf("spot pods may have %s, and the status says %q", got, words)
		}
		n.hold("job", n.spot, n.units...)
		n.pass(time.Hour)
		if !n.lent() || !n.held() || n.yields() {
			t.Fatalf("after an hour of the job: %s", n)
		}

		n.come(n.notebook)
		came := time.Now()
		n.until("the job yields", time.Second, n.yields)
		if s, _ := n.ledger.Get(n.job); s.Yield.Since.Before(came) {
			t.Errorf("its grace counts from %v, and the process came at %v", s.Yield.Since, came)
		}
		n.pass(time.Minute)
		if n.isOn() || n.lends() != returningWords {
			t.Fatalf("while the job runs: %s, and the status says %q", n, n.lends())
		}
		n.endJob()
		n.until("the process goes on", 2*time.Second, n.isOn)
		if n.held() || n.lent() || n.lends() != "" {
			t.Errorf("in the end: %s, and the status says %q", n, n.lends())
		}
		n.leave(n.notebook)
		n.pass(14 * time.Minute)
		if n.held() {
			t.Error("it lends at once")
		}
		n.until("lent again", 2*time.Minute, n.lent)
		n.come(n.notebook)
		if took := n.until("the process goes on at once", 2*time.Second, n.isOn); took > time.Second {
			t.Errorf("nobody had the room, and it took %v", took)
		}
	})
}

// The job has its grace, and then the agent ends its container: the process goes on within two seconds more, and the
// job's container waits until the room is lent again.
func TestLentRoomIsTakenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newLendingWith(t, &lentShare, func(o *outside) {
			o.yields = &yields{o: o, grace: testGrace, asks: map[string]func(){}}
		})
		defer func() { n.bench.end() }()
		for range 3 {
			n.until("lent", time.Hour, n.lent)
			if s, known := n.ledger.Get(n.job); !known {
				n.hold("job", n.spot, n.units...)
			} else if s.Yield.Asked() {
				t.Fatalf("lent again, and it yields still: %s", n)
			} else if err := n.source(n.spot).Prepare(t.Context(), n.units); err != nil {
				t.Fatal(err)
			} else {
				n.with(func() { delete(n.outside.ended, "jobc"); n.made[n.job] = time.Now() })
			}
			n.pass(time.Minute)
			n.come(n.notebook)
			took := n.until("the process goes on", testGrace+2*time.Second, n.isOn)
			if took < testGrace {
				t.Errorf("the job had %v to end", took)
			}
			n.pass(time.Minute)
			if s, _ := n.ledger.Get(n.job); s.Phase != ledger.Waiting || n.lent() {
				t.Errorf("beside the process the job is %s", s.Phase)
			}
			n.leave(n.notebook)
		}
	})
}

// The agent is restarted after each step of the walk, and a process comes while it is away or later. The process is
// held as long as the job has the room, goes on when it has not, and the job yields only to a process.
func TestLendingOverRestarts(t *testing.T) {
	const steps = 7
	for of := range steps * len(lentKinds) {
		step, k := of%steps, &lentKinds[of/steps]
		for _, away := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, step %d, comes while it is away %v", k.name, step, away), func(t *testing.T) {
				inLendingOf(t, k, func(n *lendingNode) {
					came := false
					come := func() {
						if !came {
							n.come(n.notebook)
							came = true
						}
					}
					restart := func(at int) {
						if at != step {
							return
						}
						n.bench.end()
						if away {
							come()
						}
						time.Sleep(10 * time.Second)
						n.bench = start(t, n.outside, n.dir, n.kind.lend())
						if n.held() && len(n.holdings) > 1 && !came && !n.lent() {
							t.Errorf("the job runs and the notebook waits, and it is not known to lend: %s", n)
						}
					}
					n.pass(10 * time.Minute)
					restart(0)
					if !came {
						n.until("held", time.Hour, n.held)
						restart(1)
					}
					if !came {
						n.until("lent", time.Hour, n.lent)
						restart(2)
					}
					if !came {
						n.until("lent", time.Hour, n.lent)
						if _, err := n.source(n.spot).Allocate(n.units); err != nil {
							t.Fatal(err)
						}
						n.pass(time.Second)
						restart(3)
					}
					_, taken := n.ledger.Get(n.job)
					if taken && !came {
						if err := n.source(n.spot).Prepare(t.Context(), n.units); err != nil {
							t.Fatal(err)
						}
						n.with(func() {
							n.made[n.job] = time.Now().Add(time.Nanosecond)
							n.holdings = append(n.holdings, node.Holding{Namespace: "ns", Pod: "job", Container: "c", Resource: n.spot, IDs: n.units})
						})
						n.pass(time.Second)
						restart(4)
						n.pass(time.Minute)
						if !came && (n.yields() || !n.lent()) {
							t.Errorf("the job yields because of the restart: %s", n)
						}
					}
					come()
					if taken {
						n.until("the job yields", 3*time.Second, n.yields)
						restart(5)
						n.until("the job yields", 3*time.Second, n.yields)
						if n.isOn() && len(n.holdings) > 1 {
							t.Errorf("it goes on beside the job: %s", n)
						}
						n.endJob()
						restart(6)
					}
					n.until("the process goes on", 45*time.Second, n.isOn)
					if n.held() || n.lent() {
						t.Errorf("in the end: %s", n)
					}
				})
			})
		}
	}
}

// What the agent does not know is not idleness, and a holder that may not lend does not.
func TestNoIdleness(t *testing.T) {
	for name, c := range map[string]struct {
		set   func(n *lendingNode)
		words string
	}{
		"the watchdog does not run":          {func(n *lendingNode) { n.off = true }, ""},
		"the driver does not answer":         {func(n *lendingNode) { n.stale = time.Now() }, ""},
		"a process of the GPU is not known":  {func(n *lendingNode) { n.unsure = true }, ""},
		"a process that is idle on the GPU":  {func(n *lendingNode) { n.on[n.notebook] = 1 }, ""},
		"a process goes around the library":  {func(n *lendingNode) { n.blind[n.notebook] = 1 }, ""},
		"the runtime tells no annotations":   {func(n *lendingNode) { n.silent = errors.New("no answer") }, unreadableWords},
		"the runtime does not tell this pod": {func(n *lendingNode) { n.annotations = nil }, unreadableWords},
		"the pod does not lend": {func(n *lendingNode) { n.annotations["uid-notebook"]["example.com/gpu.lend"] = "never" },
			`it lends nothing: its pod says example.com/gpu.lend: "never"`},
		"the pod says something else": {func(n *lendingNode) {
			n.annotations["uid-notebook"]["example.com/gpu.lend"] = strings.Repeat("sometimes ", 1000)
		}, `it lends nothing: its pod says example.com/gpu.lend: "sometimes sometimes sometimes sometimes ", and only "never" is known`},
		"the partition lends nothing": {func(n *lendingNode) { n.SetFile("p.yaml", []byte(allSpot)) }, ""},
		"it was created before":       {func(n *lendingNode) { n.pageless = true }, pagelessWords},
		"pages cannot be written":     {func(n *lendingNode) { n.broken = gpu.ErrInvalid }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := newOutside(1)
				o.memory = newMemory()
				o.programs = newPrograms(t, o)
				units := []string{string(uuid(0)) + "::0", string(uuid(0)) + "::1"}
				n := &lendingNode{programs: o.programs, t: t, units: units, notebook: cdi.Key(memResource, units)}
				n.annotations["uid-notebook"] = map[string]string{"kubernetes.io/config.source": "api"}
				n.bench = start(t, o, t.TempDir(), allLend)
				defer n.bench.end()
				n.programs.with(func() { c.set(n) })
				n.hold("notebook", memResource, units...)
				for range 40 {
					n.pass(time.Minute)
					if n.lent() || n.held() {
						t.Fatalf("it lends: %s", n)
					}
				}
				if got := n.lends(); got != c.words {
					t.Errorf("the status says %q, want %q", got, c.words)
				}
			})
		})
	}
}

// A holder that may lend is given a page on which it says that a process waits. Nobody else is.
func TestPageOfALender(t *testing.T) {
	for i := range lentKinds {
		inLendingOf(t, &lentKinds[i], func(n *lendingNode) {
			says := func(key string) bool {
				n.caps.mu.Lock()
				defer n.caps.mu.Unlock()
				return n.caps.waits[key]
			}
			n.until("lent", time.Hour, n.lent)
			n.hold("job", n.spot, n.units...)
			if !says(n.notebook) || says(n.job) {
				t.Errorf("%s: the notebook has one: %v, the job: %v", n.kind.name, says(n.notebook), says(n.job))
			}
		})
		synctest.Test(t, func(t *testing.T) {
			k := &lentKinds[i]
			o := newOutside(1)
			if k.mig {
				o = migMachine(1, 0)
			}
			o.memory = newMemory()
			b := start(t, o, t.TempDir(), k.keep())
			defer b.end()
			time.Sleep(5 * time.Second)
			if b.hold("a", k.resource, k.ids...); b.caps.waits[cdi.Key(k.resource, k.ids)] {
				t.Errorf("%s: one has a page that lends nothing", k.name)
			}
		})
	}
}

// What ends lending, beside a process that waits: each time the job yields, and the room is back when it has ended.
func TestLendingEnds(t *testing.T) {
	for name, end := range map[string]func(n *lendingNode){
		"the partition lends nothing now":   func(n *lendingNode) { n.SetFile("p.yaml", []byte(allSpot)) },
		"a process goes around the library": func(n *lendingNode) { n.programs.with(func() { n.blind[n.notebook] = 1 }) },
		"a liar says that it waits":         func(n *lendingNode) { n.programs.with(func() { n.waits[n.notebook] += 1 << 40 }) },
		"a process waits and says nothing":  func(n *lendingNode) { n.programs.with(func() { n.waiting[n.notebook]++ }) },
		"pages cannot be read":              func(n *lendingNode) { n.programs.with(func() { n.broken = gpu.ErrInvalid }) },
	} {
		t.Run(name, func(t *testing.T) {
			inLending(t, func(n *lendingNode) {
				n.until("lent", time.Hour, n.lent)
				n.hold("job", n.spot, n.units...)
				n.pass(time.Minute)
				if n.yields() {
					t.Fatalf("before: %s", n)
				}
				end(n)
				n.until("the job yields", 2*time.Second, n.yields)
				n.pass(time.Minute)
				if !n.held() {
					t.Error("newcomers are not held while the job runs")
				}
				n.endJob()
				if name != "pages cannot be read" {
					n.until("the room is back", 2*time.Second, func() bool { return !n.held() && !n.lent() })
					return
				}
				n.pass(time.Minute)
				n.programs.with(func() { n.broken = nil })
				n.until("the room is back", 2*time.Second, func() bool { return !n.held() && !n.lent() })
			})
		})
	}
}

// A driver that does not answer while room is lent changes nothing: a newcomer is held all the same, and gets its
// room.
func TestLentWhileTheDriverHangs(t *testing.T) {
	inLending(t, func(n *lendingNode) {
		n.until("lent", time.Hour, n.lent)
		n.hold("job", n.spot, n.units...)
		n.programs.with(func() { n.stale = time.Now() })
		n.pass(time.Hour)
		if !n.lent() || n.yields() {
			t.Fatalf("the driver hangs: %s", n)
		}
		n.come(n.notebook)
		n.until("the job yields", time.Second, n.yields)
		n.endJob()
		n.until("the process goes on", 2*time.Second, n.isOn)
	})
}

// A process that comes between the moment from which newcomers are held and that from which the room is lent takes
// the hold back, whether it waits or was on its way to the GPU.
func TestComesBeforeItIsLent(t *testing.T) {
	for _, way := range []string{"waits", "was on its way"} {
		t.Run(way, func(t *testing.T) {
			inLending(t, func(n *lendingNode) {
				n.until("held", time.Hour, n.held)
				if way == "waits" {
					n.come(n.notebook)
				} else {
					n.programs.with(func() { n.on[n.notebook] = 1 })
				}
				n.until("let go on", time.Second, func() bool { return !n.held() })
				if n.lent() || !n.isOn() {
					t.Errorf("%s", n)
				}
			})
		})
	}
}

// The agent has lost the record of the job, and for a while neither the kubelet nor the runtime tells who holds what.
// The process that waits is held until they have, and until the job has ended.
func TestLentToAJobThatIsForgotten(t *testing.T) {
	inLending(t, func(n *lendingNode) {
		n.until("lent", time.Hour, n.lent)
		n.hold("job", n.spot, n.units...)
		n.bench.end()
		delete(n.memory.files, n.job)
		n.memory.allocations = slices.DeleteFunc(n.memory.allocations, func(a state.Allocation) bool { return a.Key == n.job })
		n.with(func() { n.runtimeErr, n.checkpointErr, n.deaf = errors.New("no answer"), errors.New("no file"), true })
		n.come(n.notebook)
		n.bench = start(t, n.outside, n.dir, n.kind.lend())
		for range 60 {
			n.pass(time.Second)
			if n.isOn() || !n.held() {
				t.Fatalf("before anybody has said who holds what: %s", n)
			}
		}
		n.with(func() { n.runtimeErr, n.checkpointErr, n.deaf = nil, nil, false })
		n.until("the job yields", 15*time.Second, n.yields)
		n.endJob()
		n.until("the process goes on", 3*time.Second, n.isOn)
	})
}

// tryJob starts a spot job in the notebook's room if the agent permits it.
func (n *lendingNode) tryJob() (runs bool) {
	n.t.Helper()
	src := n.source(n.spot)
	if _, err := src.Allocate(n.units); err != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(n.t.Context(), 5*time.Second)
	defer cancel()
	if err := src.Prepare(ctx, n.units); err != nil {
		return false
	}
	n.with(func() {
		n.made[n.job] = time.Now().Add(time.Nanosecond)
		n.holdings = append(n.holdings, node.Holding{Namespace: "ns", Pod: "job", Container: "c", Resource: n.spot, IDs: n.units})
	})
	if n.isOn() {
		n.t.Errorf("the job starts while a process of the notebook is on the GPU: %s", n)
	}
	return true
}

// tryOthers asks for other placements in the notebook's room: they would take its instance away.
func (n *lendingNode) tryOthers() {
	n.t.Helper()
	if !n.kind.mig {
		return
	}
	for _, other := range []string{"1g.10gb@4", "2g.20gb@4", "1g.10gb@6", "7g.80gb@0"} {
		profile, _, _ := strings.Cut(other, "@")
		id := []string{string(uuid(0)) + "::" + other}
		if listed(n.front.Offer(), "example.com/mig-"+profile+".spot") == "" {
			continue // a fixed geometry has none
		}
		if _, err := n.source("example.com/mig-" + profile + ".spot").Allocate(id); err == nil {
			n.t.Fatalf("a spot pod is given %s over the notebook's instance: %s", other, n)
		}
	}
}

// sameInstance makes sure that the notebook's instance is the one that it began with: nothing destroys it while the
// notebook lends it.
func (n *lendingNode) sameInstance() {
	if !n.kind.mig {
		return
	}
	n.outside.with(func() {
		for _, op := range n.ops {
			if strings.Contains(op, "destroy") {
				n.t.Errorf("an instance is destroyed: %v", n.ops)
			}
		}
	})
}

// Random histories of a notebook, a job in its room, a partition that lends or does not, and an agent that is restarted:
// no process of the notebook and container of the job have the room at once, and each process that comes gets onto the
// GPU when the job has ended.
func TestLendingWalk(t *testing.T) {
	for i := range lentKinds {
		t.Run(lentKinds[i].name, func(t *testing.T) { walkLending(t, &lentKinds[i], rand.New(rand.NewPCG(44, 4))) })
	}
}

func walkLending(t *testing.T, k *lentKind, rng *rand.Rand) {
	const after = time.Minute // the least; the watchdog looks each second of virtual time
	lends := strings.Replace(k.lend(), "15m", after.String(), 1)
	met := map[string]int{}
	rounds := max(4, *stormSteps/1000)
	if k.resource != memResource {
		rounds = max(4, rounds/4)
	}
	for range rounds {
		inLendingOf(t, k, func(n *lendingNode) {
			file, job := lends, false
			n.SetFile("p.yaml", []byte(file))
			wants := func() (wants bool) {
				n.programs.with(func() { wants = n.waiting[n.notebook]+n.on[n.notebook] > 0 })
				return wants
			}
			for range 60 {
				what := ""
				switch rng.IntN(10) {
				case 0, 1, 2, 3:
					n.pass(time.Duration(rng.IntN(int(3*after.Milliseconds()))) * time.Millisecond)
				case 4:
					if what = "comes"; !wants() {
						if n.lent() {
							what = "comes to lent room"
						}
						n.come(n.notebook)
					}
				case 5:
					if n.isOn() {
						n.leave(n.notebook)
					}
				case 6, 7:
					n.tryOthers()
					if !job {
						if job = n.tryJob(); job {
							what = "job runs"
						}
					}
				case 8:
					if job {
						n.endJob()
						job = false
					}
				case 9:
					if rng.IntN(2) == 0 {
						file = map[string]string{lends: k.keep(), k.keep(): lends}[file]
						n.SetFile("p.yaml", []byte(file))
						break
					}
					n.bench.end()
					if !wants() && rng.IntN(2) == 0 {
						n.come(n.notebook)
					}
					time.Sleep(time.Duration(rng.IntN(60_000)) * time.Millisecond)
					n.bench = start(t, n.outside, n.dir, file)
					what = "restart"
					if n.held() {
						what = "restart while held"
					}
				}
				n.sameInstance()
				met[what]++
				n.pass(time.Duration(rng.IntN(2000)) * time.Millisecond)
				if t.Failed() {
					t.Fatalf("%s\n%s", n, n.log)
				}
			}
			if job {
				n.endJob()
			}
			if wants() {
				n.until("the process goes on", 45*time.Second, n.isOn)
				met["goes on"]++
			}
		})
	}
	t.Log(met)
	for _, what := range []string{"comes", "comes to lent room", "job runs", "restart", "restart while held", "goes on"} {
		if met[what] == 0 {
			t.Errorf("%q never happened: %v", what, met)
		}
	}
}

// The next pod on the same devices has its room from the start: it does not wait for a process to be noticed.
func TestNextHolderOfLentRoom(t *testing.T) {
	inLending(t, func(n *lendingNode) {
		n.until("lent", time.Hour, n.lent)
		n.hold("job", n.spot, n.units...)
		n.with(func() {
			n.holdings = slices.DeleteFunc(n.holdings, func(h node.Holding) bool { return h.Pod == "notebook" })
		})
		if _, err := n.source(n.kind.resource).Allocate(n.units); err != nil {
			t.Fatal(err)
		}
		if n.lent() || !n.yields() {
			t.Fatalf("it lends still: %s", n)
		}
		n.pass(5 * time.Second)
		if a, _ := n.ledger.Get(n.notebook); a.Phase != ledger.Waiting {
			t.Errorf("the next container is %s while the job runs", a.Phase)
		}
		n.endJob()
		n.until("newcomers are held no longer", 5*time.Second, func() bool { return !n.held() })
	})
}
