// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

// The part of the CRI that is needed, from runtime/v1/api.proto. Its generated
// package would cost twice the time and garbage for an answer and some 3 MB of
// resident memory, a tenth of what the agent may use; tests hold this file
// against it.
const (
	methodContainers = "/runtime.v1.RuntimeService/ListContainers"
	methodSandboxes  = "/runtime.v1.RuntimeService/ListPodSandbox"
	methodEvents     = "/runtime.v1.RuntimeService/GetContainerEvents"
	methodVersion    = "/runtime.v1.RuntimeService/Version"

	// ContainerState
	stateCreated = 0
	stateExited  = 2
	// PodSandboxState
	sandboxReady = 0

	// Fields of ContainerEventResponse.
	eventID, eventType, eventCreated, eventSandbox, eventStatuses = 1, 2, 3, 4, 5
	// Fields of VersionResponse.
	versionName, versionNumber = 2, 3
	// Fields of ContainerMetadata, which has only the first, and of
	// PodSandboxMetadata.
	metadataName, metadataUID, metadataNamespace = 1, 2, 3
)

// readySandboxes is a ListPodSandboxRequest with its filter's state set to
// SANDBOX_READY, which is zero and so has no bytes of its own.
var readySandboxes = []byte{1<<3 | 2, 2, 2<<3 | 2, 0}

// maxObjects bounds what an answer of few bytes can take in memory: an empty
// container has two bytes on the wire. A node has some hundreds.
const maxObjects = 1 << 16

// layout is where a message has what Container, ContainerStatus, PodSandbox and
// PodSandboxStatus all have. All have their ID as field 1.
type layout struct {
	metadata, state, created, labels, annotations protowire.Number
	// pod: the metadata is a sandbox's.
	pod bool
}

var (
	containerLayout       = layout{3, 6, 7, 8, 9, false}
	containerStatusLayout = layout{2, 3, 4, 12, 13, false}
	sandboxLayout         = layout{2, 3, 4, 5, 6, true}
	sandboxStatusLayout   = layout{2, 3, 4, 7, 8, true}
)

// Labels that the kubelet gives every container and sandbox, as in
// k8s.io/kubelet/pkg/types.
const (
	labelPodName       = "io.kubernetes.pod.name"
	labelPodNamespace  = "io.kubernetes.pod.namespace"
	labelPodUID        = "io.kubernetes.pod.uid"
	labelContainerName = "io.kubernetes.container.name"
)

// object is what is kept of one of those messages.
type object struct {
	id      string
	state   int32
	created int64
	// The metadata of a container has a name, that of a sandbox all three.
	name, uid, namespace string
	labels               [4]string // of the names in objectLabels
	annotations          map[string]string
}

var objectLabels = [4]string{labelPodUID, labelPodNamespace, labelPodName, labelContainerName}

func (o *object) container() Container {
	return Container{ID: o.id, PodUID: o.labels[0], Namespace: o.labels[1], Pod: o.labels[2],
		Name: cmp.Or(o.labels[3], o.name), Created: nanoseconds(o.created), Annotations: o.annotations}
}

func nanoseconds(n int64) time.Time {
	if n <= 0 {
		return time.Time{}
	}
	return time.Unix(0, n)
}

// decode adds a message to o, and of its annotations those whose names begin
// with prefix; an empty prefix means none.
func (o *object) decode(message []byte, at layout, prefix string) error {
	return fields(message, func(f field) (err error) {
		switch {
		case f.is(1, protowire.BytesType):
			o.id, err = f.text()
		case f.is(at.metadata, protowire.BytesType):
			return fields(f.bytes, func(f field) (err error) {
				switch {
				case f.is(metadataName, protowire.BytesType):
					o.name, err = f.text()
				case at.pod && f.is(metadataUID, protowire.BytesType):
					o.uid, err = f.text()
				case at.pod && f.is(metadataNamespace, protowire.BytesType):
					o.namespace, err = f.text()
				}
				return err
			})
		case f.is(at.state, protowire.VarintType):
			o.state = int32(f.number)
		case f.is(at.created, protowire.VarintType):
			o.created = int64(f.number)
		case f.is(at.labels, protowire.BytesType):
			key, value, err := f.pair()
			for i, name := range objectLabels {
				if err == nil && string(key.bytes) == name {
					o.labels[i], err = value.text()
				}
			}
			return err
		case f.is(at.annotations, protowire.BytesType):
			key, value, err := f.pair()
			if err != nil || prefix == "" || len(key.bytes) < len(prefix) || string(key.bytes[:len(prefix)]) != prefix {
				return err
			}
			name, err := key.text()
			if err != nil {
				return err
			}
			if o.annotations == nil {
				o.annotations = map[string]string{}
			}
			o.annotations[name], err = value.text()
			return err
		}
		return err
	})
}

// field is a field of a message. Its bytes live as long as the message.
type field struct {
	num    protowire.Number
	kind   protowire.Type
	number uint64 // of a varint
	bytes  []byte // of a message, a string or bytes
}

