// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"errors"
	"maps"
	"math"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

// TestCounted asks which of several containers' processes counts what.
func TestCounted(t *testing.T) {
	p := newTenant(t)
	slot := func(i int, namespace, pid, reserved, managed uint64) {
		at := pageSize + i*slotSize
		p.set(at+slotPIDs, namespace)
		p.set(at+slotPID, pid)
		p.set(at+slotReserved, reserved)
		p.set(at+slotManaged, managed)
	}
	slot(0, 100, 1, 3*aGiB, aGiB)
	slot(1, 200, 1, aGiB, 0)
	slot(2, 100, 1, aGiB, 0)      // the same process, with a second copy of the library
	slot(3, 300, 1, aGiB, 2*aGiB) // nonsense
	slot(4, 200, 1, 5*aGiB, 0)    // of one that is dead, and had the same number
	slot(5, 100, 1, 2*aGiB, 0)    // lent to it: it counts that elsewhere
	p.set(pageSize+5*slotSize+slotLends, 1)
	p.set(useHigh, 6)
	p.lock(4)
	who := map[Process]uint64{{100, 1}: 7, {200, 1}: 7, {300, 1}: 7, {400, 1}: 7}
	want := map[Process]uint64{{100, 1}: 3 * aGiB, {200, 1}: aGiB, {300, 1}: 0, {400, 1}: 0}
	if err := p.usage().Counted(who); err != nil || !maps.Equal(who, want) {
		t.Errorf("%v, %v, want %v", who, err, want)
	}
	// What a page cannot say, nobody counts.
	p.set(pageSize+4*slotSize+slotReserved, most)
	want = map[Process]uint64{{100, 1}: 0}
	if who := map[Process]uint64{{100, 1}: 7}; !errors.Is(p.usage().Counted(who), gpu.ErrInvalid) || !maps.Equal(who, want) {
		t.Errorf("of nonsense: %v", who)
	}
	p.set(useHigh, ^uint64(0)) // more slots than there are
	p.set(pageSize+4*slotSize+slotReserved, 0)
	if who := map[Process]uint64{{200, 1}: 7}; p.usage().Counted(who) != nil || who[Process{200, 1}] != aGiB {
		t.Errorf("of too many slots: %v", who)
	}
}

// TestCompute asks which of several containers' processes say how many SMs they have, and which has
// been in cuInit the longest.
func TestCompute(t *testing.T) {
	p := newTenant(t)
	slot := func(i int, namespace, pid, sms, starting uint64) {
		at := pageSize + i*slotSize
		p.set(at+slotPIDs, namespace)
		p.set(at+slotPID, pid)
		p.set(at+slotSMs, sms)
		p.set(at+slotStarting, starting)
	}
	slot(0, 100, 1, 34, 0)
	slot(1, 200, 1, 20, 9)
	slot(2, 100, 1, 36, 7) // the same process, with a second copy of the library
	slot(3, 300, 1, mostSMs+1, ^uint64(0))
	slot(4, 500, 1, 0, 5)   // that nobody asks for
	slot(5, 200, 1, 132, 1) // of one that is dead
	p.set(useHigh, 6)
	p.lock(5)
	who := map[Process]Compute{{100, 1}: {1, 1}, {200, 1}: {}, {300, 1}: {}, {400, 1}: {1, 1}}
	want := map[Process]Compute{{100, 1}: {36, 7}, {200, 1}: {20, 9}, {300, 1}: {0, math.MaxInt64}, {400, 1}: {}}
	if starting, err := p.usage().Compute(who); err != nil || starting != 5 || !maps.Equal(who, want) {
		t.Errorf("%v, since %v, %v, want %v", who, starting, err, want)
	}
	p.set(pageSize+4*slotSize+slotReserved, most)
	starting, err := p.usage().Compute(who)
	if !errors.Is(err, gpu.ErrInvalid) || starting != 0 || who[Process{100, 1}] != (Compute{}) {
		t.Errorf("of nonsense: %v, since %v, %v", who, starting, err)
	}
}
