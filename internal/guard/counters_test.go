// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// TestMetersLeaveNothing: an allocation that ends takes its counters along. A descriptor
// of them would keep their memory, and there are thousands in a day.
func TestMetersLeaveNothing(t *testing.T) {
	const u, key = gpu.UUID("GPU-0"), "0123456789abcdef"
	// Where file systems cannot be mounted, one that is there will do.
	dir, err := os.MkdirTemp("/dev/shm", "gpu-agent-test-")
	if err != nil {
		t.Skipf("no room for counters: %v", err)
	}
	defer os.RemoveAll(dir)
	pages, err := lib.OpenPages(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer pages.Remove(key)
	if _, err := pages.Write(key, time.Second, []lib.Limit{{GPU: u, Bytes: 1 << 30}}); err != nil {
		t.Fatal(err)
	}
	m := Counters{pages}
	open := func() int {
		links, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(links)
	}
	before := open()
	for range 20 {
		meter, err := m.Meter(key, u)
		if err != nil {
			t.Fatal(err)
		}
		if err := meter.Begin(); err != nil {
			t.Fatal(err)
		}
		if _, err := meter.End(0, true, nil); err != nil {
			t.Fatal(err)
		}
		if err := meter.Close(); err != nil {
			t.Error(err)
		}
	}
	if after := open(); after > before+5 {
		t.Errorf("%d descriptors are open, before 20 containers came and went %d", after, before)
	}
}
