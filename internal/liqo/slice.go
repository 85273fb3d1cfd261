// SPDX-License-Identifier: Apache-2.0

package liqo

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"regexp"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"example.com/gpu-agent/internal/amount"
)

// The resources that are followed, as of Liqo v1.2.0.
var (
	Slices  = liqoResource("resourceslices")
	Tenants = liqoResource("tenants")
)

func liqoResource(name string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "authentication.liqo.io", Version: "v1beta1", Resource: name}
}

// Liqo's words.
const (
	accepted = "Accepted"
	denied   = "Denied"

	authentication = "Authentication"
	resources      = "Resources"

	active   = "Active"
	cordoned = "Cordoned"
	drained  = "Drained"

	replicatedLabel = "liqo.io/replicated"
	originLabel     = "liqo.io/originID"
	managedByLabel  = "liqo.io/managed-by"
	creatorLabel    = "liqo.io/creator-user"
	shadowPod       = "ShadowPod"
)

// Slice is a ResourceSlice of Liqo's: what a consumer cluster asks for, and what it was told.
type Slice struct {
	// UID, Namespace and Name are the object's, and Created is when it was made.
	UID, Namespace, Name string
	Created              time.Time
	// Consumer is the cluster that asks, and Class for whose word.
	Consumer, Class string
	// Replicated is true if the slice came from another cluster. Otherwise it is a request of
	// this cluster to another one. Going is true if the slice is being deleted.
	Replicated, Going bool
	// Ask is what it asks for, and Granted what its status gives it.
	Ask, Granted corev1.ResourceList
	// Labels and Selector are the status's nodeLabels and nodeSelector.
	Labels, Selector map[string]string
	// Authentication and Resources are its conditions.
	Authentication, Resources Condition

	version string
	object  *unstructured.Unstructured
}

// Condition is one of a slice's conditions, zero if the slice has none of that type.
type Condition struct {
	Status, Reason, Message string
}

// Tenant is a consumer cluster as this cluster has it.
type Tenant struct {
	UID, Cluster, Namespace string
	// Condition is "Active", "Cordoned" or "Drained".
	Condition string
}

// ReadSlice reads a ResourceSlice, which the caller may not change afterwards. The error names a
// field that is not as Liqo writes it.
func ReadSlice(o *unstructured.Unstructured) (*Slice, error) {
	labels := o.GetLabels()
	s := &Slice{
		UID: string(o.GetUID()), Namespace: o.GetNamespace(), Name: o.GetName(), Created: o.GetCreationTimestamp().Time,
		Replicated: labels[replicatedLabel] == "true" && labels[originLabel] != "",
		Going:      o.GetDeletionTimestamp() != nil,
		version:    o.GetResourceVersion(), object: o,
	}
	r := reader{of: fmt.Sprintf("ResourceSlice %s/%s", s.Namespace, s.Name), object: o.Object}
	s.Consumer = r.text("spec", "consumerClusterID")
	s.Class = r.text("spec", "class")
	s.Ask = r.amounts("spec", "resources")
	s.Granted = r.amounts("status", "resources")
	s.Labels = r.texts("status", "nodeLabels")
	s.Selector = r.texts("status", "nodeSelector")
	for _, c := range r.list("status", "conditions") {
		one := reader{of: r.of, object: c}
		says := Condition{one.text("status"), one.text("reason"), one.text("message")}
		switch one.text("type") {
		case authentication:
			s.Authentication = says
		case resources:
			s.Resources = says
		}
	}
	return s, r.err
}

// ReadTenant reads a Tenant.
func ReadTenant(o *unstructured.Unstructured) (*Tenant, error) {
	r := reader{of: fmt.Sprintf("Tenant %s/%s", o.GetNamespace(), o.GetName()), object: o.Object}
	t := &Tenant{UID: string(o.GetUID()), Namespace: o.GetNamespace(),
		Cluster: r.text("spec", "clusterID"), Condition: r.text("spec", "tenantCondition")}
	if t.Condition == "" {
		t.Condition = active // the definition's default
	}
	return t, r.err
}

// Quota returns the ID under which the books keep what the slice is granted. It follows from the name of the slice's
// user. Liqo labels the user's pods with it.
func (s *Slice) Quota() string {
	sum := sha256.Sum256([]byte(s.Consumer))
	return quota(fmt.Sprintf("%s-%x", s.Name, sum[:6]))
}

func quota(user string) string { return "liqo/" + notInLabels.ReplaceAllString(user, "-") }

