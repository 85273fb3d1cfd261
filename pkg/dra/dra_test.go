// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"example.com/gpu-agent/internal/socket"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	health "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	api "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

const name = "gpus.example.com"

// scripted is a driver that does what a test says.
type scripted struct {
	prepare   func(context.Context, Claim) ([]Device, error)
	unprepare func(context.Context, Claim) error

	mu      sync.Mutex
	health  []Health
	changed chan struct{}
}

func (d *scripted) Prepare(ctx context.Context, c Claim) ([]Device, error) { return d.prepare(ctx, c) }
func (d *scripted) Unprepare(ctx context.Context, c Claim) error           { return d.unprepare(ctx, c) }

func (d *scripted) Health() ([]Health, <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.changed == nil {
		d.changed = make(chan struct{})
	}
	return d.health, d.changed
}

func (d *scripted) setHealth(list ...Health) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.health = list
	if d.changed != nil {
		close(d.changed)
		d.changed = nil
	}
}

// running is a server that runs until its test, or end, ends it.
type running struct {
	*Server
	registered chan struct{}
	end        func()
}

func run(t *testing.T, dir string, d *scripted) *running {
	t.Helper()
	r := &running{registered: make(chan struct{}, 9)}
	s, err := New(Options{Name: name, Driver: d, Dir: dir, Logger: slog.New(slog.DiscardHandler), Registered: func() { r.registered <- struct{}{} }})
	if err != nil {
		t.Fatal(err)
	}
	r.Server = s
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	r.end = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("the run ended with %v", err)
		}
	})
	t.Cleanup(r.end)
	eventually(t, "a socket", func() bool { _, err := os.Lstat(s.path); return err == nil })
	return r
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for begun := time.Now(); !ok(); time.Sleep(time.Millisecond) {
		if time.Since(begun) > 20*time.Second {
			t.Fatalf("never: %s", what)
		}
	}
}

