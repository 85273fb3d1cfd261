// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/piece"
)

// group is n pods with one container that asks for something.
func (f *fleet) group(n int, resource string, amount int) Group {
	return Group{N: n, Containers: asks("", resource, amount).Containers, Among: f.names}
}

// of makes a pod one of a hold's.
func (p Pod) of(hold string) Pod {
	p.Hold = hold
	return p
}

func (f *fleet) wantHeld(id, nodes string, groups ...Group) {
	f.t.Helper()
	at, err := f.books.Hold(id, "x/"+id, groups, f.now)
	if got := fmt.Sprint(at); err != nil || got != nodes {
		f.t.Fatalf("%s is held on %s, want %s: %v", id, got, nodes, err)
	}
}

func (f *fleet) wantNotHeld(id, part string, groups ...Group) *Refusal {
	f.t.Helper()
	at, err := f.books.Hold(id, "x/"+id, groups, f.now)
	var no *Refusal
	if !errors.As(err, &no) || !strings.Contains(err.Error(), part) {
		f.t.Fatalf("%s is held on %v: %v, want %q", id, at, err, part)
	}
	return no
}

// give lets a pod come to a node and have its devices, and tells the books.
func (f *fleet) give(p Pod, node string) {
	f.t.Helper()
	m := f.machines[node]
	p.Node = node
	ids, err := m.admit(f.r, &p)
	if err != nil {
		f.t.Fatal(err)
	}
	p.Devices = ids
	f.books.SetPod(p)
	f.books.SetNode(node, m.says(), true)
}

func TestAGroupIsHeldAsAWhole(t *testing.T) {
	f := of(piece.KindUnits, 2, 79, "a", "b")(t)
	no := f.wantNotHeld("g", "room for 4 of 5 pods", f.group(5, memName, 50))
	if no.Found != 4 || no.Of != 5 || no.Largest[memName].N != 29 {
		t.Errorf("%+v", no)
	}
	if len(f.books.Holds()) != 0 {
		t.Fatal("something of a hold that was refused is left")
	}
	for _, n := range f.books.nodes {
		if len(n.here) != 0 {
			t.Fatalf("something of a hold that was refused is left: %v", n.here)
		}
	}
	f.wantHeld("g", "[[a a b b]]", f.group(4, memName, 50))
	f.wantHeld("g", "[[a a b b]]", f.group(4, memName, 50)) // asked for again
	f.wantRefused(units("other", 50), "the rest is held for others")
	var refusal *Refusal
	if _, err := f.books.Place(context.Background(), units("other", 50), f.names, f.now); !errors.As(err, &refusal) ||
		!strings.Contains(refusal.Nodes["a"], "held for pods to come of x/g") {
		t.Errorf("%v: %+v", err, refusal)
	}
	f.wantPlaced(units("small", 29), "a")
	f.books.Drop("g")
	f.books.Drop("g")
	f.wantPlaced(units("other", 50), "a")
}

// TestMembersUseWhatIsHeld goes through the lives of a hold and its pods.
func TestMembersUseWhatIsHeld(t *testing.T) {
	f := of(piece.KindUnits, 1, 79, "a", "b", "c")(t)
	f.wantHeld("g", "[[a b]]", f.group(2, memName, 79))
	if !f.books.HasRoom(units("", 79).of("g"), "a") || f.books.HasRoom(units("", 79), "a") {
		t.Error("what is held is for members alone")
	}
	if err := f.books.Fits(units("m", 79).of("g"), "a", nil, f.now); err != nil {
		t.Error(err)
	}
	if f.books.Fits(units("x", 79), "a", nil, f.now) == nil {
		t.Error("Fits gives away what is held")
	}
	f.wantPlaced(units("m1", 79).of("g"), "a")
	f.wantPlaced(units("m1", 79).of("g"), "a") // asked again
	f.give(units("m1", 79).of("g"), "a")
	f.wantPlaced(units("x", 79), "c")
	f.wantRefused(units("y", 79).of("another"), "none of 3 nodes")
	f.wantPlaced(units("m2", 79).of("g"), "b")
	f.wantRefused(units("m3", 79).of("g"), "none of 3 nodes") // there are two seats
	f.now = f.now.Add(ReservedFor)
	f.books.Lapsed(f.now) // m2 has not been bound, nor has x
	f.wantPlaced(units("z", 79), "c")
	f.wantRefused(units("y", 79), "none of 3 nodes")
	f.books.Drop("g")
	f.wantPlaced(units("y", 79), "b")
}

