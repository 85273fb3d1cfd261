// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/timeslice"
)

var start = time.Unix(1e9, 0)

// units is a pod with one container that asks for memory units.
func units(uid string, n int) Pod { return asks(uid, memName, n) }

func asks(uid, resource string, n int) Pod {
	return Pod{UID: uid, Namespace: "x", Name: uid, Containers: []Container{{Requests: map[string]int{resource: n}}}}
}

// of is a fleet of machines with n GPUs of a kind each.
func of(kind piece.Kind, n, total int, names ...string) func(*testing.T) *fleet {
	return func(t *testing.T) *fleet {
		t.Helper()
		var makes []func(*rand.Rand) *machine
		for _, name := range names {
			makes = append(makes, func(r *rand.Rand) *machine { return newMachine(t, r, name, kind, n, total) })
		}
		return newFleet(t, 1, makes...)
	}
}

// placed wants a pod to be placed on a node.
func (f *fleet) wantPlaced(p Pod, node string) {
	f.t.Helper()
	if got, err := f.books.Place(context.Background(), p, f.names, f.now); err != nil || got != node {
		f.t.Fatalf("%s was placed on %q, want %q: %v", p.UID, got, node, err)
	}
}

func (f *fleet) wantRefused(p Pod, part string) {
	f.t.Helper()
	got, err := f.books.Place(context.Background(), p, f.names, f.now)
	if err == nil || !strings.Contains(err.Error(), part) {
		f.t.Fatalf("%s was placed on %q, error %v, want one that says %q", p.UID, got, err, part)
	}
}

func TestThreePodsOf50OnTwoGPUsOf79(t *testing.T) {
	f := of(piece.KindUnits, 2, 79, "a")(t)
	f.wantPlaced(units("1", 50), "a")
	f.wantPlaced(units("2", 50), "a")
	f.wantRefused(units("3", 50), "have not reported their devices yet")
	one, two := units("1", 50), units("2", 50)
	for i, p := range []*Pod{&one, &two} {
		p.Node = "a"
		f.books.SetPod(*p)
		for n := range 50 {
			p.Devices = append(p.Devices, timeslice.ID(f.machines["a"].gpus[i].uuid, n))
		}
		f.books.SetPod(*p)
	}
	f.wantRefused(units("3", 50), "none of 1 nodes has room: the largest free block of example.com/gpu-mem is 29, on a")
	f.books.DeletePod("2")
	f.wantPlaced(units("3", 50), "a")
}

// TestWhatEndsAReservation has one unit, which one pod at a time can have.
func TestWhatEndsAReservation(t *testing.T) {
	first, other := units("first", 8), units("other", 8)
	bound, nominated, done := first, first, first
	bound.Node, nominated.Nominated, done.Done = "a", "a", true
	for _, c := range []struct {
		name string
		do   func(f *fleet)
		free bool
	}{
		{"nothing", func(*fleet) {}, false},
		{"seen, and not bound", func(f *fleet) { f.books.SetPod(first) }, false},
		{"29 s", func(f *fleet) { f.now = f.now.Add(29 * time.Second) }, false},
		{"30 s", func(f *fleet) { f.now = f.now.Add(ReservedFor) }, true},
		{"30 s, and nominated", func(f *fleet) { f.books.SetPod(nominated); f.now = f.now.Add(time.Hour) }, false},
		{"nominated, then not", func(f *fleet) {
			f.books.SetPod(nominated)
			f.now = f.now.Add(time.Hour)
			f.books.SetPod(first)
		}, false}, // its reservation ends with the next question
		{"bound", func(f *fleet) { f.books.SetPod(bound); f.now = f.now.Add(time.Hour) }, false},
		{"done", func(f *fleet) { f.books.SetPod(done) }, true},
		{"gone", func(f *fleet) { f.books.DeletePod("first") }, true},
		{"bound and gone", func(f *fleet) { f.books.SetPod(bound); f.books.DeletePod("first") }, true},
		{"asked again for less", func(f *fleet) { f.wantPlaced(units("first", 2), "a") }, false},
		{"asked again elsewhere", func(f *fleet) {
			_, _ = f.books.Place(context.Background(), first, []string{"b"}, f.now)
		}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := of(piece.KindUnits, 1, 8, "a")(t)
			f.wantPlaced(first, "a")
			c.do(f)
			if c.name == "nominated, then not" {
				f.wantPlaced(other, "a")
				return
			}
			if _, err := f.books.Place(context.Background(), other, f.names, f.now); (err == nil) != c.free {
				t.Errorf("placed beside it: %v", err)
			}
		})
	}
}

