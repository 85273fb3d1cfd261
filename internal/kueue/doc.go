// SPDX-License-Identifier: Apache-2.0

// Package kueue answers admission checks of Kueue (v0.19, objects kueue.x-k8s.io/v1beta2): a
// workload that a queue admits to GPUs of this cluster has room for every one of its pods.
// Without that, a quota admits by sums, and a job that no GPU can hold waits beside an empty
// cloud.
//
//	door := kueue.New(books, kueue.Options{API: api, Domain: "example.com", …})
//	door.Set(kueue.Workloads, workload)   // and ResourceFlavors, AdmissionChecks
//	door.Listed(kueue.Workloads)
//	err := door.Run(ctx)
//
// [Checks] decides, and is pure but for the books, which it asks to hold room; [Door] hears of
// objects, and writes.
//
// # Three kinds of checks
//
// An AdmissionCheck says by its controllerName which question it asks. A queue has the first on
// its flavors of this cluster's own nodes, and the second on those of a cloud. A queue of urgent work
// has the third.
//
//   - "example.com/gpu-placer": is there room? It is Ready once every pod of the workload has its
//     room, on nodes of the flavors that Kueue chose, and Retry with the reason otherwise.
//
//   - "example.com/gpu-placer-cloud": is on-prem full? It is Ready where the workload has no room
//     on the other nodes, and says why. While there is room it is Retry, so that the workload
//     begins again with the first flavor. Where Kueue goes on having no quota on-prem for what has
//     room there, it is Ready after 15 s.
//     A workload that runs in a cloud, and whose pods all have the label
//     "example.com/gpu.checkpoints: true", comes back: once it has been there for a minute and
//     there is room, its check is Retry again. Kueue ends it, and begins with the first flavor.
//
//   - "example.com/gpu-placer-urgent": like the first, but where there is no room workloads of lower
//     priority make some. The books name the fewest whose end opens room ([placer.Books.Open]) and hold
//     it from then on; these workloads' checks are Retry, and the urgent one is Pending until they have
//     gone. It is never kept from a flavor, and so needs a queue whose quota nobody else waits for.
//
// A workload that asks for nothing of the agents' passes them all.
//
// # How a workload gets from one flavor to the next
//
// Kueue 0.19 begins with the first flavor again, whatever a check has said. But with its feature
// gate ConcurrentAdmission it goes by an annotation of the workload with the flavors that it may
// have ("kueue.x-k8s.io/workload-allowed-resource-flavors"), which it writes for the variants of a
// workload and reads of all. So a workload without room is kept from the flavors that have none,
// before its check is Retry: Kueue then takes the quota there away and tries the next flavor, within
// a second. Which flavors these are stands in the annotation "example.com/gpu.refused-flavors".
//
// A workload that no flavor is left for, or none with quota, waits, and has no quota anywhere. Once
// there is room in a flavor that it was kept from, that room is held for 30 s, the flavor is
// allowed again, and Kueue is told to look at the workload, by its condition Requeued: it does not
// look when an annotation changes. Without the feature gate, and where somebody else has written
// Kueue's annotation, a workload is tried again after 15 s, and has its quota all that time.
//
// # What is held
//
// What makes a check Ready is a hold in the books: a seat for each pod, found before there is one.
// Nobody else is placed in that room. It lasts until the workload gives its quota back. Where the
// pods are to go is written into the check's podSetUpdates, as an annotation that the pods get, and
// as a node selector where all pods of a set go to one node. A process that begins reads the
// holds from there, so that nothing is given out twice.
//
// A pod uses a seat of the hold that its annotation names, in its own namespace. The name is a key that
// is made with the hold and written once, in the check that turns Ready: the workload's UID or, of an
// elastic job, the name that all of its workloads go by. It stays when a workload gets an owner later, as
// prebuilt ones do. Whoever takes over reads it, also where an earlier build has written the owner's UID.
// A tenant can write the annotation, but not the namespace: who lies takes the room of a workload beside
// its own.
//
// # What is taken back
//
// A node is none for pods that do not tolerate its taints; a cordon is one of them. Tolerations are those of
// the template, and of ResourceFlavors whose labels the node has, which Kueue gives the pods. A node that is
// cordoned, tainted, gone or without its agent loses the seats that no pod has. They are looked for elsewhere,
// and the check's message says where they are now. Where there is no room, the workload stays as it is.
//
// Pods that have a node selector of the check's cannot go elsewhere. When such a pod has had no node for 30 s,
// and its seat is lost, the check is Retry: Kueue ends the job, which begins again and may have another
// node. A job whose pods all run is left alone, on whatever node.
//
// # What it does not do
//
// It does not look at what pods ask for beside GPUs: Kueue has quotas for that, and the scheduler the last
// word.
//
// The package knows Kueue's objects as plain values: its Go module is not needed.
package kueue
