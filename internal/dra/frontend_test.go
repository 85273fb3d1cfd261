// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/tests/fakes/claims"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// world is everything around a front-end: an API server with claims and slices, a kubelet,
// a runtime, and a loop that opens whatever may be opened.
type world struct {
	*FrontEnd
	t          *testing.T
	in         Input
	cluster    *claims.Cluster
	mu         sync.Mutex
	containers []node.Container // guarded by mu
	sandboxes  []workload.Pod   // guarded by mu: of pods without a container, too
	pods       []workload.Pod   // guarded by mu: that the kubelet has
	events     []string         // guarded by mu: "pod reason"
	ledger     *ledger.Ledger
	refuses    map[mig.Place]status.Cause // what the hardware's driver refuses
	journal    map[string]ledger.Record
	wakes      atomic.Int64
	stop       func() // of what runs
	// shut says that the loop opens nothing, and asked, if set, is called once while the runtime
	// is asked for its containers.
	shut  atomic.Bool
	asked atomic.Pointer[func()]
}

func (w *world) locked(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

func (w *world) Containers(context.Context) ([]node.Container, error) {
	w.mu.Lock()
	out := slices.Clone(w.containers)
	w.mu.Unlock()
	if f := w.asked.Swap(nil); f != nil {
		(*f)()
	}
	return out, nil
}

// Pods are those with a sandbox that stands: those that were named, and those with containers.
func (w *world) Pods(context.Context) (map[string]workload.Pod, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := map[string]workload.Pod{}
	for _, p := range w.sandboxes {
		out[p.UID] = p
	}
	for i := range w.containers {
		out[w.containers[i].PodUID] = w.containers[i].InPod()
	}
	return out, nil
}

func (w *world) listing(context.Context) (node.Listing, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return node.Listing{Pods: slices.Clone(w.pods)}, nil
}

func (w *world) event(p workload.Pod, _ agentkube.EventType, reason, _ string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = append(w.events, p.Name+" "+reason)
}

// newWorld begins with GPUs of one model, each laid out in a way.
func newWorld(t *testing.T, n int, layout func(*gpu.Device, *mig.Card) plan.Layout) *world {
	w := &world{t: t, in: input(t, several(t, "a100-80gb.json", n), layout), journal: map[string]ledger.Record{}, cluster: &claims.Cluster{Driver: driver}}
	w.ledger = ledger.New(w.open, time.Now)
	w.restart()
	return w
}

// restart begins a front-end with what the ledger has.
func (w *world) restart() {
	w.FrontEnd = New(Options{Domain: "example.com", Driver: driver, Node: w.in.Node, Ledger: w.ledger, API: w.cluster, Kubelet: w.cluster, Runtime: w,
		Listing: w.listing, Tell: w.event, Granted: func(a *ledger.Allocation) { w.journal[a.ID] = a.Record() }, Wake: func() { w.wakes.Add(1); w.open() }, Now: time.Now, Log: slog.New(slog.DiscardHandler)})
}

// options are what the front-end is made of, to be changed before they are used.
func (w *world) options() *Options { return w.ClaimsIn.(*intake).o }

// shelf is what the front-end offers.
func (w *world) shelf() *shelf { return w.SlicesOut.(*shelf) }

// open is the loop.
func (w *world) open() {
	held := w.ledger.Allocations()
	for i := range held {
		if held[i].Superseded {
			w.ledger.Gone(held[i].ID)
		}
		if held[i].Phase == ledger.Making && !w.shut.Load() {
			w.ledger.SetOpen(held[i].ID, held[i].Epoch)
		}
	}
}

// lay lays the GPUs out.
func (w *world) lay(layout func(*gpu.Device, *mig.Card) plan.Layout) {
	changes := &plan.Changes{Layouts: map[gpu.UUID]plan.Layout{}, MIG: map[gpu.UUID]ledger.MIG{}}
	for i := range w.in.Inventory.GPUs {
		d := &w.in.Inventory.GPUs[i]
		l := layout(d, w.in.Cards[d.UUID])
		l.API = ledger.DRA
		changes.Layouts[d.UUID] = l
		changes.MIG[d.UUID] = ledger.MIG{Card: w.in.Cards[d.UUID]}
	}
	w.ledger.SetMIG(changes.MIG)
	w.Publish(Offer{Inventory: w.in.Inventory, Changes: changes, Cards: w.in.Cards, Guarantee: "api", Drain: true, Failing: w.refuses, Refused: w.refuses})
}

// run has the front-end run, with the kubelet there, until the test ends.
func (w *world) run(layout func(*gpu.Device, *mig.Card) plan.Layout) (stop func()) {
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan error)
	w.lay(layout)
	go func() { done <- w.Run(ctx) }()
	w.Publisher().Registered(true)
	synctest.Wait()
	return sync.OnceFunc(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			w.t.Error(err)
		}
	})
}

