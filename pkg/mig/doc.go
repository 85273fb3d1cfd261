// SPDX-License-Identifier: Apache-2.0

// Package mig is the arithmetic of NVIDIA's Multi-Instance GPU: names of profiles, which instances
// can exist side by side, and the steps from the instances that a GPU has to those that are wanted.
// It touches no hardware. pkg/gpu/nvml does, and passes plain values of pkg/gpu.
//
// # Names
//
// A profile's name gives the size of an instance:
//
//	1g.10gb          one compute slice, 10 GB of memory
//	1g.10gb+me       the same with the media engines, of which a card has few
//	1g.24gb-me       without any media engine
//	1g.24gb+me.all   with all of them
//	4g.96gb+gfx      able to do graphics
//	1c.3g.40gb       a compute instance of one slice inside a GPU instance of three
//	2g.0gb+gfx       of a GPU that uses the machine's memory (Thor), so instances have none
//
// The grammar is [<c>c.]<g>g.<gb>gb[(+|-)<attribute>]. [Parse] accepts one spelling for each
// profile, so that a name can be a map key, a resource name and part of a device ID. Names are
// never computed from sizes, since the memory in a name is the vendor's round figure: arithmetic
// made 7g.79gb of the driver's 7g.80gb.
//
// # Placements
//
// A card's memory is a row of memory slices, at most eight today. A GPU instance takes a run of
// them, and each profile may begin only at some: a 3g of an A100 at 0 or 4, a 2g at 0, 2 or 4. So
// five free memory slices may have room for single ones only. A [Placement] is a profile and the
// first slice, "3g.40gb@4". Every step of a plan names one: a driver that may choose fills the card
// in an order of its own, and then has no room for later instances.
//
// A [Card] is what can exist on one GPU, as its driver reports it. This package has no table of
// models, since names and figures differ between boards and drivers. The rules are with [Card].
//
// A container gets a compute instance. Most have a GPU instance to themselves and share its name.
// A split such as 1c.3g.40gb shares its GPU instance with others. It has a placement in there too,
// aligned to powers of two: "1c.3g.40gb@4.1". Counts and steps are of compute instances. Their GPU
// instance is created with the first and destroyed with the last.
//
// # Plans
//
// [Card.Plan] takes the instances that exist, some of them pinned because they are in use, and how
// many of each profile are wanted. It finds the target, a set of placements, that
//
//  1. keeps all pinned instances where they are,
//  2. destroys the fewest instances,
//  3. creates the fewest (this differs from 2 only if a GPU instance is empty after a failure and
//     can be filled),
//  4. leaves the most room: the sum of the sizes of all GPU instances that could still be placed in
//     the free runs, where profiles that differ only by an attribute count once,
//  5. comes first from left to right, smaller profiles before larger ones.
//
// The result is exact, and equal input gives equal plans. The steps are the difference: first what
// is destroyed, then what is created. Package fill describes the search.
//
// If the counts fit the card but not beside the pinned instances, the plan has no steps.
// [Plan.Blocked] then has the fewest holders, with the fewest instances, that must end. Plan.Keep
// has what stays even then and can still be offered.
//
//	c, err := mig.NewCard(&device.MIG)
//	plan, err := c.Plan(mig.Stand(&device.MIG), want)
//	switch {
//	case err != nil:           // impossible: err has the reason
//	case plan.Blocked != nil:  // not now: these are in the way
//	default:                   // plan.Steps, in order
//	}
//
// [Card.Feasible] reports whether an empty GPU could hold the counts. [Change] adds MIG mode to a
// plan.
//
// # On demand
//
// A GPU can also offer all its placements, and the agent creates an instance when a pod gets it.
// [Card.Fits] reports whether a placement is possible beside the taken ones. [Card.Make] finds the
// fewest idle instances to destroy for it, and the pinned ones that are in the way.
//
// [Prefer] chooses among free placements. It packs: it takes the one after which the GPUs have the
// most room left, in the measure of rule 4. A placement that nothing else could use costs less than
// one in the middle of the only placement of a 7g.
//
// # What is not known
//
// Some drivers report placements only while MIG is on, and people who write inventories leave
// figures out. An absent figure is unknown, never zero: see [NewCard] and [Stand]. Instances that
// are in no table count too: they take their room, and are kept if a profile of that name is
// wanted. Tables that are too large for an exact search are refused.
//
// The package does not know models of GPUs, resource domains, who holds an instance and why, how
// long a step takes, and whether it succeeded.
package mig
