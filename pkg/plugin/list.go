// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// maxListBytes is the longest message that the kubelet's gRPC client receives,
// 4 MiB by default. A longer one ends its stream and with it the endpoint.
const maxListBytes = 4 << 20

// list is a ListAndWatchResponse as it goes over the wire. It is encoded once,
// however often the kubelet opens its stream, and never changed after that.
type list struct {
	devices int
	message []byte
	// of is the Source's slice: the same slice again needs no second encoding.
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

// encode writes the message by hand: the generated types would need an
// allocation or more a device, for megabytes of garbage at every change.
func encode(devices []Device) (*list, error) {
	size := 0
	for i := range devices {
		size += sizeField(sizeDevice(&devices[i]))
	}
	l := &list{devices: len(devices), of: devices}
	if size > maxListBytes {
		return nil, fmt.Errorf("a list of %d devices takes %d bytes, and the kubelet receives at most %d: cut the GPUs into fewer devices",
			len(devices), size, maxListBytes)
	}
	b := make([]byte, 0, size)
	for i := range devices {
		d := &devices[i]
		b = appendLen(b, fieldListDevices, sizeDevice(d))
		b = appendString(b, fieldDeviceID, d.ID)
		b = appendString(b, fieldDeviceHealth, health(d))
		if len(d.NUMA) == 0 {
			continue
		}
		b = appendLen(b, fieldDeviceTopo, sizeTopology(d))
		for _, n := range d.NUMA {
			b = appendLen(b, fieldTopologyNodes, sizeNode(n))
			if n != 0 {
				b = protowire.AppendTag(b, fieldNodeID, protowire.VarintType)
				b = protowire.AppendVarint(b, uint64(n))
			}
		}
	}
	l.message = b
	return l, nil
}

func health(d *Device) string {
	if d.Healthy {
		return api.Healthy
	}
	return api.Unhealthy
}

func sizeDevice(d *Device) int {
	n := sizeField(len(health(d)))
	if d.ID != "" {
		n += sizeField(len(d.ID))
	}
	if len(d.NUMA) > 0 {
		n += sizeField(sizeTopology(d))
	}
	return n
}

func sizeTopology(d *Device) int {
	n := 0
	for _, node := range d.NUMA {
		n += sizeField(sizeNode(node))
	}
	return n
}

func sizeNode(n int) int {
	if n == 0 { // proto3 leaves zeros out
		return 0
	}
	return 1 + protowire.SizeVarint(uint64(n))
}

// sizeField is the size of a field of n bytes with its tag, which is one byte
// for all field numbers here.
func sizeField(n int) int { return 1 + protowire.SizeBytes(n) }

func appendLen(b []byte, field protowire.Number, n int) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.BytesType), uint64(n))
}

func appendString(b []byte, field protowire.Number, s string) []byte {
	if s == "" {
		return b
	}
	return protowire.AppendString(protowire.AppendTag(b, field, protowire.BytesType), s)
}
