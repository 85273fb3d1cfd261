// SPDX-License-Identifier: Apache-2.0

package desk

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
)

const (
	memName = "example.com/gpu-mem"
	repName = "example.com/gpu.shared"
	gpuName = "example.com/gpu"
	gpuA    = gpu.UUID("GPU-aaaaaaaa-0000-0000-0000-000000000000")
	gpuB    = gpu.UUID("GPU-bbbbbbbb-0000-0000-0000-000000000000")
	perGPU  = 8
)

type clock struct {
	sync.Mutex
	t time.Time
}

func (c *clock) now() time.Time {
	c.Lock()
	defer c.Unlock()
	return c.t
}

func (c *clock) pass(d time.Duration) {
	c.Lock()
	defer c.Unlock()
	c.t = c.t.Add(d)
}

func newDesk() (*Desk, *clock) {
	c := &clock{t: time.Unix(1e9, 0)}
	return New(func() {}, c.now), c
}

// units is a view of two GPUs in memory units; change may alter each device.
func units(change func(*Device)) *View {
	v := &View{Rank: map[gpu.UUID]int{gpuA: 0, gpuB: 1}, Resources: []Resource{{Name: memName, Kind: Units}}}
	for _, u := range []gpu.UUID{gpuA, gpuB} {
		for n := range perGPU {
			dev := Device{ID: timeslice.ID(u, n), GPU: u, Healthy: true}
			if change != nil {
				change(&dev)
			}
			v.Resources[0].Devices = append(v.Resources[0].Devices, dev)
		}
	}
	return v
}

// set publishes a view whatever the claims are.
func (d *Desk) set(v *View) { d.Publish(func([]Claim) *View { return v }) }

func ids(u gpu.UUID, ns ...int) []string {
	out := make([]string, len(ns))
	for i, n := range ns {
		out[i] = timeslice.ID(u, n)
	}
	return out
}

func wantErr(t *testing.T, err error, part string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), part) {
		t.Errorf("error %v, want one that says %q", err, part)
	}
}

func TestAllocateRefusesOnlyWhatCannotWork(t *testing.T) {
	d, _ := newDesk()
	_, err := d.Allocate(memName, ids(gpuA, 0))
	wantErr(t, err, "not offered")
	d.set(units(func(dev *Device) {
		if dev.ID == timeslice.ID(gpuB, 7) {
			dev.Healthy, dev.Reason = false, "the GPU is being cut anew"
		}
	}))
	_, err = d.Allocate(memName, append(ids(gpuA, 0), ids(gpuB, 0)...))
	wantErr(t, err, "a request lives on one GPU")
	_, err = d.Prefer(memName, append(ids(gpuA, 1, 2, 3), ids(gpuB, 0)...), nil, 4)
	wantErr(t, err, "the largest free block is 3 units, on "+string(gpuA))
	_, err = d.Prefer(memName, ids(gpuA, 1, 2, 3), nil, 9)
	wantErr(t, err, "no GPU of this node has more than 8")
	_, err = d.Allocate(memName, ids(gpuB, 7))
	wantErr(t, err, "being cut anew")
	_, err = d.Allocate(memName, ids(gpuA, 8))
	wantErr(t, err, "not on offer")
	_, err = d.Allocate(memName, nil)
	wantErr(t, err, "no device")

	key, err := d.Allocate(memName, ids(gpuA, 1, 0))
	if err != nil {
		t.Fatal(err)
	}
	if want := cdi.Key(memName, ids(gpuA, 0, 1)); key != want {
		t.Errorf("key %s, want %s", key, want)
	}
	// The kubelet decides who holds an ID: an app container gets its pod's
	// init container's again, with others beside it or not.
	for _, again := range [][]string{ids(gpuA, 0, 1), ids(gpuA, 0, 1, 2)} {
		if _, err := d.Allocate(memName, again); err != nil {
			t.Errorf("allocate %v again: %v", again, err)
		}
	}
	if n := len(d.Claims()); n != 2 {
		t.Errorf("%d claims, want 2: %+v", n, d.Claims())
	}
}

func TestReplicasOfOneGPU(t *testing.T) {
	d, _ := newDesk()
	v := units(nil)
	v.Resources[0].Name, v.Resources[0].Kind = repName, Replicas
	d.set(v)
	if _, err := d.Allocate(repName, ids(gpuA, 0, 1)); err == nil {
		t.Error("two replicas of one GPU were granted")
	}
	if _, err := d.Allocate(repName, append(ids(gpuA, 0), ids(gpuB, 3)...)); err != nil {
		t.Errorf("replicas of two GPUs: %v", err)
	}
}

