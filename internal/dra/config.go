// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"

	resourcev1 "k8s.io/api/resource/v1"
)

// A claim and its DeviceClass may have configuration for the driver. This driver accepts one kind:
// what NVIDIA's driver takes for time slices. The admission policy gpu-agent-claims
// (deployments/components/dra) refuses any other when a claim is made. This file refuses the
// configuration of a class, and of claims that were made while the policy was not in force.

// known lists the configuration objects that are accepted, with the time slice of each. An object
// has to be equal to one of them: to ignore a field would promise what is not done.
var known = func() (out []knownConfig) {
	add := func(sharing map[string]any, slice gpu.TimeSlice) {
		sharing["strategy"] = "TimeSlicing"
		object := map[string]any{"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": sharing}
		out = append(out, knownConfig{object, slice})
	}
	add(map[string]any{}, gpu.TimeSliceDefault)
	for interval, slice := range map[string]gpu.TimeSlice{"Default": gpu.TimeSliceDefault,
		"Short": gpu.TimeSliceShort, "Medium": gpu.TimeSliceMedium, "Long": gpu.TimeSliceLong} {
		add(map[string]any{"timeSlicingConfig": map[string]any{"interval": interval}}, slice)
	}
	return out
}()

type knownConfig struct {
	object any // as encoding/json reads it
	slice  gpu.TimeSlice
}

// readConfig returns the time slice that a configuration asks for. The error wraps gpu.ErrInvalid
// if it asks for something else.
func readConfig(c *resourcev1.DeviceAllocationConfiguration) (gpu.TimeSlice, error) {
	var object any
	err := json.Unmarshal(c.Opaque.Parameters.Raw, &object)
	for _, k := range known {
		if err == nil && reflect.DeepEqual(k.object, object) {
			return k.slice, nil
		}
	}
	var is struct{ APIVersion, Kind string }
	_ = json.Unmarshal(c.Opaque.Parameters.Raw, &is) // if it cannot be parsed, the kind stays empty
	whose := "configuration"
	if c.Source == resourcev1.AllocationConfigSourceClass {
		whose = "its DeviceClass has configuration"
	}
	return "", fmt.Errorf("%s of kind %q, %q: this driver accepts only time slices "+
		"(kind GpuConfig of resource.nvidia.com/v1beta1, sharing.strategy TimeSlicing, "+
		"timeSlicingConfig.interval Default, Short, Medium or Long): "+
		"leave it out, and ask for a device by class and capacity: %w",
		whose, brief.Cut(is.Kind, longest), brief.Cut(is.APIVersion, longest), gpu.ErrInvalid)
}

// longest is how much of a foreign name an error repeats, in bytes.
const longest = 100

// refuseConfig returns a permanent error if a claim has configuration that is not known.
func refuseConfig(c *agentkube.Claim) error {
	for i := range c.Configs {
		if _, err := readConfig(&c.Configs[i]); err != nil {
			return permanent(status.ClaimUnsupported, err)
		}
	}
	return nil
}

// sliceOf returns the time slice that a claim asks for in a result; empty if it asks for none. The
// last configuration that applies to the result's request counts. named is true if that
// configuration names exactly this request.
func sliceOf(
	c *agentkube.Claim, r *resourcev1.DeviceRequestAllocationResult,
) (slice gpu.TimeSlice, named bool) {
	for i := range slices.Backward(c.Configs) {
		requests := c.Configs[i].Requests
		named := slices.Contains(requests, r.Request)
		within := func(of string) bool { return strings.HasPrefix(r.Request, of+"/") }
		if !named && len(requests) > 0 && !slices.ContainsFunc(requests, within) {
			continue
		}
		slice, _ := readConfig(&c.Configs[i]) // wanted has refused what cannot be read
		return slice, named
	}
	return "", false
}

// putSlice sets the time slice that a result asks for in its grant. A MIG instance and admin access
// have none. For these a configuration is ignored if it does not name the request, and refused for
// good if it does. The error wraps ledger.ErrHeld while another claim has another time slice on the
// GPU.
func putSlice(l *ledger.Ledger, g *ledger.Grant, w *want, beside []ledger.Request) error {
	if w.slice == "" {
		return nil
	}
	if w.Admin || w.device.Kind.InMIG() {
		if w.named {
			return permanent(status.ClaimUnsupported, fmt.Errorf("configuration asks for a time slice in request %s, "+
				"and its device (%s) has none of its own: leave the request out of the configuration: %w",
				w.Request, w.Device, gpu.ErrInvalid))
		}
		return nil
	}
	other := func(grants []ledger.Grant) int {
		return slices.IndexFunc(grants, func(o ledger.Grant) bool {
			return o.GPU == g.GPU && o.TimeSlice != "" && o.TimeSlice != w.slice
		})
	}
	for i := range beside {
		if j := other(beside[i].Grants); j >= 0 {
			return permanent(status.ClaimUnsupported, fmt.Errorf("configuration asks for two time slices "+
				"of one GPU, %s and %s: %w", beside[i].Grants[j].TimeSlice, w.slice, gpu.ErrInvalid))
		}
	}
	for _, a := range l.Allocations() {
		if j := other(a.Grants); j >= 0 {
			return fmt.Errorf("device %s: its GPU has the time slice %s for another claim (allocation %s), "+
				"and %s is asked for: %w", w.Device, a.Grants[j].TimeSlice, a.ID, w.slice, ledger.ErrHeld)
		}
	}
	g.TimeSlice = w.slice
	return nil
}
