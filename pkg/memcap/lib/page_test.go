// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// golden is a page of 4 GiB that nobody has read for.
const golden = "" +
	"4750554341503032" + "0000000001000000" + "0000002000000000" + "fa00000000000000" + // magic, limit, context, every
	"4750552d30" // GPU-0

func TestPageBytes(t *testing.T) {
	pages, err := somePages(t).Write(aKey, 250*time.Millisecond, []Limit{{GPU: aGPU, Bytes: 4 << 30, Since: time.Unix(0, 0x0102)}})
	if err != nil {
		t.Fatal(err)
	}
	page := pages[aGPU]
	got, err := os.ReadFile(page.Limit)
	if err != nil {
		t.Fatal(err)
	}
	usage, err := os.ReadFile(page.Usage)
	if err != nil {
		t.Fatal(err)
	}
	nonce := usage[useNonce : useNonce+8]
	want, _ := hex.DecodeString(golden)
	want = append(want, make([]byte, pageSize-len(want))...)
	copy(want[atUsage:], nonce)
	want[atSince], want[atSince+1] = 2, 1
	copy(want[atCeiling:], want[atLimit:atLimit+8])
	if !slices.Equal(got, want) {
		t.Errorf("%x", got[:200])
	}
	blank := append([]byte(usageMagic), nonce...)
	if blank = append(blank, make([]byte, usageSize-len(blank))...); !slices.Equal(usage, blank) {
		t.Errorf("a usage page begins as %x", usage[:200])
	}
	if info, err := os.Stat(page.Limit); err != nil || info.Mode() != 0o644 {
		t.Errorf("%v %v: every user of a container is to read it", info.Mode(), err)
	}
	if info, err := os.Stat(page.Usage); err != nil || info.Mode() != 0o666 {
		t.Errorf("%v %v: every user of a container is to write it", info.Mode(), err)
	}
	if info, err := os.Stat(filepath.Dir(page.Usage)); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%v %v: nobody of the host is to come by what every user may write", info.Mode(), err)
	}
}

// A page tells the share of the SMs that was written last; no page, and no percentage, are errors.
func TestPercentOfAPage(t *testing.T) {
	p := somePages(t)
	for _, percent := range []int{26, 0, 100} {
		paths, err := p.Write(aKey, time.Second, []Limit{{GPU: aGPU, Bytes: 4 << 30, Percent: percent}})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := p.Percent(aKey, aGPU); err != nil || got != percent {
			t.Errorf("%d, %v, want %d", got, err, percent)
		}
		page, err := mapPage(paths[aGPU].Limit)
		if err != nil {
			t.Fatal(err)
		}
		page.store(atPercent, 101)
		if got, err := p.Percent(aKey, aGPU); !errors.Is(err, gpu.ErrInvalid) {
			t.Errorf("101 percent are %d, %v", got, err)
		}
		if err := page.unmap(); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := p.Percent("other", aGPU); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("without a page: %d, %v", got, err)
	}
}

func inode(t *testing.T, path string) uint64 {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.Sys().(*syscall.Stat_t).Ino
}

