// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

const (
	spotMem = memName + ".spot"
	spotGPU = gpuName + ".spot"
)

// lending has guaranteed pods lend some devices of a node's first GPU.
func lending(s *gpunode.Status, lent piece.Set) *gpunode.Status {
	s.GPUs[0].Spot.Lent = lent
	return s
}

// twice returns a node whose GPUs of 80 units are offered to spot pods, too, up to most of them. of each GPU it has
// the numbers that guaranteed pods have, and that spot pods have.
func twice(most int, used ...[2]piece.Set) *gpunode.Status {
	s := plain(piece.KindUnits, memName, len(used), 80)
	for i, of := range used {
		g := &s.GPUs[i]
		g.Used, g.Spot = of[0], &gpunode.Spot{Resource: spotMem, Total: most, Used: of[1]}
	}
	s.Sum()
	return s
}

func numbers(from, to int) (out piece.Set) { return piece.Set{{First: from, Last: to}} }

// fits reports whether a pod has a place on the node "a", and leaves no reservation.
func fits(b *Books, p Pod) error {
	_, err := b.Place(context.Background(), p, []string{"a"}, start)
	b.Unreserve(p.UID)
	b.DeletePod(p.UID)
	return err
}

// A guaranteed pod has a place where it would have one without spot pods, and a spot pod where room is free of both.
func TestWhatEachTierCanHave(t *testing.T) {
	for name, c := range map[string]struct {
		says             *gpunode.Status
		guaranteed, spot int
	}{
		"nothing is used":              {twice(80, [2]piece.Set{nil, nil}), 80, 80},
		"spot pods have some":          {twice(80, [2]piece.Set{nil, numbers(40, 79)}), 80, 40},
		"both have some":               {twice(80, [2]piece.Set{numbers(0, 9), numbers(40, 79)}), 70, 30},
		"both have the same":           {twice(80, [2]piece.Set{numbers(0, 49), numbers(40, 79)}), 30, 0},
		"spot pods may have so many":   {twice(30, [2]piece.Set{numbers(0, 9), numbers(60, 79)}), 70, 10},
		"guaranteed pods lend some":    {lending(twice(80, [2]piece.Set{numbers(0, 49), numbers(50, 54)}), numbers(20, 49)), 30, 55},
		"spot pods have some of that":  {lending(twice(80, [2]piece.Set{numbers(0, 49), numbers(20, 29)}), numbers(20, 49)), 30, 50},
		"most counts there, too":       {lending(twice(40, [2]piece.Set{numbers(0, 49), nil}), numbers(20, 49)), 30, 40},
		"what is lent is nobody's now": {lending(twice(80, [2]piece.Set{nil, nil}), numbers(20, 49)), 80, 80},
		"on two GPUs":                  {twice(80, [2]piece.Set{numbers(0, 59), nil}, [2]piece.Set{nil, numbers(0, 69)}), 80, 20},
		"most is more than there are":  {twice(1<<20, [2]piece.Set{numbers(0, 9), nil}), 70, 70},
	} {
		b := New()
		b.SetNode("a", c.says, true)
		for resource, want := range map[string]int{memName: c.guaranteed, spotMem: c.spot} {
			for n := 1; n <= 81; n++ {
				if err := fits(b, asks("p", resource, n)); (err == nil) != (n <= want) {
					t.Errorf("%s: %d of %s, of which %d can be had: %v", name, n, resource, want, err)
				}
			}
		}
	}
}

