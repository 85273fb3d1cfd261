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

// maxAnswer is the largest answer accepted of a runtime, in bytes: what the
// kubelet accepts of it too (k8s.io/cri-client, maxMsgSize).
const maxAnswer = 16 << 20

// knownSockets is where runtimes listen, the most particular first: a node of
// K3s, or one with Docker behind cri-dockerd, often has a plain containerd
// beside the runtime that its kubelet uses.
var knownSockets = []string{
	"/run/k3s/containerd/containerd.sock", // K3s and RKE2
	"/run/k0s/containerd.sock",
	"/var/snap/microk8s/common/run/containerd.sock",
	"/run/crio/crio.sock",
	"/run/cri-dockerd.sock",
	"/run/containerd/containerd.sock",
}

// RuntimeOptions says which runtime to ask and what to keep of its answers.
type RuntimeOptions struct {
	// Endpoint is the runtime's socket as the kubelet's configuration names it:
	// unix:///run/containerd/containerd.sock, or the path alone. Where it is
	// empty, the first of the known places that has a socket is it.
	Endpoint string
	// Root is where the host's files are seen; empty means "/". A path is looked
	// for below it, and then as it is.
	Root string
	// AnnotationPrefix selects the annotations kept with a container, by the
	// beginning of their names; empty keeps none. The kubelet gives a container
	// what device plugins answered to Allocate and nothing of the pod's author.
	AnnotationPrefix string
	// Cgroups is where the host's /sys/fs/cgroup is seen, writable. Empty, or
	// without a unified hierarchy (v2) there or in unified below, End asks the
	// runtime.
	Cgroups string
	// DRA reports whether containers are given devices by DRA, whose names the runtime
	// tells of one container at a time; nil is never. It may be called at any time.
	DRA func() bool
	// DeviceOf returns the fully qualified CDI device that the mount of a file of the
	// host comes from, empty where it comes from none of ours. It is for CRI-O, which
	// does not tell the devices that it was asked for. A tenant chooses where something is
	// mounted, and not what. nil knows none.
	DeviceOf func(source string) string
	// Logger is told which runtime was found and when its events break off; nil
	// means silence.
	Logger *slog.Logger
}

// Container is a container of the runtime that has been created and has not
// ended. What the runtime does not say is empty.
type Container struct {
	ID, PodUID, Namespace, Pod, Name string
	// Running is false as long as the container is only created. One whose
	// state the runtime does not know counts as running: it has not been seen to end.
	Running bool
	// Created is zero where the runtime does not say.
	Created time.Time
	// Annotations are those with RuntimeOptions.AnnotationPrefix, nil without
	// any.
	Annotations map[string]string
	// CDI is the fully qualified names of the CDI devices that it was created with, in
	// the order of the kubelet's request. It is asked for where RuntimeOptions.DRA says
	// so, and else nil. No tenant can write it.
	CDI []string
	// CDIUnknown says that the runtime has not told yet: the container may have any
	// allocation, and is asked about again with the next list.
	CDIUnknown bool
}

// InPod is the container's pod.
func (c *Container) InPod() workload.Pod {
	return workload.Pod{Namespace: c.Namespace, Name: c.Pod, UID: c.PodUID}
}

// Runtime asks the node's container runtime, any that speaks the CRI, which
// containers there are. It keeps one connection. Its methods may be called from
// several goroutines; they do not wait for a runtime that is away, and for one
// that hangs as long as their context allows.
type Runtime struct {
	o    RuntimeOptions
	line line

	created created

	mu       sync.Mutex // guards endpoint
	endpoint string     // the socket, once found
}

// NewRuntime prepares to ask. Nothing is looked for or opened before the first
// question.
func NewRuntime(o RuntimeOptions) *Runtime {
	o.Root = cmp.Or(o.Root, "/")
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.DRA == nil {
		o.DRA = func() bool { return false }
	}
	r := &Runtime{
		o: o, created: created{patience: statusPatience, turn: make(chan struct{}, 1), by: map[string]*creation{}},
	}
	r.line.socket, r.line.answers = r.socket, []grpc.CallOption{
		grpc.MaxCallRecvMsgSize(maxAnswer), grpc.ForceCodecV2(newBounded()),
	}
	return r
}

// Endpoint returns the path of the socket that is asked, empty as long as none
// was found.
func (r *Runtime) Endpoint() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.endpoint
}

// Close gives the connection back. A later question opens another.
func (r *Runtime) Close() error { return r.line.close() }

// socket finds the runtime's socket. What was found once is kept: while a
// runtime restarts, its socket may be missing, and another's, whose containers
// are not the kubelet's, must not take its place.
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

// candidates returns the paths to try for places of the host, those below root
// first.
func candidates(root string, places []string) []string {
	if root == "/" {
		return places
	}
	var below []string
	for _, place := range places {
		// /var/run is a link to /run, often an absolute one, which would lead
		// out of root.
		if rest, ok := strings.CutPrefix(place, "/var/run/"); ok {
			place = "/run/" + rest
		}
		below = append(below, filepath.Join(root, place))
	}
	return append(below, places...)
}

// Containers returns all containers that have not ended, sorted by ID. It is one
// question without a filter, as the kubelet's own every second: a filter takes
// one state only, and between two questions a container could slip through.
//
// Where RuntimeOptions.DRA says so, the runtime is asked about each container once more, to
// learn its CDI devices. A status that fails is no error here: see Container.CDIUnknown.
//
// Errors answer to gpu.ErrNotFound where no socket is found and to
// gpu.ErrNotSupported where what listens there does not speak the CRI.
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
	if r.created.keep(list); r.o.DRA() {
		gone := r.addCDI(ctx, list)
		list = slices.DeleteFunc(list, func(c Container) bool { return gone[c.ID] })
	}
	slices.SortStableFunc(list, func(a, b Container) int { return cmp.Compare(a.ID, b.ID) })
	return list, nil
}

