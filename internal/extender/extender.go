// SPDX-License-Identifier: Apache-2.0

package extender

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net"
	"net/http"
	"syscall"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	extender "k8s.io/kube-scheduler/extender/v1"
)

// Books know what each pod asks for and where it fits. One request at a time calls Place or Fits. The call may go on
// after the request has been answered at its deadline.
type Books interface {
	// Known waits until the books know the pod. It returns an error if ctx ends first.
	Known(ctx context.Context, uid string) error
	// Place picks one of some nodes for a pod, and reserves room there. If none has room, node is empty, and
	// refused has the reason of each. It returns an error if the books cannot answer, for example before all
	// pods have been listed.
	Place(ctx context.Context, uid string, among []string) (node string, refused map[string]string, err error)
	// Fits reports whether a node had room for a pod if some other pods were gone, named by their UIDs.
	Fits(ctx context.Context, uid, node string, without []string) (bool, error)
}

// Verb is what a request asks for.
type Verb string

// Verbs, by their paths.
const (
	Filter  Verb = "filter"
	Preempt Verb = "preempt"
)

// Outcome is how a request ended.
type Outcome string

// Outcomes.
const (
	// Placed: filter picked a node, or preempt kept at least one.
	Placed Outcome = "placed"
	// Refused: no node has room for the pod.
	Refused Outcome = "refused"
	// Broken: the request could not be read.
	Broken Outcome = "broken"
	// Late: the books had no answer within the deadline.
	Late Outcome = "late"
	// Unknown: the API server has not shown the pod to the books.
	Unknown Outcome = "unknown"
	// Failed: the books returned an error.
	Failed Outcome = "failed"
	// Deferred: a pod of a group was refused, instead of one of the three outcomes before.
	Deferred Outcome = "deferred"
)

// All verbs and outcomes.
var (
	Verbs    = []Verb{Filter, Preempt}
	Outcomes = []Outcome{Placed, Refused, Broken, Late, Unknown, Failed, Deferred}
)

// Options are settings of New. The zero value has the defaults.
type Options struct {
	// Deadline is how long a request may take from its header to its answer; 200 ms if zero. The scheduler's
	// httpTimeout must be longer.
	Deadline time.Duration
	// Answered is called at the end of each request. It may be nil.
	Answered func(v Verb, how Outcome, took time.Duration)
}

const (
	deadline = 200 * time.Millisecond
	// most is the largest size of a request, in bytes. A pod has at most 1.5 MB in the API, and the names of
	// 5,000 nodes at most 253 bytes each.
	most = 4 << 20
	// believed is how many bytes of a request's Content-Length are allocated before its body has come.
	believed = 128 << 10
)

// New returns a handler for the scheduler's requests.
func New(b Books, o Options) http.Handler {
	s := &service{books: b, opts: o, turn: make(chan struct{}, 1)}
	s.opts.Deadline = cmp.Or(o.Deadline, deadline)
	mux := http.NewServeMux()
	mux.HandleFunc("POST /"+string(Filter), func(w http.ResponseWriter, r *http.Request) { s.serve(w, r, Filter) })
	mux.HandleFunc("POST /"+string(Preempt), func(w http.ResponseWriter, r *http.Request) { s.serve(w, r, Preempt) })
	return mux
}

// Server returns a server for the handler that closes connections of slow clients.
func Server(h http.Handler) *http.Server {
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      10 * time.Second,
		IdleTimeout:       5 * time.Minute, // the scheduler keeps its connections
		MaxHeaderBytes:    16 << 10,
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connOf{}, c)
		},
	}
}

// connOf is the key of the connection in a request's context.
type connOf struct{}

// left reports whether the client of a request has closed its connection. net/http notices that, too, but only some
// time later. After this process was stopped for a while, it finds requests of clients that have long gone on without
// it. It must not reserve room for these.
func left(ctx context.Context) bool {
	conn, _ := ctx.Value(connOf{}).(net.Conn)
	if secured, ok := conn.(*tls.Conn); ok {
		conn = secured.NetConn()
	}
	socket, ok := conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return false
	}
	gone := false
	if err := raw.Control(func(fd uintptr) {
		n, _, err := syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		gone = n == 0 && err == nil || errors.Is(err, syscall.ECONNRESET)
	}); err != nil {
		return true // this process has closed it
	}
	return gone
}