// TestNothingIsPlacedWhere goes through what keeps pods off.
func TestNothingIsPlacedWhere(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*gpunode.Status)
		ready  bool
		room   bool
	}{
		{"all is well", func(*gpunode.Status) {}, true, true},
		{"the Node is not ready", func(*gpunode.Status) {}, false, false},
		{"the agent is not ready", func(s *gpunode.Status) { s.Conditions[0].Status = gpunode.False }, true, false},
		{"the agent says nothing of it", func(s *gpunode.Status) { s.Conditions = nil }, true, false},
		{"the GPU is not available",
			func(s *gpunode.Status) { s.GPUs[0].Conditions[0].Status = gpunode.False }, true, false},
		{"the GPU is cordoned", func(s *gpunode.Status) { s.GPUs[0].Cordoned = true }, true, false},
		{"the GPU goes through DRA", func(s *gpunode.Status) { s.GPUs[0].API = string(workload.DRA) }, true, false},
		{"the GPU is off", func(s *gpunode.Status) { s.GPUs[0] = gpunode.GPU{UUID: "GPU-a-0"} }, true, false},
		{"it is full", func(s *gpunode.Status) { s.GPUs[0].Used = piece.Set{{First: 0, Last: 7}} }, true, false},
		{"it has one unit", func(s *gpunode.Status) {
			s.GPUs[0].Used = piece.Set{{First: 0, Last: 3}, {First: 5, Last: 7}}
		}, true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := of(piece.KindUnits, 1, 8, "a")(t)
			says := f.machines["a"].says()
			c.change(says)
			f.books.SetNode("a", says, c.ready)
			if _, err := f.books.Place(context.Background(), units("p", 1), f.names, f.now); (err == nil) != c.room {
				t.Errorf("room %v, want %v: %v", err == nil, c.room, err)
			}
		})
	}
	f := of(piece.KindUnits, 1, 8, "a")(t)
	f.books.DeleteNode("a")
	f.wantRefused(units("p", 1), "no example.com/gpu-mem is free")
	if len(f.books.nodes) != 0 || len(f.books.pods) != 0 {
		t.Errorf("the books keep %v and %v", f.books.nodes, f.books.pods)
	}
}

// TestBestNodeSpoilsLeast has one question for each kind of device.
func TestBestNodeSpoilsLeast(t *testing.T) {
	f := of(piece.KindUnits, 2, 79, "a", "b", "c")(t)
	f.wantPlaced(units("1", 40), "a")
	f.wantPlaced(units("2", 60), "a") // on its empty GPU, which is as good as any other
	f.wantPlaced(units("3", 39), "b") // a has room only if its pods have come to lie well
	f.wantPlaced(units("4", 79), "b") // and not on c, where both are empty
	f.wantPlaced(units("5", 79), "c")

	f = of(piece.KindPlacement, 2, 0, "a", "b")(t)
	f.wantPlaced(asks("1", "example.com/mig-1g.10gb", 1), "a")
	f.wantPlaced(asks("2", "example.com/mig-7g.80gb", 1), "a")
	f.wantPlaced(asks("3", "example.com/mig-7g.80gb", 1), "b")
	f.wantPlaced(asks("4", "example.com/mig-7g.80gb", 1), "b")
	f.wantRefused(asks("5", "example.com/mig-7g.80gb", 1), "have not reported")
}

// TestPodsThatHoldANodeForThemselves: what init containers had comes again.
func TestPodsThatHoldANodeForThemselves(t *testing.T) {
	f := of(piece.KindUnits, 2, 8, "a")(t)
	p := units("p", 6)
	p.Containers = append([]Container{{Init: true, Requests: map[string]int{memName: 8}}}, p.Containers...)
	f.wantPlaced(p, "a")
	f.wantRefused(units("other", 1), "have not reported")
	p.Node = "a"
	if p.Devices, _ = f.machines["a"].admit(f.r, &p); len(p.Devices) != 8 {
		t.Fatalf("the pod has %v", p.Devices)
	}
	f.books.SetPod(p)
	f.wantPlaced(units("other", 8), "a")
	f.wantRefused(units("third", 1), "have not reported")
}

// requests are random sizes of pods, no pod larger than a GPU.
func requests(r *rand.Rand, n, largest int) (out []int) {
	for range n {
		out = append(out, 1+r.IntN(largest))
	}
	return out
}

// TestPackedDemand places 500 random requests on 4 nodes, 30 at a time. An offline optimum
// cannot have more than all units, nor more than all that is asked for, which is what the
// packed demand is held against.
func TestPackedDemand(t *testing.T) {
	for _, c := range []struct{ gpus, largest int }{{8, 79}, {8, 9}, {2, 79}, {4, 30}} {
		t.Run(fmt.Sprintf("gpus=%d/largest=%d", c.gpus, c.largest), func(t *testing.T) {
			f := of(piece.KindUnits, c.gpus, 79, "a", "b", "c", "d")(t)
			waiting := requests(f.r, 500, c.largest)
			demand := 0
			for _, n := range waiting {
				demand += n
			}
			f.fill(waiting)
			got, most := f.held(), min(demand, 4*c.gpus*79)
			if got*10 < most*9 {
				t.Errorf("%d units are held, of at most %d", got, most)
			}
			t.Logf("%d of %d; %v", got, most, f.count)
			// Half of the pods end, and others come.
			for _, uid := range slices.Sorted(maps.Keys(f.pods)) {
				if f.r.IntN(2) == 0 {
					f.machines[f.pods[uid].Node].end(f.r, uid)
					f.ended[uid] = true
				}
			}
			f.settle()
			f.fill(requests(f.r, 500, c.largest))
			if got, most := f.held(), 4*c.gpus*79; c.largest > 20 && got*10 < most*9 {
				t.Errorf("%d units are held after half of the pods had ended, of at most %d", got, most)
			}
		})
	}
}

