// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"strings"

	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // the codec that ours stands before
	"google.golang.org/grpc/mem"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// codec is gRPC's own but for the two messages that name every device: a *list
// goes out as the bytes that it is, and a preferred-allocation request comes in
// as one string divided into IDs, not as thousands of strings.
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
		var message strings.Builder
		message.Grow(data.Len())
		for _, b := range data {
			message.Write(b.ReadOnlyData())
		}
		if requests, ok := decodePreferred(message.String()); ok {
			req.ContainerRequests = requests
			return nil
		}
	}
	return c.CodecV2.Unmarshal(data, v)
}

// Tags of deviceplugin/v1beta1/api.proto: field number << 3 | wire type, where 0
// is a varint and 2 bytes with their length before them.
const (
	tagContainerRequests = 1<<3 | 2 // PreferredAllocationRequest
	tagAvailable         = 1<<3 | 2 // ContainerPreferredAllocationRequest
	tagMust              = 2<<3 | 2
	tagSize              = 3 << 3
)

// decodePreferred decodes a PreferredAllocationRequest; its IDs are parts of
// message. It is not ok with anything that it does not know, which is left to
// the general decoder.
func decodePreferred(message string) (requests []*api.ContainerPreferredAllocationRequest, ok bool) {
	for message != "" {
		var body string
		if message[0] != tagContainerRequests {
			return nil, false
		}
		if body, message, ok = cutBytes(message[1:]); !ok {
			return nil, false
		}
		r := &api.ContainerPreferredAllocationRequest{}
		for body != "" {
			tag := body[0]
			body = body[1:]
			if tag == tagSize {
				var n uint64
				if n, body, ok = cutVarint(body); !ok {
					return nil, false
				}
				r.AllocationSize = int32(n)
				continue
			}
			var id string
			if id, body, ok = cutBytes(body); !ok {
				return nil, false
			}
			switch tag {
			case tagAvailable:
				if r.AvailableDeviceIDs == nil { // IDs are about equally long.
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

func cutBytes(s string) (field, rest string, ok bool) {
	n, s, ok := cutVarint(s)
	if !ok || n > uint64(len(s)) {
		return "", "", false
	}
	return s[:n], s[n:], true
}

func cutVarint(s string) (n uint64, rest string, ok bool) {
	for i := range min(len(s), 10) {
		if i == 9 && s[i] > 1 {
			break // more than 64 bits
		}
		n |= uint64(s[i]&0x7f) << (7 * i)
		if s[i] < 0x80 {
			return n, s[i+1:], true
		}
	}
	return 0, "", false
}
