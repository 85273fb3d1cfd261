// SPDX-License-Identifier: Apache-2.0

// Package dra is the front-end of the ledger for dynamic resource allocation (DRA): here
// the scheduler decides who gets what, and needs to know beforehand what there is.
//
// # What is published
//
// [Build] says what the node's ResourceSlices are, from inventory and layouts. Each GPU
// has a set of counters, and each device says what it takes of them; the scheduler adds
// them up. So it never puts together what cannot stand together:
//
//	counters of gpu-5a2f:      memory-slice-0 … memory-slice-7: 1 each, media: 1, memory: 80Gi
//	gpu-5a2f                   takes all
//	gpu-5a2f-shared            takes all, once, however many claims have a share of it
//	gpu-5a2f-mig-1g10gb-3      takes memory-slice-3
//	gpu-5a2f-mig-3g40gb-4      takes memory-slice-4 … memory-slice-7
//
// The counters of MIG are the card's own rules ([mig.Card.Counters]). Names of devices,
// attributes, capacities and counters are NVIDIA's where its driver has them, so that a
// selector moves by changing its prefix. A device is named for its GPU's UUID: an index
// would mean another GPU after a card was taken out, and claims outlive that.
//
// A [Publisher] keeps that at the API server, from the moment at which the kubelet has
// registered the driver: a kubelet that starts deletes the node's slices.
//
// # What leaves
//
// A device that no layout has any more stays in its slice, tainted, until no claim names
// it. One that left while a claim has it would give its counters back, and the scheduler
// would put somebody else there (kubernetes#140802).
//
// Settle ([Promises]) is asked before something is taken away from the hardware: when the
// taint is at the server, whoever was allocated the device before is taken into the
// ledger, although nobody has prepared it yet, and the plan waits for its end.
//
// Leave ([Promises]) is asked before the process ends: a pod whose claim nobody prepares at
// once waits for a minute or more, since the kubelet tries again then.
//
// # A claim
//
// The kubelet's Prepare names a claim. The intake reads at the API server what the scheduler
// has given it, and takes an allocation for each result. Its ID, and so the CDI device,
// follows from the claim's UID and the request, and its record says which claim it is of:
//
//	claim 5f8a…, request "gpu" ► 24 GiB of gpu-5a2f…-shared
//	allocation 9c1b…, ref {"uid":"5f8a…","request":"gpu","n":0,…}, grant {"kind":"units","units":"0-23",…}
//	container ► CDI device example.com/gpu=9c1b…
//
// A share has no numbers in this API; it gets the lowest that are free. What is not there
// yet is waited for, up to the kubelet's patience: room that an ending claim has, an
// instance, and after a start of the agent the claims themselves. Only what can never be
// had is refused: a device of an older layout, an amount, configuration, an instance that
// the hardware's driver refuses to make. The pods of such a
// claim are told, and ended half a minute later, by a taint or by eviction; none that has
// a container, none of another node, and none whose next claim would ask for the same. The
// one configuration that is known is NVIDIA's of time slices, which are the grant's.
//
// A claim ends with the kubelet's Unprepare, or when the kubelet's account, the container
// runtime and the API server all know nothing of it. All containers and pods that use a
// claim have its CDI devices, and so one page and one cap between them.
//
// # Rooms
//
// [New] makes these and connects them; [FrontEnd] has them, and no state of its own:
//
//	room       file         owns                                            lock
//	shelf      shelf.go     slices out: the offer, what is published and    its own
//	                        leaving, the writings that withdraw something
//	Publisher  publisher.go the slices at the API server, their numbers     its own
//	book       book.go      claims in: which allocations are of which       its own
//	                        claim, what is given back or was given anew
//	intake     prepare.go   claims in: Prepare and Unprepare under way      none
//	promises   promises.go  ends: the list that Settle waits for            its own
//	sweeper    sweep.go     ends: nothing but the time of the next look     none
//	refusals   refused.go   ends: the claims that can never be prepared,    its own
//	                        and by which devices their pods are ended
//
// Values pass between them. The shelf gives out a view, which does not change: the offer, the
// devices in the slices, those that leave, and which writing the server has. What a claim is given
// follows from a view and the ledger alone (grant). The book takes shares and API answers, and gives
// shares and allocations. Refusals give the shelf the devices that are to end pods. A token has the
// sweeper look.
//
// The book's lock, the refusals' and that of promises are held before the shelf's, and the shelf's
// before the Publisher's and the ledger's. Of those three nobody holds two. A claim is taken under the book's
// lock and the shelf's, so that it is never taken by an older offer than the one in force. The API
// server, the kubelet and the runtime are asked with no lock held.
//
// # What it does not know
//
// How slices are written, claims read and pods evicted, which is internal/kube/agentkube's business, how the
// kubelet calls, which is pkg/dra's, and how GPUs come to be laid out.
package dra
