// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/kube/kubetest"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
)

func TestEvict(t *testing.T) {
	s := newServer(t)
	s.Pod("train", "job-1", "u-1")
	s.Pod("train", "job-2", "u-2")
	c, j := connect(t, s)
	pod := workload.Pod{Namespace: "train", Name: "job-1", UID: "u-1"}
	if err := c.Evict(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	if left := s.All("pods"); len(left) != 1 || at(left[0], "metadata.name") != "job-2" {
		t.Fatalf("pods %v, want job-2 alone", left)
	}
	asked := s.Asked("create pods/eviction train/job-1 ")
	if len(asked) != 1 || !strings.Contains(asked[0], `"deleteOptions":{"preconditions":{"uid":"u-1"}}`) {
		t.Errorf("asked %q", asked)
	}
	// Once more: it is gone, and that is what was wanted.
	if err := c.Evict(t.Context(), pod); err != nil {
		t.Errorf("a pod that is gone: %v", err)
	}
	// A new pod of that name is another one.
	s.Pod("train", "job-1", "u-3")
	err := c.Evict(t.Context(), pod)
	if !errors.Is(err, gpu.ErrNotFound) || !strings.Contains(err.Error(), "train/job-1") || !strings.Contains(err.Error(), "u-1") {
		t.Errorf("a new pod of that name: %v, want an error that is gpu.ErrNotFound and names pod and UID", err)
	}
	if left := s.All("pods"); len(left) != 2 {
		t.Errorf("pods %v: a pod was evicted for another", left)
	}
	if n := j.Count("level=WARN"); n != 0 {
		t.Errorf("%d warnings about a server that is well", n)
	}
}

// The grace period is whole seconds, rounded up, and never zero, which would delete the pod at once.
func TestEvictWithin(t *testing.T) {
	for _, test := range []struct {
		grace time.Duration
		want  string
	}{
		{20 * time.Second, `"gracePeriodSeconds":20,`}, {1200 * time.Millisecond, `"gracePeriodSeconds":2,`},
		{0, `"gracePeriodSeconds":1,`}, {-time.Minute, `"gracePeriodSeconds":1,`},
	} {
		s := newServer(t)
		s.Pod("train", "job-1", "u-1")
		c, _ := connect(t, s)
		if err := c.EvictWithin(t.Context(), workload.Pod{Namespace: "train", Name: "job-1", UID: "u-1"}, test.grace); err != nil {
			t.Fatal(err)
		}
		if asked := s.Asked("create pods/eviction train/job-1 "); len(asked) != 1 || !strings.Contains(asked[0], test.want) || !strings.Contains(asked[0], `"uid":"u-1"`) {
			t.Errorf("within %v: asked %q, want %s", test.grace, asked, test.want)
		}
	}
}

// What the admission policy says of a pod that is gone, or another one by now, is
// no failure of the server's, and no missing right.
func TestEvictRefusedByPolicy(t *testing.T) {
	const denied = `pods "job-1" is forbidden: ValidatingAdmissionPolicy 'east-gpu-agent-evict-node' with binding 'b' denied request: `
	for _, test := range []struct {
		name, message string
		want          func(error) bool
	}{
		{"no pod in its namespace", denied + "failed to configure binding: no params found for policy binding with `Deny` parameterNotFoundAction",
			func(err error) bool { return err == nil }},
		{"another pod of that name", denied + "the GPU agent evicts only the pod that it names, and " + otherUID,
			func(err error) bool { return errors.Is(err, gpu.ErrNotFound) }},
		{"another node's pod", denied + "the GPU agent evicts only pods of the node that it runs on",
			func(err error) bool {
				return err != nil && !errors.Is(err, gpu.ErrNotFound) && strings.Contains(err.Error(), "evicts only pods of the node") && !strings.Contains(err.Error(), "component evict")
			}},
		{"somebody else's policy", "ValidatingAdmissionPolicy 'other' with binding 'b' denied request: no params found",
			func(err error) bool { return err != nil && !errors.Is(err, gpu.ErrNotFound) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newServer(t)
			s.Set(func() {
				s.Fault = func(verb, resource string, w http.ResponseWriter) bool {
					body := kubetest.Failed(422, "Invalid")
					body["message"] = test.message
					w.Header().Set("Content-Type", "application/json")
					w.WriteHeader(422)
					json.NewEncoder(w).Encode(body)
					return true
				}
			})
			c, _ := connect(t, s)
			if err := c.Evict(t.Context(), workload.Pod{Namespace: "train", Name: "job-1", UID: "u-1"}); !test.want(err) {
				t.Errorf("%v", err)
			}
			if asked := s.Asked("create pods/eviction train/job-1 "); len(asked) != 1 || !strings.Contains(asked[0], `"app.kubernetes.io/name":"gpu-agent"`) {
				t.Errorf("asked %q, want the label by which the policy knows it", asked)
			}
		})
	}
}

// A pod that is not named in full could be another one.
func TestEvictNeedsAName(t *testing.T) {
	s := newServer(t)
	s.Pod("train", "job-1", "u-1")
	c, _ := connect(t, s)
	for _, p := range []workload.Pod{{Name: "job-1", UID: "u-1"}, {Namespace: "train", UID: "u-1"}, {Namespace: "train", Name: "job-1"}} {
		if err := c.Evict(t.Context(), p); err == nil || !strings.Contains(err.Error(), "are needed") {
			t.Errorf("%+v: %v", p, err)
		}
	}
	if asked := s.Asked("create"); len(asked) > 0 {
		t.Errorf("asked %q", asked)
	}
}

func TestEvictRefused(t *testing.T) {
	// busy is a 429 with or without the cause that a budget has.
	busy := func(cause map[string]any) func(http.ResponseWriter) {
		return func(w http.ResponseWriter) {
			body := kubetest.Failed(429, "TooManyRequests")
			body["message"] = "Cannot evict pod as it would violate the pod's disruption budget."
			if cause != nil {
				body["details"] = map[string]any{"causes": []any{cause}}
			}
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(429)
			json.NewEncoder(w).Encode(body)
		}
	}
	for _, test := range []struct {
		name   string
		answer func(http.ResponseWriter)
		budget bool
		want   string
		// warn is how often the log speaks of a server that is not well.
		warn int
	}{
		{"a disruption budget", busy(map[string]any{"reason": "DisruptionBudget", "message": "The disruption budget job needs 2 healthy pods and has 2 currently"}),
			true, "The disruption budget job needs 2 healthy pods and has 2 currently", 0},
		{"an overloaded server", busy(nil), false, "", 1},
		{"two budgets", func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusCreated)
			json.NewEncoder(w).Encode(map[string]any{"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": 500,
				"message": "This pod has more than one PodDisruptionBudget"})
		}, false, "more than one PodDisruptionBudget", 0},
		{"no right to", func(w http.ResponseWriter) { kubetest.Refuse(w, 403, "Forbidden") }, false, "component evict", 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newServer(t)
			s.Pod("train", "job-1", "u-1")
			s.Set(func() {
				s.Fault = func(_, _ string, w http.ResponseWriter) bool { test.answer(w); return true }
			})
			c, j := connect(t, s)
			for range 2 {
				err := c.Evict(t.Context(), workload.Pod{Namespace: "train", Name: "job-1", UID: "u-1"})
				if err == nil || errors.Is(err, ErrBudget) != test.budget || !strings.Contains(err.Error(), "train/job-1") || !strings.Contains(err.Error(), test.want) {
					t.Fatalf("%v, want an error that names the pod, says %q, and is ErrBudget: %v", err, test.want, test.budget)
				}
			}
			if n := j.Count("level=WARN"); n != test.warn {
				t.Errorf("%d warnings, want %d", n, test.warn)
			}
			if n := len(s.All("pods")); n != 1 {
				t.Errorf("%d pods left", n)
			}
		})
	}
}

// One outage, whichever pods are asked for, is one entry and one line.
func TestEvictServerAway(t *testing.T) {
	s := newServer(t)
	s.Pod("train", "job-1", "u-1")
	c, j := connect(t, s)
	s.Stop()
	for _, name := range []string{"job-1", "job-2", "job-3"} {
		if err := c.Evict(t.Context(), workload.Pod{Namespace: "train", Name: name, UID: "u-1"}); err == nil || errors.Is(err, ErrBudget) {
			t.Fatalf("%v, want an error of the network", err)
		}
	}
	if n := j.Count("request fails"); n != 1 {
		t.Errorf("%d lines for one outage", n)
	}
	s.Back()
	if err := c.Evict(t.Context(), workload.Pod{Namespace: "train", Name: "job-1", UID: "u-1"}); err != nil {
		t.Fatal(err)
	}
	if n := j.Count("answers again"); n != 1 {
		t.Errorf("%d lines for one return", n)
	}
	// Our own end is not the server's.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Evict(ctx, workload.Pod{Namespace: "train", Name: "job-1", UID: "u-1"}); !errors.Is(err, context.Canceled) {
		t.Errorf("with an ended context: %v", err)
	}
}
