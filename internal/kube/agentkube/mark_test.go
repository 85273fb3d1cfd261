// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"maps"
	"net/http"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/kube/kubetest"
	"k8s.io/client-go/util/flowcontrol"
)

// entries are a field of the Node's metadata.
func (s *server) entries(field string) map[string]string {
	out := map[string]string{}
	metadata := s.All("nodes")[0]["metadata"].(map[string]any)
	have, _ := metadata[field].(map[string]any)
	for key, value := range have {
		out[key] = value.(string)
	}
	return out
}

func (s *server) expect(t *testing.T, field string, want map[string]string) {
	t.Helper()
	if got := s.entries(field); !maps.Equal(got, want) {
		t.Errorf("%s %v, want %v", field, got, want)
	}
}

// by changes labels in somebody's name; an empty value takes one away.
func (s *server) by(manager string, labels map[string]string) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	object := kubetest.Clone(s.Objects["nodes//node-1"])
	change := map[string]any{}
	for key, value := range labels {
		if change[key] = value; value == "" {
			change[key] = nil
		}
	}
	object = kubetest.Merge(object, map[string]any{"metadata": map[string]any{"labels": change}})
	s.UpdatedLocked("nodes", "node-1", object, manager)
	s.PutLocked("nodes", "", "node-1", object)
}

func mark(t *testing.T, c *Client, m Marks) {
	t.Helper()
	if err := c.Mark(t.Context(), m); err != nil {
		t.Fatal(err)
	}
}

func TestMark(t *testing.T) {
	s := newServer(t)
	s.Node("node-1", map[string]any{"keep": "1"}, map[string]any{"old": "x"})
	c, _ := connect(t, s)
	m := Marks{
		Labels:      map[string]string{"example.com/gpu.count": "8", "example.com/gpu.partition.state": "applied"},
		Annotations: map[string]string{"example.com/gpu.partition.message": ""},
		Guests:      map[string]string{"nvidia.com/gpu.count": "8"},
	}
	labels := map[string]string{"keep": "1", "example.com/gpu.count": "8", "example.com/gpu.partition.state": "applied", "nvidia.com/gpu.count": "8"}
	requests := func(want int) {
		t.Helper()
		if got := s.Asked("patch"); len(got) != want {
			t.Fatalf("%d requests, want %d: %q", len(got), want, got)
		}
	}
	for range 2 { // all in one, and not again
		mark(t, c, m)
		s.expect(t, "labels", labels)
		s.expect(t, "annotations", map[string]string{"old": "x", "example.com/gpu.partition.message": ""})
		requests(1)
	}
	told := make(chan Node, 100)
	kubetest.Background(t, func(ctx context.Context) error { return c.WatchNode(ctx, func(n Node) { told <- n }) })
	kubetest.Receive(t, told)
	mark(t, c, m)
	requests(1)

	// What is not named any more goes, and the rest stays.
	delete(m.Labels, "example.com/gpu.count")
	m.Annotations = nil
	mark(t, c, m)
	requests(2)
	delete(labels, "example.com/gpu.count")
	s.expect(t, "labels", labels)
	s.expect(t, "annotations", map[string]string{"old": "x"})
	kubetest.Receive(t, told)

	// Somebody undoes it: the watch tells, and it is written again.
	s.by("kubectl", map[string]string{"example.com/gpu.partition.state": "", "nvidia.com/gpu.count": ""})
	kubetest.Receive(t, told)
	mark(t, c, m)
	requests(3)
	s.expect(t, "labels", labels)
	kubetest.Receive(t, told)

	// Somebody overwrites what is the agent's own.
	s.by("kubectl", map[string]string{"example.com/gpu.partition.state": "wrong"})
	kubetest.Receive(t, told)
	mark(t, c, m)
	requests(4)
	s.expect(t, "labels", labels)
	kubetest.Receive(t, told)

	// The Node is made anew.
	s.Put("nodes", "", "node-1", nil)
	s.Node("node-1", map[string]any{"keep": "1"}, nil)
	kubetest.Receive(t, told)
	mark(t, c, m)
	s.expect(t, "labels", labels)
}

// TestLongMessageKeepsTheLabelBack: a partition file with 30,000 mistakes made a message
// that the server refused together with the label beside it, which went on saying applied.
func TestLongMessageKeepsTheLabelBack(t *testing.T) {
	s := newServer(t)
	s.Node("node-1", nil, nil)
	c, _ := connect(t, s)
	const state, message = "example.com/gpu.partition.state", "example.com/gpu.partition.message"
	mark(t, c, Marks{Labels: map[string]string{state: "applied"}})
	long := Marks{Labels: map[string]string{state: "invalid"},
		Annotations: map[string]string{message: strings.Repeat("config.yaml:7: mode is whole, shared, mig, dynamic or off, not „x“\n", 150_000)}}
	mark(t, c, long)
	s.expect(t, "labels", map[string]string{state: "invalid"})
	got := s.entries("annotations")[message]
	if len(got) > brief.Text || len(got) < brief.Text-4 || !utf8.ValidString(got) || !strings.HasPrefix(got, "config.yaml:7: mode") {
		t.Errorf("the annotation has %d bytes: %.200q", len(got), got)
	}
	// What was cut is what was wanted: no second request.
	before := len(s.Asked("patch"))
	mark(t, c, long)
	if n := len(s.Asked("patch")) - before; n != 0 {
		t.Errorf("%d requests for what the Node says already", n)
	}
}

