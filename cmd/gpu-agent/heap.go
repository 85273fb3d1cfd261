// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"runtime/debug"
	"time"

	"example.com/gpu-agent/internal/agent"
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
)

// limitHeap sets the collector up, but for what the environment says of it.
func limitHeap() {
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(heapLimit)
	}
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(heapGrowth)
	}
}

// heap lets the limit follow the lists that the kubelet is sent: it looks after each
// round, on its way to another Observer.
type heap struct {
	agent.Observer
	listed func() int // how many devices the lists name
	last   int
}

func (h *heap) Round(err error, took time.Duration) {
	h.Observer.Round(err, took)
	n := h.listed()
	if n == h.last || os.Getenv("GOMEMLIMIT") != "" {
		return // to set it stops the world for a moment
	}
	h.last = n
	debug.SetMemoryLimit(heapLimit + int64(n)*heapPerDevice)
}
