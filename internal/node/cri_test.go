// SPDX-License-Identifier: Apache-2.0

package node

import (
	"net"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// asItIs is a server's codec whose answers are bytes.
type asItIs struct{}

func (asItIs) Name() string                         { return "proto" }
func (asItIs) Unmarshal(mem.BufferSlice, any) error { return nil }
func (asItIs) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(v.([]byte))}, nil
}

// saying returns a Runtime whose runtime has one answer to all questions.
func saying(t *testing.T, answer []byte) *Runtime {
	t.Helper()
	path := filepath.Join(t.TempDir(), "cri.sock")
	listener, err := net.Listen("unix", path)
	must(t, err)
	server := grpc.NewServer(grpc.ForceServerCodecV2(asItIs{}), grpc.UnknownServiceHandler(
		func(_ any, stream grpc.ServerStream) error { return stream.SendMsg(answer) }))
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	r := NewRuntime(RuntimeOptions{Endpoint: path, AnnotationPrefix: prefix})
	t.Cleanup(func() { r.Close() })
	return r
}

// Nothing that is broken is half believed.
func TestBrokenAnswers(t *testing.T) {
	for name, broken := range map[string]string{
		"a field without its length":    "\x0a\x03\x0a\x01c\x0a",
		"longer than the message":       "\x0a\x03\x0a\x01c\x0a\x05abc",
		"longer than anything":          "\x0a\x03\x0a\x01c\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
		"an ID that is no UTF-8":        "\x0a\x03\x0a\x01c\x0a\x03\x0a\x01\xff",
		"a label's value, likewise":     "\x0a\x03\x0a\x01c\x0a\x08\x42\x06\x0a\x01k\x12\x01\xff",
		"a group that does not end":     "\x0a\x03\x0a\x01c\x0b",
		"a field of number zero":        "\x0a\x03\x0a\x01c\x02\x00",
		"a type that there is not":      "\x0a\x03\x0a\x01c\x0f",
		"a number of too many bytes":    "\x0a\x03\x0a\x01c\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
		"broken in a container's label": "\x0a\x03\x0a\x01c\x0a\x03\x42\x01\x0a",
	} {
		r := saying(t, []byte(broken))
		if got, err := r.Containers(t.Context()); err == nil || got != nil {
			t.Errorf("%s: %q is taken for %+v", name, broken, got)
		}
	}
	// What a later CRI adds does no harm.
	r := saying(t, []byte("\x0a\x0b\x0a\x01c\xf8\x7f\x05\xfa\x7f\x02xx"+"\xfa\x7f\x02xx"))
	if got, err := r.Containers(t.Context()); err != nil || len(got) != 1 || got[0].ID != "c" {
		t.Errorf("%+v, %v, want one container with the ID c", got, err)
	}
}

// An empty container is two bytes on the wire and a hundred times as much in memory.
func TestListIsRefusedBeforeItIsDecoded(t *testing.T) {
	list := make([]byte, 0, 2*(maxFields+1))
	for range maxFields + 1 {
		list = append(list, 1<<3|2, 0)
	}
	var answer cri.ListContainersResponse
	if err := newBounded().Unmarshal(mem.BufferSlice{mem.SliceBuffer(list)}, &answer); err == nil || answer.GetContainers() != nil {
		t.Errorf("%d containers, %v, want a refusal", len(answer.GetContainers()), err)
	}
	if err := newBounded().Unmarshal(mem.BufferSlice{mem.SliceBuffer(list[2:])}, &answer); err != nil || len(answer.GetContainers()) != maxFields {
		t.Errorf("%d containers, %v, want %d", len(answer.GetContainers()), err, maxFields)
	}
}

// FuzzBounded holds that the bound on answers changes nothing of what is below it:
// whatever the general decoder accepts is accepted and read alike, in one piece
// and in two.
func FuzzBounded(f *testing.F) {
	sandbox := &cri.PodSandboxStatus{Id: "s", Metadata: &cri.PodSandboxMetadata{Name: "job", Uid: "u", Namespace: "train", Attempt: 7}}
	for _, m := range []proto.Message{
		many(2, 3),
		&cri.ContainerEventResponse{ContainerId: "c", ContainerEventType: 3, CreatedAt: 5, PodSandboxStatus: sandbox,
			ContainersStatuses: []*cri.ContainerStatus{{Id: "d"}, {Id: "c", State: 2, ExitCode: -9, Labels: labels("u", "n", "p", "c")}}},
	} {
		data, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data, len(data)/2)
	}
	f.Fuzz(func(t *testing.T, data []byte, cut int) {
		for _, want := range []proto.Message{&cri.ListContainersResponse{}, &cri.ContainerEventResponse{}} {
			got := want.ProtoReflect().New().Interface()
			wantErr := proto.Unmarshal(data, want)
			cut = min(max(cut, 0), len(data))
			err := newBounded().Unmarshal(mem.BufferSlice{mem.SliceBuffer(data[:cut]), mem.SliceBuffer(data[cut:])}, got)
			if (err == nil) != (wantErr == nil) || err == nil && !proto.Equal(got, want) {
				t.Fatalf("%v, %v\nwant %v, %v", got, err, want, wantErr)
			}
		}
	})
}
