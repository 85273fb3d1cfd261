// SPDX-License-Identifier: Apache-2.0

// Package agentkube is the agent's half of what speaks to the Kubernetes API server;
// internal/kube has the connection and the watches.
//
// Through it the agent reads two objects, the ConfigMap that holds its
// partitions and its own Node, and writes two: Events, and of the Node labels,
// annotations, conditions and, downwards alone, what there is to give out. Where GPUs are
// offered through DRA it also writes ResourceSlices of its node, reads ResourceClaims and
// writes in their status what it made of its devices. Where a pod has a device of another DRA driver, it
// also reads the ResourceSlices of its node, and where an operator allows it, it
// evicts pods. Nothing else: [Rules] lists every verb on every
// resource, and the manifests are tested against that list. [List] is not an agent's: by it
// a command reads the nodes and GPUNodes of a cluster once, for an export.
//
// # Following one object
//
// [Client.WatchKey] and [Client.WatchNode] follow one object each, and report it when it
// differs from the last report.
//
//	client, err := agentkube.New(agentkube.Options{
//		NodeName: "node-1", Options: kube.Options{Domain: "example.com", Logger: log}})
//	…
//	err = client.WatchKey(ctx, "gpu", "gpu-partitions", "config.yaml", func(data []byte, err error) {
//		// err says what the server does not have
//	})
//
// While the API server is unreachable the function is not called: what was seen last
// stays in force. Only the end of the context ends a watch.
//
// # Memory
//
// An agent runs on every node and must stay small, so it keeps no cache: one object for each
// watch, and copies of the few fields that are needed. Of a node's annotations only those
// below the agent's own domain are reported, since other programs keep heartbeats there.
//
// What is read has the types of k8s.io/api, and the dynamic client brings it: the typed clients
// cost 18 MB. Amounts are checked before they are parsed. Where they are not those of the agent, of
// a Node and in other drivers' slices, the fields that are needed are read one by one.
//
// # Marks
//
// The agent writes its labels and its annotation of the Node in one request, so that
// nobody ever sees half of them:
//
//	err := client.Mark(ctx, agentkube.Marks{Labels: own, Annotations: message, Guests: nvidia})
//
// The request is a server-side apply. The server knows who manages
// which key, so what the agent wrote before and does not name now is removed,
// also after a restart, and what is already right costs no request. Below its
// own domain the agent takes keys over from others. Guests are keys of other domains, of
// GPU Feature Discovery's for example: the agent writes one only while nobody else
// has it. It decides that by the Node that it has seen last, and the request
// names that version; where the Node has changed meanwhile the server refuses it,
// and the agent decides again.
//
// # Conditions
//
// A Node's conditions are a list that the kubelet, and others, write too.
// [Client.SetCondition] sends its one element as a strategic merge patch of the
// status, which the server merges into the list by type, so other conditions are never
// overwritten. What the Node has already is not sent: the agent sets its condition in
// each round, and it is written when it changes and when a Node was created anew
// without it.
//
// # Allocatable
//
// [Client.LowerAllocatable] lowers what the scheduler may give out of the agent's own
// resources, which the kubelet would do up to ten seconds later. It is a JSON patch that
// tests the amounts that it replaces, so it can never raise one. Going up is the
// kubelet's. [Options].Allocatable is told what the Node says.
//
//	lowered, err := client.LowerAllocatable(ctx, map[string]int64{"example.com/gpu-mem": 39})
//
// # Events
//
// [Events] uses a client's connection. [Events.Event] never waits: it puts the Event on a
// short queue that [Events.Run] sends from. The same Event again within ten minutes raises the
// count of the first one, at most once a minute, and token buckets, one for the
// node and one for its pods, bound what a faulty node can write. Events are of
// core/v1, as the kubelet's own are, and one that regards the node names it as
// the kubelet does, with the node's name in place of its UID: by that `kubectl
// describe node` finds it. Of those that are dropped ten a minute are logged, and the
// rest is counted.
//
// # Evictions
//
// [Client.Evict] does what a drain does: the server respects disruption budgets, the
// pod gets its grace period, its controller creates another. It names the pod by its
// UID as well, so a newer pod of the same name is never evicted. The UID
// comes from the node, since the agent cannot read pods, but it is no secret: the
// API server's refusal of a wrong one has the right one. An admission policy limits
// an agent to the pods of its own node
// (deployments/components/evict). It reads the pod's spec.nodeName, and recognises
// the agent's evictions by a label on them.
//
//	err := client.Evict(ctx, workload.Pod{Namespace: "train", Name: "job-1", UID: uid})
//	if errors.Is(err, agentkube.ErrBudget) {
//		// not now
//	}
//
// # Devices of other DRA drivers
//
// The kubelet knows a prepared device by driver, pool and name only.
// [Client.Devices] asks what the drivers say of such devices in their
// ResourceSlices, among it UUIDs and PCI addresses. It lists once for each call and
// caches nothing.
//
// # Our own ResourceSlices
//
// [Client.PublishSlices] makes the slices of a DRA driver of this node what they shall
// be. A pool whose slices are as many as before keeps its generation, so that the
// scheduler goes on with it while one of them changes; with another number of slices
// all of the pool is written. [Client.WatchSlices] tells when somebody else has changed
// or deleted one, and the next PublishSlices which it was. A slice that the server would
// keep in part, since a feature gate is off, is taken back, and nothing is written to a
// server before Kubernetes 1.36.2: [ErrUnfit].
//
// # ResourceClaims
//
// The kubelet tells a DRA driver the name and UID of a claim. [Client.Claim] reads the
// rest: which devices of the driver the scheduler chose, how much of each, and the
// configuration for it. [Client.Claims] finds those of this node among all, for a start.
// [Client.SetClaimDevices] says in a claim's status what its devices have become, by
// server-side apply: what other drivers say there stays. The server allows it only in
// claims that are allocated on this node (the verb associated-node:patch on
// resourceclaims/driver).
//
// # The GPUNode
//
// [Client.WriteGPUNode] makes the node's GPUNode say what it shall, by server-side apply of
// its whole status, and [Client.WatchGPUNode] tells what the server has, so that whoever
// decides when it is written hears of others' changes. The object belongs to the Node, and
// the garbage collector takes both. A cluster without the definition is told of once, and
// asked again every Options.Relist: nothing else depends on it. Whether pods tell themselves
// which devices they have is known by the kubelet's version ([Node.PodsTellDevices]): to see
// it in a pod would take the right to read all pods, and to ask the kubelet one on its
// configuration.
//
// # Admission policies
//
// RBAC cannot express "its own node". Admission policies can, but one that is missing
// or matches another account lets everything through without any error. So
// [Client.WatchPolicies] tries by server-side dry run what each must
// refuse, at the start and now and then, and says which is not in force. A policy
// is known by its name in the server's refusal: a refusal by another policy proves
// nothing.
//
// The package does not know what a partition, a GPU or a label means.
package agentkube
