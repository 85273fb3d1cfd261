// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"testing"
	"time"
)

// TestPromises: what a process was promised is not room for others, and is not counted
// twice once the driver has taken it, also where that process does nothing any more.
func TestPromises(t *testing.T) {
	type look struct {
		bound, promised, exported uint64 // MiB; all of bound is committed
		driver                    uint64 // MiB
		correction                int64  // MiB
	}
	for name, looks := range map[string][]look{
		"taken with the first kernel": {
			{100, 0, 0, 90, -10},
			{156, 56, 0, 90, -10},
			{156, 56, 0, 146, -10},
			{300, 56, 0, 290, -10},
		},
		"taken at once": {
			{100, 0, 0, 90, -10},
			{156, 56, 0, 146, -10},
		},
		"taken while something else turned out to be less": {
			{156, 56, 0, 100, 0},
			{156, 56, 0, 146, -10},
			{156, 56, 0, 120, -36},
		},
		"taken while exported memory went": {
			{156, 56, 0, 100, 0},
			{156, 56, 40, 116, -40},
		},
		"not taken: contexts take more than was thought": {
			{156, 56, 0, 100, 0},
			{156, 56, 0, 112, 12},
			{156, 56, 0, 168, 12},
		},
		"one of two": {
			{156, 56, 0, 100, 0},
			{156, 56, 0, 156, 0},
			{256, 156, 0, 156, 0},
			{256, 156, 0, 256, 0},
		},
		"given back untaken": {
			{156, 56, 0, 100, 0},
			{100, 0, 0, 100, 0},
		},
		"given back when it was taken": {
			{156, 56, 0, 100, 0},
			{156, 56, 0, 156, 0},
			{100, 0, 0, 100, 0},
			{156, 56, 0, 100, 0},
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newTenant(t)
			p.lives()
			_, m := aMeter(t, p, time.Second)
			p.set(pageSize+slotPID, 1)
			for i, l := range looks {
				p.set(useBound, uint64(i)<<amountBits|l.bound<<20/unit)
				p.set(pageSize+slotReserved, l.bound<<20)
				p.set(pageSize+slotCommitted, l.bound<<20)
				p.set(pageSize+slotPromised, l.promised<<20)
				p.set(pageSize+slotExported, l.exported<<20)
				p.set(useGuesses, uint64(i))
				if err := m.Begin(); err != nil {
					t.Fatal(err)
				}
				r, err := m.End(l.driver<<20, true, nil)
				if err != nil {
					t.Fatal(err)
				}
				if r.Correction>>20 != l.correction || !r.Quiet {
					t.Errorf("reading %d: correction %d MiB, quiet %v; want %d", i, r.Correction>>20, r.Quiet, l.correction)
				}
			}
		})
	}
}