func (f *fleet) wantRoom(node string, free bool) {
	f.t.Helper()
	if got := f.books.HasRoom(units("", 79), node); got != free {
		f.t.Fatalf("there is room on %s: %v", node, got)
	}
}

// TestASeatIsKeptForTheNextPod: a Job's pod that has failed is made anew.
func TestASeatIsKeptForTheNextPod(t *testing.T) {
	f := of(piece.KindUnits, 1, 79, "a", "b")(t)
	f.wantHeld("g", "[[a]]", f.group(1, memName, 79))
	f.give(units("m1", 79).of("g"), "a")
	f.books.DeletePod("m1")
	f.machines["a"].end(f.r, "m1")
	f.books.SetNode("a", f.machines["a"].says(), true)
	f.wantRoom("a", false)
	f.wantPlaced(units("m2", 79).of("g"), "a")
	// It comes to another node without a word: the seat goes with it.
	f.give(units("m2", 79).of("g"), "b")
	f.wantRoom("a", true)
	f.books.DeletePod("m2")
	f.machines["b"].end(f.r, "m2")
	f.books.SetNode("b", f.machines["b"].says(), true)
	f.wantRoom("a", true)
	f.wantRoom("b", false)
	// Fewer are wanted.
	f.wantHeld("g", "[[]]", f.group(0, memName, 79))
	f.wantRoom("b", true)
}

// TestMoreThanIsSafeInOneHold: four pods of 39 fit on two GPUs of 79 by the agent's packing,
// and two strangers might be in their way.
func TestMoreThanIsSafeInOneHold(t *testing.T) {
	f := of(piece.KindUnits, 2, 79, "a")(t)
	f.wantPlaced(units("stranger", 1), "a")
	if no := f.wantNotHeld("g", "room for 3 of 4", f.group(4, memName, 39)); !no.Waits {
		t.Error("it does not wait for a pod that has not reported")
	}
	f.books.DeletePod("stranger")
	f.wantHeld("g", "[[a a a a]]", f.group(4, memName, 39))
	no := f.wantNotHeld("h", "", f.group(1, memName, 1))
	if why := no.Nodes["a"]; !strings.HasPrefix(why, "it is not known yet which devices a pod to come of x/g and 3 others have") {
		t.Errorf("there is no room since %q", why)
	}
	for i := range 4 {
		p := units(fmt.Sprint("m", i), 39).of("g")
		f.wantPlaced(p, "a")
		f.give(p, "a")
	}
	f.wantHeld("h", "[[a]]", f.group(1, memName, 1))
}

func TestAHoldLosesItsRoom(t *testing.T) {
	f := of(piece.KindUnits, 1, 79, "a", "b")(t)
	f.wantHeld("g", "[[a]]", f.group(1, memName, 79))
	if lost := f.books.Lost("g"); len(lost) != 0 {
		t.Fatal(lost)
	}
	f.books.DeleteNode("a")
	if lost := f.books.Lost("g"); fmt.Sprint(lost) != "[a]" {
		t.Fatal(lost)
	}
	f.give(units("x", 1), "b")
	f.wantNotHeld("g", "none of 2 nodes", f.group(1, memName, 79))
	if fmt.Sprint(f.books.Holds(), f.books.Lost("g")) != "[g] [a]" {
		t.Error("a hold that cannot be had anew is gone")
	}
	f.books.DeletePod("x")
	f.machines["b"].end(f.r, "x")
	f.books.SetNode("b", f.machines["b"].says(), true)
	f.wantHeld("g", "[[b]]", f.group(1, memName, 79))
	if lost := f.books.Lost("g"); len(lost) != 0 {
		t.Fatal(lost)
	}
}

