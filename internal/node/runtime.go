// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/wait"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
)

// maxAnswer is the largest accepted answer of a runtime, in bytes. It is the kubelet's own limit
// (k8s.io/cri-client, maxMsgSize).
const maxAnswer = 16 << 20

// knownSockets are the paths at which runtimes listen, the most specific first. A node of K3s, or
// one with Docker behind cri-dockerd, often has a plain containerd, too, which its kubelet does not
// use.
var knownSockets = []string{
	"/run/k3s/containerd/containerd.sock", // K3s and RKE2
	"/run/k0s/containerd.sock",
	"/var/snap/microk8s/common/run/containerd.sock",
	"/run/crio/crio.sock",
	"/run/cri-dockerd.sock",
	"/run/containerd/containerd.sock",
}

// RuntimeOptions say which runtime to ask, and which parts of its answers to keep.
type RuntimeOptions struct {
	// Endpoint is the runtime's socket, as in the kubelet's configuration:
	// unix:///run/containerd/containerd.sock, or the path alone. Empty means the first of the known
	// paths that has a socket.
	Endpoint string
	// Root is the directory at which the host's files are seen; empty means "/". A path is tried
	// below it first, and then as it is.
	Root string
	// AnnotationPrefix is the prefix of the annotations that are kept with a container; empty keeps
	// none. The kubelet gives a container the annotations that device plugins returned from
	// Allocate, and none of the pod's author.
	AnnotationPrefix string
	// Cgroups is the directory at which the host's /sys/fs/cgroup is seen, writable. If it is
	// empty, or has no unified hierarchy (v2) there or in unified below, End asks the runtime.
	Cgroups string
	// DRA reports whether containers get devices through DRA. If so, the runtime is asked for the
	// names of these, for each container by itself. nil means never. It may be called at any time.
	DRA func() bool
	// DeviceOf returns the fully qualified CDI device that mounts this file of the host, or "" if
	// none of the agent's devices does. nil knows none. CRI-O needs it, since it does not report
	// the devices that were requested. A tenant chooses the target of a mount, but not its source.
	DeviceOf func(source string) string
	// Logger gets a line when a runtime is found, and when its events break off. nil means no log.
	Logger *slog.Logger
}

// Container is a container that the runtime has created and that has not ended. Fields that the
// runtime does not tell are empty.
type Container struct {
	ID, PodUID, Namespace, Pod, Name string
	// Running is false if the container is only created. A container in a state that the runtime
	// does not know counts as running, since its end was not seen.
	Running bool
	// Created is zero if the runtime does not tell it.
	Created time.Time
	// Annotations are those with RuntimeOptions.AnnotationPrefix; nil if there are none.
	Annotations map[string]string
	// Grace is how long the kubelet gives the pod's containers to end by themselves; zero if it has
	// not told the runtime. A tenant chooses it, up to mostGrace.
	Grace time.Duration
	// CDI is the fully qualified names of the container's CDI devices, in the order of the
	// kubelet's request. They never change. It is nil if RuntimeOptions.DRA reports false. No
	// tenant can write it.
	CDI []string
	// CDIUnknown is true if the runtime has not told the CDI devices yet. Then the container may
	// have any allocation. The next list asks about it again.
	CDIUnknown bool
}

// InPod returns the container's pod.
func (c *Container) InPod() workload.Pod {
	return workload.Pod{Namespace: c.Namespace, Name: c.Pod, UID: c.PodUID}
}

// Runtime asks the node's container runtime which containers there are. It works with any runtime
// that speaks the CRI, and keeps one connection. Its methods may be called from several goroutines.
// They do not wait for a runtime that is down; for one that hangs they wait until their context
// ends.
type Runtime struct {
	o      RuntimeOptions
	client grpcClient

	cdi cdiCache

	mu       sync.Mutex // guards endpoint
	endpoint string     // the path of the socket; empty until it is found
}

// NewRuntime prepares to ask a runtime. It opens nothing before the first question.
func NewRuntime(o RuntimeOptions) *Runtime {
	o.Root = cmp.Or(o.Root, "/")
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.DRA == nil {
		o.DRA = func() bool { return false }
	}
	r := &Runtime{
		o: o, cdi: cdiCache{patience: statusPatience, turn: make(chan struct{}, 1), by: map[string]*cdiEntry{}},
	}
	r.client.socket, r.client.answers = r.socket, []grpc.CallOption{
		grpc.MaxCallRecvMsgSize(maxAnswer), grpc.ForceCodecV2(newBounded()),
	}
	return r
}

// Endpoint returns the path of the runtime's socket; empty until one was found.
func (r *Runtime) Endpoint() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.endpoint
}

