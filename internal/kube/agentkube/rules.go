// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube"
)

// Rules lists every permission that a Client uses. A manifest may narrow the rule for ConfigMaps by
// resource name, since each list and watch selects one object by name. It may narrow the rule for
// resourceclaims/driver, too: there the name is that of a DRA driver. It cannot narrow the rule for
// Nodes, since the name differs on each node.
var Rules = []kube.Rule{
	{Resource: "configmaps", Verbs: []string{"list", "watch"},
		Why: "follow the partitions"},
	{Resource: "events", Verbs: []string{"create", "patch"}, Cluster: true,
		Why: "report on the node, whose Events are in the namespace default, and on pods in theirs"},
	{Resource: "nodes", Verbs: []string{"list", "patch", "watch"}, Cluster: true,
		Why: "follow the label that chooses a partition; write the outcome"},
	{Resource: "nodes/status", Verbs: []string{"patch"}, Cluster: true,
		Why: "report the state of the node's GPUs in its own conditions; lower the allocatable amounts of its own " +
			"resources"},
	{APIGroup: kube.ManifestDomain, Resource: gpunode.Plural,
		Verbs: []string{"create", "delete", "list", "patch", "watch"}, Cluster: true,
		Why: "tell schedulers and people what the node's GPUs have left; create and follow that object, and delete " +
			"it with the agent"},
	{APIGroup: kube.ManifestDomain, Resource: gpunode.Plural + "/status", Verbs: []string{"patch"}, Cluster: true,
		Why: "write the status of that object"},
	{APIGroup: "resource.k8s.io", Resource: "resourceslices", Verbs: []string{"list"}, Cluster: true,
		Why: "find the GPU of a device that another DRA driver has prepared for a pod of this node"},
	{APIGroup: "resource.k8s.io", Resource: "resourceslices", Verbs: []string{"create", "delete", "update", "watch"},
		Cluster: true, Component: "dra",
		Why: "publish what the node has for dynamic resource allocation"},
	{APIGroup: "resource.k8s.io", Resource: "resourceclaims", Verbs: []string{"get", "list"}, Cluster: true,
		Component: "dra",
		Why:       "learn which devices the scheduler gave a claim; find the claims of the node again after a restart"},
	{APIGroup: "resource.k8s.io", Resource: "resourceclaims/status", Verbs: []string{"patch"}, Cluster: true,
		Component: "dra",
		Why:       "write in a claim which instance and cap it has; that also needs the next rule"},
	{APIGroup: "resource.k8s.io", Resource: "resourceclaims/driver", Verbs: []string{"associated-node:patch"},
		Cluster: true, Component: "dra",
		Why: "the same, for the driver's own devices in claims of the agent's node"},
	{Resource: "pods/eviction", Verbs: []string{"create"}, Cluster: true, Component: "evict",
		Why: "end pods that exceed their memory caps again and again, or whose claims can never be prepared, if " +
			"that is on"},
	{Resource: "pods", Verbs: []string{"list", "watch"}, Cluster: true, Component: "mps-detach",
		Why: "learn when pods of the node end, so that their clients of MPS are detached before the kubelet kills them"},
}
