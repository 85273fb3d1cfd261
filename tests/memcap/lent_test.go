// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/gpu-agent/internal/agent"
	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/guard"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
	"example.com/gpu-agent/tests/emulator"
)

const (
	lentResource = watchDomain + "/gpu-mem"
	spotResource = lentResource + ".spot"
	// lentUnits is how many units of 1 GiB each notebook has. A kernel and a job take more than that together.
	lentUnits = 3
	kernelHas = 1600 * MiB
	// lentGrace is what a job is given to end.
	lentGrace = time.Second
)

// lentNode lends on a rig: the ledger, the device plugin, the lender, the pages, the library and the programs are the
// real ones. The test is the driver, the kubelet and the runtime, and ends jobs that yield.
type lentNode struct {
	*rig
	ledger *ledger.Ledger
	front  *deviceplugin.FrontEnd

	mu    sync.Mutex
	boxes map[string]*box           // guarded by mu, by the key of an allocation
	since map[string]time.Time      // guarded by mu, of containers that run
	jobs  map[string]func()         // guarded by mu: what ends a job
	pairs map[string]*lentContainer // by the key of the notebook; it does not change
}

// lentContainer is a notebook, and the job that has its room for a while.
type lentContainer struct {
	notebook, job string // keys
	ids           []string
}

// newLentNode has so many notebooks on one GPU.
func newLentNode(t *testing.T, notebooks int) *lentNode {
	n := &lentNode{rig: newRig(t, emulator.Spec{Model: "H100-80GB", Count: 1}), boxes: map[string]*box{}, since: map[string]time.Time{},
		jobs: map[string]func(){}, pairs: map[string]*lentContainer{}}
	n.ledger = ledger.New(func() {}, time.Now)
	n.front = deviceplugin.New(n.ledger, time.Now)
	state := n.state.GPUs[0]
	inv := &gpu.Inventory{GPUs: []gpu.Device{{UUID: n.uuid(0), Memory: gpu.MiB(state.MemoryMiB), Reserved: gpu.MiB(state.ReservedMiB)}}}
	wanted := []config.Want{{GPU: n.uuid(0), Mode: config.Shared, API: ledger.DevicePlugin, Spot: ledger.Offering{On: true, Lend: 200 * time.Millisecond}}}
	n.front.Publish(func(held []ledger.Allocation) *deviceplugin.Offer {
		changes := plan.Make(plan.Input{Inventory: inv, Wanted: wanted, Layouts: map[gpu.UUID]plan.Layout{}, Unit: 1024, Allocations: held})
		return deviceplugin.Build(deviceplugin.Input{Inventory: inv, Changes: &changes, Held: held, Names: deviceplugin.ResourceNames(watchDomain)})
	})
	for i := range notebooks {
		c := &lentContainer{}
		for u := range lentUnits {
			c.ids = append(c.ids, timeslice.ID(n.uuid(0), i*lentUnits+u))
		}
		c.notebook, c.job = cdi.Key(lentResource, c.ids), cdi.Key(spotResource, c.ids)
		n.pairs[c.notebook] = c
		n.start(t, lentResource, c.ids)
	}
	return n
}

// start allocates devices for a container, and makes it once its gate opens.
func (n *lentNode) start(t *testing.T, resource string, ids []string) *box {
	t.Helper()
	a, err := n.front.Allocate(resource, ids)
	if err != nil {
		t.Fatal(err)
	}
	await(t, "the gate of "+resource, func() bool {
		n.look()
		a, _ := n.ledger.Get(a.ID)
		return n.ledger.SetOpen(a.ID, a.Epoch)
	}, func() any { a, _ := n.ledger.Get(a.ID); return a })
	if err := n.front.Prepare(t.Context(), resource, ids); err != nil {
		t.Fatal(err)
	}
	b := n.unread(t, a.ID, []share{{gpu: 0, bytes: lentUnits * GiB}}, false, nil)
	n.mu.Lock()
	n.boxes[a.ID], n.since[a.ID] = b, time.Now()
	n.mu.Unlock()
	n.ledger.SetHolder(a.ID, ledger.Holder{Pod: workload.Pod{Namespace: "work", Name: a.ID, UID: "uid-" + a.ID}, Container: "main"})
	return b
}

// look has the device plugin see which containers run.
func (n *lentNode) look() {
	o := deviceplugin.Observation{Asked: time.Now(), Runtime: true}
	n.mu.Lock()
	for key, since := range n.since {
		o.Uses = append(o.Uses, deviceplugin.Use{ID: "c-" + key, Key: key, Created: since,
			Holder: ledger.Holder{Pod: workload.Pod{Namespace: "work", Name: key, UID: "uid-" + key}, Container: "main"}})
	}
	n.mu.Unlock()
	n.front.Reconcile(o)
}

// Presence is the driver's list.
func (n *lentNode) presence(gpu.UUID) (guard.Presence, bool) {
	p := guard.Presence{At: time.Now(), Sure: true, On: map[string]bool{}}
	for key, bytes := range n.usedBy() {
		p.On[key] = bytes > 0
	}
	return p, true
}

