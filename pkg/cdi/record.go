// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"fmt"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/gpu"
)

// Record writes down in an allocation's spec what was granted, as an annotation of the
// spec: the one that the allocation's container has too. The file then is the allocation's
// record, and needs no second one beside it: a new process reads its predecessor's
// allocations from the directory. What the record's text says is the caller's affair.
// Annotations need CDI 0.6.0.
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

// ReadRecord returns the key of the allocation that a spec is of and what Record wrote.
// The error wraps gpu.ErrInvalid where there is no record of the device that the spec
// names.
func ReadRecord(spec *specs.Spec, domain string) (key, record string, err error) {
	if len(spec.Devices) == 1 {
		key = spec.Devices[0].Name
		record = spec.Annotations[AnnotationName(domain, key)]
	}
	if record == "" || !ValidKey(key) {
		return "", "", fmt.Errorf("the CDI spec does not say which allocation it is: %w", gpu.ErrInvalid)
	}
	return key, record, nil
}
