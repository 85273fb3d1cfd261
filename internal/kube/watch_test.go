// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"example.com/gpu-agent/internal/kube/kubetest"
)

// partitions follows the ConfigMap gpu/p; "-" stands for none.
func partitions(t *testing.T, c *Server) <-chan string {
	t.Helper()
	told := make(chan string, 100)
	last := ""
	kubetest.Background(t, func(ctx context.Context) error {
		return c.Follow(ctx, Target{Resource: configMaps, Namespace: "gpu", Name: "p"}, func(o *unstructured.Unstructured) {
			now := "-"
			if o != nil {
				now, _, _ = unstructured.NestedString(o.Object, "data", "config.yaml")
			}
			if now != last { // each list tells again
				last = now
				told <- now
			}
		})
	})
	return told
}

func want(t *testing.T, told <-chan string, content string) {
	t.Helper()
	if got := kubetest.Receive(t, told); got != content {
		t.Fatalf("told %q, want %q", got, content)
	}
}

func TestWatchEnds(t *testing.T) {
	expire := func(s *kubetest.Server) {
		s.Set(func() { s.Oldest = s.Version + 1 })
		s.CutStreams()
		// The list that follows finds a version that can be watched again.
		s.Config("gpu", "p", "two")
	}
	for _, test := range []struct {
		name string
		end  func(*kubetest.Server)
	}{
		{"cut stream", func(s *kubetest.Server) { s.CutStreams(); s.Config("gpu", "p", "two") }},
		{"410 as an answer", expire},
		{"410 as an event", func(s *kubetest.Server) {
			s.Set(func() {
				s.Version++
				s.History = append(s.History, kubetest.Change{Version: s.Version, Kind: "ERROR", Object: kubetest.Failed(410, "Expired")})
			})
			s.Config("gpu", "p", "two")
		}},
		{"500 as an event", func(s *kubetest.Server) {
			s.Set(func() {
				s.Version++
				s.History = append(s.History, kubetest.Change{Version: s.Version, Kind: "ERROR", Object: kubetest.Failed(500, "InternalError")})
			})
			s.Config("gpu", "p", "two")
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newServer(t)
			s.Config("gpu", "p", "one")
			c, _ := connect(t, s)
			told := partitions(t, c)
			want(t, told, "one")
			kubetest.Await(t, "a watch", func() bool { return len(s.Asked("watch")) > 0 })
			test.end(s)
			want(t, told, "two")
			s.Config("gpu", "p", "three")
			want(t, told, "three")
		})
	}
}

// A stream that ends after it gave something is resumed where it stood, bookmark
// or event, without a list.
func TestWatchResumes(t *testing.T) {
	s := newServer(t)
	s.Config("gpu", "p", "one") // 2
	c, _ := connect(t, s)
	c.Timing.Lived = 0 // so that the first stream counts, too
	told := partitions(t, c)
	want(t, told, "one")
	kubetest.Await(t, "a watch", func() bool { return len(s.Asked("watch")) == 1 })
	s.Config("gpu", "p", "two") // 3
	want(t, told, "two")
	s.Config("gpu", "other", "x") // 4, seen as a bookmark
	s.Config("gpu", "p", "three") // 5
	want(t, told, "three")
	s.Config("gpu", "other", "y") // 6
	s.Config("gpu", "p", "four")  // 7
	want(t, told, "four")
	s.CutStreams()
	kubetest.Await(t, "a second watch", func() bool { return len(s.Asked("watch")) == 2 })
	if got := s.Asked("watch")[1]; !strings.Contains(got, "rv=7 ") {
		t.Errorf("resumed with %q, want rv=7", got)
	}
	if n := len(s.Asked("list")); n != 1 {
		t.Errorf("%d lists, want 1", n)
	}
	s.Config("gpu", "p", "five")
	want(t, told, "five")
}

func TestServerFails(t *testing.T) {
	s := newServer(t)
	s.Config("gpu", "p", "one")
	failed := make(chan string, 1000)
	var answered atomic.Bool
	c, j := connect(t, s, func(o *Options) {
		o.Failed = func(verb, resource string) { failed <- verb + " " + resource }
		o.Answered = func() { answered.Store(true) }
	})
	s.Set(func() {
		s.Fault = func(_, _ string, w http.ResponseWriter) bool { kubetest.Refuse(w, 500, "InternalError"); return true }
	})
	told := partitions(t, c)
	for range 5 {
		if got := kubetest.Receive(t, failed); got != "list configmaps" {
			t.Fatalf("told of the failure %q", got)
		}
	}
	if !answered.Load() {
		t.Error("an answer that refuses is none")
	}
	s.Set(func() { s.Fault = nil })
	want(t, told, "one")
	kubetest.Await(t, "a line on the return", func() bool { return j.Count("answers again") == 1 })
	if n := j.Count("request fails"); n != 1 {
		t.Errorf("%d lines for one outage", n)
	}
}

