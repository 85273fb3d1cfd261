// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// partitions follows the ConfigMap gpu/p; "-" stands for none.
func partitions(t *testing.T, c *Client) <-chan string {
	t.Helper()
	told := make(chan string, 100)
	background(t, func(ctx context.Context) error {
		return c.WatchKey(ctx, "gpu", "p", "config.yaml", func(data []byte, err error) {
			if err != nil {
				data = []byte("-")
			}
			told <- string(data)
		})
	})
	return told
}

func want(t *testing.T, told <-chan string, content string) {
	t.Helper()
	if got := receive(t, told); got != content {
		t.Fatalf("told %q, want %q", got, content)
	}
}

func TestConfigMapLife(t *testing.T) {
	s := newServer(t)
	c, j := connect(t, s)
	told := partitions(t, c)
	want(t, told, "-")
	s.config("gpu", "p", "one")
	want(t, told, "one")
	// A new version of the same data, and another object, are no news: what is
	// told next is the next real change.
	s.config("gpu", "p", "one")
	s.config("gpu", "q", "other")
	s.config("gpu", "p", "two")
	want(t, told, "two")
	s.put("configmaps", "gpu", "p", nil)
	want(t, told, "-")
	s.config("gpu", "p", "three")
	want(t, told, "three")
	if n := j.count("level=WARN"); n != 0 {
		t.Errorf("%d warnings in a quiet life", n)
	}
}

func TestWatchEnds(t *testing.T) {
	expire := func(s *server) {
		s.set(func() { s.oldest = s.version + 1 })
		s.cutStreams()
		// The list that follows finds a version that can be watched again.
		s.config("gpu", "p", "two")
	}
	for _, test := range []struct {
		name string
		end  func(*server)
	}{
		{"cut stream", func(s *server) { s.cutStreams(); s.config("gpu", "p", "two") }},
		{"410 as an answer", expire},
		{"410 as an event", func(s *server) {
			s.set(func() {
				s.version++
				s.history = append(s.history, change{s.version, "ERROR", "", failed(410, "Expired")})
			})
			s.config("gpu", "p", "two")
		}},
		{"500 as an event", func(s *server) {
			s.set(func() {
				s.version++
				s.history = append(s.history, change{s.version, "ERROR", "", failed(500, "InternalError")})
			})
			s.config("gpu", "p", "two")
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newServer(t)
			s.config("gpu", "p", "one")
			c, _ := connect(t, s)
			told := partitions(t, c)
			want(t, told, "one")
			await(t, "a watch", func() bool { return len(s.asked("watch")) > 0 })
			test.end(s)
			want(t, told, "two")
			s.config("gpu", "p", "three")
			want(t, told, "three")
		})
	}
}

// A stream that ends after it gave something is resumed where it stood, bookmark
// or event, without a list.
func TestWatchResumes(t *testing.T) {
	s := newServer(t)
	s.config("gpu", "p", "one") // 2
	c, _ := connect(t, s)
	c.timing.lived = 0 // so that the first stream counts, too
	told := partitions(t, c)
	want(t, told, "one")
	await(t, "a watch", func() bool { return len(s.asked("watch")) == 1 })
	s.config("gpu", "p", "two") // 3
	want(t, told, "two")
	s.config("gpu", "other", "x") // 4, seen as a bookmark
	s.config("gpu", "p", "three") // 5
	want(t, told, "three")
	s.config("gpu", "other", "y") // 6
	s.config("gpu", "p", "four")  // 7
	want(t, told, "four")
	s.cutStreams()
	await(t, "a second watch", func() bool { return len(s.asked("watch")) == 2 })
	if got := s.asked("watch")[1]; !strings.Contains(got, "rv=7 ") {
		t.Errorf("resumed with %q, want rv=7", got)
	}
	if n := len(s.asked("list")); n != 1 {
		t.Errorf("%d lists, want 1", n)
	}
	s.config("gpu", "p", "five")
	want(t, told, "five")
}

