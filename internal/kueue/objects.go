// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"example.com/gpu-agent/internal/amount"
	"example.com/gpu-agent/internal/placer"
)

// The resources that are followed, as of Kueue v0.19.
var (
	Workloads       = kueueResource("workloads")
	ResourceFlavors = kueueResource("resourceflavors")
	AdmissionChecks = kueueResource("admissionchecks")
)

func kueueResource(name string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "kueue.x-k8s.io", Version: "v1beta2", Resource: name}
}

// States of a check, in Kueue's words.
const (
	Pending = "Pending"
	Ready   = "Ready"
	Retry   = "Retry"
)

// workload has the fields of a Workload that are read.
type workload struct {
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		PodSets  []podSet `json:"podSets"`
		Active   *bool    `json:"active"`
		Priority *int32   `json:"priority"`
		Longest  *int64   `json:"maximumExecutionTimeSeconds"`
	} `json:"spec"`
	Status struct {
		Conditions      []metav1.Condition `json:"conditions"`
		Admission       *admission         `json:"admission"`
		ReclaimablePods []reclaimable      `json:"reclaimablePods"`
		AdmissionChecks []CheckState       `json:"admissionChecks"`
		Past            int64              `json:"accumulatedPastExecutionTimeSeconds"`
	} `json:"status"`
}

type podSet struct {
	Name     string                 `json:"name"`
	Template corev1.PodTemplateSpec `json:"template"`
	Count    int                    `json:"count"`
	MinCount int                    `json:"minCount"`
}

type admission struct {
	PodSetAssignments []struct {
		Name    string                         `json:"name"`
		Flavors map[corev1.ResourceName]string `json:"flavors"`
		Count   *int                           `json:"count"`
	} `json:"podSetAssignments"`
}

type reclaimable struct {
	Name  string `json:"name"`
	Count int    `json:"count"`
}

// CheckState is the state of one check in a Workload's status.
type CheckState struct {
	Name                string      `json:"name"`
	State               string      `json:"state"`
	LastTransitionTime  metav1.Time `json:"lastTransitionTime"`
	Message             string      `json:"message"`
	RequeueAfterSeconds *int32      `json:"requeueAfterSeconds,omitempty"`
	RetryCount          *int32      `json:"retryCount,omitempty"`
	PodSetUpdates       []Update    `json:"podSetUpdates,omitempty"`
}

// Update is what pods of a set get besides.
type Update struct {
	Name         string            `json:"name"`
	Annotations  map[string]string `json:"annotations,omitempty"`
	NodeSelector map[string]string `json:"nodeSelector,omitempty"`
}

// Workload is one of Kueue's, as far as it matters here.
type Workload struct {
	// UID, Namespace and Name are the object's, and Created is when it was made.
	UID, Namespace, Name string
	Created              time.Time
	// Priority is higher for those that others make room for.
	Priority    int
	Annotations map[string]string
	// Reserved is true while it has quota, Admitted while its pods may begin, and Over once they have
	// ended or shall end.
	Reserved, Admitted, Over bool
	// Evicted is true while Kueue takes the quota away. Its pods may not have ended yet, and its checks
	// are Pending without being asked.
	Evicted bool
	// Bare is true while it has no job: MultiKueue sends the workload first. Kueue's controller of the job takes the
	// quota away (0.19). So a bare one that is evicted keeps its quota for ever, and its check is never asked again.
	Bare bool
	// OfPods is true if pods came to the queue by themselves: Kueue deletes them when it takes their quota away.
	OfPods bool
	// Woken is true if Kueue was asked to look at it, and nothing has happened to it since.
	Woken bool
	// QuotaAt is when it last got quota or lost it.
	QuotaAt time.Time
	// Turned is when it was admitted or last ceased to be, Created if it never was.
	Turned time.Time
	// Longest is how long Kueue lets it run, 0 if as long as it likes.
	Longest time.Duration
	// Past is how long it was admitted before it was evicted, all such times together.
	Past   time.Duration
	Sets   []Set
	Checks []CheckState

	object *unstructured.Unstructured
}

// Set is so many pods of one kind. Labels and Annotations are what pods get from their template, and Flavors
// those that Kueue chose for them.
type Set struct {
	Name string
	N    int
	// Least is how few pods it may have instead of those that it asks for, 0 where it may have no fewer.
	Least       int
	Labels      map[string]string
	Annotations map[string]string
	Pod         corev1.PodSpec
	Flavors     []string

	// request is what Checks has found that a pod asks for, nil until it has looked.
	request *request
}

