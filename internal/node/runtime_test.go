// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/tests/fakes"
)

const prefix = "example.com/gpu-allocation."

// criServer is a runtime that says what a test wants.
type criServer struct {
	*fakes.Runtime
	t    testing.TB
	path string
}

func newCRI(t testing.TB, path string) *criServer {
	t.Helper()
	r, err := fakes.StartRuntime(path, fakes.Pod{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Stop)
	return &criServer{r, t, path}
}

func (s *criServer) start() {
	s.t.Helper()
	if err := s.Start(); err != nil {
		s.t.Fatal(err)
	}
}

// lists leaves the filter to the client, as a broken runtime might.
func (s *criServer) lists(l *cri.ListContainersResponse) {
	s.Answer("ListContainers", func(context.Context, any) (any, error) { return l, nil })
}

func (s *criServer) called(name, version string) {
	s.Answer("Version", func(context.Context, any) (any, error) {
		return &cri.VersionResponse{Version: "0.1.0", RuntimeName: name, RuntimeVersion: version, RuntimeApiVersion: "v1"}, nil
	})
}

// streams says how each stream of events begins, by number, and counts them.
func (s *criServer) streams(begin func(stream int) error) *atomic.Int32 {
	opened := new(atomic.Int32)
	s.Answer("GetContainerEvents", func(context.Context, any) (any, error) { return nil, begin(int(opened.Add(1))) })
	return opened
}

func asker(t testing.TB, s *criServer) *Runtime {
	r := NewRuntime(RuntimeOptions{Endpoint: "unix://" + s.path, AnnotationPrefix: prefix})
	t.Cleanup(func() { r.Close() })
	return r
}

func labels(uid, namespace, pod, container string) map[string]string {
	return map[string]string{labelPodUID: uid, labelPodNamespace: namespace, labelPodName: pod, labelContainerName: container}
}

// CRI-O has gRPC and HTTP on one socket, tells them apart by the first request's content type,
// and closes a connection where that is not exactly this one.
func TestRequestsAreForCRIO(t *testing.T) {
	s := newCRI(t, filepath.Join(t.TempDir(), "crio.sock"))
	var types []string
	s.Answer("ListContainers", func(ctx context.Context, _ any) (any, error) {
		types = append(types, metadata.ValueFromIncomingContext(ctx, "content-type")...)
		return &cri.ListContainersResponse{}, nil
	})
	if _, err := asker(t, s).Containers(t.Context()); err != nil {
		t.Fatal(err)
	}
	if want := []string{"application/grpc"}; !reflect.DeepEqual(types, want) {
		t.Errorf("the content type is %q, want %q", types, want)
	}
}

func TestContainers(t *testing.T) {
	s := newCRI(t, filepath.Join(t.TempDir(), "cri.sock"))
	s.lists(&cri.ListContainersResponse{Containers: []*cri.Container{
		{Id: "d", State: cri.ContainerState_CONTAINER_EXITED, Labels: labels("u", "n", "p", "ended"), Annotations: map[string]string{prefix + "01": "r"}},
		{Id: "c", State: cri.ContainerState_CONTAINER_UNKNOWN, Labels: labels("u3", "n", "p3", "unknown"),
			Annotations: map[string]string{annotationGrace: "4294967295"}},
		{Id: "b", State: cri.ContainerState_CONTAINER_CREATED, Metadata: &cri.ContainerMetadata{Name: "main", Attempt: 3}, CreatedAt: 1700000000000000001,
			Labels: labels("u2", "train", "job-2", "main"),
			Annotations: map[string]string{prefix + "02": "example.com/gpu", prefix + "03": "", "io.kubernetes.container.hash": "x", "example.com/gpu": "y",
				annotationGrace: "30"}},
		{Id: "a", State: cri.ContainerState_CONTAINER_RUNNING, Labels: labels("u1", "n", "p1", "main"), Annotations: map[string]string{"other": "z", annotationGrace: "-1"}},
		{Id: "e", State: 77, CreatedAt: -5},
		{Metadata: &cri.ContainerMetadata{Name: "by hand"}},
	}})
	want := []Container{
		{Name: "by hand"},
		{ID: "a", PodUID: "u1", Namespace: "n", Pod: "p1", Name: "main", Running: true},
		{ID: "b", PodUID: "u2", Namespace: "train", Pod: "job-2", Name: "main", Created: time.Unix(1700000000, 1), Grace: 30 * time.Second,
			Annotations: map[string]string{prefix + "02": "example.com/gpu", prefix + "03": ""}},
		{ID: "c", PodUID: "u3", Namespace: "n", Pod: "p3", Name: "unknown", Running: true, Grace: mostGrace},
		{ID: "e", Running: true},
	}
	r := asker(t, s)
	got, err := r.Containers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}

	none := NewRuntime(RuntimeOptions{Endpoint: s.path})
	defer none.Close()
	got, err = none.Containers(t.Context())
	if err != nil || len(got) != len(want) || got[2].Annotations != nil {
		t.Errorf("%+v, %v, want no annotation without a prefix", got, err)
	}

	s.lists(&cri.ListContainersResponse{})
	if got, err := r.Containers(t.Context()); err != nil || len(got) != 0 {
		t.Errorf("%+v, %v, want none", got, err)
	}
}

