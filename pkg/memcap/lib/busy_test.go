// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestReadingsOfABusyContainer: processes take and give as c/count.h has it, of a
// driver that gives what they ask for and takes nothing else, so each reading must
// be content with what was counted. The slots lie far behind the header, so that
// much happens between a look at that and a look at these.
func TestReadingsOfABusyContainer(t *testing.T) {
	p := newTenant(t)
	const many = 2000
	mine := []int{100, many / 2, many - 1}
	p.set(useHigh, many)
	for _, i := range mine {
		p.set(pageSize+i*slotSize+slotPID, 1)
	}
	b, err := unix.Mmap(int(p.lock(many).Fd()), 0, usageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	page := mappedPage{b: b}
	var driver atomic.Int64
	var workers sync.WaitGroup
	stop := make(chan struct{})
	t.Cleanup(func() {
		close(stop)
		workers.Wait()
		if err := page.unmap(); err != nil {
			t.Error(err)
		}
	})
	for k, i := range mine {
		rng := rand.New(rand.NewPCG(1, uint64(k)))
		slot := pageSize + i*slotSize
		add := func(at int, n int64) { atomic.AddUint64(page.word(at), uint64(n)) }
		bind := func(n int64) { add(useBound, 1<<amountBits+n/unit) }
		workers.Go(func() {
			var held []int64
			for {
				select {
				case <-stop:
					return
				default:
				}
				if len(held) < 3 && rng.IntN(2) == 0 {
					n := (1 + rng.Int64N(100)) << 20
					add(slot+slotReserved, n)
					bind(n)
					driver.Add(n)
					add(slot+slotCommitted, n)
					held = append(held, n)
				} else if len(held) > 0 {
					n := held[0]
					held = held[1:]
					add(slot+slotCommitted, -n)
					driver.Add(-n)
					bind(-n)
					add(slot+slotReserved, -n)
				}
				if rng.IntN(4) == 0 {
					time.Sleep(time.Duration(rng.IntN(100)) * time.Microsecond)
				}
			}
		})
	}
	_, m := aMeter(t, p, time.Second)
	readings := 1000
	if testing.Short() {
		readings = 250 // make test-all has all
	}
	told, late := 0, 0
	for n := range readings {
		err := m.Begin()
		var r Reading
		if err == nil {
			r, err = m.End(uint64(driver.Load()), true, nil)
		}
		if err != nil {
			// Where the hypervisor takes the processor away, that counts as the reader's time.
			if late++; late > readings/10 || !strings.Contains(err.Error(), "it takes longer than") {
				t.Fatal(err)
			}
			continue
		}
		if r.Correction != 0 {
			t.Fatalf("reading %d: the container has %d MiB more than it counts", n, r.Correction>>20)
		}
		if r.Quiet {
			told++
		}
	}
	t.Logf("%d of %d readings were quiet, %d were given up", told, readings, late)
}
