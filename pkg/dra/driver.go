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

// DefaultDir is the directory in which the kubelet looks for plugins, below its default
// --root-dir.
const DefaultDir = "/var/lib/kubelet/plugins_registry"

// Claim names a ResourceClaim. The UID tells one from the next of its name.
type Claim struct {
	Namespace, Name, UID string
}

// Device is a device of a claim, with what a container gets for it.
type Device struct {
	// Requests are the requests of the claim that it was allocated for.
	Requests []string
	Pool     string
	Name     string
	// Share tells the shares of one device apart; empty where it is not shared.
	Share string
	// CDI is fully qualified CDI device names.
	CDI []string
}

// Health is how a device is.
type Health struct {
	Pool, Name string
	Healthy    bool
	// Message is why it is not, for the status of pods, which tenants read.
	Message string
}

// Driver is what the kubelet's calls reach. All methods may be called at the same time,
// also for one claim.
type Driver interface {
	// Prepare returns what containers get for a claim, when they may be created. ctx
	// ends after Patience or when the server does. The text of an error is for whoever
	// owns the claim.
	Prepare(ctx context.Context, c Claim) ([]Device, error)
	// Unprepare gives a claim back; no container of it is running. A claim that is not
	// known is given back already.
	Unprepare(ctx context.Context, c Claim) error
	// Health returns how all devices are, and a channel that is closed when that
	// is no longer so. The slice must not change after that.
	Health() (devices []Health, changed <-chan struct{})
}

// Observer is called for metrics. Its methods may be called at once and must not block.
type Observer interface {
	// Called is told of each answered call, with the method's name in the API
	// ("NodePrepareResources") and the time from the request to the answer.
	Called(driver, method string, took time.Duration, err error)
	// Refused is told of each error of the driver that the kubelet was answered.
	Refused(driver string, err error)
	// Registered is told of each answer to a registration.
	Registered(driver string, err error)
}

type noObserver struct{}

func (noObserver) Called(string, string, time.Duration, error) {}
func (noObserver) Refused(string, error)                       {}
func (noObserver) Registered(string, error)                    {}

// Options are what a Server is made of.
type Options struct {
	// Name is the driver's, a domain: "gpus.example.com". Required.
	Name string
	// Driver answers. Required.
	Driver Driver
	// Dir is the kubelet's registry directory. Default: DefaultDir.
	Dir string
	// Registered, if set, is called whenever the kubelet has registered the driver. It
	// must not block.
	Registered func()
	// Changed, if set, is called when Status may be another one. It must not block.
	Changed func()
	// Watch is how changes of Dir are noticed. Default: socket.Inotify. Where it fails,
	// Dir is looked at once a second.
	Watch socket.Watch
	// Logger gets messages with the key "driver". Default: slog.Default().
	Logger *slog.Logger
	// Observer is optional.
	Observer Observer
}

const (
	// Patience is how long a Prepare may take: the kubelet waits for 45 s, and what
	// went wrong has to reach it.
	Patience = 40 * time.Second
	// lookEvery is how often the socket's file is looked at in spite of a watch, since
	// events can be lost; pollEvery is how often without one, or without a socket.
	lookEvery = 30 * time.Second
	pollEvery = time.Second
	// stopTimeout is what calls in progress get at the end.
	stopTimeout = 2 * time.Second
)

// Server serves one driver at one socket.
type Server struct {
	opts Options
	path string

	mu     sync.Mutex
	status Status // guarded by mu
	// accepted says that the kubelet's last word was that the driver is registered, and
	// conns is how many connections are open. Guarded by mu.
	accepted bool
	conns    int
}

// Status is what is known of the driver at the kubelet.
type Status struct {
	// Registered says that the kubelet has registered the driver, and is connected.
	Registered bool
	// Since is since when that has been so, or not been so; zero before Run.
	Since time.Time
	// Err is why it is not, where that is known.
	Err error
}

// New prepares a server; nothing happens before Run. An error says that the driver cannot
// be served at all.
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

// socketPath is where the kubelet looks for a driver.
func socketPath(dir, name string) string { return filepath.Join(dir, name+"-reg.sock") }

// RemoveSocket removes the socket that a killed process has left for a driver in the
// kubelet's registry directory. It removes none that somebody
// listens on; the error then says so.
func RemoveSocket(dir, name string) error {
	err := socket.RemoveLeft(socketPath(dir, name))
	if errors.Is(err, socket.ErrServed) {
		err = fmt.Errorf("%w and serves the DRA driver %s; end it first", err, name)
	}
	return err
}

// domain reports whether a driver may have this name: a DNS subdomain of at most 63
// characters.
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

// Run serves the driver until ctx ends, and returns nil then, with no socket left.
// Everything that can pass is tried again and logged.
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
			s.opts.Logger.Warn("remove socket", "driver", s.opts.Name, "err", err)
		}
	}()
	said := brief.NewRation(s.opts.Logger, time.Now, time.AfterFunc)
	watch := watcher{s: s}
	for {
		told, wait := watch.begin(ctx)
		fresh, err := socket.Keep(sock, s.path, "."+s.opts.Name)
		switch {
		case err != nil:
			said.Log(slog.LevelWarn, "cannot be called by the kubelet; trying again",
				[]any{"driver", s.opts.Name}, "err", err)
			s.set(func(s *Server) { s.status.Err = err })
			wait = pollEvery
		case fresh != sock:
			if sock != nil {
				s.opts.Logger.Info("socket is gone: listen again", "driver", s.opts.Name, "socket", s.path)
				_ = sock.Close() // Its file is gone already.
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

// watcher watches the directory, as long as it can be watched.
type watcher struct {
	s    *Server
	told <-chan struct{}
	over bool
	said bool
}

// begin returns what tells of changes, nil where nothing does, and when to look anyway.
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
		w.s.opts.Logger.Warn("watch the kubelet's directory; look at it every second instead",
			"dir", w.s.opts.Dir, "err", err)
	}
	return nil, pollEvery
}

// Status says how the driver fares.
func (s *Server) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status
}

// set changes what the status follows from, and tells where that is another one.
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
