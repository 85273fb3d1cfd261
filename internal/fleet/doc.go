// SPDX-License-Identifier: Apache-2.0

// Package fleet is what the placer's process knows of a cluster. It turns the API's Nodes,
// Pods and GPUNodes into entries of the books (internal/placer), and answers the doors'
// questions from them; [Fleet] is the extender's Books.
//
//	f := fleet.New("example.com", time.Now)
//	f.SetNode(node)
//	f.SetGPUNode("node-1", status)
//	f.SetPod(pod)
//	f.Listed(fleet.Nodes) // and the others, when each has been listed once
//	node, refused, err := f.Place(ctx, pod, []string{"node-1"})
//
// # Until all has been listed
//
// Books in which something is missing would call room free that is not. So questions are
// answered with an error until nodes, pods and GPUNodes have each been listed once; the
// scheduler then goes on without the placer, and counts it. Reservations need no file:
// a pod that is bound or nominated says so in the API, and who is asked for again is placed
// anew.
//
// # Who waits
//
// A scheduler does not look at GPUNodes, nor at reservations. So [Fleet.Run] remembers pods
// that were refused, and by which nodes. When there is news of such a node it asks the books
// again, once for all pods that ask for the same, and has the scheduler woken for the node
// where one of them fits. Who begins to lead takes pods of which the API says that no node
// has room for them.
//
// # Slow binds
//
// A pod keeps its room for ten minutes, unless the scheduler says why it is not bound. The time of that
// condition does not tell whether this is the outcome of the last answer: it stands still while the
// condition is False, and is of another clock, in seconds. The order of events does not tell either: a
// scheduler may ask again before the watch has shown why it failed before. Where what it says has changed
// since the answer, it has failed at some time. Then the room is kept for 30 s more. So an event that comes
// late takes no room from a pod that is being bound.
//
// # Groups
//
// kube-scheduler asks for the pods of a PodGroup one after the other. It binds as many as the group
// needs, or it binds none and begins anew at once, again and again. When room for one was looked for in
// vain, the others keep their places, since they may be bound without it. Each that is asked for again
// is not being bound, and loses its place. It is refused without a search until there is news of a node
// where one of them fits, or a minute has passed. What a group says of itself (how many pods it needs) is
// not read.
//
// # Unguarded pods
//
// A scheduler that gets no answer goes on without one. A pod that is bound with devices of an
// agent's, and was not placed there by this process, is told of once
// ([Fleet.TellUnguarded]). While another process leads ([Fleet.LeadBy]) none is; who leads
// next looks at the pods that were bound after that one's last word.
//
// # What a pod has
//
// A pod asks for what its containers request below the resource domain. It has the devices
// that its status names (containerStatuses[].allocatedResourcesStatus, Kubernetes 1.36), and
// has them until its object is deleted or all of its containers have ended.
//
// What a node offers through DRA is left to the scheduler, which has found room for it before
// it asks, also where a pod asks for it under the name of an extended resource.
//
// # Other doors
//
// A [Lender] keeps room for other clusters, and a [Holder] for workloads that have no pods yet.
// No question is answered until each has said what it had before ([Lend], [HoldFor]). They give
// nothing new while a pod may be bound where an earlier process has placed it ([Lender.Ready]).
//
// The package makes no requests. Whoever watches the API tells it what there is.
package fleet
