// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube"
)

// GPUNode is a Node together with the status of its GPUNode.
type GPUNode struct {
	Name   string
	Labels map[string]string
	Status *gpunode.Status
}

// List reads the Nodes of a cluster that have a GPUNode and that match the label selector, once and
// in pages. Commands use it; an agent does not. If a GPUNode is not valid, List logs a warning and
// leaves that node out, so that it does not hide the others. List fails if the server lacks
// GPUNodes or does not allow the request.
func List(ctx context.Context, o kube.Options, selector string) ([]GPUNode, error) {
	server, err := kube.Connect(o, 100)
	if err != nil {
		return nil, err
	}
	says := map[string]*gpunode.Status{}
	err = server.Pages(ctx, kube.GPUNodes(o.Domain), "", func(o *unstructured.Unstructured) error {
		status, err := kube.ReadGPUNode(o)
		if err == nil {
			err = status.Check()
		}
		if err != nil {
			server.Log.Warn("ignoring a node whose GPUNode is not valid", "node", o.GetName(), "err", err)
			return nil
		}
		says[o.GetName()] = status
		return nil
	})
	if apierrors.IsNotFound(err) {
		err = fmt.Errorf("the cluster has no resource %s.%s: apply deployments/base/crd.yaml (%w)",
			gpunode.Plural, o.Domain, err)
	}
	if err != nil {
		return nil, err
	}
	var out []GPUNode
	err = server.Pages(ctx, kube.Nodes, selector, func(o *unstructured.Unstructured) error {
		if s := says[o.GetName()]; s != nil {
			out = append(out, GPUNode{o.GetName(), o.GetLabels(), s})
		}
		return nil
	})
	return out, err
}
