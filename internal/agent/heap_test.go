// SPDX-License-Identifier: Apache-2.0

package agent

import (
	goruntime "runtime"
	"runtime/debug"
	"testing"

	"example.com/gpu-agent/internal/obs/agentobs"
	"example.com/gpu-agent/pkg/timeslice"
)

// TestHeapLimitFollowsTheLists: a limit that is meant for some hundred devices makes the
// collector run all the time with some thousand.
func TestHeapLimitFollowsTheLists(t *testing.T) {
	t.Setenv("GOMEMLIMIT", "")
	before := debug.SetMemoryLimit(-1)
	defer debug.SetMemoryLimit(before)
	devices := 0
	h := &HeapLimit{Observer: agentobs.NewMetrics(""), Listed: func() int { return devices }}
	for _, devices = range []int{640, 10_000, 0, timeslice.MaxListed} {
		h.Round(nil, 0)
		if got, want := debug.SetMemoryLimit(-1), int64(heapLimit+devices*heapPerDevice); got != want {
			t.Errorf("with %d devices the limit is %d, want %d", devices, got, want)
		}
	}
	// The pod's limit is 256 MiB, of which the driver's library and the stacks take some.
	most := debug.SetMemoryLimit(-1)
	if most > 160<<20 {
		t.Errorf("with as many devices as can be listed the limit is %d", most)
	}
	t.Setenv("GOMEMLIMIT", "100MiB")
	devices = 1
	if h.Round(nil, 0); debug.SetMemoryLimit(-1) != most {
		t.Error("the operator's own limit was replaced")
	}
}

// TestHeapIsCollectedFromTheFirstRoundOn: what a start makes is collected when the
// kubelet has its lists.
func TestHeapIsCollectedFromTheFirstRoundOn(t *testing.T) {
	t.Setenv("GOGC", "")
	growth, limit := debug.SetGCPercent(100), debug.SetMemoryLimit(-1)
	defer func() { debug.SetGCPercent(growth); debug.SetMemoryLimit(limit) }()
	defer goruntime.GOMAXPROCS(goruntime.GOMAXPROCS(0))
	h := &HeapLimit{Observer: agentobs.NewMetrics(""), Listed: func() int { return 0 }}
	LimitHeap()
	if limit, growth := debug.SetMemoryLimit(-1), debug.SetGCPercent(-1); limit != heapLimit || growth != -1 {
		t.Errorf("at the start the limit is %d and the growth %d %%", limit, growth)
	}
	for range 2 {
		h.Round(nil, 0)
		if growth := debug.SetGCPercent(heapGrowth); growth != heapGrowth {
			t.Errorf("after a round the growth is %d %%, want %d", growth, heapGrowth)
		}
	}
	t.Setenv("GOGC", "80")
	debug.SetGCPercent(80)
	if (&HeapLimit{Observer: h.Observer, Listed: h.Listed}).Round(nil, 0); debug.SetGCPercent(80) != 80 {
		t.Error("the operator's own growth was replaced")
	}
}

// A node of many processors is left to others, unless the environment says how many are ours.
func TestFewProcessors(t *testing.T) {
	for env, want := range map[string][]int{"": {1, 4, 4}, "16": {1, 4, 16}} {
		t.Setenv("GOMAXPROCS", env)
		for i, n := range []int{1, 4, 16} {
			before := goruntime.GOMAXPROCS(n)
			limitProcessors()
			if got := goruntime.GOMAXPROCS(before); got != want[i] {
				t.Errorf("GOMAXPROCS=%q: of %d processors it takes %d, want %d", env, n, got, want[i])
			}
		}
	}
}
