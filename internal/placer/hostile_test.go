// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/tests/cost"
)

// A question may take so many trials on a node: of the pod alone, beside the others, of those that
// are to come, and of what is kept.
const mostTrials = 8

// cheap fails the test if a question costs more than so many MiB and trials.
func cheap(t *testing.T, what string, b *Books, mib uint64, do func()) {
	t.Helper()
	before := b.taken
	bytes := cost.Allocated(do)
	if steps := b.taken - before; bytes > mib<<20 || steps > mostTrials*maxSteps {
		t.Errorf("%s took %d MiB and %d steps, want at most %d and %d", what, bytes>>20, steps, mib,
			mostTrials*maxSteps)
	}
}

// plain is a node with GPUs of a kind.
func plain(kind piece.Kind, resource string, gpus, total int) *gpunode.Status {
	s := &gpunode.Status{Conditions: []gpunode.Condition{{Type: gpunode.Ready, Status: gpunode.True}}}
	for i := range gpus {
		s.GPUs = append(s.GPUs, gpunode.GPU{UUID: fmt.Sprintf("GPU-%d", i), Index: i, API: "device-plugin", Kind: kind,
			Resource: resource, Total: total, Free: total,
			Conditions: []gpunode.Condition{{Type: gpunode.Available, Status: gpunode.True}}})
	}
	return s
}

// table is a node whose cards have so many profiles of so many placements.
func table(t *testing.T, gpus, profiles, starts, size, memory int) *gpunode.Status {
	t.Helper()
	card := gpunode.Card{Name: "c", MemorySlices: memory}
	s := plain(piece.KindPlacement, "", gpus, 0)
	var offers []gpunode.Offer
	for i := range profiles {
		p := gpunode.Profile{Name: fmt.Sprintf("%dg.%dgb", i%7+1, i+1), ComputeSlices: i%7 + 1, MemorySlices: size}
		o := gpunode.Offer{Profile: p.Name, Resource: fmt.Sprintf("example.com/mig-%s", p.Name)}
		for at := range starts {
			p.Starts = append(p.Starts, at%(memory-size+1))
			o.Placements = append(o.Placements, fmt.Sprint(at%(memory-size+1)))
		}
		o.Free = o.Placements
		card.Profiles, offers = append(card.Profiles, p), append(offers, o)
	}
	s.Cards = []gpunode.Card{card}
	for i := range s.GPUs {
		s.GPUs[i].MIG = &gpunode.MIG{Card: "c", OnDemand: true, Offers: offers}
	}
	return s
}

// honest is a fleet of one node that works, and a check that a pod gets its place, there or on one
// that says that it has room.
func honest(t *testing.T) (b *Books, served func()) {
	t.Helper()
	b = New()
	b.SetNode("honest", plain(piece.KindUnits, memName, 2, 79), true)
	n := 0
	return b, func() {
		t.Helper()
		n++
		uid := fmt.Sprint("honest-", n)
		var at string
		var err error
		cheap(t, "a place for an honest pod", b, 32, func() {
			at, err = b.Place(context.Background(), units(uid, 1), []string{"hostile", "honest"}, start)
		})
		if at == "" {
			t.Errorf("an honest pod is placed on %q, %v", at, err)
		}
	}
}

// TestNumbersOfPodsSizeNothing: a pod is bound by whoever writes its nodeName, and asks for what he
// likes.
func TestNumbersOfPodsSizeNothing(t *testing.T) {
	for _, n := range []int{1 << 31, 1e7, 60_001, 5_000} {
		for _, resource := range []string{memName, repName, gpuName, "example.com/mig-1g.10gb",
			"example.com/mig-9g.99gb"} {
			b, served := honest(t)
			told, _ := h100(t)
			for _, name := range []string{"honest", "hostile"} {
				s := plain(piece.KindUnits, memName, 2, 79)
				if name == "hostile" {
					s.Cards = []gpunode.Card{*told}
					mig := plain(piece.KindPlacement, "", 1, 0).GPUs[0]
					mig.UUID, mig.MIG = "GPU-mig", &gpunode.MIG{Card: told.Name, OnDemand: true,
						Offers: []gpunode.Offer{{Profile: "1g.10gb", Resource: "example.com/mig-1g.10gb",
							Placements: []string{"0", "1"}, Free: []string{"0", "1"}}}}
					s.GPUs[0].Kind, s.GPUs[0].Resource = piece.KindReplica, repName
					s.GPUs[1].Kind, s.GPUs[1].Resource, s.GPUs[1].Total = piece.KindWhole, gpuName, 1
					s.GPUs = append(s.GPUs, mig)
				}
				b.SetNode(name, s, true)
			}
			for i := range 3 {
				p := asks(fmt.Sprint("huge-", i), resource, n)
				p.Node = []string{"honest", "hostile", "nowhere"}[i]
				cheap(t, "a bound pod", b, 8, func() { b.SetPod(p) })
			}
			cheap(t, fmt.Sprintf("a pod that asks for %d of %s", n, resource), b, 16, func() {
				if at, err := b.Place(context.Background(), asks("waits", resource, n), []string{"hostile", "honest"},
					start); err == nil {
					t.Errorf("it is placed on %s", at)
				}
			})
			served()
		}
	}
}

