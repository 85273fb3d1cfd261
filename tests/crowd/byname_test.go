// SPDX-License-Identifier: Apache-2.0

package crowd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httputil"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	core "k8s.io/api/core/v1"

	"example.com/gpu-agent/tests/plane"
)

// Pods that ask for resources by their names, of the device plugin. The kubelets' part of
// that is played in full: they admit one pod after the other, name its devices in its
// status, and tell of their own every ten seconds.

const (
	// period is that of a kubelet that is left as it comes.
	period = 10 * time.Second
	// calm is for how long nothing happens before it is believed that nothing will: kubelets
	// have said their word by then, and the scheduler has looked again at whom it had refused.
	calm = period + 3*time.Second
	// together is how many pods are made at a time.
	together = 30
	// packed is the least part of an optimum that runs, and packedOfFew that of three waves or
	// six. Three come out some points higher or lower, since the scheduler goes by the order in
	// which it happens to see the pods of a wave: of five runs four at 88 to 90 of 100, one at 84.
	packed, packedOfFew = 0.9, 0.85
)

// byName are four nodes of two GPUs each, whose instances are made on demand.
var byName = fleet{
	entries: [][]string{
		{"{devices: [0], mode: mig}", "{devices: [1], mode: shared}"},
		{"{devices: [0], mode: mig}", "{devices: [1], mode: whole}"},
		{"{devices: [0], mode: mig}", "{devices: [1], mode: mig}"},
		{"{devices: [0], mode: mig}", "{devices: [1], mode: shared}"},
	},
	cards: fleets["each mode apart"].cards,
}

// named is a cluster whose pods ask by name.
type named struct {
	*cluster
	placer *plane.Placer // nil where the scheduler asks nobody
	// full is what each node has to give while nobody has anything of it.
	full map[string]map[string]int
}

// startNamed starts it. Way leads the scheduler to the placer: it is given the address where
// that serves, and returns the one that the scheduler asks.
func startNamed(t *testing.T, f fleet, placer bool, way func(door string) string) *named {
	t.Helper()
	c := &named{full: map[string]map[string]int{}}
	c.cluster = startClusterWith(t, f, false, func(of *cluster) {
		if !placer {
			of.Scheduler(t, 300)
			return
		}
		c.placer = of.startPlacer(plane.FreeAddress(t))
		config := filepath.Join(of.root, "deployments", "placer", "scheduler-config.yaml")
		if !f.gangs {
			of.SchedulerAsking(t, config, way(c.placer.Door), 300)
			return
		}
		of.SchedulerAsking(t, strict(t, config), way(c.placer.Door), 300, "--feature-gates="+workloads+",GangScheduling=true")
	})
	ctx, cancel := context.WithCancel(t.Context())
	var kubelets sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		kubelets.Wait()
	})
	for _, n := range c.nodes {
		kubelets.Go(func() {
			for {
				if _, err := n.Sync(t); err != nil && ctx.Err() == nil {
					c.breaks("the kubelet of %s: %v", n.Name, err)
				}
				select {
				case <-ctx.Done():
					return
				case <-time.After(period):
				}
			}
		})
	}
	for name, n := range c.nodes {
		c.Await(t, name+" offers its GPUs", func() error {
			// A GPU offers one resource at least; instances on demand are of many.
			if c.full[name] = n.Offered(); len(c.full[name]) < min(2, len(n.Entries)) {
				return fmt.Errorf("it offers %v", c.full[name])
			}
			return nil
		})
	}
	c.allFree()
	return c
}

func (c *cluster) startPlacer(door string) *plane.Placer {
	c.t.Helper()
	return c.StartPlacer(c.t, plane.Program(c.t, "gpu-placer"), c.Kubeconfig(c.t, nil), door, "--lease", namespace+"/gpu-placer")
}