// claim makes a claim of devices, by their names without the GPU's, and returns what the
// kubelet knows of it.
func (w *world) claim(name string, results ...result) dra.Claim {
	return w.cluster.Put(agentkube.Claim{Namespace: "ns", Name: name, Results: w.results(results)})
}

// results are those of a claim, where only devices are named: of request r0, r1 and so on.
func (w *world) results(of []result) (out []result) {
	for i, r := range of {
		if r.Request == "" {
			r.Request = fmt.Sprintf("r%d", i)
		}
		r.Driver = driver
		if r.Pool == "" {
			r.Pool = poolName(w.in.Node, w.in.Inventory.GPUs[0].Model)
		}
		out = append(out, r)
	}
	return out
}

// kubelets is what the kubelet knows of a claim.
func (w *world) kubelets(c agentkube.Claim) dra.Claim {
	return dra.Claim{Namespace: c.Namespace, Name: c.Name, UID: c.UID}
}

// prepares asks for a claim, of which the kubelet's account says nothing.
func (w *world) prepares(claim dra.Claim) {
	w.t.Helper()
	if _, err := w.Prepare(w.t.Context(), claim); err != nil {
		w.t.Fatal(err)
	}
}

// kubeletPrepares asks for a claim as the kubelet does, which writes it into its account.
func (w *world) kubeletPrepares(claim dra.Claim) {
	w.t.Helper()
	if _, err := w.cluster.Prepare(w.t.Context(), w.FrontEnd, claim); err != nil {
		w.t.Fatal(err)
	}
}

// kubeletGivesBack gives a claim back as the kubelet does.
func (w *world) kubeletGivesBack(claim dra.Claim) {
	w.t.Helper()
	if err := w.cluster.Unprepare(w.t.Context(), w.FrontEnd, claim); err != nil {
		w.t.Fatal(err)
	}
}

// reserve says for which pods a claim is.
func (w *world) reserve(name string, pods ...workload.Pod) {
	w.cluster.Edit("ns", name, func(c *agentkube.Claim) { c.Pods = pods })
}

// keyOf is the allocation of a claim's request.
func keyOf(c dra.Claim, request string) string {
	return cdi.Key("claim/"+c.UID, []string{request + "#0"})
}

// containerOf is a container of a pod with these allocations.
func containerOf(p workload.Pod, ids ...string) node.Container {
	c := node.Container{ID: p.UID + "-main", Name: "main", Namespace: p.Namespace, Pod: p.Name, PodUID: p.UID, Running: true}
	for _, id := range ids {
		c.CDI = append(c.CDI, cdi.DeviceName("example.com", id))
	}
	return c
}

// look is what the loop learns from the runtime.
func (w *world) look() {
	holders := map[string][]ledger.Holder{}
	now := time.Now()
	w.locked(func() {
		for i := range w.containers {
			c := &w.containers[i]
			for _, id := range cdi.Keys("example.com", nil, c.CDI) {
				holders[id] = append(holders[id], ledger.Holder{Pod: c.InPod(), Container: c.Name})
			}
		}
	})
	w.Observe(holders, now)
}

func (w *world) remove(name string) { w.cluster.Remove("ns", name) }

// named is what the server has of a device, by the end of its name.
func (w *world) named(suffix string) *resourcev1.Device {
	_, d := w.cluster.Device(suffix)
	return d
}

// result is a device that the scheduler gave a claim.
type result = resourcev1.DeviceRequestAllocationResult

// memoryOf is what a claim has of a shared GPU, in GiB.
func memoryOf(n int64) map[resourcev1.QualifiedName]resource.Quantity { return bytesOf(n << 30) }

func bytesOf(n int64) map[resourcev1.QualifiedName]resource.Quantity {
	return map[resourcev1.QualifiedName]resource.Quantity{memory: *resource.NewQuantity(n, resource.BinarySI)}
}

const (
	wholeDevice = "gpu-00000000"
	shareDevice = "gpu-00000000-shared"
	migDevice   = "gpu-00000000-mig-3g40gb-4"
)

