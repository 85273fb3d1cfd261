// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"cmp"
	"math"
	"math/bits"
	"slices"

	"example.com/gpu-agent/pkg/gpu"
)

// Level is how strongly a cap is enforced. The words are published: in status, in
// metrics and in the documents.
type Level string

// The levels, the strongest first.
const (
	// Hardware: a MIG instance has its own memory; nothing reaches beyond it.
	Hardware Level = "hardware"
	// Driver: the kernel driver refuses what is beyond a cgroup's limit.
	Driver Level = "driver"
	// API: the CUDA driver API inside the container refuses it. A program that
	// bypasses that API is left to the watchdog.
	API Level = "api"
	// Watchdog: a container that takes more is seen soon after, and ended.
	Watchdog Level = "watchdog"
)

// Weakest returns the weakest of some levels.
func Weakest(of ...Level) Level {
	weakness := func(l Level) int { return slices.Index([]Level{Hardware, Driver, API, Watchdog}, l) }
	return slices.MaxFunc(of, func(a, b Level) int { return cmp.Compare(weakness(a), weakness(b)) })
}

// None is the cap of a container that may use all of a GPU, in bytes. It is larger than
// any GPU's memory, and is what the in-process cap's limit page has for "no cap".
const None = math.MaxUint64

const (
	mib = 1 << 20
	// most is the largest cap that can be written: whole MiB, and not None.
	most = None &^ (mib - 1)
)

// Units returns the cap of n units of memory, in bytes. What one process's
// context takes is inside it.
func Units(n int, unit gpu.MiB) uint64 {
	if n <= 0 {
		return 0
	}
	return times(uint64(n), uint64(unit))
}

// Replica returns the cap of one of a GPU's replicas, in bytes: an equal part of
// what processes can have of the GPU, usable, in whole MiB.
func Replica(usable gpu.MiB, replicas int) uint64 {
	if replicas <= 0 {
		return 0
	}
	return times(uint64(usable)/uint64(replicas), 1)
}

// times returns n × size MiB in bytes, and never None: a product beyond 64 bits
// is a cap, too, although no GPU has that much.
func times(n, size uint64) uint64 {
	high, product := bits.Mul64(n, size)
	if high != 0 || product > most/mib {
		return most
	}
	return product * mib
}

// plus adds two amounts; None and what is beyond 64 bits stay None.
func plus(a, b uint64) uint64 {
	sum, carry := bits.Add64(a, b, 0)
	if carry != 0 {
		return None
	}
	return sum
}

// Process is a process on a GPU, as one sample has it.
type Process struct {
	// PID is in the PID namespace of whoever made the sample. GI and CI name
	// the MIG instance, -1 where there is none.
	PID, GI, CI int
	// Start is when the process began, in the clock ticks since boot of
	// /proc/<pid>/stat: with the PID it tells processes apart. 0: there is no
	// such process, or it could not be asked.
	Start uint64
	// Container is the ID of its container, empty where it is of no pod or
	// where that could not be told.
	Container string
	// Bytes is valid only if Known.
	Bytes uint64
	Known bool
	// Counted is what its container counts for it by itself, in bytes: the container's
	// word, 0 where nobody counts.
	Counted uint64
}

// Merge turns the driver's lists for one GPU into one entry for each process and
// MIG instance, sorted. A process that is in several lists is there once, with
// its largest known figure: each list has all of its memory. Start, Container
// and Counted are left for the caller.
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
