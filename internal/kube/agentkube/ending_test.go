// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/kube/kubetest"
	"example.com/gpu-agent/internal/workload"
)

// ends notes what WatchEndings reports, with times as seconds after a moment.
type ends struct {
	after time.Time
	told  chan string
}

func (e ends) PodEnds(_ context.Context, p workload.Pod, by time.Time) {
	e.told <- fmt.Sprintf("%s %s ends at %v", p, p.UID, by.Sub(e.after).Seconds())
}

func (e ends) PodGone(_ context.Context, uid string) { e.told <- uid + " is gone" }

// TestWatchEndings: of the node's pods those that end are reported with the time at which the kubelet kills
// them, once, and again if they end earlier; and each that is gone or has ended, also while no watch was open.
// The time is never later than the grace period after the report, whatever the clocks say.
func TestWatchEndings(t *testing.T) {
	s := newServer(t)
	now := time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC)
	// put stores a pod that ends after at seconds by the server's clock, with a grace period of grace seconds;
	// one that does not end if grace is negative.
	put := func(name, node, phase string, at, grace int) {
		metadata := map[string]any{"uid": "u-" + name}
		if grace >= 0 {
			metadata["deletionTimestamp"] = now.Add(time.Duration(at) * time.Second).Format(time.RFC3339)
			metadata["deletionGracePeriodSeconds"] = grace
		}
		s.Put("pods", "work", name, map[string]any{"metadata": metadata, "spec": map[string]any{"nodeName": node},
			"status": map[string]any{"phase": phase}})
	}
	put("runs", "node-1", "Running", 0, -1)
	put("ends", "node-1", "Running", 20, 30) // since ten seconds
	put("other", "node-2", "Running", 20, 30)
	put("over", "node-1", "Succeeded", 20, 30)
	c, _ := connect(t, s)
	c.server.Now = func() time.Time { return now }
	into := ends{now, make(chan string, 100)}
	kubetest.Background(t, func(ctx context.Context) error { return c.WatchEndings(ctx, into) })
	says := func(want ...string) {
		t.Helper()
		for _, w := range want {
			if got := kubetest.Receive(t, into.told); got != w {
				t.Fatalf("told %q, want %q", got, w)
			}
		}
	}
	says("work/ends u-ends ends at 20")
	kubetest.Await(t, "a watch", func() bool { return len(s.Asked("watch pods")) > 0 })

	put("ends", "node-1", "Running", 20, 30)    // another change of it
	put("runs", "node-1", "Running", 45, 30)    // the server's clock is 15 seconds ahead
	put("other", "node-2", "Running", 5, 5)     // of another node
	put("ends", "node-1", "Running", 3, 3)      // deleted again, with less grace
	put("late", "node-1", "Running", -10, 30)   // the server's clock is 40 seconds behind
	put("long", "node-1", "Running", 60, 1<<40) // that many seconds are no time.Duration
	put("done", "node-1", "Running", 0, -1)
	put("done", "node-1", "Failed", 0, -1)
	says("work/runs u-runs ends at 30", "work/ends u-ends ends at 3", "work/late u-late ends at -10",
		"work/long u-long ends at 60", "u-done is gone")

	s.Put("pods", "work", "late", nil)
	says("u-late is gone")
	// While no watch is open: one is gone, and another of its name ends. The next list tells.
	s.Set(func() {
		s.Fault = func(verb, _ string, w http.ResponseWriter) bool {
			if verb == "watch" {
				kubetest.Refuse(w, 410, "Expired")
			}
			return verb == "watch"
		}
	})
	s.Put("pods", "work", "ends", nil)
	says("u-ends is gone")
	put("ends", "node-1", "Running", 7, 30)
	says("work/ends u-ends ends at 7")
	if len(into.told) > 0 {
		t.Errorf("told %q, too", <-into.told)
	}
}

// TestWatchEndingsRefused: without the right the log names the component that grants it, and the agent is not
// told that it lacks what it needs. When it is granted, the watch begins.
func TestWatchEndingsRefused(t *testing.T) {
	s := newServer(t)
	s.Set(func() { s.Forbidden = map[string]bool{"list pods": true} })
	s.Put("pods", "work", "ends", map[string]any{"spec": map[string]any{"nodeName": "node-1"}, "metadata": map[string]any{
		"uid": "u", "deletionTimestamp": "2026-05-04T03:02:01Z", "deletionGracePeriodSeconds": 30}})
	failed := make(chan string, 1000)
	c, j := connect(t, s, func(o *Options) {
		o.Refused = func(request string, err error) { t.Errorf("refused %s: %v", request, err) }
		o.Failed = func(verb, resource string) { failed <- verb + " " + resource }
	})
	into := ends{time.Now(), make(chan string, 100)}
	kubetest.Background(t, func(ctx context.Context) error { return c.WatchEndings(ctx, into) })
	if got := kubetest.Receive(t, failed); got != "list pods" {
		t.Errorf("counts %q", got)
	}
	kubetest.Await(t, "the log to name the component", func() bool {
		return j.Count("component mps-detach grants the right") > 0
	})
	s.Set(func() { s.Forbidden = nil })
	if got := kubetest.Receive(t, into.told); !strings.HasPrefix(got, "work/ends u ends at") {
		t.Errorf("told %q", got)
	}
}
