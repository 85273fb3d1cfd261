// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"encoding/json"
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"example.com/gpu-agent/internal/gpunode"
)

// ManifestDomain is the domain that the manifests have, and --domain by default.
const ManifestDomain = "example.com"

// ReadGPUNode reads an object's status; nil has none.
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

// GPUNodes is the resource of a domain's GPUNodes.
func GPUNodes(domain string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: domain, Version: gpunode.Version, Resource: gpunode.Plural}
}
