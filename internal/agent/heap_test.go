// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"runtime/debug"
	"testing"

	"example.com/gpu-agent/internal/obs"
	"example.com/gpu-agent/pkg/timeslice"
)

// TestHeapLimitFollowsTheLists: a limit that is meant for some hundred devices makes the
// collector run all the time with some thousand.
func TestHeapLimitFollowsTheLists(t *testing.T) {
	t.Setenv("GOMEMLIMIT", "")
	before := debug.SetMemoryLimit(-1)
	defer debug.SetMemoryLimit(before)
	devices := 0
	h := &HeapLimit{Observer: obs.NewMetrics(""), Listed: func() int { return devices }}
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
