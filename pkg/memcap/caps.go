// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"cmp"
	"math"
	"math/bits"
	"slices"

	"example.com/gpu-agent/pkg/gpu"
)

// Level is how strongly a cap is enforced. Its values are published in the status, the metrics and
// the documents.
type Level string

// The levels, from the strongest to the weakest.
const (
	// Hardware: a MIG instance has memory of its own, and its processes cannot use more.
	Hardware Level = "hardware"
	// Driver: the kernel driver refuses memory beyond a cgroup's limit.
	Driver Level = "driver"
	// API: the CUDA driver API inside the container refuses memory beyond the cap. The watchdog
	// ends a program that bypasses that API.
	API Level = "api"
	// Watchdog: the watchdog soon sees a container that takes more, and ends it.
	Watchdog Level = "watchdog"
)

// Weakest returns the weakest of some levels. It panics if there are none.
func Weakest(of ...Level) Level {
	weakness := func(l Level) int { return slices.Index([]Level{Hardware, Driver, API, Watchdog}, l) }
	return slices.MaxFunc(of, func(a, b Level) int { return cmp.Compare(weakness(a), weakness(b)) })
}

// None is the cap of a container that may use all of a GPU. It is larger than any GPU's memory. The
// limit page of the cap's library has the same value for "no cap".
const None = math.MaxUint64

const (
	mib = 1 << 20
	// most is the largest cap, in bytes: the largest multiple of a MiB below None.
	most = None &^ (mib - 1)
)

// Units returns the cap of n units of memory, in bytes; 0 if n is not positive. The contexts of the
// container's processes count towards the cap.
func Units(n int, unit gpu.MiB) uint64 {
	if n <= 0 {
		return 0
	}
	return times(uint64(n), uint64(unit))
}

// Replica returns the cap of one of a GPU's replicas, in bytes: an equal part, in whole MiB, of the
// memory that processes can use on the GPU. It is 0 if replicas is not positive.
func Replica(usable gpu.MiB, replicas int) uint64 {
	if replicas <= 0 {
		return 0
	}
	return times(uint64(usable)/uint64(replicas), 1)
}

// times returns n × size MiB in bytes, or most if that is larger.
func times(n, size uint64) uint64 {
	high, product := bits.Mul64(n, size)
	if high != 0 || product > most/mib {
		return most
	}
	return product * mib
}

// plus adds two amounts. It returns None if one of them is None or the sum overflows.
func plus(a, b uint64) uint64 {
	sum, carry := bits.Add64(a, b, 0)
	if carry != 0 {
		return None
	}
	return sum
}

// Process is a process on a GPU, as a sample lists it.
type Process struct {
	// PID is the process ID in the PID namespace of the caller. GI and CI are the IDs of the MIG
	// instance, or -1 if there is none.
	PID, GI, CI int
	// Start is when the process began, in clock ticks since boot, from /proc/<pid>/stat. Start and
	// PID together identify a process. 0 means that there is no such process, or that its start
	// could not be read.
	Start uint64
	// Container is the ID of the process's container. It is empty if the process is in no pod, or
	// if the container could not be found.
	Container string
	// Bytes is the memory of the process, and valid only if Known is true.
	Bytes uint64
	Known bool
	// Counted is what its container counts for this process, in bytes. The container may write any
	// number. It is 0 if there is no count.
	Counted uint64
}

// Merge turns the driver's lists for one GPU into one entry for each process and MIG instance,
// sorted. For a process in several lists it takes the largest known figure, since each list has all
// of its memory. The caller fills in Start, Container and Counted.
func Merge(lists []gpu.Process) []Process {
	var merged []Process
	for _, p := range lists {
		m := Process{PID: p.PID, GI: p.GI, CI: p.CI, Known: p.Known}
		if p.Known {
			m.Bytes = p.Bytes
		}
		merged = append(merged, m)
	}
	slices.SortFunc(merged, func(a, b Process) int {
		if a.Known != b.Known && comparePlaces(a, b) == 0 {
			if a.Known {
				return -1
			}
			return 1
		}
		return cmp.Or(comparePlaces(a, b), cmp.Compare(b.Bytes, a.Bytes))
	})
	return slices.CompactFunc(merged, func(a, b Process) bool { return comparePlaces(a, b) == 0 })
}

func comparePlaces(a, b Process) int {
	return cmp.Or(cmp.Compare(a.PID, b.PID), cmp.Compare(a.GI, b.GI), cmp.Compare(a.CI, b.CI))
}