// A claim's results are in the ledger with what they mean, under names that follow from its
// UID and its requests; it may be prepared again, and ends with Unprepare.
func TestPrepare(t *testing.T) {
	for name, c := range map[string]struct {
		layout  func(*gpu.Device, *mig.Card) plan.Layout
		results []result
		want    []string // records of grants
		caps    []uint64
		told    map[string]string
	}{
		"whole": {whole, []result{{Device: wholeDevice}, {Device: "gpu-00000001"}},
			[]string{`{"gpu":"GPU-00000000-0000-4000-8000-000000000000","kind":"whole"}`, `{"gpu":"GPU-00000001-0000-4000-8000-000000000000","kind":"whole"}`}, []uint64{memcap.None, memcap.None},
			map[string]string{"gpu": "GPU-00000000-0000-4000-8000-000000000000", "guarantee": "hardware"}},
		"shares of one GPU": {shared, []result{{Device: shareDevice, ShareID: claims.Share("a"), ConsumedCapacity: memoryOf(24)}, {Device: shareDevice, ShareID: claims.Share("b"), ConsumedCapacity: memoryOf(8)}},
			[]string{`{"gpu":"GPU-00000000-0000-4000-8000-000000000000","kind":"units","units":"0-23","unitMiB":1024,"cap":25769803776}`,
				`{"gpu":"GPU-00000000-0000-4000-8000-000000000000","kind":"units","units":"24-31","unitMiB":1024,"cap":8589934592}`}, []uint64{24 << 30, 8 << 30},
			map[string]string{"gpu": "GPU-00000000-0000-4000-8000-000000000000", "guarantee": "api", "capBytes": "25769803776"}},
		"instance": {onDemand, []result{{Device: migDevice}},
			[]string{`{"gpu":"GPU-00000000-0000-4000-8000-000000000000","kind":"placement","profile":"3g.40gb","start":4,"size":4}`}, []uint64{memcap.None},
			map[string]string{"gpu": "GPU-00000000-0000-4000-8000-000000000000", "guarantee": "hardware", "instance": "3g.40gb@4"}},
		"admin": {shared, []result{{Device: shareDevice, AdminAccess: new(true), ConsumedCapacity: memoryOf(79)}},
			[]string{`{"gpu":"GPU-00000000-0000-4000-8000-000000000000","kind":"whole","noRoom":true}`}, []uint64{memcap.None},
			map[string]string{"gpu": "GPU-00000000-0000-4000-8000-000000000000"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 2, c.layout)
				defer w.run(c.layout)()
				claim := w.claim("a", c.results...)
				devices, err := w.Prepare(t.Context(), claim)
				if err != nil || len(devices) != len(c.results) {
					t.Fatal(devices, err)
				}
				for i, d := range devices {
					r := c.results[i]
					id := cdi.Key("claim/uid-a", []string{fmt.Sprintf("r%d#0", i)})
					if d.Name != r.Device || d.Share != claims.ShareOf(&r) || !slices.Equal(d.CDI, []string{"example.com/gpu=" + id}) || !slices.Equal(d.Requests, []string{fmt.Sprintf("r%d", i)}) {
						t.Errorf("%+v", d)
					}
					a, _ := w.ledger.Get(id)
					got, err := json.Marshal(a.Grants[0])
					if err != nil || string(got) != c.want[i] || !a.IsOpen() || a.Cap(a.Grants[0].GPU) != piece.CapOf(c.caps[i]) {
						t.Errorf("%s, %v, %+v", got, err, a)
					}
					if r := w.journal[id]; r.Ref == "" || r.Owner != ledger.DRA {
						t.Errorf("no record: %+v", r)
					}
				}
				time.Sleep(tellAfter)
				synctest.Wait()
				if told := w.cluster.Told(claim.UID); len(told) != len(devices) || !maps.Equal(told[0].Data, c.told) || told[0].Share != claims.ShareOf(&c.results[0]) {
					t.Errorf("the claim says %+v", told)
				}
				again, err := w.Prepare(t.Context(), claim)
				if err != nil || fmt.Sprint(again) != fmt.Sprint(devices) {
					t.Errorf("again: %v, %v", again, err)
				}
				if err := w.Unprepare(t.Context(), claim); err != nil || w.ledger.Held() {
					t.Errorf("%v, %+v", err, w.ledger.Allocations())
				}
				if err := w.Unprepare(t.Context(), claim); err != nil {
					t.Errorf("given back twice: %v", err)
				}
			})
		})
	}
}

