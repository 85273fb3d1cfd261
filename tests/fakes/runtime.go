// SPDX-License-Identifier: Apache-2.0

package fakes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Pod names a pod, whose UID is its sandbox's ID too.
type Pod struct{ UID, Namespace, Name string }

// Runtime is a containerd 2.3.7, as far as the agent asks: the CRI and the tasks
// service. Its methods may be called from several goroutines.
type Runtime struct {
	cri.UnimplementedRuntimeServiceServer
	answers
	socket string
	server *grpc.Server // while it runs; Start and Stop are not called at one time
	ended  sync.WaitGroup

	mu         sync.Mutex
	pods       map[string]Pod            // guarded by mu; those with a sandbox, by UID
	containers map[string]*cri.Container // guarded by mu; by ID
	devices    map[string][]string       // guarded by mu; CDI devices of containers, by ID
	listeners  map[chan *cri.ContainerEventResponse]bool
}

// StartRuntime serves at a socket, with the agent's own container in it: what lacks
// that is not the runtime of the agent's node. Without a name there is none.
func StartRuntime(socket string, agent Pod) (*Runtime, error) {
	r := &Runtime{socket: socket, pods: map[string]Pod{}, containers: map[string]*cri.Container{}, devices: map[string][]string{}, listeners: map[chan *cri.ContainerEventResponse]bool{}}
	if agent.Name != "" {
		r.Put(agent, &cri.Container{Id: "agent", Metadata: &cri.ContainerMetadata{Name: "gpu-agent"}, State: cri.ContainerState_CONTAINER_RUNNING})
	}
	return r, r.Start()
}

// Start starts one that was stopped: its containers have stayed.
func (r *Runtime) Start() error {
	if err := os.MkdirAll(filepath.Dir(r.socket), 0o755); err != nil {
		return fmt.Errorf("start a container runtime: %w", err)
	}
	if err := os.Remove(r.socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("start a container runtime: %w", err)
	}
	l, err := net.Listen("unix", r.socket)
	if err != nil {
		return fmt.Errorf("start a container runtime: %w", err)
	}
	r.server = grpc.NewServer(r.options()...)
	cri.RegisterRuntimeServiceServer(r.server, r)
	tasks.RegisterTasksServer(r.server, taskService{r: r})
	r.ended.Go(func() { _ = r.server.Serve(l) })
	return nil
}

// Stop ends all calls and the server.
func (r *Runtime) Stop() {
	r.server.Stop()
	r.ended.Wait()
}

// Run makes a pod's sandbox, if it has none.
func (r *Runtime) Run(p Pod) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pods[p.UID] = p
}

// Put makes a container of a pod, whose sandbox it makes too, and tells of it. It
// fills in what follows: its sandbox, its labels and, where that is missing, the
// time.
func (r *Runtime) Put(p Pod, c *cri.Container, events ...cri.ContainerEventType) {
	c.PodSandboxId, c.Labels = p.UID, p.labels(c.GetMetadata().GetName())
	if c.CreatedAt == 0 {
		c.CreatedAt = time.Now().UnixNano()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pods[p.UID], r.containers[c.Id] = p, c
	r.tellLocked(c, events...)
}

// SetDevices says which CDI devices a container is made with, before it is there.
func (r *Runtime) SetDevices(id string, names ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.devices[id] = names
}

// Set changes a container's state and tells of it. There may be none.
func (r *Runtime) Set(id string, state cri.ContainerState, events ...cri.ContainerEventType) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.containers[id]; c != nil {
		c.State = state
		r.tellLocked(c, events...)
	}
}

// State is a container's; one that is not there has exited.
func (r *Runtime) State(id string) cri.ContainerState {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.containers[id]; c != nil {
		return c.State
	}
	return cri.ContainerState_CONTAINER_EXITED
}

// Remove forgets a pod and its containers, and tells of each of these.
func (r *Runtime) Remove(uid string, events ...cri.ContainerEventType) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(r.containers)) {
		if c := r.containers[id]; c.PodSandboxId == uid {
			delete(r.containers, id)
			delete(r.devices, id)
			r.tellLocked(c, events...)
		}
	}
	delete(r.pods, uid)
}

// labels are those that the kubelet gives a container, or without a name a
// sandbox.
func (p Pod) labels(container string) map[string]string {
	l := map[string]string{"io.kubernetes.pod.uid": p.UID, "io.kubernetes.pod.name": p.Name, "io.kubernetes.pod.namespace": p.Namespace}
	if container != "" {
		l["io.kubernetes.container.name"] = container
	}
	return l
}

func (p Pod) metadata() *cri.PodSandboxMetadata {
	return &cri.PodSandboxMetadata{Name: p.Name, Uid: p.UID, Namespace: p.Namespace}
}

// Tell tells all who listen of an event as it is, and says how many these are.
func (r *Runtime) Tell(e *cri.ContainerEventResponse) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sendLocked(e)
	return len(r.listeners)
}

func (r *Runtime) sendLocked(e *cri.ContainerEventResponse) {
	for ch := range r.listeners {
		select {
		case ch <- e:
		default: // as containerd: who does not listen misses it
		}
	}
}

