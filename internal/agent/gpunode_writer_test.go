// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// gpuNodes is an API server that has one GPUNode. As the real one, it takes none that says
// one thing twice, has values that the definition does not know, or numbers below zero; and
// it tells its watch of each change, also of the writer's own.
type gpuNodes struct {
	mu sync.Mutex
	// Guarded by mu.
	has    *gpunode.Status
	absent error // why it can have none
	fails  error // of each write
	writes []string
	// prune is what an older definition does to what is sent.
	prune func(*gpunode.Status)
	told  func(*gpunode.Status, error)
}

// world is nil where there is none.
func (g *gpuNodes) world() GPUNodes {
	if g == nil {
		return nil
	}
	return g
}

func (g *gpuNodes) WatchGPUNode(ctx context.Context, fn func(*gpunode.Status, error)) error {
	g.mu.Lock()
	g.told = fn
	has, absent := g.has, g.absent
	g.mu.Unlock()
	fn(has, absent)
	<-ctx.Done()
	return ctx.Err()
}

// set is what somebody else does to it.
func (g *gpuNodes) set(has *gpunode.Status, absent error) {
	g.mu.Lock()
	g.has, g.absent = has, absent
	told := g.told
	g.mu.Unlock()
	if told != nil {
		told(has, absent)
	}
}

func (g *gpuNodes) WriteGPUNode(_ context.Context, want *gpunode.Status) (*gpunode.Status, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := errors.Join(g.absent, g.fails, refused(want)); err != nil {
		return nil, err
	}
	text, err := json.Marshal(want)
	is := new(gpunode.Status)
	if err = errors.Join(err, json.Unmarshal(text, is)); err != nil {
		return nil, err
	}
	if g.prune != nil {
		g.prune(is)
	} else if !reflect.DeepEqual(is, want) {
		return nil, fmt.Errorf("%s is read as %+v, not as %+v", text, is, want)
	}
	if reflect.DeepEqual(is, g.has) {
		return nil, errors.New("it is written unchanged")
	}
	g.has = is
	g.writes = append(g.writes, says(is))
	go g.told(is, nil)
	return is, nil
}

// refused is what the definition does not permit.
func refused(s *gpunode.Status) error {
	seen := map[string]bool{}
	once := func(key string) error {
		if seen[key] {
			return fmt.Errorf("%s is there twice", key)
		}
		seen[key] = true
		return nil
	}
	var errs []error
	conditions := func(of string, list []gpunode.Condition) {
		for _, c := range list {
			errs = append(errs, once(of+" "+c.Type))
			if c.Reason == "" || c.LastTransitionTime.IsZero() || c.LastTransitionTime.Nanosecond() != 0 {
				errs = append(errs, fmt.Errorf("condition %+v of %s", c, of))
			}
		}
	}
	conditions("", s.Conditions)
	for _, r := range s.Resources {
		errs = append(errs, once(r.Name))
	}
	for _, g := range s.GPUs {
		errs = append(errs, once(g.UUID))
		conditions(g.UUID, g.Conditions)
		if g.Free < 0 || g.Largest < 0 || g.Total < g.Free || g.Mode == "unset" {
			errs = append(errs, fmt.Errorf("%+v", g))
		}
	}
	if p := s.Summary.SaturationPercent; p < 0 || p > 100 {
		errs = append(errs, fmt.Errorf("%d %% is held", p))
	}
	return errors.Join(errs...)
}

// count is how many writes there have been since the last count.
func (g *gpuNodes) count() int {
	synctest.Wait()
	g.mu.Lock()
	defer g.mu.Unlock()
	n := len(g.writes)
	g.writes = nil
	return n
}

// wantIs waits until the object says something, for as long as a change may take.
func (b *bench) wantIs(g *gpuNodes, within time.Duration, part string) {
	b.t.Helper()
	time.Sleep(within)
	synctest.Wait()
	g.mu.Lock()
	defer g.mu.Unlock()
	if text := says(g.has); !strings.Contains(text, part) {
		b.t.Errorf("after %s the object does not say %q:\n%s", within, part, text)
	}
}

