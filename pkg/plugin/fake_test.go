// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"example.com/gpu-agent/tests/fakes"
)

// giveUp is how long a test waits for something that must come.
const giveUp = 30 * time.Second

// kubelet is one over the directory of a test.
type kubelet struct{ *fakes.Kubelet }

// seen is what a kubelet knows, by resource.
type seen map[string]fakes.Endpoint

func (s seen) connected(resource string) bool {
	return s[resource].Registrations > 0 && s[resource].Gone == nil
}

// startKubelet starts one whose plugins are in dir.
func startKubelet(t testing.TB, dir string, with ...func(*fakes.KubeletOptions)) *kubelet {
	t.Helper()
	o := fakes.KubeletOptions{Dir: filepath.Dir(dir)}
	for _, f := range with {
		f(&o)
	}
	k, err := fakes.StartKubelet(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Stop)
	return &kubelet{k}
}

// refuse makes registrations fail, or with nil succeed again.
func (k *kubelet) refuse(err error) {
	k.Answer("Register", func(context.Context, any) (any, error) { return nil, err })
}

// hang leaves registrations of a resource without an answer.
func hang(resource string) func(*fakes.Kubelet) {
	return func(k *fakes.Kubelet) {
		k.Answer("Register", func(ctx context.Context, r any) (any, error) {
			if r.(*api.RegisterRequest).ResourceName != resource {
				return nil, nil
			}
			<-ctx.Done()
			return nil, ctx.Err()
		})
	}
}

// seen is what it knows now.
func (k *kubelet) seen() seen {
	all, _ := k.Endpoints()
	return all
}

// stream is a ListAndWatch stream of somebody who is not the kubelet.
type stream struct {
	api.DevicePlugin_ListAndWatchClient
}

func openStream(t testing.TB, path string) *stream {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), giveUp)
	t.Cleanup(cancel)
	c, err := fakes.Dial(ctx, path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	s, err := api.NewDevicePluginClient(c).ListAndWatch(ctx, &api.Empty{})
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

// client is that of a resource, to call it as the kubelet does.
func (k *kubelet) client(t testing.TB, resource string) api.DevicePluginClient {
	t.Helper()
	return k.await(t, resource+" connected", func(s seen) bool { return s.connected(resource) })[resource].Client
}

func (k *kubelet) await(t testing.TB, what string, is func(seen) bool) (now seen) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), giveUp)
	defer cancel()
	if err := k.Await(ctx, func(all map[string]fakes.Endpoint) error {
		if now = all; !is(now) {
			return errors.New(what)
		}
		return nil
	}); err != nil {
		t.Fatalf("still waiting for: %s; last seen: %+v", what, now)
	}
	return now
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

// pluginDir is a directory for plugins below one for a kubelet.
func pluginDir(t testing.TB) string {
	t.Helper()
	dir := filepath.Join(tempDir(t), "device-plugins")
	if err := os.Mkdir(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	return dir
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

// sockets is the names of the files in a directory, the kubelet's left out.
func sockets(t testing.TB, dir string) []string {
	t.Helper()
	var names []string
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Name() != kubeletSocket && strings.TrimPrefix(e.Name(), ".") != "kubelet_internal_checkpoint" {
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