func (r *Runtime) tellLocked(c *cri.Container, events ...cri.ContainerEventType) {
	p := r.pods[c.PodSandboxId]
	for _, e := range events {
		r.sendLocked(&cri.ContainerEventResponse{
			ContainerId: c.Id, ContainerEventType: e, CreatedAt: time.Now().UnixNano(),
			PodSandboxStatus: &cri.PodSandboxStatus{Id: p.UID, Metadata: p.metadata(), Labels: p.labels("")},
			ContainersStatuses: []*cri.ContainerStatus{{Id: c.Id, Metadata: c.Metadata, State: c.State, CreatedAt: c.CreatedAt,
				Labels: c.Labels, Annotations: c.Annotations}},
		})
	}
}

// Version is CRI's.
func (r *Runtime) Version(context.Context, *cri.VersionRequest) (*cri.VersionResponse, error) {
	return &cri.VersionResponse{Version: "0.1.0", RuntimeName: "containerd", RuntimeVersion: "v2.3.7", RuntimeApiVersion: "v1"}, nil
}

// ListContainers is CRI's.
func (r *Runtime) ListContainers(_ context.Context, in *cri.ListContainersRequest) (*cri.ListContainersResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f, out := in.GetFilter(), &cri.ListContainersResponse{}
	for _, id := range slices.Sorted(maps.Keys(r.containers)) {
		c := r.containers[id]
		if f.GetId() != "" && f.Id != id || f.GetPodSandboxId() != "" && f.PodSandboxId != c.PodSandboxId ||
			f.GetState() != nil && f.State.State != c.State || !matches(f.GetLabelSelector(), c.Labels) {
			continue
		}
		out.Containers = append(out.Containers, proto.CloneOf(c)) // it is encoded after the lock
	}
	return out, nil
}

// ContainerStatus is CRI's, with the kubelet's request in it as containerd has that.
func (r *Runtime) ContainerStatus(_ context.Context, in *cri.ContainerStatusRequest) (*cri.ContainerStatusResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.containers[in.ContainerId]
	if c == nil {
		return nil, status.Errorf(codes.NotFound, "no such container: %s", in.ContainerId)
	}
	type device struct {
		Name string `json:"name"`
	}
	var said struct {
		Config struct {
			Devices []device `json:"CDI_devices,omitempty"`
		} `json:"config"`
	}
	for _, name := range r.devices[c.Id] {
		said.Config.Devices = append(said.Config.Devices, device{name})
	}
	out := &cri.ContainerStatusResponse{Status: &cri.ContainerStatus{Id: c.Id, Metadata: proto.CloneOf(c.Metadata), State: c.State, CreatedAt: c.CreatedAt,
		Labels: c.Labels, Annotations: c.Annotations}}
	if in.Verbose {
		text, err := json.Marshal(&said)
		if err != nil {
			return nil, err
		}
		out.Info = map[string]string{"info": string(text)}
	}
	return out, nil
}

func matches(selector, labels map[string]string) bool {
	for name, value := range selector {
		if labels[name] != value {
			return false
		}
	}
	return true
}

// ListPodSandbox is CRI's. All sandboxes are ready.
func (r *Runtime) ListPodSandbox(_ context.Context, in *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f, out := in.GetFilter(), &cri.ListPodSandboxResponse{}
	for _, uid := range slices.Sorted(maps.Keys(r.pods)) {
		p := r.pods[uid]
		if f.GetId() != "" && f.Id != uid || f.GetState() != nil && f.State.State != cri.PodSandboxState_SANDBOX_READY ||
			!matches(f.GetLabelSelector(), p.labels("")) {
			continue
		}
		out.Items = append(out.Items, &cri.PodSandbox{Id: uid, Metadata: p.metadata(), Labels: p.labels(""), State: cri.PodSandboxState_SANDBOX_READY})
	}
	return out, nil
}

// StopContainer is CRI's. The container ends at once.
func (r *Runtime) StopContainer(_ context.Context, in *cri.StopContainerRequest) (*cri.StopContainerResponse, error) {
	return &cri.StopContainerResponse{}, r.kill(in.ContainerId)
}

// taskService is containerd's.
type taskService struct {
	tasks.UnimplementedTasksServer
	r *Runtime
}

// Kill ends a container, by any signal.
func (t taskService) Kill(_ context.Context, in *tasks.KillRequest) (*emptypb.Empty, error) {
	return &emptypb.Empty{}, t.r.kill(in.ContainerID)
}

func (r *Runtime) kill(id string) error {
	r.mu.Lock()
	c := r.containers[id]
	r.mu.Unlock()
	if c == nil {
		return status.Errorf(codes.NotFound, "no such container: %s", id)
	}
	r.Set(id, cri.ContainerState_CONTAINER_EXITED, cri.ContainerEventType_CONTAINER_STOPPED_EVENT)
	return nil
}

// GetContainerEvents is CRI's.
func (r *Runtime) GetContainerEvents(_ *cri.GetEventsRequest, stream grpc.ServerStreamingServer[cri.ContainerEventResponse]) error {
	ch := make(chan *cri.ContainerEventResponse, 100)
	r.mu.Lock()
	r.listeners[ch] = true
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.listeners, ch)
	}()
	for {
		select {
		case e := <-ch:
			if err := stream.Send(e); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}
