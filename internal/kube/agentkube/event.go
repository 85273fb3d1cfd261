// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/workload"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/flowcontrol"
)

// EventType is the type of an Event, which kubectl shows beside its reason.
type EventType string

// The two types that the API knows.
const (
	Normal  EventType = "Normal"
	Warning EventType = "Warning"
)

// EventOutcome is the outcome of one call of Event.
type EventOutcome string

// The outcomes of a call of Event.
const (
	// EventSent: a new Event, or a higher count of an earlier one, was written.
	EventSent EventOutcome = "sent"
	// EventMerged: the Event repeats one that was written a moment ago, and the next repetition
	// writes the count; or a newer state replaced it before it was written.
	EventMerged EventOutcome = "merged"
	// EventDropped: the queue was full, the bucket was empty, the server refused the Event, or it
	// was unreachable for too long.
	EventDropped EventOutcome = "dropped"
)

type event struct {
	regarding workload.Pod
	// subject is the thing whose state the Event reports; "" if it reports something that happened.
	subject string
	kind    EventType
	reason  string
	message string
	at      time.Time
	// serial distinguishes Events of the same nanosecond.
	serial uint64
}

// Events sends Events about a node and its pods. Its methods may be called from several goroutines.
type Events struct {
	server       *kube.Server
	node, domain string
	// done, if set, is called with the outcome of every Event.
	done func(EventOutcome)
	// If an Event repeats within quiet of its last write, it is only counted. Within window, its
	// count is written. Later, it becomes a new Event.
	quiet, window time.Duration

	serial atomic.Uint64
	queue  chan event
	mu     sync.Mutex
	// states are the states to send, at most one of a subject, in the order of their calls. Guarded
	// by mu. changed wakes Run when there is another one; it holds at most one token.
	states  []event
	changed chan struct{}
	// newest is the state that was written last. It belongs to Run's goroutine.
	newest event
	// onNode and onPods limit the Events about the node and about pods, each for itself. So a fault
	// that hits many pods does not suppress Events about the node.
	onNode, onPods flowcontrol.RateLimiter
}

// NewEvents prepares Events of the client's node, which use the client's connection. done, unless
// it is nil, is called with the outcome of every Event. It must not block.
func NewEvents(c *Client, done func(EventOutcome)) *Events {
	return &Events{
		server: c.server, node: c.options.NodeName, domain: c.options.Domain, done: done,
		quiet: time.Minute, window: 10 * time.Minute,
		// One fault may hit every pod of a node, 110 by default.
		queue: make(chan event, 256), changed: make(chan struct{}, 1),
		onNode: flowcontrol.NewTokenBucketRateLimiter(1.0/30, 25),
		onPods: flowcontrol.NewTokenBucketRateLimiter(1.0/10, 120),
	}
}

// Event queues an Event about a pod and returns at once; Run sends it. If the pod has no name, the
// Event is about the agent's own Node. An empty namespace means default. If the pod has no UID, the
// Event is kept, but `kubectl describe pod` does not find it. A static pod's UID is the one that
// the kubelet uses.
//
// reason is one word in UpperCamelCase. A message beyond 1,024 bytes is cut.
func (q *Events) Event(regarding workload.Pod, kind EventType, reason, message string) {
	e := q.event(kind, reason, message)
	e.regarding = regarding
	select {
	case q.queue <- e:
	default:
		q.dropped(e, "the queue is full", nil)
	}
}

// State queues an Event that tells the present state of a subject of the node, and returns at once.
// The last Event of a subject is always its present state: a state that repeats is written again if
// another state was written since, and a state that may not be sent yet waits until it may, or until
// a newer state of its subject replaces it. The parameters are those of Event.
func (q *Events) State(subject string, kind EventType, reason, message string) {
	e := q.event(kind, reason, message)
	e.subject = subject
	q.mu.Lock()
	was := len(q.states)
	q.states = slices.DeleteFunc(q.states, func(o event) bool { return o.subject == subject })
	merged := len(q.states) < was
	var oldest *event
	if len(q.states) >= maxStates {
		oldest, q.states = &q.states[0], slices.Clone(q.states[1:])
	}
	q.states = append(q.states, e)
	q.mu.Unlock()
	if merged {
		q.eventDone(EventMerged)
	}
	if oldest != nil {
		q.dropped(*oldest, "the queue is full", nil)
	}
	select {
	case q.changed <- struct{}{}:
	default:
	}
}

