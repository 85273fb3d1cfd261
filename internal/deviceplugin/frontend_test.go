// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
	"example.com/gpu-agent/pkg/topology"
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

// desk is a front-end and its ledger, as one.
type desk struct {
	*FrontEnd
	*ledger.Ledger
}

// allocation is an allocation with what the front-end has seen of it.
type allocation struct {
	ledger.Allocation
	IDs     []string
	Started bool
}

func (d *desk) Allocations() (out []allocation) {
	for _, a := range d.Ledger.Allocations() {
		out = append(out, allocation{a, IDs(a.Grants), d.Started(a.ID)})
	}
	return out
}

func (d *desk) Prepare(ctx context.Context, resource string, ids []string) error {
	return d.FrontEnd.Prepare(ctx, resource, ids)
}

// SetReady opens an allocation, as after a look that found nobody on its devices.
func (d *desk) SetReady(c *allocation) bool {
	if c.Phase == ledger.Reserved {
		d.Looked(c.ID, c.Epoch, "", "")
	}
	return d.SetOpen(c.ID, c.Epoch)
}

// restore takes an allocation over as of a time, zero for one that is not known; file is
// when its CDI file was written.
func (d *desk) restore(r ledger.Record, taken, file time.Time) error {
	id := cdi.Key(r.Resource, IDs(r.Grants))
	err := d.FrontEnd.Found(id, r, taken, file)
	d.Filed(id, file)
	return err
}

func newDesk() (*desk, *clock) {
	c := &clock{t: time.Unix(1e9, 0)}
	return deskOf(c.now), c
}

func deskOf(now func() time.Time) *desk {
	l := ledger.New(func() {}, now)
	return &desk{New(l, now), l}
}

func holder(namespace, pod, container, uid string) ledger.Holder {
	return ledger.Holder{Pod: workload.Pod{Namespace: namespace, Name: pod, UID: uid}, Container: container}
}

