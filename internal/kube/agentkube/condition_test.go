// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/kube/kubetest"
	"k8s.io/client-go/util/flowcontrol"
)

const (
	gpus  = "example.com/GPUHealthy"
	tick1 = "2026-01-02T03:04:05Z"
	tick2 = "2026-01-02T03:05:05Z"
	tick3 = "2026-01-02T03:06:05Z"
)

// timed gives the client a clock, before it works, and returns what sets it.
func timed(t *testing.T, c *Client) func(stamp string) {
	k := &clock{}
	set := func(stamp string) {
		t.Helper()
		to, err := time.Parse(time.RFC3339, stamp)
		if err != nil {
			t.Fatal(err)
		}
		k.add(to.Sub(k.Now()))
	}
	k.now = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	set(tick1)
	c.server.Now = k.Now
	return set
}

func condition(kind, status, reason, message, since, heartbeat string) map[string]any {
	return map[string]any{"type": kind, "status": status, "reason": reason, "message": message,
		"lastTransitionTime": since, "lastHeartbeatTime": heartbeat}
}

// ready is the kubelet's.
func ready() map[string]any {
	return condition("Ready", "True", "KubeletReady", "well", tick1, tick1)
}

// foreign ends like one of ours and is of another domain.
func foreign() map[string]any {
	return condition("other.example.com/GPUHealthy", "False", "X", "", tick1, tick1)
}

func nodeWith(s *server, conditions ...any) {
	s.Put("nodes", "", "node-1", map[string]any{"status": map[string]any{"conditions": conditions}})
}

func conditions(s *server) []any {
	status, _ := s.All("nodes")[0]["status"].(map[string]any)
	list, _ := status["conditions"].([]any)
	return list
}

func wantConditions(t *testing.T, s *server, want ...any) {
	t.Helper()
	if got := conditions(s); !reflect.DeepEqual(got, want) {
		t.Fatalf("conditions\n%v, want\n%v", got, want)
	}
}

func watchNode(t *testing.T, c *Client) <-chan Node {
	t.Helper()
	told := make(chan Node, 100)
	kubetest.Background(t, func(ctx context.Context) error {
		return c.WatchNode(ctx, func(n Node) { told <- n })
	})
	return told
}

// The same walk before the watch has spoken and while it does.
func TestCondition(t *testing.T) {
	for _, watched := range []bool{false, true} {
		name := "before the watch"
		if watched {
			name = "with the watch"
		}
		t.Run(name, func(t *testing.T) {
			s := newServer(t)
			nodeWith(s, ready(), foreign())
			c, _ := connect(t, s)
			clock := timed(t, c)
			if watched {
				kubetest.Receive(t, watchNode(t, c))
			}
			patches := 0
			set := func(status ConditionStatus, reason, message string, more int) {
				t.Helper()
				if err := c.SetCondition(t.Context(), Condition{Type: gpus, Status: status, Reason: reason, Message: message}); err != nil {
					t.Fatal(err)
				}
				patches += more
				if got := len(s.Asked("patch nodes/status")); got != patches {
					t.Fatalf("%d patches, want %d", got, patches)
				}
			}
			set(True, "GPUsHealthy", "all 4", 1)
			wantConditions(t, s, condition(gpus, "True", "GPUsHealthy", "all 4", tick1, tick1), ready(), foreign())
			clock(tick2)
			set(True, "GPUsHealthy", "all 4", 0) // nothing new
			set(True, "GPUsHealthy", "all 3", 1) // other words, same status
			wantConditions(t, s, condition(gpus, "True", "GPUsHealthy", "all 3", tick1, tick2), ready(), foreign())
			clock(tick3)
			set(False, "GPUUnhealthy", "GPU-1: Xid 79", 1)
			wantConditions(t, s, condition(gpus, "False", "GPUUnhealthy", "GPU-1: Xid 79", tick3, tick3), ready(), foreign())

			for range 2 { // the second time there is nothing to remove
				if err := c.RemoveCondition(t.Context(), gpus); err != nil {
					t.Fatal(err)
				}
				wantConditions(t, s, ready(), foreign())
			}
			if got := len(s.Asked("patch nodes/status")); got != patches+1 {
				t.Errorf("%d patches, want %d", got, patches+1)
			}
		})
	}
}