// dial connects as the kubelet does.
func dial(t *testing.T, path string) *grpc.ClientConn {
	t.Helper()
	c, err := grpc.NewClient("passthrough:///driver", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// register does what the kubelet does with a socket in its registry directory.
func register(t *testing.T, path string, answer *registration.RegistrationStatus) *registration.PluginInfo {
	t.Helper()
	c := dial(t, path)
	defer c.Close()
	client := registration.NewRegistrationClient(c)
	info, err := client.GetInfo(t.Context(), &registration.InfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.NotifyRegistrationStatus(t.Context(), answer); err != nil {
		t.Fatal(err)
	}
	return info
}

var accepted = &registration.RegistrationStatus{PluginRegistered: true}

// The kubelet is told all that it needs, each kubelet anew, and the driver counts as
// registered for as long as that one is connected.
func TestRegistration(t *testing.T) {
	s := run(t, t.TempDir(), &scripted{})
	if st := s.Status(); st.Registered || st.Since.IsZero() {
		t.Errorf("before: %+v", st)
	}
	for range 2 {
		connected := dial(t, s.path)
		connected.Connect()
		info := register(t, s.path, accepted)
		if info.Type != registration.DRAPlugin || info.Name != name || info.Endpoint != "" || !slices.Equal(info.SupportedVersions, []string{"v1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"}) {
			t.Errorf("the kubelet is told %+v", info)
		}
		<-s.registered
		eventually(t, "registered", func() bool { return s.Status().Registered })
		_ = connected.Close()
		eventually(t, "not registered", func() bool { return !s.Status().Registered })
	}
}

func TestRefusedRegistration(t *testing.T) {
	s := run(t, t.TempDir(), &scripted{})
	register(t, s.path, &registration.RegistrationStatus{Error: "none of the services"})
	if st := s.Status(); st.Registered || st.Err == nil || !strings.Contains(st.Err.Error(), "none of the services") {
		t.Errorf("%+v", st)
	}
	if len(s.registered) > 0 {
		t.Error("the slices would be written")
	}
	register(t, s.path, accepted)
	if st := s.Status(); st.Err != nil {
		t.Errorf("accepted: %+v", st)
	}
}

// The claims of a call are prepared at once, each has its own answer, and a share is told
// by its ID.
func TestClaimsOfOneCall(t *testing.T) {
	var all sync.WaitGroup
	all.Add(3)
	d := &scripted{prepare: func(ctx context.Context, c Claim) ([]Device, error) {
		all.Done()
		all.Wait() // for ever, if one waited for another
		if c.Name == "bad" {
			return nil, errors.New("GPU 3 has fallen off the bus")
		}
		return []Device{{Requests: []string{"r"}, Pool: "n/a100", Name: "gpu-1", Share: c.UID[:1], CDI: []string{"example.com/gpu=" + c.UID}}, {Pool: "n/a100", Name: "gpu-2"}}, nil
	}}
	s := run(t, t.TempDir(), d)
	resp, err := api.NewDRAPluginClient(dial(t, s.path)).NodePrepareResources(t.Context(), &api.NodePrepareResourcesRequest{Claims: []*api.Claim{
		{Namespace: "ns", Name: "a", Uid: "1-uid"}, {Namespace: "ns", Name: "bad", Uid: "2-uid"}, {Namespace: "ns", Name: "b", Uid: "3-uid"}}})
	if err != nil || len(resp.Claims) != 3 {
		t.Fatalf("%v, %v", resp, err)
	}
	for uid, share := range map[string]string{"1-uid": "1", "3-uid": "3"} {
		got := resp.Claims[uid]
		if got.Error != "" || len(got.Devices) != 2 || got.Devices[0].GetShareId() != share || got.Devices[1].ShareId != nil ||
			!slices.Equal(got.Devices[0].CdiDeviceIds, []string{"example.com/gpu=" + uid}) || !slices.Equal(got.Devices[0].RequestNames, []string{"r"}) {
			t.Errorf("%s: %v", uid, got)
		}
	}
	if got := resp.Claims["2-uid"]; !strings.Contains(got.GetError(), "fallen off") || len(got.Devices) > 0 {
		t.Errorf("%v", got)
	}
}

func TestUnprepare(t *testing.T) {
	d := &scripted{unprepare: func(_ context.Context, c Claim) error {
		if c.Namespace == "bad" {
			return errors.New("its container still runs")
		}
		return nil
	}}
	s := run(t, t.TempDir(), d)
	resp, err := api.NewDRAPluginClient(dial(t, s.path)).NodeUnprepareResources(t.Context(), &api.NodeUnprepareResourcesRequest{Claims: []*api.Claim{
		{Namespace: "ns", Name: "a", Uid: "1"}, {Namespace: "bad", Name: "a", Uid: "2"}}})
	if err != nil || len(resp.Claims) != 2 || resp.Claims["1"].GetError() != "" || resp.Claims["2"].GetError() == "" {
		t.Errorf("%v, %v", resp, err)
	}
}

// A driver that waits is told to stop in time for its reason to reach the kubelet.
func TestPatience(t *testing.T) {
	left := make(chan time.Duration, 1)
	d := &scripted{prepare: func(ctx context.Context, c Claim) ([]Device, error) {
		deadline, _ := ctx.Deadline()
		left <- time.Until(deadline)
		return nil, nil
	}}
	s := run(t, t.TempDir(), d)
	client := api.NewDRAPluginClient(dial(t, s.path))
	for caller, most := range map[time.Duration]time.Duration{45 * time.Second: Patience, 10 * time.Second: 9 * time.Second, time.Hour: Patience} {
		ctx, cancel := context.WithTimeout(t.Context(), caller)
		_, err := client.NodePrepareResources(ctx, &api.NodePrepareResourcesRequest{Claims: []*api.Claim{{Uid: "1"}}})
		cancel()
		if got := <-left; err != nil || got > most || got < most/2 {
			t.Errorf("a kubelet that waits for %s leaves %s, %v; want at most %s", caller, got, err, most)
		}
	}
}

// The end of the server ends what waits, and leaves no socket.
func TestEnd(t *testing.T) {
	waits := make(chan struct{})
	d := &scripted{prepare: func(ctx context.Context, c Claim) ([]Device, error) {
		close(waits)
		<-ctx.Done()
		return nil, errors.New("the agent ends")
	}}
	dir := t.TempDir()
	s := run(t, dir, d)
	client := api.NewDRAPluginClient(dial(t, s.path))
	answer := make(chan string, 1)
	go func() {
		resp, err := client.NodePrepareResources(context.Background(), &api.NodePrepareResourcesRequest{Claims: []*api.Claim{{Uid: "1"}}})
		if err != nil {
			answer <- err.Error()
			return
		}
		answer <- resp.Claims["1"].GetError()
	}()
	<-waits
	s.end()
	if got := <-answer; got != "the agent ends" {
		t.Errorf("the kubelet is told %q", got)
	}
	if left, err := os.ReadDir(dir); len(left) > 0 || err != nil {
		t.Errorf("left: %v, %v", left, err)
	}
}

// Healths are sent whole, at each change and now and then.
func TestHealth(t *testing.T) {
	d := &scripted{}
	d.setHealth(Health{Pool: "p", Name: "gpu-1", Healthy: true}, Health{Pool: "p", Name: "gpu-2", Healthy: true})
	a := &service{Server: &Server{opts: Options{Name: name, Driver: d}}, stop: t.Context(), healthEvery: time.Hour}
	stream := &watching{ctx: t.Context(), sent: make(chan *health.NodeWatchResourcesResponse, 100)}
	ended := make(chan error, 1)
	watch := func() { go func() { ended <- a.NodeWatchResources(nil, stream) }() }
	watch()
	for _, want := range [][]Health{{{Pool: "p", Name: "gpu-1", Healthy: true}, {Pool: "p", Name: "gpu-2", Healthy: true}},
		{{Pool: "p", Name: "gpu-1", Message: "Xid 79 " + strings.Repeat("x", 2000)}}} {
		d.setHealth(want...)
		for matched := false; !matched; {
			got := <-stream.sent
			matched = slices.EqualFunc(got.Devices, want, func(h *health.DeviceHealth, w Health) bool {
				return (h.Health == health.HealthStatus_HEALTHY) == w.Healthy && h.Device.DeviceName == w.Name && h.Device.PoolName == w.Pool
			})
			for _, h := range got.Devices {
				if len(h.Message) > maxHealth || h.HealthCheckTimeoutSeconds < 60 {
					t.Errorf("%v", h)
				}
			}
		}
	}
	stream.fails.Store(true)
	d.setHealth()
	if err := <-ended; err == nil {
		t.Error("a stream that is gone is sent to")
	}
	stream = &watching{ctx: t.Context(), sent: make(chan *health.NodeWatchResourcesResponse)}
	a.healthEvery = time.Millisecond
	watch()
	for range 3 {
		<-stream.sent
	}
}

// A kubelet of 1.37 asks for healths by v1, one before it by v1alpha1.
func TestHealthIsServedByBothNames(t *testing.T) {
	d := &scripted{}
	d.setHealth(Health{Pool: "p", Name: "gpu-1", Message: "Xid 79"})
	s := run(t, t.TempDir(), d)
	info := register(t, s.path, accepted)
	asked := 0
	for _, name := range info.SupportedVersions {
		if !strings.HasSuffix(name, ".DRAResourceHealth") {
			continue
		}
		asked++
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		stream, err := dial(t, s.path).NewStream(ctx, &health.DRAResourceHealth_ServiceDesc.Streams[0], "/"+name+"/NodeWatchResources")
		if err != nil {
			t.Fatal(err)
		}
		got := &health.NodeWatchResourcesResponse{}
		if err := errors.Join(stream.SendMsg(&health.NodeWatchResourcesRequest{}), stream.CloseSend(), stream.RecvMsg(got)); err != nil {
			t.Errorf("%s: %v", name, err)
		} else if len(got.Devices) != 1 || got.Devices[0].Device.DeviceName != "gpu-1" || got.Devices[0].Health != health.HealthStatus_UNHEALTHY {
			t.Errorf("%s says %v", name, got)
		}
	}
	if asked != 2 {
		t.Errorf("the kubelet is told %q", info.SupportedVersions)
	}
}

type watching struct {
	grpc.ServerStream
	ctx  context.Context
	sent chan *health.NodeWatchResourcesResponse
	// fails says that the kubelet is gone.
	fails atomic.Bool
}

func (w *watching) Context() context.Context { return w.ctx }

func (w *watching) Send(m *health.NodeWatchResourcesResponse) error {
	select {
	case w.sent <- m:
	case <-w.ctx.Done():
		return w.ctx.Err()
	}
	if w.fails.Load() {
		return errors.New("the kubelet is gone")
	}
	return nil
}

// A socket that somebody removes is made anew, with the directory watched or not.
func TestSocketIsMadeAnew(t *testing.T) {
	dir := t.TempDir()
	s := run(t, dir, &scripted{})
	for range 3 {
		if err := os.Remove(s.path); err != nil {
			t.Fatal(err)
		}
		eventually(t, "a new socket", func() bool { _, err := os.Lstat(s.path); return err == nil })
		register(t, s.path, accepted)
		<-s.registered
	}
	s.end()

	blind, err := New(Options{Name: name, Driver: &scripted{}, Dir: filepath.Join(dir, "later"), Logger: slog.New(slog.DiscardHandler),
		Watch: func(context.Context, string) (<-chan struct{}, error) { return nil, errors.New("no inotify") }})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- blind.Run(ctx) }()
	eventually(t, "told that there is no directory", func() bool { return blind.Status().Err != nil })
	if err := os.Mkdir(filepath.Join(dir, "later"), 0o700); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a socket", func() bool { _, err := os.Lstat(blind.path); return err == nil && blind.Status().Err == nil })
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// Of two processes the newer one is found, and the older one again when that has ended.
func TestTwoProcesses(t *testing.T) {
	dir := t.TempDir()
	older := run(t, dir, &scripted{})
	newer := run(t, dir, &scripted{})
	eventually(t, "told who has the place", func() bool {
		err := older.Status().Err
		return err != nil && strings.Contains(err.Error(), "another process listens")
	})
	register(t, older.path, accepted)
	<-newer.registered
	newer.end()
	eventually(t, "the older one", func() bool { return older.Status().Err == nil })
	register(t, older.path, accepted)
	<-older.registered
}

// What a killed process has left goes, and nothing that somebody serves or another made.
func TestRemoveSocket(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, name+"-reg.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := RemoveSocket(dir, name); err == nil || !strings.Contains(err.Error(), "serves the DRA driver "+name) {
		t.Errorf("somebody serves it: %v", err)
	}
	_ = l.Close()
	for range 2 {
		if err := RemoveSocket(dir, name); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("left: %v", err)
		}
	}
}

func TestNames(t *testing.T) {
	for _, bad := range []string{"", ".", "a.", ".a", "a..b", "-a", "a-", "a-.b", "a.-b", "A", "a_b", "a/b", strings.Repeat("a", 64)} {
		if _, err := New(Options{Name: bad}); err == nil {
			t.Errorf("%q is served", bad)
		}
	}
	for _, good := range []string{"gpus.example.com", "a", "a-b.c", strings.Repeat("a", 63)} {
		if _, err := New(Options{Name: good, Dir: "/d"}); err != nil {
			t.Errorf("%q: %v", good, err)
		}
	}
	if _, err := New(Options{Name: name, Dir: "/" + strings.Repeat("d", socket.MaxPath)}); err == nil {
		t.Error("a socket whose address is too long")
	}
}