// Close closes the connection. A later question opens a new one.
func (r *Runtime) Close() error { return r.client.close() }

// socket finds the runtime's socket, once. While a runtime restarts, its socket may be missing.
// Then the socket of another runtime must not take its place: the kubelet's containers are not
// there.
func (r *Runtime) socket() (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.endpoint != "" {
		return r.endpoint, nil
	}
	places := knownSockets
	if r.o.Endpoint != "" {
		path := r.o.Endpoint
		path = strings.TrimPrefix(strings.TrimPrefix(path, "unix:"), "//")
		if !filepath.IsAbs(path) {
			return "", &failure{is: gpu.ErrInvalid, text: fmt.Sprintf("runtime endpoint %q is neither unix:///path "+
				"nor /path", r.o.Endpoint)}
		}
		places = []string{filepath.Clean(path)}
	}
	tried := candidates(r.o.Root, places)
	for _, path := range tried {
		if info, err := os.Stat(path); err == nil && info.Mode().Type() == fs.ModeSocket {
			r.endpoint = path
			r.o.Logger.Info("found the container runtime", "endpoint", path)
			return path, nil
		}
	}
	return "", &failure{is: gpu.ErrNotFound,
		text: fmt.Sprintf("no container runtime: no socket at %s; name it with --runtime-endpoint",
			strings.Join(tried, ", "))}
}

// candidates returns the paths to try for paths of the host, those below root first.
func candidates(root string, places []string) []string {
	if root == "/" {
		return places
	}
	var below []string
	for _, place := range places {
		// /var/run is a link to /run, often an absolute one, which would lead out of root.
		if rest, ok := strings.CutPrefix(place, "/var/run/"); ok {
			place = "/run/" + rest
		}
		below = append(below, filepath.Join(root, place))
	}
	return append(below, places...)
}

// Containers returns all containers that have not ended, sorted by ID. It makes one request without
// a filter, as the kubelet does every second. A filter takes only one state, so a container could
// change state between two requests and be in neither answer.
//
// If RuntimeOptions.DRA reports true, it also asks for the status of each container, to learn its
// CDI devices. A failed status is no error here: see Container.CDIUnknown.
//
// The error wraps gpu.ErrNotFound if no socket is found, and gpu.ErrNotSupported if the server at
// the socket does not speak the CRI.
func (r *Runtime) Containers(ctx context.Context) ([]Container, error) {
	answer, err := ask(ctx, r, func(c cri.RuntimeServiceClient) (*cri.ListContainersResponse, error) {
		return c.ListContainers(ctx, &cri.ListContainersRequest{})
	})
	if err != nil {
		return nil, r.wrap("list containers", err)
	}
	list := make([]Container, 0, len(answer.GetContainers()))
	for _, c := range answer.GetContainers() {
		if c.GetState() == cri.ContainerState_CONTAINER_EXITED {
			continue
		}
		kept := r.container(c)
		kept.Running = c.GetState() != cri.ContainerState_CONTAINER_CREATED
		list = append(list, kept)
	}
	if r.cdi.keep(list); r.o.DRA() {
		gone := r.addCDI(ctx, list)
		list = slices.DeleteFunc(list, func(c Container) bool { return gone[c.ID] })
	}
	slices.SortStableFunc(list, func(a, b Container) int { return cmp.Compare(a.ID, b.ID) })
	return list, nil
}

// ask makes one request of the runtime's CRI.
func ask[A any](
	ctx context.Context, r *Runtime, question func(cri.RuntimeServiceClient) (A, error),
) (answer A, err error) {
	err = r.client.ask(ctx, func(conn *grpc.ClientConn) (err error) {
		answer, err = question(cri.NewRuntimeServiceClient(conn))
		return err
	})
	return answer, err
}

// Pods returns the pods whose sandbox is ready, by UID. These include pods that have no container
// yet, for example while an image is pulled. Errors are those of Containers.
func (r *Runtime) Pods(ctx context.Context) (map[string]workload.Pod, error) {
	ready := &cri.PodSandboxFilter{State: &cri.PodSandboxStateValue{State: cri.PodSandboxState_SANDBOX_READY}}
	answer, err := ask(ctx, r, func(c cri.RuntimeServiceClient) (*cri.ListPodSandboxResponse, error) {
		return c.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{Filter: ready})
	})
	if err != nil {
		return nil, r.wrap("list pod sandboxes", err)
	}
	pods := make(map[string]workload.Pod, len(answer.GetItems()))
	for _, s := range answer.GetItems() {
		m, l := s.GetMetadata(), s.GetLabels()
		if uid := cmp.Or(m.GetUid(), l[labelPodUID]); uid != "" && s.GetState() == cri.PodSandboxState_SANDBOX_READY {
			pods[uid] = workload.Pod{
				Namespace: cmp.Or(m.GetNamespace(), l[labelPodNamespace]),
				Name:      cmp.Or(m.GetName(), l[labelPodName]),
			}
		}
	}
	return pods, nil
}