// is tells whether this is a field that the schema has; a known number with
// another type is an unknown field.
func (f field) is(num protowire.Number, kind protowire.Type) bool {
	return f.num == num && f.kind == kind
}

func (f field) text() (string, error) {
	if !utf8.Valid(f.bytes) {
		return "", fmt.Errorf("field %d is no UTF-8", f.num)
	}
	return string(f.bytes), nil
}

// pair returns key and value of an entry of a map.
func (f field) pair() (key, value field, err error) {
	err = fields(f.bytes, func(f field) error {
		switch {
		case f.is(1, protowire.BytesType):
			key = f
		case f.is(2, protowire.BytesType):
			value = f
		}
		return nil
	})
	return key, value, err
}

// fields calls fn for each field of a message until it fails.
func fields(message []byte, fn func(field) error) error {
	for len(message) > 0 {
		num, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			return protowire.ParseError(n)
		}
		message = message[n:]
		f := field{num: num, kind: kind}
		switch kind {
		case protowire.VarintType:
			f.number, n = protowire.ConsumeVarint(message)
		case protowire.BytesType:
			f.bytes, n = protowire.ConsumeBytes(message)
		default:
			n = protowire.ConsumeFieldValue(num, kind, message)
		}
		if n < 0 {
			return protowire.ParseError(n)
		}
		message = message[n:]
		if err := fn(f); err != nil {
			return err
		}
	}
	return nil
}

// objects decodes an answer that is a list of them, its field 1.
func objects(message []byte, at layout, prefix string) (list []object, err error) {
	err = fields(message, func(f field) error {
		if !f.is(1, protowire.BytesType) {
			return nil
		}
		if len(list) == maxObjects {
			return fmt.Errorf("more than %d in one answer", maxObjects)
		}
		list = append(list, object{})
		return list[len(list)-1].decode(f.bytes, at, prefix)
	})
	if err != nil {
		return nil, err
	}
	return list, nil
}

// decodeEvent decodes a ContainerEventResponse; its kind is EventMissed where it
// is none that is known.
func decodeEvent(message []byte, prefix string) (ContainerEvent, error) {
	var event ContainerEvent
	var id string
	var kind int32
	var sandbox object
	var statuses [][]byte
	err := fields(message, func(f field) (err error) {
		switch {
		case f.is(eventID, protowire.BytesType):
			id, err = f.text()
		case f.is(eventType, protowire.VarintType):
			kind = int32(f.number)
		case f.is(eventCreated, protowire.VarintType):
			event.Time = nanoseconds(int64(f.number))
		case f.is(eventSandbox, protowire.BytesType):
			err = sandbox.decode(f.bytes, sandboxStatusLayout, "")
		case f.is(eventStatuses, protowire.BytesType):
			statuses = append(statuses, f.bytes)
		}
		return err
	})
	if err != nil {
		return ContainerEvent{}, err
	}
	if kind >= 0 && kind < 4 { // the CRI's order is ours
		event.Kind = EventCreated + EventKind(kind)
	}
	event.Container.ID = id
	for _, message := range statuses {
		var o object
		if err := o.decode(message, containerStatusLayout, prefix); err != nil {
			return ContainerEvent{}, err
		}
		if o.id == id {
			event.Container = o.container()
			break
		}
	}
	c := &event.Container
	c.Running = event.Kind == EventStarted
	c.PodUID = cmp.Or(c.PodUID, sandbox.uid)
	c.Namespace = cmp.Or(c.Namespace, sandbox.namespace)
	c.Pod = cmp.Or(c.Pod, sandbox.name)
	return event, nil
}

// version asks what a runtime calls itself, and of which version it is.
func version(ctx context.Context, conn *grpc.ClientConn) (name, number string, err error) {
	err = conn.Invoke(ctx, methodVersion, []byte(nil), func(message []byte) error {
		return fields(message, func(f field) (err error) {
			switch {
			case f.is(versionName, protowire.BytesType):
				name, err = f.text()
			case f.is(versionNumber, protowire.BytesType):
				number, err = f.text()
			}
			return err
		})
	}, grpc.ForceCodecV2(wire{}))
	return name, number, err
}

// wire is a gRPC codec whose requests are bytes and whose answers are given to a
// function, which keeps nothing of the bytes.
type wire struct{}

func (wire) Name() string { return "proto" }

func (wire) Marshal(request any) (mem.BufferSlice, error) {
	message, ok := request.([]byte)
	if !ok {
		return nil, fmt.Errorf("a request of type %T", request)
	}
	return mem.BufferSlice{mem.SliceBuffer(message)}, nil
}

func (wire) Unmarshal(data mem.BufferSlice, answer any) error {
	decode, ok := answer.(func([]byte) error)
	if !ok {
		return errors.New("an answer that nobody decodes")
	}
	message := data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer message.Free()
	return decode(message.ReadOnlyData())
}
