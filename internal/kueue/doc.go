// SPDX-License-Identifier: Apache-2.0

// Package kueue answers admission checks of Kueue (v0.19, objects kueue.x-k8s.io/v1beta2), the
// program that queues jobs. So a workload that Kueue admits to GPUs of this cluster has room for
// each of its pods. Kueue by itself adds up quota: it admits a job that no GPU can hold, which then
// waits beside an empty cloud.
//
// In Kueue's words, a Workload is what a job asks for: sets of pods that are alike. A
// ResourceFlavor is a kind of nodes, known by their labels. A queue has quota of some flavors, and
// Kueue tries them in order. Once a workload has quota, each AdmissionCheck of the flavor must be
// Ready before the pods may start. Pending makes them wait; Retry has Kueue take the quota back.
//
// # Who does what
//
//  1. Kueue gives a workload quota in a flavor, and sets the flavor's checks to Pending.
//  2. The caller tells [Door] about Kueue's objects. [Checks] decides what to answer: it asks the
//     books (internal/placer) for a hold, which has a seat for each pod, that is room on a node. It
//     is pure but for that.
//  3. If all pods have seats, Door writes Ready, with the name of the hold in an annotation that
//     Kueue copies to the pods. If all seats of a set are on one node, it adds a node selector.
//  4. Otherwise Door writes which flavors have no room, and then Retry with the reason. Kueue takes
//     the quota back and tries the next flavor.
//  5. The scheduler asks the placer for a node for each pod. The pod uses a seat of its hold. The
//     books give that room to no other pod until the workload gives its quota back.
//
// The caller:
//
//	door := kueue.New(books, kueue.Options{API: api, Domain: "example.com", …})
//	door.Set(kueue.Workloads, workload) // and ResourceFlavors, AdmissionChecks
//	door.Listed(kueue.Workloads)        // and the others, once all objects were told
//	err := door.Run(ctx)
//
// A new process reads the holds from the checks that are Ready, so it gives no room out twice.
//
// # Three questions
//
// The controllerName of an AdmissionCheck chooses what it asks. A workload that asks for no GPU of
// the agents (gpu-agent) passes each of them.
//
//   - "example.com/gpu-placer", for flavors of the cluster's own nodes (on-prem): is there room? It
//     is Ready once each pod has a seat on nodes of the flavors that Kueue chose.
//   - "example.com/gpu-placer-cloud", for flavors of a cloud: is on-prem full? It is Ready if the
//     workload has no room on the other nodes. If it has, the check is Retry, so that Kueue begins
//     with the first flavor again; after 15 s without quota on-prem it is Ready.
//   - "example.com/gpu-placer-urgent", for queues of urgent work: is there room, if need be that of
//     workloads of lower priority? The books name the fewest that must end ([placer.Books.Open]).
//     Their checks are Retry, and the urgent one is Pending until they have gone. The placer never
//     refuses an urgent workload a flavor, so its queue must have quota of its own.
//
// # From flavor to flavor
//
// After Retry, Kueue 0.19 begins with the first flavor again. But with its feature gate
// ConcurrentAdmission it reads in an annotation of the workload which flavors this may have
// ("kueue.x-k8s.io/workload-allowed-resource-flavors"). So Door first leaves those without room out
// there, and lists them in "example.com/gpu.refused-flavors". Kueue tries the next within a second.
//
// A workload with no flavor left waits and has no quota. Once there is room in a refused flavor,
// the books hold it for 30 s, and Door allows the flavor again. Without the feature gate, or if the
// first annotation is not the placer's, Kueue tries again after 15 s, and the workload keeps its
// quota till then.
//
// Kueue chooses a flavor for each set of pods. If the quota on-prem is not enough for all sets of a
// workload, some may be on-prem and others in a cloud. The first check then judges the sets on-prem
// alone, and the second one is Ready. If all pods checkpoint, the workload begins again once there is
// room on-prem for those in the cloud; otherwise it stays as it is.
//
// # Back from a cloud
//
// The check of a workload in a cloud becomes Retry once there is room on-prem. The books hold that
// room, and Kueue ends the workload and begins with the first flavor. This happens ten seconds after
// the workload was admitted at the earliest, and to two kinds of workloads:
//
//   - All pods have the label "example.com/gpu.checkpoints: true".
//   - No pod has a node, since the cloud is full, or an autoscaler is still making one. Nothing is
//     lost then. But if the cloud has had room for one of the pods for less than 30 s, the workload
//     stays, since its node has just come. Pods in a cloud get the same annotation as on-prem, so
//     the books know which pods are the workload's. If no pod has it, the workload stays. It also
//     stays if Kueue would delete a pod that has no controller, which makes another one.
//
// If Kueue has no quota for the room, the workload is in the cloud again 15 s later, and its check
// says why. It is left there for ten minutes: the placer does not know quotas, and each try ends the
// pods in vain. Workloads that wait in a cloud without a node, and those that wait without quota,
// get room on-prem by their age.
//
// # Pending instead of Retry
//
//   - The workload has no job yet: MultiKueue (Kueue of several clusters) sends the Workload first.
//     Kueue cannot take the quota of such a workload back.
//   - Kueue has taken the quota of others, and their pods are ending. The books hold their room for
//     the workload, for up to two minutes.
//   - Pods are starting, and may leave room once the books know their devices: up to five seconds.
//   - It is a slice of an elastic job whose pods run: the job has changed its number of pods, and
//     Kueue replaces its Workload by another, the next slice. Retry would end all pods.
//   - The cloud's flavor has the annotation "example.com/gpu.patience: 2m". The workload waits that
//     long for room on-prem, unless the pods that have it run longer by their own annotation
//     ("example.com/gpu.runs-for: 1h30m").
//
// # When a node goes
//
// A seat that no pod uses is lost if its node is gone, is cordoned, has no agent or has a taint
// that the pods do not tolerate. The books look for another node, and the check's message names it.
// If there is none, a workload that was admitted stays as it is. But if a pod waits for 30 s, and
// its node selector allows that node alone, the check is Retry: Kueue ends the job, which begins
// again.
//
// # Limits
//
// A seat has all that the scheduler counts for a pod: cpu, memory, ephemeral storage and other
// devices. Pods without GPUs may take that afterwards; the seat is then lost. The package ignores
// pod affinity and topology spread, which the check's message says. It also ignores volumes, host
// ports, what a LimitRange or a RuntimeClass adds, and sets of pods without GPUs. The scheduler has
// the last word. The package needs no Go module of Kueue: it reads the objects as plain values.
package kueue