// TestManyPodsOnANode: with a thousand pods that are to come a question is refused or answered, and
// never goes on for long.
func TestManyPodsOnANode(t *testing.T) {
	for _, of := range []*gpunode.Status{plain(piece.KindUnits, memName, 128, 468),
		plain(piece.KindReplica, memName, 128, 468), table(t, 16, 16, 8, 1, 8)} {
		b, served := honest(t)
		if err := of.Check(); err != nil {
			t.Fatal(err)
		}
		b.SetNode("hostile", of, true)
		name := memName
		if of.Cards != nil {
			name = of.GPUs[0].MIG.Offers[0].Resource
		}
		for i := range 1000 {
			p := asks(fmt.Sprint("comes-", i), name, i%3+1)
			p.Node = "hostile"
			b.SetPod(p)
		}
		many := Pod{UID: "many", Namespace: "x", Name: "many"}
		for range 300 {
			many.Containers = append(many.Containers, Container{Requests: map[string]int{name: 1}})
		}
		cheap(t, "a pod of 300 containers", b, 128, func() {
			_, _ = b.Place(context.Background(), many, []string{"hostile"}, start)
		})
		served()
	}
}

// TestTablesOfNobody: a node may write any table that could be a card's.
func TestTablesOfNobody(t *testing.T) {
	for _, c := range []struct{ gpus, profiles, starts, size, memory int }{
		{1, 2, 64, 1, 64}, {128, 2, 64, 1, 64}, {128, 64, 2, 32, 64}, {128, 16, 8, 2, 64}, {128, 8, 16, 1, 16},
		{16, 32, 4, 1, 4},
	} {
		s := table(t, c.gpus, c.profiles, c.starts, c.size, c.memory)
		if err := s.Check(); err != nil {
			t.Fatal(err)
		}
		b, served := honest(t)
		cheap(t, "news of the node", b, 64, func() { b.SetNode("hostile", s, true) })
		of := func(i int) string { return s.GPUs[0].MIG.Offers[i%c.profiles].Resource }
		p := Pod{UID: "four", Namespace: "x", Name: "four"}
		for i := range 4 {
			p.Containers = append(p.Containers, Container{Requests: map[string]int{of(i): 2, of(i + 1): 1}})
		}
		what := fmt.Sprintf("%+v", c)
		cheap(t, what+": a pod of four containers", b, 256,
			func() { _, _ = b.Place(context.Background(), p, []string{"hostile"}, start) })
		for i := range 6 {
			q := asks(fmt.Sprint("comes-", i), of(i), 1)
			q.Node = "hostile"
			b.SetPod(q)
		}
		p.UID = "next"
		cheap(t, what+": beside six that are to come", b, 256,
			func() { _, _ = b.Place(context.Background(), p, []string{"hostile"}, start) })
		served()
	}
}

// TestCardsGoWithTheirNodes: what is known of a table goes with the last node that has it.
func TestCardsGoWithTheirNodes(t *testing.T) {
	b := New()
	for i := range 400 {
		s := table(t, 1, 8, 8, 1, 8)
		s.Cards[0].Profiles[0].Max = i + 1
		b.SetNode("a", s, true)
		b.Refresh(2)
		if len(b.cards) != 1 {
			t.Fatalf("after %d tables of one node %d are kept", i+1, len(b.cards))
		}
	}
	b.SetNode("b", table(t, 1, 8, 8, 1, 8), true)
	b.PassOver("a", "it is told so")
	b.DeleteNode("b")
	if len(b.cards) != 0 {
		t.Errorf("%d tables of no node are kept", len(b.cards))
	}
}

// TestANodeThatIsPassedOver says why, and is used again with the next news.
func TestANodeThatIsPassedOver(t *testing.T) {
	b := New()
	s := plain(piece.KindUnits, memName, 1, 79)
	b.SetNode("a", s, true)
	b.PassOver("a", "it says what cannot be")
	_, err := b.Place(context.Background(), units("1", 1), []string{"a"}, start)
	if no := new(Refusal); !errors.As(err, &no) || no.Nodes["a"] != "it says what cannot be" {
		t.Errorf("%v", err)
	}
	b.SetNode("a", s, true)
	if at, err := b.Place(context.Background(), units("1", 1), []string{"a"}, start); at != "a" {
		t.Error(err)
	}
}

// TestHoldOfAnyNumberOfPods: whoever writes a workload writes how many pods it has.
func TestHoldOfAnyNumberOfPods(t *testing.T) {
	b, served := honest(t)
	for _, n := range []int{MaxSeats + 1, 1e7, 1 << 31} {
		groups := []Group{{Containers: units("", 1).Containers, N: n, Among: []string{"honest"}}}
		cheap(t, fmt.Sprintf("a hold of %d pods", n), b, 8, func() {
			_, err := b.Hold("h", "x/h", groups, start)
			if no := new(Refusal); !errors.As(err, &no) || !strings.Contains(err.Error(), "at most 4096 pods") {
				t.Errorf("%v", err)
			}
			if b.holds.by["h"] != nil {
				t.Error("it is held all the same")
			}
		})
	}
	served()
}

