// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/socket"

	"google.golang.org/grpc"
)

// DefaultDir is the directory that a kubelet with the default --root-dir looks for plugins in.
const DefaultDir = "/var/lib/kubelet/plugins_registry"

// Claim names a ResourceClaim. The UID tells it from later claims of the same name.
type Claim struct {
	Namespace, Name, UID string
}

// Device is a device of a claim, with what a container gets for it.
type Device struct {
	// Requests are the names of the claim's requests that it was allocated for.
	Requests []string
	Pool     string
	Name     string
	// Share is the ID of the claim's share of the device; empty if the device is not shared.
	Share string
	// CDI are fully qualified CDI device names.
	CDI []string
}

// Health is the health of a device.
type Health struct {
	Pool, Name string
	Healthy    bool
	// Message is why the device is not healthy; empty if it is. Tenants read it in the status of
	// their pods.
	Message string
}

// Driver answers the kubelet's calls. All methods may be called at the same time, also for one
// claim.
type Driver interface {
	// Prepare returns what containers get for a claim, as soon as they may be created. ctx ends
	// after Patience, or when the server ends. The owner of the claim reads the error.
	Prepare(ctx context.Context, c Claim) ([]Device, error)
	// Unprepare gives a claim back; no container of it is running. It returns nil for a claim that
	// it does not know, since that was given back already.
	Unprepare(ctx context.Context, c Claim) error
	// Health returns the health of all devices, and a channel that is closed when it has changed.
	// The slice must not change after that.
	Health() (devices []Health, changed <-chan struct{})
}

// Observer is called for metrics. Its methods may be called at the same time and must not block.
type Observer interface {
	// Called is called for each answered call, with the method's name in the API
	// ("NodePrepareResources") and the time from the request to the answer.
	Called(driver, method string, took time.Duration, err error)
	// Refused is called for each error of the driver that the kubelet got as the answer.
	Refused(driver string, err error)
	// Registered is called for each answer of the kubelet to a registration.
	Registered(driver string, err error)
}

type noObserver struct{}

func (noObserver) Called(string, string, time.Duration, error) {}
func (noObserver) Refused(string, error)                       {}
func (noObserver) Registered(string, error)                    {}

// Options are what a Server is made of.
type Options struct {
	// Name is the driver's name, a domain: "gpus.example.com". Required.
	Name string
	// Driver answers the kubelet's calls. Required.
	Driver Driver
	// Dir is the kubelet's registry directory. Default: DefaultDir.
	Dir string
	// Registered, if set, is called whenever the kubelet has registered the driver. It
	// must not block.
	Registered func()
	// Changed, if set, is called when Status may have changed. It must not block.
	Changed func()
	// Watch reports changes of Dir. Default: socket.Inotify. If it fails, the server looks at Dir
	// once a second.
	Watch socket.Watch
	// Logger gets log lines with the key "driver". Default: slog.Default().
	Logger *slog.Logger
	// Observer is optional.
	Observer Observer
}

const (
	// Patience is how long a Prepare may take. The kubelet waits for 45 s, and an error has to
	// reach it before that.
	Patience = 40 * time.Second
	// lookEvery is how often the server looks at the socket's file besides the watch, which can
	// lose events. pollEvery is how often it looks without a watch or without a socket.
	lookEvery = 30 * time.Second
	pollEvery = time.Second
	// stopTimeout is how long calls in progress may take once Run's ctx has ended.
	stopTimeout = 2 * time.Second
)

// Server serves one driver at one socket.
type Server struct {
	opts Options
	path string

	mu     sync.Mutex
	status Status // guarded by mu
	// accepted is true if the kubelet last told that the driver is registered. conns is the number
	// of open connections. Both are guarded by mu.
	accepted bool
	conns    int
}

// Status is how the driver is known to the kubelet.
type Status struct {
	// Registered is true if the kubelet has registered the driver and is connected.
	Registered bool
	// Since is the time at which Registered last changed, or at which Run began; zero before Run.
	Since time.Time
	// Err is why the driver is not registered, if that is known, or that its socket failed; else
	// nil.
	Err error
}

