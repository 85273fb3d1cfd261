// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"os"
	goruntime "runtime"
	"runtime/debug"
	"time"
)

const (
	// heapLimit is a soft limit: near it the garbage collector works harder. The
	// agent is to stay below 40 MB resident, of which the heap is the smaller part.
	heapLimit = 24 << 20
	// heapPerDevice is what each device in the kubelet's lists adds to it: half a
	// kilobyte is live, as much again is made in a round, and there is to be room
	// beside that. With 30,000 devices and without it a round took twice as long, and
	// three to four times as many collections.
	heapPerDevice = 3 << 9
	// heapGrowth is how much the heap may grow, in percent, before it is collected:
	// half of Go's default. A round leaves about half a megabyte of garbage for every
	// thousand devices, and memory is dearer on a node than the collector's time.
	heapGrowth = 50
	// mostProcessors is on how many processors Go's code runs at once. The runtime keeps memory
	// for each, and a node with GPUs has dozens: with 64 the agent was resident with 3 MB
	// more. It has seldom work for two.
	mostProcessors = 4
)

// LimitHeap sets the collector up for this program, and the number of processors, but for
// what the environment says of them. Until the first round has ended the collector runs near
// the limit alone: at two megabytes it ran five times before the kubelet had a list, a third
// of the time that a start takes.
func LimitHeap() {
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(heapLimit)
	}
	collect(-1)
	limitProcessors()
}

func limitProcessors() {
	if n := goruntime.GOMAXPROCS(0); n > mostProcessors && os.Getenv("GOMAXPROCS") == "" {
		goruntime.GOMAXPROCS(mostProcessors)
	}
}

// collect sets how much the heap may grow, in percent, before it is collected.
func collect(growth int) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(growth)
	}
}

// HeapLimit is an Observer that passes on what it is told, has the heap collected from
// the first round on, and lets LimitHeap's limit follow the length of the lists that the
// kubelet is sent.
type HeapLimit struct {
	Observer
	Listed  func() int // how many devices the lists name
	last    int
	started bool
}

// Round is called after every round.
func (h *HeapLimit) Round(err error, took time.Duration) {
	h.Observer.Round(err, took)
	if !h.started {
		h.started = true
		collect(heapGrowth)
		debug.FreeOSMemory() // else the runtime gives what the start took back over minutes
	}
	n := h.Listed()
	if n == h.last || os.Getenv("GOMEMLIMIT") != "" {
		return // to set it stops the world for a moment
	}
	h.last = n
	debug.SetMemoryLimit(heapLimit + int64(n)*heapPerDevice)
}
