// SPDX-License-Identifier: Apache-2.0

// Package fleet is what the placer's process knows of a cluster. It turns the API's Nodes,
// Pods and GPUNodes into entries of the books (internal/placer). From the books it answers
// the doors, which are the packages that speak with schedulers, Kueue and Liqo. [Fleet] is
// the Books of the scheduler's door (internal/extender).
//
//	f := fleet.New("example.com", time.Now)
//	f.SetNode(node)
//	f.SetGPUNode("node-1", status)
//	f.SetPod(pod)
//	f.Listed(fleet.Nodes) // and the other kinds, when each has been listed once
//	node, refused, err := f.Place(ctx, uid, []string{"node-1"})
//
// The package makes no requests. The caller watches the API and tells the Fleet what changes.
//
// # Before all has been listed
//
// Books that lack a pod would call its room free. So the Fleet returns an error for each
// question until nodes, pods and GPUNodes have each been listed once. The scheduler then
// places the pod without the placer, and internal/extender counts it.
//
// The Fleet keeps no file. A pod that is bound or nominated has its node in the API. A pod
// with a reservation that is lost gets another one when the scheduler asks again.
//
// # Pods that wait
//
// A scheduler does not read GPUNodes or reservations, so it does not notice when they free
// room. The Fleet remembers each pod that was refused, and the nodes that had no room for it.
// When there is news of such a node, [Fleet.Run] asks the books again: once for all pods of
// a namespace that ask for the same. If there is room, Run has the scheduler woken for that
// node, and the scheduler asks again for the pods that wait.
//
// A process that begins to lead does not know which pods the former leader refused. It takes
// the pods with the reason Unschedulable in their condition PodScheduled.
//
// # Slow binds
//
// A pod keeps its reservation for ten minutes. The scheduler writes into the condition
// PodScheduled why it has not bound a pod. If the reason or the message has changed since
// the placer's answer, the scheduler has given the pod up at some time, before that answer
// or after it. Then the pod keeps its reservation for another 30 s only.
//
// The reservation does not end at once, since an event that comes late must not take the
// room of a pod that is being bound. The Fleet cannot tell late events from new ones. The
// condition's time changes only together with its status. The order of events does not help
// either: the scheduler may ask again before the watch shows why it gave the pod up before.
//
// # Groups
//
// kube-scheduler asks for the pods of a PodGroup one after the other. Then it binds as many
// of them as the group needs, or none. If none, it begins anew at once, many times a second.
//
// When the Fleet finds no room for a pod of a group, the scheduler may still bind the others.
// So these keep their reservations. If the scheduler asks again for one of them, that one is
// not being bound, and loses its reservation. The Fleet refuses it without a search, as it
// does each pod of the group that the scheduler asks for again.
//
// The Fleet searches again when a node with news has room for one of these pods, when the
// scheduler asks about a node that it has not asked about for the group, or after a minute.
// The Fleet does not read the PodGroup, so it does not know how many pods the group needs.
//
// # Unguarded pods
//
// A scheduler that gets no answer places the pod by itself. A pod is unguarded if it asks for
// devices of an agent, and is bound to a node where no placer has put it. The Fleet reports
// each unguarded pod once ([Fleet.TellUnguarded]), but none while another process leads
// ([Fleet.LeadBy]). A process that begins to lead cannot know what the former leader has
// answered. It reports the pods that were bound after that one was last heard of.
//
// # What a pod has
//
// A pod asks for what its containers request of the resources below the resource domain. It
// has the devices that its status names (containerStatuses[].allocatedResourcesStatus,
// Kubernetes 1.36), until its object is deleted or all of its containers have ended.
//
// What a node offers through DRA the Fleet leaves to the scheduler, which has found room for
// it before it asks. This holds also for requests under the name of an extended resource.
//
// # Other doors
//
// A [Lender] keeps room for other clusters, and a [Holder] for workloads that have no pods
// yet. The Fleet answers no question until both have told it which room they gave before the
// process began ([Lend], [HoldFor]). They may not give new room while a pod may still be
// bound on a node where an earlier process placed it ([Lender.Ready]).
package fleet
