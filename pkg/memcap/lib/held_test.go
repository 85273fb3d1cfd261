// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"testing"
	"time"
)

// TestCodeIsHeldBack: so much of the cap is left for the code that living processes may yet
// load, by what the driver's figure shows of each.
func TestCodeIsHeldBack(t *testing.T) {
	const context, code, alloc = 500, 90, 1000  // MiB
	type process struct{ contexts, has uint64 } // MiB by the driver, beside what it has allocated
	names := func(n int) (out []Process) {
		for i := range n {
			out = append(out, Process{Namespace: 7, PID: uint64(100 + i)})
		}
		return out
	}
	for name, c := range map[string]struct {
		processes []process
		held      int64 // MiB, where each is known
		together  int64 // where only the sum is
	}{
		"nothing loaded":                        {[]process{{1, 500}, {1, 500}}, 180, 180},
		"some of it":                            {[]process{{1, 560}, {1, 500}}, 120, 120},
		"all of it":                             {[]process{{1, 590}, {1, 600}}, 0, 0},
		"one has loaded much":                   {[]process{{1, 1200}, {1, 500}, {1, 510}}, 170, 0},
		"two contexts in one":                   {[]process{{2, 1010}}, 170, 170},
		"a process without a context":           {[]process{{1, 500}, {0, 0}}, 90, 90},
		"a context that the driver has not yet": {[]process{{1, 0}}, 590, 590},
	} {
		t.Run(name, func(t *testing.T) {
			for _, how := range []string{"each", "together", "one unknown"} {
				p := newTenant(t)
				p.lock(int64(len(c.processes)))
				pages := somePages(t)
				if _, err := pages.Write(aKey, time.Second, []Limit{{GPU: aGPU, Bytes: 16 * aGiB, Context: context << 20, Code: code << 20}}); err != nil {
					t.Fatal(err)
				}
				p.isOf(pages, aKey)
				m, err := pages.Meter(aKey, aGPU, p.usage())
				if err != nil {
					t.Fatal(err)
				}
				defer m.Close()
				if got := m.page.load(atContext); got != (context+code)<<20 {
					t.Fatalf("a context is charged %d MiB", got>>20)
				}
				var bound, driver uint64
				each := map[Process]uint64{}
				for i, who := range names(len(c.processes)) {
					is := c.processes[i]
					expected := is.contexts * (context + code)
					at := pageSize + i*slotSize
					p.set(at+slotPIDs, who.Namespace)
					p.set(at+slotPID, who.PID)
					p.set(at+slotReserved, (expected+alloc)<<20)
					p.set(at+slotCommitted, (expected+alloc)<<20)
					p.set(at+slotExpected, expected<<20)
					p.set(at+slotContexts, is.contexts)
					bound += (expected + alloc) << 20
					driver += (is.has + alloc) << 20
					each[who] = (is.has + alloc) << 20
				}
				p.set(useHigh, uint64(len(c.processes)))
				p.set(useBound, 1<<amountBits|bound/unit)
				want := c.together
				switch how {
				case "each":
					want = c.held
				case "together":
					each = nil
				case "one unknown":
					delete(each, names(1)[0])
				}
				if err := m.Begin(); err != nil {
					t.Fatal(err)
				}
				r, err := m.End(driver, true, each)
				if err != nil || !r.Quiet {
					t.Fatalf("%+v, %v", r, err)
				}
				// What may be allocated, and what there is with all the code that may come.
				room := int64(m.page.load(atCeiling)) - int64(bound)
				if left := int64(16*aGiB) - int64(driver) - want<<20; room != left {
					t.Errorf("%s: %d MiB are left, want %d", how, room>>20, left>>20)
				}
				if roof := int64(m.page.load(atRoof)); roof != int64(m.page.load(atCeiling)) {
					t.Errorf("%s: the roof is %d MiB, the ceiling %d", how, roof>>20, m.page.load(atCeiling)>>20)
				}
				// What programs are shown as free is what they may have.
				if free := int64(16*aGiB) - int64(bound) - int64(m.page.load(atShown)); free != room {
					t.Errorf("%s: %d MiB are shown as free, %d may be had", how, free>>20, room>>20)
				}
				// Another agent goes on from the page.
				if is := m.page.reading(); is.correction != r.Correction || int64(is.held) != want<<20 {
					t.Errorf("%s: the page says %+v, want a correction of %d and %d MiB held", how, is, r.Correction, want)
				}
			}
		})
	}
}

