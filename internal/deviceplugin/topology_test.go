// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
	"example.com/gpu-agent/pkg/topology"
)

func nth(i int) gpu.UUID { return gpu.UUID(fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i)) }

// paired is eight GPUs of which each two neighbours are joined, four
// on each NUMA node; what they offer is of one kind.
func paired(name string, kind piece.Kind) *Offer {
	inv := &gpu.Inventory{}
	v := &Offer{Rank: map[gpu.UUID]int{}, Resources: []Resource{{Name: name, Kind: kind}}}
	for i := range 8 {
		u, numa := nth(i), i/4
		inv.GPUs = append(inv.GPUs, gpu.Device{Index: i, UUID: u, NUMA: &numa, Links: []gpu.Link{{To: i ^ 1, NVLink: 4}}})
		v.Rank[u] = i
		if kind == piece.KindWhole {
			v.Resources[0].Devices = append(v.Resources[0].Devices, Device{ID: string(u), GPU: u, Healthy: true})
			continue
		}
		for n := range perGPU {
			v.Resources[0].Devices = append(v.Resources[0].Devices, Device{ID: timeslice.ID(u, n), GPU: u, Healthy: true})
		}
	}
	v.Topology = topology.New(inv)
	return v
}

// take does what a kubelet does: it lets choose among what is healthy and nobody
// has, less what it may not use, and allocates that.
func take(t *testing.T, d *desk, resource string, n int, except ...int) string {
	t.Helper()
	held := map[string]bool{}
	for _, c := range d.Allocations() {
		for _, id := range c.IDs {
			held[id] = true
		}
	}
	var free []string
	devices, _ := d.List(resource)
	for _, dev := range devices {
		if dev.Healthy && !held[dev.ID] && !slices.ContainsFunc(except, func(i int) bool { return nth(i) == dev.GPU }) {
			free = append(free, dev.ID)
		}
	}
	got, err := d.Prefer(resource, free, nil, n)
	if err != nil {
		t.Fatalf("%d of %s: %v", n, resource, err)
	}
	if _, err := d.Allocate(resource, got); err != nil {
		t.Fatalf("what is preferred is refused: %v", err)
	}
	var gpus []string
	for _, id := range got {
		for i := range 8 {
			if strings.HasPrefix(id, string(nth(i))) {
				gpus = append(gpus, fmt.Sprint(i))
			}
		}
	}
	slices.Sort(gpus)
	return strings.Join(slices.Compact(gpus), " ")
}

// What is left for later requests is judged on the whole node, although a kubelet
// that aligns NUMA nodes lets choose among a part.
func TestWholeGPUsThatAreJoined(t *testing.T) {
	d, _ := newDesk()
	d.set(paired(gpuName, piece.KindWhole))
	for i, step := range []struct {
		n    int
		want string
	}{
		{1, "0"}, {3, "1 2 3"}, {2, "4 5"}, {2, "6 7"},
	} {
		if got := take(t, d, gpuName, step.n); got != step.want {
			t.Fatalf("request %d, for %d: GPUs %s, want %s", i, step.n, got, step.want)
		}
	}
}

func TestOneOfABrokenPair(t *testing.T) {
	d, _ := newDesk()
	d.set(paired(gpuName, piece.KindWhole))
	if _, err := d.Allocate(gpuName, []string{string(nth(3))}); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Allocate(gpuName, []string{string(nth(6))}); err != nil {
		t.Fatal(err)
	}
	if got := take(t, d, gpuName, 1, 2); got != "7" {
		t.Errorf("one GPU beside the broken pair 6-7: %s, want 7", got)
	}
	if got := take(t, d, gpuName, 1); got != "2" {
		t.Errorf("one GPU beside the broken pair 2-3: %s, want 2", got)
	}
}

// Shares go to GPUs that are in use already, then to the other half of a pair that
// is broken up, and only then break up another one.
func TestSharesGoToBrokenPairs(t *testing.T) {
	d, _ := newDesk()
	d.set(paired(memName, piece.KindUnits))
	if _, err := d.Allocate(memName, ids(nth(5), 0, 1, 2, 3, 4, 5)); err != nil {
		t.Fatal(err)
	}
	for i, step := range []struct {
		n    int
		want string
	}{
		{2, "5"}, // the fullest that has room
		{8, "4"}, // the other half of its pair
		{3, "6"}, // a new pair, of the NUMA node that is broken up
		{8, "7"}, // and the rest of it
		{8, "0"}, // a new node
		{4, "6"}, // the fullest that has room
	} {
		if got := take(t, d, memName, step.n); got != step.want {
			t.Fatalf("request %d, for %d units: GPU %s, want %s", i, step.n, got, step.want)
		}
	}

	d, _ = newDesk()
	d.set(paired(repName, piece.KindReplica))
	if _, err := d.Allocate(repName, ids(nth(3), 0)); err != nil {
		t.Fatal(err)
	}
	if got := take(t, d, repName, 2); got != "2 3" {
		t.Errorf("replicas of two GPUs: %s, want 2 and 3, of which one is shared already", got)
	}
}

// Where a GPU's list is told the NUMA node, the stream hears of it.
func TestNUMAIsNews(t *testing.T) {
	d, _ := newDesk()
	d.set(units(nil))
	_, changed := d.List(memName)
	d.set(units(nil))
	select {
	case <-changed:
		t.Error("the same list is news")
	default:
	}
	d.set(units(func(dev *Device) { dev.NUMA = NUMA{Node: 1, Known: true} }))
	select {
	case <-changed:
	default:
		t.Error("other NUMA nodes are no news")
	}
}

// An allocation of a MIG placement changes the lists of an offer and nothing else of it: GPUs
// that are joined are still given out together.
func TestTopologyIsKnownAfterAMIGAllocation(t *testing.T) {
	d, _ := newDesk()
	card := a100.card(t)
	v := paired(gpuName, piece.KindWhole)
	placed := onDemand(map[gpu.UUID]*mig.Card{gpuA: card}, nil)
	v.MIG, v.Resources = placed.MIG, append(v.Resources, placed.Resources...)
	d.set(v)
	if _, err := d.Allocate(gpuName, []string{string(nth(0))}); err != nil {
		t.Fatal(err)
	}
	key := allocate(t, d, on(gpuA, "1g.10gb@0")...)
	before := *d.Offer()
	if before.Topology != v.Topology {
		t.Error("after a MIG allocation the offer knows no topology")
	}
	// 2-3, 4-5 and 6-7 are the free pairs.
	if got := take(t, d, gpuName, 2); got != "2 3" {
		t.Errorf("two GPUs after a MIG allocation: %s, want the pair 2 3", got)
	}
	d.mu.Lock()
	d.endLocked(key)
	d.lists.showMoved()
	d.mu.Unlock()
	if after := d.Offer(); after.Gen == before.Gen || after.Topology != v.Topology {
		t.Errorf("after the allocation's end: generation %d, then %d, topology %p, want %p", before.Gen, after.Gen, after.Topology, v.Topology)
	}
}
