// SPDX-License-Identifier: Apache-2.0

// Package dra is the ledger's front-end for dynamic resource allocation (DRA). With DRA the
// scheduler decides which pod gets which device, so a node has to publish its devices
// beforehand.
//
// # What is published
//
// [Build] makes the node's ResourceSlices from the inventory and the layouts of the GPUs. Each
// GPU has a set of counters. Each device lists how much of them it takes, and the scheduler
// adds that up. So the scheduler never combines devices that cannot exist side by side:
//
//	counters of gpu-5a2f:      memory-slice-0 … memory-slice-7: 1 each, media: 1, memory: 80Gi
//	gpu-5a2f                   takes all
//	gpu-5a2f-shared            takes all, once, however many claims have a share of it
//	gpu-5a2f-mig-1g10gb-3      takes memory-slice-3
//	gpu-5a2f-mig-3g40gb-4      takes memory-slice-4 … memory-slice-7
//
// The counters of a GPU with MIG are the card's own rules ([mig.Card.Counters]). Devices,
// attributes, capacities and counters have the names that NVIDIA's driver gives them, where it
// has them: a selector moves here when its prefix is changed. A device's name contains its
// GPU's UUID, not its index, since claims outlive a change of the index.
//
// A [Publisher] writes the slices to the API server once the kubelet has registered the driver.
// Earlier would be in vain: a kubelet deletes the node's slices when it starts.
//
// # Devices that leave
//
// A device that is in no layout any longer stays in its slice, tainted, until no claim names
// it. Without it its counters would be free, and the scheduler would give its room to another
// claim while the first claim still has it (kubernetes#140802).
//
// The loop calls Settle ([Reservations]) before it takes something away from the hardware. Settle
// waits until the server has the taint. Then it takes the claims into the ledger that the
// scheduler had allocated before that and that no kubelet call has prepared yet. The plan waits
// for their end. The agent calls Leave ([Reservations]) before it ends: a claim that is not
// prepared at once keeps its pod waiting for a minute or more, until the kubelet tries again.
//
// # A claim
//
// The kubelet calls Prepare with the name of a claim. Prepare reads at the API server what the
// scheduler has allocated for it, and takes an allocation for each result. The allocation's ID,
// which is also its CDI device, follows from the claim's UID and the request. Its record names
// the claim:
//
//	claim 5f8a…, request "gpu" ► 24 GiB of gpu-5a2f…-shared
//	allocation 9c1b…, ref {"uid":"5f8a…","request":"gpu","n":0,…}, grant {"kind":"units","units":"0-23",…}
//	container ► CDI device example.com/gpu=9c1b…
//
// DRA has no numbers for units and replicas, so a share gets the lowest that are free. Prepare
// waits for what is still to come, as long as the kubelet's call lasts: the room of a claim
// that is ending, a MIG instance, and the list of claims after a start of the agent.
//
// Prepare refuses a claim only if it can never be prepared: it names a device of an older
// layout, a wrong amount, configuration other than NVIDIA's time slices, or an instance that
// the GPU's driver refuses to make. The claim's pods get an Event. Half a minute later they are
// ended, by a taint or by eviction, so that their controllers make them anew. A pod is not
// ended if it has a container, is on another node, or would come back with the same request.
//
// A claim ends with the kubelet's Unprepare, or when the kubelet, the container runtime and the
// API server all know nothing of it. All containers and pods that use a claim get its CDI
// devices, so they share one limit page and one cap.
//
// # Parts
//
// [New] makes the parts below and connects them. [FrontEnd] has no state besides.
//
//	part         file            does                                            lock
//	shelf        shelf.go        has the loop's offer, and what is published     its own
//	                             of it; numbers the writes that withdraw
//	                             something
//	Publisher    publisher.go    keeps the slices at the API server              its own
//	book         book.go         knows which allocations are of which claim,     its own
//	                             and which claims were unprepared or
//	                             reallocated
//	intake       prepare.go      runs Prepare and Unprepare                      none
//	reservations reservations.go runs Settle and Leave; has the list of claims   its own
//	                             that Settle waits for
//	sweeper      sweep.go        ends claims that ended without an Unprepare     none
//	refusals     refused.go      has the claims that can never be prepared,      its own
//	                             and ends their pods
//
// The shelf gives out a view, which never changes. What a claim is given follows from a view
// and the ledger alone (grant).
//
// The locks of the book, the refusals and the reservations come before the shelf's, and the shelf's
// before those of the Publisher and the ledger. No goroutine holds two of the first three. A
// claim is taken under the locks of the book and the shelf, so that it never comes from an older
// offer than the one in force. No lock is held during a call to the API server, the kubelet or
// the runtime.
//
// # Limits
//
// The package does not know how slices are written, claims read and pods evicted
// (internal/kube/agentkube), how the kubelet calls (pkg/dra), and how GPUs come to be laid out.
package dra