// A claim whose room is taken waits for it, and has it at once when the holder ends.
func TestPrepareWaitsForTheHolderBefore(t *testing.T) {
	for name, c := range map[string]struct {
		layout       func(*gpu.Device, *mig.Card) plan.Layout
		first, after result
	}{
		"shares":         {shared, result{Device: shareDevice, ConsumedCapacity: memoryOf(60)}, result{Device: shareDevice, ConsumedCapacity: memoryOf(20)}},
		"whole":          {whole, result{Device: wholeDevice}, result{Device: wholeDevice}},
		"placements":     {onDemand, result{Device: migDevice}, result{Device: "gpu-00000000-mig-7g80gb-0"}},
		"another layout": {whole, result{Device: wholeDevice}, result{Device: shareDevice, ConsumedCapacity: memoryOf(1)}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 1, c.layout)
				defer w.run(c.layout)()
				first, after := w.claim("first", c.first), w.claim("after", c.after)
				w.prepares(first)
				if name == "another layout" {
					w.lay(shared)
				}
				ctx, cancel := context.WithTimeout(t.Context(), dra.Patience)
				defer cancel()
				if _, err := w.Prepare(ctx, after); !errors.Is(err, ledger.ErrHeld) {
					t.Errorf("in vain: %v", err)
				}
				began := time.Now()
				done := make(chan error)
				go func() {
					_, err := w.Prepare(t.Context(), after)
					done <- err
				}()
				time.Sleep(10 * time.Second)
				if err := w.Unprepare(t.Context(), first); err != nil {
					t.Fatal(err)
				}
				if err := <-done; err != nil || time.Since(began) != 10*time.Second {
					t.Errorf("%v after %v", err, time.Since(began))
				}
			})
		})
	}
}

// A claim whose container runs yet is not given back.
func TestUnprepareWhileAContainerRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, whole)
		defer w.run(whole)()
		claim := w.claim("a", result{Device: wholeDevice})
		devices, err := w.Prepare(t.Context(), claim)
		if err != nil {
			t.Fatal(err)
		}
		w.locked(func() {
			w.containers = []node.Container{{ID: "c", Name: "main", Namespace: "ns", Pod: "p", CDI: devices[0].CDI}}
		})
		if err := w.Unprepare(t.Context(), claim); err == nil || !w.ledger.Held() {
			t.Errorf("%v, %+v", err, w.ledger.Allocations())
		}
		w.locked(func() { w.containers = nil })
		if err := w.Unprepare(t.Context(), claim); err != nil || w.ledger.Held() {
			t.Errorf("%v, %+v", err, w.ledger.Allocations())
		}
	})
}

// A device that no layout has any more stays in its slice, tainted, as long as a claim has
// it or may have it: until the taint is at the server and the claims have been listed after
// that.
func TestDeviceLeavesWhenNoClaimNamesIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, whole)
		defer w.run(whole)()
		if d := w.named(wholeDevice); d == nil || len(d.Taints) > 0 {
			t.Fatalf("%+v", d)
		}
		allocated := w.claim("allocated", result{Device: wholeDevice}) // and not prepared
		w.lay(shared)
		time.Sleep(time.Hour)
		if d := w.named(wholeDevice); d == nil || len(d.Taints) != 1 || d.Taints[0] != (resourcev1.DeviceTaint{Key: "example.com/withdrawn", Value: "NotInPartition", Effect: agentkube.NoSchedule}) {
			t.Fatalf("a claim names it: %+v", d)
		}
		if _, err := w.Prepare(t.Context(), allocated); err != nil {
			t.Fatal("it was promised:", err)
		}
		w.remove("allocated")
		time.Sleep(time.Hour)
		if w.named(wholeDevice) == nil {
			t.Fatal("the ledger has it")
		}
		if err := w.Unprepare(t.Context(), allocated); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * sweepEvery)
		if synctest.Wait(); w.named(wholeDevice) != nil || w.named("-shared") == nil {
			t.Error("nobody has it, and it stays")
		}
		off := func(*gpu.Device, *mig.Card) plan.Layout { return plan.Layout{Known: true} }
		w.lay(off)
		time.Sleep(2 * sweepEvery)
		if synctest.Wait(); len(w.cluster.Slices()) > 0 {
			t.Errorf("nothing is offered, and the last slice stays: %+v", w.cluster.Slices())
		}
		w.lay(shared)
		synctest.Wait()
		// One that the server does not hear of does not leave either.
		w.cluster.Refuse(errors.New("no route to host"))
		w.lay(whole)
		time.Sleep(time.Hour)
		if w.shelf().now().devices[DeviceName{poolName(w.in.Node, w.in.Inventory.GPUs[0].Model), shareDevice}] == (Device{}) {
			t.Error("a device has left, and the server has no taint of it")
		}
	})
}