// TestAHoldFromPodsThatAreThere has pods that came before their hold did.
func TestAHoldFromPodsThatAreThere(t *testing.T) {
	f := of(piece.KindUnits, 1, 79, "a", "b", "c")(t)
	f.give(units("m1", 79).of("g"), "b")
	f.wantHeld("g", "[[a b]]", f.group(2, memName, 79))
	// And as somebody has written it down.
	fresh := New()
	group := f.group(2, memName, 79)
	group.Among = nil // no node is known yet
	fresh.SetHold("g", "x/g", []Group{group}, [][]string{{"a", "b"}})
	f.copyNodes(fresh)
	p, _ := f.books.Pod("m1")
	fresh.SetPod(p)
	for _, name := range f.names {
		if was, is := sketch(f.books.room(name)), sketch(fresh.room(name)); was != is {
			t.Fatalf("%s had\n%s\nand after a restart\n%s", name, was, is)
		}
	}
}

// Pods of a hold on nodes that its groups are not for have nothing to do with it: they may be those
// of a job that comes back from there. On a node that takes no new pods they keep their seats.
func TestPodsElsewhereHaveNoSeat(t *testing.T) {
	f := of(piece.KindUnits, 1, 79, "a", "b", "cloud")(t)
	f.give(units("m1", 79).of("g"), "cloud")
	here := Group{Containers: units("", 79).Containers, N: 1, Among: []string{"a"}}
	f.wantHeld("g", "[[a]]", here)
	if lost := f.books.Lost("g"); lost != nil {
		t.Errorf("it has lost its room on %v", lost)
	}
	f.give(units("m2", 79).of("g"), "a")
	f.books.DeletePod("m1")
	here.Among, here.Closed = []string{"b"}, []string{"a"}
	f.wantHeld("g", "[[a]]", here)
	f.wantHeld("other", "[[b]]", Group{Containers: here.Containers, N: 1, Among: []string{"b"}})
}

// TestQuotasAndHoldsKeepOffEachOther has one GPU.
func TestQuotasAndHoldsKeepOffEachOther(t *testing.T) {
	f := of(piece.KindUnits, 1, 79, "a")(t)
	f.books.Keep("q", map[string]int{memName: 40}, nil)
	f.wantNotHeld("g", "", f.group(1, memName, 40))
	f.wantHeld("g", "[[a]]", f.group(1, memName, 39))
	if short := f.books.Keep("q", map[string]int{memName: 41}, nil); short[memName] != 1 {
		t.Errorf("the quota lacks %v", short)
	}
	f.wantPlaced(units("m", 39).of("g"), "a")
	f.wantPlaced(member("q", "m2", memName, 40), "a")
}

// TestAMemberTakesNoSeatOfAGroup: the quota has some room on the node, and the rest is a Job's.
func TestAMemberTakesNoSeatOfAGroup(t *testing.T) {
	f := of(piece.KindUnits, 1, 79, "a")(t)
	f.wantHeld("g", "[[a]]", f.group(1, memName, 40))
	f.books.Keep("q", map[string]int{memName: 60}, nil)
	f.wantRefused(member("q", "m", memName, 50), "held for others")
	f.wantPlaced(units("p", 40).of("g"), "a")
}

