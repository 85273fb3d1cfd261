// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/socket"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/wait"
)

// Device is one device of a resource as the kubelet sees it.
type Device struct {
	// ID is the device's name, unique in its resource.
	ID      string
	Healthy bool
	// NUMA is the nodes that the device is near to, for the topology manager;
	// empty for no hint.
	NUMA []int
}

// Grant is what a container gets for its devices.
type Grant struct {
	// CDI is fully qualified CDI device names.
	CDI []string
	// Annotations reach the container runtime, not the pod object.
	Annotations map[string]string
}

// Source is what a resource is served from. Only Prepare may block, and all methods may
// be called at the same time.
//
// The text of an error is for the person whose pod it concerns; the resource's
// name is put before it. A panic is not recovered: it ends the process, so that
// a source that a panic left half changed cannot go on serving.
type Source interface {
	// List returns all devices, and a channel that is closed when there is a newer
	// list. The slice must not change after that. A nil slice means that the
	// devices are not known yet: the resource is then not registered, or its
	// last list stays. A slice that is empty but not nil is a resource without
	// devices. The same slice with a new channel is sent again, for the kubelet
	// writes its checkpoint at every list.
	List() (devices []Device, changed <-chan struct{})
	// Prefer chooses n of available, with must among them. The IDs are parts of
	// one message: clone an ID to keep it.
	Prefer(available, must []string, n int) ([]string, error)
	// Allocate grants devices to a container. An error is final: the kubelet
	// fails the pod.
	Allocate(ids []string) (Grant, error)
	// Prepare returns when a container that has these devices may be created. An
	// error is not final: the kubelet tries again. ctx ends when the kubelet
	// stops waiting, after 30 s, or the plugin ends.
	Prepare(ctx context.Context, ids []string) error
}

// Observer is called for metrics. Its methods may be called at once
// and must not block.
type Observer interface {
	// Called is told of each answered call, with the method's name in the API
	// ("Allocate") and the time from the decoded request to the answer.
	Called(resource, method string, took time.Duration, err error)
	// Refused is told of each error of the source that the kubelet was answered.
	Refused(resource string, err error)
	// Registered is told of each attempt to register.
	Registered(resource string, err error)
}

type noObserver struct{}

func (noObserver) Called(string, string, time.Duration, error) {}
func (noObserver) Refused(string, error)                       {}
func (noObserver) Registered(string, error)                    {}

// Plugin serves one resource at one socket of a Kubelet's directory.
type Plugin struct {
	kubelet  *counter
	resource string
	source   Source

	mu      sync.Mutex
	service *service // guarded by mu; of the Run in progress or the last one
	fault   fault    // guarded by mu; why the resource is not registered, as far as known
	// tried is how many streams there had been when fault came, or noStream. Guarded
	// by mu.
	tried int

	// suspected is when somebody last found the kubelet without this resource.
	suspected cell[time.Time]
}

const (
	// A registration that failed is tried again soon: between the creation of
	// kubelet.sock and the kubelet's listening there is a moment in which it
	// refuses, and pods wait for us.
	firstBackoff = time.Millisecond
	lastBackoff  = 5 * time.Second
	// streamGrace is how long the kubelet may take from accepting a
	// registration to opening its stream, which it does at once.
	streamGrace = 2 * time.Second
	// registerTimeout is longer than the 10 s that the kubelet takes to give up
	// on dialling us.
	registerTimeout = 15 * time.Second
	// socketRetry is for a socket that cannot be made: no directory, no space.
	socketRetry = time.Second
	// stopTimeout is what calls in progress get at the end.
	stopTimeout = 2 * time.Second
)

