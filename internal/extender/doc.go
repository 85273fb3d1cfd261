// SPDX-License-Identifier: Apache-2.0

// Package extender answers kube-scheduler's HTTP extender protocol, version 1. For each pod
// that asks for a managed resource, the scheduler posts the pod and the nodes that have
// passed its own filters. It then considers only the nodes that come back.
//
//	handler := extender.New(books, extender.Options{})
//	server := extender.Server(handler)
//	err := server.Serve(listener)
//
// POST /filter answers with the one best node, where the books have reserved room. The
// scheduler then has no choice left. It filters the next pod before it binds this one, and
// the books already count the reservation.
//
// POST /preempt gets the nodes on which the scheduler would evict pods. It keeps those on
// which that opens room.
//
// There is no bind verb. With "ignorable: true" the scheduler binds a pod by itself if the
// extender's bind fails. So the verb could not both refuse a pod and fail open.
//
// The scheduler's configuration must have "nodeCacheCapable: true": then the scheduler sends
// nodes by name. A request with whole nodes is answered with 400 and this advice.
//
// # Never in the way
//
// Scheduling waits for the answer. So each request is answered within [Options.Deadline],
// even if the books hang: at the deadline the answer is 503. With "ignorable: true" the
// scheduler then goes on without the extender. A request that cannot be read is answered
// with 400, and the scheduler goes on, too.
//
// Requests take turns at the books. Behind one that hangs, each waits until its own
// deadline. A request whose client has gone does not reach the books.
//
// Each answer is counted by verb and [Outcome]. The scheduler places a pod unguarded after
// every outcome but [Placed], [Refused] and [Deferred].
//
// The scheduler binds a pod with a schedulingGroup together with others or not at all. If it
// placed one such pod without the extender, it could bind a part of the group. So for such a
// pod an answer that no node has room takes the place of 503, and the scheduler tries the
// whole group again.
//
// # Who may ask
//
// The books know from the API server which pods there are and what they ask for. So a
// request can only name a pod by its UID, and say that it is of a group, which turns an
// error into a refusal. If the API server has not shown the pod yet, the request waits
// for that without a turn, and is answered with 503 if it takes too long.
//
// Still, any client that reaches the port can reserve room for pods that wait. [Files]
// configures TLS that accepts only clients with a certificate.
//
// The package knows the protocol. It knows nothing about GPUs: [Books] decide what fits.
package extender