// allFree waits until the API server shows that everything can be had.
func (c *named) allFree() {
	c.t.Helper()
	for name, want := range c.full {
		c.Await(c.t, name+" has everything to give", func() error {
			var node core.Node
			if err := c.get("/api/v1/nodes/"+name, &node); err != nil {
				return err
			}
			for of, n := range want {
				if now := node.Status.Allocatable[core.ResourceName(of)]; now.Value() != int64(n) {
					return fmt.Errorf("of %s there are %s, want %d", of, now.String(), n)
				}
			}
			return nil
		})
	}
}

// sendAll sends pods, so many at a time.
func (c *named) sendAll(all []*request) {
	c.t.Helper()
	for some := range slices.Chunk(all, together) {
		var group sync.WaitGroup
		for _, r := range some {
			group.Go(func() { c.send(r) })
		}
		group.Wait()
	}
}

// outcome is what has become of the pods that there are.
type outcome struct {
	running        []*request
	refused, waits []*sent
}

// settle waits until each pod runs, was refused, or waits since there is no room, and
// nothing has happened for a while.
func (c *named) settle() (now outcome) {
	c.t.Helper()
	last, since := "", time.Now()
	c.Await(c.t, "nothing more happens", func() error {
		now = outcome{}
		var undecided, has string
		c.mu.Lock()
		for _, name := range slices.Sorted(maps.Keys(c.pods)) {
			switch p := c.pods[name]; {
			case p.running:
				now.running = append(now.running, p.request)
				has += name + " runs\n"
			case p.failed:
				now.refused = append(now.refused, p)
				has += name + " was refused\n"
			case p.node == nil && p.refused != "":
				now.waits = append(now.waits, p)
			default:
				undecided = name
			}
		}
		c.mu.Unlock()
		if has != last {
			last, since = has, time.Now()
		}
		if undecided != "" {
			return fmt.Errorf("%s is not decided on", undecided)
		}
		if passed := time.Since(since); passed < calm {
			return fmt.Errorf("something happened %v ago", passed)
		}
		return nil
	})
	return now
}

// room is a node that has room for a request, by what its kubelet could give out now; "" if
// none has. It does not look at pairs, which may be in each other's way.
func (c *named) room(r *request) string {
	for name, n := range c.nodes {
		for of, want := range r.resources() {
			on := map[string]int{}
			for _, id := range n.Available(of) {
				if r.gib > 0 {
					id = id[:strings.LastIndexByte(id, ':')] // units are of one GPU
				} else {
					id = ""
				}
				if on[id]++; on[id] >= want && len(r.profiles) < 2 {
					return name
				}
			}
		}
	}
	return ""
}

// wave draws requests of demand times what there is.
func (c *named) wave(rng *rand.Rand, prefix string, most int) (out []*request) {
	for asked := 0.0; asked < demand*float64(gpus*len(c.nodes)) && len(out) < most; asked += out[len(out)-1].size() {
		out = append(out, draw(rng, fmt.Sprintf("%s-%d", prefix, len(out))))
	}
	return out
}

// mostInstances is how many memory slices so many cards can have in instances of those that
// are wanted, at most.
func mostInstances(cards int, want map[string]int) (most int) {
	names := slices.Sorted(maps.Keys(want))
	type content struct {
		of   map[string]int
		size int
	}
	var all []content
	var fill func(first int, list []string)
	fill = func(first int, list []string) {
		of, size := map[string]int{}, 0
		for _, name := range list {
			of[name]++
			size += int(profiles()[name].Size)
		}
		all = append(all, content{of, size})
		for i := first; i < len(names); i++ {
			next := append(slices.Clone(list), names[i])
			if c := (card{uses: []use{mig}}); of[names[i]] < want[names[i]] && c.put(&request{profiles: next}) {
				fill(i, next)
			}
		}
	}
	fill(0, nil)
	slices.SortFunc(all, func(a, b content) int { return cmp.Compare(b.size, a.size) })
	left := maps.Clone(want)
	var choose func(first, cards, has int)
	choose = func(first, cards, has int) {
		most = max(most, has)
		for i := first; cards > 0 && i < len(all) && has+cards*all[i].size > most; i++ {
			fits := true
			for name, n := range all[i].of {
				fits = fits && left[name] >= n
			}
			if !fits {
				continue
			}
			for name, n := range all[i].of {
				left[name] -= n
			}
			choose(i, cards-1, has+all[i].size)
			for name, n := range all[i].of {
				left[name] += n
			}
		}
	}
	choose(0, cards, 0)
	return most
}

