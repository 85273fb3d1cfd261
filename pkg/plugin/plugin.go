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
	// ID is unique in its resource.
	ID      string
	Healthy bool
	// NUMA are the NUMA nodes that the device is near to, for the topology manager. Empty gives no
	// hint.
	NUMA []int
}

// Grant is what a container gets for its devices.
type Grant struct {
	// CDI are fully qualified CDI device names.
	CDI []string
	// Annotations are for the container runtime. They are not in the pod object.
	Annotations map[string]string
}

// Source provides the devices of a resource. Only Prepare may block. All methods may be called at
// the same time.
//
// The text of an error is for the owner of the pod; the resource's name is put before it. A panic
// is not recovered. It ends the process, so that a source that is left half changed does not go on
// serving.
type Source interface {
	// List returns all devices, and a channel that is closed when there is a newer list. The slice
	// must not change afterwards. If it is nil, the devices are not known yet: the resource is then
	// not registered, or keeps its last list. If it is empty but not nil, the resource has no
	// devices. The same slice with a new channel is sent again, since the kubelet writes its
	// checkpoint at every list.
	List() (devices []Device, changed <-chan struct{})
	// Prefer chooses n of available, with must among them. The IDs are parts of one message, so
	// clone an ID to keep it.
	Prefer(available, must []string, n int) ([]string, error)
	// Allocate grants devices to a container. An error is final: the kubelet
	// fails the pod.
	Allocate(ids []string) (Grant, error)
	// Prepare returns nil when a container that has these devices may be created. An error is not
	// final: the kubelet tries again. ctx ends when the kubelet stops waiting, after 30 s, or when
	// the plugin ends.
	Prepare(ctx context.Context, ids []string) error
}

// Observer is called for metrics. Its methods may be called at the same time, and must not block.
type Observer interface {
	// Called is called after each answered call. method is its name in the API ("Allocate"), and
	// took is the time from the decoded request to the answer.
	Called(resource, method string, took time.Duration, err error)
	// Refused is called for each error of the source that is sent to the kubelet.
	Refused(resource string, err error)
	// Registered is called after each attempt to register.
	Registered(resource string, err error)
}

type noObserver struct{}

func (noObserver) Called(string, string, time.Duration, error) {}
func (noObserver) Refused(string, error)                       {}
func (noObserver) Registered(string, error)                    {}

// Plugin serves one resource at one socket of a Kubelet's directory.
type Plugin struct {
	kubelet  *directory
	resource string
	source   Source

	mu      sync.Mutex
	service *service // guarded by mu; of the present or the last Run
	fault   fault    // guarded by mu; the last failure to listen or to register
	// openedBefore is how many streams had been opened when fault was set, or noStream. Guarded by
	// mu.
	openedBefore int

	// suspected is when Suspect was last called for this resource.
	suspected cell[time.Time]
}

const (
	// A failed registration is tried again soon. The kubelet creates kubelet.sock a moment before
	// it listens, and refuses in between. Pods wait meanwhile.
	firstBackoff = time.Millisecond
	lastBackoff  = 5 * time.Second
	// streamGrace is how long the kubelet may take to open its stream after it has accepted a
	// registration. It normally does so at once.
	streamGrace = 2 * time.Second
	// registerTimeout is longer than the 10 s after which the kubelet stops dialling the plugin.
	registerTimeout = 15 * time.Second
	// socketRetry is the pause after a socket could not be made, for example without a directory or
	// without space.
	socketRetry = time.Second
	// stopTimeout is how long calls in progress may take after the end of Run.
	stopTimeout = 2 * time.Second
)

// Run serves the resource until ctx ends, and then returns nil. It waits for the source's first
// list, listens and registers. It does both again whenever the kubelet has restarted, its stream
// has ended, the socket's file is gone, or the resource has got its first device or lost its last.
// It logs failures that may pass, and tries again. It returns an error if the resource cannot be
// served in this directory at all.
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
		// Each event wakes this loop, and it checks everything again.
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
			p.clearSocketFault()
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

// newService returns the service for a run that ends with ctx.
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

// listed waits for the source's first list. It returns false if ctx ends first.
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

// register registers sock with the given kubelet. It gives up as soon as the kubelet's socket or
// sock itself has changed: a starting kubelet removes sock, and would look for it for 10 s if it
// were told of it just then.
func (p *Plugin) register(
	ctx context.Context, s *service, sock *socket.Socket, kubelet sockID, looked <-chan struct{},
) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answer := make(chan error, 1)
	required, _ := s.preStart.get()
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