// TestWhoHasASeatWaitsForNobody: another hold has lost its room, and waits for what becomes free.
func TestWhoHasASeatWaitsForNobody(t *testing.T) {
	f := of(piece.KindUnits, 1, 79, "a")(t)
	f.wantHeld("g", "[[a]]", f.group(1, memName, 20))
	f.books.Keep("q", map[string]int{memName: 20}, nil)
	f.wantHeld("h", "[[a]]", f.group(1, memName, 39))
	f.give(units("stray", 30), "a")
	if f.books.Lost("g") != nil || f.books.Lost("h") == nil {
		t.Fatalf("lost are %v and %v", f.books.Lost("g"), f.books.Lost("h"))
	}
	f.wantKept("q", "a:20 ", none())
	f.wantRefused(units("other", 1), "held for others")
	if err := f.books.Fits(units("p", 20).of("g"), "a", nil, f.now); err != nil {
		t.Error(err)
	}
	f.wantPlaced(units("p", 20).of("g"), "a")
	f.wantPlaced(member("q", "m", memName, 20), "a")
}

// hold asks for room for a random group.
func (f *fleet) hold() {
	f.seq++
	id := fmt.Sprintf("h%d", f.seq)
	groups := []Group{{Containers: f.containers(), N: 1 + f.r.IntN(4), Among: f.names}}
	if f.r.IntN(4) == 0 {
		groups = append(groups, Group{Containers: f.containers(), N: 1, Among: f.names})
	}
	if len(f.holds) > 4 {
		return
	}
	at, err := f.books.Hold(id, id, groups, f.now)
	quiet := f.quiet
	f.quiet = false
	if err == nil {
		f.count["held"]++
		f.holds[id] = groups
		for g := range groups {
			if len(at[g]) != groups[g].N {
				f.t.Fatalf("%d pods are held on %v", groups[g].N, at[g])
			}
		}
		return
	}
	if f.count["not held"]++; !quiet || len(groups) > 1 || len(groups[0].Containers) > 1 ||
		len(groups[0].Containers[0].Requests) > 1 {
		return
	}
	f.count["not held in quiet"]++
	n := 0
	for _, m := range f.machines {
		m = m.clone()
		for i := range 4 {
			if _, err := m.admit(f.r, &Pod{UID: fmt.Sprint("try", i), Containers: groups[0].Containers}); err != nil {
				break
			}
			n++
		}
	}
	if n >= groups[0].N {
		f.t.Fatalf("%d of %+v were refused, and there is room for %d: %v", groups[0].N, groups[0].Containers, n, err)
	}
}

// lacking are the groups of a hold that have fewer pods than seats.
func (f *fleet) lacking(id string) (out []int) {
	has := map[string]int{}
	for uid, of := range f.members {
		if p := f.pods[uid]; p != nil && !p.Done {
			has[of]++
		}
	}
	for g, group := range f.holds[id] {
		for range group.N - has[fmt.Sprint(id, " ", g)] {
			out = append(out, g)
		}
	}
	return out
}

// member makes a pod of some hold.
func (f *fleet) member() {
	ids := slices.Sorted(maps.Keys(f.holds))
	if len(ids) == 0 {
		return
	}
	id := ids[f.r.IntN(len(ids))]
	if groups := f.lacking(id); len(groups) > 0 {
		_ = f.sit(id, groups[f.r.IntN(len(groups))])
	}
}

func (f *fleet) sit(id string, g int) error {
	f.seq++
	p := &Pod{UID: fmt.Sprintf("p%d", f.seq), Namespace: "x", Name: fmt.Sprintf("p%d", f.seq), Hold: id,
		Containers: f.holds[id][g].Containers}
	node, err := f.books.Place(context.Background(), *p, f.names, f.now)
	f.quiet = false
	if err == nil {
		f.pods[p.UID], f.placed[p.UID], f.members[p.UID] = p, node, fmt.Sprint(id, " ", g)
		f.count["members"]++
	}
	return err
}

func (f *fleet) drop() {
	if ids := slices.Sorted(maps.Keys(f.holds)); len(ids) > 0 {
		id := ids[f.r.IntN(len(ids))]
		f.books.Drop(id)
		delete(f.holds, id)
		f.quiet = false
	}
}

