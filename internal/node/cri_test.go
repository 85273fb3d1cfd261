// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"reflect"
	"testing"

	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The generated package's word for what cri.go says by itself.
func TestWireNames(t *testing.T) {
	for got, want := range map[string]string{
		methodContainers: cri.RuntimeService_ListContainers_FullMethodName,
		methodSandboxes:  cri.RuntimeService_ListPodSandbox_FullMethodName,
		methodEvents:     cri.RuntimeService_GetContainerEvents_FullMethodName,
	} {
		if got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
	for got, want := range map[int32]int32{
		stateCreated: int32(cri.ContainerState_CONTAINER_CREATED),
		stateExited:  int32(cri.ContainerState_CONTAINER_EXITED),
	} {
		if got != want {
			t.Errorf("state %d, want %d", got, want)
		}
	}
	var request cri.ListPodSandboxRequest
	if err := proto.Unmarshal(readySandboxes, &request); err != nil || request.GetFilter().GetState() == nil ||
		request.GetFilter().GetState().GetState() != cri.PodSandboxState_SANDBOX_READY {
		t.Errorf("asks for %v, %v", &request, err)
	}
}

func kept(annotations map[string]string) (kept map[string]string) {
	for name, value := range annotations {
		if len(name) >= len(prefix) && name[:len(prefix)] == prefix {
			if kept == nil {
				kept = map[string]string{}
			}
			kept[name] = value
		}
	}
	return kept
}

func picked(labels map[string]string) (picked [4]string) {
	for i, name := range objectLabels {
		picked[i] = labels[name]
	}
	return picked
}

// agree holds cri.go's reading of a message against the generated package's:
// whatever that accepts is accepted and read alike.
func agree(t *testing.T, data []byte) {
	t.Helper()
	var containers cri.ListContainersResponse
	if proto.Unmarshal(data, &containers) == nil {
		var want []object
		for _, c := range containers.GetContainers() {
			want = append(want, object{id: c.GetId(), state: int32(c.GetState()), created: c.GetCreatedAt(),
				name: c.GetMetadata().GetName(), labels: picked(c.GetLabels()), annotations: kept(c.GetAnnotations())})
		}
		got, err := objects(data, containerLayout, prefix)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("containers %+v, %v\nwant %+v", got, err, want)
		}
	}
	var sandboxes cri.ListPodSandboxResponse
	if proto.Unmarshal(data, &sandboxes) == nil {
		var want []object
		for _, s := range sandboxes.GetItems() {
			m := s.GetMetadata()
			want = append(want, object{id: s.GetId(), state: int32(s.GetState()), created: s.GetCreatedAt(), name: m.GetName(),
				uid: m.GetUid(), namespace: m.GetNamespace(), labels: picked(s.GetLabels()), annotations: kept(s.GetAnnotations())})
		}
		if got, err := objects(data, sandboxLayout, prefix); err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("sandboxes %+v, %v\nwant %+v", got, err, want)
		}
	}
	var event cri.ContainerEventResponse
	if proto.Unmarshal(data, &event) == nil {
		got, err := decodeEvent(data, prefix)
		if want := wantEvent(&event); err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("event %+v, %v\nwant %+v", got, err, want)
		}
	}
}

func wantEvent(e *cri.ContainerEventResponse) ContainerEvent {
	want := ContainerEvent{Time: nanoseconds(e.GetCreatedAt()), Container: Container{ID: e.GetContainerId()}}
	switch e.GetContainerEventType() {
	case cri.ContainerEventType_CONTAINER_CREATED_EVENT:
		want.Kind = EventCreated
	case cri.ContainerEventType_CONTAINER_STARTED_EVENT:
		want.Kind = EventStarted
	case cri.ContainerEventType_CONTAINER_STOPPED_EVENT:
		want.Kind = EventStopped
	case cri.ContainerEventType_CONTAINER_DELETED_EVENT:
		want.Kind = EventDeleted
	}
	c := &want.Container
	for _, s := range e.GetContainersStatuses() {
		if s.GetId() == c.ID {
			c.Name = cmp.Or(s.GetLabels()[labelContainerName], s.GetMetadata().GetName())
			c.PodUID, c.Namespace, c.Pod = s.GetLabels()[labelPodUID], s.GetLabels()[labelPodNamespace], s.GetLabels()[labelPodName]
			c.Created, c.Annotations = nanoseconds(s.GetCreatedAt()), kept(s.GetAnnotations())
			break
		}
	}
	c.Running = want.Kind == EventStarted
	sandbox := e.GetPodSandboxStatus().GetMetadata()
	c.PodUID = cmp.Or(c.PodUID, sandbox.GetUid())
	c.Namespace = cmp.Or(c.Namespace, sandbox.GetNamespace())
	c.Pod = cmp.Or(c.Pod, sandbox.GetName())
	return want
}

// answers are messages with every field that cri.go reads, and more.
func answers(t testing.TB) (list [][]byte) {
	annotations := map[string]string{prefix + "01": "example.com/gpu", prefix: "", "io.kubernetes.container.hash": "1"}
	pod := &cri.PodSandboxMetadata{Name: "job", Uid: "u", Namespace: "train", Attempt: 7}
	for _, m := range []proto.Message{
		many(2, 3),
		&cri.ListContainersResponse{Containers: []*cri.Container{{}, {Id: "c", PodSandboxId: "s", State: 2, CreatedAt: -1, ImageId: "i",
			Metadata: &cri.ContainerMetadata{Name: "m", Attempt: 9}, Labels: labels("u", "n", "p", "c"), Annotations: annotations}}},
		&cri.ListPodSandboxResponse{Items: []*cri.PodSandbox{{}, {Id: "s", Metadata: pod, State: 1, CreatedAt: 1 << 62, Labels: labels("u", "n", "p", ""), Annotations: annotations, RuntimeHandler: "nvidia"}}},
		&cri.ContainerEventResponse{ContainerId: "c", ContainerEventType: 3, CreatedAt: 5,
			PodSandboxStatus: &cri.PodSandboxStatus{Id: "s", Metadata: pod, Network: &cri.PodSandboxNetworkStatus{Ip: "10.0.0.1"}},
			ContainersStatuses: []*cri.ContainerStatus{{Id: "d", Labels: labels("x", "x", "x", "x")},
				{Id: "c", Metadata: &cri.ContainerMetadata{Name: "main"}, State: 2, CreatedAt: 9, FinishedAt: 10, ExitCode: -9, Reason: "OOMKilled",
					Labels: labels("u", "n", "p", ""), Annotations: annotations, Mounts: []*cri.Mount{{HostPath: "/x"}}}}},
	} {
		data, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, data)
	}
	return list
}

func TestWire(t *testing.T) {
	for _, data := range answers(t) {
		agree(t, data)
		for n := range data { // cut short, at worst one is a whole message
			agree(t, data[:n])
		}
	}
	// Nothing that is broken is half believed.
	for _, broken := range []string{
		"\x0a",        // a field without its length
		"\x0a\x05abc", // longer than the message
		"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", // longer than anything
		"\x0a\x03\x0a\x01\xff",                         // an ID that is no UTF-8
		"\x07",                                         // no such type
		"\x0c",                                         // the end of a group that never began
		"\x0a\x02\x42\x05",                             // half a label
	} {
		if got, err := objects([]byte(broken), containerLayout, prefix); err == nil {
			t.Errorf("%q is taken for %+v", broken, got)
		}
	}
}

func FuzzWire(f *testing.F) {
	for _, seed := range answers(f) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data []byte) { agree(t, data) })
}
