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

// Node is what the agent needs of its Node.
type Node struct {
	Labels map[string]string
	// Annotations are those under Options.Domain.
	Annotations map[string]string
	// Unschedulable says that the node is cordoned.
	Unschedulable bool
	// StartupTaint says that it has the taint Options.StartupTaint.
	StartupTaint bool
	// Conditions are those whose type is under Options.Domain, sorted by it.
	Conditions []Condition
	// PodsTellDevices says that by the kubelet's version the status of each pod names the
	// devices that it has (containerStatuses[].allocatedResourcesStatus; the gate
	// ResourceHealthStatus is on by default from 1.36 on).
	PodsTellDevices bool
	// Allocatable are the names of the extended resources of which the scheduler may give
	// out something, sorted.
	Allocatable []string

	uid     types.UID
	version string
	// amounts are how much there is of each extended resource, also of those of which
	// there is nothing.
	amounts map[string]resource.Quantity
	// labels and annotations have the managers of each key.
	labels, annotations owners
	taints              []corev1.Taint
}

// WatchKey follows one key of a ConfigMap until ctx ends, which is the only error it
// returns besides that of an empty name. fn is called with the first answer of the
// server, and then whenever it differs from the last: with the key's text, or with an
// error that says what is missing. Calls never overlap.
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
			// The API server validates this field; a proxy in between may not.
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

// WatchNode follows the agent's Node until ctx ends, which is the only error
// that it returns. fn is called with the first answer of the server, and
// then whenever a label, an annotation or a condition under the domain, the scheduling of
// the node, its startup taint, or which extended resources it has, differs from the last
// call's. Changes made through Mark and SetCondition are such changes. A Node that is not
// there is not reported: a kubelet that is alive makes it again. fn must not change what it
// is given.
func (n *ourNode) WatchNode(ctx context.Context, fn func(Node)) error {
	var last Node
	told := false
	name := n.options.NodeName
	return n.server.Follow(ctx, kube.Target{Resource: kube.Nodes, Name: name}, func(object *unstructured.Unstructured) {
		if object == nil {
			n.see(nil)
			n.server.Log.Warn("the API server has no Node of this name; what was seen last stays in force",
				"node", name)
			return
		}
		whole := readNode(object)
		n.see(&whole)
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
			slices.EqualFunc(now.Conditions, last.Conditions, Condition.says) {
			return
		}
		last, told = now, true
		fn(now)
	})
}

// readNode reads what can be understood of a Node. Each of its amounts is judged by itself.
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
	// Providers put words behind the number.
	if is, err := version.ParseGeneric(status.NodeInfo.KubeletVersion); err == nil {
		n.PodsTellDevices = is.AtLeast(tellsDevices)
	}
	return n
}

// tellsDevices is the first kubelet that names devices in the status of pods unless it is
// told otherwise.
var tellsDevices = version.MustParseGeneric("1.36.0")
