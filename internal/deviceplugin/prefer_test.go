// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
)

// node is a kubelet and a runtime of one resource: what the kubelet has given out,
// and what containers run. A pod that is deleted by force gives up its devices,
// and its container hangs.
type testNode struct {
	t        *testing.T
	d        *desk
	clock    *clock
	resource string
	held     map[string]bool
	says     world
	pods     int
}

func newNode(t *testing.T, v *Offer) *testNode {
	d, clock := newDesk()
	d.set(v)
	return &testNode{t: t, d: d, clock: clock, resource: v.Resources[0].Name, held: map[string]bool{}}
}

// free is what the kubelet lets choose among.
func (n *testNode) free() (out []string) {
	devices, _ := n.d.List(n.resource)
	for _, dev := range devices {
		if dev.Healthy && !n.held[dev.ID] {
			out = append(out, dev.ID)
		}
	}
	return out
}

// pod starts one with as many devices, of its init container's the first ones, and
// says who it waits for.
func (n *testNode) pod(count int, init ...string) (ids []string, waits string) {
	n.t.Helper()
	ids, err := n.d.Prefer(n.resource, append(n.free(), init...), init, count)
	if err != nil {
		n.t.Fatalf("%d of %s: %v", count, n.resource, err)
	}
	if _, err := n.d.Allocate(n.resource, ids); err != nil {
		n.t.Fatalf("what is preferred is refused: %v", err)
	}
	n.pods++
	name := fmt.Sprint("pod-", n.pods)
	for _, id := range ids {
		n.held[id] = true
	}
	n.clock.pass(time.Second)
	n.says.entries = append(n.says.entries, node.Entry{PodUID: "uid-" + name, Container: "c", Resource: n.resource, IDs: ids})
	n.d.Reconcile(n.says.say(n.clock.now()))
	for _, c := range n.d.Allocations() {
		if c.ID == cdi.Key(n.resource, ids) {
			waits = c.After
		}
	}
	n.says.uses = append(n.says.uses, Use{Key: cdi.Key(n.resource, ids), Holder: holder("ns", name, "c", "uid-"+name), Created: n.clock.now()})
	n.clock.pass(time.Second)
	return ids, waits
}

// hang is a pod with these devices that is deleted by force.
func (n *testNode) hang(ids ...string) {
	n.t.Helper()
	if _, err := n.d.Allocate(n.resource, ids); err != nil {
		n.t.Fatal(err)
	}
	n.clock.pass(time.Second)
	n.says.uses = append(n.says.uses, Use{Key: cdi.Key(n.resource, ids), Holder: holder("ns", "old", "c", "uid-old"), Created: n.clock.now()})
	n.d.Reconcile(n.says.say(n.clock.now()))
	n.clock.pass(time.Second)
}

// A pod that was deleted by force leaves its GPU to a container that hangs. The
// next pods get the other seven, and start; only the eighth waits.
func TestPreferAvoidsTheGPUOfAHangingContainer(t *testing.T) {
	for _, kind := range []piece.Kind{piece.KindWhole, piece.KindUnits, piece.KindReplica} {
		name, all := gpuName, []string{string(nth(0))}
		if kind != piece.KindWhole {
			all = ids(nth(0), 0, 1, 2, 3, 4, 5, 6, 7)
			name = map[piece.Kind]string{piece.KindUnits: memName, piece.KindReplica: repName}[kind]
		}
		t.Run(name, func(t *testing.T) {
			n := newNode(t, paired(name, kind))
			count := 1
			switch kind {
			case piece.KindUnits:
				n.hang(all...)
				count = perGPU
			case piece.KindReplica:
				for _, id := range all {
					n.hang(id)
				}
			default:
				n.hang(all...)
			}
			pods := 7
			if kind == piece.KindReplica {
				pods *= perGPU
			}
			for i := range pods {
				if got, waits := n.pod(count); waits != "" {
					t.Fatalf("pod %d gets %v with idle GPUs beside it, and waits for %s", i+1, got, waits)
				}
			}
			got, waits := n.pod(count)
			if !slices.Contains(all, got[0]) || waits != "ns/old" {
				t.Errorf("the last pod gets %v and waits for %q, want %v and ns/old", got, waits, all)
			}
		})
	}
}

