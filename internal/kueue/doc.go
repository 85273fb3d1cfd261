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
// An AdmissionCheck chooses its question by its controllerName. A queue has the first on its
// flavors of this cluster's own nodes, and the second on those of a cloud. A queue of urgent work
// has the third.
//
//   - "example.com/gpu-placer": is there room? It is Ready once every pod of the workload has its
//     room, on nodes of the flavors that Kueue chose, and Retry with the reason otherwise.
//
//   - "example.com/gpu-placer-cloud": is on-prem full? It is Ready, with the reason, where the
//     workload has no room on the other nodes. While there is room it is Retry, so that the workload
//     begins again with the first flavor. Where Kueue goes on having no quota on-prem for what has
//     room there, it is Ready after 15 s.
//     A workload comes back from a cloud in two cases: see "Back from a cloud".
//
//   - "example.com/gpu-placer-urgent": like the first, but where there is no room workloads of lower
//     priority make some. The books name the fewest whose end opens room ([placer.Books.Open]) and hold
//     it from then on; these workloads' checks are Retry, and the urgent one is Pending until they have
//     gone. It is never kept from a flavor, so its queue must have quota of its own.
//
// A workload that asks for nothing of the agents' passes them all. Kueue chooses a flavor for each set of pods, so a
// workload may have sets on-prem and others in a cloud, where the quota on-prem is not enough for all. The first check
// then judges those on-prem alone, the second one passes, and the workload stays as it is.
//
// # How a workload gets from one flavor to the next
//
// Kueue 0.19 begins with the first flavor again, also after a check was Retry. But with its feature
// gate ConcurrentAdmission it reads from an annotation which flavors a workload may have
// ("kueue.x-k8s.io/workload-allowed-resource-flavors"). It writes that for the variants of a workload,
// and obeys it for all. So the placer keeps a workload from the flavors without room for it before it
// sets the check to Retry: Kueue then takes the quota there away and tries the next flavor, within a
// second. The annotation "example.com/gpu.refused-flavors" lists the flavors without room.
//
// A workload that no flavor is left for, or none with quota, waits, and has no quota anywhere. Once
// there is room in a flavor that it was kept from, the placer holds that room for 30 s and allows the
// flavor again. It also sets the workload's condition Requeued, since Kueue looks at that and not at
// annotations. Without the feature gate, or where Kueue's annotation is not the placer's, a workload is
// tried again after 15 s, and has its quota all that time.
//
// # Back from a cloud
//
// The check of a workload in a cloud turns Retry once there is room on-prem, and Kueue begins with the first flavor
// again. The room is held from then on. That happens to two kinds of workloads, ten seconds after they were admitted at
// the earliest:
//
//   - All pods have the label "example.com/gpu.checkpoints: true". They are ended while they run.
//
//   - No pod has a node, since the cloud is full, or an autoscaler is still making one. Nothing is lost then. Where the
//     cloud has had room for one of the pods for less than 30 s, the workload stays: its node has just come. The check
//     tells pods in a cloud the same annotation as on-prem, so the books know which are the workload's. A workload
//     stays if none of its pods has the annotation, or if a pod that came to the queue by itself has no controller:
//     Kueue deletes such pods, and no other ones are made.
//
// Where Kueue has no quota for the room on-prem, the workload is back in the cloud 15 s later, and its check says why.
// It is then left there for ten minutes, since the placer does not know quotas, and each such try ends its pods in
// vain. What waits in a cloud without a node, and what waits without quota, gets room on-prem by its age.
//
// # What is held
//
// What makes a check Ready is a hold in the books: a seat for each pod, found before there is one. The
// books place no other pod in that room. It lasts until the workload gives its quota back. The check's
// podSetUpdates tell the pods where their room is: by an annotation, and by a node selector where all
// pods of a set go to one node. A process that begins reads the holds from there, so that nothing is
// given out twice.
//
// A pod uses a seat of the hold that its annotation names, in its own namespace. The name is a key that
// is made with the hold and written once, in the check that turns Ready: the workload's UID or, of an
// elastic job, the name that all of its workloads share. It stays when a workload gets an owner later, as
// prebuilt ones do. The next process reads the key that is written, which may be an owner's UID from an
// earlier build. A tenant can write the annotation, but not the namespace: a tenant that lies takes the
// room of a workload beside its own, or keeps one in a cloud.
//
// # What is taken back
//
// A node is none for pods that do not tolerate its taints; a cordon is one of them. Tolerations are those of
// the template, and of ResourceFlavors whose labels the node has, which Kueue gives the pods. A node that is
// cordoned, tainted, gone or without its agent loses the seats that no pod has. They are looked for elsewhere,
// and the check's message then lists the new nodes. Where there is no room, the workload stays as it is. What
// pods were told cannot be changed while the check is Ready. So a process that begins has the seats where
// they were first, and looks for them anew as soon as it decides; others may have that room by then.
//
// Pods that have a node selector of the check's cannot go elsewhere. When such a pod has had no node for 30 s,
// and its seat is lost, the check is Retry: Kueue ends the job, which begins again and may have another
// node. A job whose pods all run is left alone, even on a node that is cordoned.
//
// # Waiting
//
// A workload without room waits, with its check Pending, in four cases:
//
//   - It has no job yet, since MultiKueue sends the workload first. Kueue takes quota away by way of the job, so after
//     Retry it would keep its quota for ever, and never be asked about again. It waits in the flavor that it has.
//   - Others are leaving: Kueue has taken their quota, and their pods are still ending. Their room is held for the
//     workload, for up to two minutes.
//   - It is a slice of an elastic job whose pods run. Kueue ends the slice before as soon as the next one has quota, so
//     the next one takes over what is held. Retry would end all pods of the job. Kueue 0.19 lets the new pods go to
//     the scheduler as soon as their slice has quota (elastic_job_ungater.go); it finds no room for them until then.
//   - It has quota in a cloud whose flavor asks for patience ("example.com/gpu.patience"). It goes to the cloud at
//     once if there would be no room in time even if all went that do not say that they run longer.
//
// # The whole pod
//
// Room is on nodes that also have the cpu, memory, ephemeral storage and other devices that a pod asks for, as the
// scheduler counts them (k8s.io/component-helpers): beside all pods of the node, and beside all other seats. Pods
// without GPUs may take that afterwards. The seat is then lost, and is looked for elsewhere.
//
// # What it does not do
//
// It does not look at what depends on where other pods are: affinity between pods, and topology spread. The check's
// message says so. Nor does it look at volumes and host ports, at what a LimitRange or a RuntimeClass adds to pods, or
// at sets of pods that ask for nothing of the agents'. The scheduler has the last word.
//
// The package knows Kueue's objects as plain values: its Go module is not needed.
package kueue