// After a start nothing is published before the claims are known, and a device that one of
// them names is in the first slice. What is prepared and in no record is taken over.
func TestStartKnowsTheClaims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, shared)
		w.claim("old", result{Device: wholeDevice})
		w.cluster.Know(w.claim("running", result{Device: "gpu-00000001-shared", ConsumedCapacity: memoryOf(5)}))
		w.cluster.Away(errors.New("no route to host"))
		defer w.run(shared)()
		time.Sleep(10 * time.Minute)
		waits := w.claim("new", result{Device: shareDevice, ConsumedCapacity: memoryOf(1)})
		done := make(chan error)
		go func() {
			_, err := w.Prepare(t.Context(), waits)
			done <- err
		}()
		if synctest.Wait(); w.cluster.Writes() > 0 {
			t.Fatal("slices, and nobody knows the claims")
		}
		w.cluster.Away(nil)
		if err := <-done; err == nil {
			t.Error("the API server was away")
		}
		time.Sleep(2 * lastPause)
		if synctest.Wait(); w.named(wholeDevice) == nil || len(w.named(wholeDevice).Taints) == 0 {
			t.Errorf("a claim names it: %+v", w.cluster.Slices())
		}
		a, ok := w.ledger.Get(cdi.Key("claim/uid-running", []string{"r0#0"}))
		if !ok || a.Grants[0].Cap != piece.CapOf(5<<30) {
			t.Errorf("%+v, %v", a, ok)
		}
		if _, err := w.Prepare(t.Context(), waits); err != nil {
			t.Error(err)
		}
	})
}

// A claim is in the kubelet's account before it is prepared. After a start it waits for the
// room of the one before it, as before that, and has it not yet.
func TestClaimThatIsBeingPreparedHasNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, whole)
		stop := w.run(whole)
		before := w.claim("before", result{Device: wholeDevice})
		w.kubeletPrepares(before)
		w.remove("before") // by force: its container runs
		next := w.claim("next", result{Device: wholeDevice})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := w.cluster.Prepare(ctx, w, next); !errors.Is(err, ledger.ErrHeld) {
			t.Fatal(err)
		}
		stop()
		w.ledger = ledger.New(w.open, time.Now)
		w.restart()
		for id, r := range w.journal {
			if err := w.Found(id, r, time.Time{}); err != nil {
				t.Error(err)
			}
		}
		defer w.run(whole)()
		if held := w.ledger.Allocations(); len(held) != 1 {
			t.Errorf("one GPU, and these have it: %+v", held)
		}
	})
}

// Where records and the kubelet's account are lost, a container tells what its claim has.
func TestContainerTellsWhatAClaimHas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, shared)
		claim := w.claim("a", result{Request: "gpu", Device: shareDevice, ConsumedCapacity: memoryOf(7)})
		id := cdi.Key("claim/"+claim.UID, []string{"gpu#0"})
		pod := workload.Pod{Namespace: "ns", Name: "p", UID: "1"}
		w.containers = []node.Container{containerOf(pod, id)}
		w.cluster.Edit("ns", "a", func(c *agentkube.Claim) { c.Pods = []workload.Pod{pod} })
		defer w.run(shared)()
		a, ok := w.ledger.Get(id)
		if !ok || a.Grants[0].Cap != piece.CapOf(7<<30) {
			t.Errorf("%+v, %v", a, ok)
		}
		if pods := a.Pods(); len(pods) != 1 || pods[0] != pod { // before the runtime is asked again
			t.Errorf("it is of %v, want %s", pods, pod)
		}
	})
}

// What is withdrawn is held for a claim also where another of its devices has a holder yet.
func TestPromisedInPart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, whole)
		defer w.run(whole)()
		before := w.claim("before", result{Device: wholeDevice})
		w.prepares(before)
		w.remove("before") // by force
		both := w.claim("both", result{Device: wholeDevice}, result{Device: "gpu-00000001"})
		if promised, err := w.Settle(t.Context()); err != nil || len(promised) != 1 || promised[0] != w.in.Inventory.GPUs[0].UUID {
			t.Fatal(promised, err)
		}
		if held := w.ledger.Allocations(); len(held) != 2 {
			t.Errorf("it was promised the other GPU: %+v", held)
		}
		if err := w.Unprepare(t.Context(), before); err != nil {
			t.Fatal(err)
		}
		if devices, err := w.Prepare(t.Context(), both); err != nil || len(devices) != 2 {
			t.Errorf("%+v, %v", devices, err)
		}
	})
}

