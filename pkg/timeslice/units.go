// SPDX-License-Identifier: Apache-2.0

package timeslice

import (
	"sort"

	"example.com/gpu-agent/pkg/gpu"
)

// Bounds on how many devices a node has, of all its resources together. The kubelet receives a
// resource's list as one gRPC message of at most 4 MiB. A device takes at most 68 bytes of it: an
// ID of 47 (a UUID of 40, "::", five digits), "Unhealthy", a NUMA node and their tags. 60,000
// devices take 3.9 MiB. In memory they take some 90 MiB at the moment at which a new list is made
// from an old one.
const (
	// MaxListed is the most devices that the lists may name at one moment, including withdrawn
	// devices that are still listed.
	MaxListed = 60_000
	// MaxDevices is the most devices that a partition may make of a node's GPUs. It is half of
	// MaxListed, so that a new partition's devices have room beside those of the old one.
	MaxDevices = MaxListed / 2
)

// Units returns how many memory units a GPU has: ⌊(total − reserved) / unit⌋, with both in MiB. It
// is 0 if unit is 0.
func Units(d *gpu.Device, unit gpu.MiB) int {
	if unit == 0 {
		return 0
	}
	return int(d.Usable() / unit)
}

// LeastUnit returns the smallest memory unit, a power of two in MiB, that divides the GPUs into at
// most most units in all.
func LeastUnit(gpus []*gpu.Device, most int) gpu.MiB {
	// With the largest shift no GPU has any.
	shift := sort.Search(63, func(i int) bool {
		n := 0
		for _, d := range gpus {
			n += Units(d, 1<<i)
		}
		return n <= most
	})
	return 1 << shift
}
