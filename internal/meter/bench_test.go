// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/usage/segments"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
)

// crowd is a meter on a real journal with so many grants in a ledger.
func crowd(b *testing.B, grants int) (*Meter, *ledger.Ledger) {
	b.Helper()
	l := ledger.New(func() {}, time.Now)
	inv := &gpu.Inventory{}
	for i := range 8 {
		inv.GPUs = append(inv.GPUs, gpu.Device{Index: i, UUID: gpu.UUID(fmt.Sprintf("GPU-%d", i)), Memory: 80 << 10})
	}
	var seen []status.Container
	m := New(Options{Ledger: l, Journal: &segments.Late{Dir: filepath.Join(b.TempDir(), "usage")}, Inventory: func() *gpu.Inventory { return inv },
		Heard: func() bool { return true }, Used: func() []status.Container { return seen }, IdleAfter: time.Hour, Now: time.Now, Log: slog.New(slog.DiscardHandler)})
	for i := range grants {
		u := gpu.UUID(fmt.Sprintf("GPU-%d", i%8))
		id := fmt.Sprintf("%016x", i)
		if _, err := l.Take(ledger.Request{ID: id, Owner: ledger.DevicePlugin, Resource: "example.com/gpu-mem", Grants: record(u, i/8, i/8).Grants, Overlap: true}); err != nil {
			b.Fatal(err)
		}
		l.SetHolder(id, ledger.Holder{Pod: workload.Pod{Namespace: "work", Name: id, UID: id}, Container: "main"})
		seen = append(seen, status.Container{Allocation: id, GPU: string(u), UsedMiB: new(uint64(i)), Processes: 1})
	}
	m.turn(context.Background(), true)
	return m, l
}

// BenchmarkMinute is what the account costs in a minute: a sample, which is written, and a look
// for each of the rounds that the loop has meanwhile. BenchmarkMinute/look is one of those.
func BenchmarkMinute(b *testing.B) {
	for _, grants := range []int{8, 64} {
		b.Run(fmt.Sprintf("sample/%d", grants), func(b *testing.B) {
			m, _ := crowd(b, grants)
			for b.Loop() {
				m.turn(context.Background(), true)
			}
		})
		b.Run(fmt.Sprintf("look/%d", grants), func(b *testing.B) {
			m, _ := crowd(b, grants)
			for b.Loop() {
				m.turn(context.Background(), false)
			}
		})
	}
}

// BenchmarkTake is what Allocate does in the ledger: with a meter, and without.
func BenchmarkTake(b *testing.B) {
	for _, metered := range []bool{false, true} {
		b.Run(fmt.Sprintf("metered=%v", metered), func(b *testing.B) {
			l := ledger.New(func() {}, time.Now)
			if metered {
				l.Ends.Keep()
			}
			q := ledger.Request{ID: "a", Owner: ledger.DevicePlugin, Resource: "example.com/gpu-mem", Grants: record("GPU-0", 0, 19).Grants, Overlap: true}
			for b.Loop() {
				if _, err := l.Take(q); err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				l.Release(ledger.DevicePlugin, "a")
				l.Ends.Take()
				b.StartTimer()
			}
		})
	}
}

// BenchmarkResident reports what a meter with 64 grants keeps on the heap.
func BenchmarkResident(b *testing.B) {
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var s runtime.MemStats
		runtime.ReadMemStats(&s)
		return s.HeapAlloc
	}
	for b.Loop() {
		before := heap()
		m, l := crowd(b, 64)
		for range 100 {
			m.turn(context.Background(), true)
		}
		b.ReportMetric(float64(heap()-before), "bytes/meter")
		runtime.KeepAlive(m)
		runtime.KeepAlive(l)
	}
}
