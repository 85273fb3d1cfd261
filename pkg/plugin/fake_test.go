// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// giveUp is how long a test waits for something that must come.
const giveUp = 30 * time.Second

// kubelet behaves as kubelet 1.36.3's device manager does where plugins can
// tell: it removes all sockets of its directory when it starts, dials an
// endpoint back before it answers its registration, keeps one client a
// resource, and disconnects that one, whichever it is, when any stream of the
// resource ends.
type kubelet struct {
	api.UnsafeRegistrationServer
	dir    string
	server *grpc.Server
	socket *net.UnixListener
	// refuse makes registrations fail.
	refuse cell[error]
	// hinder runs once, inside the next registration, whose answer is its error.
	hinder cell[func(context.Context, *api.RegisterRequest) error]
	// hang is a resource whose registrations get no answer.
	hang cell[string]
	// receives bounds a message that it receives, in bytes, where it is not zero.
	receives cell[int]
	// created is when the socket's file was there.
	created time.Time

	mu      sync.Mutex
	clients map[string]*client // guarded by mu
	all     []*client          // guarded by mu; a client that was replaced stays open, as the kubelet's does
	running sync.WaitGroup
	seen    cell[seen]
}

// seen is what has happened so far, by resource.
type seen struct {
	registered map[string]int
	lists      map[string]int
	last       map[string][]*api.Device
	first      map[string]time.Time // when the first list came
	connected  map[string]bool
}

type client struct {
	conn *grpc.ClientConn
	api.DevicePluginClient
}

// startKubelet starts one. Its socket refuses connections while deaf runs.
func startKubelet(t testing.TB, dir string, deaf ...func(*kubelet)) *kubelet {
	t.Helper()
	k := &kubelet{dir: dir, clients: map[string]*client{}}
	if err := os.MkdirAll(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	names, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range names {
		if e.Type()&os.ModeSocket != 0 {
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
				t.Fatal(err)
			}
		}
	}
	if err := k.listen(deaf...); err != nil {
		t.Fatal(err)
	}
	k.server = grpc.NewServer()
	api.RegisterRegistrationServer(k.server, k)
	k.running.Go(func() { _ = k.server.Serve(k.socket) })
	t.Cleanup(k.stop)
	return k
}

// listen does in two steps what net.Listen does in two steps too close to each
// other for a test.
func (k *kubelet) listen(deaf ...func(*kubelet)) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), kubeletSocket)
	defer f.Close()
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: filepath.Join(k.dir, kubeletSocket)}); err != nil {
		return err
	}
	k.created = time.Now()
	for _, f := range deaf {
		f(k)
	}
	if err := unix.Listen(fd, 128); err != nil {
		return err
	}
	l, err := net.FileListener(f)
	if err != nil {
		return err
	}
	k.socket = l.(*net.UnixListener)
	k.socket.SetUnlinkOnClose(true)
	return nil
}

// stop ends the kubelet with all its connections.
func (k *kubelet) stop() {
	k.server.Stop()
	k.mu.Lock()
	for _, c := range k.all {
		_ = c.conn.Close()
	}
	k.mu.Unlock()
	k.running.Wait()
}

// kill ends the kubelet as kill -9 does: its socket's file stays.
func (k *kubelet) kill() {
	k.socket.SetUnlinkOnClose(false)
	k.stop()
}

func (k *kubelet) note(f func(*seen)) {
	k.seen.update(func(s seen) seen {
		n := seen{copied(s.registered), copied(s.lists), copied(s.last), copied(s.first), copied(s.connected)}
		f(&n)
		return n
	})
}

func copied[V any](m map[string]V) map[string]V {
	n := map[string]V{}
	maps.Copy(n, m)
	return n
}

