// SPDX-License-Identifier: Apache-2.0

// Package agent is the loop: it looks, plans, withdraws, acts, looks again and
// publishes.
//
// One goroutine, [Agent.Run]'s, is the only one that changes hardware and the
// only one that publishes. Whatever happens elsewhere (the partition file, the
// node's labels, a GPU event, a claim, a container's wish to start or its end, a
// slow tick) leaves its news where the loop will read it and drops an empty token
// into a channel of size one. The loop then looks at the whole truth again; a
// token carries nothing that could be lost or come out of order.
//
// A round:
//
//	inventory := driver                  what is there; read beside the loop if it is old or news came
//	others    := kubelet                 what other device plugins offer
//	claims    := desk ∪ witnesses        who has what; they are asked before any cut
//	plan      := Plan(inventory, claims, wanted, cuts, others)
//	withdraw what the plan re-cuts       published Unhealthy: Allocate refuses it from here
//	plan again                           a claim that got in first keeps its GPU
//	save                                 what a successor must go on listing
//	publish, learn the driver's parts    if the driver or its GPUs changed: it takes a while
//	act                                  time slices; MIG in a later version
//	remove the CDI files of ended claims
//	write those of claims that may start before anything is said to be ready
//	publish                              the new view
//	report                               label, annotation, condition, Events, status
//
// What decides is pure and lives in plan.go and view.go: [Plan] from values to
// values, and the view built from its result. They are deterministic; the world
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
// Allocate is under way.
//
// # Witnesses (witness.go)
//
// Who has what is the word of two: the kubelet's checkpoint and the container
// runtime. PodResources gives names, and asking it makes the kubelet let go of
// what ended pods have. The checkpoint is written when a container is given
// devices and when a list arrives; where it names somebody whom nobody else
// knows, the list is sent again. The runtime tells of a container's end at once,
// and then the kubelet is asked every 50 ms for a while, so that devices are free
// a moment after it has let go.
//
// # Hardware (look.go)
//
// A reading runs beside the loop, which waits a second for it and then goes on
// with what it knows. Events do not wait for anybody: what they say against a GPU
// is in the kubelet's lists before the loop has woken. internal/health judges.
// Where the node's labels say that the driver is to be replaced, its handles are
// given up, and the process ends to start anew when it may have it back.
//
// # Memory (memory.go)
//
// The record of a claim is its CDI file, which names the resource and the devices
// in its annotations. One that has no file yet is in the journal of
// internal/state, beside what else a successor must know: which devices are still
// listed, which GPUs there were, and which were faulty. A new process takes all of
// it over before it says a word to the kubelet.
package agent