// Where too few devices without an allocation remain, the request gets all of these, of
// one GPU where that must be, and as few others as it needs.
func TestPreferTakesNoMoreAllocationedDevicesThanItNeeds(t *testing.T) {
	whole := func(of ...int) (out []string) {
		for _, i := range of {
			out = append(out, string(nth(i)))
		}
		return out
	}
	for _, c := range []struct {
		name       string
		offer      *Offer
		hang       [][]string
		init, want []string
		n          int
	}{
		{name: "whole GPUs", offer: paired(gpuName, piece.KindWhole), hang: [][]string{whole(0), whole(1), whole(4)}, n: 7,
			want: whole(0, 1, 2, 3, 5, 6, 7)},
		{name: "whole GPUs that an init container had", offer: paired(gpuName, piece.KindWhole), hang: [][]string{whole(0), whole(3)}, init: whole(2), n: 2,
			want: whole(1, 2)},
		{name: "units of a GPU that has enough", offer: units(nil), hang: [][]string{ids(gpuA, 0, 1, 2)}, n: 5, want: ids(gpuA, 3, 4, 5, 6, 7)},
		{name: "units of another GPU", offer: units(nil), hang: [][]string{ids(gpuA, 0, 1, 2)}, n: 6, want: ids(gpuB, 0, 1, 2, 3, 4, 5)},
		{name: "units of the GPU that lacks least", offer: units(nil), hang: [][]string{ids(gpuA, 0, 1, 2, 3, 4), ids(gpuB, 5, 6, 7)}, n: 6,
			want: ids(gpuB, 0, 1, 2, 3, 4, 5)},
		{name: "units beside an init container's", offer: units(nil), hang: [][]string{ids(gpuA, 2, 3)}, init: ids(gpuA, 0, 1), n: 4,
			want: ids(gpuA, 0, 1, 4, 5)},
		{name: "more units than are idle beside an init container's", offer: units(nil), hang: [][]string{ids(gpuA, 2, 3)}, init: ids(gpuA, 0, 1), n: 7,
			want: ids(gpuA, 0, 1, 2, 4, 5, 6, 7)},
		{name: "replicas", offer: paired(repName, piece.KindReplica), hang: [][]string{ids(nth(0), 0)}, n: 1, want: ids(nth(0), 1)},
		{name: "a replica of every GPU", offer: paired(repName, piece.KindReplica), hang: [][]string{ids(nth(5), 0), ids(nth(5), 1), ids(nth(5), 2), ids(nth(5), 3),
			ids(nth(5), 4), ids(nth(5), 5), ids(nth(5), 6), ids(nth(5), 7)}, n: 8, want: append(append(append(append(append(append(append(ids(nth(0), 0),
			ids(nth(1), 0)...), ids(nth(2), 0)...), ids(nth(3), 0)...), ids(nth(4), 0)...), ids(nth(5), 0)...), ids(nth(6), 0)...), ids(nth(7), 0)...)},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t, c.offer)
			for _, h := range c.hang {
				n.hang(h...)
			}
			if c.init != nil {
				if _, err := n.d.Allocate(n.resource, c.init); err != nil {
					t.Fatal(err)
				}
			}
			got, err := n.d.Prefer(n.resource, n.free(), c.init, c.n)
			slices.Sort(got)
			if err != nil || !slices.Equal(got, c.want) {
				t.Errorf("prefers %v, %v; want %v", got, err, c.want)
			}
		})
	}
}

// A leaving device that the kubelet offers, since the pod that had it was deleted
// by force, refuses no pod while another device is there.
func TestPreferNeverChoosesALeavingDevice(t *testing.T) {
	for _, kind := range []piece.Kind{piece.KindWhole, piece.KindUnits, piece.KindReplica} {
		name := map[piece.Kind]string{piece.KindWhole: gpuName, piece.KindUnits: memName, piece.KindReplica: repName}[kind]
		t.Run(name, func(t *testing.T) {
			v := paired(name, kind)
			leaving := func(dev *Device) bool { return dev.GPU == nth(0) }
			held := []string{v.Resources[0].Devices[0].ID}
			n := newNode(t, v)
			n.hang(held...)
			next := paired(name, kind)
			for i := range next.Resources[0].Devices {
				if dev := &next.Resources[0].Devices[i]; leaving(dev) {
					dev.Leaving, dev.Reason = true, "the partition changes"
				}
			}
			n.d.set(next)
			n.clock.pass(Grace) // it is nobody's init container's
			for range 7 {
				if got, _ := n.pod(1); leaving(&Device{GPU: gpu.UUID(got[0][:len(nth(0))])}) {
					t.Fatalf("it prefers %s", got[0])
				}
			}
			// Nothing else is there: the refusal says what the kubelet has not heard.
			_, err := n.d.Prefer(name, held, nil, 1)
			wantErr(t, err, "device "+held[0]+" is leaving: the partition changes")
			// What an init container has had is not asked about.
			if got, err := n.d.Prefer(name, held, held, 1); err != nil || !slices.Equal(got, held) {
				t.Errorf("with a leaving device that must be there: %v, %v", got, err)
			}
		})
	}
}

