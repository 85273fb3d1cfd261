// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/kube/kubetest"
	"example.com/gpu-agent/internal/workload"

	"k8s.io/client-go/util/flowcontrol"
)

// clock is set by the test.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// reporter is what is about to send Events, its clock, and what becomes of each.
func reporter(t *testing.T, s *server) (*Events, *clock, <-chan EventOutcome) {
	t.Helper()
	done := make(chan EventOutcome, 1000)
	c, _ := connect(t, s)
	k := &clock{now: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)}
	c.server.Now = k.Now
	return NewEvents(c, func(o EventOutcome) { done <- o }), k, done
}

func outcome(t *testing.T, done <-chan EventOutcome, want EventOutcome) {
	t.Helper()
	if got := kubetest.Receive(t, done); got != want {
		t.Fatalf("Event was %s, want %s", got, want)
	}
}

func TestEventShape(t *testing.T) {
	s := newServer(t)
	q, k, done := reporter(t, s)
	kubetest.Background(t, q.Run)
	q.Event(workload.Pod{}, Warning, "PartitionInvalid", "config.yaml:3: no such mode")
	outcome(t, done, EventSent)
	k.add(time.Nanosecond)
	q.Event(workload.Pod{Namespace: "train", Name: "job-1", UID: "u-1"}, Normal, "Held", "waits")
	outcome(t, done, EventSent)

	events := s.All("events")
	if len(events) != 2 {
		t.Fatalf("%d Events, want 2", len(events))
	}
	for path, want := range map[string]any{
		"metadata.namespace": "default", "type": "Warning", "reason": "PartitionInvalid",
		"message": "config.yaml:3: no such mode", "count": 1.0,
		// By this UID `kubectl describe node` finds the Events of a kubelet.
		"involvedObject.kind": "Node", "involvedObject.name": "node-1", "involvedObject.uid": "node-1",
		"source.component": "gpu-agent", "source.host": "node-1", "reportingComponent": "example.com/gpu-agent",
		"firstTimestamp": "2026-03-01T12:00:00Z", "lastTimestamp": "2026-03-01T12:00:00Z",
	} {
		if got := at(events[0], path); got != want {
			t.Errorf("node: %s is %v, want %v", path, got, want)
		}
	}
	for path, want := range map[string]any{
		"metadata.namespace": "train", "involvedObject.kind": "Pod", "involvedObject.namespace": "train",
		"involvedObject.name": "job-1", "involvedObject.uid": "u-1", "type": "Normal",
	} {
		if got := at(events[1], path); got != want {
			t.Errorf("pod: %s is %v, want %v", path, got, want)
		}
	}
}

func at(object map[string]any, path string) any {
	var value any = object
	for _, key := range strings.Split(path, ".") {
		inner, _ := value.(map[string]any)
		value = inner[key]
	}
	return value
}

func TestEventRepeated(t *testing.T) {
	s := newServer(t)
	q, k, done := reporter(t, s)
	kubetest.Background(t, q.Run)
	send := func(want EventOutcome) {
		t.Helper()
		q.Event(workload.Pod{}, Warning, "Blocked", "train/job-1 holds it")
		outcome(t, done, want)
	}
	counts := func(want ...float64) {
		t.Helper()
		var got []float64
		for _, e := range s.All("events") {
			got = append(got, e["count"].(float64))
		}
		if len(got) != len(want) {
			t.Fatalf("counts %v, want %v", got, want)
		}
		for i := range got {
			if got[i] != want[i] {
				t.Fatalf("counts %v, want %v", got, want)
			}
		}
	}
	send(EventSent)
	send(EventMerged)
	k.add(30 * time.Second)
	send(EventMerged)
	counts(1)
	k.add(31 * time.Second) // a minute after the last write
	send(EventSent)
	counts(4)
	k.add(11 * time.Minute) // beyond the window
	send(EventSent)
	counts(4, 1)
	// Another message is another Event.
	q.Event(workload.Pod{}, Warning, "Blocked", "train/job-2 holds it")
	outcome(t, done, EventSent)
	counts(4, 1, 1)
}