// Who has gone gets no reservation, and the search for him ends.
func TestWhoHasGoneReservesNothing(t *testing.T) {
	b := New()
	b.SetNode("a", plain(piece.KindUnits, memName, 1, 79), true)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if at, err := b.Place(ctx, units("1", 79), []string{"a"}, start); !errors.Is(err, context.Canceled) {
		t.Errorf("placed on %q, %v", at, err)
	}
	if len(b.Reserved(start)) > 0 {
		t.Errorf("reserved: %v", b.Reserved(start))
	}
	if at, err := b.Place(context.Background(), units("2", 79), []string{"a"}, start); at != "a" {
		t.Error(err)
	}
}

// FuzzBooks tells books of any node and asks for any pod. An honest node beside it serves.
func FuzzBooks(f *testing.F) {
	for _, text := range []string{
		`{"node":{},"pods":[]}`,
		`{"node":{"conditions":[{"type":"Ready","status":"True"}],"gpus":[{"uuid":"GPU-1","api":"device-plugin",
			"kind":"units","resource":"example.com/gpu-mem","total":60000,"used":"0-59999",
			"conditions":[{"type":"Available","status":"True"}]}]},"pods":[[2147483647,1]]}`,
		`{"node":{"holdersIn":"GPUNode","gpus":[{"uuid":"GPU-1","api":"device-plugin","kind":"units","total":9,
			"holders":[{"namespace":"x","pod":"0","devices":"0-59999"}]}]},"pods":[[1]]}`,
		`{"node":{"conditions":[{"type":"Ready","status":"True"}],
			"cards":[{"name":"c","memorySlices":8,
				"profiles":[{"name":"1g.10gb","computeSlices":1,"memorySlices":1,"starts":[0,1,2,3,4,5,6,7]}]}],
			"gpus":[{"uuid":"GPU-1","api":"device-plugin","kind":"placement","mig":{"card":"c","onDemand":true,
				"offers":[{"profile":"1g.10gb","resource":"example.com/gpu-mem",
					"placements":["0","1"],"free":["0","1"]}]},
				"conditions":[{"type":"Available","status":"True"}]}]},"pods":[[1,1],[2],[4000000000]]}`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var in struct {
			Node gpunode.Status
			Pods [][]int // what each container asks for; those but the last are bound
		}
		if json.Unmarshal(text, &in) != nil || in.Node.Check() != nil || len(in.Pods) > 100 {
			return
		}
		b, served := honest(t)
		cheap(t, "news of the node", b, 64, func() { b.SetNode("hostile", &in.Node, true) })
		for i, containers := range in.Pods {
			p := Pod{UID: fmt.Sprint(i), Namespace: "x", Name: fmt.Sprint(i)}
			for _, n := range containers {
				if n > 0 {
					p.Containers = append(p.Containers,
						Container{Requests: map[string]int{memName: min(n, 1<<31-1)}, Init: n%5 == 4})
				}
			}
			if i < len(in.Pods)-1 {
				p.Node = "hostile"
				b.SetPod(p)
				continue
			}
			cheap(t, "a question", b, 256, func() {
				_, _ = b.Place(context.Background(), p, []string{"hostile", "honest"}, start)
				b.Refresh(2)
			})
			b.DeletePod(p.UID)
		}
		served()
		b.Lapsed(start.Add(time.Hour))
	})
}

// TestACrowdOfSmallPods holds and places hundreds of pods that ask for the same, which all go to a
// few nodes until these are full. What one of them costs must not grow with those before it. Before,
// a hold of 512 took 164 and 360 million steps, and half a minute in which nobody else was answered.
func TestACrowdOfSmallPods(t *testing.T) {
	for name, says := range map[string]*gpunode.Status{memName: plain(piece.KindUnits, memName, 8, 79),
		"example.com/mig-1g.1gb": table(t, 8, 7, 8, 1, 8)} {
		b := New()
		var among []string
		for i := range 100 {
			among = append(among, fmt.Sprint("node-", i))
			b.SetNode(among[i], says, true)
		}
		const crowd = 512
		for what, do := range map[string]func(){
			"hold": func() {
				at, err := b.Hold("h", "x/h",
					[]Group{{Containers: asks("", name, 1).Containers, N: crowd, Among: among}}, start)
				if err != nil || len(at[0]) != crowd {
					t.Errorf("%d of %s are held: %v", len(at[0]), name, err)
				}
				b.Drop("h")
			},
			"places": func() {
				for i := range crowd {
					if _, err := b.Place(t.Context(), asks(fmt.Sprint(i), name, 1), among, start); err != nil {
						t.Errorf("pod %d with %s: %v", i, name, err)
					}
				}
				for i := range crowd {
					b.DeletePod(fmt.Sprint(i))
				}
			},
		} {
			before := b.taken
			do()
			if each := (b.taken - before) / crowd; each > 100_000 {
				t.Errorf("%s of %d pods with %s: %d steps for each", what, crowd, name, each)
			}
		}
	}
}