// come lets the pods of all holds come, one after the other, each when all is known of those
// before: what is held must be there for them, whatever has happened meanwhile.
func (f *fleet) come() {
	f.settle()
	f.books.holds.balance()
	f.seats()
	f.giveUp()
	for _, id := range slices.Sorted(maps.Keys(f.holds)) {
		one := len(f.holds[id]) == 1 && len(f.holds[id][0].Containers) == 1 &&
			len(f.holds[id][0].Containers[0].Requests) == 1
		for tries := 0; ; tries++ {
			groups := f.lacking(id)
			if len(groups) == 0 {
				break
			}
			var err error
			for _, g := range groups { // their order may matter
				if err = f.sit(id, g); err == nil {
					break
				}
			}
			if err != nil && one {
				f.t.Fatalf("%s is held, and a pod of it was refused: %v\nlost are %v", id, err, f.books.Lost(id))
			}
			if err != nil || tries > 20 {
				// It came out otherwise than the packing had it.
				f.count["seats lost"]++
				f.books.Drop(id)
				delete(f.holds, id)
				break
			}
			f.count["seats filled"]++
			f.settle()
		}
	}
	f.settle()
}

// A group that begins anew has seats of its own beside its pods that are ending. A pod that waited
// before uses one of them.
func TestLeftPodsUseNoSeat(t *testing.T) {
	f := of(piece.KindUnits, 1, 79, "a", "b")(t)
	f.wantHeld("g", "[[a]]", f.group(1, memName, 50))
	f.give(units("old", 50).of("g"), "a")
	waiting := units("new", 50).of("g")
	f.books.SetPod(waiting)
	f.books.Drop("g")
	f.books.Leave("g")
	f.wantHeld("g", "[[b]]", f.group(1, memName, 50))
	f.wantPlaced(waiting, "b")
	f.give(waiting, "b")
	f.wantHeld("g", "[[b]]", f.group(1, memName, 50))
	f.wantPlaced(units("other", 29), "a")
}

// What is expected of a node to which seats come one after the other is what is found out anew.
func TestSeatsOneAfterTheOther(t *testing.T) {
	grown := 0
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 12))
		kind := []piece.Kind{piece.KindUnits, piece.KindPlacement}[seed%2]
		of := func() []Container {
			if kind == piece.KindPlacement {
				return asks("", []string{"example.com/mig-1g.10gb", "example.com/mig-2g.20gb",
					"example.com/mig-3g.40gb"}[r.IntN(3)], 1+r.IntN(2)).Containers
			}
			return units("", 1+r.IntN(9)).Containers
		}
		b := New()
		var names []string
		for i := range 3 {
			m := newMachine(t, r, fmt.Sprintf("node-%d", i), kind, 4, 20)
			names = append(names, m.name)
			b.SetNode(m.name, m.says(), true)
			for j := range r.IntN(3) { // who has been bound, and has no devices yet
				b.SetPod(Pod{UID: fmt.Sprintf("%d-%d", i, j), Name: fmt.Sprintf("%d-%d", i, j), Node: m.name,
					Containers: of()})
			}
		}
		for id := range 3 {
			var groups []Group
			for range 1 + r.IntN(3) {
				groups = append(groups, Group{Containers: of(), N: 1 + r.IntN(6), Among: names})
			}
			if _, err := b.Hold(fmt.Sprint("h", id), "x/h", groups, start); err != nil {
				continue
			}
			for _, name := range names {
				n := b.nodes[name]
				if n.room == nil || n.room.expected == nil {
					continue
				}
				grown++
				anew := b.roomOf(n, nil)
				want, got := shared(anew.expect().gpus), shared(n.room.expected.gpus)
				if !reflect.DeepEqual(got, want) || len(anew.pending) != len(n.room.pending) {
					t.Fatalf("seed %d: on %s %+v is expected, and anew %+v", seed, name, got, want)
				}
			}
		}
	}
	if grown < 40 {
		t.Errorf("%d nodes were looked at: the test shows little", grown)
	}
}