// For guaranteed pods every answer is the same with and without spot pods on the nodes, on the way to them and in holds: if
// they ask for memory units, with any containers and beside others on their way, and for one MIG device.
func TestGuaranteedPodsAreJudgedAsIfAlone(t *testing.T) {
	_, card := h100(t)
	told, _ := h100(t)
	all := card.Placements()
	for seed := range rounds(60, 600) {
		r := rand.New(rand.NewPCG(uint64(seed), 1))
		with, without := New(), New()
		with.Pause(func() {})
		for _, node := range []string{"a", "b"} {
			s := plain(piece.KindUnits, memName, 2, 80)
			if seed%2 == 1 {
				s = onDemand(told, card, 2)
			}
			for i := range s.GPUs {
				g := &s.GPUs[i]
				if g.MIG == nil {
					used := r.IntN(81)
					for n := range used {
						g.Used = append(g.Used, piece.Range{First: n, Last: n})
					}
					g.Spot = &gpunode.Spot{Resource: spotMem, Total: 80, Used: numbers(min(used, 79), min(used+r.IntN(40), 79))}
					continue
				}
				var has, theirs []mig.Placement
				for range r.IntN(12) {
					p := all[r.IntN(len(all))]
					switch own := r.IntN(2) == 0; {
					case own && card.Fits(has, p):
						has = append(has, p)
					case !own && card.Fits(slices.Concat(has, theirs), p):
						theirs = append(theirs, p)
					}
				}
				g.MIG.Used = texts(has)
				offerAll(&g.MIG.Offers, card, has, "")
				g.Spot = &gpunode.Spot{UsedPlacements: texts(theirs)}
				offerAll(&g.Spot.Offers, card, slices.Concat(has, theirs), ".spot")
			}
			bare := *s
			bare.GPUs = slices.Clone(s.GPUs)
			for i := range bare.GPUs {
				bare.GPUs[i].Spot = nil
			}
			s.Sum()
			bare.Sum()
			with.SetNode(node, s, true)
			without.SetNode(node, &bare, true)
		}
		for i := range r.IntN(4) { // spot pods that have not reported, and room that is held for some
			spot, _ := spotRequest(r, seed%2 == 1)
			p := asks(fmt.Sprint("spot-", i), spot, 1)
			p.Node = []string{"a", "b"}[r.IntN(2)]
			with.SetPod(p)
		}
		for i := range r.IntN(3) * (1 - seed%2) { // guaranteed pods that have not reported
			p := units(fmt.Sprint("guaranteed-", i), 1+r.IntN(40))
			p.Node = []string{"a", "b"}[r.IntN(2)]
			with.SetPod(p)
			without.SetPod(p)
		}
		if seed%3 == 0 {
			spot, n := spotRequest(r, seed%2 == 1)
			_, _ = with.Hold("h", "h", []Group{{N: 1, Among: []string{"a", "b"},
				Containers: []Container{{Requests: map[string]int{spot: n}}}}}, start)
		}
		for range 20 {
			resource, n := spotRequest(r, seed%2 == 1)
			resource, _ = piece.OfSpot(resource)
			for _, node := range []string{"a", "b"} {
				p := asks("p", resource, n)
				for range r.IntN(3) * (1 - seed%2) {
					p.Containers = append(p.Containers, Container{Init: r.IntN(4) == 0, Requests: map[string]int{memName: 1 + r.IntN(60)}})
				}
				_, one := with.Place(context.Background(), p, []string{node}, start)
				with.DeletePod("p")
				_, other := without.Place(context.Background(), p, []string{node}, start)
				without.DeletePod("p")
				if (one == nil) != (other == nil) {
					t.Fatalf("seed %d: %v on %s: %v; without spot pods: %v", seed, p.Containers, node, one, other)
				}
			}
			group := []Group{{N: 1 + r.IntN(2), Among: []string{"a", "b"}, Containers: []Container{{Requests: map[string]int{resource: n}}}}}
			_, one := with.Hold("g", "g", group, start)
			with.Drop("g")
			_, other := without.Hold("g", "g", group, start)
			without.Drop("g")
			if one != nil && other == nil && group[0].N == 1 {
				t.Fatalf("seed %d: a hold for %d of %s: %v; without spot pods there is room", seed, n, resource, one)
			}
		}
	}
}