type service struct {
	books Books
	opts  Options
	turn  chan struct{} // holds a value while a request is at the books
}

// failure is an answer that is not 200. The scheduler takes it for an error of the extender.
type failure struct {
	code int
	how  Outcome
	err  error
}

func (s *service) serve(w http.ResponseWriter, r *http.Request, v Verb) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(r.Context(), s.opts.Deadline)
	defer cancel()
	answer, how, fail := s.answer(ctx, w, r, v, began)
	if fail != nil {
		how = fail.how
	}
	defer func() {
		if s.opts.Answered != nil {
			s.opts.Answered(v, how, time.Since(began))
		}
	}()
	if fail != nil {
		http.Error(w, fail.err.Error(), fail.code)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answer) // an error means that the client has gone
}

// answer reads a request and asks the books. It returns an answer for the client or a failure.
func (s *service) answer(ctx context.Context, w http.ResponseWriter, r *http.Request, v Verb,
	began time.Time) (answer any, how Outcome, fail *failure) {
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		wrong := fmt.Errorf("a request must be application/json, and this is %q", r.Header.Get("Content-Type"))
		return nil, "", &failure{http.StatusUnsupportedMediaType, Broken, wrong}
	}
	// A body that comes slowly delays its own request alone, which does not wait for a turn yet.
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(began.Add(s.opts.Deadline)) // it fails only with a test's ResponseWriter
	var body bytes.Buffer
	body.Grow(int(min(max(r.ContentLength, 0), believed)) + bytes.MinRead)
	_, err := body.ReadFrom(http.MaxBytesReader(w, r.Body, most))
	switch {
	case err != nil && (ctx.Err() != nil || !time.Now().Before(began.Add(s.opts.Deadline))):
		return nil, "", s.late()
	case err != nil:
		return nil, "", &failure{http.StatusBadRequest, Broken, fmt.Errorf("read the request: %w", err)}
	}
	_ = control.SetReadDeadline(time.Time{})
	q, err := read(v, body.Bytes())
	if err != nil {
		return nil, "", &failure{http.StatusBadRequest, Broken, err}
	}
	// Known comes before the turn: a client that asks for pods that do not exist must not delay others.
	known, cancel := context.WithDeadline(ctx, began.Add(s.opts.Deadline*9/10))
	defer cancel()
	if err := s.books.Known(known, string(q.pod.UID)); err != nil {
		fail = &failure{http.StatusServiceUnavailable, Unknown, err}
	} else {
		answer, how, fail = s.ask(ctx, q)
	}
	if fail != nil && q.pod.Spec.SchedulingGroup != nil {
		return q.refuse(fail.err.Error()), Deferred, nil
	}
	return answer, how, fail
}

// question is a request that has been read.
type question struct {
	pod *pod
	ask func(context.Context, Books) (answer any, how Outcome, err error)
	// refuse returns the answer that no node has room for the pod, for one reason.
	refuse func(why string) any
}

// errWholeObjects is the error for a request with objects in place of their names.
var errWholeObjects = errors.New("the request has whole nodes or pods instead of their names: " +
	"set nodeCacheCapable: true for this extender in kube-scheduler's configuration")

// read reads the body of a request.
func read(v Verb, body []byte) (*question, error) {
	if v == Preempt {
		var args preemption
		if err := decode(body, &args, &args.Pod); err != nil {
			return nil, err
		}
		if args.NodeNameToMetaVictims == nil && args.NodeNameToVictims != nil {
			return nil, errWholeObjects
		}
		return &question{args.Pod, args.preempt, func(string) any { return noNode() }}, nil
	}
	var args filtering
	if err := decode(body, &args, &args.Pod); err != nil {
		return nil, err
	}
	if args.NodeNames == nil {
		return nil, errWholeObjects
	}
	return &question{args.Pod, args.filter, args.refuse}, nil
}

