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
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/mig"
)

// world is everything around a front-end: an API server with claims and slices, a kubelet,
// a runtime, and a loop that opens whatever may be opened.
type world struct {
	*FrontEnd
	t  *testing.T
	in Input
	server
	mu         sync.Mutex
	claims     []kube.Claim                  // guarded by mu
	away       error                         // guarded by mu: why the API server does not answer
	prepared   []string                      // guarded by mu: UIDs that the kubelet knows
	containers []node.Container              // guarded by mu
	told       map[string][]kube.ClaimDevice // guarded by mu, by UID
	ledger     *ledger.Ledger
	journal    map[string]ledger.Record
	wakes      int
}

func (w *world) locked(f func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f()
}

func (w *world) Claim(_ context.Context, _, namespace, name string) (*kube.Claim, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range w.claims {
		if c := w.claims[i]; c.Namespace == namespace && c.Name == name && w.away == nil {
			return &c, nil
		}
	}
	if w.away != nil {
		return nil, w.away
	}
	return nil, fmt.Errorf("claim %s/%s: %w", namespace, name, gpu.ErrNotFound)
}

func (w *world) Claims(context.Context, string) ([]kube.Claim, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.claims), w.away
}

func (w *world) SetClaimDevices(_ context.Context, _ string, c *kube.Claim, devices []kube.ClaimDevice) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.told[c.UID] = devices
	return nil
}

func (w *world) DRAState() (s node.DRAState, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, uid := range w.prepared {
		s.Claims = append(s.Claims, node.PreparedClaim{UID: uid})
	}
	return s, nil
}

func (w *world) Containers(context.Context) ([]node.Container, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.containers), nil
}

// newWorld begins with GPUs of one model, each laid out in a way.
func newWorld(t *testing.T, n int, layout func(*gpu.Device, *mig.Card) plan.Layout) *world {
	w := &world{t: t, in: input(t, several(t, "a100-80gb.json", n), layout), journal: map[string]ledger.Record{}, told: map[string][]kube.ClaimDevice{}}
	w.ledger = ledger.New(w.open, time.Now)
	w.restart()
	return w
}

// restart begins a front-end with what the ledger has.
func (w *world) restart() {
	w.FrontEnd = New(Options{Domain: "example.com", Driver: driver, Node: w.in.Node, Ledger: w.ledger, API: w, Kubelet: w, Runtime: w,
		Granted: func(a *ledger.Allocation) { w.journal[a.ID] = a.Record() }, Wake: func() { w.wakes++ }, Now: time.Now, Log: slog.New(slog.DiscardHandler)})
}