// ask asks the runtime's CRI one question.
func ask[A any](
	ctx context.Context, r *Runtime, question func(cri.RuntimeServiceClient) (A, error),
) (answer A, err error) {
	err = r.line.ask(ctx, func(conn *grpc.ClientConn) (err error) {
		answer, err = question(cri.NewRuntimeServiceClient(conn))
		return err
	})
	return answer, err
}

// Pods returns the pods whose sandbox is ready, by UID: also those of which no
// container exists yet, for one while an image is pulled. Errors are those of
// Containers.
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

// Labels returns the labels of the pods whose sandbox is ready, by UID: all that the kubelet
// has told the runtime, which are the pod's as they were when it came to the node. Their
// authors write them.
func (r *Runtime) Labels(ctx context.Context) (map[string]map[string]string, error) {
	ready := &cri.PodSandboxFilter{State: &cri.PodSandboxStateValue{State: cri.PodSandboxState_SANDBOX_READY}}
	answer, err := ask(ctx, r, func(c cri.RuntimeServiceClient) (*cri.ListPodSandboxResponse, error) {
		return c.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{Filter: ready})
	})
	if err != nil {
		return nil, r.wrap("list pod sandboxes", err)
	}
	labels := make(map[string]map[string]string, len(answer.GetItems()))
	for _, s := range answer.GetItems() {
		if uid := cmp.Or(s.GetMetadata().GetUid(), s.GetLabels()[labelPodUID]); uid != "" {
			labels[uid] = s.GetLabels()
		}
	}
	return labels, nil
}

// wrap says what was asked of whom, and what it means that the runtime does not
// know the question.
func (r *Runtime) wrap(what string, err error) error {
	endpoint := r.Endpoint()
	if endpoint == "" {
		return fmt.Errorf("%s: %w", what, err)
	}
	if status.Code(err) == codes.Unimplemented {
		return &failure{gpu.ErrNotSupported,
			fmt.Sprintf("%s: what listens at %s does not answer that as CRI v1", what, endpoint), err}
	}
	return fmt.Errorf("%s at %s: %w", what, endpoint, err)
}

// EventKind says what happened to a container.
type EventKind int

// The kinds of ContainerEvent.
const (
	// EventMissed: a stream of events begins, and what happened before it may
	// not have been told. The event has no container.
	EventMissed EventKind = iota
	EventCreated
	EventStarted
	EventStopped
	EventDeleted
)

// ContainerEvent is something that happened to a container, or to the sandbox of
// a pod, whose Container then has no name.
type ContainerEvent struct {
	Kind EventKind
	// Container is as of the event. Of one that is deleted the runtime tells
	// the ID and the pod only. CDI devices are told of one that has started or stopped.
	Container Container
}

const (
	// firstPause and longestPause bound how long Events waits before it asks
	// again: a runtime that restarts is away for a second or so.
	firstPause, longestPause = 50 * time.Millisecond, 500 * time.Millisecond
	// emptyStreams in a row, ended by the runtime at once and without an event
	// or an error, are a runtime's way to say that it has no events.
	emptyStreams = 3
)

// Events calls fn for what happens to containers, until ctx ends, whose error it
// returns. Calls never overlap; while fn works, the stream waits.
//
// Events are a reason to look again and no account: containerd repeats those of
// the last minutes to whoever asks first, and a restart loses some. Each stream
// therefore begins with EventMissed, also those after a restart of the runtime,
// which Events waits for.
//
// Where the runtime has no events, or a listener would take them from the kubelet
// (see oneListener), Events says so in the log and asks again when the runtime has
// restarted: it may be another version by then, or configured in another way.
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
				r.o.Logger.Warn("no container events; the end of containers is seen when the runtime is asked the "+
					"next time, and for events it is asked again when it has restarted", "error", err)
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

// awaitLoss waits until the connection to a runtime is closed, which a runtime does when
// it restarts.
func awaitLoss(ctx context.Context, conn *grpc.ClientConn) {
	for conn.GetState() == connectivity.Ready && conn.WaitForStateChange(ctx, connectivity.Ready) {
	}
}

// oneListener reports whether a runtime gives each of its events to one of those who
// listen: containerd before 2.0 and CRI-O before 1.28. The kubelet listens where its
// feature EventedPLEG is on, and would miss the ends of containers for minutes. A
// containerd that does not tell its version may be an old one.
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

// stream hands on the events of one stream and returns why it ended, io.EOF
// where the runtime ended it.
func (r *Runtime) stream(
	ctx context.Context, dead *grpc.ClientConn, fn func(ContainerEvent),
) (*grpc.ClientConn, error) {
	ctx, cancel := context.WithCancel(ctx) // a stream that is left must be cancelled
	defer cancel()
	conn, _, err := r.line.connection(dead)
	if err != nil {
		return nil, err
	}
	// What answers on the next connection may be another version.
	client := cri.NewRuntimeServiceClient(conn)
	v, err := client.Version(ctx, &cri.VersionRequest{})
	if err != nil {
		return conn, err
	}
	if name, number := v.GetRuntimeName(), v.GetRuntimeVersion(); oneListener(name, number) {
		return conn, &failure{is: gpu.ErrNotSupported,
			text: fmt.Sprintf("%s %s gives each event to one of its listeners, of which the kubelet may be one",
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
			// Of one that was just created the status may not be whole, of one that is
			// deleted there is none.
			if c := []Container{event.Container}; c[0].Name != "" &&
				(event.Kind == EventStarted || event.Kind == EventStopped) && r.o.DRA() {
				r.addCDI(ctx, c)
				event.Container = c[0]
			}
			fn(event)
		}
	}
}