func (k *kubelet) Register(ctx context.Context, r *api.RegisterRequest) (*api.Empty, error) {
	if err, _ := k.refuse.get(); err != nil {
		return nil, err
	}
	if hang, _ := k.hang.get(); hang == r.ResourceName {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	var hinder func(context.Context, *api.RegisterRequest) error
	k.hinder.update(func(f func(context.Context, *api.RegisterRequest) error) func(context.Context, *api.RegisterRequest) error {
		hinder = f
		return nil
	})
	if hinder != nil {
		return nil, hinder(ctx, r)
	}
	if r.Version != api.Version {
		return nil, fmt.Errorf("version %q", r.Version)
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var most []grpc.CallOption
	if n, _ := k.receives.get(); n > 0 {
		most = append(most, grpc.MaxCallRecvMsgSize(n))
	}
	c, err := dialPlugin(ctx, filepath.Join(k.dir, r.Endpoint), most...)
	if err != nil {
		return nil, fmt.Errorf("failed to dial device plugin: %w", err)
	}
	opts, err := c.GetDevicePluginOptions(ctx, &api.Empty{})
	if err != nil || !opts.PreStartRequired || !opts.GetPreferredAllocationAvailable {
		_ = c.conn.Close()
		return nil, fmt.Errorf("failed to get device plugin options: %v %w", opts, err)
	}
	k.mu.Lock()
	k.clients[r.ResourceName] = c
	k.all = append(k.all, c)
	k.mu.Unlock()
	k.note(func(s *seen) { s.registered[r.ResourceName]++; s.connected[r.ResourceName] = true })
	k.running.Go(func() { k.run(r.ResourceName, c) })
	return &api.Empty{}, nil
}

func dialPlugin(ctx context.Context, path string, o ...grpc.CallOption) (*client, error) {
	//lint:ignore SA1019 the kubelet dials so
	conn, err := grpc.DialContext(ctx, path, grpc.WithAuthority("localhost"), grpc.WithDefaultCallOptions(o...), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithBlock(),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", addr)
		}))
	if err != nil {
		return nil, err
	}
	return &client{conn, api.NewDevicePluginClient(conn)}, nil
}

// stream is a ListAndWatch stream of somebody who is not the kubelet.
type stream struct {
	api.DevicePlugin_ListAndWatchClient
}

func openStream(t testing.TB, path string) *stream {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), giveUp)
	t.Cleanup(cancel)
	c, err := dialPlugin(ctx, path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.conn.Close() })
	s, err := c.ListAndWatch(ctx, &api.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	return &stream{s}
}

func (s *stream) recv(t testing.TB) []*api.Device {
	t.Helper()
	resp, err := s.Recv()
	if err != nil {
		t.Fatal(err)
	}
	return resp.Devices
}

// next wants the next list to be of that shape.
func (s *stream) next(t testing.TB, want string) {
	t.Helper()
	if got := shape(s.recv(t)); got != want {
		t.Fatalf("got list %q, want %q", got, want)
	}
}

func (k *kubelet) run(resource string, c *client) {
	stream, err := c.ListAndWatch(context.Background(), &api.Empty{})
	for err == nil {
		var resp *api.ListAndWatchResponse
		if resp, err = stream.Recv(); err == nil {
			now := time.Now()
			k.note(func(s *seen) {
				if s.lists[resource]++; s.lists[resource] == 1 {
					s.first[resource] = now
				}
				s.last[resource] = resp.Devices
			})
		}
	}
	k.mu.Lock()
	now := k.clients[resource]
	delete(k.clients, resource)
	k.mu.Unlock()
	if now != nil {
		_ = now.conn.Close()
		k.note(func(s *seen) { s.connected[resource] = false })
	}
}

// client is that of a resource, to call it as the kubelet does.
func (k *kubelet) client(t testing.TB, resource string) *client {
	t.Helper()
	k.await(t, resource+" connected", func(s seen) bool { return s.connected[resource] })
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.clients[resource]
}

func (k *kubelet) await(t testing.TB, what string, is func(seen) bool) seen {
	t.Helper()
	return await(t, what, &k.seen, is)
}

// await waits until a cell's value is as wanted.
func await[T any](t testing.TB, what string, c *cell[T], is func(T) bool) T {
	t.Helper()
	late := time.After(giveUp)
	for {
		v, changed := c.get()
		if is(v) {
			return v
		}
		select {
		case <-changed:
		case <-late:
			t.Fatalf("still waiting for: %s; last seen: %+v", what, v)
		}
	}
}