// optimum is what part of the GPUs requests can be in use at most, whoever places them: of
// instances, what the cards hold of those that are asked for, pairs not kept together; of
// memory, no more than there is.
func optimum(nodes [][]card, of []*request) float64 {
	count, want := map[use]int{}, map[use]float64{}
	for _, c := range slices.Concat(nodes...) {
		count[c.uses[0]]++
	}
	instances := map[string]int{}
	for _, r := range of {
		want[r.use()] += r.size()
		for _, p := range r.profiles {
			instances[p]++
		}
	}
	most := float64(mostInstances(count[mig], instances)) / slots
	for _, u := range []use{whole, memory} {
		most += min(float64(count[u]), want[u])
	}
	return most / float64(count[whole]+count[memory]+count[mig])
}

func TestOptimum(t *testing.T) {
	nodes := byName.cards
	of := func(n int, r request) []*request { return slices.Repeat([]*request{&r}, n) }
	for name, c := range map[string]struct {
		of   []*request
		want float64
	}{
		"nothing":                 {nil, 0},
		"two whole GPUs of one":   {of(2, request{whole: true}), 1. / 8},
		"a GPU and a half":        {of(6, request{gib: 79 / 4}), 6 * 19. / 79 / 8},
		"more memory than can be": {of(9, request{gib: 79}), 2. / 8},
		"seven of a card":         {of(36, request{profiles: []string{"1g.10gb"}}), 35. / 8 / 8},
		"one media extension":     {of(9, request{profiles: []string{"1g.10gb+me"}}), 5. / 8 / 8},
		"halves and the rest":     {append(of(5, request{profiles: []string{"3g.40gb"}}), of(5, request{profiles: []string{"4g.40gb"}})...), 5. / 8},
	} {
		if got := optimum(nodes, c.of); got-c.want > 1e-9 || c.want-got > 1e-9 {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

// Random requests by name, 30 at a time, with the stock scheduler and the placer's
// configuration as it is shipped. Nobody is refused by a kubelet whom the placer was asked
// about, nobody waits for whom there is room, and the cards are nearly as full as they can
// be. In the short form nobody judges how full they are. With -long, the same requests without a placer.
func TestRequestsByName(t *testing.T) {
	arms, all, least, fleet := []string{"placer"}, 90, packedOfFew, byName
	switch {
	case *long:
		arms, all, least = []string{"alone", "placer"}, requests, packed
	case testing.Short():
		all, least, fleet = few, 0, byName.some(2)
	}
	for _, arm := range arms {
		t.Run(arm, func(t *testing.T) {
			c := startNamed(t, fleet, arm == "placer", func(door string) string { return door })
			rng := rand.New(rand.NewPCG(*first, 17))
			sentAll, refused, waves, used, most := 0, 0, 0, 0.0, 0.0
			for end := all; sentAll < end; waves++ {
				wave := c.wave(rng, fmt.Sprint("w", waves), end-sentAll)
				sentAll += len(wave)
				c.sendAll(wave)
				now := c.settle()
				refused += len(now.refused)
				for _, p := range now.waits {
					// A pod that was refused may have left room that nobody is told of.
					if on := c.room(p.request); on != "" && c.placer != nil && len(now.refused) == 0 {
						t.Errorf("%s, of %s, waits (%s), and %s has room", p.name, p.request, p.refused, on)
					}
				}
				for _, r := range now.running {
					used += r.size()
				}
				most += optimum(fleet.cards, wave) * float64(gpus*len(c.nodes))
				if sentAll == all && !*long && used < least*most {
					end = 2 * all // was it chance?
				}
				c.endAll()
				c.allFree()
			}
			unguarded := 0.0
			if c.placer != nil {
				unguarded = c.placer.Metric(t, "gpu_agent_placer_unguarded_pods_total")
			}
			t.Logf("%s, seed %d: of %d pods in %d waves %d were refused, %v unguarded; %.1f %% of an upper bound of what could run did",
				arm, *first, sentAll, waves, refused, unguarded, 100*used/most)
			if c.placer != nil && float64(refused) > unguarded {
				t.Errorf("%d pods were refused, and %v were bound without the placer's word", refused, unguarded)
			}
			if c.placer != nil && unguarded == 0 && used < least*most {
				t.Errorf("%.1f %% of an upper bound of what could run did, want %.0f %%", 100*used/most, 100*least)
			}
			c.over(t)
		})
	}
}

// over reports what should not have been.
func (c *cluster) over(t *testing.T) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.wrong) > 0 {
		t.Error(errors.New(strings.Join(c.wrong, "\n")))
	}
	c.wrong = nil
}

// The placer is killed, hangs, or answers too late, while a crowd comes. Pods are placed all
// the same, and just those are counted that were placed without it. A pod that the scheduler
// puts by itself where a late answer would have put it has the room that was reserved.
func TestPlacerAway(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: TestStockSchedulerWithThePlacer of deployments kills the placer")
	}
	var late atomic.Int64 // in ns
	c := startNamed(t, byName.some(2), true, func(door string) string {
		return slowWay(t, door, func() time.Duration { return time.Duration(late.Load()) })
	})
	rng := rand.New(rand.NewPCG(*first, 18))
	counted := func() int { return int(c.placer.Metric(t, "gpu_agent_placer_unguarded_pods_total")) }
	wave := func(name string) outcome {
		c.sendAll(c.wave(rng, name, 12))
		return c.settle()
	}
	for _, s := range []struct {
		how         string
		begin, over func()
	}{
		{"hung", func() { c.placer.Hang(t) }, func() { c.placer.Resume(t) }},
		{"slow", func() { late.Store(int64(400 * time.Millisecond)) }, func() { late.Store(0) }},
		{"killed", func() {
			c.placer.Kill()
			time.Sleep(3 * time.Second) // what was bound in the second of its last sign may be guarded
		}, func() { c.placer = c.startPlacer(c.placer.Door) }},
	} {
		before := counted()
		if s.how == "killed" {
			before = 0 // a new process counts anew
		}
		s.begin()
		now := wave(s.how)
		bound := len(now.running) + len(now.refused)
		s.over()
		least := bound
		if s.how == "slow" {
			least = len(now.refused)
		}
		if len(now.running) == 0 {
			t.Errorf("%s: no pod runs", s.how)
		}
		n := 0
		c.Await(t, fmt.Sprintf("%s: %d to %d pods are counted as unguarded", s.how, least, bound), func() error {
			if n = counted() - before; n < least || n > bound {
				return fmt.Errorf("there are %d", n)
			}
			return nil
		})
		t.Logf("%s: %d pods run, %d were refused, %d wait; %d are counted as unguarded", s.how, len(now.running), len(now.refused), len(now.waits), n)
		c.endAll()
		c.allFree()
	}
	before := counted()
	if now := wave("again"); len(now.refused) > counted()-before {
		t.Errorf("with the placer back, %d pods are refused, and %d unguarded", len(now.refused), counted()-before)
	}
	c.over(t)
}

// slowWay leads to a server, and holds each answer back for as long as late says.
func slowWay(t *testing.T, door string, late func() time.Duration) string {
	t.Helper()
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: door})
	proxy.ModifyResponse = func(r *http.Response) error {
		select {
		case <-r.Request.Context().Done():
		case <-time.After(late()):
		}
		return nil
	}
	proxy.ErrorLog = nil
	server := &http.Server{Addr: plane.FreeAddress(t), Handler: proxy, ReadHeaderTimeout: time.Minute}
	var served sync.WaitGroup
	served.Go(func() {
		if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		server.Close()
		served.Wait()
	})
	return server.Addr
}