// TestOthersAskBetweenTheSteps has pods placed and ended, and nodes told of, while a hold is looked for.
// What has been given then has its room on the machines, one after the other.
func TestOthersAskBetweenTheSteps(t *testing.T) {
	held, lost, steps := 0, 0, 0
	for seed := range uint64(60) {
		kind := []piece.Kind{piece.KindUnits, piece.KindPlacement, piece.KindReplica, piece.KindWhole}[seed%4]
		f := of(kind, 2, []int{20, 0, 2, 1}[seed%4], "a", "b", "c")(t)
		f.r = rand.New(rand.NewPCG(seed, 12))
		one := func() (string, int) {
			switch kind {
			case piece.KindPlacement:
				return profile([]string{"1g.10gb", "2g.20gb", "3g.40gb"}[f.r.IntN(3)]), 1
			case piece.KindUnits:
				return memName, 1 + f.r.IntN(9)
			case piece.KindReplica:
				return repName, 1
			}
			return gpuName, 1
		}
		given := map[string]Pod{} // by UID, with their nodes
		f.books.Pause(func() {
			steps++
			switch f.r.IntN(5) {
			case 0:
				name, n := one()
				f.seq++
				p := asks(fmt.Sprint("p", f.seq), name, n)
				if node, err := f.books.Place(context.Background(), p, f.names, f.now); err == nil {
					f.give(p, node)
					p.Node = node
					given[p.UID] = p
				}
			case 1:
				for _, uid := range slices.Sorted(maps.Keys(given)) {
					f.books.DeletePod(uid)
					f.machines[given[uid].Node].end(f.r, uid)
					f.books.SetNode(given[uid].Node, f.machines[given[uid].Node].says(), true)
					delete(given, uid)
					break
				}
			case 2:
				f.books.Keep("q", map[string]int{memName: f.r.IntN(20), gpuName: f.r.IntN(2)}, nil)
			}
		})
		var groups []Group
		for range 1 + f.r.IntN(2) {
			name, n := one()
			groups = append(groups, f.group(1+f.r.IntN(5), name, n))
		}
		if _, err := f.books.Hold("g", "x/g", groups, f.now); err != nil {
			continue
		}
		held++
		lost += len(f.books.Lost("g"))
		for _, name := range f.names {
			for _, s := range f.books.nodes[name].seats {
				if f.books.holds.lost(s) {
					continue // an agent has chosen otherwise, between two steps
				}
				if _, err := f.machines[name].admit(f.r, &s.Pod); err != nil {
					t.Fatalf("seed %d: %s has no room for a seat of %s, %v: %v", seed, name, s.owner.id, s.Containers,
						err)
				}
			}
		}
	}
	if t.Logf("%d holds in %d steps; %d seats were lost", held, steps, lost); held < 20 || steps < 500 ||
		lost > held/4 {
		t.Error("the test shows little")
	}
}

// TestOwnSeatsWithoutRoomAreNoStrangers has a hold of two groups. One group's seat has lost its room on a node.
// What becomes free there is for the hold, whoever of its pods comes, and not for a stranger that asks for the
// same, whoever asks first.
func TestOwnSeatsWithoutRoomAreNoStrangers(t *testing.T) {
	for _, strangerFirst := range []bool{true, false} {
		f := of(piece.KindUnits, 1, 79, "a")(t)
		f.books.SetHold("g", "x/g", []Group{f.group(1, memName, 60), f.group(1, memName, 10)}, [][]string{{"a"}, {"elsewhere"}})
		f.give(units("other", 30), "a")
		stranger := func() { f.wantRefused(units("stranger", 10), "the rest is held for others") }
		if strangerFirst {
			stranger()
		}
		if !f.books.HasRoom(units("m", 10).of("g"), "a") {
			t.Errorf("stranger first %t: a pod of the hold finds no room", strangerFirst)
		}
		stranger()
	}
}