// withGPUNodes starts an agent that has API server g, on a kubelet that tells of devices or
// does not.
func withGPUNodes(t *testing.T, o *outside, g *gpuNodes, dir, file string, in gpunode.HoldersIn) *bench {
	t.Helper()
	o.gpuNodes, o.holdersIn = g, in
	b := start(t, o, dir, file)
	b.t = t
	return b
}

const soon = 2 * time.Second

// What the node offers, its health, the largest request and what is free again are written within a second or
// two, what else has changed within a minute, and nothing twice.
func TestGPUNodeIsWrittenWhenThereIsNews(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gpuNodes{}
		b := withGPUNodes(t, newOutside(2), g, t.TempDir(), allShared, gpunode.InPods)
		b.wantIs(g, soon, "gpu-mem free 8/8 largest 4")
		if n := g.count(); n != 1 {
			t.Errorf("%d writes for a start, want 1", n)
		}
		// A unit of the first GPU: the largest request fits as before.
		b.hold("a", memResource, string(uuid(0))+"::0")
		b.wantIs(g, soon, "gpu-mem free 8/8 largest 4")
		b.wantIs(g, occupancyWithin, "gpu-mem free 7/8 largest 4")
		// One of the other: less can be had.
		b.hold("b", memResource, string(uuid(1))+"::0")
		b.wantIs(g, soon, "gpu-mem free 6/8 largest 3")
		if n := g.count(); n != 2 {
			t.Errorf("%d writes for two pods, want 2", n)
		}
		b.event <- gpu.Event{Kind: gpu.EventXid, GPU: uuid(1), Xid: 94, GI: -1, CI: -1}
		b.wantIs(g, soon, "not Available: GPUUnhealthy not Healthy: GPUUnhealthy")
		time.Sleep(2 * testHold)
		b.wantIs(g, soon, "gpu-mem free 6/8 largest 3")
		if n := g.count(); n != 2 {
			t.Errorf("%d writes for a fault that passes, want 2", n)
		}
		// What is free again nobody else can say.
		b.drop("a")
		b.wantIs(g, soon, "gpu-mem free 7/8 largest 4")
		b.drop("b")
		b.wantIs(g, soon, "gpu-mem free 8/8 largest 4")
		g.count()
		b.SetFile("p.yaml", []byte(allWhole))
		b.wantIs(g, soon, "gpu free 2/2 largest 2")
		if n := g.count(); n > 2 {
			t.Errorf("%d writes for an edit, want 1, or 2 while it is under way", n)
		}
		time.Sleep(time.Hour)
		if n := g.count(); n != 0 {
			t.Errorf("%d writes in an hour without anything, want none", n)
		}
		b.end()
		if text := says(g.has); !strings.Contains(text, "not Ready: AgentEnds") || g.count() != 1 {
			t.Errorf("an agent that ends leaves\n%s", text)
		}
	})
}

// A successor writes that it is ready, once, and nothing before that.
func TestGPUNodeOfASuccessor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, o, dir := &gpuNodes{}, newOutside(2), t.TempDir()
		b := withGPUNodes(t, o, g, dir, allShared, gpunode.InPods)
		b.wantIs(g, soon, "gpu-mem free 8/8 largest 4")
		b.end()
		g.count()
		since := g.has.GPUs[0].Conditions[0].LastTransitionTime
		time.Sleep(time.Minute)
		b = withGPUNodes(t, o, g, dir, "", gpunode.InPods) // no partitions yet
		time.Sleep(startsWithin / 2)
		if n := g.count(); n != 0 {
			t.Errorf("%d writes before it is ready", n)
		}
		b.SetFile("p.yaml", []byte(allShared))
		b.wantIs(g, startsWithin, "gpu-mem free 8/8 largest 4")
		if c := g.has.Conditions[0]; g.count() != 1 || c.Status != gpunode.True || !g.has.GPUs[0].Conditions[0].LastTransitionTime.Equal(since) {
			t.Errorf("%+v of the node, since %s of the GPU", c, g.has.GPUs[0].Conditions[0].LastTransitionTime)
		}
		b.end()

		// One that does not become ready says so.
		o.with(func() { o.err = gpu.ErrNoDriver })
		b = withGPUNodes(t, o, g, t.TempDir(), allShared, gpunode.InPods)
		b.wantIs(g, startsWithin+soon, "not Ready: DriverFailed")
		b.end()
	})
}