func TestPods(t *testing.T) {
	s := newCRI(t, filepath.Join(t.TempDir(), "cri.sock"))
	pods := &cri.ListPodSandboxResponse{Items: []*cri.PodSandbox{
		{Id: "1", Metadata: &cri.PodSandboxMetadata{Uid: "u1", Namespace: "train", Name: "job-1", Attempt: 2}},
		{Id: "2", Metadata: &cri.PodSandboxMetadata{Uid: "u2", Namespace: "train", Name: "over"}, State: cri.PodSandboxState_SANDBOX_NOTREADY},
		{Id: "3", Labels: labels("u3", "kube-system", "etcd", "")},
		{Id: "4"},
		{Id: "5", Metadata: &cri.PodSandboxMetadata{Name: "no-uid"}},
	}}
	s.Answer("ListPodSandbox", func(context.Context, any) (any, error) { return pods, nil })
	got, err := asker(t, s).Pods(t.Context())
	want := map[string]workload.Pod{"u1": {Namespace: "train", Name: "job-1"}, "u3": {Namespace: "kube-system", Name: "etcd"}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v, %v, want %v", got, err, want)
	}
}

// The annotations of a pod are those that its sandbox was made with. A pod without any is left out, and so is one
// that is over.
func TestPodAnnotations(t *testing.T) {
	s := newCRI(t, filepath.Join(t.TempDir(), "cri.sock"))
	seen := map[string]string{"kubernetes.io/config.source": "api"}
	s.Answer("ListPodSandbox", func(context.Context, any) (any, error) {
		return &cri.ListPodSandboxResponse{Items: []*cri.PodSandbox{
			{Id: "1", Metadata: &cri.PodSandboxMetadata{Uid: "u1"}, Annotations: seen, Labels: map[string]string{"app": "x"}},
			{Id: "2", Metadata: &cri.PodSandboxMetadata{Uid: "u2"}, Annotations: seen, State: cri.PodSandboxState_SANDBOX_NOTREADY},
			{Id: "3", Labels: labels("u3", "train", "job", ""), Annotations: seen},
			{Id: "4", Metadata: &cri.PodSandboxMetadata{Uid: "u4"}}, {Id: "5", Annotations: seen},
		}}, nil
	})
	got, err := asker(t, s).PodAnnotations(t.Context())
	if want := map[string]map[string]string{"u1": seen, "u3": seen}; err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v, %v, want %v", got, err, want)
	}
	s.Answer("ListPodSandbox", func(context.Context, any) (any, error) { return nil, errors.New("not now") })
	if got, err := asker(t, s).PodAnnotations(t.Context()); err == nil || got != nil {
		t.Errorf("of a runtime that does not answer: %v, %v", got, err)
	}
}

// many returns containers as a kubelet makes them, annotated with about size
// bytes each.
func many(n, size int) *cri.ListContainersResponse {
	answer := &cri.ListContainersResponse{}
	for i := range n {
		answer.Containers = append(answer.Containers, &cri.Container{
			Id: fmt.Sprintf("%064x", i), PodSandboxId: fmt.Sprintf("%064x", i), State: cri.ContainerState_CONTAINER_RUNNING,
			Metadata: &cri.ContainerMetadata{Name: "main"}, Image: &cri.ImageSpec{Image: "registry/train:1"}, ImageRef: "sha256:" + strings.Repeat("0", 64),
			CreatedAt: 1700000000000000000, Labels: labels(fmt.Sprintf("5f8ae0a4-1111-2222-3333-%012d", i), "train", fmt.Sprintf("job-%d", i), "main"),
			Annotations: map[string]string{
				"io.kubernetes.container.hash": "9d0f1c3e", "io.kubernetes.container.restartCount": "0",
				"io.kubernetes.container.terminationMessagePath":   "/dev/termination-log",
				"io.kubernetes.container.terminationMessagePolicy": "File",
				"io.kubernetes.pod.terminationGracePeriod":         strings.Repeat("3", size),
				fmt.Sprintf("%s%016x", prefix, i):                  "example.com/gpu-mem",
			},
		})
	}
	return answer
}