func spotRequest(r *rand.Rand, placed bool) (string, int) {
	if !placed {
		return spotMem, 1 + r.IntN(80)
	}
	return "example.com/mig-" + []string{"1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"}[r.IntN(4)] + ".spot", 1
}

// onDemand is a node with empty MIG GPUs.
func onDemand(told *gpunode.Card, card *mig.Card, gpus int) *gpunode.Status {
	s := plain(piece.KindPlacement, "", gpus, 0)
	s.Cards = []gpunode.Card{*told}
	for i := range s.GPUs {
		s.GPUs[i].MIG = &gpunode.MIG{Card: told.Name, OnDemand: true}
	}
	return s
}

func texts(of []mig.Placement) (out []string) {
	for _, p := range of {
		out = append(out, p.String())
	}
	return out
}

// offerAll lists all placements of a card, and those as free that have room beside others.
func offerAll(to *[]gpunode.Offer, card *mig.Card, beside []mig.Placement, suffix string) {
	for _, p := range card.Placements() {
		profile := p.Profile.String()
		i := slices.IndexFunc(*to, func(o gpunode.Offer) bool { return o.Profile == profile })
		if i < 0 {
			i = len(*to)
			*to = append(*to, gpunode.Offer{Profile: profile, Resource: "example.com/" + p.Profile.Resource() + suffix})
		}
		o := &(*to)[i]
		o.Placements = append(o.Placements, fmt.Sprint(p.Start))
		if card.Fits(beside, p) {
			o.Free = append(o.Free, fmt.Sprint(p.Start))
		}
	}
}

// A spot pod waits for guaranteed pods that have not reported. Those do not wait for it, and go where they take
// nothing of spot pods.
func TestSpotPodsComeLast(t *testing.T) {
	b := New()
	b.SetNode("a", twice(80, [2]piece.Set{nil, numbers(0, 39)}), true)
	b.SetNode("b", twice(80, [2]piece.Set{numbers(0, 9), nil}), true)
	place := func(p Pod, among ...string) (string, error) { return b.Place(context.Background(), p, among, start) }
	if node, err := place(units("g", 60), "a", "b"); err != nil || node != "b" {
		t.Errorf("a guaranteed pod was placed on %q: %v", node, err)
	}
	if _, err := place(asks("s", spotMem, 5), "b"); err == nil || !strings.Contains(err.Error(), "not reported their devices") {
		t.Errorf("a spot pod beside one that has not reported: %v", err)
	}
	g := units("g", 60)
	g.Node = "b"
	for n := range 60 {
		g.Devices = append(g.Devices, timeslice.ID("GPU-0", 10+n))
	}
	b.SetPod(g)
	if _, err := place(asks("s", spotMem, 11), "b"); err == nil {
		t.Error("a spot pod was placed in the room of a guaranteed one")
	}
	if _, err := place(asks("s", spotMem, 10), "b"); err != nil {
		t.Errorf("there are 10 units left: %v", err)
	}
	if _, err := place(units("h", 10), "b"); err != nil {
		t.Errorf("a guaranteed pod beside a spot pod on its way: %v", err)
	}
}

// A guaranteed pod that lends goes on to have its devices. What it lends is given to spot pods, and to no guaranteed one.
func TestLentDevicesOfPods(t *testing.T) {
	b := New()
	b.SetNode("a", lending(twice(80, [2]piece.Set{numbers(0, 39), nil}), numbers(0, 39)), true)
	g := units("g", 40)
	g.Node = "a"
	for n := range 40 {
		g.Devices = append(g.Devices, timeslice.ID("GPU-0", n))
	}
	b.SetPod(g)
	for n, want := range map[int]bool{40: true, 41: false} {
		if err := fits(b, units("p", n)); (err == nil) != want {
			t.Errorf("%d guaranteed units: %v", n, err)
		}
	}
	if err := fits(b, asks("p", spotMem, 80)); err != nil {
		t.Errorf("spot units: %v", err)
	}
	both := units("p", 30)
	both.Containers = append(both.Containers, Container{Requests: map[string]int{spotMem: 50}})
	if err := fits(b, both); err != nil {
		t.Errorf("30 of 40 free units, and the rest with what is lent: %v", err)
	}
}