// The claims are listed as soon as there is an offer, also where Run came first.
func TestOfferAfterTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, shared)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- w.Run(ctx) }()
		w.Publisher().Registered(true)
		synctest.Wait()
		began := time.Now()
		w.lay(shared)
		if synctest.Wait(); w.named(shareDevice) == nil || time.Since(began) > 0 {
			t.Errorf("no slices %v after the offer", time.Since(began))
		}
		cancel()
		<-done
	})
}

// What is in records is taken over as it is, and prepared again without the API server for a pod
// that has a container with it. For another pod it is not: the claim may have been allocated
// anew, and only the API server knows.
func TestFoundInRecords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, shared)
		stop := w.run(shared)
		defer stop()
		claim := w.claim("a", result{Device: shareDevice, ConsumedCapacity: memoryOf(7)}, result{Device: shareDevice, ConsumedCapacity: memoryOf(9)})
		pod := workload.Pod{Namespace: "ns", Name: "p", UID: "1"}
		w.reserve("a", pod)
		devices, err := w.cluster.Prepare(t.Context(), w, claim)
		if err != nil {
			t.Fatal(err)
		}
		stop()
		w.ledger = ledger.New(w.open, time.Now)
		w.restart()
		w.cluster.Away(errors.New("no route to host"))
		for id, r := range w.journal {
			if err := w.Found(id, r, time.Time{}); err != nil {
				t.Error(err)
			}
			if err := w.Found("0123456789abcdef", r, time.Time{}); !errors.Is(err, gpu.ErrInvalid) {
				t.Errorf("of another ID: %v", err)
			}
		}
		defer w.run(shared)()
		if again, err := w.cluster.Prepare(t.Context(), w, claim); err == nil {
			t.Errorf("nobody has said that it has what the pod was given: %v", again)
		}
		w.locked(func() { w.containers = []node.Container{containerOf(pod, keyOf(claim, "r0"))} })
		w.look()
		again, err := w.cluster.Prepare(t.Context(), w, claim)
		if err != nil || fmt.Sprint(again) != fmt.Sprint(devices) {
			t.Errorf("%v, %v; want %v", again, err, devices)
		}
		w.reserve("a", pod, workload.Pod{Namespace: "ns", Name: "q", UID: "2"})
		if again, err := w.cluster.Prepare(t.Context(), w, claim); err == nil {
			t.Errorf("nobody has said that it has what the second pod was given: %v", again)
		}
		w.locked(func() { w.containers = nil })
		if err := w.Unprepare(t.Context(), claim); err != nil || w.ledger.Held() {
			t.Errorf("%v, %v", err, w.ledger.Allocations())
		}
	})
}

// What is withdrawn is taken away only when the server has the taint, and everybody who was
// promised it is in the ledger.
func TestPromisedIsHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, onDemand)
		defer w.run(onDemand)()
		w.claim("promised", result{Device: migDevice})
		w.cluster.Refuse(errors.New("no route to host"))
		w.lay(whole)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := w.Settle(ctx); err == nil || w.ledger.Held() {
			t.Errorf("the server does not know of the taint: %v, %+v", err, w.ledger.Allocations())
		}
		w.cluster.Refuse(nil)
		if _, err := w.Settle(t.Context()); err != nil || len(w.ledger.Allocations()) != 1 {
			t.Fatalf("%v, %+v", err, w.ledger.Allocations())
		}
		if a := w.ledger.Allocations()[0]; a.Phase != ledger.Taken || piece.At(a.Grants[0].Piece).Start != 4 {
			t.Errorf("%+v", a)
		}
		w.remove("promised") // its pod never came
		for range 3 {
			w.Observe(map[string][]ledger.Holder{}, time.Now())
			time.Sleep(sweepEvery)
		}
		if synctest.Wait(); w.ledger.Held() {
			t.Errorf("%+v", w.ledger.Allocations())
		}
	})
}

// A claim that the kubelet has just given back is allocated at the API server for a while
// yet. It counted as promised to somebody, and kept an edit waiting for a minute.
func TestGivenBackIsNotPromised(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, onDemand)
		defer w.run(onDemand)()
		claim := w.claim("a", result{Device: migDevice})
		w.cluster.Edit("ns", "a", func(c *agentkube.Claim) { c.Pods = []workload.Pod{{Namespace: "ns", Name: "a", UID: "1"}} })
		w.kubeletPrepares(claim)
		w.kubeletGivesBack(claim)
		w.lay(whole)
		if _, err := w.Settle(t.Context()); err != nil || w.ledger.Held() {
			t.Errorf("given back: %v, %+v", err, w.ledger.Allocations())
		}
		w.cluster.Edit("ns", "a", func(c *agentkube.Claim) { c.Pods = append(c.Pods, workload.Pod{Namespace: "ns", Name: "a", UID: "2"}) })
		if _, err := w.Settle(t.Context()); err != nil || !w.ledger.Held() {
			t.Errorf("another pod is to have it: %v, %+v", err, w.ledger.Allocations())
		}
	})
}