func TestLargeAnswer(t *testing.T) {
	s := newCRI(t, filepath.Join(t.TempDir(), "cri.sock"))
	r := asker(t, s)
	s.lists(many(500, 20_000)) // beyond gRPC's default of 4 MiB
	got, err := r.Containers(t.Context())
	if err != nil || len(got) != 500 || len(got[499].Annotations) != 1 {
		t.Errorf("%d containers, %v", len(got), err)
	}
	s.lists(many(500, 40_000))
	if got, err := r.Containers(t.Context()); status.Code(err) != codes.ResourceExhausted || got != nil {
		t.Errorf("%d containers, %v, want a refusal", len(got), err)
	}
	tiny := &cri.ListContainersResponse{}
	for range maxFields + 1 { // of two bytes each
		tiny.Containers = append(tiny.Containers, &cri.Container{})
	}
	s.lists(tiny)
	if got, err := r.Containers(t.Context()); err == nil || !strings.Contains(err.Error(), "more than") || got != nil {
		t.Errorf("%d containers, %v, want a refusal", len(got), err)
	}
	s.lists(many(1, 1))
	if got, err := r.Containers(t.Context()); err != nil || len(got) != 1 {
		t.Errorf("after a refusal: %v, %v", got, err)
	}
}

// The first question after a restart of the runtime is answered, and one while
// it is away fails at once and keeps to the socket that was found first.
func TestRuntimeRestart(t *testing.T) {
	root := t.TempDir()
	s := newCRI(t, filepath.Join(root, "run/k3s/containerd/containerd.sock"))
	s.lists(many(1, 1))
	r := NewRuntime(RuntimeOptions{Root: root})
	defer r.Close()
	ask := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		got, err := r.Containers(ctx)
		if err == nil && len(got) != 1 {
			t.Errorf("%d containers, want 1", len(got))
		}
		return err
	}
	if err := ask(); err != nil {
		t.Fatal(err)
	}
	newCRI(t, filepath.Join(root, "run/containerd/containerd.sock")) // Docker's, with no container
	for range 5 {
		s.Stop() // and its socket is gone
		for range 3 {
			if err := ask(); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), s.path) {
				t.Fatalf("%v, want an error of an absent runtime that names it", err)
			}
		}
		s.start()
		if err := ask(); err != nil {
			t.Fatalf("first question after the restart: %v", err)
		}
		s.Stop()
		s.start()
		if err := ask(); err != nil {
			t.Fatalf("first question after an unseen restart: %v", err)
		}
	}
	if r.Endpoint() != s.path {
		t.Errorf("endpoint %s, want %s", r.Endpoint(), s.path)
	}
	must(t, r.Close())
	if err := ask(); err != nil {
		t.Fatalf("after Close: %v", err)
	}
}

func TestRuntimeHangs(t *testing.T) {
	s := newCRI(t, filepath.Join(t.TempDir(), "cri.sock"))
	s.Answer("ListContainers", func(ctx context.Context, _ any) (any, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := asker(t, s).Containers(ctx); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("%v, want the end of the deadline", err)
	}
}

// What listens may be no runtime: a containerd without its CRI plugin, or
// something that speaks no gRPC.
func TestNoRuntimeBehindTheSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cri.sock")
	listener, err := net.Listen("unix", path)
	must(t, err)
	server := grpc.NewServer()
	go server.Serve(listener)
	r := NewRuntime(RuntimeOptions{Endpoint: path})
	defer r.Close()
	for what, ask := range map[string]func() error{
		"Containers": func() error { _, err := r.Containers(t.Context()); return err },
		"Pods":       func() error { _, err := r.Pods(t.Context()); return err },
	} {
		if err := ask(); !errors.Is(err, gpu.ErrNotSupported) || !strings.Contains(err.Error(), path) || strings.Contains(err.Error(), gpu.ErrNotSupported.Error()) {
			t.Errorf("%s: %v, want gpu.ErrNotSupported in words about a runtime", what, err)
		}
	}
	server.Stop()

	os.Remove(path)
	listener, err = net.Listen("unix", path)
	must(t, err)
	var babble sync.WaitGroup
	babble.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			io.WriteString(conn, "HTTP/1.0 400 Bad Request\r\n\r\n")
			conn.Close()
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	if _, err := r.Containers(ctx); err == nil || ctx.Err() != nil {
		t.Errorf("%v, want an error at once", err)
	}
	listener.Close()
	babble.Wait()
}

