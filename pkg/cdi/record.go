// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"fmt"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/gpu"
)

// Record writes down in a claim's spec what the claim is: its resource and the
// device IDs, as annotations of the spec. The file then is the claim's record
// too, and needs no second one beside it: a new process reads its
// predecessor's claims from the directory. Annotations need CDI 0.6.0.
func Record(spec *specs.Spec, domain, resource string, ids []string) error {
	sorted := slices.Clone(ids)
	slices.Sort(sorted)
	spec.Annotations = map[string]string{
		resourceAnnotation(domain): resource,
		idsAnnotation(domain):      strings.Join(sorted, ","),
	}
	var err error
	if spec.Version, err = specs.MinimumRequiredVersion(spec); err != nil {
		return fmt.Errorf("record a claim of %s: choose a CDI version: %w", resource, err)
	}
	return nil
}

// ReadRecord is Record backwards. The error wraps gpu.ErrInvalid where the
// annotations are missing or do not belong to the device that the spec names.
func ReadRecord(spec *specs.Spec, domain string) (resource string, ids []string, err error) {
	resource = spec.Annotations[resourceAnnotation(domain)]
	list := spec.Annotations[idsAnnotation(domain)]
	if resource == "" || list == "" {
		return "", nil, fmt.Errorf("the CDI spec does not say which claim it is: %w", gpu.ErrInvalid)
	}
	ids = strings.Split(list, ",")
	if key := Key(resource, ids); len(spec.Devices) != 1 || spec.Devices[0].Name != key {
		return "", nil, fmt.Errorf("the CDI spec's device is not claim %s of its annotations: %w", key, gpu.ErrInvalid)
	}
	return resource, ids, nil
}

func resourceAnnotation(domain string) string { return domain + "/gpu-claim.resource" }
func idsAnnotation(domain string) string      { return domain + "/gpu-claim.ids" }