// TestPageStays: whatever is written, a container goes on seeing its page.
func TestPageStays(t *testing.T) {
	p := somePages(t)
	write := func(every time.Duration, l ...Limit) map[gpu.UUID]Page {
		t.Helper()
		paths, err := p.Write(aKey, every, l)
		if err != nil {
			t.Fatal(err)
		}
		return paths
	}
	path := write(time.Second, Limit{GPU: aGPU, Bytes: 4 * aGiB}, Limit{GPU: "GPU-1", Bytes: None})[aGPU].Limit
	first := inode(t, path)
	page, err := mapPage(path)
	if err != nil {
		t.Fatal(err)
	}
	defer page.unmap()
	page.publish(reading{nonce: 9, stamp: 5, settled: 512, correction: 1 << 20})

	write(time.Second, Limit{GPU: aGPU, Bytes: 4 * aGiB})
	if page.load(atNonce) != 9 || page.load(atStamp) != 5 {
		t.Error("writing the same again touched the reading")
	}
	page.store(atContext, 300<<20) // learnt meanwhile
	write(2*time.Second, Limit{GPU: aGPU, Bytes: 6 * aGiB})
	if page.load(atLimit) != 6*aGiB || page.load(atContext) != 300<<20 || page.load(atEvery) != 2000 {
		t.Error("the page does not say what was written")
	}
	if page.load(atCeiling) != 6*aGiB-1<<20 || page.load(atNonce) != 9 || page.load(atStamp) != 0 || page.load(atSettled) != 512 {
		t.Errorf("the ceiling is %d, of nonce %d, stamp %d", page.load(atCeiling), page.load(atNonce), page.load(atStamp))
	}
	usage := write(time.Second, Limit{GPU: aGPU, Bytes: 6 * aGiB})[aGPU].Usage
	if got := write(time.Second, Limit{GPU: aGPU, Bytes: None})[aGPU].Usage; got != "" {
		t.Errorf("no limit, and counters at %s", got)
	}
	if _, err := os.Stat(usage); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no limit, and counters: %v", err)
	}
	if page.load(atCeiling) != None || page.load(atLimit) != None {
		t.Error("no limit, and a ceiling")
	}
	write(time.Second, Limit{GPU: aGPU, Bytes: aGiB})
	if page.load(atCeiling) != aGiB {
		t.Errorf("the ceiling is %d", page.load(atCeiling))
	}
	if inode(t, path) != first {
		t.Error("the page is another file now")
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(path), "GPU-1")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a GPU that is not the allocation's any more: %v", err)
	}
	if err := os.WriteFile(path, []byte("what is this"), 0o644); err != nil {
		t.Fatal(err)
	}
	write(time.Second, Limit{GPU: aGPU, Bytes: aGiB})
	if got, err := os.ReadFile(path); err != nil || len(got) != pageSize {
		t.Errorf("a spoilt page is not made good: %d bytes, %v", len(got), err)
	}

	if _, err := p.Write("fedcba9876543210", 0, nil); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(p.dir, ".new-123"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if keys, err := p.List(); err != nil || !slices.Equal(keys, []string{aKey, "fedcba9876543210"}) {
		t.Errorf("%v %v", keys, err)
	}
	if left, _ := filepath.Glob(filepath.Join(p.dir, ".*")); len(left) != 0 {
		t.Errorf("%v is left", left)
	}
	for range 2 {
		if err := p.Remove(aKey); err != nil {
			t.Error(err)
		}
	}
	if keys, _ := p.List(); len(keys) != 1 {
		t.Errorf("%v", keys)
	}
}

// CRI-O tells of a container's mounts alone what it was created with: by their sources.
func TestKeyOfAPage(t *testing.T) {
	const u = gpu.UUID("GPU-1")
	pages := somePages(t)
	dir := filepath.Dir(filepath.Dir(pages.dir))
	at, err := pages.Write("0123456789abcdef", 0, []Limit{{GPU: u, Bytes: 1 << 30}})
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{at[u].Limit, at[u].Usage} {
		if key, ok := KeyOf(dir+"/", path); !ok || key != "0123456789abcdef" {
			t.Errorf("%s is of %q, %v", path, key, ok)
		}
	}
	for _, path := range []string{"", dir, dir + "/cap/limits/0123456789abcdef", dir + "/cap/kit/0123456789abcdef/GPU-1", dir + "x/cap/limits/0123456789abcdef/GPU-1",
		"/cap/limits/0123456789abcdef/GPU-1", LimitPath(u, "0123456789abcdef")} {
		if key, ok := KeyOf(dir, path); ok {
			t.Errorf("%s is of %q", path, key)
		}
	}
}

