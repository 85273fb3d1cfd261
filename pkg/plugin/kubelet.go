// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"example.com/gpu-agent/internal/socket"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// kubeletSocket is the name of the kubelet's registration socket in the
// device-plugin directory.
var kubeletSocket = filepath.Base(api.KubeletSocket)

// DefaultDir is the kubelet's device-plugin directory. It is compiled into the kubelet, and does
// not depend on --root-dir. Some distributions move it.
var DefaultDir = filepath.Clean(api.DevicePluginPath)

// KubeletOptions are the options of a Kubelet.
type KubeletOptions struct {
	// Dir is the kubelet's device-plugin directory. Default: DefaultDir. The agent and the kubelet
	// must both see it under a path short enough for a socket's address.
	Dir string
	// Logger gets messages with the key "resource". Default: slog.Default().
	Logger *slog.Logger
	// Observer gets the metrics of all resources. Optional.
	Observer Observer
	// Looked is called after each look at Dir, when something in it may have changed. The kubelet's
	// checkpoint is there too. Optional; it must not block.
	Looked func()
	// Changed is called when the result of Status may have changed. Optional; it must not block.
	Changed func()
	// Sent is called after the kubelet has been sent a list of a resource's devices. healthy counts
	// the healthy ones. Optional; it must not block.
	Sent func(resource string, healthy int)
	// Watch reports changes of Dir. Default: socket.Inotify. If it fails, Dir is looked at once a
	// second, and Watch is tried again every 30 seconds.
	Watch socket.Watch
}

// Kubelet is the kubelet's device-plugin directory, watched once for all
// resources, and the set of resources that is served in it.
type Kubelet struct {
	directory
	// every is how often Dir is looked at in addition to the watch, since events can be lost. poll
	// is how often without a watch.
	every, poll time.Duration
	// want has the resources to serve.
	want cell[map[string]Source]

	mu     sync.Mutex
	served map[string]*serving // guarded by mu
}

// directory is what all plugins of a directory share.
type directory struct {
	opts KubeletOptions
	// answer is how long the kubelet may take to answer a registration.
	answer time.Duration
	// suspectEvery is how old a registration must be before Suspect counts. A kubelet that is still
	// starting names no resource yet. Each needless registration leaves it with one more stream.
	suspectEvery time.Duration
	// stood is streamStood; tests shorten it.
	stood time.Duration

	// sock is the kubelet's socket at the last look. It is set again at every look, which wakes the
	// plugins to check their own sockets.
	sock cell[sockID]
	// withheld is true if no resource may be registered.
	withheld cell[bool]
}

// serving is a resource that is being served.
type serving struct {
	plugin interface {
		Status() Status
		suspect(now time.Time)
	}
	cancel context.CancelFunc
	done   chan struct{}
}

// sockID identifies the kubelet's socket; zero is no socket. It has the time of the last change,
// since the file system may reuse an inode number.
type sockID struct {
	dev, ino uint64
	mtime    syscall.Timespec
}

