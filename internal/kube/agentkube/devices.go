// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"cmp"
	"context"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
)

// Device is a device that a DRA driver offers in a ResourceSlice. Driver, pool and name identify
// it.
type Device struct {
	Driver, Pool, Name string
	// Attributes have the values that are strings or versions. The value is "" for all others,
	// which are numbers and booleans. A name without a domain is in the driver's domain.
	Attributes map[string]string

	generation int64
}

// Devices returns the devices that these drivers offer, sorted by driver, pool and name. It
// includes devices that are tied to no node by name, such as those on a network, but not those of
// other nodes. It returns none if the server has no ResourceSlices, as before Kubernetes 1.34.
func (c *Client) Devices(ctx context.Context, drivers ...string) ([]Device, error) {
	selectors := []fields.Selector{fields.OneTermEqualSelector("spec.nodeName", c.options.NodeName)}
	for _, driver := range drivers {
		selectors = append(selectors, fields.SelectorFromSet(fields.Set{"spec.nodeName": "", "spec.driver": driver}))
	}
	var devices []Device
	for _, selector := range selectors {
		more, err := c.listDevices(ctx, selector, drivers)
		if err != nil {
			return nil, err
		}
		devices = append(devices, more...)
	}
	// While a driver writes a pool anew, its slices are of two generations. The newer one is right.
	slices.SortStableFunc(devices, func(a, b Device) int {
		return cmp.Or(cmp.Compare(a.Driver, b.Driver), cmp.Compare(a.Pool, b.Pool), cmp.Compare(a.Name, b.Name),
			cmp.Compare(b.generation, a.generation))
	})
	return slices.CompactFunc(devices, func(a, b Device) bool {
		return a.Driver == b.Driver && a.Pool == b.Pool && a.Name == b.Name
	}), nil
}

func (c *Client) listDevices(ctx context.Context, selector fields.Selector, drivers []string) ([]Device, error) {
	bounded, cancel := context.WithTimeout(ctx, c.server.Timing.Request)
	defer cancel()
	list, err := c.server.API.Resource(resourceSlices).
		List(bounded, metav1.ListOptions{FieldSelector: selector.String()})
	if apierrors.IsNotFound(err) {
		list, err = &unstructured.UnstructuredList{}, nil
	}
	c.server.Note(ctx, "list", resourceSlices.Resource, c.options.NodeName, err)
	if err != nil {
		return nil, err
	}
	var devices []Device
	for i := range list.Items {
		spec, _, _ := unstructured.NestedMap(list.Items[i].Object, "spec")
		if driver, _, _ := unstructured.NestedString(spec, "driver"); slices.Contains(drivers, driver) {
			devices = append(devices, readDevices(driver, spec)...)
		}
	}
	return devices, nil
}

// readDevices reads the devices of one slice. It leaves out a malformed device; callers treat a
// device that they do not find as one that may be anything. It does not make the slice a typed
// object, since that would parse the amounts of other drivers.
func readDevices(driver string, spec map[string]any) []Device {
	pool, _, _ := unstructured.NestedString(spec, "pool", "name")
	generation, _, _ := unstructured.NestedInt64(spec, "pool", "generation")
	list, _, _ := unstructured.NestedSlice(spec, "devices")
	var devices []Device
	for _, entry := range list {
		object, _ := entry.(map[string]any)
		d := Device{Driver: driver, Pool: pool, Attributes: map[string]string{}, generation: generation}
		d.Name, _, _ = unstructured.NestedString(object, "name")
		attributes, _, _ := unstructured.NestedMap(object, "attributes")
		for name, value := range attributes {
			typed, _ := value.(map[string]any)
			text, _ := typed["string"].(string)
			if version, ok := typed["version"].(string); ok {
				text = version
			}
			d.Attributes[name] = text
		}
		if d.Name != "" {
			devices = append(devices, d)
		}
	}
	return devices
}
