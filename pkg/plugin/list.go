// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// maxListBytes is the longest message that the kubelet's gRPC client receives: 4 MiB by default. A
// longer one ends its stream, and so all devices of the resource.
const maxListBytes = 4 << 20

// list is an encoded ListAndWatchResponse. It is encoded once for all streams, and never changed.
type list struct {
	devices, healthy int
	message          []byte
	// of is the Source's slice. If the Source returns it again, it is not encoded again.
	of []Device
}

// Field numbers of deviceplugin/v1beta1/api.proto.
const (
	fieldListDevices   protowire.Number = 1 // ListAndWatchResponse.devices
	fieldDeviceID      protowire.Number = 1 // Device.ID
	fieldDeviceHealth  protowire.Number = 2 // Device.health
	fieldDeviceTopo    protowire.Number = 3 // Device.topology
	fieldTopologyNodes protowire.Number = 1 // TopologyInfo.nodes
	fieldNodeID        protowire.Number = 1 // NUMANode.ID
)

// encode encodes a list by hand. The generated types would allocate memory for each device:
// megabytes of garbage at every change. It fails if the message is too long for the kubelet.
func encode(devices []Device) (*list, error) {
	size := 0
	var device []byte // reused
	for i := range devices {
		device = devices[i].appendTo(device[:0])
		size += 1 + protowire.SizeBytes(len(device))
	}
	if size > maxListBytes {
		return nil, fmt.Errorf("a list of %d devices takes %d bytes, and the kubelet receives at most %d: "+
			"cut the GPUs into fewer devices",
			len(devices), size, maxListBytes)
	}
	b, healthy := make([]byte, 0, size), 0
	for i := range devices {
		if devices[i].Healthy {
			healthy++
		}
		device = devices[i].appendTo(device[:0])
		b = appendBytes(b, fieldListDevices, device)
	}
	return &list{devices: len(devices), healthy: healthy, message: b, of: devices}, nil
}

// appendTo appends the device's message.
func (d *Device) appendTo(b []byte) []byte {
	b = appendString(b, fieldDeviceID, d.ID)
	b = appendString(b, fieldDeviceHealth, health(d))
	if len(d.NUMA) == 0 {
		return b
	}
	var topologyRoom, nodeRoom [32]byte
	topology := topologyRoom[:0]
	for _, n := range d.NUMA {
		node := nodeRoom[:0]
		if n != 0 { // proto3 omits zeros
			node = protowire.AppendVarint(protowire.AppendTag(node, fieldNodeID, protowire.VarintType), uint64(n))
		}
		topology = appendBytes(topology, fieldTopologyNodes, node)
	}
	return appendBytes(b, fieldDeviceTopo, topology)
}

func health(d *Device) string {
	if d.Healthy {
		return api.Healthy
	}
	return api.Unhealthy
}

func appendBytes(b []byte, field protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, field, protowire.BytesType), value)
}

func appendString(b []byte, field protowire.Number, s string) []byte {
	if s == "" {
		return b
	}
	return protowire.AppendString(protowire.AppendTag(b, field, protowire.BytesType), s)
}