// A server that is away takes nothing away: no call until it is back and the
// object has changed.
func TestServerAway(t *testing.T) {
	s := newServer(t)
	s.Config("gpu", "p", "one")
	s.Node("node-1", map[string]any{"a": "1"}, nil)
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
	nodes, last := make(chan string, 100), ""
	kubetest.Background(t, func(ctx context.Context) error {
		return c.Follow(ctx, Target{Resource: Nodes, Name: "node-1"}, func(o *unstructured.Unstructured) {
			if a := o.GetLabels()["a"]; a != last {
				last = a
				nodes <- a
			}
		})
	})
	want(t, told, "one")
	kubetest.Receive(t, nodes)
	for outage := 1; outage <= 2; outage++ {
		s.Stop()
		missing := map[string]bool{"list configmaps": true, "list nodes": true}
		for len(missing) > 0 {
			delete(missing, kubetest.Receive(t, failed))
		}
		before := answers.Load()
		kubetest.Receive(t, failed)
		if now := answers.Load(); before == 0 || now != before {
			t.Errorf("%d answers, and %d of a server that is away", before, now-before)
		}
		s.Back()
		kubetest.Await(t, "return", func() bool { return j.Count("answers again") >= outage })
		content := strings.Repeat("x", outage)
		s.Config("gpu", "p", content)
		want(t, told, content)
		s.Node("node-1", map[string]any{"a": content}, nil)
		want(t, nodes, content)
		if answers.Load() <= before {
			t.Error("no answer of the server that is back")
		}
	}
	if n := j.Count(unreachable); n < 2 || n > 8 {
		// Of two watches one can see the server's return while the other still
		// waits for its connection to fail; more is a line an attempt.
		t.Errorf("%d lines for two outages", n)
	}
}

// A server that forgets to end a watch, and to send anything on it, is left
// after a while.
func TestWatchHangs(t *testing.T) {
	s := newServer(t)
	s.Config("gpu", "p", "one")
	s.Set(func() { s.Mute, s.Deaf = true, true })
	c, _ := connect(t, s)
	c.Timing.Watch, c.Timing.Grace, c.Timing.Lived = 20*time.Millisecond, 20*time.Millisecond, 10*time.Millisecond
	told := partitions(t, c)
	want(t, told, "one")
	kubetest.Await(t, "a watch", func() bool { return len(s.Asked("watch")) > 0 })
	s.Set(func() { s.Mute = false })
	s.Config("gpu", "p", "two")
	want(t, told, "two")
}

// An event that is lost on the way is made good by the next list.
func TestListedAgain(t *testing.T) {
	s := newServer(t)
	s.Config("gpu", "p", "one")
	s.Set(func() { s.Mute = true })
	c, _ := connect(t, s)
	c.Timing.Relist = 50 * time.Millisecond
	c.Timing.Grace = 0
	told := partitions(t, c)
	want(t, told, "one")
	kubetest.Await(t, "a watch", func() bool { return len(s.Asked("watch")) > 0 })
	s.Config("gpu", "p", "two")
	want(t, told, "two")
}

// TestRefusalIsTold: an agent that may not read its ConfigMap wrote a line into its
// log, and nobody else heard of it.
func TestRefusalIsTold(t *testing.T) {
	for _, verb := range []string{"list", "watch"} {
		t.Run(verb, func(t *testing.T) {
			s := newServer(t)
			s.Config("gpu", "p", "one")
			fault := func(code int, reason string) {
				s.Set(func() {
					s.Fault = func(v, _ string, w http.ResponseWriter) bool {
						if v == verb {
							kubetest.Refuse(w, code, reason)
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
			says := kubetest.Receive(t, refused)
			if !strings.HasPrefix(says, verb+" configmaps gpu/p: ") || strings.HasSuffix(says, "<nil>") {
				t.Errorf("told %q", says)
			}
			// Another fault does not say that it is permitted, nor that it is not.
			fault(500, "InternalError")
			n := len(s.Asked(verb))
			kubetest.Await(t, "some more requests", func() bool { return len(s.Asked(verb)) > n+2 })
			s.Set(func() { s.Fault = nil })
			if says := kubetest.Receive(t, refused); says != verb+" configmaps gpu/p: <nil>" {
				t.Errorf("told %q, want that it is permitted now", says)
			}
			want(t, told, "one")
		})
	}
}

// TestMetadataAlone: objects of which only the metadata is wanted come without all else, from lists and watches.
func TestMetadataAlone(t *testing.T) {
	s := newServer(t)
	s.Allow("", "pods", "list", "watch")
	put := func(name string) {
		s.Put("pods", "work", name, map[string]any{"metadata": map[string]any{"uid": name},
			"spec": map[string]any{"nodeName": "node-1"}, "status": map[string]any{"phase": "Running"}})
	}
	put("listed")
	c, _ := connect(t, s)
	seen := make(chan map[string]any, 10)
	kubetest.Background(t, func(ctx context.Context) error {
		return c.Follow(ctx, Target{Resource: Pods, Metadata: true, All: &Census{
			Chosen: "spec.nodeName=node-1", ID: func(o *unstructured.Unstructured) string { return string(o.GetUID()) },
			Set: func(o *unstructured.Unstructured) { seen <- o.Object }, Gone: func(string) {}, Listed: func() { put("watched") },
		}}, nil)
	})
	for _, name := range []string{"listed", "watched"} {
		o := kubetest.Receive(t, seen)
		if uid, _, _ := unstructured.NestedString(o, "metadata", "uid"); uid != name || o["spec"] != nil || o["status"] != nil {
			t.Errorf("%s is seen as %v", name, o)
		}
	}
}
