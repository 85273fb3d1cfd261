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
// (units of two GPUs, two replicas of one GPU, a device that the present view
// does not offer), with the reason, and that refusal is final for the pod.
//
// A claim lives through these states:
//
//	Allocate ──► unconfirmed ──► named by the kubelet ──► no longer named: ended
//	                 │
//	                 └── never named for ten minutes: ended
//
// A claim is made ready by the loop, when the container's CDI file stands;
// Prepare (the kubelet's PreStartContainer) waits for that. [Desk.Reconcile]
// moves claims along by what the kubelet's PodResources service lists. That
// service lags Allocate and leaves out plain init containers, which is why a
// claim is not judged in its first 30 seconds and one that was never named is
// kept for ten minutes.
//
// The package has no clock and no file system: times are arguments, and what is
// kept on disk is the loop's business. It does not know the kubelet's types, the
// driver, or how GPUs are cut; a view arrives ready-made.
package desk
