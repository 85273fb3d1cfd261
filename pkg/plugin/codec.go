// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"unsafe"

	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // the wrapped codec
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// codec is gRPC's own codec, except for the two messages that name every device. A *list is sent as
// its encoded bytes. The IDs of a preferred-allocation request are substrings of one message
// instead of thousands of strings.
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2("proto")} }

func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if l, ok := v.(*list); ok {
		return mem.BufferSlice{mem.SliceBuffer(l.message)}, nil
	}
	return c.CodecV2.Marshal(v)
}

func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	if req, ok := v.(*api.PreferredAllocationRequest); ok {
		if requests, ok := decodePreferred(data.Materialize()); ok {
			req.ContainerRequests = requests
			return nil
		}
	}
	return c.CodecV2.Unmarshal(data, v)
}

// Tags of deviceplugin/v1beta1/api.proto: field number << 3 | wire type. Wire type 0 is a varint,
// and 2 is bytes preceded by their length.
const (
	tagContainerRequests = 1<<3 | 2 // PreferredAllocationRequest
	tagAvailable         = 1<<3 | 2 // ContainerPreferredAllocationRequest
	tagMust              = 2<<3 | 2
	tagSize              = 3 << 3
)

// decodePreferred decodes a PreferredAllocationRequest. The IDs are substrings of message, which
// must not change afterwards. ok is false if the message has anything unexpected; the general
// decoder then decodes it.
func decodePreferred(message []byte) (requests []*api.ContainerPreferredAllocationRequest, ok bool) {
	for len(message) > 0 {
		body, n := protowire.ConsumeBytes(message[1:])
		if message[0] != tagContainerRequests || n < 0 {
			return nil, false
		}
		message = message[1+n:]
		r := &api.ContainerPreferredAllocationRequest{}
		for len(body) > 0 {
			tag := body[0]
			body = body[1:]
			if tag == tagSize {
				size, n := protowire.ConsumeVarint(body)
				if n < 0 {
					return nil, false
				}
				r.AllocationSize, body = int32(size), body[n:]
				continue
			}
			text, n := protowire.ConsumeBytes(body)
			if n < 0 {
				return nil, false
			}
			body = body[n:]
			id := unsafe.String(unsafe.SliceData(text), len(text))
			switch tag {
			case tagAvailable:
				if r.AvailableDeviceIDs == nil { // Guess the count: IDs are about equally long.
					r.AvailableDeviceIDs = make([]string, 0, len(body)/(len(id)+2)+1)
				}
				r.AvailableDeviceIDs = append(r.AvailableDeviceIDs, id)
			case tagMust:
				r.MustIncludeDeviceIDs = append(r.MustIncludeDeviceIDs, id)
			default:
				return nil, false
			}
		}
		requests = append(requests, r)
	}
	return requests, true
}