// fill makes pods 30 at a time until no more find a place, those that wait first.
func (f *fleet) fill(waiting []int) {
	f.t.Helper()
	for again := true; again; {
		again = false
		for batch := range slices.Chunk(slices.Clone(waiting), 30) {
			for _, n := range batch {
				f.quiet = false
				if _, err := f.new(Container{Requests: map[string]int{memName: n}}); err == nil {
					i := slices.Index(waiting, n)
					waiting = slices.Delete(waiting, i, i+1)
					again = true
				}
			}
			f.settle()
		}
	}
}

// held is how many units pods have.
func (f *fleet) held() (n int) {
	for _, m := range f.machines {
		for _, d := range m.gpus {
			n += len(d.by)
		}
	}
	return n
}

// TestRefusalsNameEachNode is what a person reads of a pod that waits.
func TestRefusalsNameEachNode(t *testing.T) {
	f := of(piece.KindUnits, 1, 8, "a", "b")(t)
	f.books.SetNode("b", f.machines["b"].says(), false)
	_, err := f.books.Place(context.Background(), units("p", 9), append(f.names, "c"), f.now)
	var no *Refusal
	if !errors.As(err, &no) {
		t.Fatal(err)
	}
	want := map[string]string{
		"a": "no room for 9 of example.com/gpu-mem: the largest free block is 8",
		"b": "the node does not offer example.com/gpu-mem through the device plugin, or its agent is not ready",
		"c": "the node does not offer example.com/gpu-mem through the device plugin, or its agent is not ready",
	}
	if !maps.Equal(no.Nodes, want) || no.Waits {
		t.Errorf("%v", no.Nodes)
	}
	if got := err.Error(); got != "none of 3 nodes has room: the largest free block of example.com/gpu-mem is 8, on a" {
		t.Error(got)
	}
}

// BenchmarkPlace asks 1,000 nodes of 8 GPUs with 5,000 pods.
func BenchmarkPlace(b *testing.B) {
	for _, kind := range []piece.Kind{piece.KindUnits, piece.KindPlacement} {
		b.Run(string(kind), func(b *testing.B) {
			books, r := New(), rand.New(rand.NewPCG(1, 1))
			var names []string
			for i := range 1000 {
				m := newMachine(b, r, fmt.Sprintf("node-%d", i), kind, 8, 79)
				names = append(names, m.name)
				books.SetNode(m.name, m.says(), true)
				for j := range 5 {
					p := units(fmt.Sprintf("%d-%d", i, j), 1+r.IntN(79))
					if kind == piece.KindPlacement {
						p = asks(p.UID, "example.com/mig-2g.20gb", 1)
					}
					p.Node = m.name
					if ids, err := m.admit(r, &p); err == nil && j < 4 {
						p.Devices = ids
					}
					books.SetPod(p)
				}
				books.SetNode(m.name, m.says(), true)
			}
			p := units("new", 20)
			if kind == piece.KindPlacement {
				p = asks("new", "example.com/mig-3g.40gb", 1)
			}
			_, _ = books.Place(context.Background(), p, names, start)
			forget := map[string]func(*node){
				"asked before": func(*node) {},
				"never asked": func(n *node) {
					if n.room != nil && n.room.expected != nil {
						n.room.verdicts, n.room.expected.least = nil, nil
					}
				},
				"at the start": func(n *node) { n.room = nil },
			}
			for _, name := range slices.Sorted(maps.Keys(forget)) {
				b.Run(name, func(b *testing.B) {
					b.ReportAllocs()
					for b.Loop() {
						b.StopTimer()
						for _, n := range books.nodes {
							forget[name](n)
						}
						b.StartTimer()
						if _, err := books.Place(context.Background(), p, names, start); err != nil {
							b.Fatal(err)
						}
					}
				})
			}
		})
	}
}

// BenchmarkHold has room held for as many pods as a hold may be for, on 200 nodes of 8 GPUs: the
// placer answers nobody else meanwhile.
func BenchmarkHold(b *testing.B) {
	for kind, one := range map[piece.Kind][]Container{piece.KindUnits: units("", 3).Containers,
		piece.KindPlacement: asks("", "example.com/mig-1g.10gb", 1).Containers} {
		b.Run(string(kind), func(b *testing.B) {
			books, r := New(), rand.New(rand.NewPCG(1, 1))
			var names []string
			for i := range 200 {
				m := newMachine(b, r, fmt.Sprintf("node-%d", i), kind, 8, 79)
				names = append(names, m.name)
				books.SetNode(m.name, m.says(), true)
			}
			groups := []Group{{Containers: one, N: MaxSeats, Among: names}}
			for b.Loop() {
				if _, err := books.Hold("h", "x/h", groups, start); err != nil {
					b.Fatal(err)
				}
				books.Drop("h")
			}
		})
	}
}