// Whatever is allocated, leaving or withdrawn: what is preferred is granted, and no
// choice has fewer allocated devices.
func TestPreferWalk(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	chosen := 0
	rounds := 3000
	if testing.Short() {
		rounds = 750 // make test-all has all
	}
	for round := range rounds {
		kind := []piece.Kind{piece.KindWhole, piece.KindUnits, piece.KindReplica}[rng.IntN(3)]
		name := map[piece.Kind]string{piece.KindWhole: gpuName, piece.KindUnits: memName, piece.KindReplica: repName}[kind]
		d, clock := newDesk()
		v := paired(name, kind)
		r := &v.Resources[0]
		if kind != piece.KindWhole { // so that there is little to choose from
			r.Devices = slices.DeleteFunc(r.Devices, func(Device) bool { return rng.IntN(2) == 0 })
		}
		d.set(v)
		allocated := map[string]bool{}
		for i := range r.Devices {
			if id := r.Devices[i].ID; rng.IntN(3) == 0 {
				if _, err := d.Allocate(name, []string{id}); err != nil {
					t.Fatal(err)
				}
				allocated[id] = true
			}
		}
		clock.pass(Grace)
		next := *v
		next.Resources = []Resource{{Name: name, Kind: kind, Devices: slices.Clone(r.Devices)}}
		r = &next.Resources[0]
		idle, all := map[gpu.UUID]int{}, map[gpu.UUID]int{}
		var available []string
		for i := range r.Devices {
			dev := &r.Devices[i]
			dev.Leaving, dev.Healthy = rng.IntN(6) == 0, rng.IntN(6) != 0
			available = append(available, dev.ID)
			if dev.Healthy && !dev.Leaving {
				all[dev.GPU]++
				if !allocated[dev.ID] {
					idle[dev.GPU]++
				}
			}
		}
		d.set(&next)
		rng.Shuffle(len(available), func(i, j int) { available[i], available[j] = available[j], available[i] })
		n := 1 + rng.IntN(5)
		least := leastAllocationed(kind, n, idle, all)
		got, err := d.Prefer(name, available, nil, n)
		if (err == nil) != (least >= 0) {
			t.Fatalf("round %d: %d of %s, idle %v of %v: %v, %v; want %d allocated devices (-1: refused)", round, n, name, idle, all, got, err, least)
		}
		if err != nil {
			continue
		}
		chosen++
		have := 0
		for _, id := range got {
			if allocated[id] {
				have++
			}
		}
		if have != least || len(got) != n {
			t.Fatalf("round %d: %d of %s: %v has %d allocated devices, and %d would do", round, n, name, got, have, least)
		}
		if _, err := d.Allocate(name, got); err != nil {
			t.Fatalf("round %d: what is preferred is refused: %v", round, err)
		}
	}
	if chosen < rounds/3 {
		t.Errorf("only %d requests could be served: the walk tries too little", chosen)
	}
}

// leastTaken is how many allocated devices a request needs at least, -1 where it
// cannot be served.
func leastAllocationed(kind piece.Kind, n int, idle, all map[gpu.UUID]int) int {
	least := -1
	switch kind {
	case piece.KindUnits:
		for u := range all {
			if need := max(0, n-idle[u]); all[u] >= n && (least < 0 || need < least) {
				least = need
			}
		}
	default: // one of each GPU
		if len(all) >= n {
			least = max(0, n-len(idle))
		}
	}
	return least
}
