// SPDX-License-Identifier: Apache-2.0

package mig_test

import (
	"fmt"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// a100 is what the driver reports of an A100-80GB in MIG mode, shortened.
func a100(instances ...gpu.Instance) *gpu.MIG {
	at := func(size int, starts ...int) (out []gpu.Placement) {
		for _, s := range starts {
			out = append(out, gpu.Placement{Start: s, Size: size})
		}
		return out
	}
	return &gpu.MIG{Capable: true, Enabled: true, Instances: instances, Profiles: []gpu.Profile{
		{Name: "1g.10gb", Slices: 1, Max: 7, Placements: at(1, 0, 1, 2, 3, 4, 5, 6)},
		{Name: "2g.20gb", Slices: 2, Max: 3, Placements: at(2, 0, 2, 4)},
		{Name: "3g.40gb", Slices: 3, Max: 2, Placements: at(4, 0, 4)},
		{Name: "7g.80gb", Slices: 7, Max: 1, Placements: at(8, 0)},
	}}
}

func seventh(start int, holder string) gpu.Instance {
	return gpu.Instance{Profile: "1g.10gb", Placement: gpu.Placement{Start: start, Size: 1}, Busy: holder != "", Holder: holder}
}

// Four sevenths stand, one of them busy. Three times it is asked what would make
// something else of them: once it can be done around the busy one, once it must
// wait for it, once it could never be.
func ExampleCard_Plan() {
	m := a100(seventh(0, ""), seventh(1, ""), seventh(4, "train/train-3"), seventh(6, ""))
	c, err := mig.NewCard(m)
	if err != nil {
		fmt.Println(err)
		return
	}
	parse := func(s string) mig.Name { n, _ := mig.Parse(s); return n }
	for _, want := range [][]mig.Count{
		{{Profile: parse("3g.40gb"), N: 1}, {Profile: parse("1g.10gb"), N: 2}},
		{{Profile: parse("3g.40gb"), N: 2}},
		{{Profile: parse("3g.40gb"), N: 2}, {Profile: parse("2g.20gb"), N: 1}},
	} {
		fmt.Println(mig.DescribeCounts(want))
		plan, err := c.Plan(mig.Stand(m), want)
		if err != nil {
			fmt.Println("  no:", err)
		}
		for _, b := range plan.Blocked {
			fmt.Printf("  blocked: %s holds %s\n", b.Holder, b.Placement)
		}
		for _, s := range plan.Steps {
			fmt.Println(" ", s)
		}
	}
	// Output:
	// 1x3g.40gb 2x1g.10gb
	//   destroy 1g.10gb@0
	//   destroy 1g.10gb@1
	//   create 3g.40gb@0
	// 2x3g.40gb
	//   blocked: train/train-3 holds 1g.10gb@4
	// 2x3g.40gb 1x2g.20gb
	//   no: 1x2g.20gb 2x3g.40gb: they need 10 memory slices and this GPU has 8: insufficient resources
}

// A container wants a 1g.10gb, on demand. One GPU is empty, on the other a
// 3g.40gb is held: there it costs least, and least of all at the far end.
func ExamplePrefer() {
	c, err := mig.NewCard(a100())
	if err != nil {
		fmt.Println(err)
		return
	}
	half, _ := mig.Parse("3g.40gb")
	held, _ := c.Placement(half, 0, 0)
	offers := []mig.Offer{{GPU: "GPU-a", Card: c}, {GPU: "GPU-b", Card: c, Pinned: []mig.Placement{held}}}
	var free []mig.Place
	for _, o := range offers {
		for _, s := range c.Placements() {
			if s.Profile.String() == "1g.10gb" {
				free = append(free, mig.Place{GPU: o.GPU, Placement: s})
			}
		}
	}
	chosen, err := mig.Prefer(offers, free, nil, 1)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(mig.ID(chosen[0].GPU, chosen[0].Placement))

	// It is made when the container starts, in the place of what is idle there.
	idle, _ := c.Placement(half, 4, 0)
	plan, err := c.Make([]mig.Standing{{Placement: held, Pinned: true}, {Placement: idle}}, chosen[0].Placement)
	fmt.Println(plan.Steps, err)
	// Output:
	// GPU-b::1g.10gb@6
	// [destroy 3g.40gb@4 create 1g.10gb@6] <nil>
}