func TestServerFails(t *testing.T) {
	s := newServer(t)
	s.config("gpu", "p", "one")
	failed := make(chan string, 1000)
	var answered atomic.Bool
	c, j := connect(t, s, func(o *Options) {
		o.Failed = func(verb, resource string) { failed <- verb + " " + resource }
		o.Answered = func() { answered.Store(true) }
	})
	s.set(func() {
		s.fault = func(_, _ string, w http.ResponseWriter) bool { refuse(w, 500, "InternalError"); return true }
	})
	told := partitions(t, c)
	for range 5 {
		if got := receive(t, failed); got != "list configmaps" {
			t.Fatalf("told of the failure %q", got)
		}
	}
	if !answered.Load() {
		t.Error("an answer that refuses is none")
	}
	s.set(func() { s.fault = nil })
	want(t, told, "one")
	await(t, "a line on the return", func() bool { return j.count("answers again") == 1 })
	if n := j.count("request fails"); n != 1 {
		t.Errorf("%d lines for one outage", n)
	}
}

// A server that is away takes nothing away: no call until it is back and the
// object has changed.
func TestServerAway(t *testing.T) {
	s := newServer(t)
	s.config("gpu", "p", "one")
	s.node("node-1", map[string]any{"a": "1"}, nil)
	failed := make(chan string, 1000)
	var answers atomic.Int64
	c, j := connect(t, s, func(o *Options) {
		o.Answered = func() { answers.Add(1) }
		o.Failed = func(verb, resource string) {
			select {
			case failed <- verb + " " + resource:
			default:
			}
		}
	})
	told := partitions(t, c)
	nodes := make(chan Node, 100)
	background(t, func(ctx context.Context) error {
		return c.WatchNode(ctx, func(n Node) { nodes <- n })
	})
	want(t, told, "one")
	receive(t, nodes)
	for outage := 1; outage <= 2; outage++ {
		s.stop()
		missing := map[string]bool{"list configmaps": true, "list nodes": true}
		for len(missing) > 0 {
			delete(missing, receive(t, failed))
		}
		before := answers.Load()
		receive(t, failed)
		if now := answers.Load(); before == 0 || now != before {
			t.Errorf("%d answers, and %d of a server that is away", before, now-before)
		}
		s.back()
		await(t, "return", func() bool { return j.count("answers again") >= outage })
		content := strings.Repeat("x", outage)
		s.config("gpu", "p", content)
		want(t, told, content)
		s.node("node-1", map[string]any{"a": content}, nil)
		if n := receive(t, nodes); n.Labels["a"] != content {
			t.Fatalf("told of labels %v", n.Labels)
		}
		if answers.Load() <= before {
			t.Error("no answer of the server that is back")
		}
	}
	if n := j.count(unreachable); n < 2 || n > 8 {
		// Of two watches one can see the server's return while the other still
		// waits for its connection to fail; more is a line an attempt.
		t.Errorf("%d lines for two outages", n)
	}
}

// A server that forgets to end a watch, and to send anything on it, is left
// after a while.
func TestWatchHangs(t *testing.T) {
	s := newServer(t)
	s.config("gpu", "p", "one")
	s.set(func() { s.mute, s.deaf = true, true })
	c, _ := connect(t, s)
	c.timing.watch, c.timing.grace, c.timing.lived = 20*time.Millisecond, 20*time.Millisecond, 10*time.Millisecond
	told := partitions(t, c)
	want(t, told, "one")
	await(t, "a watch", func() bool { return len(s.asked("watch")) > 0 })
	s.set(func() { s.mute = false })
	s.config("gpu", "p", "two")
	want(t, told, "two")
}

// An event that is lost on the way is made good by the next list.
func TestListedAgain(t *testing.T) {
	s := newServer(t)
	s.config("gpu", "p", "one")
	s.set(func() { s.mute = true })
	c, _ := connect(t, s)
	c.timing.relist = 50 * time.Millisecond
	c.timing.grace = 0
	told := partitions(t, c)
	want(t, told, "one")
	await(t, "a watch", func() bool { return len(s.asked("watch")) > 0 })
	s.config("gpu", "p", "two")
	want(t, told, "two")
}