func TestPreferWhole(t *testing.T) {
	d, _ := newDesk()
	d.set(&View{Rank: map[gpu.UUID]int{gpuB: 0, gpuA: 1}, Resources: []Resource{{Name: gpuName, Kind: Whole, Devices: []Device{
		{ID: string(gpuB), GPU: gpuB, Healthy: true}, {ID: string(gpuA), GPU: gpuA, Healthy: true}}}}})
	got, err := d.Prefer(gpuName, []string{string(gpuA), string(gpuB)}, nil, 1)
	if err != nil || len(got) != 1 || got[0] != string(gpuB) {
		t.Errorf("prefer 1 of 2: %v, %v; want the first by rank", got, err)
	}
	got, err = d.Prefer(gpuName, []string{string(gpuA), string(gpuB)}, []string{string(gpuA)}, 1)
	if err != nil || len(got) != 1 || got[0] != string(gpuA) {
		t.Errorf("prefer with one required: %v, %v", got, err)
	}
	_, err = d.Prefer(gpuName, []string{string(gpuA)}, nil, 2)
	wantErr(t, err, "2 whole GPUs asked for and 1 are free")
}

// A leaving device is refused to anyone new, and given to the app container of
// the pod whose init container has just got it.
func TestLeaving(t *testing.T) {
	d, clock := newDesk()
	d.set(units(nil))
	if _, err := d.Allocate(memName, ids(gpuA, 0, 1)); err != nil {
		t.Fatal(err)
	}
	d.set(units(func(dev *Device) {
		if dev.GPU == gpuA {
			dev.Leaving, dev.Reason = true, "the partition changes"
		}
	}))
	if _, err := d.Allocate(memName, ids(gpuA, 0, 1)); err != nil {
		t.Errorf("the same pod's app container: %v", err)
	}
	_, err := d.Allocate(memName, ids(gpuA, 2))
	wantErr(t, err, "leaving")
	clock.pass(Grace)
	_, err = d.Allocate(memName, ids(gpuA, 0, 1))
	wantErr(t, err, "leaving")
}

func TestPrepareWaitsForTheFile(t *testing.T) {
	d, _ := newDesk()
	d.set(units(nil))
	key, err := d.Allocate(memName, ids(gpuA, 3, 4))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := d.Prepare(ctx, memName, ids(gpuA, 4, 3)); !errors.Is(err, ErrNotReady) {
		t.Errorf("before the file stands: %v, want ErrNotReady", err)
	}
	got := make(chan error)
	go func() { got <- d.Prepare(context.Background(), memName, ids(gpuA, 4, 3)) }()
	d.SetReady(key, true)
	if err := <-got; err != nil {
		t.Errorf("after it stands: %v", err)
	}
	if d.Waiting() {
		t.Error("a claim waits for its file though all stand")
	}
	d.SetReady(key, false)
	if !d.Waiting() {
		t.Error("no claim waits for its file though one was withdrawn")
	}
	if err := d.Prepare(ctx, memName, ids(gpuA, 4, 3)); !errors.Is(err, ErrNotReady) {
		t.Errorf("after it was withdrawn: %v, want ErrNotReady", err)
	}
	// A claim of before this process is taken over, an impossible one is not.
	if err := d.Prepare(ctx, memName, ids(gpuB, 1)); !errors.Is(err, ErrNotReady) || len(d.Claims()) != 2 {
		t.Errorf("unknown claim: %v, %d claims", err, len(d.Claims()))
	}
	if err := d.Prepare(ctx, memName, []string{"../x"}); !errors.Is(err, ErrNotReady) || len(d.Claims()) != 2 {
		t.Errorf("a foreign ID: %v, %d claims", err, len(d.Claims()))
	}
}

func TestReconcile(t *testing.T) {
	pod := func(name string) Holder { return Holder{Namespace: "ns", Pod: name, Container: "c"} }
	holding := func(name string, ids []string) []Holding {
		return []Holding{{Holder: pod(name), Resource: memName, IDs: ids}}
	}
	type step struct {
		after    time.Duration
		allocate []string
		listed   []Holding
		distrust bool
		// ended and left are numbers of claims.
		ended, left int
	}
	a01, a012 := ids(gpuA, 0, 1), ids(gpuA, 0, 1, 2)
	for name, steps := range map[string][]step{
		"named, then gone": {
			{allocate: a01, left: 1},
			{after: time.Second, listed: holding("p", a01), left: 1},
			{after: Grace, listed: holding("p", a01), left: 1},
			{after: time.Second, ended: 1},
		},
		"not judged within the grace": {
			{allocate: a01, left: 1},
			{after: time.Second, listed: holding("p", a01), left: 1},
			{after: Grace - 2*time.Second, left: 1},
			{after: time.Second, ended: 1},
		},
		"never named is kept for ten minutes": {
			{allocate: a01, left: 1},
			{after: UnnamedTTL - time.Second, left: 1},
			{after: time.Second, ended: 1},
		},
		"an untrusted listing ends nothing but names": {
			{allocate: a01, left: 1},
			{after: time.Hour, distrust: true, left: 1},
			{listed: holding("p", a01), distrust: true, left: 1},
			{distrust: true, left: 1},
			{ended: 1},
		},
		"an init container's claim lives with its pod's app container's": {
			{allocate: a01, left: 1},
			{allocate: a012, left: 2},
			{after: time.Hour, listed: holding("p", a012), left: 2},
			{after: time.Second, ended: 2},
		},
		"allocated anew, judged anew": {
			{allocate: a01, left: 1},
			{after: Grace, listed: holding("p", a01), left: 1},
			{allocate: a01, left: 1},
			{after: Grace, left: 1},
			{after: UnnamedTTL, ended: 1},
		},
		"of before our time": {
			{listed: holding("p", ids(gpuB, 5)), left: 1},
			{after: Grace, ended: 1},
		},
		"a name of ours with a foreign ID": {
			{listed: holding("p", []string{"nvidia0"})},
		},
	} {
		t.Run(name, func(t *testing.T) {
			d, clock := newDesk()
			d.set(units(nil))
			for i, s := range steps {
				clock.pass(s.after)
				if s.allocate != nil {
					if _, err := d.Allocate(memName, s.allocate); err != nil {
						t.Fatal(err)
					}
				}
				ended, _ := d.Reconcile(s.listed, !s.distrust, clock.now())
				if len(ended) != s.ended || len(d.Claims()) != s.left {
					t.Fatalf("step %d: %d ended and %d left, want %d and %d", i, len(ended), len(d.Claims()), s.ended, s.left)
				}
				for _, h := range s.listed {
					for _, c := range d.Claims() {
						if c.Key == cdi.Key(h.Resource, h.IDs) && c.Holder != h.Holder {
							t.Errorf("step %d: holder %v, want %v", i, c.Holder, h.Holder)
						}
					}
				}
			}
		})
	}
}