// TestGuessesHoldNothingBack: what a context takes is known for what is held back, too, where
// something was charged by guess: one that was made and ended before, for example.
func TestGuessesHoldNothingBack(t *testing.T) {
	p := newTenant(t)
	p.lives()
	pages := somePages(t)
	if _, err := pages.Write(aKey, time.Second, []Limit{{GPU: aGPU, Bytes: 4 * aGiB, Code: DefaultCode}}); err != nil {
		t.Fatal(err)
	}
	p.isOf(pages, aKey)
	m, err := pages.Meter(aKey, aGPU, p.usage())
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	p.has(1, aGiB+DefaultContext+DefaultCode, DefaultContext+DefaultCode, 1)
	p.set(useGuesses, 3)
	readOnce(t, m, aGiB+300<<20, true)
	if got := m.page.reading().held; got != DefaultCode {
		t.Errorf("%d MiB are held back, want %d", got>>20, DefaultCode>>20)
	}
	if got := contextOf(t, pages, aKey); got != DefaultContext+DefaultCode {
		t.Errorf("a context is charged %d MiB: a guess has changed that", got>>20)
	}
	// The next agent sees it with its code alone.
	next, err := pages.Meter(aKey, aGPU, p.usage())
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	readOnce(t, next, aGiB+400<<20, true)
	if got := m.page.reading().held; got != 0 {
		t.Errorf("%d MiB are held back of a context that has its code, by an agent that came after", got>>20)
	}
}

// TestCodeOfASmallShare: what is held back keeps no context from being made.
func TestCodeOfASmallShare(t *testing.T) {
	for limit, want := range map[uint64]uint64{256: DefaultContext >> 20, 512: 512, 540: 540, 4096: 610} {
		pages := somePages(t)
		if _, err := pages.Write(aKey, time.Second, []Limit{{GPU: aGPU, Bytes: limit << 20, Code: DefaultCode}}); err != nil {
			t.Fatal(err)
		}
		if got := contextOf(t, pages, aKey); got != want<<20 {
			t.Errorf("under %d MiB a context is charged %d MiB, want %d", limit, got>>20, want)
		}
	}
}

// TestDyingProcess: a process whose memory the driver has back, and whose slot's lock the kernel
// still holds, does not make contexts look small, nor is its memory shown as free twice.
func TestDyingProcess(t *testing.T) {
	const charged, has, alloc = 500 << 20, 450 << 20, 1000 << 20
	first, second := Process{Namespace: 7, PID: 100}, Process{Namespace: 7, PID: 101}
	for name, c := range map[string]struct {
		driver uint64
		each   map[Process]uint64
		dies   bool // the second process counts as a dead one
	}{
		"both are listed":                    {2 * (has + alloc), map[Process]uint64{first: has + alloc, second: has + alloc}, false},
		"one is not listed":                  {has + alloc, map[Process]uint64{first: has + alloc}, true},
		"its memory is listed under no name": {2 * (has + alloc), map[Process]uint64{first: has + alloc}, false},
		"a name that is in no slot":          {2 * (has + alloc), map[Process]uint64{first: has + alloc, {7, 102}: has + alloc}, false},
	} {
		t.Run(name, func(t *testing.T) {
			p := newTenant(t)
			locks := p.lock(2)
			_, m := aMeter(t, p, time.Second)
			for i, who := range []Process{first, second} {
				at := pageSize + i*slotSize
				p.set(at+slotPIDs, who.Namespace)
				p.set(at+slotPID, who.PID)
				p.set(at+slotReserved, charged+alloc)
				p.set(at+slotCommitted, charged+alloc)
				p.set(at+slotExpected, charged)
				p.set(at+slotContexts, 1)
			}
			p.set(useHigh, 2)
			p.set(useBound, 1<<amountBits|2*(charged+alloc)/unit)
			both := map[Process]uint64{first: has + alloc, second: has + alloc}
			for range 2 {
				if r := readEach(t, m, 2*(has+alloc), both); !r.Quiet || r.Correction != 2*(has-charged) {
					t.Fatalf("with both: %+v", r)
				}
			}
			for range 2 {
				r := readEach(t, m, c.driver, c.each)
				if r.Quiet == c.dies || r.Correction != 2*(has-charged) {
					t.Errorf("quiet: %v, a correction of %d MiB", r.Quiet, r.Correction>>20)
				}
			}
			if got := m.page.bare(); got != has {
				t.Errorf("a context takes %d MiB at least, want %d", got>>20, uint64(has)>>20)
			}
			if !c.dies {
				return
			}
			// Its lock goes, and another process reaps it.
			locks.Close()
			p.lock(1)
			for _, word := range []int{slotReserved, slotCommitted, slotExpected, slotContexts, slotPID} {
				p.set(pageSize+slotSize+word, 0)
			}
			p.set(useSettled, charged+alloc)
			p.set(useBound, 2<<amountBits|(charged+alloc)/unit)
			// As shown_used in c/page.h, with nobody dead on the page.
			gone := min(charged+alloc-m.page.load(atShownAt), m.page.load(atDead))
			if used := charged + alloc + m.page.load(atShown) + gone; used != has+alloc {
				t.Errorf("%d MiB are shown as used until the next reading, want %d", used>>20, uint64(has+alloc)>>20)
			}
			if r := readEach(t, m, has+alloc, map[Process]uint64{first: has + alloc}); !r.Quiet || r.Correction != has-charged {
				t.Errorf("without it: %+v", r)
			}
		})
	}
}

