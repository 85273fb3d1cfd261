// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
)

// criRuntime is a container runtime as far as it concerns devices: what CRI says
// of its pods and containers, and that a container is made only while a CDI file
// defines the devices that the kubelet names.
type criRuntime struct {
	cri.UnimplementedRuntimeServiceServer

	cdiDir string
	server *grpc.Server
	ended  sync.WaitGroup

	mu sync.Mutex
	// Guarded by mu:
	serial     int
	containers map[string]*container // by ID
	listeners  map[chan *cri.ContainerEventResponse]bool
}

// container is one, with the CDI file that its devices came from.
type container struct {
	*cri.Container
	pod      *pod
	ids      []string // of its devices
	file     string
	contents string
}

func startRuntime(socket, cdiDir string) (*criRuntime, error) {
	r := &criRuntime{cdiDir: cdiDir, server: grpc.NewServer(), containers: map[string]*container{},
		listeners: map[chan *cri.ContainerEventResponse]bool{}}
	// The agent's own container: what lacks it is not the runtime of its node.
	agent := &pod{uid: "agent", namespace: agentNamespace, name: agentPod}
	r.containers["agent"] = &container{pod: agent, Container: &cri.Container{Id: "agent", PodSandboxId: agent.uid,
		Metadata: &cri.ContainerMetadata{Name: "gpu-agent"}, State: cri.ContainerState_CONTAINER_RUNNING,
		CreatedAt: time.Now().UnixNano(), Labels: labels(agent, "gpu-agent")}}
	cri.RegisterRuntimeServiceServer(r.server, r)
	if err := listen(r.server, socket, &r.ended); err != nil {
		return nil, fmt.Errorf("start a container runtime: %w", err)
	}
	return r, nil
}

func (r *criRuntime) stop() {
	r.server.Stop()
	r.ended.Wait()
}

// create makes a container with what Allocate gave for it, or says why a runtime
// would not.
func (r *criRuntime) create(e *entry) (id string, err error) {
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(r.cdiDir), cdilib.WithAutoRefresh(false))
	if err != nil {
		return "", err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.serial++
	c := &container{pod: e.pod, ids: e.ids, Container: &cri.Container{
		Id: fmt.Sprintf("%s-%s-%d", e.pod.name, e.container, r.serial), PodSandboxId: e.pod.uid,
		Metadata: &cri.ContainerMetadata{Name: e.container}, State: cri.ContainerState_CONTAINER_CREATED,
		CreatedAt: time.Now().UnixNano(), Annotations: maps.Clone(e.answer.Annotations), Labels: labels(e.pod, e.container),
	}}
	for _, d := range e.answer.CdiDevices {
		device := cache.GetDevice(d.Name)
		if device == nil {
			return "", fmt.Errorf("CreateContainerError: unresolvable CDI device %s", d.Name)
		}
		c.file = filepath.Base(device.GetSpec().GetPath())
		data, err := os.ReadFile(device.GetSpec().GetPath())
		if err != nil {
			return "", err
		}
		c.contents = string(data)
	}
	r.containers[c.Id] = c
	r.tellLocked(c, cri.ContainerEventType_CONTAINER_CREATED_EVENT)
	return c.Id, nil
}

func (r *criRuntime) start(id string) {
	r.set(id, cri.ContainerState_CONTAINER_RUNNING, cri.ContainerEventType_CONTAINER_STARTED_EVENT)
}

func (r *criRuntime) exit(id string) {
	r.set(id, cri.ContainerState_CONTAINER_EXITED, cri.ContainerEventType_CONTAINER_STOPPED_EVENT)
}

func (r *criRuntime) set(id string, s cri.ContainerState, e cri.ContainerEventType) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.containers[id]
	c.State = s
	r.tellLocked(c, e)
}

// remove forgets a pod's containers.
func (r *criRuntime) remove(p *pod) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(r.containers)) {
		if c := r.containers[id]; c.pod == p {
			delete(r.containers, id)
			r.tellLocked(c, cri.ContainerEventType_CONTAINER_DELETED_EVENT)
		}
	}
}