func TestPublishTellsOnlyWhoseListChanged(t *testing.T) {
	d, _ := newDesk()
	_, before := d.List(memName)
	d.set(units(nil))
	select {
	case <-before:
	default:
		t.Fatal("the first list was not announced")
	}
	devs, ch := d.List(memName)
	if len(devs) != 2*perGPU {
		t.Fatalf("%d devices", len(devs))
	}
	d.set(units(nil))
	select {
	case <-ch:
		t.Error("an equal list was announced")
	default:
	}
	// A resource that is offered no more stays, without devices.
	d.set(&View{Resources: []Resource{{Name: gpuName, Kind: Whole}}})
	<-ch
	if devs, _ := d.List(memName); len(devs) != 0 {
		t.Errorf("%d devices of a resource that is gone", len(devs))
	}
	if v := d.View(); len(v.Resources) != 2 || v.Gen != 3 {
		t.Errorf("view %+v, want both resources in generation 3", v)
	}
}

// Against the withdrawal of a GPU there are two outcomes: the claim was first
// and the loop sees it, or the withdrawal was first and Allocate refuses.
func TestWithdrawalRace(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range 500 {
		d, _ := newDesk()
		d.set(units(nil))
		var wg sync.WaitGroup
		granted := make([]bool, perGPU)
		for n := range perGPU {
			wg.Go(func() {
				_, err := d.Allocate(memName, ids(gpuA, n))
				granted[n] = err == nil
			})
		}
		if rng.IntN(2) == 0 {
			time.Sleep(time.Duration(rng.IntN(20)) * time.Microsecond)
		}
		d.set(units(func(dev *Device) { dev.Healthy, dev.Reason = dev.GPU != gpuA, "withdrawn" }))
		seen := map[string]bool{}
		for _, c := range d.Claims() {
			seen[c.IDs[0]] = true
		}
		wg.Wait()
		for n, g := range granted {
			if id := timeslice.ID(gpuA, n); g != seen[id] {
				t.Fatalf("round %d: device %d granted %v, seen by the loop after its withdrawal %v", i, n, g, seen[id])
			}
		}
	}
}

// A view never shows a device as nobody's that was given away while the view
// was built.
func TestPublishBuildsAgain(t *testing.T) {
	d, _ := newDesk()
	d.set(units(nil))
	builds := 0
	v := d.Publish(func(claims []Claim) *View {
		if builds++; builds < publishTries {
			if _, err := d.Allocate(memName, ids(gpuA, builds)); err != nil {
				t.Fatal(err)
			}
		}
		return units(func(dev *Device) { dev.Healthy = len(claims) == builds-1 })
	})
	if builds != publishTries || !v.Resources[0].Devices[0].Healthy || d.View() != v {
		t.Errorf("after %d builds the view in force is not of the claims as they are", builds)
	}
	// Claims that never stop coming do not keep a view from being published.
	builds = 0
	v = d.Publish(func([]Claim) *View {
		builds++
		if _, err := d.Allocate(memName, ids(gpuB, builds)); err != nil {
			t.Fatal(err)
		}
		return units(nil)
	})
	if d.View() != v {
		t.Error("nothing was published")
	}
}

func ExampleDesk() {
	d := New(func() {}, time.Now)
	d.set(units(nil))
	offer, _ := d.Prefer(memName, append(ids(gpuA, 0, 1, 2), ids(gpuB, 0, 1)...), nil, 2)
	key, err := d.Allocate(memName, offer)
	fmt.Println(offer, err)
	fmt.Println(cdi.DeviceName("example.com", key))
	// Output:
	// [GPU-bbbbbbbb-0000-0000-0000-000000000000::0 GPU-bbbbbbbb-0000-0000-0000-000000000000::1] <nil>
	// example.com/gpu=5367ed5ad7076407
}
