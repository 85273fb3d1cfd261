// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

func preferredRequest(available, must, size int) *api.ContainerPreferredAllocationRequest {
	r := &api.ContainerPreferredAllocationRequest{AllocationSize: int32(size)}
	for i := range available {
		r.AvailableDeviceIDs = append(r.AvailableDeviceIDs, fmt.Sprintf("GPU-a::%d", i))
	}
	for i := range must {
		r.MustIncludeDeviceIDs = append(r.MustIncludeDeviceIDs, strings.Repeat("m", i*50))
	}
	return r
}

// FuzzDecodePreferred: what our decoder accepts is what the general one reads.
func FuzzDecodePreferred(f *testing.F) {
	for _, m := range []*api.PreferredAllocationRequest{
		{},
		{ContainerRequests: []*api.ContainerPreferredAllocationRequest{{}}},
		{ContainerRequests: []*api.ContainerPreferredAllocationRequest{preferredRequest(300, 4, 200), preferredRequest(0, 0, -1), preferredRequest(1, 1, 1)}},
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		if _, ok := decodePreferred(b); !ok {
			f.Errorf("not decoded: %v", m)
		}
		f.Add(b)
		f.Add(append(b, 0x20, 0x01)) // a field of tomorrow
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		requests, ok := decodePreferred(b)
		if !ok {
			return
		}
		var want api.PreferredAllocationRequest
		if err := proto.Unmarshal(b, &want); err != nil {
			if strings.Contains(err.Error(), "UTF-8") {
				return // Ours lets such an ID through to the source, which knows none like it.
			}
			t.Fatalf("decoded what is no message: %v: %x", err, b)
		}
		if got := (&api.PreferredAllocationRequest{ContainerRequests: requests}); !proto.Equal(got, &want) {
			t.Fatalf("got  %v\nwant %v", got, &want)
		}
	})
}

func TestCodecLeavesTheRestToGRPC(t *testing.T) {
	c := newCodec()
	want := &api.PreferredAllocationRequest{ContainerRequests: []*api.ContainerPreferredAllocationRequest{preferredRequest(3, 1, 2)}}
	b, err := proto.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	for _, unknown := range []string{"", "\x20\x01"} {
		// In two buffers, as it may come from the wire.
		data := mem.BufferSlice{mem.SliceBuffer(b[:7]), mem.SliceBuffer(append(b[7:len(b):len(b)], unknown...))}
		var got api.PreferredAllocationRequest
		if err := c.Unmarshal(data, &got); err != nil {
			t.Fatal(err)
		}
		if len(got.ContainerRequests) != 1 || !proto.Equal(got.ContainerRequests[0], want.ContainerRequests[0]) {
			t.Errorf("with %q after it: got %v, want %v", unknown, &got, want)
		}
	}
	var broken api.PreferredAllocationRequest
	if err := c.Unmarshal(mem.BufferSlice{mem.SliceBuffer(b[:len(b)-1])}, &broken); err == nil {
		t.Errorf("a message cut off was read as %v", &broken)
	}
}
