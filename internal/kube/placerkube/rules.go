// SPDX-License-Identifier: Apache-2.0

package placerkube

import (
	"k8s.io/apimachinery/pkg/runtime/schema"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube"
)

var leases = schema.GroupVersionResource{Group: "coordination.k8s.io", Version: "v1", Resource: "leases"}

// Rules lists every permission that a [Cluster] uses. The placer has another account than the
// agents, and a part of the manifests of its own grants these. A manifest may narrow the first
// rule for leases to the Lease's name.
var Rules = []kube.Rule{
	{Resource: "nodes", Verbs: []string{"list", "patch", "watch"}, Cluster: true,
		Why: "know which nodes are ready; " +
			"annotate one where room has appeared, so that the scheduler looks at it again"},
	{Resource: "pods", Verbs: []string{"list", "watch"}, Cluster: true,
		Why: "know which devices pods have, and which pods still need some"},
	{APIGroup: kube.ManifestDomain, Resource: gpunode.Plural, Verbs: []string{"list", "watch"}, Cluster: true,
		Why: "know what each node's GPUs have left"},
	{APIGroup: "coordination.k8s.io", Resource: leases.Resource, Verbs: []string{"get", "update"},
		Why: "elect the one of several processes that answers"},
	{APIGroup: "coordination.k8s.io", Resource: leases.Resource, Verbs: []string{"create"},
		Why: "create that Lease; RBAC cannot narrow this by its name"},
}

// LiqoRules lists the further permissions that a [Cluster] needs if the placer works with Liqo.
var LiqoRules = []kube.Rule{
	{APIGroup: "authentication.liqo.io", Resource: "resourceslices", Verbs: []string{"list", "watch"}, Cluster: true,
		Why: "know what other clusters ask for, and what they have been granted"},
	{APIGroup: "authentication.liqo.io", Resource: "resourceslices/status", Verbs: []string{"update"}, Cluster: true,
		Why: "write what they are granted"},
	{APIGroup: "authentication.liqo.io", Resource: "tenants", Verbs: []string{"list", "watch"}, Cluster: true,
		Why: "know which clusters are drained or cordoned"},
}

// KueueRules lists the further permissions that a [Cluster] needs if the placer works with
// Kueue.
var KueueRules = []kube.Rule{
	{APIGroup: "kueue.x-k8s.io", Resource: "workloads", Verbs: []string{"list", "watch"}, Cluster: true,
		Why: "know which workloads wait for an answer, and which have room held for them"},
	{APIGroup: "kueue.x-k8s.io", Resource: "workloads", Verbs: []string{"patch"}, Cluster: true,
		Why: "exclude flavors that have no room for them, by an annotation"},
	{APIGroup: "kueue.x-k8s.io", Resource: "workloads/status", Verbs: []string{"update"}, Cluster: true,
		Why: "write the answers"},
	{APIGroup: "kueue.x-k8s.io", Resource: "resourceflavors", Verbs: []string{"list", "watch"}, Cluster: true,
		Why: "know on which nodes a workload may run"},
	{APIGroup: "kueue.x-k8s.io", Resource: "admissionchecks", Verbs: []string{"list", "watch"}, Cluster: true,
		Why: "know which checks are its own"},
	{APIGroup: "kueue.x-k8s.io", Resource: "admissionchecks/status", Verbs: []string{"update"}, Cluster: true,
		Why: "report that the placer answers them"},
}