// request is what a pod asks for.
type request struct {
	containers []placer.Container
	plain      placer.Amounts
}

// version is that of the object, empty where there is none.
func (w *Workload) version() string {
	if w.object == nil {
		return ""
	}
	return w.object.GetResourceVersion()
}

// ReadWorkload reads a Workload. The caller may not change it afterwards.
func ReadWorkload(o *unstructured.Unstructured) (*Workload, error) {
	var from workload
	if err := read(o, &from); err != nil {
		return nil, err
	}
	is := func(kind string) bool {
		return slices.ContainsFunc(from.Status.Conditions,
			func(c metav1.Condition) bool { return c.Type == kind && c.Status == metav1.ConditionTrue })
	}
	w := &Workload{
		UID: string(from.UID), Namespace: from.Namespace, Name: from.Name, Created: from.CreationTimestamp.Time,
		Reserved: is("QuotaReserved"), Admitted: is("Admitted"), Evicted: is("Evicted"),
		Over: is("Finished") || from.DeletionTimestamp != nil || from.Spec.Active != nil && !*from.Spec.Active,
		Bare: len(from.OwnerReferences) == 0, OfPods: slices.ContainsFunc(from.OwnerReferences, isPod),
		Checks: from.Status.AdmissionChecks, object: o,
	}
	if from.Spec.Priority != nil {
		w.Priority = int(*from.Spec.Priority)
	}
	if from.Spec.Longest != nil {
		w.Longest = seconds(*from.Spec.Longest)
	}
	w.Turned, w.Past = w.Created, seconds(from.Status.Past)
	for _, c := range from.Status.Conditions {
		switch c.Type {
		case "Admitted":
			w.Turned = c.LastTransitionTime.Time
		case "QuotaReserved":
			w.QuotaAt = c.LastTransitionTime.Time
		}
	}
	w.Annotations = from.Annotations
	w.Woken = slices.ContainsFunc(from.Status.Conditions,
		func(c metav1.Condition) bool { return c.Type == requeued && c.Reason == wokenReason })
	for _, s := range from.Spec.PodSets {
		set := Set{
			Name: s.Name, N: s.Count, Least: max(s.MinCount, 0),
			Labels: s.Template.Labels, Annotations: s.Template.Annotations, Pod: s.Template.Spec,
		}
		if from.Status.Admission != nil {
			for _, a := range from.Status.Admission.PodSetAssignments {
				if a.Name != s.Name {
					continue
				}
				if a.Count != nil {
					set.N = min(set.N, *a.Count) // fewer by partial admission, or more before an elastic job shrank
				}
				set.Flavors = slices.Compact(slices.Sorted(maps.Values(a.Flavors)))
			}
		}
		for _, r := range from.Status.ReclaimablePods {
			if r.Name == s.Name {
				set.N = max(0, set.N-r.Count)
			}
		}
		w.Sets = append(w.Sets, set)
	}
	return w, nil
}

// isPod reports whether an owner is a pod.
func isPod(by metav1.OwnerReference) bool { return by.APIVersion == "v1" && by.Kind == "Pod" }

const (
	// allowedFlavors is Kueue's annotation of workloads with the flavors that they may have. It is
	// there for the variants of ConcurrentAdmission (alpha), and Kueue goes by it for all.
	allowedFlavors = "kueue.x-k8s.io/workload-allowed-resource-flavors"
	// requeued is the condition that a workload may be tried again. Where it changes, Kueue tries a
	// workload that waits for quota, which it does not when an annotation changes.
	requeued    = "Requeued"
	wokenReason = "GPUPlacer"
	// sliceName is the annotation of an elastic job's workloads, and of its pods, with the name of the
	// first of them, and replacesName that of the later ones.
	sliceName    = "kueue.x-k8s.io/workload-slice-name"
	replacesName = "kueue.x-k8s.io/workload-slice-replacement-for"
)

// read makes a typed value of an object.
func read(o *unstructured.Unstructured, into any) error {
	var text []byte
	err := amount.Check(o.Object)
	if err == nil {
		text, err = o.MarshalJSON()
	}
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	if err != nil {
		return fmt.Errorf("read %s %s: %w", o.GetKind(), strings.TrimPrefix(o.GetNamespace()+"/"+o.GetName(), "/"), err)
	}
	return nil
}

