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
		PodSets []podSet `json:"podSets"`
		Active  *bool    `json:"active"`
	} `json:"spec"`
	Status struct {
		Conditions      []metav1.Condition `json:"conditions"`
		Admission       *admission         `json:"admission"`
		ReclaimablePods []reclaimable      `json:"reclaimablePods"`
		AdmissionChecks []CheckState       `json:"admissionChecks"`
		SchedulingStats struct {
			Evictions []struct {
				Reason string `json:"reason"`
				Count  int    `json:"count"`
			} `json:"evictions"`
		} `json:"schedulingStats"`
	} `json:"status"`
}

type podSet struct {
	Name     string                 `json:"name"`
	Template corev1.PodTemplateSpec `json:"template"`
	Count    int                    `json:"count"`
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

// CheckState is what a Workload says of one of its checks.
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
	// Owner is the UID of its controller, empty if it has none. Of a variant it is the UID of the
	// workload that it is a variant of.
	Owner string
	// Reserved says that it has quota, Admitted that its pods may begin, and Over that they have
	// ended or shall end.
	Reserved, Admitted, Over bool
	// Refused is why Kueue has found no quota for it, the last time that it looked; empty while
	// it has quota, or is to be looked at.
	Refused string
	// Retries is how often it has given its quota back because of a check. Kueue forgets a
	// check's own count with the check.
	Retries int
	Sets    []Set
	Checks  []CheckState

	object *unstructured.Unstructured
}

// Set is so many pods of one kind. Labels are what pods get from their template, and Flavors
// those that Kueue chose for them.
type Set struct {
	Name    string
	N       int
	Labels  map[string]string
	Pod     corev1.PodSpec
	Flavors []string
}

// version is that of the object, empty where there is none.
func (w *Workload) version() string {
	if w.object == nil {
		return ""
	}
	return w.object.GetResourceVersion()
}

// ReadWorkload reads a Workload, which the caller may not change any more.
func ReadWorkload(o *unstructured.Unstructured) (*Workload, error) {
	var from workload
	if err := read(o, &from); err != nil {
		return nil, err
	}
	is := func(kind string) bool {
		return slices.ContainsFunc(from.Status.Conditions, func(c metav1.Condition) bool { return c.Type == kind && c.Status == metav1.ConditionTrue })
	}
	w := &Workload{
		UID: string(from.UID), Namespace: from.Namespace, Name: from.Name, Created: from.CreationTimestamp.Time,
		Reserved: is("QuotaReserved"), Admitted: is("Admitted"),
		Over:   is("Finished") || from.DeletionTimestamp != nil || from.Spec.Active != nil && !*from.Spec.Active,
		Checks: from.Status.AdmissionChecks, object: o,
	}
	if by := metav1.GetControllerOf(&from.ObjectMeta); by != nil {
		w.Owner = string(by.UID)
	}
	w.Refused = refused(from.Status.Conditions)
	for _, e := range from.Status.SchedulingStats.Evictions {
		if e.Reason == evictedByCheck {
			w.Retries += e.Count
		}
	}
	for _, s := range from.Spec.PodSets {
		set := Set{Name: s.Name, N: s.Count, Labels: s.Template.Labels, Pod: s.Template.Spec}
		if from.Status.Admission != nil {
			for _, a := range from.Status.Admission.PodSetAssignments {
				if a.Name != s.Name {
					continue
				}
				if a.Count != nil {
					set.N = *a.Count
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

// evictedByCheck is Kueue's reason where a check is Retry.
const evictedByCheck = "AdmissionCheck"

// refused is the reason for which there is no quota. When a workload has given its quota back,
// Kueue repeats there why, until it has looked again.
func refused(conditions []metav1.Condition) string {
	find := func(kind string) metav1.Condition {
		for _, c := range conditions {
			if c.Type == kind {
				return c
			}
		}
		return metav1.Condition{}
	}
	quota := find("QuotaReserved")
	if quota.Status != metav1.ConditionFalse || quota.Message == find("Evicted").Message {
		return ""
	}
	return quota.Message
}

// read makes a typed value of an object.
func read(o *unstructured.Unstructured, into any) error {
	text, err := o.MarshalJSON()
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

// Flavor is a ResourceFlavor: nodes by their labels.
type Flavor struct {
	Name   string
	Labels map[string]string
}

// ReadFlavor reads a ResourceFlavor.
func ReadFlavor(o *unstructured.Unstructured) (*Flavor, error) {
	var from struct {
		Spec struct {
			NodeLabels map[string]string `json:"nodeLabels"`
		} `json:"spec"`
	}
	if err := read(o, &from); err != nil {
		return nil, err
	}
	return &Flavor{o.GetName(), from.Spec.NodeLabels}, nil
}

// Check is an AdmissionCheck. Active says that its controller has said that it is there.
type Check struct {
	Name, Controller string
	Active           bool

	object *unstructured.Unstructured
}

// ReadCheck reads an AdmissionCheck, which the caller may not change any more.
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
	return &Check{Name: o.GetName(), Controller: from.Spec.ControllerName, object: o,
		Active: slices.ContainsFunc(from.Status.Conditions, func(c metav1.Condition) bool { return c.Type == "Active" && c.Status == metav1.ConditionTrue })}, nil
}

// active is the object with the condition that its controller is there.
func (c *Check) active(now time.Time) (*unstructured.Unstructured, error) {
	o := c.object.DeepCopy()
	list, _, err := unstructured.NestedSlice(o.Object, "status", "conditions")
	if err != nil {
		return nil, fmt.Errorf("read the conditions of AdmissionCheck %s: %w", c.Name, err)
	}
	list = slices.DeleteFunc(list, func(one any) bool { was, ok := one.(map[string]any); return ok && was["type"] == "Active" })
	list = append(list, map[string]any{"type": "Active", "status": "True", "reason": "Active", "message": "the GPU placer answers",
		"lastTransitionTime": now.UTC().Format(time.RFC3339), "observedGeneration": o.GetGeneration()})
	return o, unstructured.SetNestedSlice(o.Object, list, "status", "conditions")
}