// A claim that is never unprepared ends when the API server, the kubelet and the runtime
// know nothing of it, and not before.
func TestEndsWithoutUnprepare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, whole)
		defer w.run(whole)()
		claim := w.claim("a", result{Device: wholeDevice})
		w.prepares(claim)
		id := w.ledger.Allocations()[0].ID
		nobody, somebody := map[string][]ledger.Holder{}, map[string][]ledger.Holder{id: {{Container: "main"}}}
		keeps := func(what string, holders map[string][]ledger.Holder) {
			t.Helper()
			for range 10 {
				w.Observe(holders, time.Now())
				time.Sleep(sweepEvery)
			}
			if synctest.Wait(); !w.ledger.Held() {
				t.Fatalf("ended: %s", what)
			}
		}
		keeps("the API server has it", nobody)
		w.cluster.Know(claim)
		w.remove("a")
		keeps("the kubelet has it", nobody)
		w.cluster.Know()
		keeps("a container has it", somebody)
		w.cluster.Away(errors.New("no route to host"))
		keeps("the API server does not answer", nobody)
		w.cluster.Away(nil)
		for range 3 {
			w.Observe(nobody, time.Now())
			time.Sleep(sweepEvery)
		}
		if synctest.Wait(); w.ledger.Held() || w.wakes.Load() == 0 {
			t.Errorf("nobody knows it: %+v", w.ledger.Allocations())
		}
	})
}

// An agent that was killed after the kubelet's Unprepare and before the end of the record
// kept the claim for half a minute, and the next claim of the device waited for it, almost
// for too long.
func TestGivenBackBeforeTheRecordWasGone(t *testing.T) {
	for name, late := range map[string]bool{"the claim is gone": false, "the API server has it for a while": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 1, whole)
				stop := w.run(whole)
				claim := w.claim("a", result{Device: wholeDevice})
				w.prepares(claim)
				stop()
				time.Sleep(time.Second)
				w.ledger = ledger.New(w.open, time.Now)
				w.restart()
				for id, r := range w.journal {
					if err := w.Found(id, r, time.Now().Add(-time.Second)); err != nil {
						t.Error(err)
					}
				}
				if !late {
					w.remove("a")
				}
				defer w.run(whole)()
				if synctest.Wait(); w.ledger.Held() != late {
					t.Errorf("held: %v", w.ledger.Allocations())
				}
				w.Observe(map[string][]ledger.Holder{}, time.Now())
				w.remove("a")
				next := w.claim("b", result{Device: wholeDevice})
				ctx, cancel := context.WithTimeout(t.Context(), 2*impatience)
				defer cancel()
				if _, err := w.Prepare(ctx, next); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// An agent that was killed before it had said in a claim what its devices are, or whose
// call was given up by the kubelet, never said it.
func TestClaimIsToldAllTheSame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, whole)
		stop := w.run(whole)
		claim := w.claim("a", result{Device: wholeDevice})
		w.prepares(claim)
		synctest.Wait()
		untold := func() {
			if err := w.cluster.SetClaimDevices(t.Context(), driver, &agentkube.Claim{UID: claim.UID}, nil); err != nil {
				t.Fatal(err)
			}
		}
		untold()
		w.prepares(claim)
		time.Sleep(tellAfter)
		if synctest.Wait(); len(w.cluster.Told(claim.UID)) != 1 {
			t.Error("prepared again, it is not told")
		}
		untold()
		stop()
		w.ledger = ledger.New(w.open, time.Now)
		w.restart()
		for id, r := range w.journal {
			if err := w.Found(id, r, time.Now()); err != nil {
				t.Error(err)
			}
		}
		defer w.run(whole)()
		if synctest.Wait(); len(w.cluster.Told(claim.UID)) != 1 {
			t.Error("after a start it is not told")
		}
	})
}