// usedBy is how much the programs of each container have.
func (n *lentNode) usedBy() map[string]uint64 {
	of := map[string]uint64{}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, e := range n.m.World.State().Processes {
		for key, b := range n.boxes {
			if b.Has(e.PID) {
				of[key] += e.Bytes
			}
		}
	}
	return of
}

func (n *lentNode) annotations(context.Context) (map[string]map[string]string, error) {
	of := map[string]map[string]string{}
	for key := range n.pairs {
		of["uid-"+key] = map[string]string{"kubernetes.io/config.source": "api"}
	}
	return of, nil
}

// run looks after the node: it ends jobs that yield after their grace, and checks that no two containers have more of
// a room than there is.
func (n *lentNode) run(ctx context.Context, t *testing.T) {
	for ctx.Err() == nil {
		n.look()
		for _, a := range n.ledger.Allocations() {
			if !a.Yielding() || time.Since(a.Yield.Since) < lentGrace {
				continue
			}
			n.mu.Lock()
			end := n.jobs[a.ID]
			delete(n.jobs, a.ID)
			n.mu.Unlock()
			if end != nil {
				end()
			}
		}
		used := n.usedBy()
		for _, c := range n.pairs {
			if sum := used[c.notebook] + used[c.job]; sum > lentUnits*GiB {
				t.Errorf("%d MiB are used of %d GiB: %d by the notebook, %d by the job", sum/MiB, lentUnits, used[c.notebook]/MiB, used[c.job]/MiB)
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// hour is one lent hour of a notebook: it is idle, a job runs in its room, and a kernel comes back. It returns how
// long the kernel waited for its memory.
func (n *lentNode) hour(t *testing.T, c *lentContainer, pause time.Duration) time.Duration {
	lends := func() bool { a, _ := n.ledger.Get(c.notebook); return a.Lending }
	await(t, "lending", lends, func() any { a, _ := n.ledger.Get(c.notebook); return a })
	job := n.start(t, spotResource, c.ids)
	batch := job.tool(t, "probe", nil)
	if f := batch.ask("took", "take cuMemAlloc_v2 %d", kernelHas); f["result"] != "0" {
		t.Errorf("the job: %q", batch.said)
	}
	n.mu.Lock()
	n.jobs[c.job] = func() {
		if err := batch.p.Kill(); err != nil {
			t.Error(err)
		}
		_, _, _ = batch.wait() // killed
		n.mu.Lock()
		delete(n.since, c.job)
		n.mu.Unlock()
	}
	n.mu.Unlock()
	time.Sleep(pause)

	came := time.Now()
	kernel := n.boxes[c.notebook].tool(t, "probe", nil)
	if f := kernel.ask("took", "take cuMemAlloc_v2 %d", kernelHas); f["result"] != "0" {
		t.Errorf("the kernel got an error: %q", kernel.said)
	}
	took := time.Since(came)
	batch.shut()
	n.front.Release(c.job)
	n.mu.Lock()
	delete(n.boxes, c.job)
	n.mu.Unlock()
	job.close(t)
	kernel.quit()
	return took
}

// A kernel that comes back while the room of its notebook is lent gets its memory within the grace and two seconds,
// and never an error.
func TestKernelComesBackWhileItsRoomIsLent(t *testing.T) {
	const notebooks = 10
	n := newLentNode(t, notebooks)
	rounds := pick(1, 50)
	log := &strings.Builder{}
	lender := agent.NewLender(agent.Lending{Pages: n.pages, Presence: n.presence, Annotations: n.annotations}, watchDomain, n.ledger, n.front,
		func() {}, slog.New(slog.NewTextHandler(log, nil)))
	lender.Heard(true)
	ctx, stop := context.WithCancel(t.Context())
	var beside, hours sync.WaitGroup
	beside.Go(func() { n.run(ctx, t) })
	beside.Go(func() {
		if err := lender.Run(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("the lender ended with %v", err)
		}
	})
	defer func() {
		stop()
		beside.Wait()
		if t.Failed() {
			t.Log(log)
		}
	}()
	var mu sync.Mutex
	var took []time.Duration
	rng := dice(t)
	for _, c := range n.pairs {
		hours.Go(func() {
			for range rounds {
				mu.Lock()
				pause := time.Duration(rng.IntN(300)) * time.Millisecond
				mu.Unlock()
				d := n.hour(t, c, pause)
				mu.Lock()
				took = append(took, d)
				mu.Unlock()
			}
		})
	}
	hours.Wait()
	slices.Sort(took)
	if len(took) != notebooks*rounds || took[len(took)-1] > lentGrace+2*time.Second || took[0] < lentGrace/2 {
		t.Errorf("%d of %d kernels came back, after %v to %v", len(took), notebooks*rounds, took[0], took[len(took)-1])
	}
	t.Logf("%d kernels came back after %v (median), at most %v", len(took), took[len(took)/2], took[len(took)-1])
}
