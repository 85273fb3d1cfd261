// SPDX-License-Identifier: Apache-2.0

package ledger

// Phase is how far an allocation is on its way to a container.
type Phase string

// Phases, in their order.
const (
	// Reserved: it was given, and it is not known yet whether the previous holder still has its
	// pieces.
	Reserved Phase = "reserved"
	// Waiting: another holder still has its pieces. Or it is Superseded, and its own containers
	// have not ended: then it opens only if it is reinstated. Or it yields: then it opens when the
	// guaranteed allocation that has its room has ended.
	Waiting Phase = "waiting"
	// Taken: its pieces are free, and no container of it is to start yet.
	Taken Phase = "taken"
	// Making: its container is to start, and the loop makes what that needs: a MIG instance, the
	// limit page, the CDI file.
	Making Phase = "making"
	// Open: its CDI file exists, and its container may be created.
	Open Phase = "open"
	// Parked: its container runs, and none of its processes has memory on a GPU. Only an allocation of the
	// spot tier is ever parked. Its room is its own again when no guaranteed allocation has it, and it is
	// restored then.
	Parked Phase = "parked"
	// Released: its front-end has ended it, and the ledger has forgotten it.
	Released Phase = "released"
)

// Transition is a step of an allocation from one phase to another.
type Transition struct{ From, To Phase }

// Step is a transition with its trigger, in words for people.
type Step struct {
	Transition
	By string
}

// Transitions are all steps that there are. An allocation begins as Reserved.
var Transitions = []Step{
	{Transition{Reserved, Waiting}, "a look finds its pieces in use, or it is superseded, or it is to yield"},
	{Transition{Reserved, Taken}, "a look finds its pieces free, and its container is not to start yet"},
	{Transition{Reserved, Making}, "a look finds its pieces free, and its container is to start"},
	{Transition{Waiting, Taken},
		"the previous holder has ended, and its container is not to start yet; or it is reinstated"},
	{Transition{Waiting, Making}, "the previous holder has ended, and its container is to start"},
	{Transition{Taken, Waiting}, "a look finds its pieces in use, or it is superseded, or it is to yield"},
	{Transition{Taken, Making}, "its container is to start"},
	{Transition{Making, Waiting}, "a look finds its pieces in use, or it is superseded, or it is to yield"},
	{Transition{Open, Waiting}, "it is to yield"},
	{Transition{Taken, Open}, "what its container needs is there"},
	{Transition{Making, Open}, "what its container needs is there"},
	{Transition{Open, Taken}, "what its container needs is gone"},
	{Transition{Waiting, Reserved}, "it is renewed, or no longer has to yield"},
	{Transition{Taken, Reserved}, "it is renewed"},
	{Transition{Making, Reserved}, "it is renewed"},
	{Transition{Open, Reserved}, "it is renewed"},
	{Transition{Reserved, Parked}, "an earlier process of the agent has parked it"},
	{Transition{Waiting, Parked}, "its processes were parked"},
	{Transition{Taken, Parked}, "an earlier process of the agent has parked it"},
	{Transition{Making, Parked}, "an earlier process of the agent has parked it"},
	{Transition{Open, Parked}, "an earlier process of the agent has parked it"},
	{Transition{Parked, Reserved}, "its room is free, and it is to be restored; or its container has ended; or it is renewed"},
	{Transition{Parked, Waiting}, "its container has ended, and its room is still wanted; or it is superseded"},
	{Transition{Parked, Released}, "its front-end releases it"},
	{Transition{Reserved, Released}, "its front-end releases it"},
	{Transition{Waiting, Released}, "its front-end releases it"},
	{Transition{Taken, Released}, "its front-end releases it"},
	{Transition{Making, Released}, "its front-end releases it"},
	{Transition{Open, Released}, "its front-end releases it"},
}
