// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"example.com/gpu-agent/internal/gpunode"
)

// GPUNode is a Node that has a GPUNode.
type GPUNode struct {
	Name   string
	Labels map[string]string
	Status *gpunode.Status
}

// List reads once, in pages, the Nodes with such labels, in kubectl's words, that have a
// GPUNode. A node whose GPUNode says what cannot be is logged and passed over: none can keep the
// others from being read. The error says what the server does not have or does not allow.
func (c *Cluster) List(ctx context.Context, selector string) ([]GPUNode, error) {
	says := map[string]*gpunode.Status{}
	all := schema.GroupVersionResource{Group: c.options.Domain, Version: gpunode.Version, Resource: gpunode.Plural}
	err := c.pages(ctx, all, "", func(o *unstructured.Unstructured) error {
		status, err := readGPUNode(o)
		if err == nil {
			err = status.Check()
		}
		if err != nil {
			c.log.Warn("passing over a node whose GPUNode says what cannot be", "node", o.GetName(), "err", err)
			return nil
		}
		says[o.GetName()] = status
		return nil
	})
	if apierrors.IsNotFound(err) {
		err = fmt.Errorf("the cluster has no resource %s.%s: apply deployments/base/crd.yaml (%w)", gpunode.Plural, c.options.Domain, err)
	}
	if err != nil {
		return nil, err
	}
	var out []GPUNode
	err = c.pages(ctx, nodes, selector, func(o *unstructured.Unstructured) error {
		if s := says[o.GetName()]; s != nil {
			out = append(out, GPUNode{o.GetName(), o.GetLabels(), s})
		}
		return nil
	})
	return out, err
}

// pages calls see with each object of a resource.
func (c *Cluster) pages(ctx context.Context, of schema.GroupVersionResource, labels string, see func(*unstructured.Unstructured) error) error {
	for o := (metav1.ListOptions{LabelSelector: labels, Limit: page}); ; {
		bounded, cancel := context.WithTimeout(ctx, c.timing.request)
		list, err := c.api.Resource(of).List(bounded, o)
		cancel()
		if err != nil {
			return fmt.Errorf("list %s: %w", of.Resource, err)
		}
		for i := range list.Items {
			if err := see(&list.Items[i]); err != nil {
				return fmt.Errorf("read %s %s: %w", of.Resource, list.Items[i].GetName(), err)
			}
		}
		if o.Continue = list.GetContinue(); o.Continue == "" {
			return nil
		}
	}
}