// living returns the pod's containers that are created or running; those of all
// pods with devices for nil.
func (r *criRuntime) living(p *pod) (out []container) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(r.containers)) {
		if c := r.containers[id]; (p == nil && c.file != "" || c.pod == p) && c.State != cri.ContainerState_CONTAINER_EXITED {
			out = append(out, *c)
		}
	}
	return out
}

// labels are those that the kubelet gives a container, or without a name a
// sandbox.
func labels(p *pod, container string) map[string]string {
	l := map[string]string{"io.kubernetes.pod.uid": p.uid, "io.kubernetes.pod.name": p.name, "io.kubernetes.pod.namespace": p.namespace}
	if container != "" {
		l["io.kubernetes.container.name"] = container
	}
	return l
}

func podMetadata(p *pod) *cri.PodSandboxMetadata {
	return &cri.PodSandboxMetadata{Name: p.name, Uid: p.uid, Namespace: p.namespace}
}

func (r *criRuntime) tellLocked(c *container, e cri.ContainerEventType) {
	for ch := range r.listeners {
		select {
		case ch <- &cri.ContainerEventResponse{
			ContainerId: c.Id, ContainerEventType: e, CreatedAt: time.Now().UnixNano(),
			PodSandboxStatus: &cri.PodSandboxStatus{Id: c.pod.uid, Metadata: podMetadata(c.pod), Labels: labels(c.pod, "")},
			ContainersStatuses: []*cri.ContainerStatus{{Id: c.Id, Metadata: c.Metadata, State: c.State, CreatedAt: c.CreatedAt,
				Labels: c.Labels, Annotations: c.Annotations}},
		}:
		default: // as containerd: who does not listen misses it
		}
	}
}

// Version is CRI's.
func (r *criRuntime) Version(context.Context, *cri.VersionRequest) (*cri.VersionResponse, error) {
	return &cri.VersionResponse{Version: "0.1.0", RuntimeName: "crash", RuntimeVersion: "v1", RuntimeApiVersion: "v1"}, nil
}

// ListContainers is CRI's.
func (r *criRuntime) ListContainers(_ context.Context, in *cri.ListContainersRequest) (*cri.ListContainersResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f, out := in.GetFilter(), &cri.ListContainersResponse{}
	for _, id := range slices.Sorted(maps.Keys(r.containers)) {
		c := r.containers[id]
		if f.GetId() != "" && f.Id != id || f.GetPodSandboxId() != "" && f.PodSandboxId != c.PodSandboxId ||
			f.GetState() != nil && f.State.State != c.State || !matches(f.GetLabelSelector(), c.Labels) {
			continue
		}
		out.Containers = append(out.Containers, &cri.Container{Id: c.Id, PodSandboxId: c.PodSandboxId, Metadata: c.Metadata,
			State: c.State, CreatedAt: c.CreatedAt, Labels: c.Labels, Annotations: c.Annotations})
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

// ListPodSandbox is CRI's: the sandboxes of pods that have a container.
func (r *criRuntime) ListPodSandbox(_ context.Context, in *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f, pods := in.GetFilter(), map[string]*pod{}
	for _, c := range r.containers {
		pods[c.pod.uid] = c.pod
	}
	out := &cri.ListPodSandboxResponse{}
	for _, uid := range slices.Sorted(maps.Keys(pods)) {
		p := pods[uid]
		if f.GetId() != "" && f.Id != uid || f.GetState() != nil && f.State.State != cri.PodSandboxState_SANDBOX_READY ||
			!matches(f.GetLabelSelector(), labels(p, "")) {
			continue
		}
		out.Items = append(out.Items, &cri.PodSandbox{Id: uid, Metadata: podMetadata(p), Labels: labels(p, ""), State: cri.PodSandboxState_SANDBOX_READY})
	}
	return out, nil
}

// GetContainerEvents is CRI's.
func (r *criRuntime) GetContainerEvents(_ *cri.GetEventsRequest, stream grpc.ServerStreamingServer[cri.ContainerEventResponse]) error {
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