// Run serves the resource until ctx ends, and returns nil then. It waits for
// the source's first list, listens, registers, and does both again whenever
// the kubelet has started anew, its stream has ended, the socket's file is gone, or the
// resource has got its first device or lost its last. Everything that can pass is tried again
// and logged; an error means that this resource cannot be served in this directory at all.
func (p *Plugin) Run(ctx context.Context) error {
	path, err := socketPath(p.kubelet.opts.Dir, p.resource)
	if err != nil {
		return err
	}
	s := p.newService(ctx)
	var background sync.WaitGroup
	defer background.Wait()
	background.Go(s.follow)
	if !s.listed(ctx) {
		return nil
	}

	server := newServer(s)
	defer stop(server)
	var sock *socket.Socket
	defer func() {
		if sock != nil {
			if err := sock.Remove(); err != nil {
				p.kubelet.opts.Logger.Warn("remove socket", "resource", p.resource, "err", err)
			}
		}
	}()
	reg := registration{suspectEvery: p.kubelet.suspectEvery}
	for {
		// Everything is looked at again after whatever woke us.
		kubelet, looked := p.kubelet.sock.get()
		streams, streamed := s.streams.get()
		suspected, suspicion := p.suspected.get()
		outdated, devices := s.outdated()
		withheld, turned := p.kubelet.withheld.get()
		var wait <-chan time.Time
		if fresh, err := socket.Keep(sock, path, "."+hash(p.resource)); err != nil {
			p.report(err, noStream)
			wait = time.After(socketRetry)
		} else {
			p.overcome()
			if fresh != sock {
				if sock != nil {
					p.kubelet.opts.Logger.Info("socket is gone: listen again", "resource", p.resource, "socket", path)
					_ = sock.Close() // Its file is gone already.
				}
				sock = fresh
				background.Go(func() { _ = server.Serve(fresh) })
			}
			due, in := reg.due(kubelet, streams, suspected, time.Now(), outdated)
			switch {
			case withheld:
			case due:
				err := p.register(ctx, s, sock, kubelet, looked)
				if ctx.Err() != nil {
					return nil
				}
				if errors.Is(err, errOvertaken) {
					continue
				}
				reg.tried(kubelet, streams, time.Now(), err)
				p.kubelet.opts.Observer.Registered(p.resource, err)
				if p.report(err, streams.opened); err == nil {
					p.kubelet.opts.Logger.Info("registered", "resource", p.resource, "socket", path)
				}
				continue
			case in > 0:
				wait = time.After(in)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-looked:
		case <-streamed:
		case <-suspicion:
		case <-devices:
		case <-turned:
		case <-wait:
		}
	}
}

// newService returns the service of a run that ends with ctx.
func (p *Plugin) newService(ctx context.Context) *service {
	o := &p.kubelet.opts
	s := &service{
		resource: p.resource, source: p.source, log: o.Logger, observer: o.Observer, stop: ctx,
		ration:   brief.NewRation(o.Logger, time.Now, time.AfterFunc),
		withheld: &p.kubelet.withheld, changed: o.Changed, sent: o.Sent, stood: p.kubelet.stood,
	}
	s.streams.set(streams{lost: time.Now()})
	p.mu.Lock()
	defer p.mu.Unlock()
	p.service, p.fault = s, fault{}
	return s
}

// listed waits for the source's first list, and reports false where ctx ended first.
func (s *service) listed(ctx context.Context) bool {
	for {
		first, changed := s.list.get()
		if first != nil {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

var errOvertaken = errors.New("the kubelet or the socket has changed meanwhile")

// register registers sock with the kubelet that was seen. It gives up at once
// when that is no longer what is there: a kubelet that starts removes our
// socket, and would look for it for 10 s if it were told of it just then.
func (p *Plugin) register(
	ctx context.Context, s *service, sock *socket.Socket, kubelet sockID, looked <-chan struct{},
) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answer := make(chan error, 1)
	required, _ := s.asks.get()
	go func() { answer <- p.kubelet.register(ctx, p.resource, filepath.Base(sock.Path), options(required)) }()
	for {
		select {
		case err := <-answer:
			return err
		case <-looked:
		}
		var now sockID
		now, looked = p.kubelet.sock.get()
		if st, _ := sock.Standing(); now != kubelet || st != socket.Held {
			cancel()
			<-answer
			return errOvertaken
		}
	}
}

func (p *Plugin) suspect(now time.Time) {
	p.mu.Lock()
	s := p.service
	p.mu.Unlock()
	if s == nil {
		return
	}
	l, _ := s.list.get()
	if l != nil && l.healthy > 0 {
		p.suspected.set(now)
	}
}

// noStream is for a fault that no stream disproves.
const noStream = -1

// report keeps why the resource is not registered, nil where it is, and logs
// what is new. tried is how many streams there had been before.
func (p *Plugin) report(err error, tried int) {
	p.mu.Lock()
	old := p.fault
	said := old.err != nil && err != nil && (tried == noStream) == (p.tried == noStream) && sameFailure(old.err, err)
	p.fault, p.tried = old.of(err, time.Now()), tried
	p.mu.Unlock()
	if !said && (old.err != nil || err != nil) {
		p.kubelet.opts.Changed()
	}
	level := slog.LevelWarn
	switch {
	case err == nil:
		return
	case said:
		level = slog.LevelDebug
	}
	p.kubelet.opts.Logger.Log(context.Background(), level, "not registered with the kubelet; trying again",
		"resource", p.resource, "err", err)
}

// sameFailure reports whether two errors are of one kind: the kubelet's answer has the
// same code, and the system's the same number.
func sameFailure(a, b error) bool {
	var x, y syscall.Errno
	return status.Code(a) == status.Code(b) && errors.As(a, &x) == errors.As(b, &y) && x == y
}

// overcome forgets a fault of the socket, which is there again.
func (p *Plugin) overcome() {
	p.mu.Lock()
	over := p.fault.err != nil && p.tried == noStream
	p.mu.Unlock()
	if over {
		p.report(nil, 0)
	}
}

// stop lets calls in progress end, and ends them when they take too long.
func stop(server *grpc.Server) {
	t := time.AfterFunc(stopTimeout, server.Stop)
	defer t.Stop()
	server.GracefulStop()
}

// registration decides when to register. It is pure: what is true now comes in
// as arguments.
type registration struct {
	with   sockID // the kubelet that was last tried
	at     time.Time
	opened int // streams ever opened, before that
	failed bool
	// backoff is the pause after that, and next what grows it.
	backoff time.Duration
	next    wait.Backoff
	// suspectEvery is how old a registration must be for a suspicion to count.
	suspectEvery time.Duration
}

// due says whether to register now, or else after what time to ask again; 0
// means not before something changes. suspected is when the kubelet was last
// found not to know the resource; a suspicion that is too early is forgotten, not
// postponed, since the next look finds it again. outdated says that the kubelet was told
// something else of the resource when it was registered.
func (r *registration) due(kubelet sockID, now streams, suspected, t time.Time, outdated bool) (bool, time.Duration) {
	if kubelet == (sockID{}) {
		return false, 0 // No kubelet.
	}
	if kubelet != r.with {
		return true, 0 // A new one, which knows nothing of us.
	}
	if suspected.Sub(r.at) >= r.suspectEvery {
		return true, 0 // The streams that are open are not the kubelet's.
	}
	if now.open > 0 && !outdated && (!r.failed || now.opened > r.opened) {
		return false, 0 // Where registering failed, an older stream proves nothing.
	}
	wait := r.backoff
	if !outdated && !r.failed && now.opened == r.opened {
		wait = max(wait, streamGrace) // Its stream is on the way.
	}
	if left := wait - t.Sub(r.at); left > 0 {
		return false, left
	}
	return true, 0
}

// tried notes an attempt; before is the streams as they were before it.
func (r *registration) tried(kubelet sockID, before streams, t time.Time, err error) {
	if kubelet != r.with || t.Sub(r.at) > 2*lastBackoff { // The last attempt is too old to count.
		// By a quarter: when the kubelet listens at last, we are late by a
		// quarter of the time that it took, at most.
		r.next = wait.Backoff{Duration: firstBackoff, Factor: 1.25, Cap: lastBackoff, Steps: math.MaxInt}
	}
	r.backoff = r.next.Step()
	r.with, r.at, r.opened, r.failed = kubelet, t, before.opened, err != nil
}

// Status is what is known of a resource now.
type Status struct {
	Resource string
	// Registered says that the kubelet receives the source's newest list: it holds a
	// stream of lists open, and that list could be sent. After a stream that ended at
	// once the next one counts when it has stood for a while.
	Registered bool
	// Since is since when that has not been so; zero where it is, and before the
	// resource is served.
	Since time.Time
	// Devices and Bytes are of the list in force.
	Devices, Bytes int
	// Err is why it is not so; nil where it is.
	Err error
}

// Status says how the resource fares.
func (p *Plugin) Status() Status {
	p.mu.Lock()
	s, refused, tried := p.service, p.fault, p.tried
	p.mu.Unlock()
	st := Status{Resource: p.resource}
	if s == nil {
		return st
	}
	if l, _ := s.list.get(); l != nil {
		st.Devices, st.Bytes = l.devices, len(l.message)
	}
	now := time.Now()
	n, _ := s.streams.get()
	if tried != noStream && n.open > 0 && n.opened > tried {
		refused = fault{} // the answer was lost, but the kubelet has registered it
	}
	var stream fault
	switch {
	case n.stands(now, s.stood):
	case n.brief:
		stream = fault{fmt.Errorf("the kubelet ends its stream of lists as soon as it has opened it; "+
			"the last list, of %d devices, has %d bytes, and the kubelet receives at most %d",
			st.Devices, st.Bytes, maxListBytes), n.lost}
	default:
		stream = fault{p.kubelet.streamless(), n.lost}
	}
	unsent, _ := s.fault.get()
	for _, f := range []fault{refused, stream, unsent} {
		if f.err != nil && (st.Since.IsZero() || f.since.Before(st.Since)) {
			st.Since = f.since
		}
	}
	if refused.err != nil && !n.brief {
		stream.err = nil // the refusal is why there is none
	}
	st.Err = errors.Join(refused.err, stream.err, unsent.err)
	st.Registered = st.Err == nil
	return st
}
