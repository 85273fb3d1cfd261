// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"encoding/json"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"example.com/gpu-agent/internal/amount"
)

// ResourceSlice is one that a driver of this node publishes, in the words and the JSON of
// resource.k8s.io/v1. It has counters or devices, not both.
type ResourceSlice struct {
	// Name is the object's. The scheduler takes the slices of a pool by their names.
	Name string `json:"-"`
	// Pool is completed by whoever writes it: generation and number of slices.
	Pool     Pool         `json:"pool"`
	Counters []CounterSet `json:"sharedCounters,omitempty"`
	Devices  []PoolDevice `json:"devices,omitempty"`
}

// Object is the slice as the API has it, of a driver and a node.
func (s *ResourceSlice) Object(driver, node string) (*unstructured.Unstructured, error) {
	data, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	var spec map[string]any
	if err := json.Unmarshal(data, &spec); err != nil {
		return nil, err
	}
	spec["driver"], spec["nodeName"] = driver, node
	object := &unstructured.Unstructured{Object: map[string]any{"apiVersion": resourceSlices.GroupVersion().String(), "kind": "ResourceSlice", "spec": spec}}
	object.SetName(s.Name)
	return object, nil
}

// Pool is what a slice is a part of. A pool of which not all slices of the newest
// generation are there is not used.
type Pool struct {
	Name       string `json:"name"`
	Generation int64  `json:"generation"`
	Slices     int64  `json:"resourceSliceCount"`
}

// CounterSet is what devices of a pool share, by name.
type CounterSet struct {
	Name     string            `json:"name"`
	Counters map[string]Amount `json:"counters"`
}

// PoolDevice is one device of a slice.
type PoolDevice struct {
	Name string `json:"name"`
	// Attributes and Capacity are by name; one without a domain is in the driver's.
	Attributes map[string]Attribute `json:"attributes,omitempty"`
	Capacity   map[string]Capacity  `json:"capacity,omitempty"`
	Consumes   []Consumption        `json:"consumesCounters,omitempty"`
	// Shared says that several claims may have some of its capacity each.
	Shared bool    `json:"allowMultipleAllocations,omitempty"`
	Taints []Taint `json:"taints,omitempty"`
}

// Attribute is a value that selectors compare; one field is set.
type Attribute struct {
	String  *string `json:"string,omitempty"`
	Version *string `json:"version,omitempty"`
	Int     *int64  `json:"int,omitempty"`
	Bool    *bool   `json:"bool,omitempty"`
}

// Amount is a quantity where the API wants an object.
type Amount struct {
	Value Quantity `json:"value"`
}

// Capacity is what a device has of something. Policy says how much a claim may have of
// it; without it a claim has all.
type Capacity struct {
	Value  Quantity       `json:"value"`
	Policy *RequestPolicy `json:"requestPolicy,omitempty"`
}

// RequestPolicy is what a claim may have, and has if it does not say: one of Values, or
// an amount of Range.
type RequestPolicy struct {
	Default Quantity   `json:"default"`
	Values  []Quantity `json:"validValues,omitempty"`
	Range   *Range     `json:"validRange,omitempty"`
}

// Range is from Min to Max in steps.
type Range struct {
	Min  Quantity `json:"min"`
	Max  Quantity `json:"max"`
	Step Quantity `json:"step"`
}

// Consumption is what a device takes of a counter set.
type Consumption struct {
	Set      string            `json:"counterSet"`
	Counters map[string]Amount `json:"counters"`
}

// Taint keeps claims that do not tolerate it away from a device.
type Taint struct {
	Key    string      `json:"key"`
	Value  string      `json:"value,omitempty"`
	Effect TaintEffect `json:"effect"`
}

// TaintEffect is what a taint does.
type TaintEffect string

// Effects of taints. NoExecute also ends the pods that have the device.
const (
	NoSchedule TaintEffect = "NoSchedule"
	NoExecute  TaintEffect = "NoExecute"
)

// Quantity is a number, bytes where it is of memory. In JSON it is a quantity of
// Kubernetes: "14", "79Gi".
type Quantity int64

// MarshalJSON writes the quantity as the API server would.
func (q Quantity) MarshalJSON() ([]byte, error) {
	format := resource.DecimalSI
	if q%1024 == 0 {
		format = resource.BinarySI
	}
	return json.Marshal(resource.NewQuantity(int64(q), format).String())
}

// UnmarshalJSON reads a quantity that is a whole number.
func (q *Quantity) UnmarshalJSON(data []byte) error {
	var of resource.Quantity
	err := amount.Check(strings.Trim(string(data), `"`)) // a number, or a text without escapes
	if err == nil {
		err = json.Unmarshal(data, &of)
	}
	if err != nil {
		return fmt.Errorf("read a quantity: %w", err)
	}
	*q = Quantity(of.Value())
	return nil
}
