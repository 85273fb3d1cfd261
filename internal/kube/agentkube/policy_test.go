// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube/kubetest"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
)

// policies is what a server that has admission policies does to dry runs.
type policies struct {
	s *server
	// missing are the resources that no policy is in force for.
	missing []string
	// answer, if set, comes in place of the policies'.
	answer func(w http.ResponseWriter)
}

func deny(w http.ResponseWriter, policy, words string) {
	body := kubetest.Failed(422, "Invalid")
	body["message"] = fmt.Sprintf("nodes \"node-1\" is forbidden: ValidatingAdmissionPolicy '%s' with binding '%s' denied request: %s", policy, policy, words)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(422)
	json.NewEncoder(w).Encode(body)
}

func (p *policies) dry(resource string, w http.ResponseWriter) bool {
	var missing bool
	var answer func(http.ResponseWriter)
	p.s.Set(func() { missing, answer = slices.Contains(p.missing, resource), p.answer })
	switch {
	case answer != nil:
		answer(w)
	case !missing:
		deny(w, "east-gpu-agent-v2", "the GPU agent does not do that")
	case resource == "pods/eviction": // behind the policies the pod is looked for
		kubetest.Refuse(w, 404, "NotFound")
	default:
		return false
	}
	return true
}

func newPolicies(t *testing.T, missing ...string) (*policies, *Client, *kubetest.Journal) {
	t.Helper()
	s := newServer(t)
	s.Node("node-1", map[string]any{"team": "blue"}, nil)
	p := &policies{s: s, missing: missing}
	s.Set(func() { s.Dry = p.dry })
	c, j := connect(t, s, func(o *Options) { o.Relist = 5 * time.Millisecond })
	c.timing.recheck = time.Millisecond
	return p, c, j
}

// follows starts WatchPolicies and hands out each result in words.
func follows(t *testing.T, c *Client, o PolicyOptions) <-chan string {
	t.Helper()
	told := make(chan string, 100)
	kubetest.Background(t, func(ctx context.Context) error {
		return c.WatchPolicies(ctx, o, func(list []status.Policy) {
			var words []string
			for _, p := range list {
				if (p.State == status.PolicyHeld) != (p.Reason == "") {
					t.Errorf("%+v: a reason where it is not held, and none where it is", p)
				}
				words = append(words, strings.TrimPrefix(p.Name, "gpu-agent")+":"+p.State)
			}
			told <- strings.Join(words, " ")
		})
	})
	return told
}

func wantTold(t *testing.T, told <-chan string, want string) {
	t.Helper()
	if got := kubetest.Receive(t, told); got != want {
		t.Fatalf("told %q, want %q", got, want)
	}
}

// becomesTold is wantTold after a change that a round of checks may see in part.
func becomesTold(t *testing.T, told <-chan string, want string) {
	t.Helper()
	for got := ""; got != want; got = kubetest.Receive(t, told) {
	}
}

// Where no policy holds the agent, it says so; a policy is found missing when it is
// taken away later, and in force again when it has come back.
func TestPolicyThatMatchesNobodyIsSaid(t *testing.T) {
	p, c, j := newPolicies(t, "nodes")
	told := follows(t, c, PolicyOptions{})
	wantTold(t, told, ":missing -events:held")
	if n := j.Count("level=ERROR"); n != 1 || j.Count("admission.yaml") == 0 {
		t.Errorf("%d errors in the log, want one that says what to do", n)
	}
	p.s.Set(func() { p.missing = nil })
	wantTold(t, told, ":held -events:held")
	p.s.Set(func() { p.missing = []string{"events"} })
	wantTold(t, told, ":held -events:missing")
	if n := j.Count("level=ERROR"); n != 2 {
		t.Errorf("%d errors in the log, want 2", n)
	}
}

// While manifests are applied, a right is in force for a moment before its policy.
func TestPolicyThatComesAMomentLater(t *testing.T) {
	p, c, j := newPolicies(t, "nodes")
	tries := 0
	p.s.Set(func() {
		p.s.Dry = func(resource string, w http.ResponseWriter) bool {
			if resource == "nodes" {
				if tries++; tries == 3 {
					p.s.Set(func() { p.missing = nil })
				}
			}
			return p.dry(resource, w)
		}
	})
	wantTold(t, follows(t, c, PolicyOptions{}), ":held -events:held")
	if n := j.Count("level=ERROR"); n != 0 {
		t.Errorf("%d errors in the log about a policy that is in force", n)
	}
}

