// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"encoding/json"
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"example.com/gpu-agent/internal/gpunode"
)

// ManifestDomain is the domain in the manifests, and the default of --domain.
const ManifestDomain = "example.com"

// ReadGPUNode returns the status of a GPUNode, or nil if object is nil. It fails if the status
// cannot be decoded.
func ReadGPUNode(object *unstructured.Unstructured) (*gpunode.Status, error) {
	if object == nil {
		return nil, nil
	}
	out := new(gpunode.Status)
	body, err := json.Marshal(object.Object["status"])
	if err == nil {
		err = json.Unmarshal(body, out)
	}
	if err != nil {
		return nil, fmt.Errorf("read GPUNode %s: %w", object.GetName(), err)
	}
	return out, nil
}

// GPUNodes returns the resource of GPUNodes in a domain.
func GPUNodes(domain string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: domain, Version: gpunode.Version, Resource: gpunode.Plural}
}