// Pods' statuses name the devices of both tiers by the same IDs. A spot pod that has gone leaves room for spot pods.
func TestDevicesOfSpotPods(t *testing.T) {
	b := New()
	b.SetNode("a", twice(80, [2]piece.Set{nil, nil}), true)
	s := asks("s", spotMem, 80)
	s.Node = "a"
	for n := range 80 {
		s.Devices = append(s.Devices, SpotDevice(timeslice.ID("GPU-0", n)))
	}
	b.SetPod(s)
	if err := fits(b, asks("p", spotMem, 1)); err == nil {
		t.Error("a spot pod has all")
	}
	if err := fits(b, units("p", 80)); err != nil {
		t.Errorf("a guaranteed pod: %v", err)
	}
	if err := b.Fits(asks("p", spotMem, 80), "a", []string{"s"}, start); err != nil {
		t.Errorf("once the spot pod has gone: %v", err)
	}
	b.DeletePod("s")
	if err := fits(b, asks("p", spotMem, 80)); err != nil {
		t.Errorf("the spot pod has gone: %v", err)
	}
}

// Room that is held for pods to come is not for spot pods; that of an amount, which may never be used, is. A spot pod's
// own seat goes when a guaranteed one takes its room.
func TestSpotPodsAndHolds(t *testing.T) {
	b := New()
	b.SetNode("a", twice(80, [2]piece.Set{nil, nil}), true)
	group := func(resource string, n int) []Group {
		return []Group{{N: 1, Among: []string{"a"}, Containers: []Container{{Requests: map[string]int{resource: n}}}}}
	}
	if _, err := b.Hold("spot", "spot", group(spotMem, 50), start); err != nil {
		t.Fatal(err)
	}
	if err := fits(b, units("p", 80)); err != nil {
		t.Errorf("a guaranteed pod beside a spot pod's seat: %v", err)
	}
	if _, err := b.Hold("g", "g", group(memName, 60), start); err != nil {
		t.Fatalf("a guaranteed hold beside a spot pod's: %v", err)
	}
	if lost := b.Lost("spot"); len(lost) != 1 {
		t.Errorf("the spot pod's seat is lost on %v", lost)
	}
	if lost := b.Lost("g"); lost != nil {
		t.Errorf("the guaranteed seat is lost on %v", lost)
	}
	b.Drop("spot")
	if err := fits(b, asks("p", spotMem, 20)); err != nil {
		t.Errorf("beside the guaranteed seat: %v", err)
	}
	if err := fits(b, asks("p", spotMem, 21)); err == nil || !strings.Contains(err.Error(), "the rest is held for others") {
		t.Errorf("in the room of the guaranteed seat: %v", err)
	}
	b.Drop("g")
	if short := b.Keep("k", map[string]int{memName: 80}, nil); short != nil {
		t.Fatal(short)
	}
	if err := fits(b, asks("p", spotMem, 80)); err != nil {
		t.Errorf("in the room of an amount: %v", err)
	}
	if parts, short := b.Kept("k"); len(parts) != 1 || short != nil {
		t.Errorf("the amount has %v and lacks %v", parts, short)
	}
}