// All pods of a claim are its holders, not the first alone: before a container runs those
// that it is reserved for, and then those whose containers have it.
func TestHoldersOfAClaimWereOnePod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, shared)
		defer w.run(shared)()
		pod := func(name string) workload.Pod {
			return workload.Pod{Namespace: "ns", Name: name, UID: "uid-of-" + name}
		}
		claim := w.claim("a", result{Device: shareDevice, ConsumedCapacity: memoryOf(1)})
		w.cluster.Edit("ns", "a", func(c *agentkube.Claim) { c.Pods = []workload.Pod{pod("p"), pod("q")} })
		w.prepares(claim)
		a := w.ledger.Allocations()[0]
		if a.Who() != "ns/p, ns/q" {
			t.Errorf("%q", a.Who())
		}
		w.Observe(map[string][]ledger.Holder{a.ID: {{Pod: pod("q"), Container: "main"}, {Pod: pod("q"), Container: "side"}, {Pod: pod("r"), Container: "main"}}}, time.Now())
		if a = w.ledger.Allocations()[0]; a.Who() != "ns/q, ns/r" || !slices.Equal(a.Pods(), []workload.Pod{pod("q"), pod("r")}) || a.Holder.Container != "main" {
			t.Errorf("%q, %+v", a.Who(), a.Pods())
		}
	})
}

// A fault taints the right devices and shows in their health, and goes again.
func TestFaultIsATaint(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, onDemand)
		defer w.run(onDemand)()
		u := w.in.Inventory.GPUs[0].UUID
		_, changed := w.Health()
		w.SetFaults(map[gpu.UUID]string{u: "Xid 79"}, nil)
		<-changed
		synctest.Wait()
		want := resourcev1.DeviceTaint{Key: "example.com/unhealthy", Value: "GPUUnhealthy", Effect: agentkube.NoSchedule}
		if d := w.named(migDevice); d == nil || !slices.Contains(d.Taints, want) {
			t.Errorf("%+v", d)
		}
		if d := w.named("gpu-00000001-mig-3g40gb-4"); d == nil || len(d.Taints) > 0 {
			t.Errorf("%+v", d)
		}
		devices, changed := w.Health()
		for _, d := range devices {
			if bad := strings.HasPrefix(d.Name, "gpu-00000000-"); d.Healthy == bad || bad && d.Message != "Xid 79" {
				t.Errorf("%+v", d)
			}
		}
		w.SetFaults(nil, nil)
		<-changed
		if synctest.Wait(); len(w.named(migDevice).Taints) > 0 {
			t.Errorf("%+v", w.named(migDevice))
		}
		// Of an instance alone.
		of := w.in.Cards[u].Placements()[0]
		w.SetFaults(nil, map[mig.Place]string{{GPU: u, Placement: of}: "Xid 94"})
		synctest.Wait()
		tainted := 0
		for _, s := range w.cluster.Slices() {
			for _, d := range s.Spec.Devices {
				tainted += len(d.Taints)
			}
		}
		if tainted != 1 {
			t.Errorf("%d devices are tainted", tainted)
		}
	})
}

// By a flag, a fault ends the pods that have the device; to be withdrawn still ends nobody.
func TestFaultThatEndsPods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, whole)
		w.shelf().fault = agentkube.NoExecute
		defer w.run(whole)()
		w.claim("a", result{Device: wholeDevice})
		w.SetFaults(map[gpu.UUID]string{w.in.Inventory.GPUs[0].UUID: "Xid 79"}, nil)
		w.lay(shared)
		synctest.Wait()
		want := []resourcev1.DeviceTaint{{Key: "example.com/unhealthy", Value: "GPUUnhealthy", Effect: agentkube.NoExecute}, {Key: "example.com/withdrawn", Value: "NotInPartition", Effect: agentkube.NoSchedule}}
		if d := w.named(wholeDevice); d == nil || !slices.Equal(d.Taints, want) {
			t.Errorf("%+v, want %+v", d, want)
		}
	})
}

// No claim writes a slice.
func TestClaimsWriteNoSlices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4, shared)
		defer w.run(shared)()
		before := w.cluster.Writes()
		for i := range 500 {
			c := w.claim(fmt.Sprint(i), result{Device: fmt.Sprintf("gpu-0000000%d-shared", i%4), ConsumedCapacity: memoryOf(int64(1 + i%16))})
			w.prepares(c)
			w.lay(shared) // a round
			if err := w.Unprepare(t.Context(), c); err != nil {
				t.Fatal(err)
			}
			w.lay(shared)
			w.remove(c.Name)
		}
		time.Sleep(time.Hour)
		if synctest.Wait(); w.cluster.Writes() != before {
			t.Errorf("%d writes", w.cluster.Writes()-before)
		}
	})
}
