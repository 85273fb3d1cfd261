// SPDX-License-Identifier: Apache-2.0

// Package extender answers kube-scheduler's HTTP extender protocol, version 1: for each pod
// that asks for a managed resource the scheduler posts the pod and the nodes that have
// passed its own filters, and takes only those that come back.
//
//	handler := extender.New(books, extender.Options{})
//	server := extender.Server(handler)
//	err := server.Serve(listener)
//
// POST /filter answers with the one best node, where the books have made a reservation. The
// scheduler then has nothing left to choose, and the next pod, which it filters before
// this one is bound, meets the reservation. POST /preempt gets the nodes on which the
// scheduler would evict pods, and keeps those on which that opens room. There is no
// bind verb: with "ignorable: true" the scheduler binds by itself when one fails, so it could
// not both refuse and fail open.
//
// The scheduler's configuration says "nodeCacheCapable: true", so that nodes are sent by
// name. A request with whole nodes is refused with that advice.
//
// # Never in the way
//
// Scheduling waits for the answer. So there is one within [Options.Deadline], whatever the
// books do: after that it is 503, and with "ignorable: true" the scheduler goes on
// without it. Requests take turns at the books, and one that hangs keeps only itself. What
// cannot be read is answered with 400, and is likewise no obstacle. Each answer is
// counted by verb and [Outcome]; all but [Placed], [Refused] and [Deferred] are pods that were
// scheduled unguarded.
//
// A pod with a schedulingGroup is bound together with others or not at all. If the scheduler put one
// of these somewhere by itself, the group could be bound in part. So where there would be a 503 for such a
// pod, no node can take it: the scheduler tries the whole group again.
//
// Nothing is asked of the books for a client that has gone.
//
// # Who may ask
//
// Of a pod in a request only the UID is believed, and that it is of a group, which turns an error into a
// refusal: what it asks for, and whether there is such a pod, the API server says. One that it has not shown yet is waited for, without a turn, and then
// the answer is 503. Still whoever reaches the door can reserve room for pods that wait.
// [Files] gives it TLS with clients' certificates.
//
// The package knows the protocol, and nothing of GPUs: what fits where is [Books]' word.
package extender
