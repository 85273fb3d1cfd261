// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"fmt"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/gpu"
)

// Record stores a record of what was granted in an allocation's spec, as an annotation. The
// annotation has the same name as that of the allocation's container. So the spec's file is the
// allocation's record, too: a new process reads its predecessor's allocations from the directory.
// The caller decides what the record's text is. Annotations need CDI 0.6.0. The error wraps
// gpu.ErrInvalid if the spec does not have exactly one device.
func Record(spec *specs.Spec, domain, record string) error {
	if len(spec.Devices) != 1 {
		return fmt.Errorf("record an allocation in a CDI spec of %d devices, want one: %w",
			len(spec.Devices), gpu.ErrInvalid)
	}
	spec.Annotations = map[string]string{AnnotationName(domain, spec.Devices[0].Name): record}
	var err error
	if spec.Version, err = specs.MinimumRequiredVersion(spec); err != nil {
		return fmt.Errorf("record allocation %s: choose a CDI version: %w", spec.Devices[0].Name, err)
	}
	return nil
}

// ReadRecord returns the key of the allocation that a spec is of, and what Record stored. The error
// wraps gpu.ErrInvalid if the spec has no record for its device.
func ReadRecord(spec *specs.Spec, domain string) (key, record string, err error) {
	if len(spec.Devices) == 1 {
		key = spec.Devices[0].Name
		record = spec.Annotations[AnnotationName(domain, key)]
	}
	if record == "" || !ValidKey(key) {
		return "", "", fmt.Errorf("the CDI spec does not name its allocation: %w", gpu.ErrInvalid)
	}
	return key, record, nil
}
