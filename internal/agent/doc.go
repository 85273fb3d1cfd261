// SPDX-License-Identifier: Apache-2.0

// Package agent is the loop: it looks, plans, withdraws, acts, looks again and
// publishes.
//
// One goroutine, [Agent.Run]'s, is the only one that decides and the only one that
// publishes. What takes long on the hardware is done beside it, on each GPU one
// thing at a time. Whatever happens elsewhere (the partition file, the node's
// labels, a GPU event, a claim, a container's wish to start or its end, the end of
// such work, a slow tick) leaves its news where the loop will read it and drops an
// empty token into a channel of size one. The loop then looks at the whole truth
// again; a token carries nothing that could be lost or come out of order.
//
// A round:
//
//	results of work that has ended       what is true of its GPU now
//	inventory := driver                  what is there; read beside the loop if it is old or news came
//	others    := kubelet                 what other device plugins and DRA drivers have
//	claims    := desk ∪ witnesses        who has what; they are asked before any cut
//	plan      := Plan(inventory, claims, wanted, cuts, others)
//	withdraw what the plan takes away    published Unhealthy: Allocate refuses it from here
//	plan again                           a claim that got in first keeps what it has
//	save                                 what a successor must go on listing, and what is to be made
//	begin work                           MIG mode and instances; it goes on beside the loop
//	publish, learn the driver's parts    if the driver or its GPUs changed: it takes a while
//	time slices
//	remove the CDI files of ended claims
//	write those of claims that may start before anything is said to be ready
//	publish                              the new view
//	report                               label, annotation, condition, Events, status
//
// What decides is pure and lives in plan.go, mig.go and view.go: [Plan] from values
// to values, and the view built from its result. They are deterministic; the world
// is in the other files.
//
// # Cuts
//
// A GPU's [Cut] is how it is divided now; it changes only while no claim is on
// the GPU. What the wanted partition no longer keeps is withdrawn at once (or
// left on offer, with --when-busy wait), so that a stream of new pods cannot
// hold a change off for ever, and the change is done by itself when the last
// holder ends. A withdrawn device stays in its list as Unhealthy for a minute,
// over a restart too: the kubelet does not survive an ID that leaves while its
// Allocate is under way. A partition makes at most half as many devices as may be
// listed, so that those of the next one have room beside them; where they have none
// all the same (edits in a row, GPUs that many holders keep as they are), the GPU is
// withdrawn and cut when others have left the lists (rows.go).
//
// # MIG (mig.go)
//
// A GPU in MIG mode is not cut at one stroke: its devices come and go one by one,
// each beside others that are in use. Its Cut lists the slots on offer. With a
// fixed geometry those are the instances that stand and are wanted; on demand they
// are all slots of the profiles that the partition allows, whether anything stands
// there or not, and the desk withdraws those that have no room beside what is
// taken. Every round asks pkg/mig the same question anew: from what stands, with
// that pinned which a claim or a process has, to what is wanted. So an edit in the
// middle of a change, a restart and a call that failed need nothing of their own.
//
//	geometry 7×1g.10gb → 2×3g.40gb, a pod on 1g.10gb@5:
//	  Blocked: ns/train-3 (1g.10gb@5)    no step is taken on this GPU
//	  Leaving: all that the target lacks Unhealthy, or leaving where it is held
//	  …the pod ends: destroy seven, create two, then the new devices are listed
//
//	on demand, a pod claims 3g.40gb@0 while 1g.10gb@1 stands idle:
//	  Allocate                           1g@0…3, 2g@0, 4g@0 … turn Unhealthy at once
//	  Prepare: the wish                  Work: destroy 1g.10gb@1, create 3g.40gb@0
//	  the instance stands                CDI file with its two capability nodes, gate open
//	  the pod ends                       the instance stays, for the next pod or until its room
//	                                     is wanted (or --idle-instance-ttl is over)
//
// A claim that was granted is made good, whatever the partition has become since:
// its pod could not end otherwise. So wishes come before what the partition wants,
// on a GPU of any geometry; only a GPU that is not in MIG mode and is not to be is
// blocked by such a claim instead, and the state names it.
//
// Whose an instance is, is remembered by its place: those that this agent made,
// those that a claim has, and those that a geometry keeps are its own. All others
// are foreign. They are offered where they fit and stay, unless --foreign-instances
// is reclaim. What is to be made is written down as its own before it is made, and
// an instance that is gone is forgotten: what comes to its place by another hand is
// that hand's.
//
// A process on an instance that no claim covers pins it like a holder. Nothing
// tells when it ends, so GPUs are read every 2 s while somebody waits for that.
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
// when another partition is wanted; what failed for a claim has a pause of its own,
// and after three failures in a row its slot is withdrawn for a while, with an
// Event. The driver is not let go under a job.
//
// A job is not begun while the driver is away, while the witnesses have not been
// heard, or where the state cannot be written down. Whatever keeps a container
// waiting, its pod reads it in the kubelet's Event (waits.go).
//
// # Witnesses (witness.go)
//
// Who has what is the word of two: the kubelet's checkpoint and the container
// runtime. PodResources gives names, and asking it makes the kubelet let go of
// what ended pods have. The checkpoint is written when a container is given
// devices and when a list arrives; where it names somebody whom nobody else
// knows, the list is sent again. The runtime tells of a container's end at once,
// and then the kubelet is asked every 50 ms for a while, so that devices are free
// a moment after it has let go. A runtime that has no events, or whose events the
// kubelet would lose to us, is asked with the others every 8 s.
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
// # Hardware (look.go)
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
// The record of a claim is its CDI file, which names the resource and the devices
// in its annotations. One that has no file yet is in the journal of
// internal/state, beside what else a successor must know: which devices are still
// listed, which MIG instances are the agent's, which GPUs there were, and which were
// faulty. A new process takes all of it over before it says a word to the kubelet,
// and calls nothing wrong before the driver has answered it once.
package agent
