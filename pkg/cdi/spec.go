// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/gpu"
)

// visibleDevices keeps older runtime hooks from adding GPUs of their own.
const visibleDevices = "NVIDIA_VISIBLE_DEVICES"

// Parts are what containers need of a node's driver. Host paths are those of the host, as a CDI
// file must have them, and not those that the agent sees.
type Parts struct {
	// Common is what a container needs for any GPU: the driver's libraries and programs, its
	// control nodes, and the hooks that make them usable.
	Common specs.ContainerEdits
	// Devices has the nodes of each physical GPU. A GPU without an entry cannot be given to a
	// container.
	Devices map[gpu.UUID]specs.ContainerEdits
}

// Spec describes an allocation of some GPUs, by UUID. It returns a spec with one device named key,
// which has the common parts, those of each GPU, and over on top. The spec shares no memory with
// the arguments.
//
// Edits that several parts have in common occur once. Device nodes, mounts and group IDs are
// sorted. GPUs are taken in the order of their UUIDs. Environment and hooks keep the order of their
// part.
//
// Errors wrap gpu.ErrInvalid (a malformed domain or key, no GPU) or gpu.ErrNotFound (parts lack a
// GPU, or a library that is to be replaced).
func Spec(domain, key string, parts Parts, gpus []gpu.UUID, over Overlay) (*specs.Spec, error) {
	if err := gpu.ValidateDomain(domain); err != nil {
		return nil, err
	}
	if !ValidKey(key) {
		return nil, fmt.Errorf("allocation ID %q: want %d hexadecimal digits in lower case: %w",
			key, keyDigits, gpu.ErrInvalid)
	}
	if len(gpus) == 0 {
		return nil, fmt.Errorf("describe allocation %s: it has no GPU: %w", key, gpu.ErrInvalid)
	}
	sorted := slices.Clone(gpus)
	slices.Sort(sorted)
	sorted = slices.Compact(sorted)

	var all specs.ContainerEdits
	merge(&all, parts.Common)
	for _, u := range sorted {
		edits, ok := parts.Devices[u]
		if !ok {
			return nil, fmt.Errorf("describe allocation %s: the driver's parts have no %s: %w", key, u, gpu.ErrNotFound)
		}
		merge(&all, edits)
	}
	err := over.apply(&all)
	if err == nil {
		all, err = clone(all)
	}
	if err != nil {
		return nil, fmt.Errorf("describe allocation %s: %w", key, err)
	}
	all.Env = append(slices.DeleteFunc(all.Env, func(e string) bool {
		name, _, _ := strings.Cut(e, "=")
		return name == visibleDevices
	}), visibleDevices+"=void")
	tidy(&all)

	spec := &specs.Spec{
		Kind:    Kind(domain),
		Devices: []specs.Device{{Name: key, ContainerEdits: all}},
	}
	spec.Version, err = specs.MinimumRequiredVersion(spec)
	if err != nil {
		return nil, fmt.Errorf("describe allocation %s: choose a CDI version: %w", key, err)
	}
	return spec, nil
}

// merge appends the edits of from. IntelRdt is one setting per container; the last part that has
// one wins, as in a runtime.
func merge(to *specs.ContainerEdits, from specs.ContainerEdits) {
	to.Env = append(to.Env, from.Env...)
	to.DeviceNodes = append(to.DeviceNodes, from.DeviceNodes...)
	to.NetDevices = append(to.NetDevices, from.NetDevices...)
	to.Hooks = append(to.Hooks, from.Hooks...)
	to.Mounts = append(to.Mounts, from.Mounts...)
	to.AdditionalGIDs = append(to.AdditionalGIDs, from.AdditionalGIDs...)
	if from.IntelRdt != nil {
		to.IntelRdt = from.IntelRdt
	}
}

// clone copies edits through their own file format, so that it also copies fields that a later CDI
// version adds.
func clone(edits specs.ContainerEdits) (out specs.ContainerEdits, err error) {
	data, err := json.Marshal(edits)
	if err != nil {
		return out, fmt.Errorf("encode container edits: %w", err)
	}
	if err := json.Unmarshal(data, &out); err != nil {
		return out, fmt.Errorf("decode container edits: %w", err)
	}
	return out, nil
}

// tidy drops repetitions, and sorts what has no order of its own. A runtime sorts mounts by depth
// before it applies them, and of two mounts on one path the last wins. So mounts with equal paths
// keep their order.
func tidy(e *specs.ContainerEdits) {
	e.Env = unique(e.Env)
	e.Hooks = unique(e.Hooks)
	e.NetDevices = unique(e.NetDevices)
	e.DeviceNodes = unique(e.DeviceNodes)
	slices.SortStableFunc(e.DeviceNodes, func(a, b *specs.DeviceNode) int { return cmp.Compare(a.Path, b.Path) })
	e.Mounts = unique(e.Mounts)
	slices.SortStableFunc(e.Mounts, func(a, b *specs.Mount) int {
		return cmp.Compare(a.ContainerPath, b.ContainerPath)
	})
	slices.Sort(e.AdditionalGIDs)
	e.AdditionalGIDs = slices.Compact(e.AdditionalGIDs)
}

// unique keeps the first of values that are written the same in a file.
func unique[T any](in []T) []T {
	seen := make(map[string]bool, len(in))
	return slices.DeleteFunc(in, func(v T) bool {
		data, err := json.Marshal(v)
		if err != nil || seen[string(data)] {
			return err == nil
		}
		seen[string(data)] = true
		return false
	})
}