// units is an offer of two GPUs in memory units; change may alter each device.
func units(change func(*Device)) *Offer {
	v := &Offer{Rank: map[gpu.UUID]int{gpuA: 0, gpuB: 1}, Resources: []Resource{{Name: memName, Kind: piece.KindUnits}}}
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

// set publishes an offer whatever the allocations are.
func (d *desk) set(v *Offer) { d.Publish(func([]ledger.Allocation) *Offer { return v }) }

// recordOf is what a record of devices says that nothing is known of but their IDs.
func recordOf(t testing.TB, resource string, ids []string) ledger.Record {
	t.Helper()
	r, err := RecordOf(resource, ids)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// keyOf is the key of what Allocate returns.
func keyOf(c ledger.Allocation, err error) (string, error) { return c.ID, err }

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
	wantErr(t, err, "no longer offered")
	d.set(units(func(dev *Device) {
		if dev.ID == timeslice.ID(gpuB, 7) {
			dev.Healthy, dev.Reason = false, "the GPU is being laid out anew"
		}
	}))
	_, err = d.Allocate(memName, append(ids(gpuA, 0), ids(gpuB, 0)...))
	wantErr(t, err, "a request lives on one GPU")
	_, err = d.Prefer(memName, append(ids(gpuA, 1, 2, 3), ids(gpuB, 0)...), nil, 4)
	wantErr(t, err, "the largest free block is 3 units, on "+string(gpuA))
	_, err = d.Prefer(memName, ids(gpuA, 1, 2, 3), nil, 9)
	wantErr(t, err, "no GPU of this node has more than 8")
	_, err = d.Allocate(memName, ids(gpuB, 7))
	wantErr(t, err, "being laid out anew")
	_, err = d.Allocate(memName, ids(gpuA, 8))
	wantErr(t, err, "not on offer")
	_, err = d.Allocate(memName, nil)
	wantErr(t, err, "no device")

	key, err := keyOf(d.Allocate(memName, ids(gpuA, 1, 0)))
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
	if n := len(d.Allocations()); n != 2 {
		t.Errorf("%d allocations, want 2: %+v", n, d.Allocations())
	}
}

func TestReplicasOfOneGPU(t *testing.T) {
	d, _ := newDesk()
	v := units(nil)
	v.Resources[0].Name, v.Resources[0].Kind = repName, piece.KindReplica
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
	d.set(&Offer{Rank: map[gpu.UUID]int{gpuB: 0, gpuA: 1}, Topology: topology.New(&gpu.Inventory{GPUs: []gpu.Device{{UUID: gpuB}, {Index: 1, UUID: gpuA}}}),
		Resources: []Resource{{Name: gpuName, Kind: piece.KindWhole, Devices: []Device{
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
	wantErr(t, err, "choose 2 GPUs: 1 are free")
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
	key, err := keyOf(d.Allocate(memName, ids(gpuA, 3, 4)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := d.Prepare(ctx, memName, ids(gpuA, 4, 3)); !errors.Is(err, ledger.ErrNotOpen) {
		t.Errorf("before the file stands: %v, want ledger.ErrNotOpen", err)
	}
	got := make(chan error)
	go func() { got <- d.Prepare(context.Background(), memName, ids(gpuA, 4, 3)) }()
	ready(d, key)
	if err := <-got; err != nil {
		t.Errorf("after it stands: %v", err)
	}
	if d.Unopened() {
		t.Error("an allocation waits for its file though all stand")
	}
	d.Shut(key)
	if !d.Unopened() {
		t.Error("no allocation waits for its file though one was withdrawn")
	}
	if err := d.Prepare(ctx, memName, ids(gpuA, 4, 3)); !errors.Is(err, ledger.ErrNotOpen) {
		t.Errorf("after it was withdrawn: %v, want ledger.ErrNotOpen", err)
	}
	// An allocation of before this process is taken over, an impossible one is not.
	if err := d.Prepare(ctx, memName, ids(gpuB, 1)); !errors.Is(err, ledger.ErrNotOpen) || len(d.Allocations()) != 2 {
		t.Errorf("unknown allocation: %v, %d allocations", err, len(d.Allocations()))
	}
	if err := d.Prepare(ctx, memName, []string{"../x"}); !errors.Is(err, ledger.ErrNotOpen) || len(d.Allocations()) != 2 {
		t.Errorf("a foreign ID: %v, %d allocations", err, len(d.Allocations()))
	}
}

// ready opens an allocation's gate as it stands now.
func ready(d *desk, key string) bool {
	for _, c := range d.Allocations() {
		if c.ID == key {
			return d.SetReady(&c)
		}
	}
	return false
}

// world is what the witnesses would say.
type world struct {
	entries []node.Entry
	uses    []Use
	listed  []node.Holding
	// What does not answer.
	noCheckpoint, noRuntime, noList bool
	// short says that PodResources is not asked.
	short bool
}

func (w *world) entry(pod, container string, ids []string) *world {
	w.entries = append(w.entries, node.Entry{PodUID: "uid-" + pod, Container: container, Resource: memName, IDs: ids})
	return w
}

func (w *world) list(pod string, ids []string) *world {
	w.listed = append(w.listed, node.Holding{Namespace: "ns", Pod: pod, Container: "c", Resource: memName, IDs: ids})
	return w
}

func (w *world) run(pod string, ids []string, created time.Time) *world {
	w.uses = append(w.uses, Use{ID: "id-" + pod, Key: cdi.Key(memName, ids), Holder: holder("ns", pod, "c", "uid-"+pod), Created: created})
	return w
}

// say is the world's testimony.
func (w *world) say(asked time.Time) Observation {
	t := Observation{Asked: asked, Entries: w.entries, Checkpoint: !w.noCheckpoint, Uses: w.uses, Runtime: !w.noRuntime,
		Listed: w.listed, List: !w.short, Trusted: !w.noList && !w.short}
	if w.noCheckpoint {
		t.Entries = nil
	}
	if w.noRuntime {
		t.Uses = nil
	}
	return t
}

func TestReconcile(t *testing.T) {
	type step struct {
		after    time.Duration
		allocate []string
		says     world
		// ended and left are numbers of allocations.
		ended, left int
	}
	a01, a012 := ids(gpuA, 0, 1), ids(gpuA, 0, 1, 2)
	start := time.Unix(1e9, 0)
	alone := func(pod string, ids []string) world {
		var w world
		return *w.run(pod, ids, start.Add(time.Millisecond))
	}
	running := func(pod string, ids []string) world {
		var w world
		return *w.run(pod, ids, start.Add(time.Millisecond)).entry(pod, "c", ids)
	}
	entry := func(ids []string) world { var w world; return *w.entry("p", "c", ids) }
	blind := func(w world) world { w.noCheckpoint = true; return w }
	for name, steps := range map[string][]step{
		"named by the checkpoint, then by none": {
			{allocate: a01, left: 1},
			{after: time.Second, says: entry(a01), left: 1},
			{after: Grace - 2*time.Second, left: 1},
			{after: time.Second, ended: 1},
		},
		"named by the runtime, then by none": {
			{allocate: a01, left: 1},
			{after: time.Second, says: running("p", a01), left: 1},
			{after: time.Second, ended: 1},
		},
		"a list that knows no pods yet does not keep what had a container": {
			{allocate: a01, left: 1},
			{after: time.Second, says: running("p", a01), left: 1},
			{after: time.Second, says: world{noList: true}, ended: 1},
		},
		"named by nobody is kept for the grace": {
			{allocate: a01, left: 1},
			{after: Grace - time.Second, left: 1},
			{after: time.Second, ended: 1},
		},
		"a witness that does not answer keeps everything": {
			{allocate: a01, left: 1},
			{after: time.Second, says: entry(a01), left: 1},
			{after: time.Hour, says: world{noRuntime: true}, left: 1},
			{after: time.Hour, says: world{noCheckpoint: true, noList: true}, left: 1},
			{after: time.Hour, ended: 1},
		},
		"the checkpoint is not enough, nor is the runtime": {
			{allocate: a01, left: 1},
			{after: time.Hour, says: alone("p", a01), left: 1},
			{after: time.Hour, says: entry(a01), left: 1},
			{after: time.Hour, ended: 1},
		},
		"what the kubelet lists counts where its checkpoint was overtaken": {
			{allocate: a01, left: 1},
			{after: time.Hour, says: *new(world).list("p", a01), left: 1},
			{after: time.Second, ended: 1},
		},
		"without a list, one that had no container is kept": {
			{allocate: a01, left: 1},
			{after: time.Hour, says: world{noList: true}, left: 1},
			{after: time.Second, ended: 1},
		},
		"an init container's allocation lives as long as its entry": {
			{allocate: a01, left: 1},
			{allocate: a012, left: 2},
			{after: time.Hour, says: *new(world).entry("p", "init", a01).entry("p", "app", a012), left: 2},
			{after: time.Second, ended: 2},
		},
		"of a pod that is gone, whose device another has": {
			{allocate: a01, left: 1},
			{after: time.Second, says: running("p", a01), left: 1},
			{allocate: ids(gpuA, 1, 2), says: entry(a01), left: 2},
			{after: time.Second, says: *new(world).entry("q", "c", ids(gpuA, 1, 2)), ended: 1, left: 1},
		},
		"allocated anew, judged anew": {
			{allocate: a01, left: 1},
			{after: time.Second, says: entry(a01), left: 1},
			{allocate: a01, left: 1},
			{after: Grace - time.Second, left: 1},
			{after: time.Second, ended: 1},
		},
		"an older container does not name the new holder": {
			{after: time.Minute, allocate: a01, left: 1},
			{after: time.Second, says: alone("before", a01), left: 1},
			{after: time.Second, left: 1},
		},
		"what was said before the allocation does not count": {
			{after: time.Second, allocate: a01, left: 1},
			{says: entry(a01), left: 1},
			{after: time.Second, left: 1},
		},
		"without a checkpoint, named by the list and then not": {
			{allocate: a01, says: world{noCheckpoint: true}, left: 1},
			{after: time.Second, says: blind(*new(world).list("p", a01)), left: 1},
			{after: time.Second, says: world{noCheckpoint: true, noList: true}, left: 1},
			{after: time.Second, says: world{noCheckpoint: true}, ended: 1},
		},
		"without a checkpoint, an init container's lives with the app container's": {
			{allocate: a01, says: world{noCheckpoint: true}, left: 1},
			{allocate: a012, says: world{noCheckpoint: true}, left: 2},
			{after: time.Hour, says: blind(*new(world).list("p", a012)), left: 2},
			{after: time.Second, says: world{noCheckpoint: true}, ended: 2},
		},
		"without a checkpoint, named by nobody is kept for ten minutes": {
			{allocate: a01, says: world{noCheckpoint: true}, left: 1},
			{after: UnnamedTTL - time.Second, says: world{noCheckpoint: true}, left: 1},
			{after: time.Second, says: world{noCheckpoint: true}, ended: 1},
		},
		"of before our time": {
			{says: *new(world).entry("p", "c", ids(gpuB, 5)).list("p", ids(gpuB, 5)), left: 1},
			{after: Grace, ended: 1},
		},
		"a name of ours with a foreign ID": {
			{says: *new(world).entry("p", "c", []string{"nvidia0"}).list("p", []string{"nvidia0"})},
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
				ended := d.Reconcile(s.says.say(clock.now()))
				if len(ended) != s.ended || len(d.Allocations()) != s.left {
					t.Fatalf("step %d: %d ended and %d left, want %d and %d", i, len(ended), len(d.Allocations()), s.ended, s.left)
				}
				for _, h := range s.says.listed {
					for _, c := range d.Allocations() {
						c.Holder.UID = "" // PodResources has none
						if want := holder(h.Namespace, h.Pod, h.Container, ""); c.ID == cdi.Key(h.Resource, h.IDs) && c.Holder != want {
							t.Errorf("step %d: holder %v, want %v", i, c.Holder, want)
						}
					}
				}
			}
		})
	}
}

// Allocations end in full looks: where PodResources was not asked, neither checkpoint and
// runtime together nor the time that has passed end one, also where a container
// had it.
func TestAShortLookEndsNoAllocation(t *testing.T) {
	d, clock := newDesk()
	d.set(units(nil))
	if _, err := d.Allocate(memName, ids(gpuA, 0)); err != nil {
		t.Fatal(err)
	}
	clock.pass(time.Second)
	d.Reconcile(new(world).run("p", ids(gpuA, 0), clock.now()).entry("p", "c", ids(gpuA, 0)).say(clock.now()))
	if c := d.Allocations(); len(c) != 1 || !c[0].Started {
		t.Fatalf("allocations %+v", c)
	}
	short := world{short: true}
	for range 3 {
		clock.pass(time.Hour)
		if ended := d.Reconcile(short.say(clock.now())); len(ended) != 0 {
			t.Fatalf("a short look ended %+v", ended)
		}
	}
	if ended := d.Reconcile(new(world).say(clock.now())); len(ended) != 1 {
		t.Errorf("a full look ended %+v, want the allocation", ended)
	}
}

// A container that lived for a moment, between two looks, has had its allocation: when
// both witnesses have let go it ends at once.
func TestSeenForAMoment(t *testing.T) {
	d, clock := newDesk()
	d.set(units(nil))
	key, err := keyOf(d.Allocate(memName, ids(gpuA, 0)))
	if err != nil {
		t.Fatal(err)
	}
	seen := func(created time.Time) {
		d.Seen(Use{Key: key, Holder: holder("ns", "p", "c", "uid-p"), Created: created}, clock.now())
	}
	ready(d, key)
	before := clock.now().Add(-time.Second)
	clock.pass(2 * time.Second)
	seen(before) // the one before
	if ended := d.Reconcile(new(world).say(clock.now())); len(ended) != 0 {
		t.Error("an older container's end was taken for this one's")
	}
	seen(clock.now())
	clock.pass(time.Second)
	if ended := d.Reconcile(new(world).say(clock.now())); len(ended) != 1 || ended[0].Holder.Name != "p" {
		t.Errorf("ended %+v, want the allocation of ns/p", ended)
	}
}

// The holder before, whose container is still there, is waited for; the pod's own
// containers are not.
func TestPreviousHolder(t *testing.T) {
	start := time.Unix(1e9, 0)
	mine, part, other := ids(gpuA, 0, 1), ids(gpuA, 1, 2), ids(gpuA, 5)
	for _, c := range []struct {
		name string
		// before is what the pod before has; its container still runs.
		before []string
		// again says that the pod's own container runs as well.
		again bool
		// adopted says that the agent has restarted meanwhile.
		adopted bool
		waits   string
	}{
		{name: "the same devices", before: mine, waits: "ns/before"},
		{name: "some of the devices", before: part, waits: "ns/before"},
		{name: "other devices", before: other},
		{name: "the same devices, after a restart", before: mine, adopted: true, waits: "ns/before"},
		{name: "some of the devices, after a restart", before: part, adopted: true, waits: "ns/before"},
		{name: "its own container", before: other, again: true},
		{name: "its own container, after a restart", before: other, again: true, adopted: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			d, clock := newDesk()
			d.set(units(nil))
			if _, err := d.Allocate(memName, c.before); err != nil {
				t.Fatal(err)
			}
			clock.pass(time.Minute)
			key, err := keyOf(d.Allocate(memName, mine))
			if err != nil {
				t.Fatal(err)
			}
			clock.pass(time.Second)
			if c.adopted {
				d, _ = newDesk()
				for _, had := range [][]string{c.before, mine} {
					if err := d.restore(recordOf(t, memName, had), time.Time{}, time.Time{}); err != nil {
						t.Fatal(err)
					}
				}
			}
			says := new(world).run("before", c.before, start.Add(time.Second)).entry("p", "c", mine)
			if c.again {
				says.run("p", mine, clock.now())
			}
			clock.pass(time.Second)
			d.Reconcile(says.say(clock.now()))
			ctx, cancel := context.WithCancel(context.Background())
			cancel()
			err = d.Prepare(ctx, memName, mine)
			if c.waits != "" {
				wantErr(t, err, "previous holder still ending: allocation "+cdi.Key(memName, c.before))
			}
			for _, allocation := range d.Allocations() {
				if allocation.ID == key && (allocation.After != c.waits || allocation.Phase == ledger.Reserved) {
					t.Errorf("waits for %q, checked at %s; want %q", allocation.After, allocation.Phase, c.waits)
				}
			}
			clock.pass(time.Second)
			d.Reconcile(new(world).entry("p", "c", mine).say(clock.now()))
			for _, allocation := range d.Allocations() {
				if allocation.ID == key && allocation.After != "" {
					t.Errorf("the container is gone and the allocation still waits for %s", allocation.After)
				}
			}
		})
	}
}

// After a restart a container's age says whose it is where the checkpoint cannot be read, but
// only of those with the allocation's own key: one of another allocation is in its way, however
// young it is.
func TestYoungerContainerOfAnotherIsWaitedFor(t *testing.T) {
	d, clock := newDesk()
	d.set(units(nil))
	mine, part := ids(gpuA, 0, 1), ids(gpuA, 1, 2)
	for _, had := range [][]string{mine, part} {
		if err := d.restore(recordOf(t, memName, had), clock.now(), clock.now()); err != nil {
			t.Fatal(err)
		}
	}
	clock.pass(time.Second)
	says := (&world{noCheckpoint: true}).run("other", part, clock.now())
	clock.pass(time.Second)
	d.Reconcile(says.say(clock.now()))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	wantErr(t, d.Prepare(ctx, memName, mine), "previous holder still ending: allocation "+cdi.Key(memName, part))
	if err := d.Prepare(ctx, memName, part); err != nil && strings.Contains(err.Error(), "previous holder") {
		t.Errorf("an allocation waits for its own container: %v", err)
	}
}

// A pod's Event names a pod of another namespace by its allocation's key, and so it does
// where the namespace of the pod itself is not known for sure.
func TestPreviousHolderOfAnotherTenantIsNotNamed(t *testing.T) {
	held, part := ids(gpuA, 0, 1), ids(gpuA, 1, 2)
	for _, c := range []struct {
		name, namespace string
		devices         []string
		// stale says that the checkpoint has not been written since the Allocate.
		listed, stale, named bool
	}{
		{name: "of the same namespace, by PodResources", namespace: "train", devices: held, listed: true, named: true},
		{name: "of the same namespace, by the checkpoint", namespace: "train", devices: part, named: true},
		{name: "of another namespace", namespace: "research", devices: held, listed: true},
		{name: "of another namespace, some of the devices", namespace: "research", devices: part},
		{name: "of nobody knows which", devices: part},
		{name: "named after the one before by a checkpoint of before", devices: held, stale: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			d, clock := newDesk()
			d.set(units(nil))
			old, err := keyOf(d.Allocate(memName, held))
			if err != nil {
				t.Fatal(err)
			}
			clock.pass(time.Second)
			use := Use{Key: old, Holder: holder("train", "job-1", "c", "uid-old"), Created: clock.now()}
			clock.pass(time.Minute)
			if _, err := d.Allocate(memName, c.devices); err != nil {
				t.Fatal(err)
			}
			clock.pass(time.Second)
			says := Observation{Asked: clock.now(), Checkpoint: true, Runtime: true, List: true, Trusted: true, Uses: []Use{use},
				Entries: []node.Entry{{PodUID: "uid-new", Container: "c", Resource: memName, IDs: c.devices}},
				Pods:    map[string]workload.Pod{"uid-old": {Namespace: "train", Name: "job-1"}}}
			if c.stale {
				says.Entries[0].PodUID = "uid-old"
			}
			if c.namespace != "" {
				says.Pods["uid-new"] = workload.Pod{Namespace: c.namespace, Name: "next"}
			}
			if c.listed {
				says.Listed = []node.Holding{{Namespace: c.namespace, Pod: "next", Container: "c", Resource: memName, IDs: c.devices}}
			}
			d.Reconcile(says)
			ctx, cancel := context.WithCancel(context.Background())
			cancel()
			err = d.Prepare(ctx, memName, c.devices)
			want := "previous holder still ending: allocation " + old
			if c.named {
				want = "previous holder still ending: train/job-1"
			}
			if err == nil || !strings.HasSuffix(err.Error(), want) {
				t.Errorf("the pod is told: %v, want ... %s", err, want)
			}
			for _, allocation := range d.Allocations() {
				if slices.Equal(allocation.IDs, c.devices) && allocation.After != "train/job-1" {
					t.Errorf("operators are told of %q, want the pod's name", allocation.After)
				}
			}
		})
	}
}

// An Allocate of an allocation that stands shuts its gate until somebody has looked.
func TestAllocateAgainShutsTheGate(t *testing.T) {
	d, clock := newDesk()
	d.set(units(nil))
	key, err := keyOf(d.Allocate(memName, ids(gpuA, 0)))
	if err != nil || !ready(d, key) {
		t.Fatal(err)
	}
	old := d.Allocations()[0]
	clock.pass(time.Second)
	if _, err := d.Allocate(memName, ids(gpuA, 0)); err != nil {
		t.Fatal(err)
	}
	if !d.Unopened() {
		t.Error("ready without a look")
	}
	if d.SetReady(&old) || !d.Unopened() {
		t.Error("a look of before the Allocate made it ready")
	}
	if !ready(d, key) || d.Unopened() {
		t.Error("a look of now did not make it ready")
	}
}

func TestFaults(t *testing.T) {
	d, _ := newDesk()
	d.set(units(nil))
	_, told := d.List(memName)
	d.SetFaults(map[gpu.UUID]string{gpuA: "Xid 79"}, nil)
	<-told
	check := func(when string, sick bool) {
		t.Helper()
		devs, _ := d.List(memName)
		if len(devs) != 2*perGPU {
			t.Fatalf("%s: %d devices", when, len(devs))
		}
		for _, dev := range devs {
			if want := !sick || dev.GPU != gpuA; dev.Healthy != want || !want && dev.Reason != "Xid 79" {
				t.Errorf("%s: %+v", when, dev)
			}
		}
	}
	check("at once", true)
	_, err := d.Allocate(memName, ids(gpuA, 0))
	wantErr(t, err, "Xid 79")
	_, told = d.List(memName)
	d.set(units(nil))
	d.SetFaults(map[gpu.UUID]string{gpuA: "Xid 79"}, nil)
	select {
	case <-told:
		t.Error("told of nothing new")
	default:
	}
	check("in the next offer", true)
	d.SetFaults(nil, nil)
	<-told
	check("after", false)
	before, told := d.List(memName)
	d.Resend(memName)
	<-told
	if after, _ := d.List(memName); &after[0] != &before[0] {
		t.Error("a list that is sent again is another slice")
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
	d.set(&Offer{Resources: []Resource{{Name: gpuName, Kind: piece.KindWhole}}})
	<-ch
	if devs, _ := d.List(memName); len(devs) != 0 {
		t.Errorf("%d devices of a resource that is gone", len(devs))
	}
	if v := d.Offer(); len(v.Resources) != 2 || v.Gen != 3 {
		t.Errorf("offer %+v, want both resources in generation 3", v)
	}
}

// Against the withdrawal of a GPU there are two outcomes: the allocation was first
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
		for _, c := range d.Allocations() {
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

// An offer never shows a device as nobody's that was given away while the offer
// was built.
func TestPublishBuildsAgain(t *testing.T) {
	d, _ := newDesk()
	d.set(units(nil))
	builds := 0
	v := d.Publish(func(allocations []ledger.Allocation) *Offer {
		if builds++; builds < publishTries {
			if _, err := d.Allocate(memName, ids(gpuA, builds)); err != nil {
				t.Fatal(err)
			}
		}
		return units(func(dev *Device) { dev.Healthy = len(allocations) == builds-1 })
	})
	if builds != publishTries || !v.Resources[0].Devices[0].Healthy || !same(d.Offer(), v) {
		t.Errorf("after %d builds the offer in force is not of the allocations as they are", builds)
	}
	// Allocations that never stop coming do not keep an offer from being published.
	builds = 0
	v = d.Publish(func([]ledger.Allocation) *Offer {
		builds++
		if _, err := d.Allocate(memName, ids(gpuB, builds)); err != nil {
			t.Fatal(err)
		}
		return units(nil)
	})
	if builds != publishTries || !same(d.Offer(), v) {
		t.Errorf("after %d builds, want %d: nothing was published, or not the last one", builds, publishTries)
	}
}

func ExampleFrontEnd() {
	d := deskOf(time.Now)
	d.set(units(nil))
	offer, _ := d.Prefer(memName, append(ids(gpuA, 0, 1, 2), ids(gpuB, 0, 1)...), nil, 2)
	key, err := keyOf(d.Allocate(memName, offer))
	fmt.Println(offer, err)
	fmt.Println(cdi.DeviceName("example.com", key))
	// Output:
	// [GPU-bbbbbbbb-0000-0000-0000-000000000000::0 GPU-bbbbbbbb-0000-0000-0000-000000000000::1] <nil>
	// example.com/gpu=5367ed5ad7076407
}

// same reports whether two offers are the same.
func same(a, b *Offer) bool {
	return slices.EqualFunc(a.Resources, b.Resources, func(x, y Resource) bool {
		return x.Name == y.Name && slices.Equal(x.Devices, y.Devices)
	})
}

// An allocation of an init container whose image is being pulled has been named by the
// checkpoint alone. That this cannot be read for a moment does not end it.
func TestNamedByTheCheckpointAlone(t *testing.T) {
	d, c := newDesk()
	d.set(units(nil))
	key, err := keyOf(d.Allocate(memName, ids(gpuA, 1)))
	if err != nil {
		t.Fatal(err)
	}
	c.pass(time.Second)
	d.Reconcile(Observation{Asked: c.now(), Checkpoint: true, Runtime: true, Trusted: true,
		Entries: []node.Entry{{PodUID: "u", Container: "init", Resource: memName, IDs: ids(gpuA, 1)}}})
	c.pass(time.Second)
	if ended := d.Reconcile(Observation{Asked: c.now(), Runtime: true, Trusted: true}); len(ended) != 0 {
		t.Errorf("allocation %s ended 2 s after its Allocate: the checkpoint could not be read once", key)
	}
}

// The entry of the pod before is not the word of a witness on the new one.
func TestNamedByTheEntryOfTheOneBefore(t *testing.T) {
	d, c := newDesk()
	d.set(units(nil))
	if _, err := d.Allocate(memName, ids(gpuA, 1)); err != nil {
		t.Fatal(err)
	}
	c.pass(time.Second)
	old := Observation{Asked: c.now(), Checkpoint: true, Runtime: true, Trusted: true,
		Entries: []node.Entry{{PodUID: "old", Container: "c", Resource: memName, IDs: ids(gpuA, 1)}}}
	d.Reconcile(old)
	c.pass(time.Second)
	if _, err := d.Allocate(memName, ids(gpuA, 1)); err != nil { // the next pod's
		t.Fatal(err)
	}
	c.pass(10 * time.Millisecond)
	old.Asked = c.now() // the kubelet has not written it again
	d.Reconcile(old)
	c.pass(10 * time.Millisecond)
	// Another resource's list makes it write, before it has taken our answer in.
	if ended := d.Reconcile(Observation{Asked: c.now(), Checkpoint: true, Runtime: true, Trusted: true}); len(ended) != 0 {
		t.Error("the new pod's allocation ended 20 ms after its Allocate")
	}
}

// An agent that starts again and again lets go of what nobody has: it goes by the
// age of the allocation's file, not by its own.
func TestAdoptedAllocationHasTheAgeOfItsFile(t *testing.T) {
	for _, tt := range []struct {
		name    string
		written time.Duration // before now; 0 where it is not known
		over    bool
	}{
		{"an old one", Grace + time.Second, true},
		{"one that was given a moment ago", Grace / 2, false},
		{"one of unknown age", 0, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d, clock := newDesk()
			written := time.Time{}
			if tt.written > 0 {
				written = clock.now().Add(-tt.written)
			}
			if err := d.restore(recordOf(t, memName, []string{"GPU-1::1"}), time.Time{}, written); err != nil {
				t.Fatal(err)
			}
			clock.pass(time.Second)
			ended := d.Reconcile(Observation{Asked: clock.now(), Checkpoint: true, Runtime: true, Trusted: true})
			if over := len(ended) == 1; over != tt.over {
				t.Errorf("it ended: %v, want %v", over, tt.over)
			}
			// Somebody has it: it stays, whatever its age.
			if err := d.restore(recordOf(t, memName, []string{"GPU-1::2"}), time.Time{}, clock.now().Add(-time.Hour)); err != nil {
				t.Fatal(err)
			}
			clock.pass(time.Second)
			ended = d.Reconcile(Observation{Asked: clock.now(), Checkpoint: true, Runtime: true, Trusted: true,
				Entries: []node.Entry{{PodUID: "u", Container: "c", Resource: memName, IDs: []string{"GPU-1::2"}}}})
			for _, c := range ended {
				if IDs(c.Grants)[0] == "GPU-1::2" {
					t.Error("an allocation that the checkpoint names has ended")
				}
			}
		})
	}
}

// A file that was written since the last Allocate says that the gate was open;
// one from before is of the holder before.
func TestWhoseFileItIs(t *testing.T) {
	for _, tt := range []struct {
		name    string
		written time.Duration // after the Allocate
		filed   bool
	}{
		{"of this holder", time.Millisecond, true},
		{"at the same moment", 0, true},
		{"of the holder before", -time.Millisecond, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d, clock := newDesk()
			d.set(units(nil))
			allocated := clock.now().Add(-time.Minute)
			if err := d.restore(recordOf(t, memName, ids(gpuA, 1)), allocated, time.Time{}); err != nil {
				t.Fatal(err)
			}
			if err := d.restore(recordOf(t, memName, ids(gpuA, 1)), time.Time{}, allocated.Add(tt.written)); err != nil {
				t.Fatal(err)
			}
			if got := d.Allocations()[0]; got.Fresh == tt.filed || got.Adopted {
				t.Errorf("the allocation is %+v, want that its file is its own: %v", got, tt.filed)
			}
			if _, err := d.Allocate(memName, ids(gpuA, 1)); err != nil {
				t.Fatal(err)
			}
			if !d.Allocations()[0].Fresh {
				t.Error("the file is of the next holder already")
			}
		})
	}
}

// The kubelet may give the same devices to two pods that live. Only one container is let
// through at a time; the other pod's waits until it has ended.
func TestDevicesOfTwoPods(t *testing.T) {
	devices := ids(gpuA, 0, 1)
	entry := func(uid string) node.Entry {
		return node.Entry{PodUID: uid, Container: "c", Resource: memName, IDs: devices}
	}
	both := []node.Entry{entry("uid-1"), entry("uid-2")}
	for name, began := range map[string]func(d *desk, look func(entries []node.Entry, running ...Use), allocate func()){
		"both are admitted before either starts": func(d *desk, look func([]node.Entry, ...Use), allocate func()) {
			allocate()
			allocate()
			look(both)
		},
		"the checkpoint names the second late": func(d *desk, look func([]node.Entry, ...Use), allocate func()) {
			allocate()
			allocate()
			look(both[:1])
			look(both)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := deskOf(time.Now)
				d.set(units(nil))
				var key string
				allocate := func() {
					var err error
					if key, err = keyOf(d.Allocate(memName, devices)); err != nil {
						t.Fatal(err)
					}
					time.Sleep(time.Second)
				}
				look := func(entries []node.Entry, running ...Use) {
					d.Reconcile(Observation{Asked: time.Now(), Checkpoint: true, Runtime: true, List: true, Trusted: true, Entries: entries, Uses: running})
					if a, _ := d.Get(key); a.Phase != ledger.Waiting {
						d.SetOpen(key, a.Epoch)
					}
					time.Sleep(time.Second)
				}
				began(d, look, allocate)
				// Each asks until it is let through.
				passed := 0
				ask := func() {
					ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
					defer cancel()
					if err := d.Prepare(ctx, memName, devices); err == nil {
						passed++
					}
				}
				is := func(when string, n int) {
					t.Helper()
					if synctest.Wait(); passed != n {
						t.Fatalf("%s: %d were let through, want %d", when, passed, n)
					}
				}
				told := func() string {
					ctx, cancel := context.WithCancel(t.Context())
					cancel()
					return fmt.Sprint(d.Prepare(ctx, memName, devices))
				}
				go ask()
				synctest.Wait()
				go ask()
				is("the gate is open", 1)
				look(both)
				is("the container is being created", 1)
				if got := told(); !strings.HasSuffix(got, "to another pod too, whose turn it is: a container that is about to be created") {
					t.Errorf("the pod is told: %s", got)
				}
				first := Use{ID: "1", Key: key, Holder: holder("train", "job-1", "c", "uid-1"), Created: time.Now()}
				time.Sleep(2 * Grace)
				look(both, first)
				is("it runs", 1)
				if got := told(); !strings.HasSuffix(got, "to another pod too, whose turn it is: allocation "+key) {
					t.Errorf("the pod is told: %s", got)
				}
				look(both)
				is("it has ended", 2)
				look(both, Use{ID: "2", Key: key, Holder: holder("train", "job-2", "c", "uid-2"), Created: time.Now()})
				go ask()
				is("the second runs, and the first starts anew", 2)
				look(both[:1])
				is("the second is gone", 3)
				go ask()
				is("the only one starts anew", 4)
				if a, _ := d.Get(key); a.Twice {
					t.Error("it is still held by two")
				}
			})
		})
	}
	// It was open, and somebody let through, when the kubelet gave it to another one.
	d, clock := newDesk()
	d.set(units(nil))
	key, err := keyOf(d.Allocate(memName, devices))
	if err != nil {
		t.Fatal(err)
	}
	use := Use{ID: "1", Key: key, Holder: holder("train", "job-1", "c", "uid-1"), Created: clock.now()}
	look := func(entries []node.Entry, uses ...Use) {
		clock.pass(time.Second)
		d.Reconcile(Observation{Asked: clock.now(), Checkpoint: true, Runtime: true, List: true, Trusted: true, Entries: entries, Uses: uses})
	}
	look(both[:1])
	if a, _ := d.Get(key); !d.SetOpen(key, a.Epoch) {
		t.Fatal("it does not open")
	}
	look(both, use)
	if a, _ := d.Get(key); a.Phase != ledger.Waiting || !strings.Contains(a.After, "train/job-1") {
		t.Errorf("it is %s, after %q", a.Phase, a.After)
	}
}

// What the kubelet has for an init container that has ended is told apart from what waits for its
// container: the pod is older than the allocation, and nothing else names the container.
func TestOfAnInitContainerThatHasEnded(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Observation)
		over   bool
	}{
		"ended":                         {func(*Observation) {}, true},
		"a pod that has not begun":      {func(o *Observation) { o.Began = nil }, false},
		"a sidecar that began after it": {func(o *Observation) { o.Began["uid"] = o.Asked }, false},
		"an app container": {func(o *Observation) {
			o.Listed = []node.Holding{{Namespace: "ns", Pod: "p", Container: "init", Resource: memName, IDs: o.Entries[0].IDs}}
		}, false},
		"it runs": {func(o *Observation) {
			o.Uses = []Use{{ID: "c", Key: cdi.Key(memName, o.Entries[0].IDs), Holder: holder("ns", "p", "init", "uid"), Created: o.Asked}}
		}, false},
		"a kubelet that does not know pods": {func(o *Observation) { o.Trusted = false }, false},
		"a checkpoint that cannot be read":  {func(o *Observation) { o.Checkpoint = false }, false},
		"two pods": {func(o *Observation) {
			o.Entries = append(o.Entries, node.Entry{PodUID: "other", Container: "c", Resource: memName, IDs: o.Entries[0].IDs})
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			d, clock := newDesk()
			d.Publish(func([]ledger.Allocation) *Offer { return units(nil) })
			ids := []string{timeslice.ID(gpuA, 0), timeslice.ID(gpuA, 1)}
			began := clock.now()
			clock.pass(time.Hour)
			a, err := d.Allocate(memName, ids)
			if err != nil {
				t.Fatal(err)
			}
			clock.pass(time.Minute)
			o := Observation{Asked: clock.now(), Checkpoint: true, Runtime: true, List: true, Trusted: true, Began: map[string]time.Time{"uid": began},
				Entries: []node.Entry{{PodUID: "uid", Container: "init", Resource: memName, IDs: ids}}, Pods: map[string]workload.Pod{"uid": {Namespace: "ns", Name: "p"}}}
			c.change(&o)
			d.Reconcile(o)
			if got := d.Over(a.ID); got != c.over {
				t.Errorf("its init container has ended: %v, want %v", got, c.over)
			}
			d.Reconcile(Observation{Asked: clock.now(), Checkpoint: true, Runtime: true, Entries: o.Entries, Pods: o.Pods})
			if got := d.Over(a.ID); got != c.over {
				t.Errorf("after a short look: %v, want %v", got, c.over)
			}
		})
	}
}