// What was tried is not done: each is a dry run, and nothing is there afterwards.
func TestPoliciesAreTriedByDryRun(t *testing.T) {
	p, c, _ := newPolicies(t, "nodes", "events", "pods/eviction", "resourceslices")
	p.s.Pod("gpu", "agent-x", "u-1")
	before := fmt.Sprint(p.s.All("nodes"), p.s.All("events"), p.s.All("pods"), p.s.All("resourceslices"))
	told := follows(t, c, PolicyOptions{Evictions: true, DRA: func() bool { return true }, Pod: workload.Pod{Namespace: "gpu", Name: "agent-x"}})
	wantTold(t, told, ":missing -events:missing -dra:missing -evict:missing -evict-node:missing")
	if after := fmt.Sprint(p.s.All("nodes"), p.s.All("events"), p.s.All("pods"), p.s.All("resourceslices")); after != before {
		t.Errorf("the server has\n%s, had\n%s", after, before)
	}
	all := p.s.Asked("")
	if len(all) < 5*missesToReport {
		t.Errorf("%d requests, want %d of each kind", len(all), missesToReport)
	}
	for _, r := range all {
		if !strings.Contains(r, " rv=All ") {
			t.Errorf("no dry run: %s", r)
		}
		// And if a server did not know of dry runs, no harm would come of it.
		harmless := strings.Contains(r, `{"metadata":{"labels":{"example.com/gpu-agent-policy-check":"dry-run"}}}`) ||
			strings.Contains(r, `"reportingComponent":"gpu-agent-policy-check"`) ||
			strings.Contains(r, " default/gpu-agent-policy-check ") ||
			strings.Contains(r, `"driver":"gpu-agent-policy-check","nodeName":"gpu-agent-policy-check"`) && !strings.Contains(r, `"devices"`) ||
			strings.Contains(r, " gpu/agent-x ") && strings.Contains(r, `"uid":"`+noUID+`"`)
		if !harmless {
			t.Errorf("would do harm: %s", r)
		}
	}
	p.s.Set(func() { p.missing = nil })
	becomesTold(t, told, ":held -events:held -dra:held -evict:held -evict-node:held")
}

// Of what the server does not say nothing is known, and it is asked again.
func TestPolicyOfWhichNothingIsKnown(t *testing.T) {
	for name, answer := range map[string]func(http.ResponseWriter){
		"no right":               func(w http.ResponseWriter) { kubetest.Refuse(w, 403, "Forbidden") },
		"somebody else's policy": func(w http.ResponseWriter) { deny(w, "no-strange-labels", "no") },
		"overloaded":             func(w http.ResponseWriter) { kubetest.Refuse(w, 429, "TooManyRequests") },
		"no Node":                func(w http.ResponseWriter) { kubetest.Refuse(w, 404, "NotFound") },
		"cut off":                func(http.ResponseWriter) { panic(http.ErrAbortHandler) },
	} {
		t.Run(name, func(t *testing.T) {
			p, c, j := newPolicies(t)
			p.s.Set(func() { p.answer = answer })
			told := follows(t, c, PolicyOptions{})
			wantTold(t, told, ":unknown -events:unknown")
			p.s.Set(func() { p.answer = nil })
			becomesTold(t, told, ":held -events:held")
			if n := j.Count("level=ERROR"); n != 0 {
				t.Errorf("%d errors in the log about what is not known", n)
			}
		})
	}
}

// The policy on GPUNodes is tried where they are written, and not on a cluster that has none.
func TestPolicyOnGPUNodes(t *testing.T) {
	p, c, _ := newPolicies(t, "gpunodes")
	wantTold(t, follows(t, c, PolicyOptions{GPUNodes: true}), ":held -events:held -gpunodes:missing")
	p.s.Set(func() { p.missing = nil })
	wantTold(t, follows(t, c, PolicyOptions{GPUNodes: true}), ":held -events:held -gpunodes:held")
	wantTold(t, follows(t, c, PolicyOptions{}), ":held -events:held")
	p.s.Set(func() {
		p.s.Fault = func(verb, resource string, w http.ResponseWriter) bool {
			lacks := verb == "list" && resource == "gpunodes"
			if lacks {
				kubetest.Refuse(w, 404, "NotFound")
			}
			return lacks
		}
	})
	asked := make(chan error, 1000)
	kubetest.Background(t, func(ctx context.Context) error {
		return c.WatchGPUNode(ctx, func(_ *gpunode.Status, err error) { asked <- err })
	})
	if err := kubetest.Receive(t, asked); err == nil {
		t.Fatal("it is there")
	}
	wantTold(t, follows(t, c, PolicyOptions{GPUNodes: true}), ":held -events:held")
}