// open is the loop.
func (w *world) open() {
	held := w.ledger.Allocations()
	for i := range held {
		if held[i].Phase == ledger.Making {
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
	w.Publish(Offer{Inventory: w.in.Inventory, Changes: changes, Cards: w.in.Cards, Guarantee: "api", Drain: true})
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
func (w *world) claim(name string, results ...kube.Result) dra.Claim {
	c := kube.Claim{Namespace: "ns", Name: name, UID: "uid-" + name}
	for i, r := range results {
		if r.Request == "" {
			r.Request = fmt.Sprintf("r%d", i)
		}
		r.Driver = driver
		if r.Pool == "" {
			r.Pool = poolName(w.in.Node, w.in.Inventory.GPUs[0].Model)
		}
		c.Results = append(c.Results, r)
	}
	w.mu.Lock()
	w.claims = append(w.claims, c)
	w.mu.Unlock()
	return dra.Claim{Namespace: "ns", Name: name, UID: c.UID}
}

func (w *world) edit(name string, change func(*kube.Claim)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for i := range w.claims {
		if w.claims[i].Name == name {
			change(&w.claims[i])
		}
	}
}

func (w *world) remove(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.claims = slices.DeleteFunc(w.claims, func(c kube.Claim) bool { return c.Name == name })
}

// named is what the server has of a device, by the end of its name.
func (w *world) named(suffix string) *kube.PoolDevice {
	w.server.mu.Lock()
	defer w.server.mu.Unlock()
	for _, s := range w.have {
		for i := range s.Devices {
			if strings.HasSuffix(s.Devices[i].Name, suffix) {
				return &s.Devices[i]
			}
		}
	}
	return nil
}

func memoryOf(n kube.Quantity) map[string]kube.Quantity {
	return map[string]kube.Quantity{memory: n << 30}
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
		results []kube.Result
		want    []string // records of grants
		caps    []uint64
		told    map[string]string
	}{
		"whole": {whole, []kube.Result{{Device: wholeDevice}, {Device: "gpu-00000001"}},
			[]string{`{"gpu":"GPU-00000000-0000-4000-8000-000000000000","kind":"whole"}`, `{"gpu":"GPU-00000001-0000-4000-8000-000000000000","kind":"whole"}`}, []uint64{memcap.None, memcap.None},
			map[string]string{"gpu": "GPU-00000000-0000-4000-8000-000000000000", "guarantee": "hardware"}},
		"shares of one GPU": {shared, []kube.Result{{Device: shareDevice, Share: "a", Capacity: memoryOf(24)}, {Device: shareDevice, Share: "b", Capacity: memoryOf(8)}},
			[]string{`{"gpu":"GPU-00000000-0000-4000-8000-000000000000","kind":"units","units":"0-23","unitMiB":1024,"cap":25769803776}`,
				`{"gpu":"GPU-00000000-0000-4000-8000-000000000000","kind":"units","units":"24-31","unitMiB":1024,"cap":8589934592}`}, []uint64{24 << 30, 8 << 30},
			map[string]string{"gpu": "GPU-00000000-0000-4000-8000-000000000000", "guarantee": "api", "capBytes": "25769803776"}},
		"instance": {onDemand, []kube.Result{{Device: migDevice}},
			[]string{`{"gpu":"GPU-00000000-0000-4000-8000-000000000000","kind":"placement","profile":"3g.40gb","start":4,"size":4}`}, []uint64{memcap.None},
			map[string]string{"gpu": "GPU-00000000-0000-4000-8000-000000000000", "guarantee": "hardware", "instance": "3g.40gb@4"}},
		"admin": {shared, []kube.Result{{Device: shareDevice, Admin: true, Capacity: memoryOf(79)}},
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
					if d.Name != r.Device || d.Share != r.Share || !slices.Equal(d.CDI, []string{"example.com/gpu=" + id}) || !slices.Equal(d.Requests, []string{fmt.Sprintf("r%d", i)}) {
						t.Errorf("%+v", d)
					}
					a, _ := w.ledger.Get(id)
					got, err := json.Marshal(a.Grants[0])
					if err != nil || string(got) != c.want[i] || !a.IsOpen() || a.Cap(a.Grants[0].GPU) != ledger.CapOf(c.caps[i]) {
						t.Errorf("%s, %v, %+v", got, err, a)
					}
					if r := w.journal[id]; r.Ref == "" || r.Owner != ledger.DRA {
						t.Errorf("no record: %+v", r)
					}
				}
				synctest.Wait()
				if told := w.told[claim.UID]; len(told) != len(devices) || !maps.Equal(told[0].Data, c.told) || told[0].Share != c.results[0].Share {
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
		first, after kube.Result
	}{
		"shares":         {shared, kube.Result{Device: shareDevice, Capacity: memoryOf(60)}, kube.Result{Device: shareDevice, Capacity: memoryOf(20)}},
		"whole":          {whole, kube.Result{Device: wholeDevice}, kube.Result{Device: wholeDevice}},
		"placements":     {onDemand, kube.Result{Device: migDevice}, kube.Result{Device: "gpu-00000000-mig-7g80gb-0"}},
		"another layout": {whole, kube.Result{Device: wholeDevice}, kube.Result{Device: shareDevice, Capacity: memoryOf(1)}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 1, c.layout)
				defer w.run(c.layout)()
				first, after := w.claim("first", c.first), w.claim("after", c.after)
				if _, err := w.Prepare(t.Context(), first); err != nil {
					t.Fatal(err)
				}
				if name == "another layout" {
					w.lay(shared)
				}
				ctx, cancel := context.WithTimeout(t.Context(), dra.Patience)
				defer cancel()
				if _, err := w.Prepare(ctx, after); !errors.Is(err, ledger.ErrTaken) {
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

// What can never be prepared is refused at once, with the reason, and takes nothing.
func TestClaimsThatAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		result kube.Result
		change func(*kube.Claim)
		want   string
	}{
		"another node's pool":    {kube.Result{Pool: "node-2/a100-sxm4-80gb", Device: shareDevice}, nil, "nothing of driver gpus.example.com on this node"},
		"no such pool":           {kube.Result{Pool: "node-1/h100", Device: shareDevice}, nil, "no device gpu-00000000-shared in pool node-1/h100"},
		"an older layout":        {kube.Result{Device: wholeDevice}, nil, "no device gpu-00000000 in pool"},
		"without an amount":      {kube.Result{Device: shareDevice}, nil, "0 bytes of device"},
		"half a unit":            {kube.Result{Device: shareDevice, Capacity: map[string]kube.Quantity{memory: 1 << 29}}, nil, "an amount is 1 to 79 times 1024 MiB"},
		"a unit and a half":      {kube.Result{Device: shareDevice, Capacity: map[string]kube.Quantity{memory: 3 << 29}}, nil, "an amount is"},
		"less than nothing":      {kube.Result{Device: shareDevice, Capacity: memoryOf(-1)}, nil, "an amount is"},
		"more than there is":     {kube.Result{Device: shareDevice, Capacity: memoryOf(80)}, nil, "an amount is"},
		"replaced":               {kube.Result{Device: shareDevice, Capacity: memoryOf(1)}, func(c *kube.Claim) { c.UID = "another" }, "is another one now"},
		"not allocated any more": {kube.Result{Device: shareDevice, Capacity: memoryOf(1)}, func(c *kube.Claim) { c.Results = nil }, "nothing of driver"},
		"configuration of the peer": {kube.Result{Device: shareDevice, Capacity: memoryOf(1)}, func(c *kube.Claim) {
			c.Configs = []kube.ClaimConfig{{Parameters: json.RawMessage(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS"}}`)}}
		}, `kind "GpuConfig"`},
		"configuration that is none": {kube.Result{Device: shareDevice, Capacity: memoryOf(1)}, func(c *kube.Claim) {
			c.Configs = []kube.ClaimConfig{{Parameters: json.RawMessage(`[1,`)}}
		}, `kind ""`},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 1, shared)
				defer w.run(shared)()
				claim := w.claim("a", c.result)
				if c.change != nil {
					w.edit("a", c.change)
				}
				began := time.Now()
				_, err := w.Prepare(t.Context(), claim)
				if err == nil || !strings.Contains(err.Error(), c.want) || time.Since(began) > 0 || w.ledger.Held() {
					t.Errorf("%v after %v; want %q", err, time.Since(began), c.want)
				}
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, shared)
		defer w.run(shared)()
		w.lay(onDemand)
		if _, err := w.Prepare(t.Context(), w.claim("admin", kube.Result{Device: migDevice, Admin: true})); !errors.Is(err, gpu.ErrNotFound) {
			t.Errorf("admin access to an instance that does not stand: %v", err)
		}
		w.lay(shared)
		claim := w.claim("a", kube.Result{Device: shareDevice, Capacity: memoryOf(1)})
		w.remove("a")
		if _, err := w.Prepare(t.Context(), claim); !errors.Is(err, gpu.ErrNotFound) {
			t.Errorf("deleted meanwhile: %v", err)
		}
	})
}

// A claim of which one result cannot be had has nothing.
func TestAllOfAClaimOrNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, whole)
		defer w.run(whole)()
		if _, err := w.Prepare(t.Context(), w.claim("one", kube.Result{Device: "gpu-00000001"})); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := w.Prepare(ctx, w.claim("both", kube.Result{Device: wholeDevice}, kube.Result{Device: "gpu-00000001"})); err == nil || len(w.ledger.Allocations()) != 1 {
			t.Errorf("%v, %+v", err, w.ledger.Allocations())
		}
	})
}

