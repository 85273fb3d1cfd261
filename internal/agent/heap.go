// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"os"
	goruntime "runtime"
	"runtime/debug"
	"time"
)

const (
	// heapLimit is a soft limit in bytes: near it the garbage collector works harder. The agent
	// should stay below 40 MB resident; the heap is the smaller part of that.
	heapLimit = 24 << 20
	// heapPerDevice is added to the limit for each device in the kubelet's lists, in bytes. About
	// half a kilobyte is live, as much again is allocated in a round, and there must be room beside
	// that. Without it a round with 30,000 devices took twice as long, with three to four times as
	// many collections.
	heapPerDevice = 3 << 9
	// heapGrowth is how much the heap may grow before it is collected, in percent: half of Go's
	// default. A round leaves about half a megabyte of garbage per thousand devices, and on a node
	// memory is dearer than the collector's time.
	heapGrowth = 50
	// mostProcessors is the number of processors that Go code uses at once. The runtime keeps
	// memory for each, and a node with GPUs has dozens: with 64 the agent used 3 MB more. It seldom
	// has work for two.
	mostProcessors = 4
)

// LimitHeap sets the garbage collector and the number of processors for this program, unless the
// environment sets them. Until the first round has ended the collector runs only near the limit.
// Otherwise, with a heap of two megabytes, it ran five times before the kubelet had a list. That
// took a third of the start.
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

// collect sets how much the heap may grow before it is collected, in percent. -1 means without
// limit.
func collect(growth int) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(growth)
	}
}

// HeapLimit is an Observer that forwards all calls. After the first round it turns the collector
// on, and it makes LimitHeap's limit follow the length of the kubelet's lists.
type HeapLimit struct {
	Observer
	Listed  func() int // returns how many devices the lists name
	last    int
	started bool
}

// Round is called after every round.
func (h *HeapLimit) Round(err error, took time.Duration) {
	h.Observer.Round(err, took)
	if !h.started {
		h.started = true
		collect(heapGrowth)
		debug.FreeOSMemory() // otherwise the runtime returns the memory of the start over minutes
	}
	n := h.Listed()
	if n == h.last || os.Getenv("GOMEMLIMIT") != "" {
		return // setting it stops the world for a moment
	}
	h.last = n
	debug.SetMemoryLimit(heapLimit + int64(n)*heapPerDevice)
}