func TestWatchNode(t *testing.T) {
	s := newServer(t)
	c, _ := connect(t, s)
	told := make(chan Node, 100)
	background(t, func(ctx context.Context) error {
		return c.WatchNode(ctx, func(n Node) { told <- n })
	})
	// No Node is no news; one that comes is.
	await(t, "a watch", func() bool { return len(s.asked("watch")) > 0 })
	s.node("node-1", map[string]any{"zone": "a"}, map[string]any{"example.com/gpu.blocked": "x", "heart.io/beat": "1"})
	n := receive(t, told)
	if n.Labels["zone"] != "a" || len(n.Annotations) != 1 || n.Annotations["example.com/gpu.blocked"] != "x" || n.Unschedulable {
		t.Fatalf("told %+v", n)
	}
	// Another program's heartbeat is no news, nor is another node.
	s.node("node-1", map[string]any{"zone": "a"}, map[string]any{"example.com/gpu.blocked": "x", "heart.io/beat": "2"})
	s.node("node-2", map[string]any{"zone": "b"}, nil)
	s.node("node-1", map[string]any{"zone": "a"}, nil)
	if n = receive(t, told); len(n.Annotations) != 0 {
		t.Fatalf("told %+v, want no annotation", n)
	}
	s.put("nodes", "", "node-1", map[string]any{"metadata": map[string]any{"labels": map[string]any{"zone": "a"}},
		"spec": map[string]any{"unschedulable": true}})
	if n = receive(t, told); !n.Unschedulable {
		t.Fatalf("told %+v, want unschedulable", n)
	}
	// What pods may ask for by name; amounts are no news.
	status := func(amounts map[string]any) {
		s.put("nodes", "", "node-1", map[string]any{"metadata": map[string]any{"labels": map[string]any{"zone": "a"}},
			"spec": map[string]any{"unschedulable": true}, "status": map[string]any{"allocatable": amounts}})
	}
	status(map[string]any{"cpu": "4", "example.com/gpu": "2", "example.com/gpu-mem": "80", "example.com/gpu.shared": "0"})
	if n = receive(t, told); !slices.Equal(n.Allocatable, []string{"example.com/gpu", "example.com/gpu-mem"}) {
		t.Fatalf("told %+v, want what there is of extended resources", n)
	}
	status(map[string]any{"cpu": "3", "example.com/gpu": "0", "example.com/gpu-mem": "40"})
	if n = receive(t, told); !slices.Equal(n.Allocatable, []string{"example.com/gpu-mem"}) {
		t.Fatalf("told %+v, want gpu-mem alone", n)
	}
	status(nil)
	if n = receive(t, told); len(n.Allocatable) > 0 {
		t.Fatalf("told %+v, want nothing allocatable", n)
	}
	// Gone and come again the same: nothing to tell.
	s.put("nodes", "", "node-1", nil)
	s.put("nodes", "", "node-1", map[string]any{"metadata": map[string]any{"labels": map[string]any{"zone": "a"}},
		"spec": map[string]any{"unschedulable": true}})
	s.node("node-1", map[string]any{"zone": "c"}, nil)
	if n = receive(t, told); n.Labels["zone"] != "c" {
		t.Fatalf("told %+v, want zone c", n)
	}
}

func TestWatchWantsNames(t *testing.T) {
	c, _ := connect(t, newServer(t))
	if err := c.WatchKey(t.Context(), "", "p", "config.yaml", func([]byte, error) {}); err == nil {
		t.Error("no namespace is accepted")
	}
}

// TestRefusalIsTold: an agent that may not read its ConfigMap wrote a line into its
// log, and nobody else heard of it.
func TestRefusalIsTold(t *testing.T) {
	for _, verb := range []string{"list", "watch"} {
		t.Run(verb, func(t *testing.T) {
			s := newServer(t)
			s.config("gpu", "p", "one")
			fault := func(code int, reason string) {
				s.set(func() {
					s.fault = func(v, _ string, w http.ResponseWriter) bool {
						if v == verb {
							refuse(w, code, reason)
						}
						return v == verb
					}
				})
			}
			fault(403, "Forbidden")
			refused := make(chan string, 100)
			c, _ := connect(t, s, func(o *Options) {
				o.Refused = func(request string, err error) {
					refused <- fmt.Sprintf("%s: %v", request, err)
				}
			})
			told := partitions(t, c)
			says := receive(t, refused)
			if !strings.HasPrefix(says, verb+" configmaps gpu/p: ") || strings.HasSuffix(says, "<nil>") {
				t.Errorf("told %q", says)
			}
			// Another fault does not say that it is permitted, nor that it is not.
			fault(500, "InternalError")
			n := len(s.asked(verb))
			await(t, "some more requests", func() bool { return len(s.asked(verb)) > n+2 })
			s.set(func() { s.fault = nil })
			if says := receive(t, refused); says != verb+" configmaps gpu/p: <nil>" {
				t.Errorf("told %q, want that it is permitted now", says)
			}
			want(t, told, "one")
		})
	}
}