// Whole GPUs: a guaranteed pod gets those that no spot pod has first.
func TestWholeGPUsAndSpot(t *testing.T) {
	b := New()
	s := plain(piece.KindWhole, gpuName, 3, 1)
	for i := range s.GPUs {
		s.GPUs[i].Spot = &gpunode.Spot{Resource: spotGPU, Total: 1}
	}
	s.GPUs[0].Spot.Used = numbers(0, 0)
	s.Sum()
	b.SetNode("a", s, true)
	for n := 1; n <= 4; n++ {
		if err := fits(b, asks("p", gpuName, n)); (err == nil) != (n <= 3) {
			t.Errorf("%d guaranteed: %v", n, err)
		}
		if err := fits(b, asks("p", spotGPU, n)); (err == nil) != (n <= 2) {
			t.Errorf("%d spot: %v", n, err)
		}
	}
	both := asks("p", gpuName, 2)
	both.Containers = append(both.Containers, Container{Requests: map[string]int{spotGPU: 1}})
	if err := fits(b, both); err == nil {
		t.Error("one pod got a GPU in both tiers")
	}
	both.Containers[0].Requests[gpuName] = 1
	if err := fits(b, both); err != nil {
		t.Errorf("a pod of both tiers: %v", err)
	}
}

// The packing gives a guaranteed pod the GPU that it would get without spot pods. There, and among equal GPUs, it gives room
// that no spot pod has first, and so on the nodes.
func TestSpotPodsAreSpared(t *testing.T) {
	b := New()
	for name, c := range map[string]struct {
		used             [][2]piece.Set
		guaranteed, most int
	}{
		"the fuller one":    {[][2]piece.Set{{nil, numbers(40, 79)}, {numbers(0, 19), nil}}, 30, 40},
		"the idle one":      {[][2]piece.Set{{nil, numbers(40, 79)}, {nil, nil}}, 60, 40},
		"the idle units":    {[][2]piece.Set{{nil, numbers(0, 39)}}, 30, 10},
		"both are as idle":  {[][2]piece.Set{{nil, numbers(20, 79)}, {nil, numbers(0, 59)}}, 20, 20},
		"the one that fits": {[][2]piece.Set{{numbers(0, 59), nil}, {nil, numbers(0, 69)}}, 30, 20},
	} {
		b.SetNode("a", twice(80, c.used...), true)
		for n := 1; n <= 80; n++ {
			both := units("p", c.guaranteed)
			both.Containers = append(both.Containers, Container{Requests: map[string]int{spotMem: n}})
			if err := fits(b, both); (err == nil) != (n <= c.most) {
				t.Errorf("%s: %d units beside %d guaranteed ones, want at most %d: %v", name, n, c.guaranteed, c.most, err)
			}
		}
	}
	b.SetNode("b", twice(80, [2]piece.Set{nil, nil}), true)
	b.SetNode("a", twice(80, [2]piece.Set{numbers(0, 19), numbers(40, 79)}), true)
	if node, err := b.Place(context.Background(), units("p", 60), []string{"a", "b"}, start); err != nil || node != "b" {
		t.Errorf("on %q, where spot pods lose their room: %v", node, err)
	}
	b.DeletePod("p")
	// The agent of a would give room of spot pods, since that GPU is the fuller one, and another one is idle.
	b.SetNode("a", twice(80, [2]piece.Set{numbers(0, 39), numbers(40, 79)}, [2]piece.Set{nil, nil}), true)
	if node, err := b.Place(context.Background(), units("p", 30), []string{"a", "b"}, start); err != nil || node != "b" {
		t.Errorf("on %q, where spot pods lose their room on the fuller GPU: %v", node, err)
	}
}

