// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/kube/agentkube"
)

const startupKey = "startup-taint.cluster-autoscaler.kubernetes.io/gpu-agent"

// aTaint is one as a Node has it.
func aTaint(key, effect string) fields {
	return fields{"key": key, "value": "pending", "effect": effect}
}

// taints are those of node-1, each "key effect".
func (s *apiServer) taints(t *testing.T) string {
	t.Helper()
	var node struct {
		Spec struct {
			Taints []struct{ Key, Effect string }
		}
	}
	if err := s.do(t, nil, http.MethodGet, "/api/v1/nodes/node-1", "", nil, &node); err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, taint := range node.Spec.Taints {
		out = append(out, taint.Key+" "+taint.Effect)
	}
	return strings.Join(out, ", ")
}

// setTaints gives node-1 its taints, in root's name.
func (s *apiServer) setTaints(t *testing.T, of ...fields) {
	t.Helper()
	if err := s.do(t, nil, http.MethodPatch, "/api/v1/nodes/node-1", merge, fields{"spec": fields{"taints": of}}, nil); err != nil {
		t.Fatal(err)
	}
}

// tryStartupTaint has internal/kube/agentkube take the taint away in the agent's name: with the base
// alone that is refused, and with the component it is all that is allowed of a Node's spec.
func (s *apiServer) tryStartupTaint(t *testing.T) {
	ours, runs := aTaint(startupKey, "NoSchedule"), aTaint(startupKey, "NoExecute")
	other, soft := aTaint("team.example.com/theirs", "NoSchedule"), aTaint(startupKey, "PreferNoSchedule")
	client, err := agentkube.New(agentkube.Options{NodeName: "node-1", StartupTaint: startupKey, Options: kube.Options{
		Kubeconfig: s.Kubeconfig(t, asOn(name, name, "node-1")), Domain: "example.com", Logger: slog.New(slog.NewTextHandler(t.Output(), nil))}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	s.setTaints(t, other, ours)
	before := s.taints(t)
	if err := client.RemoveStartupTaint(ctx, nil); err == nil || !strings.Contains(err.Error(), "component startup-taint") || s.taints(t) != before {
		t.Fatalf("with the base alone: %v, and the taints are %s", err, s.taints(t))
	}
	s.apply(t, one(t, render(t, withComponent(t, "base", "components/startup-taint")), "ValidatingAdmissionPolicy", name), false)
	s.await(t, "the component's policy is in force", func() error { return client.RemoveStartupTaint(ctx, nil) })
	if got, want := s.taints(t), "team.example.com/theirs NoSchedule"; got != want {
		t.Errorf("taints %s, want %s", got, want)
	}
	s.setTaints(t, runs, other, ours, soft)
	if err := client.RemoveStartupTaint(ctx, nil); err != nil {
		t.Error(err)
	}
	if got, want := s.taints(t), "team.example.com/theirs NoSchedule, "+startupKey+" PreferNoSchedule"; got != want {
		t.Errorf("taints %s, want %s", got, want)
	}

	// The server goes by what the Node has then, not by what was last seen of it.
	const memory = "example.com/gpu-mem"
	for _, c := range []struct {
		amount any
		is     string
	}{{nil, startupKey + " NoSchedule"}, {"0", startupKey + " NoSchedule"}, {"2k", ""}} {
		s.setTaints(t, ours)
		if err := s.do(t, nil, http.MethodPatch, "/api/v1/nodes/node-1/status", merge,
			fields{"status": fields{"capacity": fields{memory: c.amount}, "allocatable": fields{memory: c.amount}}}, nil); err != nil {
			t.Fatal(err)
		}
		if err := client.RemoveStartupTaint(ctx, []string{memory}); err != nil || s.taints(t) != c.is {
			t.Errorf("with %v of %s the taints are %s (%v), want %q", c.amount, memory, s.taints(t), err, c.is)
		}
	}

	s.setTaints(t, other, ours)
	to := func(of ...fields) fields { return fields{"spec": fields{"taints": of}} }
	const node = "/api/v1/nodes/node-1"
	const only, rest = "only the taint that the component startup-taint names", "only labels and annotations"
	var tries []try
	for _, y := range []struct {
		name    string
		body    fields
		refused string
	}{
		{"nothing", to(other, ours), ""},
		{"another taint away", to(ours), only},
		{"all taints away", to(), only},
		{"one more", to(other, ours, aTaint("a.example.com/b", "NoSchedule")), only},
		{"another in its place", to(other, aTaint("a.example.com/b", "NoSchedule")), only},
		{"its effect", to(other, runs), only},
		{"another's effect", to(aTaint("team.example.com/theirs", "NoExecute")), only},
		{"their order", to(ours, other), only},
		{"a cordon with it", fields{"spec": fields{"unschedulable": true, "taints": []fields{other}}}, rest},
		{"a provider's ID", fields{"spec": fields{"providerID": "p"}}, rest},
		{"it alone", to(other), ""},
		{"it again", to(other, ours), only},
	} {
		tries = append(tries, try{y.name, http.MethodPatch, node, merge, y.body, y.refused})
	}
	s.try(t, agentOn("node-1"), tries)
	s.try(t, agentOn("node-2"), []try{{"another node's", http.MethodPatch, node, merge, to(), "the node that it runs on"}})
	if got, want := s.taints(t), "team.example.com/theirs NoSchedule"; got != want {
		t.Errorf("taints %s, want %s", got, want)
	}
	s.apply(t, one(t, base(t), "ValidatingAdmissionPolicy", name), false)
	s.await(t, "the base's policy is in force again", func() error {
		s.setTaints(t, ours)
		if err := s.do(t, agentOn("node-1"), http.MethodPatch, node+"?dryRun=All", merge, to(), nil); err == nil || !strings.Contains(err.Error(), only) {
			return fmt.Errorf("%v, want a refusal that says %q", err, only)
		}
		return nil
	})
}
