// SPDX-License-Identifier: Apache-2.0

// Package agentkube connects the agent of one node to the Kubernetes API server. internal/kube has
// the connection and the watches; this package reads and writes the agent's objects.
//
// The agent reads the ConfigMap with its partitions, and its own Node. It writes:
//
//   - labels, annotations, conditions and lower allocatable amounts into that Node,
//   - Events, and its GPUNode, a custom resource with the state of the node's GPUs.
//
// With DRA (dynamic resource allocation) it also writes ResourceSlices, which list what the node
// offers. It reads ResourceClaims, which ask for devices, and writes into their status what the
// devices are. If a pod has a device of another DRA driver, it reads the node's ResourceSlices. If an
// operator allows it, it evicts pods, and follows when pods of its node end ([Client.WatchEndings]).
//
// It does nothing else: [Rules] lists every verb on every resource, and tests compare the manifests
// with that list. [List] is not for agents: commands use it to read the nodes and GPUNodes of a
// cluster once, for an export.
//
//	client, err := agentkube.New(agentkube.Options{
//		NodeName: "node-1", Options: kube.Options{Domain: "example.com", Logger: log}})
//	…
//	err = client.WatchKey(ctx, "gpu", "gpu-partitions", "config.yaml", func(data []byte, err error) {
//		// data is the text of the key, or err names what is missing
//	})
//
// [Client.WatchKey] and [Client.WatchNode] follow one object each, and report it when it differs
// from the last report. While the API server is unreachable they report nothing, and the agent
// keeps what it saw last. Only the end of the context ends a watch. An agent runs on every node and
// must stay small, so there is no cache: for each watch there is one object, and a copy of the few
// fields that the agent needs.
//
// # Marks
//
// Marks are the agent's labels and annotations of its Node. [Client.Mark] writes them in one
// request, so that readers never see half of them:
//
//	err := client.Mark(ctx, agentkube.Marks{Labels: own, Annotations: message, Guests: nvidia})
//
// The request is a server-side apply: the server knows which program manages which key. It removes
// what the agent wrote before and does not name now, also after a restart. Keys below the agent's
// own domain the agent takes over from others. Guests are keys of other domains, such as those of
// GPU Feature Discovery. The agent writes a guest only while no other program manages it.
//
// # Conditions and allocatable amounts
//
// The kubelet and others write to a Node's list of conditions, too. So [Client.SetCondition] sends
// one element, which the server merges into the list by type.
//
// [Client.LowerAllocatable] lowers the amounts of the agent's resources that the scheduler may give
// out. The kubelet would do so up to ten seconds later. The request tests the amounts that it
// replaces, so it can never raise one.
//
// If the Node already has what one of these or Mark would write, they make no request.
//
// # Events and evictions
//
// [Events.Event] never waits: it queues the Event, and [Events.Run] sends it. If the same Event
// repeats within ten minutes, Run raises the count of the first one, at most once a minute. Two
// token buckets, one for the node and one for its pods, limit what a faulty node can write. Up to
// ten dropped Events a minute are logged, and the others are counted.
//
// [Client.Evict] does what a drain does. The request names the pod's UID, so a newer pod of the
// same name is never evicted. The error wraps [ErrBudget] if a disruption budget forbids it now. An
// admission policy limits an agent to the pods of its own node (deployments/components/evict).
//
// # DRA
//
// The kubelet knows a device of another driver by driver, pool and name only. [Client.Devices]
// reads what the drivers publish about such devices, such as UUIDs and PCI addresses. It reads that
// anew in each call.
//
// [Client.PublishSlices] writes the agent's own ResourceSlices. [Client.WatchSlices] reports that
// they may have changed, and the next PublishSlices returns which slices others have changed. It
// publishes nothing to a server before Kubernetes 1.36.2, or to one that drops fields ([ErrUnfit]).
//
// The kubelet tells a DRA driver the name and UID of a claim. [Client.Claim] reads its devices, how
// much of each, and their configuration. [Client.Claims] finds all claims of this node.
// [Client.SetClaimDevices] writes in a claim's status what its devices are; what other drivers
// wrote stays. The server allows it only in claims that are allocated on this node (the verb
// associated-node:patch on resourceclaims/driver).
//
// # The GPUNode
//
// [Client.WriteGPUNode] writes the whole status of the node's GPUNode by server-side apply. The
// Node owns the object, so the garbage collector deletes it with the Node. [Client.WatchGPUNode]
// reports the server's object, so that the agent learns of changes by others. If the cluster lacks
// the definition of GPUNodes, the agent goes on without.
//
// # Admission policies and limits
//
// RBAC cannot limit an account to its own node; admission policies can. But a policy that is
// missing, or that matches another account, lets everything through without any error. So
// [Client.WatchPolicies] sends dry runs that each policy must refuse, and reports which policies
// are not in force. It recognises a policy by its name in the server's refusal.
//
// The package does not know what a partition, a GPU or a label means.
package agentkube
