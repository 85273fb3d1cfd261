// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// TestMetersLeaveNothing: a container that ends takes its counters along. A
// descriptor of them would keep its memory, and there are thousands in a day.
func TestMetersLeaveNothing(t *testing.T) {
	const u, key, pid = gpu.UUID("GPU-0"), "0123456789abcdef", "4711"
	var fs unix.Statfs_t
	if err := unix.Statfs("/dev/shm", &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
		t.Skip("counters lie on a tmpfs, and /dev/shm is none here")
	}
	proc, err := os.MkdirTemp("/dev/shm", "gpu-agent-test-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(proc)
	home := filepath.Join(proc, pid, "root", lib.UsageDir)
	if err := os.MkdirAll(home, 0o755); err != nil {
		t.Fatal(err)
	}
	page := filepath.Join(home, string(u))
	head := binary.LittleEndian.AppendUint64([]byte("GPUUSE01"), 7)
	if err := os.WriteFile(page, head, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(page, 4096+16384*64); err != nil {
		t.Fatal(err)
	}
	pages, err := lib.OpenPages(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer pages.Close()
	if _, err := pages.Write(key, time.Second, []lib.Limit{{GPU: u, Bytes: 1 << 30}}); err != nil {
		t.Fatal(err)
	}
	m := meters{&caps{Pages: pages}, proc}
	open := func() int {
		links, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(links)
	}
	before := open()
	for range 20 {
		meter, err := m.Meter(key, u, 4711)
		if err != nil {
			t.Fatal(err)
		}
		if err := meter.Begin(); err != nil {
			t.Fatal(err)
		}
		if _, err := meter.End(0, true); err != nil {
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
