// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"context"
	"testing"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

// givingBack has spot pods give back some devices of a node's first GPU.
func givingBack(s *gpunode.Status, back piece.Set) *gpunode.Status {
	s.GPUs[0].Spot.Yielding = back
	return s
}

// inSpot is a spot pod on node a that has units of the first GPU.
func inSpot(uid string, from, to int) Pod {
	p := onA(asks(uid, spotMem, to-from+1))
	for n := from; n <= to; n++ {
		p.Devices = append(p.Devices, SpotDevice(timeslice.ID("GPU-0", n)))
	}
	return p
}

// What a spot pod gives back can be had by guaranteed pods, and by no other spot pod: it comes first when a guaranteed pod
// goes, parked or not. It is none of the most that spot pods may have meanwhile. So it is with and without the word of the
// pod's own status.
func TestRoomThatIsGivenBackIsNoOtherSpotPods(t *testing.T) {
	for name, c := range map[string]struct {
		says             *gpunode.Status
		without          []string // pods that are thought away
		guaranteed, spot int
	}{
		"the guaranteed pod runs":       {givingBack(twice(80, [2]piece.Set{numbers(0, 39), nil}), numbers(0, 39)), nil, 40, 40},
		"it has a part of the room":     {givingBack(twice(80, [2]piece.Set{numbers(0, 19), nil}), numbers(0, 39)), nil, 60, 40},
		"it is about to go":             {givingBack(twice(80, [2]piece.Set{numbers(40, 59), nil}), numbers(0, 39)), nil, 60, 20},
		"it has gone":                   {twice(80, [2]piece.Set{nil, numbers(0, 39)}), nil, 80, 40},
		"spot pods may have so many":    {givingBack(twice(30, [2]piece.Set{numbers(0, 39), nil}), numbers(0, 39)), nil, 40, 30},
		"another one has some of these": {givingBack(twice(30, [2]piece.Set{numbers(0, 39), numbers(40, 49)}), numbers(0, 39)), nil, 40, 20},
		"the spot pod is thought away":  {givingBack(twice(80, [2]piece.Set{numbers(0, 19), nil}), numbers(0, 39)), []string{"s"}, 60, 60},
		"the GPU has no such device":    {givingBack(twice(80, [2]piece.Set{nil, nil}), numbers(80, 90)), nil, 80, 80},
	} {
		for _, told := range []bool{true, false} {
			if name == "the GPU has no such device" && told || c.without != nil && !told {
				continue
			}
			b := New()
			if told {
				b.SetPod(inSpot("s", 0, 39))
			}
			b.SetNode("a", c.says, true)
			for resource, want := range map[string]int{memName: c.guaranteed, spotMem: c.spot} {
				for n := 1; n <= 81; n++ {
					err := b.Fits(asks("p", resource, n), "a", c.without, start)
					if (err == nil) != (n <= want) {
						t.Errorf("%s (its status: %v): %d of %s, of which %d can be had: %v", name, told, n, resource, want, err)
					}
				}
			}
		}
	}
}

// A guaranteed pod goes where spot pods lose least. They lose nothing more by what they give back in any case. That counts
// once, and no longer when a guaranteed pod has it.
func TestWhatIsGivenBackIsNoLoss(t *testing.T) {
	b := New()
	b.SetPod(inSpot("s", 0, 59)) // it has to give all back
	b.SetNode("a", givingBack(twice(80, [2]piece.Set{numbers(0, 9), nil}), numbers(0, 59)), true)
	b.SetNode("b", twice(80, [2]piece.Set{nil, numbers(0, 19)}), true)
	if got := b.room("a").trial().yields(ptr(units("p", 70))); got != 0 {
		t.Errorf("spot pods lose %d devices on a", got)
	}
	if node, err := b.Place(context.Background(), units("p", 70), []string{"a", "b"}, start); err != nil || node != "a" {
		t.Errorf("it is placed on %q: %v", node, err)
	}
	b.DeletePod("p")
	// The other one has got 40 of them by its status, and the GPUNode does not know it yet.
	g := onA(units("g", 40))
	for n := range 40 {
		g.Devices = append(g.Devices, timeslice.ID("GPU-0", 10+n))
	}
	b.SetPod(g)
	if got := idle(b.room("a").gpus, 0); got != 30 {
		t.Errorf("beside another one, %d units are idle or given back, want 30", got)
	}
	both := units("p", 30) // what is given back is taken before what a spot pod keeps
	b.SetNode("b", givingBack(twice(80, [2]piece.Set{numbers(0, 19), numbers(20, 49)}), numbers(50, 79)), true)
	both.Containers = append(both.Containers, Container{Requests: map[string]int{memName: 20}})
	tr := b.room("b").trial()
	if !tr.pod(ptr(units("p", 30))) || tr.yields(ptr(units("q", 10))) != 10 {
		t.Errorf("after 30 units of those that are given back, 10 more cost %d", tr.yields(ptr(units("q", 10))))
	}
	if err := b.Fits(both, "b", nil, start); err != nil {
		t.Errorf("both fit: %v", err)
	}
}

func ptr(p Pod) *Pod { return &p }

// The same with MIG devices: a guaranteed pod is given a place that is given back before one that a spot pod keeps, and no
// other spot pod gets any of it.
func TestPlacesThatAreGivenBack(t *testing.T) {
	told, card := h100(t)
	place := func(text string) mig.Placement {
		p, err := gpunode.Placement(card, text)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	node := func(guaranteed, used, back string) *gpunode.Status {
		s := onDemand(told, card, 1)
		g := &s.GPUs[0]
		g.Spot = &gpunode.Spot{}
		var has, all []mig.Placement
		for _, of := range []struct {
			text string
			to   *[]string
		}{{guaranteed, &g.MIG.Used}, {used, &g.Spot.UsedPlacements}, {back, &g.Spot.YieldingPlacements}} {
			if of.text != "" {
				*of.to = []string{of.text}
				all = append(all, place(of.text))
			}
		}
		if guaranteed != "" {
			has = []mig.Placement{place(guaranteed)}
		}
		offerAll(&g.MIG.Offers, card, has, "")
		offerAll(&g.Spot.Offers, card, all, ".spot")
		s.Sum()
		return s
	}
	const three, two = "example.com/mig-3g.40gb", "example.com/mig-2g.20gb"
	b := New()
	b.SetNode("a", node("1g.10gb@0", "", "3g.40gb@0"), true) // what it has of the room is slice 0
	b.SetNode("b", node("1g.10gb@0", "3g.40gb@4", ""), true)
	if got, err := b.Place(context.Background(), asks("p", three, 1), []string{"a", "b"}, start); err != nil || got != "a" {
		t.Errorf("the pod is on %q: %v", got, err)
	}
	b.DeletePod("p")
	if got := b.room("a").trial().yields(ptr(asks("p", two, 1))); got != 0 {
		t.Errorf("spot pods lose %d devices by one beside what they keep", got)
	}
	p := asks("p", two+".spot", 1)
	if err := fits(b, p); err != nil {
		t.Errorf("one spot device has room at 4: %v", err)
	}
	p.Containers = append(p.Containers, p.Containers[0])
	if err := fits(b, p); err == nil {
		t.Error("a second one gets room that is given back, at 2")
	}
	if err := fits(b, asks("p", "example.com/mig-7g.80gb.spot", 1)); err == nil {
		t.Error("a spot pod gets the room of another one")
	}
}