// notInLabels matches the characters that Liqo replaces in the value of a label.
var notInLabels = regexp.MustCompile(`[^\w\-.]`)

// QuotaOf returns the [Slice.Quota] that a pod uses which Liqo made for another cluster. It is empty for a pod of this
// cluster's own. Liqo's webhook makes sure that a consumer cannot pass for another one. A user of this cluster who may
// make pods can make one that passes for Liqo's.
func QuotaOf(p *corev1.Pod) string {
	user := p.Labels[creatorLabel]
	if user == "" || p.Labels[managedByLabel] != strings.ToLower(shadowPod) {
		return ""
	}
	for _, owner := range p.OwnerReferences {
		controls := owner.Controller != nil && *owner.Controller
		if owner.Kind == shadowPod && strings.HasPrefix(owner.APIVersion, "offloading.liqo.io/") && controls {
			return quota(user)
		}
	}
	return ""
}

// reader reads fields, and keeps the first error.
type reader struct {
	of     string
	object map[string]any
	err    error
}

func (r *reader) note(err error, path []string) {
	if err != nil && r.err == nil {
		r.err = fmt.Errorf("read %s of %s: %w", strings.Join(path, "."), r.of, err)
	}
}

func (r *reader) text(path ...string) string {
	out, _, err := unstructured.NestedString(r.object, path...)
	r.note(err, path)
	return out
}

func (r *reader) texts(path ...string) map[string]string {
	out, _, err := unstructured.NestedStringMap(r.object, path...)
	r.note(err, path)
	return out
}

func (r *reader) list(path ...string) (out []map[string]any) {
	all, _, err := unstructured.NestedSlice(r.object, path...)
	r.note(err, path)
	for _, one := range all {
		if fields, ok := one.(map[string]any); ok {
			out = append(out, fields)
		}
	}
	return out
}

// amounts reads quantities, which are texts or whole numbers.
func (r *reader) amounts(path ...string) corev1.ResourceList {
	all, _, err := unstructured.NestedMap(r.object, path...)
	r.note(err, path)
	out := corev1.ResourceList{}
	for name, value := range all {
		var q resource.Quantity
		err := amount.Check(value)
		if err == nil {
			q, err = resource.ParseQuantity(fmt.Sprint(value))
		}
		r.note(err, append(path[:len(path):len(path)], name))
		out[corev1.ResourceName(name)] = q
	}
	return out
}

// Status is the part of a slice's status that this package writes.
type Status struct {
	Granted          corev1.ResourceList
	Labels, Selector map[string]string
	Resources        Condition
}

// says reports whether the slice has this status already.
func (s *Slice) says(w *Status) bool {
	return s.Resources == w.Resources && maps.Equal(s.Labels, w.Labels) && maps.Equal(s.Selector, w.Selector) &&
		maps.EqualFunc(s.Granted, w.Granted, func(x, y resource.Quantity) bool { return x.Equal(y) })
}

// with returns the object with another status, in the version that was read. The rest of the status is Liqo's, and
// stays as it was.
func (s *Slice) with(w *Status, now time.Time) *unstructured.Unstructured {
	o := s.object.DeepCopy()
	status, _, _ := unstructured.NestedMap(o.Object, "status")
	if status == nil {
		status = map[string]any{}
	}
	set := func(key string, value map[string]any) {
		if delete(status, key); len(value) > 0 {
			status[key] = value
		}
	}
	granted := map[string]any{}
	for name, amount := range w.Granted {
		granted[string(name)] = amount.String()
	}
	set("resources", granted)
	set("nodeLabels", anyOf(w.Labels))
	set("nodeSelector", anyOf(w.Selector))
	list, _ := status["conditions"].([]any)
	status["conditions"] = condition(list, w.Resources, now)
	o.Object["status"] = status
	return o
}

// condition puts the condition Resources into Liqo's list, which has no keys.
func condition(list []any, c Condition, now time.Time) []any {
	made := map[string]any{"type": resources, "status": c.Status, "reason": c.Reason, "message": c.Message,
		"lastTransitionTime": now.UTC().Format(time.RFC3339)}
	for i, one := range list {
		if was, ok := one.(map[string]any); ok && was["type"] == resources {
			if was["status"] == c.Status && was["lastTransitionTime"] != nil {
				made["lastTransitionTime"] = was["lastTransitionTime"]
			}
			list[i] = made
			return list
		}
	}
	return append(list, made)
}

func anyOf(texts map[string]string) map[string]any {
	out := map[string]any{}
	for key, value := range texts {
		out[key] = value
	}
	return out
}