// with is the object with another state of a check, in the version that was read.
func (w *Workload) with(s CheckState) (*unstructured.Unstructured, error) {
	o := w.object.DeepCopy()
	list, _, err := unstructured.NestedSlice(o.Object, "status", "admissionChecks")
	if err != nil {
		return nil, fmt.Errorf("read the checks of Workload %s/%s: %w", w.Namespace, w.Name, err)
	}
	made, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&s)
	if err != nil {
		return nil, fmt.Errorf("write the check %s of Workload %s/%s: %w", s.Name, w.Namespace, w.Name, err)
	}
	for i, one := range list {
		if was, ok := one.(map[string]any); ok && was["name"] == s.Name {
			list[i] = made
		}
	}
	return o, unstructured.SetNestedSlice(o.Object, list, "status", "admissionChecks")
}

// woken is the object with the condition that there is a reason to try it again.
func (w *Workload) woken(why string, now time.Time) (*unstructured.Unstructured, error) {
	o := w.object.DeepCopy()
	return o, setCondition(o, map[string]any{
		"type": requeued, "status": "True", "reason": wokenReason, "message": said(why),
		"lastTransitionTime": now.UTC().Format(time.RFC3339), "observedGeneration": o.GetGeneration()})
}

// setCondition sets one of an object's conditions.
func setCondition(o *unstructured.Unstructured, condition map[string]any) error {
	list, _, err := unstructured.NestedSlice(o.Object, "status", "conditions")
	if err != nil {
		return fmt.Errorf("read the conditions of %s %s: %w", o.GetKind(), o.GetName(), err)
	}
	is := func(one any) bool { was, ok := one.(map[string]any); return ok && was["type"] == condition["type"] }
	if i := slices.IndexFunc(list, is); i >= 0 {
		list[i] = condition
	} else {
		list = append(list, condition)
	}
	return unstructured.SetNestedSlice(o.Object, list, "status", "conditions")
}

// Flavor is a ResourceFlavor: nodes by their labels, and the tolerations that Kueue gives pods for them.
type Flavor struct {
	Name        string
	Labels      map[string]string
	Tolerations []corev1.Toleration
	// Cloud is true of nodes that cost money. Patience is how long workloads wait for room on-prem before these are
	// paid.
	Cloud    bool
	Patience time.Duration
}

// ReadFlavor reads a ResourceFlavor. Domain is that of its own label and annotation. If the annotation makes no sense,
// ReadFlavor returns the flavor without patience, and an error.
func ReadFlavor(o *unstructured.Unstructured, domain string) (*Flavor, error) {
	var from struct {
		Spec struct {
			NodeLabels  map[string]string   `json:"nodeLabels"`
			Tolerations []corev1.Toleration `json:"tolerations"`
		} `json:"spec"`
	}
	if err := read(o, &from); err != nil {
		return nil, err
	}
	cloud := o.GetLabels()[domain+"/"+cloudLabel] == "true"
	f := &Flavor{Name: o.GetName(), Labels: from.Spec.NodeLabels, Tolerations: from.Spec.Tolerations, Cloud: cloud}
	name := domain + "/" + patienceName
	if text := o.GetAnnotations()[name]; text != "" {
		d, err := time.ParseDuration(text)
		if err != nil || d < 0 {
			const how = "the annotation %s of ResourceFlavor %s is %q: " +
				"write a duration, for example 2m; until then no workload waits"
			return f, fmt.Errorf(how, name, f.Name, text)
		}
		f.Patience = d
	}
	return f, nil
}

// Check is an AdmissionCheck. Active is true once its controller has set that condition.
type Check struct {
	Name, Controller string
	Active           bool

	object *unstructured.Unstructured
}

// ReadCheck reads an AdmissionCheck. The caller may not change it afterwards.
func ReadCheck(o *unstructured.Unstructured) (*Check, error) {
	var from struct {
		Spec struct {
			ControllerName string `json:"controllerName"`
		} `json:"spec"`
		Status struct {
			Conditions []metav1.Condition `json:"conditions"`
		} `json:"status"`
	}
	if err := read(o, &from); err != nil {
		return nil, err
	}
	active := func(c metav1.Condition) bool { return c.Type == "Active" && c.Status == metav1.ConditionTrue }
	return &Check{Name: o.GetName(), Controller: from.Spec.ControllerName, object: o,
		Active: slices.ContainsFunc(from.Status.Conditions, active)}, nil
}

// active is the object with the condition that its controller is there.
func (c *Check) active(now time.Time) (*unstructured.Unstructured, error) {
	o := c.object.DeepCopy()
	return o, setCondition(o, map[string]any{
		"type": "Active", "status": "True", "reason": "Active", "message": "the GPU placer answers",
		"lastTransitionTime": now.UTC().Format(time.RFC3339), "observedGeneration": o.GetGeneration()})
}
