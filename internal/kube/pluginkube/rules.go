// SPDX-License-Identifier: Apache-2.0

package pluginkube

import (
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube"
)

// ViewRules lists what the role gpu-agent-view grants: the table of the fleet, and what the author of
// a pod needs for `kubectl gpu why` beyond the rights in the pod's own namespace.
var ViewRules = []kube.Rule{
	{APIGroup: kube.ManifestDomain, Resource: gpunode.Plural, Verbs: []string{"get", "list", "watch"}, Cluster: true,
		Why: "see what each node's GPUs are, and what is free of them; " +
			"the object names pods only where --gpunode is holders"},
}

// OperatorRules lists what the role gpu-agent-operator grants in the whole cluster, beside ViewRules.
var OperatorRules = []kube.Rule{
	{Resource: "nodes", Verbs: []string{"get", "list"}, Cluster: true,
		Why: "see cordons, and how far the partition of each node is"},
	{Resource: "events", Verbs: []string{"list"}, Cluster: true,
		Why: "see what the agent has said about a node and its pods"},
}

// AgentRules lists what the role gpu-agent-operator grants in the agent's own namespace.
var AgentRules = []kube.Rule{
	{Resource: "pods", Verbs: []string{"get", "list"},
		Why: "find the agent's pod on a node"},
	{Resource: "pods/log", Verbs: []string{"get"},
		Why: "read the agent's log"},
	{Resource: "pods/portforward", Verbs: []string{"create", "get"},
		Why: "read the pages that the agent serves within its pod: status, plans, the account; get is for WebSockets"},
	{Resource: "configmaps", Verbs: []string{"get"},
		Why: "put the partitions into a bundle"},
}