// A claim whose container runs yet is not given back.
func TestUnprepareWhileAContainerRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, whole)
		defer w.run(whole)()
		claim := w.claim("a", kube.Result{Device: wholeDevice})
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
		allocated := w.claim("allocated", kube.Result{Device: wholeDevice}) // and not prepared
		w.lay(shared)
		time.Sleep(time.Hour)
		if d := w.named(wholeDevice); d == nil || len(d.Taints) != 1 || d.Taints[0] != (kube.Taint{Key: "example.com/withdrawn", Value: "NotInPartition", Effect: kube.NoSchedule}) {
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
		if synctest.Wait(); len(w.have) > 0 {
			t.Errorf("nothing is offered, and the last slice stays: %+v", w.have)
		}
		w.lay(shared)
		synctest.Wait()
		// One that the server does not hear of does not leave either.
		w.set(func() { w.fails = errors.New("no route to host") })
		w.lay(whole)
		time.Sleep(time.Hour)
		if w.published.Devices[DeviceName{poolName(w.in.Node, w.in.Inventory.GPUs[0].Model), shareDevice}] == (Device{}) {
			t.Error("a device has left, and the server has no taint of it")
		}
	})
}

// After a start nothing is published before the claims are known, and a device that one of
// them names is in the first slice. What is prepared and in no record is taken over.
func TestStartKnowsTheClaims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 2, shared)
		w.claim("old", kube.Result{Device: wholeDevice})
		w.claim("running", kube.Result{Device: "gpu-00000001-shared", Capacity: memoryOf(5)})
		w.prepared = []string{"uid-running"}
		w.away = errors.New("no route to host")
		defer w.run(shared)()
		time.Sleep(10 * time.Minute)
		waits := w.claim("new", kube.Result{Device: shareDevice, Capacity: memoryOf(1)})
		done := make(chan error)
		go func() {
			_, err := w.Prepare(t.Context(), waits)
			done <- err
		}()
		if synctest.Wait(); w.writes > 0 {
			t.Fatal("slices, and nobody knows the claims")
		}
		w.locked(func() { w.away = nil })
		if err := <-done; err == nil {
			t.Error("the API server was away")
		}
		time.Sleep(2 * lastPause)
		if synctest.Wait(); w.named(wholeDevice) == nil || len(w.named(wholeDevice).Taints) == 0 {
			t.Errorf("a claim names it: %+v", w.have)
		}
		a, ok := w.ledger.Get(cdi.Key("claim/uid-running", []string{"r0#0"}))
		if !ok || a.Grants[0].Cap != ledger.CapOf(5<<30) {
			t.Errorf("%+v, %v", a, ok)
		}
		if _, err := w.Prepare(t.Context(), waits); err != nil {
			t.Error(err)
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

// What is in records is taken over as it is, and prepared again without the API server.
func TestFoundInRecords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, shared)
		stop := w.run(shared)
		defer stop()
		claim := w.claim("a", kube.Result{Device: shareDevice, Capacity: memoryOf(7)}, kube.Result{Device: shareDevice, Capacity: memoryOf(9)})
		devices, err := w.Prepare(t.Context(), claim)
		if err != nil {
			t.Fatal(err)
		}
		stop()
		w.ledger = ledger.New(w.open, time.Now)
		w.restart()
		w.away = errors.New("no route to host")
		for id, r := range w.journal {
			if err := w.Found(id, r, time.Time{}); err != nil {
				t.Error(err)
			}
			if err := w.Found("0123456789abcdef", r, time.Time{}); !errors.Is(err, gpu.ErrInvalid) {
				t.Errorf("of another ID: %v", err)
			}
		}
		defer w.run(shared)()
		again, err := w.Prepare(t.Context(), claim)
		if err != nil || fmt.Sprint(again) != fmt.Sprint(devices) {
			t.Errorf("%v, %v; want %v", again, err, devices)
		}
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
		w.claim("promised", kube.Result{Device: migDevice})
		w.set(func() { w.fails = errors.New("no route to host") })
		w.lay(whole)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := w.Settle(ctx); err == nil || w.ledger.Held() {
			t.Errorf("the server does not know of the taint: %v, %+v", err, w.ledger.Allocations())
		}
		w.set(func() { w.fails = nil })
		if err := w.Settle(t.Context()); err != nil || len(w.ledger.Allocations()) != 1 {
			t.Fatalf("%v, %+v", err, w.ledger.Allocations())
		}
		if a := w.ledger.Allocations()[0]; a.Phase != ledger.Taken || a.Grants[0].Placement.Start != 4 {
			t.Errorf("%+v", a)
		}
		w.remove("promised") // its pod never came
		for range 3 {
			w.Observe(map[string]ledger.Holder{}, time.Now())
			time.Sleep(sweepEvery)
		}
		if synctest.Wait(); w.ledger.Held() {
			t.Errorf("%+v", w.ledger.Allocations())
		}
	})
}