// pod is what is read of the pod in a request. A client could make up the rest of the spec, and its amounts can take
// minutes to decode.
type pod struct {
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		// SchedulingGroup is not nil for a pod that is bound together with others or not at all. A client
		// that makes one up gets a refusal in place of an error.
		SchedulingGroup *struct{}
	}
}

// filtering is what is read of an extender.ExtenderArgs.
type filtering struct {
	Pod       *pod
	NodeNames *[]string
}

// preemption is what is read of an extender.ExtenderPreemptionArgs.
type preemption struct {
	Pod                   *pod
	NodeNameToVictims     map[string]json.RawMessage
	NodeNameToMetaVictims map[string]*extender.MetaVictims
}

// decode reads a request into args. of is the field of args for the pod, which must have a UID.
func decode(body []byte, args any, of **pod) error {
	if err := json.Unmarshal(body, args); err != nil {
		return fmt.Errorf("read the request: %w", err)
	}
	if *of == nil || (*of).UID == "" {
		return errors.New("the request has no pod with a UID")
	}
	return nil
}

func (s *service) late() *failure {
	return &failure{http.StatusServiceUnavailable, Late, fmt.Errorf("there was no answer within %s", s.opts.Deadline)}
}

// ask waits for a turn and asks the books. It returns when ctx ends, also if the books have not answered.
func (s *service) ask(ctx context.Context, q *question) (any, Outcome, *failure) {
	select {
	case s.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, "", s.late()
	}
	if left(ctx) {
		<-s.turn
		return nil, "", s.late()
	}
	type result struct {
		answer any
		how    Outcome
		err    error
	}
	done := make(chan result, 1)
	go func() {
		defer func() { <-s.turn }()
		answer, how, err := q.ask(ctx, s.books)
		done <- result{answer, how, err}
	}()
	select {
	case <-ctx.Done():
		return nil, "", s.late()
	case r := <-done:
		if r.err != nil {
			return nil, "", &failure{http.StatusServiceUnavailable, Failed, r.err}
		}
		return r.answer, r.how, nil
	}
}

// filter answers with the best node.
func (args *filtering) filter(ctx context.Context, b Books) (any, Outcome, error) {
	node, refused, err := b.Place(ctx, string(args.Pod.UID), *args.NodeNames)
	if err != nil {
		return nil, "", fmt.Errorf("place %s/%s: %w", args.Pod.Namespace, args.Pod.Name, err)
	}
	if node == "" {
		return &extender.ExtenderFilterResult{NodeNames: &[]string{}, FailedNodes: refused}, Refused, nil
	}
	return &extender.ExtenderFilterResult{NodeNames: &[]string{node}}, Placed, nil
}

// refuse answers that no node has room for the pod, for one reason.
func (args *filtering) refuse(why string) any {
	no := &extender.ExtenderFilterResult{NodeNames: &[]string{}, FailedNodes: map[string]string{}}
	for _, name := range *args.NodeNames {
		no.FailedNodes[name] = why
	}
	return no
}

// noNode answers that the eviction of pods opens room on no node.
func noNode() *extender.ExtenderPreemptionResult {
	return &extender.ExtenderPreemptionResult{NodeNameToMetaVictims: map[string]*extender.MetaVictims{}}
}

// preempt keeps the nodes on which the eviction of pods opens room.
func (args *preemption) preempt(ctx context.Context, b Books) (any, Outcome, error) {
	out, how := noNode(), Refused
	for node, victims := range args.NodeNameToMetaVictims {
		var uids []string
		if victims != nil {
			for _, p := range victims.Pods {
				if p != nil {
					uids = append(uids, p.UID)
				}
			}
		}
		fits, err := b.Fits(ctx, string(args.Pod.UID), node, uids)
		if err != nil {
			return nil, "", fmt.Errorf(
				"look for room for %s/%s on %s: %w", args.Pod.Namespace, args.Pod.Name, node, err)
		}
		if fits {
			out.NodeNameToMetaVictims[node], how = victims, Placed
		}
	}
	return out, how, nil
}