// present returns the reason of the Event with the latest timestamp, which kubectl shows last.
func (s *server) present(t *testing.T) string {
	t.Helper()
	var last, reason string
	for _, e := range s.All("events") {
		switch at := e["lastTimestamp"].(string); {
		case at == last:
			t.Errorf("two Events of %s: which is the present one?", at)
		case at > last:
			last, reason = at, e["reason"].(string)
		}
	}
	return reason
}

// A partition that is edited good, bad, good within a minute ends with the Event of the good one,
// and so does a GPU that fails, recovers and fails. What happens in between does not end that.
func TestLastEventIsThePresentState(t *testing.T) {
	s := newServer(t)
	q, k, done := reporter(t, s)
	kubetest.Background(t, q.Run)
	tell := func(reason string, want EventOutcome) {
		t.Helper()
		q.State("partition", Normal, reason, "the same text each time")
		outcome(t, done, want)
		if got := s.present(t); got != reason {
			t.Errorf("the last Event says %s, want %s", got, reason)
		}
		k.add(time.Second)
	}
	tell("Applied", EventSent)
	tell("Invalid", EventSent)
	tell("Applied", EventSent)
	tell("Applied", EventMerged)
	tell("Invalid", EventSent)
	q.Event(workload.Pod{}, Normal, "GPUChange", "create 1g.10gb@0")
	outcome(t, done, EventSent)
	k.add(time.Second)
	tell("Applied", EventSent)
	if n := len(s.All("events")); n != 3 {
		t.Errorf("%d Events, want one of each state and what happened", n)
	}
	k.add(time.Hour) // beyond the window
	tell("Applied", EventSent)
}

// Timestamps of Events are in seconds. States of the same second would have no order.
func TestStatesOfOneSecondHaveAnOrder(t *testing.T) {
	s := newServer(t)
	q, k, done := reporter(t, s)
	q.State("partition", Normal, "Applied", "m")
	q.State("GPU 0", Warning, "GPUUnhealthy", "m")
	kubetest.Background(t, q.Run)
	outcome(t, done, EventSent)
	q.State("GPU 0", Normal, "GPURecovered", "m")
	outcome(t, done, EventMerged) // nobody was told that GPU 0 was unhealthy
	k.add(time.Second)
	outcome(t, done, EventSent)
	if got := s.present(t); got != "GPURecovered" {
		t.Errorf("the last Event says %s", got)
	}
	k.add(-time.Hour) // the clock is put back
	q.State("partition", Warning, "Invalid", "m")
	outcome(t, done, EventSent)
	if got := s.present(t); got != "Invalid" {
		t.Errorf("after the clock was put back, the last Event says %s", got)
	}
}

// A state that changes more often than Events may be sent is told in the end.
func TestStateIsToldAfterAFlood(t *testing.T) {
	s := newServer(t)
	q, k, done := reporter(t, s)
	q.onNode = flowcontrol.NewTokenBucketRateLimiter(5, 2)
	kubetest.Background(t, q.Run)
	reasons := []string{"Applied", "Invalid"}
	for i := range 20 {
		q.State("partition", Normal, reasons[i%2], "m")
		k.add(time.Second)
	}
	for range 20 {
		if got := kubetest.Receive(t, done); got == EventDropped {
			t.Error("a state was dropped")
		}
	}
	if got := s.present(t); got != "Invalid" {
		t.Errorf("the last Event says %s, want Invalid", got)
	}
}

