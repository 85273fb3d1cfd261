// SPDX-License-Identifier: Apache-2.0

// Package mig is the arithmetic of NVIDIA's Multi-Instance GPU: what a profile is
// called, which instances can exist side by side, and how a GPU gets from the instances
// that it has to those that are wanted. It touches no hardware; pkg/gpu/nvml does, and
// passes plain values of pkg/gpu.
//
// # Names
//
// A profile's name says how large an instance is:
//
//	1g.10gb          one compute slice, 10 GB of memory
//	1g.10gb+me       the same with the media engines, of which a card has few
//	1g.24gb-me       without any media engine
//	1g.24gb+me.all   with all of them
//	4g.96gb+gfx      able to do graphics
//	1c.3g.40gb       a compute instance of one slice inside a GPU instance of three
//	2g.0gb+gfx       of a GPU whose memory is the machine's (Thor), so instances have none
//
// The grammar is [<c>c.]<g>g.<gb>gb[(+|-)<attribute>]. [Parse] is strict: one
// spelling for one profile, so that a name can be a map key, a resource name
// and part of a device ID. What it accepts it prints back letter for letter.
//
// The memory in a name is the vendor's round figure, not a size. Names are
// never computed from sizes: arithmetic made 7g.79gb of the driver's 7g.80gb,
// and boards that share a PCI id carry different names.
//
// # Placements
//
// A card's memory is a row of memory slices, eight on most. A GPU instance takes a run
// of them, and each profile may begin only at some: a 3g of an A100 at 0 or 4, a
// 2g at 0, 2 or 4. So it is not enough to count. Five free memory slices may have room
// for nothing but single ones, because of where they are. A [Placement] is a profile
// and where it stands, "3g.40gb@4". Plans are made of placements, and every step names
// one: a driver that may choose fills the card in an order of its own, and then has no
// room for what would have fitted.
//
// A [Card] is what the driver says can exist on one GPU. There is no table of
// models here, since names and figures change from board to board and from
// driver to driver. Instances can exist side by side if
//
//   - their memory does not overlap,
//   - of no profile there are more than the driver's maximum,
//   - no more than one has the media extensions (+me),
//   - all together need no more media engines of a kind than the card has. How
//     many that is follows from the profiles themselves: what one instance can
//     have, or the most instances of a profile have together, the card has.
//     Where the driver does not tell engines, an instance with all of them
//     (+me.all) can exist beside those without any (-me) and no others.
//
// A container gets a compute instance. Most have a GPU instance to themselves and share
// its name, and need not be told apart from it. A split
// such as 1c.3g.40gb shares its GPU instance with others; it has a placement
// in there too, "1c.3g.40gb@4.1", aligned to powers of two. Counts and steps are
// of compute instances. Their GPU instance is made with the first and destroyed
// with the last.
//
// # Plans
//
// [Card.Plan] takes the instances that exist, some of them pinned because they are in use, and
// how many of each profile are wanted. It finds the target, a set of placements, that
//
//  1. keeps all that is pinned where it is,
//  2. destroys the fewest instances,
//  3. creates the fewest (this differs from 2 only where a GPU instance is empty
//     after a failure and can be filled),
//  4. leaves the most room: the sum of the sizes of all GPU instances that could
//     still be placed in what stays free, profiles that differ only by an
//     attribute counted once,
//  5. comes first from left to right, smaller profiles before larger ones.
//
// The result is exact. No other target is better in that order, and equal input
// gives equal plans. The steps are then the difference: what must go, and after
// that what comes.
//
// The search uses that all of this is a sum over the card's memory. A target is
// a row of GPU instances with free runs between them; an instance adds what it
// saves (it exists already: one destroy, one create), a free run adds its room.
// What is best from memory slice e on depends on e and on the counts still to be
// placed, and on nothing to the left. So
//
//	best(e, counts) = max over the next instance p that counts allow,
//	                  beginning at e or later, no pinned one skipped, of
//	                      room(e … p.start) + saved(p) + best(p.end, counts − p)
//
// with each state solved once. The saved and the room are one number, weighted
// so that the first rule that differs decides. Since the target's counts are
// given, the rules on counts and engines are settled before the search begins.
// Eight memory slices and seven profiles have 2,319 legal sets; a search looks at
// a few hundred states and takes microseconds.
//
// A GPU instance that is split is a part of the row too, once for every way to
// fill it: which of the compute instances in it stay, and which come in beside
// them. New ones go in from large to small, to the first compute slices that
// leave a way on, and GPU instances are filled in turn. How many of them the
// splits share is tried out from few to many.
//
// Where the counts fit the card but not beside what is pinned, there is no
// step. Then the search is done once more with nothing fixed and a high price
// on each holder, and what the best target lacks is [Plan.Blocked]: the fewest
// holders, with the fewest instances, that must end. Nothing else has to
// end. Plan.Keep has what stays even then and can remain on offer.
//
//	c, err := mig.NewCard(&device.MIG)
//	plan, err := c.Plan(mig.Stand(&device.MIG), want)
//	switch {
//	case err != nil:           // impossible: err says why
//	case plan.Blocked != nil:  // not now: these are in the way
//	default:                   // plan.Steps, in order
//	}
//
// [Card.Feasible] asks whether an empty GPU could hold the counts, and says why
// not in a sentence. [Change] adds MIG mode to a plan.
//
// # On demand
//
// A GPU can offer all its placements, and the instance is created when it is needed.
// [Card.Fits] says what is still possible beside what is taken; [Card.Make] says
// which idle instances have to go for a placement, the fewest, and what is in the way.
//
// [Prefer] chooses among free placements. It packs: it takes the one after which the
// GPUs have most room left, in the measure of rule 4. A placement that nothing
// else could use costs less than one in the middle of the only placement of a 7g. Of
// equal ones it takes one whose instance exists already, then one for which no other
// must go. What is best on one GPU does not depend on the
// others, so that for several placements at once it is enough to know what one, two,
// three … cost on each GPU. Against spreading over the emptiest GPUs this
// accepts 9 to 25 points more of the demand in TestPackingAcceptsMore; finer
// measures changed that by less than one.
//
// # What is not known
//
// Inventories come from drivers that report placements only with MIG on, and from
// people who write only what is needed. Absent figures are unknown, never zero: see
// [NewCard] and [Stand]. Instances that are in no table count all the same: they take
// their room, and are kept where a profile of that name is wanted. Tables that are too
// large for an exact search are refused.
//
// The package does not know models of GPUs, resource domains, who holds an
// instance and why, how long a step takes, and whether it succeeded.
package mig
