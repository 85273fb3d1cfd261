// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
)

// tenant is a usage page as its container's processes write it.
type tenant struct {
	t *testing.T
	f *os.File
}

func newTenant(t *testing.T) tenant {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "page"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	p := tenant{t, f}
	if err := f.Truncate(usageSize); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte(usageMagic), 0); err != nil {
		t.Fatal(err)
	}
	p.set(useNonce, aNonce)
	p.set(useHigh, 1)
	return p
}

func (p tenant) set(at int, v uint64) {
	p.t.Helper()
	if _, err := p.f.WriteAt(binary.LittleEndian.AppendUint64(nil, v), int64(at)); err != nil {
		p.t.Fatal(err)
	}
}

// has makes the page say that one process has so much, of which so much is
// expected of contexts.
func (p tenant) has(version, bytes, expected, contexts uint64) {
	p.t.Helper()
	p.set(useBound, version<<amountBits|bytes/unit)
	p.set(pageSize+slotReserved, bytes)
	p.set(pageSize+slotCommitted, bytes)
	p.set(pageSize+slotExpected, expected)
	p.set(pageSize+slotContexts, contexts)
	p.set(pageSize+slotPID, 1)
}

// lives has somebody hold the first slot's lock.
func (p tenant) lives() {
	p.t.Helper()
	p.lock(1)
}

// lock has somebody hold the locks of the first n slots.
func (p tenant) lock(n int64) *os.File {
	p.t.Helper()
	f, err := os.OpenFile(p.f.Name(), os.O_RDWR, 0)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { f.Close() })
	l := unix.Flock_t{Type: unix.F_WRLCK, Len: n}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &l); err != nil {
		p.t.Fatal(err)
	}
	return f
}

func (p tenant) usage() *Usage { return &Usage{fd: int(p.f.Fd())} }

const (
	aKey   = "0123456789abcdef"
	aGPU   = gpu.UUID("GPU-0")
	aGiB   = uint64(1) << 30
	aNonce = 7
)

// somePages is an empty state directory. It is on a tmpfs, which is enough for usage
// pages where no file system can be mounted.
func somePages(t *testing.T) *Pages {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "gpu-agent-test-")
	if err != nil {
		t.Skipf("there is no tmpfs at /dev/shm: %v", err)
	}
	t.Cleanup(func() {
		if err := errors.Join(Unmount(dir), os.RemoveAll(dir)); err != nil {
			t.Error(err)
		}
	})
	p, err := OpenPages(dir)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// isOf makes this page pass for an allocation's.
func (p tenant) isOf(pages *Pages, key string) {
	p.t.Helper()
	limit, err := mapPage(filepath.Join(pages.dir, key, string(aGPU)))
	if err != nil {
		p.t.Fatal(err)
	}
	defer limit.unmap()
	limit.store(atUsage, aNonce)
	usage, err := os.OpenFile(filepath.Join(pages.usage, key, string(aGPU)), os.O_RDWR, 0)
	if err != nil {
		p.t.Fatal(err)
	}
	defer usage.Close()
	tenant{p.t, usage}.set(useNonce, aNonce)
}

func aMeter(t *testing.T, p tenant, every time.Duration) (*Pages, *Meter) {
	t.Helper()
	pages := somePages(t)
	if _, err := pages.Write(aKey, every, []Limit{{GPU: aGPU, Bytes: 8 * aGiB}}); err != nil {
		t.Fatal(err)
	}
	p.isOf(pages, aKey)
	m, err := pages.Meter(aKey, aGPU, p.usage())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return pages, m
}

func readOnce(t *testing.T, m *Meter, driver uint64, known bool) Reading {
	t.Helper()
	if err := m.Begin(); err != nil {
		t.Fatal(err)
	}
	r, err := m.End(driver, known, nil)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestAskOutlivesAFailure: who asked for a reading gets one, also where the driver
// did not answer the first time.
func TestAskOutlivesAFailure(t *testing.T) {
	p := newTenant(t)
	p.lives()
	p.has(1, aGiB, 0, 0)
	_, m := aMeter(t, p, time.Second)
	readOnce(t, m, aGiB, true)
	before := m.page.load(atDone)
	p.set(useAsks, 1)
	if err := m.Begin(); err != nil { // and the driver fails: no End
		t.Fatal(err)
	}
	readOnce(t, m, aGiB, true)
	if now := m.page.load(atDone); now <= before || now != m.page.load(atBegun) {
		t.Errorf("%d readings done, before %d, begun %d", now, before, m.page.load(atBegun))
	}
}

// TestAReadingWakes: whoever waits for a reading, with the page mounted read-only, is
// woken when it is done.
func TestAReadingWakes(t *testing.T) {
	p := newTenant(t)
	p.lives()
	pages, m := aMeter(t, p, time.Second)
	f, err := os.Open(filepath.Join(pages.dir, aKey, string(aGPU)))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b, err := unix.Mmap(int(f.Fd()), 0, pageSize, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	page := mappedPage{b: b}
	defer page.unmap()
	woken := make(chan unix.Errno, 1)
	go func() {
		const futexWait = 0
		for {
			long := unix.Timespec{Sec: 10}
			_, _, no := unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(page.word(atDone))), futexWait, uintptr(uint32(page.load(atDone))), uintptr(unsafe.Pointer(&long)), 0, 0)
			if no != unix.EAGAIN && no != unix.EINTR { // it was done before the wait began, or the run time's signal came
				woken <- no
				return
			}
		}
	}()
	for asks := uint64(1); ; asks++ {
		p.set(useAsks, asks)
		readOnce(t, m, 0, true)
		select {
		case no := <-woken:
			if no != 0 {
				t.Errorf("not woken: %v", no)
			}
			return
		case <-time.After(time.Millisecond):
		}
	}
}