// The mean of what an hour of thirty pods costs, and an hour without any.
func TestGPUNodeWritesAnHour(t *testing.T) {
	for name, file := range map[string]string{"units": allShared, "on demand": migPartition(demand, demand)} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := &gpuNodes{}
				b := withGPUNodes(t, migMachine(2, 0, 1), g, t.TempDir(), file, gpunode.InPods)
				defer b.end()
				time.Sleep(5 * time.Minute)
				g.count()
				random := rand.New(rand.NewPCG(3, 4))
				pods := 0
				for range 30 {
					time.Sleep(time.Duration(random.Int64N(int64(4 * time.Minute))))
					b.comeAndGo(random, &pods)
				}
				n := g.count()
				t.Logf("%d writes for %d pods", n, pods)
				if n > 60 || n == 0 {
					t.Errorf("%d writes in about an hour of %d pods, want at most 60", n, pods)
				}
				time.Sleep(10 * time.Minute)
				if g.count(); !reflect.DeepEqual(says(g.has), says(b.GPUNode(gpunode.InPods))) {
					t.Errorf("it says\n%s\nand the node has\n%s", says(g.has), says(b.GPUNode(gpunode.InPods)))
				}
				time.Sleep(time.Hour)
				if n := g.count(); n > 5 {
					t.Errorf("%d writes in an idle hour", n)
				}
			})
		})
	}
}

// comeAndGo starts a pod where one fits, and ends one that has run for a while.
func (b *bench) comeAndGo(random *rand.Rand, pods *int) {
	synctest.Wait()
	s := b.GPUNode(gpunode.InPods)
	r := s.Resources[random.IntN(len(s.Resources))]
	if r.Largest > 0 {
		ids, err := b.front.Prefer(r.Name, b.listedHealthy(r.Name), nil, 1)
		if err != nil {
			b.t.Fatal(err)
		}
		*pods++
		b.hold(fmt.Sprint("p", *pods), r.Name, ids...)
	}
	var running []string
	b.with(func() {
		for _, h := range b.holdings {
			running = append(running, h.Pod)
		}
	})
	if len(running) > 3 || len(running) > 0 && r.Largest == 0 {
		b.drop(running[random.IntN(len(running))])
	}
}

// Where pods do not tell what they have, the object names the holders and is written at
// every change, and says so.
func TestGPUNodeWithHoldersIsWrittenAtEveryChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gpuNodes{}
		b := withGPUNodes(t, newOutside(2), g, t.TempDir(), allShared, "")
		defer b.end()
		b.wantIs(g, soon, "gpu-mem free 8/8 largest 4")
		if g.has.HoldersIn != gpunode.InObject {
			t.Errorf("holders are said to be in %s", g.has.HoldersIn)
		}
		g.count()
		b.hold("a", memResource, string(uuid(0))+"::0")
		time.Sleep(holdersEvery)
		b.wantIs(g, soon, "held by ns/a/c [0][]")
		if n := g.count(); n > 2 { // taken, and then named
			t.Errorf("%d writes for a pod", n)
		}
		b.SetNode(agentkube.Node{PodsTellDevices: true})
		b.wantIs(g, soon, "gpu-mem free 7/8 largest 4")
		if g.has.HoldersIn != gpunode.InPods || len(g.has.GPUs[0].Holders) != 0 {
			t.Errorf("after the kubelet's update: %+v", g.has.GPUs[0])
		}
	})
}

// Somebody changes the object, or deletes it: it is written again, once.
func TestGPUNodeThatSomebodyChangesIsWrittenAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gpuNodes{}
		b := withGPUNodes(t, newOutside(2), g, t.TempDir(), allShared, gpunode.InPods)
		defer b.end()
		b.wantIs(g, soon, "gpu-mem free 8/8 largest 4")
		g.count()
		for name, change := range map[string]*gpunode.Status{"deleted": nil, "emptied": {}} {
			g.set(change, nil)
			b.wantIs(g, soon, "gpu-mem free 8/8 largest 4")
			if n := g.count(); n != 1 {
				t.Errorf("%s: %d writes, want 1", name, n)
			}
		}
	})
}

