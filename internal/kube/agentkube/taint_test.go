// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/kube/kubetest"
)

const startupKey = "startup-taint.cluster-autoscaler.kubernetes.io/gpu-agent"

func startup(o *Options) { o.StartupTaint = startupKey }

// taints puts the Node with taints, each "key effect".
func (s *server) taints(all ...string) {
	list := []any{}
	for _, text := range all {
		key, effect, _ := strings.Cut(text, " ")
		list = append(list, map[string]any{"key": key, "effect": effect})
	}
	s.Put("nodes", "", "node-1", map[string]any{"spec": map[string]any{"taints": list}})
}

// tainted are the Node's taints.
func (s *server) tainted() string {
	var out []string
	spec, _ := s.All("nodes")[0]["spec"].(map[string]any)
	list, _ := spec["taints"].([]any)
	for _, element := range list {
		t := element.(map[string]any)
		out = append(out, fmt.Sprint(t["key"], " ", t["effect"]))
	}
	return strings.Join(out, ", ")
}

// Only the taint of that key goes, wherever it stands, and nothing is asked where it is
// not, or where none is to go.
func TestRemoveStartupTaint(t *testing.T) {
	const other, older = "node.kubernetes.io/unreachable NoExecute", "ignore-taint.cluster-autoscaler.kubernetes.io/gpu-agent NoSchedule"
	for _, test := range []struct {
		name string
		has  []string
		is   string
	}{
		{"none", nil, ""},
		{"alone", []string{startupKey + " NoSchedule"}, ""},
		{"with both effects, among others", []string{startupKey + " NoExecute", other, startupKey + " NoSchedule", older}, other + ", " + older},
		{"others", []string{other, older, startupKey + "2 NoSchedule", startupKey + " PreferNoSchedule"},
			other + ", " + older + ", " + startupKey + "2 NoSchedule, " + startupKey + " PreferNoSchedule"},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newServer(t)
			s.taints(test.has...)
			c, _ := connect(t, s, startup)
			if err := c.RemoveStartupTaint(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
			if got := s.tainted(); got != test.is {
				t.Errorf("taints %q, want %q", got, test.is)
			}
			want := 1
			if test.is == strings.Join(test.has, ", ") {
				want = 0
			}
			if got := len(s.Asked("patch")); got != want {
				t.Errorf("%d requests, want %d", got, want)
			}
			without, _ := connect(t, s)
			s.taints(startupKey + " NoSchedule")
			if err := without.RemoveStartupTaint(t.Context(), nil); err != nil || s.tainted() == "" {
				t.Errorf("a client that is to take none away left %q (%v)", s.tainted(), err)
			}
		})
	}
	if _, err := New(Options{Options: kube.Options{Domain: "example.com", Logger: slog.New(slog.DiscardHandler)}, NodeName: "node-1", StartupTaint: "no key"}); err == nil || !strings.Contains(err.Error(), "not the key of a taint") {
		t.Errorf("a key that is none: %v", err)
	}
}

// The taints may have changed since they were last seen. What has come meanwhile stays.
func TestRemoveStartupTaintOfANodeThatHasChanged(t *testing.T) {
	s := newServer(t)
	s.taints(startupKey + " NoSchedule")
	c, _ := connect(t, s, startup)
	told := make(chan Node, 16)
	s.Set(func() { s.Mute = true })
	kubetest.Background(t, func(ctx context.Context) error { return c.WatchNode(ctx, func(n Node) { told <- n }) })
	if n := <-told; !n.StartupTaint {
		t.Fatal("the watch does not see the taint")
	}
	const other = "node.kubernetes.io/unreachable NoExecute"
	s.taints(other, startupKey+" NoSchedule") // the mute watch does not say so
	if err := c.RemoveStartupTaint(t.Context(), nil); err != nil || s.tainted() != other {
		t.Errorf("taints %q (%v), want %q", s.tainted(), err, other)
	}
	if got := len(s.Asked("patch")); got != 2 {
		t.Errorf("%d requests, want one that is refused and one that is not", got)
	}
}

// A kubelet that has lost the agent says that there is nothing. The taint stays until it says
// otherwise, also where that was not seen yet.
func TestRemoveStartupTaintOnceTheNodeShowsTheResources(t *testing.T) {
	s := newServer(t)
	put := func(amounts map[string]any) {
		s.Put("nodes", "", "node-1", map[string]any{"spec": map[string]any{"taints": []any{map[string]any{"key": startupKey, "effect": "NoSchedule"}}},
			"status": map[string]any{"allocatable": amounts}})
	}
	const one, other = "example.com/gpu-mem", "example.com/mig-1g.10gb"
	put(map[string]any{"cpu": "4"})
	c, _ := connect(t, s, startup)
	told := make(chan Node, 16)
	kubetest.Background(t, func(ctx context.Context) error { return c.WatchNode(ctx, func(n Node) { told <- n }) })
	<-told
	try := func(when string, gone bool, requests int) {
		t.Helper()
		before := len(s.Asked("patch"))
		if err := c.RemoveStartupTaint(t.Context(), []string{one, other}); err != nil {
			t.Errorf("%s: %v", when, err)
		}
		if got := s.tainted(); (got == "") != gone {
			t.Errorf("%s: taints %q", when, got)
		}
		if got := len(s.Asked("patch")) - before; got != requests {
			t.Errorf("%s: %d requests, want %d", when, got, requests)
		}
	}
	try("the Node has never had them", false, 0)
	put(map[string]any{one: "79", other: "0"})
	<-told
	try("of one there is nothing", false, 0)
	put(map[string]any{one: "79", other: "7"})
	<-told
	s.Set(func() { s.Mute = true })
	put(map[string]any{one: "79", other: "0"}) // the mute watch does not say so
	try("there was something, and is nothing", false, 1)
	put(map[string]any{one: "2k", other: "7"})
	s.Set(func() { s.Mute = false })
	s.CutStreams()
	for seen := ""; seen != "2k"; time.Sleep(time.Millisecond) {
		node, err := c.lastNode(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		amount := node.amounts[one]
		seen = amount.String()
	}
	try("there is something of both", true, 1)
}

// What a policy refuses is not tried again at once, and the words say what is missing.
func TestRemoveStartupTaintThatAPolicyKeeps(t *testing.T) {
	s := newServer(t)
	s.taints(startupKey + " NoSchedule")
	s.Fault = func(verb, resource string, w http.ResponseWriter) bool {
		if verb == "patch" {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(422)
			kubetest.Answer(w, map[string]any{"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": 422, "reason": "Invalid",
				"message": "nodes \"node-1\" is forbidden: ValidatingAdmissionPolicy 'gpu-agent' with binding 'gpu-agent' denied request: no"})
		}
		return verb == "patch"
	}
	c, _ := connect(t, s, startup)
	if err := c.RemoveStartupTaint(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "component startup-taint") || len(s.Asked("patch")) != 1 {
		t.Errorf("%v after %d requests", err, len(s.Asked("patch")))
	}
}
