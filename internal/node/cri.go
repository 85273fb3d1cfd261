// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The labels that the kubelet gives every container and sandbox, as in k8s.io/kubelet/pkg/types.
const (
	labelPodName       = "io.kubernetes.pod.name"
	labelPodNamespace  = "io.kubernetes.pod.namespace"
	labelPodUID        = "io.kubernetes.pod.uid"
	labelContainerName = "io.kubernetes.container.name"
	// annotationGrace is the pod's grace period in seconds.
	annotationGrace = "io.kubernetes.pod.terminationGracePeriod"
)

// mostGrace bounds Container.Grace.
const mostGrace = 365 * 24 * time.Hour

// described has the methods that cri.Container and cri.ContainerStatus share.
type described interface {
	GetId() string
	GetMetadata() *cri.ContainerMetadata
	GetCreatedAt() int64
	GetLabels() map[string]string
	GetAnnotations() map[string]string
}

// container returns the fields of c that are kept, without Running and CDI.
func (r *Runtime) container(c described) Container {
	l := c.GetLabels()
	kept := Container{ID: c.GetId(), PodUID: l[labelPodUID], Namespace: l[labelPodNamespace], Pod: l[labelPodName],
		Name: cmp.Or(l[labelContainerName], c.GetMetadata().GetName()), Created: nanoseconds(c.GetCreatedAt())}
	if seconds, err := strconv.ParseUint(c.GetAnnotations()[annotationGrace], 10, 32); err == nil {
		kept.Grace = min(time.Duration(seconds)*time.Second, mostGrace)
	}
	for name, value := range c.GetAnnotations() {
		if r.o.AnnotationPrefix == "" || !strings.HasPrefix(name, r.o.AnnotationPrefix) {
			continue
		}
		if kept.Annotations == nil {
			kept.Annotations = map[string]string{}
		}
		kept.Annotations[name] = value
	}
	return kept
}

// event returns the fields of e that are kept. Its kind is EventMissed if the kind of e is not
// known.
func (r *Runtime) event(e *cri.ContainerEventResponse) ContainerEvent {
	event := ContainerEvent{Container: Container{ID: e.GetContainerId()}}
	switch e.GetContainerEventType() {
	case cri.ContainerEventType_CONTAINER_CREATED_EVENT:
		event.Kind = EventCreated
	case cri.ContainerEventType_CONTAINER_STARTED_EVENT:
		event.Kind = EventStarted
	case cri.ContainerEventType_CONTAINER_STOPPED_EVENT:
		event.Kind = EventStopped
	case cri.ContainerEventType_CONTAINER_DELETED_EVENT:
		event.Kind = EventDeleted
	}
	for _, s := range e.GetContainersStatuses() {
		if s.GetId() == e.GetContainerId() {
			event.Container = r.container(s)
			break
		}
	}
	c, sandbox := &event.Container, e.GetPodSandboxStatus().GetMetadata()
	c.Running = event.Kind == EventStarted
	c.PodUID = cmp.Or(c.PodUID, sandbox.GetUid())
	c.Namespace = cmp.Or(c.Namespace, sandbox.GetNamespace())
	c.Pod = cmp.Or(c.Pod, sandbox.GetName())
	return event
}

func nanoseconds(n int64) time.Time {
	if n <= 0 {
		return time.Time{}
	}
	return time.Unix(0, n)
}

// maxFields is the largest number of fields in an answer. A list has one field for each element. An
// empty container is two bytes on the wire and a hundred times as much in memory. A node has some
// hundreds of containers.
const maxFields = 1 << 16

// bounded is gRPC's own codec, but it decodes no answer with more than maxFields fields.
type bounded struct{ encoding.CodecV2 }

func newBounded() bounded { return bounded{encoding.GetCodecV2(proto.Name)} }

// Name is empty so that requests have the content type application/grpc. gRPC appends the name of a
// forced codec. CRI-O closes a connection whose first request has any other content type.
func (bounded) Name() string { return "" }

func (b bounded) Unmarshal(data mem.BufferSlice, answer any) error {
	message := data.Materialize() // see exact
	rest := message
	for count := 0; len(rest) > 0; count++ {
		_, _, n := protowire.ConsumeField(rest)
		if n < 0 {
			return protowire.ParseError(n)
		}
		if count == maxFields {
			return fmt.Errorf("more than %d fields in one answer", maxFields)
		}
		rest = rest[n:]
	}
	return b.CodecV2.Unmarshal(mem.BufferSlice{mem.SliceBuffer(message)}, answer)
}
