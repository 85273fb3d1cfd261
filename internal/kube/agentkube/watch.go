// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/version"

	"example.com/gpu-agent/internal/kube"
)

// Node is the part of its Node that the agent needs.
type Node struct {
	Labels map[string]string
	// Annotations are those below Options.Domain. Others are not reported, since other programs
	// keep heartbeats there.
	Annotations map[string]string
	// Unschedulable is true if the node is cordoned.
	Unschedulable bool
	// StartupTaint is true if the Node has the taint Options.StartupTaint.
	StartupTaint bool
	// Conditions are those whose type is below Options.Domain, sorted by type.
	Conditions []Condition
	// PodsTellDevices is true if the status of each pod names its devices
	// (containerStatuses[].allocatedResourcesStatus), by the kubelet's version: the gate
	// ResourceHealthStatus is on by default from 1.36 on. To see it in a pod, the agent would need
	// the right to read all pods; to read the kubelet's configuration, one on the kubelet.
	PodsTellDevices bool
	// Allocatable are the names of the extended resources whose allocatable amount is above zero,
	// sorted.
	Allocatable []string

	uid     types.UID
	version string
	// amounts are the allocatable amounts of all extended resources, also those that are zero.
	amounts map[string]resource.Quantity
	// labels and annotations have the managers of each key.
	labels, annotations owners
	taints              []corev1.Taint
}

// WatchKey follows one key of a ConfigMap until ctx ends. It returns the error of ctx, or one for
// an empty name. It calls fn with the first answer of the server, and then whenever the answer
// changes. The answer is the key's text, or an error that names what is missing. Calls never
// overlap.
func (c *Client) WatchKey(ctx context.Context, namespace, name, key string, fn func(data []byte, err error)) error {
	if namespace == "" || name == "" {
		return fmt.Errorf("watch ConfigMap %q in namespace %q: both names are needed", name, namespace)
	}
	type answer struct{ text, missing string }
	var last *answer
	t := kube.Target{Resource: configMaps, Namespace: namespace, Name: name}
	return c.server.Follow(ctx, t, func(object *unstructured.Unstructured) {
		var now answer
		if object == nil {
			now.missing = fmt.Sprintf("there is no ConfigMap %s/%s: create it with the key %s", namespace, name, key)
		} else if text, found, err := unstructured.NestedString(object.Object, "data", key); err != nil {
			// The API server validates this field, but a proxy in between may not.
			c.server.Log.Error("ignoring a malformed ConfigMap", "namespace", namespace, "name", name, "err", err)
			return
		} else if now.text = text; !found {
			now.missing = fmt.Sprintf("ConfigMap %s/%s has no key %s", namespace, name, key)
		}
		if last != nil && now == *last {
			return
		}
		last = &now
		if now.missing != "" {
			fn(nil, errors.New(now.missing))
			return
		}
		fn([]byte(now.text), nil)
	})
}

// WatchNode follows the agent's Node until ctx ends. It returns the error of ctx, and no other. It
// calls fn with the first answer of the server, and then whenever one of these changes, also
// through Mark and SetCondition:
//
//   - a label, or an annotation or a condition below the domain,
//   - whether the node is cordoned, and its startup taint,
//   - which extended resources it has, and PodsTellDevices.
//
// It does not report that the Node is missing: a live kubelet creates it again. fn must not change
// the Node that it gets.
func (n *ourNode) WatchNode(ctx context.Context, fn func(Node)) error {
	var last Node
	told := false
	name := n.options.NodeName
	return n.server.Follow(ctx, kube.Target{Resource: kube.Nodes, Name: name}, func(object *unstructured.Unstructured) {
		if object == nil {
			n.setLast(nil)
			n.server.Log.Warn("the API server has no Node of this name; the agent keeps what it saw last",
				"node", name)
			return
		}
		whole := readNode(object)
		n.setLast(&whole)
		n.allocatable(&whole)
		now := whole
		now.StartupTaint = n.tainted(&whole)
		now.Annotations = maps.Clone(whole.Annotations)
		maps.DeleteFunc(now.Annotations, func(key, _ string) bool { return n.mayWrite(key) != nil })
		now.Conditions = slices.DeleteFunc(slices.Clone(whole.Conditions), func(c Condition) bool {
			return n.mayWrite(c.Type) != nil
		})
		slices.SortFunc(now.Conditions, func(a, b Condition) int { return strings.Compare(a.Type, b.Type) })
		if told && now.Unschedulable == last.Unschedulable && now.StartupTaint == last.StartupTaint &&
			now.PodsTellDevices == last.PodsTellDevices && maps.Equal(now.Labels, last.Labels) &&
			maps.Equal(now.Annotations, last.Annotations) && slices.Equal(now.Allocatable, last.Allocatable) &&
			slices.EqualFunc(now.Conditions, last.Conditions, Condition.sameAs) {
			return
		}
		last, told = now, true
		fn(now)
	})
}

// readNode reads what it can of a Node. A malformed amount does not affect the others.
func readNode(object *unstructured.Unstructured) Node {
	var spec corev1.NodeSpec
	var status struct {
		Conditions []corev1.NodeCondition `json:"conditions"`
		NodeInfo   corev1.NodeSystemInfo  `json:"nodeInfo"`
	}
	_, _ = kube.Decode(object, "spec", &spec), kube.Decode(object, "status", &status)
	n := Node{Labels: object.GetLabels(), Annotations: object.GetAnnotations(), Unschedulable: spec.Unschedulable,
		amounts: readAmounts(object), taints: spec.Taints, uid: object.GetUID(), version: object.GetResourceVersion()}
	for _, c := range status.Conditions {
		n.Conditions = append(n.Conditions,
			Condition{string(c.Type), c.Status, c.Reason, c.Message, c.LastTransitionTime})
	}
	for name, amount := range n.amounts {
		if !amount.IsZero() {
			n.Allocatable = append(n.Allocatable, name)
		}
	}
	slices.Sort(n.Allocatable)
	n.labels, n.annotations = readOwners(object)
	// Providers append words to the number.
	if is, err := version.ParseGeneric(status.NodeInfo.KubeletVersion); err == nil {
		n.PodsTellDevices = is.AtLeast(tellsDevices)
	}
	return n
}

// tellsDevices is the first kubelet that names devices in the status of pods by default.
var tellsDevices = version.MustParseGeneric("1.36.0")