// Labels returns the labels of the pods whose sandbox is ready, by the pod's UID. The kubelet told
// the runtime these labels when the pod came to the node. The authors of pods write them.
func (r *Runtime) Labels(ctx context.Context) (map[string]map[string]string, error) {
	return r.ofPods(ctx, (*cri.PodSandbox).GetLabels)
}

// PodAnnotations returns the annotations of the pods whose sandbox is ready, by the pod's UID, as of
// the time at which the pod came to the node. It leaves out a pod without any: the kubelet gives
// each pod some, so the runtime does not tell. The authors of pods write them. Errors are those of
// Containers.
func (r *Runtime) PodAnnotations(ctx context.Context) (map[string]map[string]string, error) {
	of, err := r.ofPods(ctx, (*cri.PodSandbox).GetAnnotations)
	maps.DeleteFunc(of, func(_ string, annotations map[string]string) bool { return len(annotations) == 0 })
	return of, err
}

// ofPods returns what each ready sandbox has, by the pod's UID.
func (r *Runtime) ofPods(ctx context.Context, has func(*cri.PodSandbox) map[string]string) (map[string]map[string]string, error) {
	ready := &cri.PodSandboxFilter{State: &cri.PodSandboxStateValue{State: cri.PodSandboxState_SANDBOX_READY}}
	answer, err := ask(ctx, r, func(c cri.RuntimeServiceClient) (*cri.ListPodSandboxResponse, error) {
		return c.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{Filter: ready})
	})
	if err != nil {
		return nil, r.wrap("list pod sandboxes", err)
	}
	of := make(map[string]map[string]string, len(answer.GetItems()))
	for _, s := range answer.GetItems() {
		if uid := cmp.Or(s.GetMetadata().GetUid(), s.GetLabels()[labelPodUID]); uid != "" && s.GetState() == cri.PodSandboxState_SANDBOX_READY {
			of[uid] = has(s)
		}
	}
	return of, nil
}

// wrap adds the request and the endpoint to an error. If the runtime does not know the request, the
// error wraps gpu.ErrNotSupported.
func (r *Runtime) wrap(what string, err error) error {
	endpoint := r.Endpoint()
	if endpoint == "" {
		return fmt.Errorf("%s: %w", what, err)
	}
	if status.Code(err) == codes.Unimplemented {
		return &failure{gpu.ErrNotSupported,
			fmt.Sprintf("%s: the server at %s does not answer that as CRI v1", what, endpoint), err}
	}
	return fmt.Errorf("%s at %s: %w", what, endpoint, err)
}

// EventKind is the kind of a ContainerEvent.
type EventKind int

// The kinds of ContainerEvent.
const (
	// EventMissed: a stream of events begins, and earlier events may be missing. The event has no
	// container.
	EventMissed EventKind = iota
	EventCreated
	EventStarted
	EventStopped
	EventDeleted
)

// ContainerEvent is an event of a container, or of the sandbox of a pod. For a sandbox, Container
// has no name.
type ContainerEvent struct {
	Kind EventKind
	// Container is as of the event. For a deleted one the runtime tells only the ID and the pod.
	// CDI devices are set if it has started or stopped.
	Container Container
}

const (
	// firstPause and longestPause limit the pause of Events before it asks again. A runtime that
	// restarts is down for about a second.
	firstPause, longestPause = 50 * time.Millisecond, 500 * time.Millisecond
	// emptyStreams is the number of empty streams in a row that show that a runtime has no events.
	// A stream is empty if the runtime ends it at once, without an event or an error.
	emptyStreams = 3
)