// While the server is away, a state does not grow too old; a newer one takes its place.
func TestStateOutlastsAnOutage(t *testing.T) {
	s := newServer(t)
	q, k, done := reporter(t, s)
	tried := make(chan struct{})
	q.server.Options.Failed = func(string, string) {
		select {
		case tried <- struct{}{}:
		default:
		}
	}
	s.Stop()
	kubetest.Background(t, q.Run)
	q.State("partition", Warning, "Invalid", "m")
	kubetest.Receive(t, tried)
	q.State("partition", Normal, "Applied", "m")
	outcome(t, done, EventMerged)
	k.add(time.Hour)
	kubetest.Receive(t, tried)
	s.Back()
	outcome(t, done, EventSent)
	if got := s.present(t); got != "Applied" || len(s.All("events")) != 1 {
		t.Errorf("after the outage the last of %d Events says %s", len(s.All("events")), got)
	}
}

// States of ever more subjects do not size a list, and the newest are those that stay.
func TestStatesAreBounded(t *testing.T) {
	s := newServer(t)
	q, _, done := reporter(t, s)
	for i := range maxStates + 3 { // nobody runs
		q.State(fmt.Sprint("GPU ", i), Warning, "GPUUnhealthy", fmt.Sprint(i))
	}
	for range 3 {
		outcome(t, done, EventDropped)
	}
	if n, last := len(q.states), q.states[len(q.states)-1].message; n != maxStates || last != fmt.Sprint(maxStates+2) {
		t.Errorf("%d states wait, the last is %s", n, last)
	}
}

func TestEventForgottenByServer(t *testing.T) {
	s := newServer(t)
	q, k, done := reporter(t, s)
	kubetest.Background(t, q.Run)
	q.Event(workload.Pod{}, Normal, "Applied", "m")
	outcome(t, done, EventSent)
	s.Put("events", "default", at(s.All("events")[0], "metadata.name").(string), nil)
	k.add(2 * time.Minute)
	q.Event(workload.Pod{}, Normal, "Applied", "m")
	outcome(t, done, EventSent)
	if n := len(s.All("events")); n != 1 {
		t.Fatalf("%d Events, want a new one", n)
	}
	// The new one is the one that counts on.
	k.add(2 * time.Minute)
	q.Event(workload.Pod{}, Normal, "Applied", "m")
	outcome(t, done, EventSent)
	if got := s.All("events")[0]["count"]; got != 2.0 {
		t.Errorf("count %v, want 2", got)
	}
}

func TestEventNeverBlocks(t *testing.T) {
	s := newServer(t)
	q, _, done := reporter(t, s)
	for range cap(q.queue) + 3 { // nobody runs
		q.Event(workload.Pod{}, Normal, "Applied", "m")
	}
	for range 3 {
		outcome(t, done, EventDropped)
	}
}

func TestEventServerAway(t *testing.T) {
	s := newServer(t)
	q, k, done := reporter(t, s)
	tried := make(chan struct{}, 1000)
	q.server.Options.Failed = func(string, string) {
		select {
		case tried <- struct{}{}:
		default:
		}
	}
	s.Stop()
	kubetest.Background(t, q.Run)
	q.Event(workload.Pod{}, Normal, "Applied", "kept")
	kubetest.Receive(t, tried)
	kubetest.Receive(t, tried)
	s.Back()
	outcome(t, done, EventSent)
	s.Stop()
	k.add(time.Hour)
	q.Event(workload.Pod{}, Normal, "Applied", "too old")
	for len(tried) > 0 {
		<-tried
	}
	kubetest.Receive(t, tried)
	k.add(time.Hour)
	outcome(t, done, EventDropped)
}

func TestEventRefused(t *testing.T) {
	s := newServer(t)
	q, _, done := reporter(t, s)
	kubetest.Background(t, q.Run)
	s.Set(func() {
		s.Fault = func(_, _ string, w http.ResponseWriter) bool { kubetest.Refuse(w, 403, "Forbidden"); return true }
	})
	q.Event(workload.Pod{Namespace: "gone", Name: "p"}, Normal, "Applied", "refused")
	outcome(t, done, EventDropped)
	var failures int
	s.Set(func() {
		s.Fault = func(_, _ string, w http.ResponseWriter) bool {
			if failures++; failures <= 3 {
				kubetest.Refuse(w, 500, "InternalError")
				return true
			}
			return false
		}
	})
	q.Event(workload.Pod{}, Normal, "Applied", "tried again")
	outcome(t, done, EventSent)
}