// ceiling is what processes go by; see account_ceiling in c/count.h.
func (p tenant) ceiling(m *Meter) uint64 {
	c, err := p.usage().Read()
	if err != nil {
		p.t.Fatal(err)
	}
	if m.page.load(atNonce) != c.Nonce {
		return m.page.load(atLimit)
	}
	ceiling, lost := m.page.load(atCeiling), c.Settled-m.page.load(atSettled)
	return ceiling - min(ceiling, lost)
}

// TestNoFigureEver: where the driver tells no figures, processes that come and go
// leave the next ones as much room as they had.
func TestNoFigureEver(t *testing.T) {
	p := newTenant(t)
	p.lives()
	_, m := aMeter(t, p, time.Second)
	for i := range uint64(10) {
		p.has(2*i, 6*aGiB, 0, 0)
		readOnce(t, m, 0, false)
		p.has(2*i+1, 0, 0, 0)
		p.set(useSettled, 6*aGiB*(i+1)) // it died, and was reaped
		readOnce(t, m, 0, false)
	}
	if got := p.ceiling(m); got != 8*aGiB {
		t.Errorf("%d of 8 GiB are left after ten processes", got>>30)
	}
}

// TestNobodyReadsAnyMore: a page whose readers were turned off is as one that
// nobody ever read.
func TestNobodyReadsAnyMore(t *testing.T) {
	p := newTenant(t)
	p.lives()
	p.has(1, 2*aGiB, 0, 0)
	pages, m := aMeter(t, p, time.Second)
	readOnce(t, m, 3*aGiB, true)
	if got := p.ceiling(m); got != 7*aGiB {
		t.Fatalf("the ceiling is %d", got)
	}
	if _, err := pages.Write(aKey, 0, []Limit{{GPU: aGPU, Bytes: 8 * aGiB}}); err != nil {
		t.Fatal(err)
	}
	p.set(useSettled, 40*aGiB)
	if got := p.ceiling(m); got != 8*aGiB {
		t.Errorf("the ceiling is %d", got)
	}
}

// TestLocksDoNotHoldTheReaderUp: a file can have any number of locks, and whoever
// asks for one of them waits until the kernel has gone through all.
func TestLocksDoNotHoldTheReaderUp(t *testing.T) {
	p := newTenant(t)
	p.set(useHigh, slots)
	for i := range slots {
		p.set(pageSize+i*slotSize+slotPID, 1)
	}
	locks, err := os.OpenFile(p.f.Name(), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer locks.Close()
	const many = 5000 // at 20,000 it takes a minute and a half to ask for all slots
	for i := range many {
		l := unix.Flock_t{Type: unix.F_WRLCK, Start: usageSize + 2*int64(many-i), Len: 1}
		if err := unix.FcntlFlock(locks.Fd(), unix.F_OFD_SETLK, &l); err != nil {
			t.Skipf("lock a file %d times: %v", many, err)
		}
	}
	_, m := aMeter(t, p, time.Second)
	if err := m.Begin(); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("a page that takes minutes to read: %v", err)
	}
}

// TestHeldUp: a process that reads pages is stopped and goes on again and again,
// as it is where the node is busy or its own CPU limit is low. It is no fault of
// the pages.
func TestHeldUp(t *testing.T) {
	const page, some = "GPU_TESTS_PAGE", 1000
	if name := os.Getenv(page); name != "" {
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		u := &Usage{fd: int(f.Fd())}
		over := make(chan error)
		go func() {
			_, err := io.Copy(io.Discard, os.Stdin)
			over <- err
		}()
		for n := 0; ; n++ {
			select {
			case err := <-over:
				if n == 0 || err != nil {
					t.Errorf("%d readings, %v", n, err)
				}
				return
			default:
			}
			if c, err := u.Read(); err != nil || c.Processes != some {
				t.Fatalf("reading %d: %d processes, %v", n, c.Processes, err)
			}
			if n == 0 {
				fmt.Println("reading")
			}
		}
	}

	p := newTenant(t)
	p.set(useHigh, some)
	for i := range some {
		p.set(pageSize+i*slotSize+slotPID, 1)
	}
	p.lock(some)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestHeldUp$")
	cmd.Env = append(os.Environ(), page+"="+p.f.Name())
	out := told{first: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = &out, &out
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	<-out.first // it reads, or has failed
	for range 10 {
		time.Sleep(10 * time.Millisecond)
		if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Error(err)
		}
		time.Sleep(2 * readPatience)
		if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
			t.Error(err)
		}
	}
	in.Close()
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v\n%s", err, &out.text)
	}
}

// told is what a process has said, and when it has begun to.
type told struct {
	text  strings.Builder
	once  sync.Once
	first chan struct{}
}

func (t *told) Write(b []byte) (int, error) {
	t.once.Do(func() { close(t.first) })
	return t.text.Write(b)
}

// TestReadingLeavesNothing: a container may take as many slots as there are, and
// what reads them several times a second has a small memory.
func TestReadingLeavesNothing(t *testing.T) {
	p := newTenant(t)
	p.set(useHigh, slots)
	u := p.usage()
	// What else goes on in this process is counted too, so the least of several is asked for.
	least := math.Inf(1)
	for range 5 {
		least = min(least, testing.AllocsPerRun(3, func() {
			if _, err := u.Read(); err != nil {
				t.Error(err)
			}
		}))
	}
	if least > 2 {
		t.Errorf("a reading allocates %v times", least)
	}
	last := pageSize + (slots-1)*slotSize
	p.set(last+slotReserved, aGiB)
	if c, err := u.Read(); err != nil || c.Dead != aGiB {
		t.Errorf("the last slot is read as %+v, %v", c, err)
	}
}
