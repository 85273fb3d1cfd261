// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/sha256"
	"fmt"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// containers is the runtime's side of the CRI as far as the agent asks: the
// containers of the kubelet's pods, and news of those that end.
type containers struct {
	cri.UnimplementedRuntimeServiceServer
	*kubelet
}

// socket is the runtime's socket.
func (k *kubelet) socket() string { return filepath.Join(k.dir, "cri.sock") }

// containerID is the runtime's name for a pod's container, in the form that
// runtimes have for it.
func (p *pod) containerID() string { return fmt.Sprintf("%x", sha256.Sum256([]byte(p.name))) }

// create makes a pod's container, which runs at once.
func (k *kubelet) create(p *pod) {
	k.mu.Lock()
	defer k.mu.Unlock()
	p.created = time.Now()
}

// endedLocked tells that a pod's container has ended.
func (k *kubelet) endedLocked(p *pod) {
	e := &cri.ContainerEventResponse{ContainerId: p.containerID(), ContainerEventType: cri.ContainerEventType_CONTAINER_STOPPED_EVENT,
		CreatedAt: time.Now().UnixNano(), PodSandboxStatus: &cri.PodSandboxStatus{Id: p.name, Metadata: p.metadata(), Labels: p.labels("")},
		ContainersStatuses: []*cri.ContainerStatus{{Id: p.containerID(), Metadata: &cri.ContainerMetadata{Name: containerName},
			State: cri.ContainerState_CONTAINER_EXITED, CreatedAt: p.created.UnixNano(),
			Labels: p.labels(containerName), Annotations: p.answer.GetAnnotations()}}}
	for ch := range k.listeners {
		select {
		case ch <- e:
		default: // as containerd: who does not listen misses it
		}
	}
}

// ownPod is the agent's: a runtime that lacks it is not the one of its node.
var ownPod = &pod{name: agentPodName, created: time.Now()}

func (p *pod) metadata() *cri.PodSandboxMetadata {
	m := &cri.PodSandboxMetadata{Name: p.name, Uid: p.name, Namespace: podNamespace}
	if p == ownPod {
		m.Namespace = agentPodNamespace
	}
	return m
}

// labels are those that the kubelet gives a container, or without a name a
// sandbox.
func (p *pod) labels(container string) map[string]string {
	m := p.metadata()
	l := map[string]string{"io.kubernetes.pod.uid": m.Uid, "io.kubernetes.pod.name": m.Name, "io.kubernetes.pod.namespace": m.Namespace}
	if container != "" {
		l["io.kubernetes.container.name"] = container
	}
	return l
}

// ListContainers is CRI's. The agent asks without a filter.
func (c *containers) ListContainers(context.Context, *cri.ListContainersRequest) (*cri.ListContainersResponse, error) {
	out := &cri.ListContainersResponse{}
	for p := range c.each() {
		if !p.created.IsZero() {
			out.Containers = append(out.Containers, &cri.Container{Id: p.containerID(), PodSandboxId: p.name,
				Metadata: &cri.ContainerMetadata{Name: containerName}, State: cri.ContainerState_CONTAINER_RUNNING,
				CreatedAt: p.created.UnixNano(), Labels: p.labels(containerName), Annotations: p.answer.GetAnnotations()})
		}
	}
	return out, nil
}

// ListPodSandbox is CRI's. The agent asks for those that are ready, as all are.
func (c *containers) ListPodSandbox(context.Context, *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error) {
	out := &cri.ListPodSandboxResponse{}
	for p := range c.each() {
		out.Items = append(out.Items, &cri.PodSandbox{Id: p.name, Metadata: p.metadata(), Labels: p.labels(""),
			State: cri.PodSandboxState_SANDBOX_READY})
	}
	return out, nil
}

// each goes through all pods, the agent's own among them, while nothing changes.
func (c *containers) each() func(func(*pod) bool) {
	return func(yield func(*pod) bool) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if !yield(ownPod) {
			return
		}
		for _, p := range c.pods {
			if !yield(p) {
				return
			}
		}
	}
}

// GetContainerEvents is CRI's.
func (c *containers) GetContainerEvents(_ *cri.GetEventsRequest, stream grpc.ServerStreamingServer[cri.ContainerEventResponse]) error {
	ch := make(chan *cri.ContainerEventResponse, 100)
	c.mu.Lock()
	c.listeners[ch] = true
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.listeners, ch)
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