func TestGuests(t *testing.T) {
	s := newServer(t)
	s.Node("node-1", map[string]any{"nvidia.com/gpu.product": "theirs"}, nil)
	c, _ := connect(t, s)
	m := Marks{Labels: map[string]string{"example.com/a": "b"}, Guests: map[string]string{"nvidia.com/gpu.product": "ours", "nvidia.com/gpu.count": "8"}}
	mark(t, c, m)
	s.expect(t, "labels", map[string]string{"example.com/a": "b", "nvidia.com/gpu.product": "theirs", "nvidia.com/gpu.count": "8"})

	// One is taken with another value, and left; the other becomes free.
	s.by("nfd", map[string]string{"nvidia.com/gpu.count": "7", "nvidia.com/gpu.product": ""})
	mark(t, c, m)
	s.expect(t, "labels", map[string]string{"example.com/a": "b", "nvidia.com/gpu.product": "ours", "nvidia.com/gpu.count": "7"})

	// Somebody applies the very same value: it is theirs as well, so theirs.
	s.Mu.Lock()
	s.Managers["node-1"]["labels/nvidia.com/gpu.product"] = append(s.Managers["node-1"]["labels/nvidia.com/gpu.product"], "gfd/Apply")
	s.PutLocked("nodes", "", "node-1", s.Objects["nodes//node-1"])
	s.Mu.Unlock()
	mark(t, c, m)
	s.Set(func() {
		if got := s.Managers["node-1"]["labels/nvidia.com/gpu.product"]; len(got) != 1 || got[0] != "gfd/Apply" {
			t.Errorf("the label is %q's", got)
		}
	})
	asked := len(s.Asked("patch"))
	mark(t, c, m)
	if got := len(s.Asked("patch")); got != asked {
		t.Error("a label of somebody else's is asked for again and again")
	}

	// Nothing of theirs goes with the agent's own.
	mark(t, c, Marks{})
	s.expect(t, "labels", map[string]string{"nvidia.com/gpu.product": "ours", "nvidia.com/gpu.count": "7"})
}

// Between the look and the request somebody takes a label: it is theirs.
// An annotation of another domain is the agent's where nobody else has written it, goes
// when it is not named any more, also after a restart, and is somebody else's otherwise.
func TestGuestAnnotations(t *testing.T) {
	const key = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
	s := newServer(t)
	s.Node("node-1", nil, nil)
	c, _ := connect(t, s)
	held := Marks{Labels: map[string]string{"example.com/a": "b"}, GuestAnnotations: map[string]string{key: "true"}}
	free := Marks{Labels: held.Labels}
	mark(t, c, held)
	s.expect(t, "annotations", map[string]string{key: "true"})
	c, _ = connect(t, s) // the next process
	mark(t, c, free)
	s.expect(t, "annotations", map[string]string{})
	s.Node("node-1", nil, map[string]any{key: "false"})
	for _, m := range []Marks{held, free, {}} {
		mark(t, c, m)
		s.expect(t, "annotations", map[string]string{key: "false"})
	}
}

func TestGuestsInARace(t *testing.T) {
	s := newServer(t)
	s.Node("node-1", nil, nil)
	c, j := connect(t, s)
	first := true
	s.Set(func() {
		s.Fault = func(verb, _ string, _ http.ResponseWriter) bool {
			if verb == "patch" && first {
				first = false
				s.by("nfd", map[string]string{"nvidia.com/gpu.count": "7"})
			}
			return false
		}
	})
	mark(t, c, Marks{Labels: map[string]string{"example.com/a": "b"}, Guests: map[string]string{"nvidia.com/gpu.count": "8"}})
	s.expect(t, "labels", map[string]string{"example.com/a": "b", "nvidia.com/gpu.count": "7"})
	if got := len(s.Asked("patch")); got != 2 {
		t.Errorf("%d requests, want one that was refused and one more", got)
	}
	if n := j.Count("request fails"); n != 0 {
		t.Errorf("%d lines about an outage that was none", n)
	}
}

