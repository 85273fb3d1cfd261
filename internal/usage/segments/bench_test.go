// SPDX-License-Identifier: Apache-2.0

package segments

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/usage"
)

// BenchmarkRecord is what a record costs in a full journal, with all that is tidied for it, as
// processor time: it does not grow with the journal's size.
func BenchmarkRecord(b *testing.B) {
	cpu := func() int64 {
		var u unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
			b.Fatal(err)
		}
		return u.Utime.Nano() + u.Stime.Nano()
	}
	for _, size := range []int64{2 << 20, 8 << 20} {
		b.Run(fmt.Sprintf("MiB=%d", size>>20), func(b *testing.B) {
			o := Options{Max: size, Segment: 256 << 10}
			s, err := Open(b.TempDir(), o)
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			r, book, written := rand.New(rand.NewPCG(1, 1)), usage.NewBook(nil), int64(0)
			add := func() {
				rec := refusal(int(written % 1000))
				rec.Namespace = fmt.Sprint("ns-", r.IntN(20)*r.IntN(20)/20)
				rec.Message = fmt.Sprintf("%016x%016x%016x%016x", r.Uint64(), r.Uint64(), r.Uint64(), r.Uint64())
				if r.IntN(2) == 0 {
					rec.Event = usage.Killed
				}
				line, err := rec.Append(nil)
				if err == nil {
					_, err = s.Append(line)
				}
				if err == nil && s.Full() {
					if line, err = (&usage.Record{Time: rec.Time, Event: usage.Began, Book: book.State(rec.Time)}).Append(nil); err == nil {
						err = s.Next(line)
					}
					if err == nil {
						err = s.Tidy()
					}
				}
				if written += int64(len(line)); err != nil {
					b.Fatal(err)
				}
			}
			for written < 6*size { // until it is full
				add()
			}
			before, n := cpu(), 0
			for b.Loop() {
				add()
				n++
			}
			b.ReportMetric(float64(cpu()-before)/float64(n), "cpu-ns/record")
		})
	}
}