// New returns a server, which does nothing before Run. It fails if the driver's name is not valid,
// or the path of its socket is too long.
func New(o Options) (*Server, error) {
	if o.Dir == "" {
		o.Dir = DefaultDir
	}
	if o.Registered == nil {
		o.Registered = func() {}
	}
	if o.Changed == nil {
		o.Changed = func() {}
	}
	if o.Watch == nil {
		o.Watch = socket.Inotify
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Observer == nil {
		o.Observer = noObserver{}
	}
	if !domain(o.Name) {
		return nil, fmt.Errorf("serve the DRA driver %q: the name is not a domain of at most 63 characters", o.Name)
	}
	path := socketPath(o.Dir, o.Name)
	if len(path) > socket.MaxPath {
		return nil, fmt.Errorf("serve the DRA driver %s: %s is too long for a socket's address of at most %d bytes",
			o.Name, path, socket.MaxPath)
	}
	return &Server{opts: o, path: path}, nil
}

// socketPath returns the path of the socket that the kubelet finds a driver by.
func socketPath(dir, name string) string { return filepath.Join(dir, name+"-reg.sock") }

// RemoveSocket removes the socket that a killed process has left for a driver in the kubelet's
// registry directory. If a process still listens at the socket, RemoveSocket leaves it and fails.
func RemoveSocket(dir, name string) error {
	err := socket.RemoveLeft(socketPath(dir, name))
	if errors.Is(err, socket.ErrServed) {
		err = fmt.Errorf("%w and serves the DRA driver %s; end it first", err, name)
	}
	return err
}

// domain reports whether a driver may have this name: a DNS subdomain of at most 63 characters.
func domain(name string) bool {
	if name == "" || len(name) > 63 {
		return false
	}
	before := byte('.')
	for i := range len(name) {
		c := name[i]
		letter := c-'0' <= 9 || c-'a' <= 'z'-'a'
		if !letter && (c != '.' && c != '-' || before == '.' || before == '-' && c == '.') {
			return false
		}
		before = c
	}
	return before != '.' && before != '-'
}

// Run serves the driver until ctx ends, removes the socket, and returns nil. It logs other failures
// and tries again.
func (s *Server) Run(ctx context.Context) error {
	server := s.newServer(ctx)
	defer func() {
		t := time.AfterFunc(stopTimeout, server.Stop)
		defer t.Stop()
		server.GracefulStop()
	}()
	s.set(func(s *Server) { s.status.Since = time.Now() })
	var serving sync.WaitGroup
	defer serving.Wait()
	var sock *socket.Socket
	defer func() {
		if sock == nil {
			return
		}
		if err := sock.Remove(); err != nil {
			s.opts.Logger.Warn("cannot remove the socket", "driver", s.opts.Name, "err", err)
		}
	}()
	said := brief.NewRation(s.opts.Logger, time.Now, time.AfterFunc)
	watch := watcher{s: s}
	for {
		told, wait := watch.begin(ctx)
		fresh, err := socket.Keep(sock, s.path, "."+s.opts.Name)
		switch {
		case err != nil:
			said.Log(slog.LevelWarn, "cannot listen for the kubelet's calls; trying again",
				[]any{"driver", s.opts.Name}, "err", err)
			s.set(func(s *Server) { s.status.Err = err })
			wait = pollEvery
		case fresh != sock:
			if sock != nil {
				s.opts.Logger.Info("the socket is gone; listening again", "driver", s.opts.Name, "socket", s.path)
				_ = sock.Close() // its file is gone already
			}
			sock = fresh
			s.set(func(s *Server) { s.status.Err = nil })
			serving.Go(func() { serve(server, fresh, s.opts.Logger) })
		}
		select {
		case <-ctx.Done():
			return nil
		case _, ok := <-told:
			watch.over = !ok
		case <-time.After(wait):
		}
	}
}

func serve(server *grpc.Server, l *socket.Socket, log *slog.Logger) {
	if err := server.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		log.Debug("the socket is closed", "socket", l.Path, "err", err)
	}
}

// watcher watches the registry directory while that is possible. told is the channel of the present
// watch; nil if there is none. over is true if that channel was closed, and said if the failure to
// watch is in the log.
type watcher struct {
	s    *Server
	told <-chan struct{}
	over bool
	said bool
}

// begin returns a channel that gets a value at each change, nil if the directory cannot be watched,
// and how long to wait for it before looking anyway.
func (w *watcher) begin(ctx context.Context) (<-chan struct{}, time.Duration) {
	if w.told != nil && !w.over {
		return w.told, lookEvery
	}
	told, err := w.s.opts.Watch(ctx, w.s.opts.Dir)
	if w.told, w.over = told, false; err == nil {
		w.said = false
		return told, lookEvery
	}
	if w.told = nil; !w.said {
		w.said = true
		w.s.opts.Logger.Warn("cannot watch the kubelet's directory; looking at it every second instead",
			"dir", w.s.opts.Dir, "err", err)
	}
	return nil, pollEvery
}

// Status returns how the driver is known to the kubelet.
func (s *Server) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status
}

// set changes what the status follows from, and calls Options.Changed if the status is another one.
func (s *Server) set(change func(*Server)) {
	s.mu.Lock()
	before := s.status
	change(s)
	if s.status.Registered = s.accepted && s.conns > 0; s.status.Registered != before.Registered {
		s.status.Since = time.Now()
	}
	changed := s.status.Registered != before.Registered || fmt.Sprint(s.status.Err) != fmt.Sprint(before.Err)
	s.mu.Unlock()
	if changed {
		s.opts.Changed()
	}
}