func readEach(t *testing.T, m *Meter, driver uint64, each map[Process]uint64) Reading {
	t.Helper()
	if err := m.Begin(); err != nil {
		t.Fatal(err)
	}
	r, err := m.End(driver, true, each)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestExportsThatAreGone: memory that was exported, freed and is gone is room again, with and
// without each process's figure. It makes no context look small, and is not taken off twice of
// what programs are shown.
func TestExportsThatAreGone(t *testing.T) {
	const context, code, alloc, exported = 500 << 20, 90 << 20, 1000 << 20, 300 << 20
	who := Process{Namespace: 7, PID: 100}
	for name, known := range map[string]bool{"each": true, "together": false} {
		t.Run(name, func(t *testing.T) {
			p := newTenant(t)
			locks := p.lock(1)
			pages := somePages(t)
			if _, err := pages.Write(aKey, time.Second, []Limit{{GPU: aGPU, Bytes: 16 * aGiB, Context: context, Code: code}}); err != nil {
				t.Fatal(err)
			}
			p.isOf(pages, aKey)
			m, err := pages.Meter(aKey, aGPU, p.usage())
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			read := func(driver uint64, there bool) Reading {
				each := map[Process]uint64{}
				if there {
					each[who] = driver
				}
				if !known {
					each = nil
				}
				return readEach(t, m, driver, each)
			}
			shown := func(bound uint64) uint64 { // as shown_used in c/page.h, with nobody dead
				c, err := p.usage().Read()
				if err != nil {
					t.Fatal(err)
				}
				return bound + m.page.load(atShown) + min(c.Settled-m.page.load(atShownAt), m.page.load(atDead))
			}
			count := func(version, bytes, exported uint64) {
				p.has(version, bytes, context+code, 1)
				p.set(pageSize+slotPIDs, who.Namespace)
				p.set(pageSize+slotPID, who.PID)
				p.set(pageSize+slotExported, exported)
			}
			count(1, context+code+alloc+exported, 0)
			read(context+alloc+exported, true)
			count(1, context+code+alloc+exported, exported)
			for range 2 {
				read(context+alloc, true)
				// What its owner may take off, by account_exports_gone in c/count.c.
				if gone := m.page.load(atCeiling) - m.page.load(atLimit); gone != exported {
					t.Errorf("%d MiB are gone, want %d", gone>>20, exported>>20)
				}
			}
			if got := m.page.bare(); got != context {
				t.Errorf("a context takes %d MiB at least, want %d", got>>20, context>>20)
			}
			const has = context + alloc
			if used := shown(context + code + alloc + exported); used != has+code { // code is held back
				t.Errorf("%d MiB are shown as used, want %d", used>>20, (has+code)>>20)
			}
			// The owner takes off what is gone.
			count(2, context+code+alloc, 0)
			p.set(useSettled, exported)
			if used := shown(context + code + alloc); used != has+code {
				t.Errorf("%d MiB are shown as used afterwards, want %d", used>>20, (has+code)>>20)
			}
			if r := read(has, true); !r.Quiet || m.page.load(atCeiling) != 16*aGiB {
				t.Errorf("%+v, a ceiling of %d MiB", r, m.page.load(atCeiling)>>20)
			}
			// It dies with memory that is gone already.
			count(3, context+code+alloc+exported, exported)
			read(has, true)
			locks.Close()
			p.has(4, 0, 0, 0)
			p.set(useSettled, 2*exported+context+code+alloc)
			if used := int64(shown(0)); used != 0 {
				t.Errorf("%d MiB are shown as used of nothing", used>>20)
			}
		})
	}
}