// noStream marks a fault that no new stream disproves.
const noStream = -1

// report records why the resource is not registered, or nil if it is, and logs new failures. tried
// is how many streams had been opened before.
func (p *Plugin) report(err error, tried int) {
	p.mu.Lock()
	old := p.fault
	said := old.err != nil && err != nil && (tried == noStream) == (p.openedBefore == noStream) &&
		sameFailure(old.err, err)
	p.fault, p.openedBefore = old.of(err, time.Now()), tried
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

// sameFailure reports whether two errors have the same gRPC code and the same system error number.
func sameFailure(a, b error) bool {
	var x, y syscall.Errno
	return status.Code(a) == status.Code(b) && errors.As(a, &x) == errors.As(b, &y) && x == y
}

// clearSocketFault clears a fault of the socket, which exists again.
func (p *Plugin) clearSocketFault() {
	p.mu.Lock()
	over := p.fault.err != nil && p.openedBefore == noStream
	p.mu.Unlock()
	if over {
		p.report(nil, 0)
	}
}

// stop waits for calls in progress, and ends them after stopTimeout.
func stop(server *grpc.Server) {
	t := time.AfterFunc(stopTimeout, server.Stop)
	defer t.Stop()
	server.GracefulStop()
}

// registration decides when to register. It is pure: the present state comes in as arguments.
type registration struct {
	with   sockID // the kubelet of the last attempt
	at     time.Time
	opened int // streams ever opened before the last attempt
	failed bool
	// backoff is the pause after the last attempt. next makes the following, longer one.
	backoff time.Duration
	next    wait.Backoff
	// suspectEvery is how old a registration must be before Suspect counts.
	suspectEvery time.Duration
}

// due returns true if the plugin has to register now. Otherwise it returns after what time to call
// due again; 0 means not before something changes. suspected is when Suspect was last called. A
// call that comes too early is dropped, since the caller's next look repeats it. outdated is true
// if the resource has got its first device or lost its last since the kubelet asked for options.
func (r *registration) due(kubelet sockID, now streams, suspected, t time.Time, outdated bool) (bool, time.Duration) {
	if kubelet == (sockID{}) {
		return false, 0 // No kubelet.
	}
	if kubelet != r.with {
		return true, 0 // A new kubelet, which does not know the plugin.
	}
	if suspected.Sub(r.at) >= r.suspectEvery {
		return true, 0 // The open streams are not the kubelet's.
	}
	if now.open > 0 && !outdated && (!r.failed || now.opened > r.opened) {
		return false, 0 // After a failed registration, an older stream proves nothing.
	}
	wait := r.backoff
	if !outdated && !r.failed && now.opened == r.opened {
		wait = max(wait, streamGrace) // The kubelet is about to open its stream.
	}
	if left := wait - t.Sub(r.at); left > 0 {
		return false, left
	}
	return true, 0
}

// tried records an attempt. before are the streams as they were before it.
func (r *registration) tried(kubelet sockID, before streams, t time.Time, err error) {
	if kubelet != r.with || t.Sub(r.at) > 2*lastBackoff { // The last attempt is too old to count.
		// The pause grows by a quarter. So when the kubelet listens at last, the plugin registers
		// late by at most a quarter of the time that it has waited.
		r.next = wait.Backoff{Duration: firstBackoff, Factor: 1.25, Cap: lastBackoff, Steps: math.MaxInt}
	}
	r.backoff = r.next.Step()
	r.with, r.at, r.opened, r.failed = kubelet, t, before.opened, err != nil
}

// Status is the state of a resource.
type Status struct {
	Resource string
	// Registered is true if the kubelet receives the source's newest list: it holds a stream of
	// lists open, and the list could be sent. After a stream that ended at once, the next one
	// counts only after 10 seconds.
	Registered bool
	// Since is when the resource stopped being registered. Zero if it is registered, and before it
	// is served.
	Since time.Time
	// Devices and Bytes are the number of devices and the encoded size of the list in force.
	Devices, Bytes int
	// Err is why the resource is not registered. Nil if it is.
	Err error
}

// Status returns the state of the resource.
func (p *Plugin) Status() Status {
	p.mu.Lock()
	s, refused, tried := p.service, p.fault, p.openedBefore
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
		refused = fault{} // the kubelet's answer was lost, but it has opened a stream since
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
		stream.err = nil // the failed registration is the reason
	}
	st.Err = errors.Join(refused.err, stream.err, unsent.err)
	st.Registered = st.Err == nil
	return st
}