// What the kubelet writes between our look and our patch stays.
func TestConditionBesideTheKubelet(t *testing.T) {
	s := newServer(t)
	nodeWith(s, ready())
	s.Set(func() { s.Mute = true })
	c, _ := connect(t, s)
	set := timed(t, c)
	kubetest.Receive(t, watchNode(t, c))
	away := condition("Ready", "False", "KubeletNotReady", "", tick2, tick2)
	pressure := condition("MemoryPressure", "False", "X", "", tick2, tick2)
	nodeWith(s, away, pressure)
	set(tick3)
	if err := c.SetCondition(t.Context(), Condition{Type: gpus, Status: Unknown, Reason: "DriverHangs"}); err != nil {
		t.Fatal(err)
	}
	wantConditions(t, s, condition(gpus, "Unknown", "DriverHangs", "", tick3, tick3), away, pressure)
}

// Somebody takes the condition away each time: that costs the server little.
func TestConditionInAFight(t *testing.T) {
	s := newServer(t)
	nodeWith(s, ready())
	c, _ := connect(t, s)
	c.ourNode.writes = flowcontrol.NewTokenBucketRateLimiter(1.0/3600, 5)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var err error
	for err == nil {
		err = c.SetCondition(ctx, Condition{Type: gpus, Status: True, Reason: "GPUsHealthy"})
		nodeWith(s, ready())
	}
	if !strings.Contains(err.Error(), "others keep changing") {
		t.Errorf("%v, want that it had to wait", err)
	}
	if got := len(s.Asked("patch nodes/status")); got != 5 {
		t.Errorf("%d requests, want 5", got)
	}
}

// A Node that is made anew has lost its conditions: its watcher is told, and
// the same words are written again.
func TestConditionOfANewNode(t *testing.T) {
	s := newServer(t)
	nodeWith(s, ready(), foreign())
	c, _ := connect(t, s)
	told := watchNode(t, c)
	if n := kubetest.Receive(t, told); len(n.Conditions) != 0 {
		t.Fatalf("told of %v, which is not ours", n.Conditions)
	}
	want := Condition{Type: gpus, Status: True, Reason: "GPUsHealthy", Message: "m"}
	if err := c.SetCondition(t.Context(), want); err != nil {
		t.Fatal(err)
	}
	if n := kubetest.Receive(t, told); len(n.Conditions) != 1 || !n.Conditions[0].sameAs(want) {
		t.Fatalf("told of %v, want %v", n.Conditions, want)
	}
	s.Put("nodes", "", "node-1", nil)
	nodeWith(s, ready())
	if n := kubetest.Receive(t, told); len(n.Conditions) != 0 {
		t.Fatalf("told of %v on a new Node", n.Conditions)
	}
	if err := c.SetCondition(t.Context(), want); err != nil {
		t.Fatal(err)
	}
	if n := kubetest.Receive(t, told); len(n.Conditions) != 1 {
		t.Fatalf("told of %v", n.Conditions)
	}
}

// A kubelet's heartbeat is no news.
func TestHeartbeatIsNoNews(t *testing.T) {
	s := newServer(t)
	nodeWith(s, ready(), condition(gpus, "True", "R", "m", tick1, tick1))
	c, _ := connect(t, s)
	told := watchNode(t, c)
	kubetest.Receive(t, told)
	beat := ready()
	beat["lastHeartbeatTime"] = tick2
	nodeWith(s, beat, condition(gpus, "True", "R", "m", tick1, tick2))
	nodeWith(s, beat, condition(gpus, "False", "R", "m", tick2, tick2))
	if n := kubetest.Receive(t, told); n.Conditions[0].Status != False {
		t.Errorf("told of %v, want the first real change", n.Conditions)
	}
}

