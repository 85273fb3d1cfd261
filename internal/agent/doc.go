// SPDX-License-Identifier: Apache-2.0

// Package agent is the loop: it looks, plans, withdraws, acts, looks again and
// publishes.
//
// One goroutine, [Agent.Run]'s, is the only one that decides and the only one that
// publishes. What takes long on the hardware is done beside it, on each GPU one
// thing at a time. Whatever happens elsewhere (the partition file, the node's
// labels, a GPU event, an allocation, a container's wish to start or its end, the end of
// such work, a slow tick) leaves its news where the loop will read it and drops an
// empty token into a channel of size one. The loop then looks at the whole truth
// again; a token carries nothing that could be lost or come out of order.
//
// A round (round.go has a function for each of these):
//
//	readHardware   what jobs came to; inventory := driver, read beside the loop if it is old or news came
//	want           what the partition means on these GPUs
//	lookAround     which GPUs other device plugins and DRA drivers have
//	plan           plan.Make(inventory, ledger, wanted, layouts, others)
//	askHolders     who has what, by the kubelet and the runtime: always before a GPU is laid out anew; plan again
//	withdraw       what the plan takes away is published Unhealthy, and Allocate refuses it from here;
//	               plan again: an allocation that got in first keeps what it has
//	act            write down what a successor must go on listing, and what is to be made; begin the work
//	               on MIG mode and instances, which goes on beside the loop
//	setDriver      learn the driver's parts if it or its GPUs changed; time slices
//	openGates      remove the CDI files of ended allocations, write those of allocations that may start, and then
//	               publish what is on offer
//	finish         report: labels, annotations, condition, Events, status
//
// Each thing that outlives a round is in a type of its own, which has no way back to the
// loop: reader and faults (look.go, faults.go), executor (work.go), partitions, layouts,
// coexistence (others.go, prepared.go), timeSlices (slices.go), served (serve.go),
// gatekeeper (gates.go, cap.go, instances.go, waits.go), journal, reporter (report.go). [Agent] joins them. What they keep is for the loop's goroutine,
// but where they say otherwise.
//
// What decides is pure: package plan, from values to values, and
// internal/deviceplugin's Build, which makes the offer from its result. Both are
// deterministic; the world is in the other files.
//
// # Layouts
//
// What a GPU offers is its [plan.Layout]; package plan decides when it changes. A
// withdrawn device stays in its list as Unhealthy for [plan.Linger], over a restart
// too: the kubelet does not survive an ID that leaves while its Allocate is under way.
//
// A MIG instance that an allocation waits for is made when its container is to start: the
// wish comes before what the partition wants. Whose an instance is, is remembered by
// its place: those that this agent made, those that an allocation has, and those that a
// geometry keeps are its own. All others are foreign. They are offered where they fit
// and stay, unless --foreign-instances is reclaim. What is to be made is written down
// as its own before it is made, and an instance that is gone is forgotten: what comes
// to its place by another hand is that hand's.
//
// # Work on the hardware (work.go)
//
// A plan's steps for one GPU are a job. It first looks whether the GPU still is
// what the plan was made for, and comes back to be planned again if not. Where a
// step fails, those before it are undone in reverse order, so that the GPU has its
// old geometry or its new one; a mode that waits for a reset is not undone. While a
// job runs the GPU's offer stays as it was published before the job, less what was
// withdrawn, and readings of that GPU's instances are not believed. What a job
// comes to is read from the driver, never worked out.
//
// What failed for the partition is tried again after a pause that doubles, at once
// when another partition is wanted; what failed for an allocation has a pause of its own,
// and after three failures in a row its placement is withdrawn for a while, with an
// Event. The driver is not let go under a job.
//
// A job is not begun while the driver is away, while the witnesses have not been
// heard, or where the state cannot be written down. Whatever keeps a container
// waiting, its pod reads it in the kubelet's Event (waits.go).
//
// # Others (others.go, prepared.go)
//
// A GPU that somebody else may give out is not offered. The kubelet knows what other
// device plugins offer and who has some of it, and its checkpoint knows that even
// after a restart. But nobody takes an ended pod's entry out of that file once its
// plugin has gone, so an entry counts while the runtime knows the pod, and for half
// a minute after the file was first seen, since the sandbox comes later; where the
// runtime is silent, it counts. Devices of other DRA drivers are in the kubelet's
// list by name; the drivers' ResourceSlices say which GPUs they are. Where nobody
// can say which, it may be any, and none is offered.
//
// # Hardware (look.go, faults.go)
//
// A reading runs beside the loop, which waits a second for it and then goes on
// with what it knows. Events do not wait for anybody: what they say against a GPU
// is in the kubelet's lists before the loop has woken. internal/health judges. What
// hits one MIG instance takes that instance's devices off and no other's.
// Where the node's labels say that the driver is to be replaced, its handles are
// given up, and the process ends to start anew when it may have it back.
//
// # Memory (memory.go)
//
// The record of an allocation is its CDI file, which names the resource and the devices
// in its annotations. One that has no file yet is in the journal of
// internal/state, beside what else a successor must know: which devices are still
// listed, which MIG instances are the agent's, which GPUs there were, and which were
// faulty. A new process takes all of it over before it says a word to the kubelet,
// and calls nothing wrong before the driver has answered it once.
package agent