// maxStates bounds the states that wait. A subject is the partition, or some GPUs and their fault;
// a node has up to 16 GPUs.
const maxStates = 64

func (q *Events) event(kind EventType, reason, message string) event {
	return event{kind: kind, reason: brief.Cut(reason, brief.Reason), message: brief.Cut(message, brief.Message),
		at: q.server.Now(), serial: q.serial.Add(1)}
}

// dropped counts an Event that will not be sent, and logs it within a limit, since there may be
// thousands. why is one of a few texts; err is the server's answer, or nil.
func (q *Events) dropped(e event, why string, err error) {
	args := []any{"reason", e.reason, "message", e.message}
	if err != nil {
		args = append(args, "err", err)
	}
	q.server.Ration.Log(slog.LevelWarn, "Event dropped", []any{"because", why}, args...)
	q.eventDone(EventDropped)
}

func (q *Events) eventDone(o EventOutcome) {
	if q.done != nil {
		q.done(o)
	}
}

// written is an Event that the server has.
type written struct {
	namespace, name string
	// count includes repetitions that are not written yet.
	count int
	at    time.Time
}

// identity returns e without its time and serial. Repetitions of an Event have the same identity.
func (e event) identity() event {
	e.at, e.serial = time.Time{}, 0
	return e
}

// Run sends queued Events until ctx ends, and returns the error of ctx. It drops what is in the
// queue then.
func (q *Events) Run(ctx context.Context) error {
	seen := map[event]*written{}
	for {
		var again <-chan time.Time
		if q.sendStates(ctx, seen) {
			again = time.After(stateEvery)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-again:
		case <-q.changed:
		case e := <-q.queue:
			q.forget(seen)
			q.send(ctx, e, seen)
		}
	}
}

// forget drops the Events that are too old to be counted on.
func (q *Events) forget(seen map[event]*written) {
	for key, w := range seen {
		if q.server.Now().Sub(w.at) > q.window {
			delete(seen, key)
		}
	}
}

// stateEvery is the pause between two tries to send a state. Timestamps of Events are in seconds.
const stateEvery = time.Second

// sendStates sends the states that may be sent now, and reports whether some must wait. Of two
// states, kubectl takes the one with the later timestamp for the present one. A state therefore waits
// for the second after that of the last state.
func (q *Events) sendStates(ctx context.Context, seen map[event]*written) (wait bool) {
	for ctx.Err() == nil {
		q.mu.Lock()
		if len(q.states) == 0 {
			q.mu.Unlock()
			return false
		}
		e := q.states[0]
		q.mu.Unlock()
		q.forget(seen)
		known := seen[e.identity()]
		if known != nil && e.identity() == q.newest.identity() && e.at.Sub(known.at) < q.quiet {
			if q.take(e) {
				known.count++
				q.eventDone(EventMerged)
			}
			continue
		}
		if next := q.newest.at.Truncate(time.Second).Add(time.Second); e.at.Before(next) {
			if left := next.Sub(q.server.Now()); left > 0 && left <= time.Second { // more if the clock was put back
				return true
			}
			e.at = next
		}
		if !q.onNode.TryAccept() {
			return true
		}
		if q.take(e) { // otherwise a newer state has replaced it
			q.deliver(ctx, e, seen)
		}
	}
	return false
}

// take removes a state from those that wait. It returns false if the state has already been replaced.
func (q *Events) take(e event) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	was := len(q.states)
	q.states = slices.DeleteFunc(q.states, func(o event) bool { return o.serial == e.serial })
	return len(q.states) < was
}

// replaced reports whether a newer state of the subject of e waits.
func (q *Events) replaced(e event) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return slices.ContainsFunc(q.states, func(o event) bool { return o.subject == e.subject })
}

// send writes one Event of the queue, or counts it as a repetition, or drops it.
func (q *Events) send(ctx context.Context, e event, seen map[event]*written) {
	known := seen[e.identity()]
	if known != nil {
		known.count++
		if e.at.Sub(known.at) < q.quiet {
			q.eventDone(EventMerged)
			return
		}
	}
	bucket := q.onNode
	if e.regarding.Name != "" {
		bucket = q.onPods
	}
	if !bucket.TryAccept() {
		q.dropped(e, "too many Events", nil)
		return
	}
	q.deliver(ctx, e, seen)
}

