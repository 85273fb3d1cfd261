// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"example.com/gpu-agent/tests/lab"
)

// What the agent's service account may write, asked of the API server in its
// name: its own labels and annotation of its own Node, and nothing else. RBAC
// cannot say the half of that; admission policies do, and the agent has found that
// they are in force.
func TestRights(t *testing.T) {
	b := prepare(t)
	b.must(agent.Start(b.ctx)) // a test before may have left it stopped

	path := "/api/v1/nodes/" + nodeName
	as := func(onNode, method, path string, body any) error {
		return node.As(b.ctx, "gpu-agent", "gpu-agent", onNode, method, path, body)
	}
	type object = map[string]any
	meta := func(field, key string, value any) object {
		return object{"metadata": object{field: object{key: value}}}
	}
	b.must(node.Label(b.ctx, map[string]string{"team": "blue"}))
	b.must(lab.Await(b.ctx, waitLong, "the agent finds its policies in force", func(ctx context.Context) error {
		got, err := agent.Metrics(ctx)
		if err != nil {
			return err
		}
		for _, policy := range []string{"gpu-agent", "gpu-agent-events"} {
			if got[`gpu_agent_policy_in_force{policy="`+policy+`"}`] != 1 {
				return fmt.Errorf("policy %s is not in force", policy)
			}
		}
		return nil
	}))

	for _, own := range []object{
		meta("labels", "example.com/gpu.nvlink-domain", "1"), meta("labels", "example.com/gpu.nvlink-domain", nil),
		meta("annotations", "example.com/gpu.partition.message", "1"), meta("annotations", "example.com/gpu.partition.message", nil),
	} {
		if err := as(nodeName, http.MethodPatch, path, own); err != nil {
			b.Errorf("an agent could not write on its own node: %v: %v", own, err)
		}
	}
	for name, c := range map[string]struct {
		onNode string
		body   object
		why    string
	}{
		"from another node":       {"elsewhere", meta("labels", "example.com/gpu.nvlink-domain", "1"), "only to the node that it runs on"},
		"from no node":            {"", meta("labels", "example.com/gpu.nvlink-domain", "1"), "only to the node that it runs on"},
		"a label of others":       {nodeName, meta("labels", "team", "red"), "only labels of its own"},
		"a label taken away":      {nodeName, meta("labels", "team", nil), "only labels of its own"},
		"what an operator sets":   {nodeName, meta("labels", lab.PartitionLabel, "whole"), "only labels of its own"},
		"an annotation of others": {nodeName, meta("annotations", "team", "red"), "only annotations of its own"},
		"a taint":                 {nodeName, object{"spec": object{"taints": []object{{"key": "a", "effect": "NoSchedule"}}}}, "adds none"},
		"unschedulable":           {nodeName, object{"spec": object{"unschedulable": true}}, "only labels and annotations"},
	} {
		if err := as(c.onNode, http.MethodPatch, path, c.body); err == nil || !strings.Contains(err.Error(), c.why) {
			b.Errorf("%s: %v, want a refusal that says %q", name, err, c.why)
		}
	}
	for _, forbidden := range []struct {
		method, path string
		body         any
	}{
		{http.MethodGet, path, nil},
		{http.MethodDelete, path, nil},
		// The status is another door to the same object.
		{http.MethodPatch, path + "/status", object{"status": object{"allocatable": object{"example.com/gpu": "99"}}}},
		{http.MethodGet, "/api/v1/namespaces/gpu-agent/configmaps", nil},
		{http.MethodPatch, "/api/v1/namespaces/gpu-agent/configmaps/gpu-partitions", object{"data": object{"config.yaml": ""}}},
		{http.MethodGet, "/api/v1/secrets", nil},
		{http.MethodGet, "/api/v1/pods", nil},
		{http.MethodGet, "/api/v1/events", nil},
	} {
		if err := as(nodeName, forbidden.method, forbidden.path, forbidden.body); err == nil || !strings.Contains(err.Error(), "is forbidden") {
			b.Errorf("%s %s as the agent: %v, want that it is forbidden", forbidden.method, forbidden.path, err)
		}
	}
}
