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

// Books know what fits where, and what each pod asks for: of a pod in a request only the UID is
// believed. Place and Fits are called by one request at a time, and may be under way still when
// their request has been answered.
type Books interface {
	// Known waits until the pod is known, as long as ctx allows; its error says that it is not.
	Known(ctx context.Context, uid string) error
	// Place picks one of some nodes for a pod, and reserves there. Where none can take it,
	// node is empty and refused has each one's reason. An error says that the books cannot
	// tell, for example since they have not been filled yet.
	Place(ctx context.Context, uid string, among []string) (node string, refused map[string]string, err error)
	// Fits says whether a node could take a pod without some others, named by their UIDs.
	Fits(ctx context.Context, uid, node string, without []string) (bool, error)
}

// Verb is what the scheduler asks for.
type Verb string

// Verbs, as in the paths.
const (
	Filter  Verb = "filter"
	Preempt Verb = "preempt"
)

// Outcome is how a request ended.
type Outcome string

// Outcomes.
const (
	// Placed: filter named a node, or preempt kept one.
	Placed Outcome = "placed"
	// Refused: no node can take the pod.
	Refused Outcome = "refused"
	// Broken: the request could not be read.
	Broken Outcome = "broken"
	// Late: there was no answer in time.
	Late Outcome = "late"
	// Unknown: the API server has not shown the pod to the books.
	Unknown Outcome = "unknown"
	// Failed: the books could not tell.
	Failed Outcome = "failed"
	// Deferred: a pod of a group was refused for now, for one of the last three reasons.
	Deferred Outcome = "deferred"
)

// Verbs and Outcomes are all that there are.
var (
	Verbs    = []Verb{Filter, Preempt}
	Outcomes = []Outcome{Placed, Refused, Broken, Late, Unknown, Failed, Deferred}
)

// Options may be zero.
type Options struct {
	// Deadline is when a request is answered at the latest, counted from its header; 200 ms
	// if zero. The scheduler's httpTimeout is to be longer.
	Deadline time.Duration
	// Answered, if set, is called at the end of each request.
	Answered func(v Verb, how Outcome, took time.Duration)
}

const (
	deadline = 200 * time.Millisecond
	// most is how long a request may be. A pod has at most 1.5 MB in the API, and 5,000 nodes
	// have names of at most 253 bytes.
	most = 4 << 20
	// believed is how much of that is set aside before it has come.
	believed = 128 << 10
)

// New returns the handler of the scheduler's requests.
func New(b Books, o Options) http.Handler {
	s := &service{books: b, opts: o, turn: make(chan struct{}, 1)}
	s.opts.Deadline = cmp.Or(o.Deadline, deadline)
	mux := http.NewServeMux()
	mux.HandleFunc("POST /"+string(Filter), func(w http.ResponseWriter, r *http.Request) { s.serve(w, r, Filter) })
	mux.HandleFunc("POST /"+string(Preempt), func(w http.ResponseWriter, r *http.Request) { s.serve(w, r, Preempt) })
	return mux
}

// Server serves a handler with bounds on what a client can keep busy.
func Server(h http.Handler) *http.Server {
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      10 * time.Second,
		IdleTimeout:       5 * time.Minute, // the scheduler keeps its connections
		MaxHeaderBytes:    16 << 10,
		ConnContext:       func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connOf{}, c) },
	}
}

// connOf is the key of a request's connection.
type connOf struct{}

// left reports whether the client of a request has closed its connection. net/http notices
// that by itself, but not at once; and where this process was stopped for a while, it meets
// the requests of clients that have long gone on without it, and must reserve nothing for them.
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
		return true // it is closed here
	}
	return gone
}

type service struct {
	books Books
	opts  Options
	turn  chan struct{} // holds a value while a request is at the books
}

// failure is an answer that the scheduler takes for an error of the extender.
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
	_ = json.NewEncoder(w).Encode(answer) // who has gone needs no answer
}

// answer reads the request and asks the books.
func (s *service) answer(ctx context.Context, w http.ResponseWriter, r *http.Request, v Verb,
	began time.Time) (answer any, how Outcome, fail *failure) {
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		return nil, "", &failure{http.StatusUnsupportedMediaType, Broken, fmt.Errorf("a request is application/json, and this is %q", r.Header.Get("Content-Type"))}
	}
	// A body that comes slowly takes the time of its own request only.
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(began.Add(s.opts.Deadline)) // a writer that cannot has no slow clients
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
	// Before it has its turn, so that whoever asks for pods that are not there holds nobody up.
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

// question is a request that makes sense.
type question struct {
	pod *pod
	ask func(context.Context, Books) (answer any, how Outcome, err error)
	// refuse is the answer by which no node can take the pod, with the reason.
	refuse func(why string) any
}

// read makes sense of a request.
func read(v Verb, body []byte) (*question, error) {
	if v == Preempt {
		var args preemption
		if err := decode(body, &args, &args.Pod); err != nil {
			return nil, err
		}
		if args.NodeNameToMetaVictims == nil && args.NodeNameToVictims != nil {
			return nil, errors.New("the pods to be evicted came whole: set nodeCacheCapable: true for this extender in kube-scheduler's configuration")
		}
		return &question{args.Pod, args.preempt, func(string) any { return noNode() }}, nil
	}
	var args filtering
	if err := decode(body, &args, &args.Pod); err != nil {
		return nil, err
	}
	if args.NodeNames == nil {
		return nil, errors.New("the nodes came without NodeNames: set nodeCacheCapable: true for this extender in kube-scheduler's configuration")
	}
	return &question{args.Pod, args.filter, args.refuse}, nil
}

// pod is what is read of the pod in a request. Whoever asks could make up its spec, and its amounts can
// take minutes to decode, so nothing else of that is read.
type pod struct {
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		// SchedulingGroup is of a pod that is bound together with others or not at all. Of who makes one
		// up the pod is refused where it would be scheduled unguarded.
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

// decode reads arguments, of which pod is a part.
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

// ask waits for a turn and asks the books, both until the deadline.
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

// filter answers with the one best node.
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

// refuse answers that no node can take the pod, for one reason.
func (args *filtering) refuse(why string) any {
	no := &extender.ExtenderFilterResult{NodeNames: &[]string{}, FailedNodes: map[string]string{}}
	for _, name := range *args.NodeNames {
		no.FailedNodes[name] = why
	}
	return no
}

// noNode is the answer that the eviction of pods opens room nowhere.
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
			return nil, "", fmt.Errorf("look for room for %s/%s on %s: %w", args.Pod.Namespace, args.Pod.Name, node, err)
		}
		if fits {
			out.NodeNameToMetaVictims[node], how = victims, Placed
		}
	}
	return out, how, nil
}
