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

// DefaultDir is the kubelet's device-plugin directory, which is compiled into
// it whatever its --root-dir says. Some distributions move it.
var DefaultDir = filepath.Clean(api.DevicePluginPath)

// KubeletOptions are what a Kubelet is made of.
type KubeletOptions struct {
	// Dir is the kubelet's device-plugin directory. Default: DefaultDir. Both
	// sides must see it under paths short enough for a socket's address.
	Dir string
	// Logger gets messages with the key "resource". Default: slog.Default().
	Logger *slog.Logger
	// Observer is optional; it is that of all resources.
	Observer Observer
	// Looked is called after each look at Dir, when something may have changed in
	// it: the kubelet's checkpoint lies there too. It is optional and must not
	// block.
	Looked func()
	// Changed is called when Status may say something else than before. It is
	// optional and must not block.
	Changed func()
	// Sent is called when the kubelet has been sent a list of a resource's devices, so
	// many of them healthy. It is optional and must not block.
	Sent func(resource string, healthy int)
	// Watch is how changes of Dir are noticed. Default: socket.Inotify. Where it fails,
	// Dir is looked at once a second, and Watch is tried again now and then.
	Watch socket.Watch
}

// Kubelet is the kubelet's device-plugin directory, watched once for all
// resources, and the set of resources that is served in it.
type Kubelet struct {
	counter
	// every is how often Dir is looked at in spite of a watch, since events can
	// be lost; poll is how often without one.
	every, poll time.Duration
	// want is the resources to be served.
	want cell[map[string]Source]

	mu     sync.Mutex
	served map[string]*serving // guarded by mu
}

// counter is where plugins meet the kubelet: what they all have of its directory.
type counter struct {
	opts KubeletOptions
	// answer is how long the kubelet may take to answer a registration.
	answer time.Duration
	// suspectEvery is how old a registration must be for a suspicion to count: a
	// kubelet that is still starting names nothing yet, and each registration
	// that it did not need leaves it with one more stream.
	suspectEvery time.Duration
	// stood is streamStood.
	stood time.Duration

	// sock is the kubelet's socket when it was last looked for. It is set again
	// at every look, which wakes the plugins to look for their own.
	sock cell[sockID]
	// withheld says that no resource is to be registered.
	withheld cell[bool]
}

// serving is a resource that is served.
type serving struct {
	plugin interface {
		Status() Status
		suspect(now time.Time)
	}
	cancel context.CancelFunc
	done   chan struct{}
}

// sockID tells one kubelet's socket from the next one's; zero is no socket. A
// file number alone may be given again.
type sockID struct {
	dev, ino uint64
	mtime    syscall.Timespec
}

// NewKubelet makes a Kubelet; nothing happens before Run.
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
		counter: counter{opts: o, answer: registerTimeout, suspectEvery: 30 * time.Second, stood: streamStood},
		every:   30 * time.Second, poll: time.Second, served: map[string]*serving{},
	}
}

// Set makes want the resources that are served, by name, from now on or from
// Run on. What is new starts, what is missing ends: the kubelet then counts its
// devices as unhealthy, and forgets the resource after five minutes. A resource
// that stays keeps the Source that it has. Set may be repeated; nil serves
// nothing. An error names resources that cannot be served here; then nothing
// changes.
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

// Status says how the resources fare that Set has named, by name: also those that Run has
// not begun to serve, which are not registered.
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

// streamless says why there may be no stream of lists.
func (c *counter) streamless() error {
	path := filepath.Join(c.opts.Dir, kubeletSocket)
	if sock, _ := c.sock.get(); sock == (sockID{}) {
		return fmt.Errorf("there is no kubelet at %s", path)
	}
	return fmt.Errorf("the kubelet at %s has no stream of lists open", path)
}

// Suspect reports that the kubelet does not seem to know a resource that is served: its
// PodResources GetAllocatableResources names none of the devices, though it has been running
// for a while. A stream of lists may
// be open all the same, since any process that reaches the socket can open one. The
// resource is registered again, unless it was less than 30 seconds ago, or has
// no healthy device: of such a resource the kubelet names none. So Suspect may
// be called at every look. A resource that is not served is ignored.
func (k *Kubelet) Suspect(resource string) {
	k.mu.Lock()
	s := k.served[resource]
	k.mu.Unlock()
	if s != nil {
		s.plugin.suspect(time.Now())
	}
}

// Withhold ends all streams of lists, so that the kubelet counts all devices as unhealthy, or
// registers the resources anew. It returns at once. That is how a plugin's end looks: it
// changes nothing for those who have devices, of which none is said to be unhealthy in the
// status of its pod, as by a list. A list without devices would end a kubelet that allocates
// one of them just then.
func (k *Kubelet) Withhold(on bool) { k.withheld.set(on) }

// Run watches the directory and serves what Set says until ctx ends, and
// returns nil then, with no socket left.
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

// serve starts and ends plugins until exactly want is served. It returns when what had to
// end has ended, so that a resource that comes back finds its socket free.
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
		p := &Plugin{kubelet: &k.counter, resource: r, source: source}
		ctx, cancel := context.WithCancel(ctx)
		s := &serving{plugin: p, cancel: cancel, done: make(chan struct{})}
		k.served[r] = s
		go func() {
			defer close(s.done)
			defer cancel()
			if err := p.Run(ctx); err != nil { // Set has refused what cannot be.
				k.opts.Logger.Error("serve resource", "resource", r, "err", err)
			}
		}()
	}
}

// watch looks at the directory whenever something may have happened in it.
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
				k.opts.Logger.Warn("watch the kubelet's directory; look at it every second instead",
					"dir", k.opts.Dir, "err", err)
			}
		} else {
			said = false
		}
		k.lookOn(of, told, interval, dir)
		done()
	}
}

// lookOn looks until the watch ends, or is of a directory that is no longer the
// one at its path, or could be tried again.
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
				// The directory is gone: it may be made again in a moment.
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

// identify is zero where there is nothing, or nothing that can be looked at.
func (k *Kubelet) identify(path string) sockID {
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		return sockID{}
	}
	return sockID{dev: uint64(st.Dev), ino: st.Ino, mtime: st.Mtim}
}

// register tells the kubelet of a resource and its socket. The kubelet dials
// the socket before it answers.
func (c *counter) register(ctx context.Context, resource, endpoint string, o *api.DevicePluginOptions) error {
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
