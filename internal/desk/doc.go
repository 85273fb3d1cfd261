// SPDX-License-Identifier: Apache-2.0

// Package desk is the one place where what is on offer meets who has taken it:
// one mutex over the current [View] and the [Claim]s on it.
//
// The loop publishes a view: an immutable list of resources and their devices,
// each healthy, unhealthy, or leaving. The kubelet's streams read it, Allocate
// checks against it and writes a claim down. Because both happen under one
// mutex, the race that matters has only two outcomes: either Allocate came
// first, and the loop, which looks at the claims again after it has withdrawn
// a device, sees the claim and leaves the GPU alone; or the withdrawal came
// first, and Allocate refuses. There is no third.
//
// The kubelet decides who holds a device. So Allocate never refuses an ID
// because another claim names it: for one pod the kubelet hands an init
// container's devices to the app container. It refuses what can never work
// (units of two GPUs, two replicas of one GPU, a MIG slot that has no room beside
// another one's, a device that the present view does not offer), with the reason,
// and that refusal is final for the pod.
//
// Where the kubelet lets the desk choose, Prefer leaves out what Allocate would
// refuse, and takes what a claim covers last: the pod that had it was deleted by
// force, and the next container on it waits until that one's has ended.
//
// A GPU cut by MIG on demand is offered several times over: every slot that could
// stand on it is a device. A view lists them as if the GPU were empty, with what
// the driver says can stand together ([MIGView]), and the desk lays over that what
// is taken: by claims, by slots that somebody unknown uses. A device is Healthy if
// a claim has it, whatever else is there, or if it can stand beside all that is
// taken; all others are Unhealthy. That is done in the Allocate that takes a slot
// and when its claim ends, so between a claim and what it covers there is no
// moment at which both are on offer:
//
//	                 1g@0  1g@1  …  2g@0  2g@2  …  3g@0  3g@4  4g@0  7g@0
//	nothing taken     x     x        x     x        x     x     x     x
//	2g@2 claimed      x     x        x     x              x
//	1g@1 beside it    x     x              x              x
//
// A claim lives through these states:
//
//	Allocate ──► unconfirmed ──► named by a witness ──► named by none: ended
//	                 │
//	                 └── named by none for 30 seconds: ended
//
// The witnesses are the kubelet's checkpoint, which is never short of a holder
// but may be stale, and the container runtime, which knows what runs.
// [Desk.Reconcile] moves claims along by what both say; a claim ends only when
// they agree. [Testimony] is read by the loop, and all of it is about one moment:
// what was said before a claim's last Allocate does not concern it. Whose a container
// is, that of the pod that has a claim now or of one before it, is told by what was
// known at the Allocate, then by the checkpoint, then by the gate: a clock can be put
// back between two of them.
//
// A claim is ready when its container may be created: its CDI file stands, and
// no container of another pod is still on its devices (a force-deleted pod frees
// them before its containers are dead). Prepare, the kubelet's
// PreStartContainer, waits for that. An Allocate of a claim that stands, for the
// next pod or for the app container after the init container, makes it unready
// again until that has been looked at. Prepare is also the wish by which a MIG
// instance is made ([Claim].Wished), no sooner: not every claim leads to a
// container. What keeps it from being made is told to whoever waited in vain
// ([Desk.SetTrouble]).
//
// Faults are apart from the view: [Desk.SetFaults] marks all devices of a GPU, or
// the MIG slot that one instance has, Unhealthy at once, whatever the loop is doing.
//
// The package has no clock and no file system: times are arguments, and what is
// kept on disk is the loop's business. It does not know the kubelet's types, the
// driver, or how GPUs are cut; a view arrives ready-made, and what can stand beside
// what on a GPU is pkg/mig's to say.
package desk