// NewKubelet returns a Kubelet. It does nothing before Run.
func NewKubelet(o KubeletOptions) *Kubelet {
	if o.Dir == "" {
		o.Dir = DefaultDir
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Watch == nil {
		o.Watch = socket.Inotify
	}
	if o.Observer == nil {
		o.Observer = noObserver{}
	}
	if o.Looked == nil {
		o.Looked = func() {}
	}
	if o.Sent == nil {
		o.Sent = func(string, int) {}
	}
	if o.Changed == nil {
		o.Changed = func() {}
	}
	return &Kubelet{
		directory: directory{opts: o, answer: registerTimeout, suspectEvery: 30 * time.Second, stood: streamStood},
		every:     30 * time.Second, poll: time.Second, served: map[string]*serving{},
	}
}

// Set sets the resources to serve, by name, from now on or from the start of Run. New resources
// start and missing ones end. The kubelet then counts the devices of a missing one as unhealthy,
// and forgets it after five minutes. A resource that stays keeps its old Source. Set may be called
// again; nil serves nothing. If a resource cannot be served here, Set fails and changes nothing.
func (k *Kubelet) Set(want map[string]Source) error {
	paths := map[string]string{}
	for _, r := range slices.Sorted(maps.Keys(want)) {
		path, err := socketPath(k.opts.Dir, r)
		if err != nil {
			return err
		}
		if other, ok := paths[path]; ok {
			return fmt.Errorf("resources %s and %s would share the socket %s", other, r, path)
		}
		paths[path] = r
	}
	k.want.set(maps.Clone(want))
	return nil
}

// Status returns the state of each resource given to Set, sorted by name. A resource that Run does
// not serve yet counts as not registered.
func (k *Kubelet) Status() []Status {
	want, _ := k.want.get()
	k.mu.Lock()
	defer k.mu.Unlock()
	var all []Status
	for _, r := range slices.Sorted(maps.Keys(want)) {
		st := Status{Resource: r}
		if s := k.served[r]; s != nil {
			st = s.plugin.Status()
		}
		all = append(all, st)
	}
	return all
}

// streamless returns the reason for a missing stream of lists.
func (c *directory) streamless() error {
	path := filepath.Join(c.opts.Dir, kubeletSocket)
	if sock, _ := c.sock.get(); sock == (sockID{}) {
		return fmt.Errorf("there is no kubelet at %s", path)
	}
	return fmt.Errorf("the kubelet at %s has no stream of lists open", path)
}

// Suspect reports that the kubelet does not seem to know a served resource: its
// GetAllocatableResources names none of the devices, although it has been running for a while. A
// stream may be open all the same, since any process that reaches the socket can open one.
//
// The resource is registered again. Suspect does nothing if the last registration is less than 30
// seconds old, if the resource has no healthy device, since the kubelet names only those with one,
// or if it is not served. So Suspect may be called at every look.
func (k *Kubelet) Suspect(resource string) {
	k.mu.Lock()
	s := k.served[resource]
	k.mu.Unlock()
	if s != nil {
		s.plugin.suspect(time.Now())
	}
}

// Withhold ends all streams of lists if on is true, so that the kubelet counts all devices as
// unhealthy. If on is false, the resources are registered again. Withhold returns at once.
//
// To the kubelet this looks like the end of the plugin. It changes nothing for pods with devices,
// and their status does not show a device as unhealthy, as it would after a list. Withhold does not
// send an empty list, since that would crash a kubelet that is just allocating a device.
func (k *Kubelet) Withhold(on bool) { k.withheld.set(on) }

// Run watches the directory and serves the resources given to Set, until ctx ends. It then removes
// its sockets and returns nil.
func (k *Kubelet) Run(ctx context.Context) error {
	var watching sync.WaitGroup
	defer watching.Wait()
	watching.Go(func() { k.watch(ctx) })
	defer k.serve(ctx, nil)
	for {
		want, changed := k.want.get()
		k.serve(ctx, want)
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}

// serve starts and ends plugins until exactly want is served. It waits for those that end, so that
// a resource that comes back finds its socket free.
func (k *Kubelet) serve(ctx context.Context, want map[string]Source) {
	var ending []*serving
	k.mu.Lock()
	for r, s := range k.served {
		if _, ok := want[r]; !ok {
			s.cancel()
			ending = append(ending, s)
			delete(k.served, r)
		}
	}
	k.mu.Unlock()
	for _, s := range ending {
		<-s.done
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for r, source := range want {
		if _, ok := k.served[r]; ok {
			continue
		}
		p := &Plugin{kubelet: &k.directory, resource: r, source: source}
		ctx, cancel := context.WithCancel(ctx)
		s := &serving{plugin: p, cancel: cancel, done: make(chan struct{})}
		k.served[r] = s
		go func() {
			defer close(s.done)
			defer cancel()
			if err := p.Run(ctx); err != nil { // Set has checked this.
				k.opts.Logger.Error("serve resource", "resource", r, "err", err)
			}
		}()
	}
}

// watch looks at the directory whenever something in it may have changed.
func (k *Kubelet) watch(ctx context.Context) {
	said := false
	for ctx.Err() == nil {
		of, done := context.WithCancel(ctx)
		dir := k.identify(k.opts.Dir)
		told, err := k.opts.Watch(of, k.opts.Dir)
		interval := k.every
		if err != nil {
			interval = k.poll
			if !said {
				said = true
				k.opts.Logger.Warn("cannot watch the kubelet's directory; looking at it every second instead",
					"dir", k.opts.Dir, "err", err)
			}
		} else {
			said = false
		}
		k.lookOn(of, told, interval, dir)
		done()
	}
}

// lookOn looks at the directory until ctx ends, the watch ends, another directory is at the path,
// or, without a watch, it is time to try the watch again.
func (k *Kubelet) lookOn(ctx context.Context, told <-chan struct{}, interval time.Duration, dir sockID) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	retry := time.After(k.every)
	for {
		k.look()
		select {
		case <-ctx.Done():
			return
		case _, ok := <-told:
			if !ok {
				// The directory is gone. It may be created again in a moment.
				k.look()
				select {
				case <-ctx.Done():
				case <-time.After(k.poll):
				}
				return
			}
		case <-tick.C:
			if now := k.identify(k.opts.Dir); now.dev != dir.dev || now.ino != dir.ino {
				return
			}
		case <-retry:
			if told == nil {
				return
			}
		}
	}
}

func (k *Kubelet) look() {
	id := k.identify(filepath.Join(k.opts.Dir, kubeletSocket))
	k.sock.set(id)
	k.opts.Looked()
}

// identify returns the sockID of a file; zero if the file cannot be read.
func (k *Kubelet) identify(path string) sockID {
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		return sockID{}
	}
	return sockID{dev: uint64(st.Dev), ino: st.Ino, mtime: st.Mtim}
}

// register registers a resource and its socket with the kubelet. The kubelet dials the socket
// before it answers.
func (c *directory) register(ctx context.Context, resource, endpoint string, o *api.DevicePluginOptions) error {
	ctx, cancel := context.WithTimeout(ctx, c.answer)
	defer cancel()
	path := filepath.Join(c.opts.Dir, kubeletSocket)
	conn, err := grpc.NewClient("passthrough:///kubelet",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", path)
		}))
	if err != nil {
		return fmt.Errorf("register with the kubelet at %s: %w", path, err)
	}
	defer conn.Close()
	_, err = api.NewRegistrationClient(conn).Register(ctx, &api.RegisterRequest{
		Version:      api.Version,
		Endpoint:     endpoint,
		ResourceName: resource,
		Options:      o,
	})
	if err != nil {
		return fmt.Errorf("register with the kubelet at %s: %w", path, err)
	}
	return nil
}
