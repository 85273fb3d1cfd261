// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// statuses is what a runtime tells of containers, by ID, and how often it was asked.
type statuses struct {
	mu    sync.Mutex
	info  map[string]string
	fails map[string]error
	asked map[string]int
}

func (s *statuses) of(server *criServer) *statuses {
	s.asked = map[string]int{}
	server.Answer("ContainerStatus", func(_ context.Context, in any) (any, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		r := in.(*cri.ContainerStatusRequest)
		s.asked[r.ContainerId]++
		if err := s.fails[r.ContainerId]; err != nil || !r.Verbose {
			return &cri.ContainerStatusResponse{}, err
		}
		return &cri.ContainerStatusResponse{Status: &cri.ContainerStatus{Id: r.ContainerId}, Info: map[string]string{"info": s.info[r.ContainerId]}}, nil
	})
	return s
}

func (s *statuses) with(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// containerdInfo is as containerd words it, as far as it matters.
func containerdInfo(devices ...string) string {
	text := `{"sandboxID": "s", "pid": 7, "config": {"metadata": {"name": "main"}, "envs": [{"key": "CDI_devices", "value": "example.com/gpu=ffffffffffffffff"}]`
	if len(devices) > 0 {
		var list []string
		for _, d := range devices {
			list = append(list, fmt.Sprintf(`{"name": %q}`, d))
		}
		text += `, "CDI_devices": [` + strings.Join(list, ", ") + "]"
	}
	return text + `}, "runtimeSpec": {"mounts": [{"destination": "/proc", "source": "/ours/eeeeeeeeeeeeeeee"}]}}`
}

func draAsker(t testing.TB, s *criServer, used func() bool) *Runtime {
	r := NewRuntime(RuntimeOptions{Endpoint: "unix://" + s.path, AnnotationPrefix: prefix, DRA: used,
		DeviceOf: func(source string) string {
			if key, ok := strings.CutPrefix(source, "/ours/"); ok {
				return "example.com/gpu=" + key
			}
			return ""
		}})
	t.Cleanup(func() { r.Close() })
	r.cdi.patience = limit
	return r
}

func always() bool { return true }

func listed(ids ...string) *cri.ListContainersResponse {
	l := &cri.ListContainersResponse{}
	for _, id := range ids {
		l.Containers = append(l.Containers, &cri.Container{Id: id, State: cri.ContainerState_CONTAINER_RUNNING})
	}
	return l
}

// cdiOf is what containers were created with; "?" is unknown.
func cdiOf(t *testing.T, r *Runtime) map[string]string {
	t.Helper()
	list, err := r.Containers(t.Context())
	must(t, err)
	out := map[string]string{}
	for _, c := range list {
		if out[c.ID] = strings.Join(c.CDI, " "); c.CDIUnknown {
			out[c.ID] += "?"
		}
	}
	return out
}

// Of a claim's container nothing but its CDI devices tells what it has.
func TestCDIDevicesAreAskedForOnce(t *testing.T) {
	server := newCRI(t, filepath.Join(t.TempDir(), "cri.sock"))
	s := (&statuses{info: map[string]string{
		"a": containerdInfo("example.com/gpu=0123456789abcdef", "vendor.io/net=x"), "b": containerdInfo(),
		"crio": `{"sandboxID": "s", "runtimeSpec": {"mounts": [{"destination": "/a", "source": "/ours/0123456789abcdef"}, {"destination": "/b", "source": "/ours/0123456789abcdef"}, {"destination": "/ours/1123456789abcdef", "source": "/tmp"}]}}`,
	}}).of(server)
	used := false
	r := draAsker(t, server, func() bool { return used })
	server.lists(listed("a", "b", "crio"))
	if got, want := cdiOf(t, r), map[string]string{"a": "", "b": "", "crio": ""}; !maps.Equal(got, want) || len(s.asked) > 0 {
		t.Errorf("without DRA: %v, and it was asked for %v", got, s.asked)
	}
	used = true
	want := map[string]string{"a": "example.com/gpu=0123456789abcdef vendor.io/net=x", "b": "", "crio": "example.com/gpu=0123456789abcdef"}
	for range 3 {
		if got := cdiOf(t, r); !maps.Equal(got, want) {
			t.Errorf("got  %v\nwant %v", got, want)
		}
	}
	if want := map[string]int{"a": 1, "b": 1, "crio": 1}; !maps.Equal(s.asked, want) {
		t.Errorf("asked for %v, want each once", s.asked)
	}
	// What has ended is forgotten.
	server.lists(listed("b"))
	cdiOf(t, r)
	if got := slices.Sorted(maps.Keys(r.cdi.by)); !slices.Equal(got, []string{"b"}) {
		t.Errorf("it remembers %v", got)
	}
}

// What containerd 2.3.7 said of the container of one of those claims.
func TestCDIDevicesByTheRealContainerd(t *testing.T) {
	text, err := os.ReadFile("testdata/info-containerd-2.3.7.json")
	must(t, err)
	r := NewRuntime(RuntimeOptions{})
	got, err := r.readInfo(map[string]string{"info": string(text)})
	if want := []string{"example.com/gpu=da0170e741bcd454"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v, want %q", got, err, want)
	}
}

// A runtime that does not tell what one container was created with keeps nobody from
// knowing the others, and is asked again.
func TestStatusThatFails(t *testing.T) {
	server := newCRI(t, filepath.Join(t.TempDir(), "cri.sock"))
	good := containerdInfo("example.com/gpu=0123456789abcdef")
	s := (&statuses{info: map[string]string{
		"a": good, "broken": "{", "empty": "{}", "other": `{"config": 7}`, "none": "", "large": `{"config": {}, "env": "` + strings.Repeat("x", maxStatus) + `"}`,
		"names": `{"config": {"CDI_devices": [{"name": 1}]}}`,
	}, fails: map[string]error{"gone": status.Error(codes.NotFound, "no such container"), "fails": status.Error(codes.Unknown, "no spec")}}).of(server)
	told := make(journal, 100)
	r := draAsker(t, server, always)
	r.o.Logger = slog.New(slog.NewTextHandler(told, nil))
	server.lists(listed("a", "broken", "empty", "fails", "gone", "large", "names", "none", "other"))
	want := map[string]string{"a": "example.com/gpu=0123456789abcdef", "broken": "?", "empty": "?", "fails": "?", "large": "?", "names": "?", "none": "?", "other": "?"}
	for range 2 {
		if got := cdiOf(t, r); !maps.Equal(got, want) {
			t.Errorf("got  %v\nwant %v", got, want)
		}
	}
	told.await(t, "cannot learn the CDI devices of a container", "container=fails", "no spec")
	if s.asked["fails"] != 2 || s.asked["a"] != 1 {
		t.Errorf("asked for %v", s.asked)
	}
	s.with(func() {
		clear(s.fails)
		for id := range s.info {
			s.info[id] = good
		}
		s.info["fails"], s.info["gone"] = containerdInfo(), containerdInfo()
	})
	if got := cdiOf(t, r); got["fails"] != "" || got["large"] != want["a"] || strings.Contains(fmt.Sprint(got), "?") {
		t.Errorf("when it tells: %v", got)
	}
}

// Many containers at once, as after a start: some for each list, those that fail last.
func TestStatusesALook(t *testing.T) {
	server := newCRI(t, filepath.Join(t.TempDir(), "cri.sock"))
	s := (&statuses{info: map[string]string{}, fails: map[string]error{}}).of(server)
	var ids []string
	for i := range 2*statusesALook - 10 {
		id := fmt.Sprintf("%04d", i)
		ids = append(ids, id)
		if s.info[id] = containerdInfo(); i < 10 {
			s.fails[id] = status.Error(codes.Unknown, "no")
		}
	}
	server.lists(listed(ids...))
	r := draAsker(t, server, always)
	for look, want := range []int{statusesALook, 2*statusesALook - 10 + 10} {
		cdiOf(t, r)
		asked := 0
		for _, n := range s.asked {
			asked += n
		}
		if asked != want {
			t.Errorf("asked %d times after look %d, want %d", asked, look+1, want)
		}
	}
	if unknown := strings.Count(fmt.Sprint(cdiOf(t, r)), "?"); unknown != 10 {
		t.Errorf("%d are not known, want the 10 that fail", unknown)
	}
}

// A runtime that hangs in one status costs a look its patience, and what was told meanwhile
// is known.
func TestStatusThatHangs(t *testing.T) {
	server := newCRI(t, filepath.Join(t.TempDir(), "cri.sock"))
	hangs := make(chan struct{})
	server.Answer("ContainerStatus", func(ctx context.Context, in any) (any, error) {
		if in.(*cri.ContainerStatusRequest).ContainerId == "hangs" {
			select {
			case <-ctx.Done():
			case <-hangs:
			}
		}
		return &cri.ContainerStatusResponse{Info: map[string]string{"info": containerdInfo()}}, ctx.Err()
	})
	server.lists(listed("a", "hangs"))
	r := draAsker(t, server, always)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { // its patience ends when the other one is known
		defer cancel()
		for ctx.Err() == nil {
			r.cdi.mu.Lock()
			c := r.cdi.by["a"]
			known := c != nil && c.known
			r.cdi.mu.Unlock()
			if known {
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	list, err := r.Containers(ctx)
	if err != nil || len(list) != 2 || list[0].CDIUnknown || !list[1].CDIUnknown {
		t.Errorf("%+v, %v, want a known and the other not", list, err)
	}
	close(hangs)
	if got := cdiOf(t, r); !maps.Equal(got, map[string]string{"a": "", "hangs": ""}) {
		t.Errorf("when it answers: %v", got)
	}
}

// Two claims are given back at once, and the first container is removed while the look for the
// second waits: that look still says what it knew and what it learns. A claim would otherwise
// be refused for a container that is gone.
func TestLooksDoNotForgetForEachOther(t *testing.T) {
	server := newCRI(t, filepath.Join(t.TempDir(), "cri.sock"))
	asked, proceed := make(chan struct{}), make(chan struct{})
	server.Answer("ContainerStatus", func(_ context.Context, in any) (any, error) {
		if in.(*cri.ContainerStatusRequest).ContainerId == "slow" {
			close(asked)
			<-proceed
		}
		return &cri.ContainerStatusResponse{Info: map[string]string{"info": containerdInfo()}}, nil
	})
	server.lists(listed("ends"))
	r := draAsker(t, server, always)
	cdiOf(t, r)
	server.lists(listed("ends", "slow"))
	var got map[string]string
	var look sync.WaitGroup
	look.Go(func() { got = cdiOf(t, r) })
	<-asked
	r.cdi.keep(nil) // as a look does that finds neither
	close(proceed)
	look.Wait()
	if want := map[string]string{"ends": "", "slow": ""}; !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestEventsTellCDIDevices(t *testing.T) {
	server := newCRI(t, filepath.Join(t.TempDir(), "cri.sock"))
	s := (&statuses{info: map[string]string{"c": containerdInfo("example.com/gpu=0123456789abcdef")}}).of(server)
	events, _ := listen(t, draAsker(t, server, always))
	next(t, events)
	want := Container{ID: "c", PodUID: "u", Namespace: "train", Pod: "job", Name: "main"}
	for _, kind := range []cri.ContainerEventType{cri.ContainerEventType_CONTAINER_CREATED_EVENT, cri.ContainerEventType_CONTAINER_STARTED_EVENT,
		cri.ContainerEventType_CONTAINER_STOPPED_EVENT, cri.ContainerEventType_CONTAINER_DELETED_EVENT} {
		server.send(&cri.ContainerEventResponse{ContainerId: "c", ContainerEventType: kind,
			ContainersStatuses: []*cri.ContainerStatus{{Id: "c", Labels: labels("u", "train", "job", "main")}}})
		want.Running = kind == cri.ContainerEventType_CONTAINER_STARTED_EVENT
		want.CDI = nil
		if want.Running || kind == cri.ContainerEventType_CONTAINER_STOPPED_EVENT {
			want.CDI = []string{"example.com/gpu=0123456789abcdef"}
		}
		if got := next(t, events); !reflect.DeepEqual(got.Container, want) {
			t.Errorf("%v: got %+v, want %+v", kind, got.Container, want)
		}
	}
	if s.asked["c"] != 1 {
		t.Errorf("asked %d times", s.asked["c"])
	}
}

func FuzzReadInfo(f *testing.F) {
	f.Add(containerdInfo("example.com/gpu=0123456789abcdef"))
	f.Add(`{"runtimeSpec": {"mounts": [{"source": "/ours/0123456789abcdef"}]}}`)
	r := NewRuntime(RuntimeOptions{DeviceOf: func(source string) string { return source }})
	f.Fuzz(func(t *testing.T, text string) {
		devices, err := r.readInfo(map[string]string{"info": text})
		if err != nil && devices != nil {
			t.Errorf("%q beside %v", devices, err)
		}
		if err == nil && !json.Valid([]byte(text)) {
			t.Errorf("%q is taken for JSON", text)
		}
	})
}