func TestCordonIsNews(t *testing.T) {
	s := newServer(t)
	s.Node("node-1", map[string]any{"a": "1"}, nil)
	c, _ := connect(t, s)
	told := watchNode(t, c)
	kubetest.Receive(t, told)
	for _, cordoned := range []bool{true, false} {
		s.Put("nodes", "", "node-1", map[string]any{"metadata": map[string]any{"labels": map[string]any{"a": "1"}},
			"spec": map[string]any{"unschedulable": cordoned}})
		if n := kubetest.Receive(t, told); n.Unschedulable != cordoned || n.Labels["a"] != "1" {
			t.Errorf("told %+v, want unschedulable %v", n, cordoned)
		}
	}
}

func TestConditionFails(t *testing.T) {
	s := newServer(t)
	c, j := connect(t, s)
	ok := Condition{Type: gpus, Status: True, Reason: "R"}
	for _, test := range []struct {
		want   string
		change func(*Condition)
	}{
		{"below example.com/", func(c *Condition) { c.Type = "Ready" }},
		{"below example.com/", func(c *Condition) { c.Type = "example.com/" }},
		{"below example.com/", func(c *Condition) { c.Type = "other.example.com/GPUHealthy" }},
		{"True, False or Unknown", func(c *Condition) { c.Status = "true" }},
		{"a reason", func(c *Condition) { c.Reason = "" }},
	} {
		bad := ok
		test.change(&bad)
		if err := c.SetCondition(t.Context(), bad); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%+v: %v, want an error with %q", bad, err, test.want)
		}
	}
	if err := c.RemoveCondition(t.Context(), "Ready"); err == nil {
		t.Error("the kubelet's condition may be removed")
	}
	if got := len(s.Asked("")); got != 0 {
		t.Errorf("%d requests for what is refused here", got)
	}

	// No Node: nothing to say it on, and nothing to remove.
	if err := c.SetCondition(t.Context(), ok); err == nil || !strings.Contains(err.Error(), "node-1") {
		t.Errorf("%v, want an error that names the node", err)
	}
	if err := c.RemoveCondition(t.Context(), gpus); err != nil {
		t.Error(err)
	}
	nodeWith(s, ready(), condition(gpus, "True", "R", "", tick1, tick1))
	s.Set(func() {
		s.Fault = func(verb, _ string, w http.ResponseWriter) bool {
			if verb == "patch" {
				kubetest.Refuse(w, 403, "Forbidden")
			}
			return verb == "patch"
		}
	})
	ok.Status = False
	for range 3 {
		if err := c.SetCondition(t.Context(), ok); err == nil || !strings.Contains(err.Error(), gpus) {
			t.Errorf("%v, want an error that names the condition", err)
		}
		if err := c.RemoveCondition(t.Context(), gpus); err == nil || !strings.Contains(err.Error(), gpus) {
			t.Errorf("%v, want an error that names the condition", err)
		}
	}
	if n := j.Count("request fails"); n != 1 {
		t.Errorf("%d lines for one outage", n)
	}
	s.Set(func() { s.Fault = nil })
	if err := c.SetCondition(t.Context(), ok); err != nil {
		t.Fatal(err)
	}
	// A message that is too long is cut, and then it is the same one.
	ok.Message = strings.Repeat("ü", brief.Message)
	for range 2 {
		if err := c.SetCondition(t.Context(), ok); err != nil {
			t.Fatal(err)
		}
	}
	if got := len(conditions(s)[1].(map[string]any)["message"].(string)); got > brief.Message || got < brief.Message-4 {
		t.Errorf("a message of %d bytes", got)
	}
	if got := len(s.Asked("patch nodes/status")); got != 8 {
		t.Errorf("%d patches, want 8", got)
	}
}
