// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"errors"
	"os"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
)

const bGPU = gpu.UUID("GPU-6b6b6b6b-6b6b-6b6b-6b6b-6b6b6b6b6b6b")

// What the agent asks is in each of the allocation's pages, also in one without a limit, and in no
// other allocation's. It stays until the agent asks something else.
func TestControl(t *testing.T) {
	p := somePages(t)
	limits := []Limit{{GPU: aGPU, Bytes: 4 << 30}, {GPU: bGPU, Bytes: None}}
	paths, err := p.Write(aKey, time.Second, limits)
	if err != nil {
		t.Fatal(err)
	}
	other, err := p.Write("other", time.Second, limits[:1])
	if err != nil {
		t.Fatal(err)
	}
	says := func(path string) uint64 {
		t.Helper()
		page, err := mapPage(path)
		if err != nil {
			t.Fatal(err)
		}
		defer page.unmap()
		return page.load(atControl)
	}
	for _, bits := range []uint64{ControlHold, ControlHold | ControlYield, ControlYield, 0, ControlHold} {
		if err := p.SetControl(aKey, bits, ControlHold|ControlYield); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Write(aKey, time.Second, limits); err != nil {
			t.Fatal(err)
		}
		for u, page := range paths {
			if got := says(page.Limit); got != bits {
				t.Errorf("the page of %s says %d, want %d", u, got, bits)
			}
		}
		if got := says(other[aGPU].Limit); got != 0 {
			t.Errorf("another allocation's page says %d", got)
		}
	}
	// One page that is broken takes nothing from the other.
	if err := os.Truncate(paths[aGPU].Limit, 100); err != nil {
		t.Fatal(err)
	}
	if err := p.SetControl(aKey, ControlYield, ControlHold|ControlYield); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("a broken page: %v", err)
	}
	if got := says(paths[bGPU].Limit); got != ControlYield {
		t.Errorf("beside a broken page: %d", got)
	}
	for _, c := range []struct {
		key  string
		bits uint64
		want error
	}{{"none", ControlHold, gpu.ErrNotFound}, {"../" + aKey, ControlHold, gpu.ErrInvalid}, {aKey, 4, gpu.ErrInvalid}, {aKey, 1 << 32, gpu.ErrInvalid}} {
		if err := p.SetControl(c.key, c.bits, ControlHold|ControlYield); !errors.Is(err, c.want) {
			t.Errorf("Control(%q, %#x): %v, want %v", c.key, c.bits, err, c.want)
		}
	}
	if _, err := p.Newcomers("none"); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("newcomers of no allocation: %v", err)
	}
}

// A process that waits on the word is counted as long as it waits, and woken at a change.
func TestNewcomers(t *testing.T) {
	p := somePages(t)
	paths, err := p.Write(aKey, time.Second, []Limit{{GPU: aGPU, Bytes: None}})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.SetControl(aKey, ControlHold, ControlHold|ControlYield); err != nil {
		t.Fatal(err)
	}
	if n, err := p.Newcomers(aKey); n != 0 || err != nil {
		t.Fatalf("%d newcomers, %v", n, err)
	}
	page, err := mapPage(paths[aGPU].Limit)
	if err != nil {
		t.Fatal(err)
	}
	defer page.unmap()
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		for page.load(atControl)&ControlHold != 0 {
			word := uintptr(unsafe.Pointer(page.word(atControl)))
			_, _, _ = unix.Syscall6(unix.SYS_FUTEX, word, 0, uintptr(ControlHold), 0, 0, 0)
		}
	}()
	for range 3 {
		for n := 0; n != 1; {
			if n, err = p.Newcomers(aKey); err != nil || n > 1 {
				t.Fatalf("%d newcomers, %v", n, err)
			}
		}
	}
	if err := p.SetControl(aKey, ControlYield, ControlHold|ControlYield); err != nil {
		t.Fatal(err)
	}
	<-gone // without a wake it waits for ever
	if n, err := p.Newcomers(aKey); n != 0 || err != nil {
		t.Errorf("%d newcomers in the end, %v", n, err)
	}
}

// Waits of processes are in the usage page's header.
func TestWaitsAreRead(t *testing.T) {
	p := somePages(t)
	paths, err := p.Write(aKey, time.Second, []Limit{{GPU: aGPU, Bytes: 4 << 30}})
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(paths[aGPU].Usage, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte{3}, useWaits); err != nil {
		t.Fatal(err)
	}
	u, err := p.OpenUsage(aKey, aGPU)
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	if c, err := u.Read(); err != nil || c.Waits != 3 {
		t.Errorf("%d waits, %v, want 3", c.Waits, err)
	}
}