// deliver writes an Event. While the server is unreachable it tries again, an Event until it is older
// than the window, and a state until a newer one replaces it.
func (q *Events) deliver(ctx context.Context, e event, seen map[event]*written) {
	known := seen[e.identity()]
	if e.subject != "" {
		if q.newest = e; known != nil {
			known.count++
		}
	}
	for retry := q.server.BackOff(q.server.Timing.PauseMax); ; {
		err := q.write(ctx, e, known)
		if known != nil && apierrors.IsNotFound(err) {
			// The API server deletes Events, after an hour by default.
			known = nil
			continue
		}
		switch {
		case err == nil:
			q.eventDone(EventSent)
			if known == nil {
				known = &written{namespace: e.namespace(), name: e.objectName(q.node), count: 1}
				seen[e.identity()] = known
			}
			known.at = e.at
			return
		case ctx.Err() != nil:
			return
		case kube.Answered(err) && !transient(err):
			q.dropped(e, "the API server refuses it", err)
			return
		case e.subject != "" && q.replaced(e):
			q.eventDone(EventMerged)
			return
		case e.subject == "" && q.server.Now().Sub(e.at) > q.window:
			q.dropped(e, "the API server is unreachable", err)
			return
		}
		if !kube.Sleep(ctx, retry.Step()) {
			return
		}
	}
}

func transient(err error) bool {
	return apierrors.IsInternalError(err) || apierrors.IsServerTimeout(err) || apierrors.IsTimeout(err) ||
		apierrors.IsServiceUnavailable(err) || apierrors.IsTooManyRequests(err)
}

func (q *Events) write(ctx context.Context, e event, known *written) error {
	bounded, cancel := context.WithTimeout(ctx, q.server.Timing.Request)
	defer cancel()
	if known == nil {
		api := q.server.API.Resource(events).Namespace(e.namespace())
		_, err := api.Create(bounded, e.object(q.node, q.domain), metav1.CreateOptions{FieldManager: "gpu-agent"})
		if apierrors.IsAlreadyExists(err) {
			err = nil // the answer to an earlier try was lost
		}
		q.server.Note(ctx, "create", events.Resource, e.namespace(), err)
		return err
	}
	body, err := json.Marshal(map[string]any{"count": known.count, "lastTimestamp": stamp(e.at)})
	if err != nil {
		return fmt.Errorf("encode the patch of event %s: %w", known.name, err)
	}
	_, err = q.server.API.Resource(events).Namespace(known.namespace).
		Patch(bounded, known.name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: "gpu-agent"})
	if apierrors.IsNotFound(err) {
		q.server.Note(ctx, "patch", events.Resource, known.namespace, nil)
		return err
	}
	q.server.Note(ctx, "patch", events.Resource, known.namespace, err)
	return err
}

// namespace returns the namespace that the API requires for the Event: that of the pod, or
// "default" for objects without one.
func (e event) namespace() string {
	if e.regarding.Namespace == "" {
		return metav1.NamespaceDefault
	}
	return e.regarding.Namespace
}

// objectName returns a name that no other Event of this agent has, nor one of an agent before it on
// this node.
func (e event) objectName(node string) string {
	name := cmp.Or(e.regarding.Name, node)
	// A name may have 253 bytes, and up to 34 follow.
	return fmt.Sprintf("%s.%x.%x", strings.TrimRight(name[:min(len(name), 219)], ".-"), e.at.UnixNano(), e.serial)
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// object returns the API object. An Event about the node has the node's name in place of its UID,
// as the kubelet's own Events do: `kubectl describe node` finds it by that. Events are of core/v1,
// like the kubelet's.
func (e event) object(node, domain string) *unstructured.Unstructured {
	involved := map[string]any{"apiVersion": "v1", "kind": "Pod",
		"namespace": e.namespace(), "name": e.regarding.Name}
	if e.regarding.UID != "" {
		involved["uid"] = e.regarding.UID
	}
	if e.regarding.Name == "" {
		involved = map[string]any{"apiVersion": "v1", "kind": "Node",
			"name": node, "uid": node}
	}
	reporter := domain + "/gpu-agent"
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Event",
		"metadata":           map[string]any{"namespace": e.namespace(), "name": e.objectName(node)},
		"involvedObject":     involved,
		"type":               string(e.kind),
		"reason":             e.reason,
		"message":            e.message,
		"source":             map[string]any{"component": "gpu-agent", "host": node},
		"reportingComponent": reporter,
		"reportingInstance":  node,
		"firstTimestamp":     stamp(e.at),
		"lastTimestamp":      stamp(e.at),
		"count":              int64(1),
	}}
}