func TestEventFlood(t *testing.T) {
	s := newServer(t)
	q, _, done := reporter(t, s)
	kubetest.Background(t, q.Run)
	sent := 0
	for i := range 60 {
		q.Event(workload.Pod{}, Normal, "Applied", strings.Repeat("x", i+1))
		if kubetest.Receive(t, done) == EventSent {
			sent++
		}
	}
	if sent < 25 || sent > 30 {
		t.Errorf("%d of 60 Events were sent, want the burst of 25 or a few more", sent)
	}
}

// TestDroppedEventsFloodTheLog: 10,000 Events of which the queue takes 256 leave ten
// lines, and one that tells of the others.
func TestDroppedEventsFloodTheLog(t *testing.T) {
	s := newServer(t)
	dropped := 0
	c, j := connect(t, s)
	e := NewEvents(c, func(EventOutcome) { dropped++ })
	var over func()
	c.server.Ration = brief.NewRation(c.server.Log, c.server.Now, func(_ time.Duration, f func()) *time.Timer { over = f; return nil })
	const all = 10_000
	for i := range all { // nobody runs
		e.Event(workload.Pod{}, Warning, "GPUUnhealthy", fmt.Sprintf("Xid %d", i))
	}
	want := all - cap(e.queue)
	if dropped != want {
		t.Errorf("%d Events were counted as dropped, want %d", dropped, want)
	}
	if n := j.Count("\n"); n > 10 {
		t.Fatalf("%d lines in the log", n)
	}
	over()
	if told := fmt.Sprintf(`because="the queue is full" lines=%d`, want-10); j.Count(told) != 1 {
		t.Errorf("the log does not tell that %q", told)
	}
}

// TestRefusedEventsFloodTheLog: what the server says of each Event names it, and yet
// they are one kind of line.
func TestRefusedEventsFloodTheLog(t *testing.T) {
	s := newServer(t)
	c, j := connect(t, s)
	e := NewEvents(c, nil)
	for i := range 1000 {
		e.dropped(event{}, "the API server refuses it", fmt.Errorf("events %q is forbidden", fmt.Sprint(i)))
	}
	if n := j.Count("\n"); n != 10 || j.Count("is forbidden") != 10 {
		t.Errorf("%d lines in the log", n)
	}
}

func TestEventNames(t *testing.T) {
	e := event{at: time.Unix(1<<33, 1), serial: 1 << 63}
	name := e.objectName(strings.Repeat("n", 218) + "." + strings.Repeat("m", 23))
	if len(name) > 253 || strings.Contains(name, "..") {
		t.Errorf("%q has %d bytes", name, len(name))
	}
}

// A fault that every pod of a node feels is told to each, and the node can
// still speak.
func TestEventsOfManyPods(t *testing.T) {
	const pods = 110 // the kubelet's default
	s := newServer(t)
	q, _, done := reporter(t, s)
	for i := range pods {
		q.Event(workload.Pod{Namespace: "train", Name: fmt.Sprintf("job-%d", i)}, Warning, "GPUUnhealthy", "GPU-1: Xid 79")
	}
	q.Event(workload.Pod{}, Warning, "GPUUnhealthy", "GPU-1: Xid 79")
	kubetest.Background(t, q.Run)
	for range pods + 1 {
		outcome(t, done, EventSent)
	}
	count := map[any]int{}
	for _, e := range s.All("events") {
		count[at(e, "metadata.namespace")]++
		if uid := at(e, "involvedObject.uid"); at(e, "involvedObject.kind") == "Pod" && uid != nil {
			t.Errorf("an Event has the UID %v, which nobody gave", uid)
		}
	}
	if count["train"] != pods || count["default"] != 1 {
		t.Errorf("Events by namespace: %v, want %d in train and 1 in default", count, pods)
	}
}