// A claim that is never unprepared ends when the API server, the kubelet and the runtime
// know nothing of it, and not before.
func TestEndsWithoutUnprepare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, whole)
		defer w.run(whole)()
		claim := w.claim("a", kube.Result{Device: wholeDevice})
		if _, err := w.Prepare(t.Context(), claim); err != nil {
			t.Fatal(err)
		}
		id := w.ledger.Allocations()[0].ID
		nobody, somebody := map[string]ledger.Holder{}, map[string]ledger.Holder{id: {Container: "main"}}
		keeps := func(what string, holders map[string]ledger.Holder) {
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
		w.locked(func() { w.prepared = []string{claim.UID} })
		w.remove("a")
		keeps("the kubelet has it", nobody)
		w.locked(func() { w.prepared = nil })
		keeps("a container has it", somebody)
		w.locked(func() { w.away = errors.New("no route to host") })
		keeps("the API server does not answer", nobody)
		w.locked(func() { w.away = nil })
		for range 3 {
			w.Observe(nobody, time.Now())
			time.Sleep(sweepEvery)
		}
		if synctest.Wait(); w.ledger.Held() || w.wakes == 0 {
			t.Errorf("nobody knows it: %+v", w.ledger.Allocations())
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
		want := kube.Taint{Key: "example.com/unhealthy", Value: "GPUUnhealthy", Effect: kube.NoSchedule}
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
		for _, s := range w.have {
			for _, d := range s.Devices {
				tainted += len(d.Taints)
			}
		}
		if tainted != 1 {
			t.Errorf("%d devices are tainted", tainted)
		}
	})
}

// No claim writes a slice.
func TestClaimsWriteNoSlices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 4, shared)
		defer w.run(shared)()
		before := w.writes
		for i := range 500 {
			c := w.claim(fmt.Sprint(i), kube.Result{Device: fmt.Sprintf("gpu-0000000%d-shared", i%4), Capacity: memoryOf(kube.Quantity(1 + i%16))})
			if _, err := w.Prepare(t.Context(), c); err != nil {
				t.Fatal(err)
			}
			w.lay(shared) // a round
			if err := w.Unprepare(t.Context(), c); err != nil {
				t.Fatal(err)
			}
			w.lay(shared)
			w.remove(c.Name)
		}
		time.Sleep(time.Hour)
		if synctest.Wait(); w.writes != before {
			t.Errorf("%d writes", w.writes-before)
		}
	})
}