// What cannot be told now stays as it is.
func TestMarkKeeps(t *testing.T) {
	s := newServer(t)
	s.Node("node-1", nil, nil)
	c, _ := connect(t, s)
	mark(t, c, Marks{
		Labels:      map[string]string{"example.com/gpu.count": "8", "example.com/gpu.partition.state": "applied"},
		Annotations: map[string]string{"example.com/gpu.partition.message": "m"},
		Guests:      map[string]string{"nvidia.com/gpu.count": "8"},
	})
	mark(t, c, Marks{Labels: map[string]string{"example.com/gpu.partition.state": "failed"}, KeepLabels: true})
	s.expect(t, "labels", map[string]string{"example.com/gpu.count": "8", "example.com/gpu.partition.state": "failed", "nvidia.com/gpu.count": "8"})
	s.expect(t, "annotations", map[string]string{})
}

// An agent that patched instead of applying has left labels that are still its
// own, and somebody has applied one of the agent's with the same value.
func TestMarkTakesOver(t *testing.T) {
	s := newServer(t)
	s.Node("node-1", nil, nil)
	s.by("gpu-agent", map[string]string{"example.com/gpu.partition.state": "applied", "example.com/gpu.old": "1"})
	c, _ := connect(t, s)
	mark(t, c, Marks{Labels: map[string]string{"example.com/gpu.partition.state": "applied", "example.com/gpu.count": "8"}})
	s.expect(t, "labels", map[string]string{"example.com/gpu.partition.state": "applied", "example.com/gpu.count": "8"})
	s.Mu.Lock()
	s.Managers["node-1"]["labels/example.com/gpu.count"] = append(s.Managers["node-1"]["labels/example.com/gpu.count"], "helm/Apply")
	s.PutLocked("nodes", "", "node-1", s.Objects["nodes//node-1"])
	s.Mu.Unlock()
	mark(t, c, Marks{})
	s.expect(t, "labels", map[string]string{})
	asked := len(s.Asked("patch"))
	mark(t, c, Marks{})
	if got := len(s.Asked("patch")); got != asked {
		t.Error("nothing is left to take away, and it is asked for")
	}
}

// Somebody takes the label away each time: that costs the server little.
func TestMarkInAFight(t *testing.T) {
	s := newServer(t)
	s.Node("node-1", nil, nil)
	c, _ := connect(t, s)
	c.ourNode.writes = flowcontrol.NewTokenBucketRateLimiter(1.0/3600, 5)
	m := Marks{Labels: map[string]string{"example.com/a": "b"}}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var err error
	for err == nil {
		err = c.Mark(ctx, m)
		s.by("kubectl", map[string]string{"example.com/a": ""})
	}
	if !strings.Contains(err.Error(), "others keep changing") {
		t.Errorf("%v, want that it had to wait", err)
	}
	if got := len(s.Asked("patch")); got != 5 {
		t.Errorf("%d requests, want 5", got)
	}
}

func TestMarkFails(t *testing.T) {
	s := newServer(t)
	c, j := connect(t, s)
	m := Marks{Labels: map[string]string{"example.com/a": "b"}}
	for range 3 {
		err := c.Mark(t.Context(), m)
		if err == nil || !strings.Contains(err.Error(), "node-1") || !strings.Contains(err.Error(), "no Node") {
			t.Fatalf("%v, want an error that names the node", err)
		}
	}
	s.Node("node-1", nil, nil)
	s.Set(func() {
		s.Fault = func(verb, _ string, w http.ResponseWriter) bool {
			if verb == "patch" {
				kubetest.Refuse(w, 500, "InternalError")
			}
			return verb == "patch"
		}
	})
	for range 3 {
		if err := c.Mark(t.Context(), m); err == nil || !strings.Contains(err.Error(), "InternalError") {
			t.Fatalf("%v, want the server's word", err)
		}
	}
	if n := j.Count("request fails"); n != 1 {
		t.Errorf("%d lines for one outage", n)
	}
	// A Node that changes all the time is not fought for without end.
	s.Set(func() {
		s.Fault = func(verb, _ string, w http.ResponseWriter) bool {
			if verb == "patch" {
				kubetest.Refuse(w, 409, "Conflict")
			}
			return verb == "patch"
		}
	})
	before := len(s.Asked("patch"))
	if err := c.Mark(t.Context(), m); err == nil {
		t.Fatal("no error of a request that was never granted")
	}
	if got := len(s.Asked("patch")) - before; got != markTries {
		t.Errorf("%d requests, want %d", got, markTries)
	}
	s.Set(func() { s.Fault = nil })
	mark(t, c, m)
	if n := j.Count("answers again"); n != 1 {
		t.Errorf("%d lines for one return", n)
	}
	for _, m := range []Marks{
		{Labels: map[string]string{"other.com/a": "b"}}, {Annotations: map[string]string{"a": "b"}}, {Labels: map[string]string{"example.com/": "b"}},
	} {
		before := len(s.Asked(""))
		if err := c.Mark(t.Context(), m); err == nil || !strings.Contains(err.Error(), "example.com/") {
			t.Errorf("%+v: %v, want a refusal", m, err)
		}
		if got := len(s.Asked("")); got != before {
			t.Error("a request was made of what is not the agent's to write")
		}
	}
}