// Events calls fn for events of containers until ctx ends, and returns the error of ctx. It also
// returns if the configured endpoint is not valid. Calls never overlap; while fn works, the stream
// waits.
//
// Events are a reason to read again, and not a complete record. containerd repeats the events of
// the last minutes to its first listener, and a restart loses some. Each stream therefore begins
// with EventMissed. Events waits for a runtime that restarts, and then begins a new stream.
//
// If the runtime has no events, or if listening would take them from the kubelet (see oneListener),
// Events logs that once. It asks again when the runtime has restarted, which may then have another
// version or configuration.
func (r *Runtime) Events(ctx context.Context, fn func(ContainerEvent)) error {
	var dead *grpc.ClientConn
	pauses := wait.Backoff{Duration: firstPause, Factor: 2, Cap: longestPause, Steps: math.MaxInt}
	pause, empty, away, without := pauses, 0, false, false
	back := func() {
		if away {
			away = false
			r.o.Logger.Info("the container runtime is back", "endpoint", r.Endpoint())
		}
	}
	for {
		began, told := time.Now(), 0
		conn, err := r.stream(ctx, dead, func(e ContainerEvent) {
			if e.Kind != EventMissed {
				told++
			} else {
				back()
			}
			fn(e)
		})
		if ctx.Err() != nil {
			return ctx.Err()
		}
		worked := told > 0 || time.Since(began) > longestPause
		dead = nil
		code := status.Code(err)
		if err == io.EOF && !worked {
			if empty++; empty == emptyStreams {
				err = &failure{
					is:   gpu.ErrNotSupported,
					text: "it ends each stream at once (CRI-O does so without enable_pod_events)",
				}
			}
		} else {
			empty = 0
		}
		switch {
		case errors.Is(err, gpu.ErrInvalid):
			return r.wrap("follow container events", err)
		case errors.Is(err, gpu.ErrNotSupported), code == codes.Unimplemented:
			back()
			if err = r.wrap("follow container events", err); !without {
				without = true
				r.o.Logger.Warn("no container events; the agent sees the end of a container at its next read, and "+
					"asks for events again when the runtime has restarted", "error", err)
			}
			awaitLoss(ctx, conn)
			empty = 0
		case err == io.EOF:
		default:
			if code == codes.Unavailable || code == codes.Canceled {
				dead = conn
			}
			if !away {
				away = true
				r.o.Logger.Warn("container events broke off; asking again until the runtime is back",
					"endpoint", r.Endpoint(), "error", err)
			}
		}
		if worked {
			pause, without = pauses, false
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause.Step()):
		}
	}
}

// awaitLoss waits until the connection to a runtime is closed, as when the runtime restarts.
func awaitLoss(ctx context.Context, conn *grpc.ClientConn) {
	for conn.GetState() == connectivity.Ready && conn.WaitForStateChange(ctx, connectivity.Ready) {
	}
}

// oneListener reports whether a runtime delivers each event to only one of its listeners:
// containerd before 2.0 and CRI-O before 1.28 do. The kubelet listens if its feature EventedPLEG is
// on, and would miss the ends of containers for minutes. A containerd that does not tell its
// version may be an old one.
func oneListener(name, version string) bool {
	var major, minor int
	n, _ := fmt.Sscanf(strings.TrimPrefix(version, "v"), "%d.%d", &major, &minor)
	switch name {
	case "containerd":
		return n == 0 || major < 2
	case "cri-o":
		return n == 2 && (major < 1 || major == 1 && minor < 28)
	}
	return false
}

// stream calls fn for the events of one stream. It returns the connection and why the stream ended;
// the error is io.EOF if the runtime ended it.
func (r *Runtime) stream(
	ctx context.Context, dead *grpc.ClientConn, fn func(ContainerEvent),
) (*grpc.ClientConn, error) {
	ctx, cancel := context.WithCancel(ctx) // a stream that is left must be cancelled
	defer cancel()
	conn, _, err := r.client.connection(dead)
	if err != nil {
		return nil, err
	}
	// The server on a new connection may be another version.
	client := cri.NewRuntimeServiceClient(conn)
	v, err := client.Version(ctx, &cri.VersionRequest{})
	if err != nil {
		return conn, err
	}
	if name, number := v.GetRuntimeName(), v.GetRuntimeVersion(); oneListener(name, number) {
		return conn, &failure{is: gpu.ErrNotSupported,
			text: fmt.Sprintf("%s %s gives each event to only one listener, which may have to be the kubelet",
				name, number)}
	}
	events, err := client.GetContainerEvents(ctx, &cri.GetEventsRequest{})
	if err != nil {
		return conn, err
	}
	fn(ContainerEvent{Kind: EventMissed})
	for {
		e, err := events.Recv()
		if err != nil {
			return conn, err
		}
		if event := r.event(e); event.Kind != EventMissed {
			// The status of a container that was just created may be incomplete; a deleted one has
			// none.
			if c := []Container{event.Container}; c[0].Name != "" &&
				(event.Kind == EventStarted || event.Kind == EventStopped) && r.o.DRA() {
				r.addCDI(ctx, c)
				event.Container = c[0]
			}
			fn(event)
		}
	}
}