// The agent fills GPUs one after the other, with and without spot pods, so that there is room for a large pod beside some on
// their way. It does not do so for spot pods while guaranteed ones lend: then the last one waits until it is known where the
// others are.
func TestPromiseByTheOrderOfGPUs(t *testing.T) {
	for name, c := range map[string]struct {
		resource         string
		used, spot, lent piece.Set
		want             bool
	}{
		"without spot pods": {memName, nil, nil, nil, true},
		"beside spot pods":  {memName, nil, numbers(0, 39), nil, true},
		"spot pods":         {spotMem, nil, nil, nil, true},
		"what is lent":      {spotMem, numbers(0, 39), nil, numbers(0, 39), false},
	} {
		b := New()
		b.SetNode("a", lending(twice(80, [2]piece.Set{c.used, c.spot}, [2]piece.Set{nil, nil}), c.lent), true)
		for _, uid := range []string{"1", "2"} {
			p := asks(uid, c.resource, 20)
			p.Node = "a"
			b.SetPod(p)
		}
		if err := fits(b, asks("p", c.resource, 79)); (err == nil) != c.want {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Spot pods and their seats are in no guaranteed pod's way, also where the bound does not judge it.
func TestSpotPodsAreInNoWay(t *testing.T) {
	b := New()
	b.SetNode("a", twice(80, [2]piece.Set{nil, nil}, [2]piece.Set{nil, nil}), true)
	coming := asks("s", spotMem, 20)
	coming.Node = "a"
	b.SetPod(coming)
	group := func(resource string, pods, n int) []Group {
		return []Group{{N: pods, Among: []string{"a"}, Containers: []Container{{Requests: map[string]int{resource: n}}}}}
	}
	if _, err := b.Hold("g", "g", group(memName, 4, 40), start); err != nil {
		t.Errorf("four pods that just fill two GPUs: %v", err)
	}
	b.Drop("g")
	if _, err := b.Hold("h", "h", group(spotMem, 2, 50), start); err != nil {
		t.Fatal(err)
	}
	pinned := units("p", 80)
	pinned.Containers = append([]Container{{Init: true, Requests: map[string]int{memName: 80}}}, pinned.Containers...)
	pinned.Containers = append(pinned.Containers, Container{Requests: map[string]int{memName: 80}})
	if err := fits(b, pinned); err != nil {
		t.Errorf("a pod with an init container beside spot pods' seats: %v", err)
	}
}

// A pod of both tiers that has reported its spot devices alone has not reported.
func TestPodsOfBothTiersReport(t *testing.T) {
	b := New()
	b.SetNode("a", twice(80, [2]piece.Set{nil, nil}), true)
	p := units("p", 10)
	p.Node = "a"
	p.Containers[0].Requests[spotMem] = 10
	for n := range 10 {
		p.Devices = append(p.Devices, SpotDevice(timeslice.ID("GPU-0", 70+n)))
	}
	b.SetPod(p)
	if err := fits(b, units("q", 71)); err == nil {
		t.Error("its guaranteed part is given away")
	}
	for n := range 10 {
		p.Devices = append(p.Devices, timeslice.ID("GPU-0", n))
	}
	b.SetPod(p)
	for n, want := range map[int]bool{70: true, 71: false} {
		if err := fits(b, units("q", n)); (err == nil) != want {
			t.Errorf("%d beside it: %v", n, err)
		}
	}
}

// What a node says of spot pods sizes nothing, and cannot make the books fail.
func TestSpotFiguresOfNobody(t *testing.T) {
	card, _ := h100(t)
	for i, spoil := range []func(*gpunode.Status){
		func(s *gpunode.Status) {
			s.GPUs[0].Spot = &gpunode.Spot{Resource: spotMem, Total: 1 << 24, Used: numbers(0, 29999)}
		},
		func(s *gpunode.Status) { s.GPUs[0].Spot = &gpunode.Spot{Resource: memName, Total: 5} },
		func(s *gpunode.Status) {
			s.GPUs[0].Resource, s.GPUs[0].Spot = spotMem, &gpunode.Spot{Resource: memName, Total: 5}
		},
		func(s *gpunode.Status) {
			s.GPUs[0].Spot = &gpunode.Spot{Offers: []gpunode.Offer{{Profile: "1g.10gb", Resource: spotMem, Placements: []string{"0", "x"}, Free: []string{"0"}}}}
		},
		func(s *gpunode.Status) {
			s.GPUs[0].Kind, s.GPUs[0].Spot = piece.KindPlacement, &gpunode.Spot{Resource: spotMem, UsedPlacements: []string{"1g.10gb@0", "?"},
				Offers: []gpunode.Offer{{Profile: "1g.10gb", Resource: spotMem, Placements: []string{"0"}, Free: []string{"0"}}}}
		},
		func(s *gpunode.Status) {
			s.Cards = []gpunode.Card{*card}
			s.GPUs[0].Kind, s.GPUs[0].MIG = piece.KindPlacement, &gpunode.MIG{Card: card.Name, OnDemand: true}
			s.GPUs[0].Spot = &gpunode.Spot{Resource: spotMem, Used: numbers(0, 5), UsedPlacements: []string{"9g.10gb@0"},
				Offers: []gpunode.Offer{{Profile: "1g.10gb", Resource: memName, Placements: []string{"0", "77"}, Free: []string{"0", "77"}}}}
		},
	} {
		b := New()
		s := plain(piece.KindUnits, memName, 2, 80)
		spoil(s)
		s.Sum()
		b.SetNode("a", s, true)
		for _, resource := range []string{memName, spotMem} {
			p := asks("p", resource, 3)
			p.Containers = append([]Container{{Init: true, Requests: map[string]int{resource: 1}}}, p.Containers...)
			_ = fits(b, p)
			if resource == memName && i > 2 { // the other GPU is as it was
				if err := fits(b, units("q", 80)); err != nil {
					t.Errorf("%d: %v", i, err)
				}
			}
			s := asks("s", resource, 1)
			s.Node, s.Devices = "a", []string{SpotDevice("GPU-0"), SpotDevice("GPU-0::99999"), SpotDevice("GPU-0::1g.10gb@0"), spotMark, "GPU-0::3" + spotMark + spotMark}
			b.SetPod(s)
			_ = fits(b, asks("p", resource, 1))
			b.DeletePod("s")
		}
	}
}

// A MIG device that a guaranteed pod lends is given to one spot pod, as it is, and to no guaranteed one.
func TestLentPlacementOfAPod(t *testing.T) {
	told, card := h100(t)
	var has []mig.Placement
	for _, p := range card.Placements() {
		if p.Profile.String() == "3g.40gb" {
			has = append(has, p) // both: the card is full
		}
	}
	const three = "example.com/mig-3g.40gb"
	for _, lends := range []bool{false, true} {
		s := onDemand(told, card, 1)
		g := &s.GPUs[0]
		g.MIG.Used, g.Spot = texts(has), &gpunode.Spot{}
		offerAll(&g.MIG.Offers, card, has, "")
		offerAll(&g.Spot.Offers, card, has, ".spot")
		if lends {
			g.Spot.LentPlacements = texts(has[1:2])
			for i := range g.Spot.Offers {
				if o := &g.Spot.Offers[i]; o.Profile == "3g.40gb" {
					o.Free = []string{fmt.Sprint(has[1].Start)}
				}
			}
		}
		b := New()
		b.SetNode("a", s, true)
		holder := asks("g", three, 2)
		holder.Node, holder.Devices = "a", []string{mig.ID("GPU-0", has[0]), mig.ID("GPU-0", has[1])}
		b.SetPod(holder)
		if err := fits(b, asks("p", three, 1)); err == nil {
			t.Errorf("lends %v: a guaranteed pod has a place", lends)
		}
		if err := fits(b, asks("p", "example.com/mig-1g.10gb.spot", 1)); err == nil {
			t.Errorf("lends %v: a spot pod has another placement in the room", lends)
		}
		spot := asks("s", three+".spot", 1)
		if err := fits(b, spot); (err == nil) != lends {
			t.Errorf("lends %v: a spot pod: %v", lends, err)
		}
		if spot.Node, spot.Devices = "a", []string{SpotDevice(mig.ID("GPU-0", has[1]))}; lends {
			b.SetPod(spot)
			if err := fits(b, asks("p", three+".spot", 1)); err == nil {
				t.Error("a second spot pod has a place")
			}
		}
	}
}
