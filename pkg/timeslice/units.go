// SPDX-License-Identifier: Apache-2.0

package timeslice

import (
	"fmt"
	"sort"

	"example.com/gpu-agent/pkg/gpu"
)

// MaxDevices is the most pieces that one resource of a node may have. The
// kubelet receives a resource's list as one gRPC message of at most 4 MiB. A
// device takes at most 68 bytes of it: an ID of 47 (a UUID of 40, "::", five
// digits), "Unhealthy", a NUMA node and their tags. 60,000 of those are
// 3.9 MiB.
const MaxDevices = 60_000

// Units is how many memory units a GPU has: ⌊(total − reserved) / unit⌋, with
// both in MiB.
func Units(d *gpu.Device, unit gpu.MiB) int {
	if unit == 0 {
		return 0
	}
	return int(d.Usable() / unit)
}

// CheckUnit refuses a memory unit with which the GPUs of a node would make more
// than [MaxDevices] devices, and says which unit would do. The error answers to
// gpu.ErrInvalid.
func CheckUnit(unit gpu.MiB, gpus []gpu.Device) error {
	if unit == 0 {
		return fmt.Errorf("a memory unit of 0 MiB: it must be at least 1 MiB: %w", gpu.ErrInvalid)
	}
	made := total(unit, gpus)
	if made <= MaxDevices {
		return nil
	}
	// The first power of two that does: people write units that way.
	shift := sort.Search(63, func(i int) bool { return total(1<<i, gpus) <= MaxDevices })
	return fmt.Errorf("a memory unit of %d MiB makes %d devices of this node's %d GPUs, and the kubelet takes at most %d of a resource "+
		"(a list is one message of at most 4 MiB): use a unit of %d MiB or more: %w",
		unit, made, len(gpus), MaxDevices, gpu.MiB(1)<<shift, gpu.ErrInvalid)
}

func total(unit gpu.MiB, gpus []gpu.Device) int {
	n := 0
	for i := range gpus {
		n += Units(&gpus[i], unit)
	}
	return n
}