func TestEndpoint(t *testing.T) {
	const (
		containerd = "run/containerd/containerd.sock"
		k3s        = "run/k3s/containerd/containerd.sock"
		crio       = "run/crio/crio.sock"
	)
	for _, test := range []struct {
		name, endpoint string
		sockets, files []string // below root
		want           string   // below root; empty: is
		is             error
	}{
		{"containerd", "", []string{containerd}, nil, containerd, nil},
		{"CRI-O", "", []string{crio}, nil, crio, nil},
		{"MicroK8s", "", []string{"var/snap/microk8s/common/run/containerd.sock"}, nil, "var/snap/microk8s/common/run/containerd.sock", nil},
		{"k0s", "", []string{"run/k0s/containerd.sock"}, nil, "run/k0s/containerd.sock", nil},
		{"cri-dockerd beside Docker's containerd", "", []string{containerd, "run/cri-dockerd.sock"}, nil, "run/cri-dockerd.sock", nil},
		{"K3s beside another containerd", "", []string{containerd, k3s}, nil, k3s, nil},
		{"a file is no socket", "", []string{containerd}, []string{k3s}, containerd, nil},
		{"as the kubelet names it", "unix:///" + containerd, []string{containerd, k3s}, nil, containerd, nil},
		{"a path", "/" + containerd, []string{containerd, k3s}, nil, containerd, nil},
		{"unix: and one slash", "unix:/" + containerd, []string{containerd, k3s}, nil, containerd, nil},
		{"/var/run", "unix:///var/" + crio, []string{crio}, nil, crio, nil},
		{"another place", "unix:///opt/x/cri.sock", []string{"opt/x/cri.sock", containerd}, nil, "opt/x/cri.sock", nil},

		{"none", "", nil, nil, "", gpu.ErrNotFound},
		{"not that one", "/opt/cri.sock", []string{containerd}, nil, "", gpu.ErrNotFound},
		{"TCP", "tcp://127.0.0.1:1234", []string{containerd}, nil, "", gpu.ErrInvalid},
		{"a relative path", "unix://run/cri.sock", []string{"run/cri.sock"}, nil, "", gpu.ErrInvalid},
		{"no path", "unix://", []string{containerd}, nil, "", gpu.ErrInvalid},
	} {
		t.Run(test.name, func(t *testing.T) {
			root, err := os.MkdirTemp("", "") // socket paths have 108 bytes
			must(t, err)
			defer os.RemoveAll(root)
			for _, path := range test.files {
				must(t, os.MkdirAll(filepath.Dir(filepath.Join(root, path)), 0o755))
				write(t, filepath.Join(root, path), "")
			}
			for _, path := range test.sockets {
				newCRI(t, filepath.Join(root, path))
			}
			r := NewRuntime(RuntimeOptions{Root: root, Endpoint: test.endpoint})
			defer r.Close()
			if got := r.Endpoint(); got != "" {
				t.Errorf("endpoint %s before the first question", got)
			}
			if test.want == "" && test.endpoint == "" {
				for _, place := range knownSockets {
					if _, err := os.Stat(place); err == nil {
						t.Skip("this machine has a container runtime at " + place)
					}
				}
			}
			_, err = r.Containers(t.Context())
			if !errors.Is(err, test.is) {
				t.Fatalf("%v, want %v", err, test.is)
			}
			if want := filepath.Join(root, test.want); test.want != "" && r.Endpoint() != want {
				t.Errorf("endpoint %s, want %s", r.Endpoint(), want)
			}
		})
	}
}

// A runtime that comes after the agent is found, and a path that is not below
// root but mounted as it is.
func TestEndpointLater(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cri.sock")
	r := NewRuntime(RuntimeOptions{Root: t.TempDir(), Endpoint: path})
	defer r.Close()
	if _, err := r.Containers(t.Context()); !errors.Is(err, gpu.ErrNotFound) || !strings.Contains(err.Error(), path) {
		t.Errorf("%v, want gpu.ErrNotFound and the places", err)
	}
	newCRI(t, path)
	if _, err := r.Containers(t.Context()); err != nil || r.Endpoint() != path {
		t.Errorf("%v, endpoint %q", err, r.Endpoint())
	}
}

// Questions go on beside events while the runtime restarts.
func TestRuntimeUnderManyQuestions(t *testing.T) {
	s := newCRI(t, filepath.Join(t.TempDir(), "cri.sock"))
	s.lists(many(3, 1))
	r := asker(t, s)
	events, _ := listen(t, r)
	next(t, events)
	s.Stop()
	s.start()
	var wait sync.WaitGroup
	for range 20 {
		wait.Go(func() {
			if got, err := r.Containers(t.Context()); err != nil || len(got) != 3 {
				t.Errorf("%d containers, %v", len(got), err)
			}
		})
	}
	wait.Wait()
	for next(t, events).Kind != EventMissed {
	}
}

// Both ends run in this process: the client's share is about half.
func BenchmarkContainers(b *testing.B) {
	s := newCRI(b, filepath.Join(b.TempDir(), "cri.sock"))
	s.lists(many(100, 2))
	r := asker(b, s)
	b.ReportAllocs()
	for b.Loop() {
		if got, err := r.Containers(b.Context()); err != nil || len(got) != 100 {
			b.Fatal(len(got), err)
		}
	}
}