// eventually waits for what nobody announces.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	late := time.After(giveUp)
	for !is() {
		select {
		case <-time.After(time.Millisecond):
		case <-late:
			t.Fatalf("still waiting for: %s", what)
		}
	}
}

// source is a Source with a list that tests set.
type source struct {
	list     cell[[]Device]
	prefer   func(available, must []string, n int) ([]string, error)
	allocate func(ids []string) (Grant, error)
	prepare  func(ctx context.Context, ids []string) error
}

func (s *source) List() ([]Device, <-chan struct{}) { return s.list.get() }
func (s *source) Prefer(available, must []string, n int) ([]string, error) {
	return s.prefer(available, must, n)
}
func (s *source) Allocate(ids []string) (Grant, error) { return s.allocate(ids) }
func (s *source) Prepare(ctx context.Context, ids []string) error {
	return s.prepare(ctx, ids)
}

func sourceOf(devices ...Device) *source {
	s := &source{}
	s.list.set(append([]Device{}, devices...))
	return s
}

func devices(n int) []Device {
	ds := make([]Device, n)
	for i := range ds {
		ds[i] = Device{ID: fmt.Sprintf("GPU-5a2f0c11-9a3e-4f57-8d57-2f7d5b1c9e01::%d", i), Healthy: true}
	}
	return ds
}

// shape is a list in short: "a b !c" with c unhealthy.
func shape(ds []*api.Device) string {
	var b strings.Builder
	for i, d := range ds {
		if i > 0 {
			b.WriteByte(' ')
		}
		if d.Health != api.Healthy {
			b.WriteByte('!')
		}
		b.WriteString(d.ID)
	}
	return b.String()
}

// tempDir is a directory whose path is short enough for sockets.
func tempDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "dp")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// logs collects what is logged, and shows it when the test fails.
type logs struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func logger(t testing.TB) (*slog.Logger, *logs) {
	l := &logs{}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log:\n%s", l)
		}
	})
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug})), l
}

// agent is our side: a Kubelet that runs until the test ends.
type agent struct {
	*Kubelet
	cancel context.CancelFunc
	done   chan struct{}
	log    *logs
}

func startAgent(t testing.TB, dir string, want map[string]Source, with ...func(*Kubelet)) *agent {
	t.Helper()
	log, text := logger(t)
	k := NewKubelet(KubeletOptions{Dir: dir, Logger: log})
	for _, f := range with {
		f(k)
	}
	if err := k.Set(want); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	a := &agent{Kubelet: k, cancel: cancel, done: make(chan struct{}), log: text}
	go func() {
		defer close(a.done)
		if err := k.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	}()
	t.Cleanup(a.stop)
	return a
}

func (a *agent) stop() {
	a.cancel()
	<-a.done
}

// sockets is the names of the sockets in a directory, the kubelet's left out.
func sockets(t testing.TB, dir string) []string {
	t.Helper()
	var names []string
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() != kubeletSocket {
			names = append(names, e.Name())
		}
	}
	return names
}

// leakCheck fails the test if it leaves a goroutine or a descriptor behind.
func leakCheck(t *testing.T) {
	t.Helper()
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	t.Cleanup(func() {
		late := time.Now().Add(giveUp)
		for runtime.NumGoroutine() > goroutines || len(openFiles(t)) > len(files) {
			if time.Now().After(late) {
				stacks := make([]byte, 1<<20)
				stacks = stacks[:runtime.Stack(stacks, true)]
				t.Fatalf("left behind: %d goroutines and %d descriptors, of %d and %d before:\n%s\n%s",
					runtime.NumGoroutine(), len(openFiles(t)), goroutines, len(files), strings.Join(openFiles(t), "\n"), stacks)
			}
			time.Sleep(time.Millisecond)
		}
	})
}

func openFiles(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skipf("skipped: descriptors cannot be counted: %v", err)
	}
	var open []string
	for _, e := range entries {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil {
			open = append(open, to)
		}
	}
	slices.Sort(open)
	return open
}