// What the agent has asked of an allocation, and how often its processes began to wait, can be read without a meter,
// also by the next process. Pages that there are not say nothing, and no zero.
func TestControlled(t *testing.T) {
	p := somePages(t)
	paths, err := p.Write(aKey, time.Second, []Limit{{GPU: aGPU, Bytes: 4 << 30}, {GPU: bGPU, Bytes: 2 << 30}})
	if err != nil {
		t.Fatal(err)
	}
	for _, bits := range []uint64{0, ControlHold, ControlYield, 0} {
		if err := p.SetControl(aKey, bits, ControlHold|ControlYield); err != nil {
			t.Fatal(err)
		}
		if got, err := p.Controlled(aKey); got != bits || err != nil {
			t.Errorf("it is %d (%v), want %d", got, err, bits)
		}
	}
	if n, err := p.Waits(aKey); n != 0 || err != nil {
		t.Errorf("%d waits (%v) at the beginning", n, err)
	}
	for u, n := range map[gpu.UUID]byte{aGPU: 3, bGPU: 4} {
		f, err := os.OpenFile(paths[u].Usage, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		_, err = f.WriteAt([]byte{n, 1}, useWaits)
		if err = errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := p.Waits(aKey); n != 2*256+7 || err != nil {
		t.Errorf("%d waits (%v), want %d", n, err, 2*256+7)
	}
	if err := os.Truncate(paths[bGPU].Usage, 100); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Waits(aKey); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("waits on a broken page: %v", err)
	}
	if _, err := p.Write("whole", time.Second, []Limit{{GPU: aGPU, Bytes: None}}); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"none", "whole"} {
		if _, err := p.Waits(key); !errors.Is(err, gpu.ErrNotFound) {
			t.Errorf("waits of %s: %v", key, err)
		}
	}
	if _, err := p.Controlled("none"); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("of no allocation: %v", err)
	}
	_, err = p.Waits("../" + aKey)
	_, errControlled := p.Controlled("../" + aKey)
	if !errors.Is(err, gpu.ErrInvalid) || !errors.Is(errControlled, gpu.ErrInvalid) {
		t.Errorf("of a key with a path: %v, %v", err, errControlled)
	}
}

// While newcomers are held, the container's processes may be parked: what they have counts as bound, and is not on
// the GPU. No reading that began or ended meanwhile gives them more room.
func TestReadingsOfAParkedContainer(t *testing.T) {
	p := newTenant(t)
	p.lives()
	_, m := aMeter(t, p, time.Second)
	p.set(useBound, 1<<amountBits|100<<20/unit)
	p.set(pageSize+slotReserved, 100<<20)
	p.set(pageSize+slotCommitted, 100<<20)
	p.set(pageSize+slotPID, 1)
	readOnce(t, m, 110<<20, true)
	ceiling := func(when string) {
		t.Helper()
		if got := int64(8*aGiB-m.page.load(atCeiling)) >> 20; got != 10 {
			t.Errorf("%s: the ceiling is %d MiB below the limit, want 10", when, got)
		}
	}
	ceiling("before")
	for _, held := range [][2]uint64{{0, ControlHold}, {ControlHold, ControlHold}, {ControlHold, 0}} {
		m.page.store(atControl, held[0])
		if err := m.Begin(); err != nil {
			t.Fatal(err)
		}
		m.page.store(atControl, held[1])
		r, err := m.End(5<<20, true, nil)
		if err != nil || r.Used != 5<<20 || r.Quiet {
			t.Errorf("held %v: %d used, quiet %v, %v", held, r.Used, r.Quiet, err)
		}
		ceiling("parked")
	}
	readOnce(t, m, 110<<20, true)
	ceiling("restored")
	readOnce(t, m, 90<<20, true)
	if got := int64(8*aGiB-m.page.load(atCeiling)) >> 20; got != -10 {
		t.Errorf("later readings count: %d", got)
	}
}

// One of two that ask does not undo what the other asks.
func TestSetControl(t *testing.T) {
	p := somePages(t)
	paths, err := p.Write(aKey, time.Second, []Limit{{GPU: aGPU, Bytes: 4 << 30}})
	if err != nil {
		t.Fatal(err)
	}
	page, err := mapPage(paths[aGPU].Limit)
	if err != nil {
		t.Fatal(err)
	}
	defer page.unmap()
	for _, c := range []struct{ bits, of, want uint64 }{
		{ControlHold, ControlHold, ControlHold}, {ControlYield, ControlYield, ControlHold | ControlYield},
		{0, ControlYield, ControlHold}, {ControlYield, ControlHold, 0},
	} {
		if err := p.SetControl(aKey, c.bits, c.of); err != nil || page.load(atControl) != c.want {
			t.Errorf("SetControl(%d, %d): %d, %v, want %d", c.bits, c.of, page.load(atControl), err, c.want)
		}
	}
	if err := p.SetControl(aKey, 0, 4); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("an unknown bit: %v", err)
	}
}

// A GPU without a limit has a usage page if newcomers are to say there that they wait. The page is the holder's as long as
// it has the allocation, and a holder that has none is given none: its container runs.
func TestPageForWaits(t *testing.T) {
	p := somePages(t)
	now := time.Now()
	write := func(waits bool, since time.Time) (nonce uint64) {
		t.Helper()
		paths, err := p.Write(aKey, 0, []Limit{{GPU: aGPU, Bytes: None, Waits: waits, Since: since}})
		if err != nil {
			t.Fatal(err)
		}
		page, err := mapPage(paths[aGPU].Limit)
		if err != nil {
			t.Fatal(err)
		}
		defer page.unmap()
		if paths[aGPU].Usage != "" {
			nonce = page.load(atUsage)
		}
		if sound, err := p.Sound(aKey); err != nil || !sound {
			t.Errorf("sound: %v, %v", sound, err)
		}
		_, err = p.Waits(aKey)
		if there := err == nil; there != (nonce != 0) || !there && !errors.Is(err, gpu.ErrNotFound) {
			t.Errorf("waits can be read: %v, and the page is %x", err, nonce)
		}
		return nonce
	}
	if write(false, now) != 0 || write(true, now) != 0 || write(true, time.Time{}) != 0 {
		t.Error("a page comes for a container that may run already")
	}
	now = now.Add(time.Second)
	first := write(true, now)
	if first == 0 || write(false, now) != first || write(true, time.Time{}) != first {
		t.Error("the next holder has no page, or not always the same")
	}
	now = now.Add(time.Second)
	if next := write(true, now); next == 0 || next == first {
		t.Errorf("the one after it has page %x, before %x", next, first)
	}
	now = now.Add(time.Second)
	if write(false, now) != 0 || write(true, now) != 0 {
		t.Error("the last holder has a page")
	}
}
