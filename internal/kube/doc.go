// SPDX-License-Identifier: Apache-2.0

// Package kube is the agent's only door to the Kubernetes API server.
//
// Through it the agent reads two objects, the ConfigMap that holds its
// partitions and its own Node, and writes two: Events, and of the Node labels,
// annotations and conditions. Where a pod has a device of another DRA driver, it
// also reads the ResourceSlices of its node, and where an operator allows it, it
// asks for the end of pods. Nothing else: [Rules] lists every verb on every
// resource, and the manifests are tested against that list.
//
// # Following one object
//
// [Client.WatchConfigMap] and [Client.WatchNode] list one object by its name,
// watch it from there, and say what they see when it differs from what they
// said last. A watch that ends is resumed where it stood; any failure, an
// expired resource version included, starts over with a list, which costs one
// object. The list is also repeated every [Options].Relist, so that an event
// lost on the way is made good without anyone noticing.
//
//	client, err := kube.New(kube.Options{NodeName: "node-1", Domain: "example.com", Logger: log})
//	…
//	err = client.WatchConfigMap(ctx, "gpu", "gpu-partitions", func(cm *kube.ConfigMap) {
//		// cm is nil when the server says that there is none
//	})
//
// An API server that is away is not news about the object: the function is not
// called, what was seen last stays in force, and the log has one line when the
// outage begins and one when it is over. Only the end of the context ends a
// watch.
//
// # Memory
//
// The agent runs on every node and is to stay small, so there is no typed
// client (tens of megabytes of generated types), no informer and no cache: the
// dynamic client, one object a watch, and copies of the few fields that count.
// Of a node's annotations only those under the agent's own domain are handed
// out, since other programs keep heartbeats there.
//
// # Marks
//
// All that the agent says in the metadata of its Node, labels and an annotation,
// goes out in one request, so that nobody ever sees half of it:
//
//	err := client.Mark(ctx, kube.Marks{Labels: own, Annotations: message, Guests: nvidia})
//
// The request is a server-side apply. The server keeps account of who manages
// which key, so what the agent wrote before and does not name now goes by itself,
// also after a restart, and what is as it should be costs no request. Below its
// own domain the agent overrules everybody. Guests are keys of other domains, of
// GPU Feature Discovery's for example: the agent writes one only while nobody else
// has it. It decides that by the Node that the server showed last, and the request
// names that version of it; where the Node has changed meanwhile it is refused,
// and decided anew.
//
// # Conditions
//
// A Node's conditions are a list that the kubelet, and others, write too.
// [Client.SetCondition] sends its one element as a strategic merge patch of the
// status, which the server merges into the list by type; nobody's word is read,
// held and written back, so nobody's is undone. What is there already, by what
// the server said last, is not sent: the agent says its condition each round,
// and writes it when it changes and when a Node was made anew and has lost it.
//
// # Events
//
// [Client.Event] never waits: it puts the Event on a short queue that
// [Client.Run] sends from. The same Event again within ten minutes raises the
// count of the first one, at most once a minute, and token buckets, one for the
// node and one for its pods, bound what a sick node can write. Events are of
// core/v1, as the kubelet's own are, and one that regards the node names it as
// the kubelet does, with the node's name in place of its UID: by that `kubectl
// describe node` finds it. Of those that are dropped ten a minute are logged, and the
// rest is counted.
//
// # Evictions
//
// [Client.Evict] is the verb of a drain: the server weighs disruption budgets,
// the pod gets its grace period, its controller makes another. It names the pod
// by its UID as well, so a pod that has taken the name since is never hit. The UID
// comes from the node, since the agent cannot read pods, but it is no secret: the
// API server's refusal of a wrong one tells the right one. What holds an agent to
// the pods of its own node is an admission policy beside the right
// (deployments/components/evict), which looks at the pod's spec.nodeName. It knows
// the agent's evictions by a label on them.
//
//	err := client.Evict(ctx, kube.PodRef{Namespace: "train", Name: "job-1", UID: uid})
//	if errors.Is(err, kube.ErrBudget) {
//		// not now
//	}
//
// # Devices of other DRA drivers
//
// The kubelet knows a prepared device by driver, pool and name only.
// [Client.Devices] asks what the drivers say of such devices in their
// ResourceSlices, among it UUIDs and PCI addresses. It lists once for each call and
// remembers nothing.
//
// # Admission policies
//
// RBAC cannot say "its own node". Admission policies beside the rights do, and one
// that is missing or matches another account lets everything through without a
// word. So [Client.WatchPolicies] tries by server-side dry run what each must
// refuse, at the start and now and then, and says which is not in force. A policy
// is known by its name in the server's refusal: a refusal by somebody else proves
// nothing.
//
// The package does not know what a partition, a GPU or a label means: of package
// gpu it borrows an error alone.
package kube