func TestPageRefusals(t *testing.T) {
	p := somePages(t)
	for name, write := range map[string]func() error{
		"a key that climbs": func() error { _, err := p.Write("../x", 0, nil); return err },
		"no key":            func() error { _, err := p.Write("", 0, nil); return err },
		"a GPU that climbs": func() error { _, err := p.Write(aKey, 0, []Limit{{GPU: "../../x"}}); return err },
		"a long GPU": func() error {
			_, err := p.Write(aKey, 0, []Limit{{GPU: gpu.UUID(strings.Repeat("a", 64))}})
			return err
		},
		"a limit of 2^60":   func() error { _, err := p.Write(aKey, 0, []Limit{{GPU: aGPU, Bytes: 1 << 60}}); return err },
		"to remove a climb": func() error { return p.Remove("..") },
	} {
		if err := write(); !errors.Is(err, gpu.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestWriteFromMany: allocations are written by one, read for by another.
func TestWriteFromMany(t *testing.T) {
	tn := newTenant(t)
	tn.has(1, aGiB, 0, 0)
	p, m := aMeter(t, tn, time.Second)
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			for n := range 100 {
				if _, err := p.Write(aKey, time.Second, []Limit{{GPU: aGPU, Bytes: uint64(2+(i+n)%3) * aGiB}}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 100 {
		readOnce(t, m, aGiB+5*512, true)
		if l, c := m.page.load(atLimit), m.page.load(atCeiling); c != 0 && m.page.load(atNonce) != 0 && c > l+5*512 && c != None {
			t.Errorf("limit %d, ceiling %d", l, c)
		}
	}
	all.Wait()
	if l, c := m.page.load(atLimit), m.page.load(atCeiling); m.page.reading().correction != int64(l-c) {
		t.Errorf("limit %d, ceiling %d", l, c)
	}
}

// TestNonsense: a page that says nonsense is no page, whichever field does.
func TestNonsense(t *testing.T) {
	for name, spoil := range map[string]func(tenant){
		"magic":     func(p tenant) { p.set(0, 1) },
		"no nonce":  func(p tenant) { p.set(useNonce, 0) },
		"high":      func(p tenant) { p.set(useHigh, slots+1) },
		"bound":     func(p tenant) { p.set(useBound, 1<<amountBits-1) },
		"peak":      func(p tenant) { p.set(usePeak, most) },
		"reserved":  func(p tenant) { p.set(pageSize+slotReserved, ^uint64(0)) },
		"odd bytes": func(p tenant) { p.set(pageSize+slotCommitted, 513) },
		"managed":   func(p tenant) { p.set(pageSize+slotManaged, most) },
		"expected":  func(p tenant) { p.set(pageSize+slotExpected, most) },
		"promised":  func(p tenant) { p.set(pageSize+slotPromised, most) },
		"idle":      func(p tenant) { p.set(pageSize+slotIdle, 1<<amountBits-1) },
		"shorter":   func(p tenant) { p.t.Helper(); p.f.Truncate(pageSize) },
	} {
		t.Run(name, func(t *testing.T) {
			p := newTenant(t)
			p.has(1, aGiB, 0, 0)
			u := p.usage()
			if _, err := u.Read(); err != nil {
				t.Fatal(err)
			}
			spoil(p)
			if c, err := u.Read(); !errors.Is(err, gpu.ErrInvalid) {
				t.Errorf("%+v, %v", c, err)
			}
		})
	}
}

// step is one reading: what the page says at its beginning and at its end (nil:
// the same), what the driver says between, and what is to come of it.
type step struct {
	before, after slotted
	driver        uint64 // MiB; unknown is none
	correction    int64  // MiB
	quiet         bool
}

type slotted struct{ version, bound, reserved, committed, managed, settled, contexts uint64 } // MiB

const unknown = ^uint64(0)

// TestIntervalRule goes through what two looks and a figure between them prove.
func TestIntervalRule(t *testing.T) {
	same := slotted{}
	const peak = 1 << 63 // in contexts: the page's peak is 300 MiB
	for name, steps := range map[string][]step{
		"quiet": {
			{slotted{1, 100, 100, 100, 0, 0, 0}, same, 130, 30, true},
			{slotted{2, 90, 90, 90, 0, 0, 0}, same, 90, 0, true},
			{slotted{3, 90, 90, 90, 0, 0, 0}, same, 50, -40, true},
		},
		"managed memory is not the driver's": {
			{slotted{1, 100, 100, 100, 60, 0, 0}, same, 50, 10, true},
		},
		"under way: the old one is kept where it can be": {
			{slotted{1, 100, 100, 100, 0, 0, 0}, same, 120, 20, true},
			{slotted{2, 140, 140, 100, 0, 0, 0}, same, 120, 20, false},
			{slotted{3, 140, 140, 100, 0, 0, 0}, same, 170, 30, false},
			{slotted{4, 140, 140, 100, 0, 0, 0}, same, 105, 30, false},
			{slotted{5, 140, 140, 100, 0, 0, 0}, same, 80, 20, false},
		},
		"at first the limit stands unless it is contradicted": {
			{slotted{1, 140, 140, 100, 0, 0, 0}, same, 110, 0, false},
		},
		"it ended meanwhile without a change of bound": {
			{slotted{1, 140, 140, 100, 0, 0, 0}, slotted{1, 140, 140, 140, 0, 0, 0}, 100, 0, false},
		},
		"bound changed: nothing is learnt": {
			{slotted{1, 100, 100, 100, 0, 0, 0}, same, 110, 10, true},
			{slotted{2, 100, 100, 100, 0, 0, 0}, slotted{3, 300, 300, 300, 0, 0, 0}, 300, 10, false},
			{slotted{4, 300, 300, 300, 0, 0, 0}, slotted{5, 100, 100, 100, 0, 0, 0}, 300, 10, false},
		},
		"bound changed, and contexts came that take more": {
			{slotted{1, 100, 100, 100, 0, 0, 1}, slotted{2, 200, 200, 200, 0, 0, 2}, 450, 250, false},
			{slotted{3, 200, 200, 200, 0, 0, 2}, slotted{4, 250, 250, 250, 0, 0, 3}, 400, 250, false},
		},
		"bound was higher between": {
			{slotted{1, 100, 100, 100, 0, 0, peak | 1}, slotted{9, 100, 100, 100, 0, 0, peak | 2}, 300, 0, false},
			{slotted{10, 100, 100, 100, 0, 0, peak | 2}, slotted{19, 100, 100, 100, 0, 0, peak | 3}, 320, 20, false},
		},
		"no figure": {
			{slotted{1, 100, 100, 100, 0, 0, 0}, same, 110, 10, true},
			{slotted{1, 100, 100, 100, 0, 0, 0}, same, unknown, 10, false},
		},
		// The pool gave back 40 before the reading, and the process learns of it
		// after: the ceiling must not have room for them twice.
		"lost after the reading": {
			{slotted{1, 100, 100, 100, 0, 0, 0}, same, 60, -40, true},
			{slotted{2, 60, 60, 60, 0, 40, 0}, slotted{2, 60, 60, 60, 0, 40, 0}, 60, 0, true},
		},
		"lost, and something is under way": {
			{slotted{1, 100, 100, 100, 0, 0, 0}, same, 60, -40, true},
			{slotted{2, 160, 160, 60, 0, 40, 0}, same, 60, 0, false},
		},
		"a remainder of the dead is not the living's": {
			{slotted{1, 130, 100, 100, 0, 0, 0}, same, 100, 0, true},
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newTenant(t)
			p.lives()
			_, m := aMeter(t, p, time.Second)
			say := func(s slotted) {
				p.set(useBound, s.version<<amountBits|s.bound<<20/unit)
				p.set(pageSize+slotReserved, s.reserved<<20)
				p.set(pageSize+slotCommitted, s.committed<<20)
				p.set(pageSize+slotManaged, s.managed<<20)
				p.set(pageSize+slotContexts, s.contexts&^peak)
				p.set(usePeak, s.contexts&peak>>63*(300<<20))
				p.set(pageSize+slotPID, 1)
				p.set(useSettled, s.settled<<20)
			}
			stamped, correction := false, int64(0)
			for i, s := range steps {
				say(s.before)
				if err := m.Begin(); err != nil {
					t.Fatal(err)
				}
				if s.after != same {
					say(s.after)
				}
				r, err := m.End(s.driver<<20, s.driver != unknown, nil)
				if err != nil {
					t.Fatal(err)
				}
				if r.Correction>>20 != s.correction || r.Quiet != s.quiet {
					t.Errorf("reading %d: correction %d MiB, quiet %v; want %d, %v", i, r.Correction>>20, r.Quiet, s.correction, s.quiet)
				}
				if ceiling := int64(m.page.load(atCeiling)); ceiling != int64(8*aGiB)-s.correction<<20 {
					t.Errorf("reading %d: the ceiling is %d", i, ceiling)
				}
				stamp := m.page.load(atStamp)
				if stamped = s.quiet || stamped && s.correction == correction; (stamp == 1) != stamped {
					t.Errorf("reading %d: stamp %x", i, stamp)
				}
				correction = s.correction
			}
		})
	}
}

// TestPeakBetweenReadings: what came and went between two readings is in the peak, in what the
// driver would have said, and what the page says beyond the limit is not.
func TestPeakBetweenReadings(t *testing.T) {
	const limit = 8 * aGiB
	for _, c := range []struct{ bound, peak, driver, want uint64 }{
		{100 << 20, 100 << 20, 150 << 20, 150 << 20},
		{100 << 20, 7 * aGiB, 150 << 20, 7*aGiB + 50<<20},
		{0, 7 * aGiB, 0, 7 * aGiB},
		{100 << 20, 100 * aGiB, 150 << 20, limit},
		{100 << 20, 100 * aGiB, 9 * aGiB, 9 * aGiB}, // somebody goes around the library
		{100 << 20, 0, 150 << 20, 150 << 20},        // written by a program
	} {
		p := newTenant(t)
		p.lives()
		_, m := aMeter(t, p, time.Second)
		p.set(useBound, 1<<amountBits|c.bound/unit)
		p.set(pageSize+slotReserved, c.bound)
		p.set(pageSize+slotCommitted, c.bound)
		p.set(pageSize+slotPID, 1)
		p.set(usePeak, c.peak)
		if err := m.Begin(); err != nil {
			t.Fatal(err)
		}
		if r, err := m.End(c.driver, true, nil); err != nil || r.PeakUsed != c.want {
			t.Errorf("%+v: the peak is %d, %v", c, r.PeakUsed, err)
		}
	}
}

// TestReadingBesideIdleRoom: what processes keep idle is bound and nobody's memory. A
// reading beside it is exact, unless some of it was allocated or freed meanwhile.
func TestReadingBesideIdleRoom(t *testing.T) {
	const moved = 1 << amountBits
	for name, test := range map[string]struct {
		before, after uint64 // of idle words, with 40 MiB
		quiet         bool
		correction    int64 // MiB
	}{
		"kept":                  {3 * moved, 3 * moved, true, 30},
		"taken, and given back": {3 * moved, 5 * moved, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			p := newTenant(t)
			p.lives()
			_, m := aMeter(t, p, time.Second)
			p.has(1, 100<<20, 0, 0)
			p.set(useBound, 140<<20/unit)
			p.set(pageSize+slotIdle, test.before|40<<20/unit)
			if err := m.Begin(); err != nil {
				t.Fatal(err)
			}
			p.set(pageSize+slotIdle, test.after|40<<20/unit)
			r, err := m.End(130<<20, true, nil)
			if err != nil || r.Quiet != test.quiet || r.Correction != test.correction<<20 {
				t.Errorf("%+v, %v: want quiet %v and a correction of %d MiB", r, err, test.quiet, test.correction)
			}
			if c, err := p.usage().Read(); err != nil || c.Bound != 100<<20 {
				t.Errorf("%d MiB are bound, %v", c.Bound>>20, err)
			}
		})
	}
}

// TestRoof: what the page says that cannot fit for sure, beside a ceiling that errs to
// refuse.
func TestRoof(t *testing.T) {
	type look struct{ version, bound, reserved, committed, settled, guesses uint64 } // MiB
	for name, test := range map[string]struct {
		first         uint64 // exact, of 100
		before, after look
		driver        uint64
		ceiling, roof int64 // MiB below the limit; none is no roof
	}{
		"nothing under way":            {100, look{2, 100, 100, 100, 0, 0}, look{2, 100, 100, 100, 0, 0}, 110, 10, 10},
		"under way":                    {100, look{2, 140, 140, 100, 0, 0}, look{2, 140, 140, 100, 0, 0}, 100, 0, 0},
		"lost, and under way":          {100, look{2, 100, 100, 60, 40, 0}, look{2, 100, 100, 60, 40, 0}, 60, 40, 0},
		"more than was known":          {100, look{2, 140, 140, 100, 0, 0}, look{2, 140, 140, 100, 0, 0}, 170, 30, 30},
		"less than was known":          {150, look{2, 140, 140, 100, 0, 0}, look{2, 140, 140, 100, 0, 0}, 80, 20, -60},
		"one without a reservation":    {100, look{2, 100, 132, 100, 0, 0}, look{2, 100, 132, 100, 0, 0}, 132, 32, 0},
		"a context came meanwhile":     {100, look{2, 100, 100, 100, 0, 0}, look{2, 100, 100, 100, 0, 1}, 100, 0, none},
		"a context came, and was read": {100, look{2, 140, 140, 100, 0, 1}, look{2, 140, 140, 100, 0, 1}, 150, 10, 10},
	} {
		t.Run(name, func(t *testing.T) {
			p := newTenant(t)
			p.lives()
			_, m := aMeter(t, p, time.Second)
			say := func(s look) {
				p.set(useBound, s.version<<amountBits|s.bound<<20/unit)
				p.set(pageSize+slotReserved, s.reserved<<20)
				p.set(pageSize+slotCommitted, s.committed<<20)
				p.set(pageSize+slotPID, 1)
				p.set(useSettled, s.settled<<20)
				p.set(useGuesses, s.guesses)
			}
			say(look{1, 100, 100, 100, 0, 0})
			readOnce(t, m, test.first<<20, true)
			say(test.before)
			if err := m.Begin(); err != nil {
				t.Fatal(err)
			}
			say(test.after)
			if _, err := m.End(test.driver<<20, true, nil); err != nil {
				t.Fatal(err)
			}
			below := func(at int) int64 { return int64(8*aGiB-m.page.load(at)) >> 20 }
			roof := below(atRoof)
			if m.page.load(atRoofOf) != test.after.guesses+1 {
				roof = none
			}
			if got := below(atCeiling); got != test.ceiling || roof != test.roof {
				t.Errorf("the ceiling is %d MiB below the limit and the roof %d, want %d and %d", got, roof, test.ceiling, test.roof)
			}
		})
	}
}

const none = int64(-1) << 40

// TestReadingInTheMomentOfAnUndo: a pool has taken 32 MiB without a reservation when
// the driver is asked, and gives them back. Bound is the same before and after, and
// all of it is committed; the reading is not exact all the same.
func TestReadingInTheMomentOfAnUndo(t *testing.T) {
	const turn = 1 << 32
	for name, test := range map[string]struct {
		before, after uint64
		exact         bool
	}{
		"none was":                      {3 * turn, 3 * turn, true},
		"between the looks":             {3 * turn, 4 * turn, false},
		"from before to after":          {3*turn + 1, 3*turn + 1, false},
		"begins":                        {3 * turn, 4*turn + 1, false},
		"of a process that is dead":     {3*turn + 9, 3*turn + 9, true},
		"of a slot that there is not":   {3*turn + slots + 1, 3*turn + slots + 1, true},
		"nonsense in all of the word":   {1<<64 - 1, 1<<64 - 1, true},
		"ended, by one that died in it": {3*turn + 1, 3 * turn, false},
	} {
		t.Run(name, func(t *testing.T) {
			p := newTenant(t)
			p.lives()
			_, m := aMeter(t, p, time.Second)
			p.has(1, 100<<20, 0, 0)
			readOnce(t, m, 100<<20, true)
			p.set(useAttempt, test.before)
			if err := m.Begin(); err != nil {
				t.Fatal(err)
			}
			p.set(useAttempt, test.after)
			r, err := m.End(132<<20, true, nil)
			if err != nil {
				t.Fatal(err)
			}
			if correction := r.Correction >> 20; r.Quiet != test.exact || (correction == 32) != test.exact {
				t.Errorf("exact: %v, with a correction of %d MiB", r.Quiet, correction)
			}
		})
	}
}

// TestCorrectionSurvives: a new agent goes on from what the old one knew.
func TestCorrectionSurvives(t *testing.T) {
	p := newTenant(t)
	p.lives()
	p.has(1, aGiB, 0, 0)
	pages, m := aMeter(t, p, time.Second)
	readOnce(t, m, aGiB+50<<20, true)
	m.Close()
	again, err := pages.Meter(aKey, aGPU, p.usage())
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if r := readOnce(t, again, 0, false); r.Correction != 50<<20 || r.Used != aGiB+50<<20 {
		t.Errorf("%+v", r)
	}
	p.set(useNonce, 8)
	if err := again.Begin(); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("a page that is not the allocation's is read: %v", err)
	}
}

func TestMeterRefusals(t *testing.T) {
	p := newTenant(t)
	pages, m := aMeter(t, p, time.Second)
	if _, err := m.End(0, true, nil); err == nil {
		t.Error("a reading that was not begun ended")
	}
	for name, err := range map[string]error{
		"an allocation without pages": func() error { _, err := pages.Meter("0", aGPU, p.usage()); return err }(),
		"another GPU":                 func() error { _, err := pages.Meter(aKey, "GPU-9", p.usage()); return err }(),
	} {
		if !errors.Is(err, gpu.ErrNotFound) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, err := range map[string]error{
		"no usage":          func() error { _, err := pages.Meter(aKey, aGPU, nil); return err }(),
		"a key that climbs": func() error { _, err := pages.Meter("..", aGPU, p.usage()); return err }(),
	} {
		if !errors.Is(err, gpu.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// --- installing

func TestInstall(t *testing.T) {
	top := filepath.Join(t.TempDir(), "cap")
	one := []file{{name: cudaName, data: []byte("one")}, {name: nvmlName, data: []byte("uno")}, {hideName, pack([]byte("eins")), true}}
	const first, second = "0000000000000001", "0000000000000002"
	kit, err := install(top, first, one)
	if err != nil {
		t.Fatal(err)
	}
	old := inode(t, kit.CUDA)
	for range 2 {
		again, err := install(top, first, one)
		if err != nil || again != kit || inode(t, kit.CUDA) != old {
			t.Fatalf("%+v, %v", again, err)
		}
	}
	if _, err := install(top, second, []file{{name: cudaName, data: []byte("two")}, {name: nvmlName, data: []byte("due")}, {hideName, pack(nil), true}}); err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(kit.CUDA); err != nil || string(data) != "one" || inode(t, kit.CUDA) != old {
		t.Errorf("the older one is %q now, %v", data, err)
	}
	for path, want := range map[string]os.FileMode{kit.CUDA: 0o755, kit.NVML: 0o755, kit.Mark: 0o444, kit.Hide: 0o755, filepath.Dir(kit.CUDA): os.ModeDir | 0o755} {
		if info, err := os.Stat(path); err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v", path, info.Mode(), err)
		}
	}

	// After a loss of power a file may have its name and nothing in it.
	f, err := os.Open(kit.CUDA)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := errors.Join(os.Truncate(kit.CUDA, 0), os.Remove(kit.Mark), os.Remove(kit.Hide)); err != nil {
		t.Fatal(err)
	}
	if _, err := install(top, first, one); err != nil || !whole(filepath.Dir(kit.CUDA), one) {
		t.Errorf("not made good: %v", err)
	}
	// Of a packed file, too, every byte counts.
	if data, err := os.ReadFile(kit.Hide); err != nil || string(data) != "eins" {
		t.Errorf("the program is %q, %v", data, err)
	}
	for _, other := range []string{"einz", "ein", "eins\x00", ""} {
		if err := os.WriteFile(kit.Hide, []byte(other), 0o755); err != nil {
			t.Fatal(err)
		}
		if whole(filepath.Dir(kit.CUDA), one) {
			t.Errorf("%q passes as the program", other)
		}
	}
	if inode(t, kit.CUDA) == old {
		t.Error("a file that a process may have mapped was written to")
	}
	if left, _ := filepath.Glob(filepath.Join(top, ".*")); len(left) != 0 {
		t.Errorf("%v is left", left)
	}
}

func TestPrune(t *testing.T) {
	dir := t.TempDir()
	top := filepath.Join(dir, "cap")
	_, own, err := content()
	if err != nil {
		own = "00000000000000ff"
		if _, err := Install(dir); !errors.Is(err, gpu.ErrNotSupported) || !strings.Contains(fmt.Sprint(err), "make") {
			t.Errorf("installed what there is not: %v", err)
		}
	} else if _, err := Install(dir); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"0000000000000001", "0000000000000002", ".new-3", "limits", "000000000000000x"} {
		if err := os.MkdirAll(filepath.Join(top, name, "empty"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	asked := map[string]bool{}
	if err := Prune(dir, func(hash string) bool { asked[hash] = true; return hash == "0000000000000002" || hash == own }); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(top)
	if err != nil {
		t.Fatal(err)
	}
	var left []string
	for _, e := range entries {
		if e.Name() != own {
			left = append(left, e.Name())
		}
	}
	if !slices.Equal(left, []string{"0000000000000002", "000000000000000x", "limits"}) {
		t.Errorf("left: %v, asked for %v", left, slices.Sorted(maps.Keys(asked)))
	}
	if err := Prune(filepath.Join(dir, "nowhere"), nil); err != nil {
		t.Errorf("nothing installed: %v", err)
	}
}

// TestReadingsOfALoan: what is lent is not held against the figure of those who count on
// the lender's page, and counts against its limit; what was borrowed is in the figure of
// those who count at the borrower's home, and does not count against that one's limit.
func TestReadingsOfALoan(t *testing.T) {
	for name, test := range map[string]struct {
		lends, borrowed uint64
		driver          uint64 // MiB
		bound, used     uint64 // MiB
	}{
		"lent":     {1, 0, 0, 0, 100},
		"borrowed": {0, 30 << 20, 110, 100, 80},
	} {
		t.Run(name, func(t *testing.T) {
			p := newTenant(t)
			p.lives()
			_, m := aMeter(t, p, time.Second)
			p.has(1, 100<<20, 0, 0)
			p.set(useBound, 100<<20/unit)
			p.set(pageSize+slotLends, test.lends)
			p.set(pageSize+slotBorrowed, test.borrowed)
			if err := m.Begin(); err != nil {
				t.Fatal(err)
			}
			r, err := m.End(test.driver<<20, true, nil)
			if err != nil || !r.Quiet || r.Bound != test.bound<<20 || r.Used != test.used<<20 || r.Correction != int64(test.driver-test.bound)<<20 {
				t.Errorf("%+v, %v: want %d MiB bound and %d used", r, err, test.bound, test.used)
			}
		})
	}
}