// A definition that is older keeps less of what is written; that is no reason to write again.
func TestGPUNodeOfAnOlderDefinitionIsNotRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gpuNodes{prune: func(s *gpunode.Status) { s.MemoryUnitMiB = 0 }}
		b := withGPUNodes(t, newOutside(2), g, t.TempDir(), allShared, gpunode.InPods)
		defer b.end()
		b.wantIs(g, time.Hour, "gpu-mem free 8/8 largest 4")
		if n := g.count(); n != 1 {
			t.Errorf("%d writes, want 1", n)
		}
	})
}

// Where the cluster has no GPUNodes that is said once, and everything else goes on.
func TestGPUNodeWithoutADefinition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gpuNodes{absent: errors.New("there is no such resource")}
		b := withGPUNodes(t, newOutside(2), g, t.TempDir(), allShared, gpunode.InPods)
		defer b.end()
		for range 5 {
			time.Sleep(10 * time.Minute)
			g.set(nil, g.absent)
		}
		b.want("applied", fourUnits, "")
		b.waker.wake()
		synctest.Wait()
		if n := strings.Count(b.log.String(), "this node has no GPUNode"); n != 1 || g.count() != 0 {
			t.Errorf("said %d times:\n%s", n, b.log)
		}
		if s := b.Status(); len(s.Conditions) != 1 || s.Conditions[0].Reason != status.GPUNodeFailed || s.Partition.Message != "" {
			t.Errorf("%+v, %+v", s.Conditions, s.Partition)
		}
		g.set(nil, nil)
		b.wantIs(g, soon, "gpu-mem free 8/8 largest 4")
		b.waker.wake()
		if synctest.Wait(); len(b.Status().Conditions) != 0 {
			t.Errorf("%+v", b.Status().Conditions)
		}
	})
}

// A server that is away gets the object when it is back, as it is by then.
func TestGPUNodeAfterAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gpuNodes{fails: errors.New("away")}
		b := withGPUNodes(t, newOutside(2), g, t.TempDir(), allShared, gpunode.InPods)
		defer b.end()
		time.Sleep(time.Hour)
		b.hold("a", memResource, string(uuid(0))+"::0")
		g.mu.Lock()
		g.fails = nil
		g.mu.Unlock()
		b.wantIs(g, 2*backOffMax, "gpu-mem free 7/8 largest 4")
		if n := g.count(); n != 1 {
			t.Errorf("%d writes, want 1", n)
		}
	})
}

// A write of the occupancy that fails is tried again after the pause, and does not wait for a minute once more.
func TestGPUNodeAfterAFailedWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gpuNodes{}
		b := withGPUNodes(t, newOutside(2), g, t.TempDir(), allShared, gpunode.InPods)
		defer b.end()
		b.wantIs(g, soon, "gpu-mem free 8/8 largest 4")
		fail := func(err error) {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.fails = err
		}
		fail(errors.New("away"))
		b.hold("a", memResource, string(uuid(0))+"::0")
		time.Sleep(occupancyWithin + soon)
		fail(nil)
		b.wantIs(g, 5*backOffMin, "gpu-mem free 7/8 largest 4")
	})
}

// What changes without rest is rationed, and the last word arrives.
func TestGPUNodeWritesAreRationed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gpuNodes{}
		var n atomic.Int64
		w := newGPUNodeWriter(g, func() *gpunode.Status {
			return &gpunode.Status{MemoryUnitMiB: 1 + int(n.Load()), Summary: gpunode.Summary{Modes: "x"}}
		}, func() error { return nil }, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- w.run(ctx) }()
		for range 3600 {
			time.Sleep(time.Second)
			synctest.Wait()
			n.Add(1)
			poke(w.news)
		}
		if writes := g.count(); writes > writesInARow+3600/5+1 || writes < 500 {
			t.Errorf("%d writes in an hour of a change a second", writes)
		}
		time.Sleep(time.Minute)
		if synctest.Wait(); g.has.MemoryUnitMiB != 1+int(n.Load()) {
			t.Errorf("it says %d, want %d", g.has.MemoryUnitMiB, 1+n.Load())
		}
		cancel()
		<-ended
	})
}
