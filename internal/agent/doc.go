// SPDX-License-Identifier: Apache-2.0

// Package agent is the loop: it looks, plans, withdraws, acts, looks again and
// publishes.
//
// One goroutine, [Agent.Run]'s, is the only one that touches hardware and the
// only one that publishes. Whatever happens elsewhere (the partition file, the
// node's label, a GPU event, a claim, a container's wish to start, a slow tick)
// leaves its news where the loop will read it and drops an empty token into a
// channel of size one. The loop then looks at the whole truth again; a token
// carries nothing that could be lost or come out of order.
//
// A round:
//
//	inventory := driver                  what is there; read anew if it is old or news came
//	claims    := desk ∪ PodResources     who has what; the kubelet is asked before any cut
//	plan      := Plan(inventory, claims, wanted, cuts)
//	withdraw what the plan re-cuts       published Unhealthy: Allocate refuses it from here
//	plan again                           a claim that got in first keeps its GPU
//	publish, learn the driver's parts    if the driver or its GPUs changed: it takes a while
//	act                                  time slices; MIG in a later version
//	write the CDI files of new claims    before anything is said to be ready
//	publish                              the new view
//	remove the CDI files of ended claims
//	report                               label, annotation, Event, status
//
// What decides is pure and lives in plan.go and view.go: [Plan] from values to
// values, and the view built from its result. They are deterministic; the world
// is in agent.go.
//
// A GPU's [Cut] is how it is divided now; it changes only while no claim is on
// the GPU. What the wanted partition no longer keeps is withdrawn at once (or
// left on offer, with --when-busy wait), so that a stream of new pods cannot
// hold a change off for ever, and the change is done by itself when the last
// holder ends. A withdrawn device stays in its list as Unhealthy for a minute:
// the kubelet does not survive an ID that leaves while its Allocate is under
// way.
//
// The record of a claim is its CDI file: it names the resource and the devices
// in its annotations, so that a new process takes its predecessor's claims over
// from the directory, before the kubelet has said a word.
package agent
