// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/atomicfile"
	"example.com/gpu-agent/pkg/gpu"
)

// The pages, as c/page.h has them; a test holds the two together.
const (
	limitMagic = "GPUCAP02"
	usageMagic = "GPUUSE04"

	pageSize  = 4096
	slotSize  = 128
	slots     = 16384
	usageSize = pageSize + slots*slotSize

	unit       = 512
	amountBits = 40
	amounts    = 1<<amountBits - 1
	most       = 1 << 48 // bytes; more is nonsense
	writing    = ^uint64(0)

	atLimit   = 8
	atContext = 16
	atEvery   = 24
	atUUID    = 32
	atUsage   = 96
	atSince   = 104
	atNonce   = 128
	atCeiling = 136
	atStamp   = 144
	atBegun   = 152
	atDone    = 160
	atSettled = 168
	atShown   = 176
	atShownAt = 184
	atDead    = 192
	atRoof    = 200
	atRoofOf  = 208

	uuidRoom = 64

	useNonce     = 8
	useBound     = 64
	useAsks      = 128
	useRefusals  = 136
	usePeak      = 144
	useHigh      = 152
	useSettled   = 160
	useUndone    = 168
	useUncounted = 176
	useGuesses   = 184
	useAttempt   = 192

	slotReserved  = 0
	slotCommitted = 8
	slotManaged   = 16
	slotExpected  = 24
	slotContexts  = 32
	slotPID       = 40
	slotPIDs      = 48
	slotExported  = 56
	// What all threads but the first have added to the first two.
	slotOthersReserved  = 64
	slotOthersCommitted = 72
	slotPromised        = 80
	slotIdle            = 88
)

// A Limit is what one allocation may have of one GPU.
type Limit struct {
	GPU gpu.UUID
	// Bytes is the cap, contexts included; None for a GPU without one, whose
	// calls are then not counted.
	Bytes uint64
	// Context is what a context is charged with until the driver has been read, in
	// bytes; 0 means DefaultContext. An existing page keeps what was learnt since.
	Context uint64
	// Since is when the allocation was made or renewed. A usage page of an earlier
	// holder is not used again. Zero: that is not known, and the page is kept.
	Since time.Time
}

// since is Since as the page has it.
func (l Limit) since() uint64 {
	if l.Since.IsZero() {
		return 0
	}
	return uint64(l.Since.UnixNano())
}

// A Page is where the two pages of an allocation's GPU are on the host.
type Page struct {
	Limit string
	Usage string // empty for a GPU without a limit
}

// Pages are the pages of a node's allocations: dir/cap/limits/<key>/<UUID> and
// dir/cap/usage/<key>/<UUID>; see claim.go for the second. Limit pages are files
// that containers have mounted and mapped, so a page keeps its inode as long as
// its allocation lives and every change of it is an atomic store.
// The methods may be called from several goroutines; one process alone may have
// a directory open at a time.
type Pages struct {
	dir, usage string
	// mu orders what is stored in pages, since a change of the limit moves the
	// ceiling that a Meter has written.
	mu sync.Mutex
}

// OpenPages opens the pages below the agent's state directory, and makes their
// folders.
func OpenPages(dir string) (*Pages, error) {
	p := &Pages{dir: filepath.Join(dir, "cap", limitsName), usage: filepath.Join(dir, "cap", usageName)}
	// Nobody but root comes by the usage pages on the host: any user of a container
	// may write to them.
	if err := errors.Join(os.MkdirAll(p.dir, 0o755), os.MkdirAll(p.usage, 0o700)); err != nil {
		return nil, fmt.Errorf("make folders of claims' pages: %w", err)
	}
	return p, nil
}

// Write makes the limit pages of an allocation say just these limits, sees to it that
// each limited GPU has a usage page, and returns where they are. every is how
// often the agent reads the driver for them; 0 means that nobody does. A limit
// page that is there already keeps its inode, and the correction that it holds;
// a usage page stays as long as processes can count on it and the allocation is the
// same holder's. If not, all of the allocation's usage pages are made anew. Pages of
// GPUs that are not named are removed.
// It may be repeated, and does nothing then.
//
// The error wraps gpu.ErrNoPermission where this process may not mount the file
// system of the usage pages.
func (p *Pages) Write(key string, every time.Duration, limits []Limit) (map[gpu.UUID]Page, error) {
	if !plainName(key) {
		return nil, fmt.Errorf("write limit pages: claim key %q: %w", key, gpu.ErrInvalid)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	dir := filepath.Join(p.dir, key)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make folder of limit pages: %w", err)
	}
	for i := range limits {
		if err := limits[i].check(); err != nil {
			return nil, fmt.Errorf("write limit page of claim %s: %w", key, err)
		}
	}
	nonces, err := p.usageLocked(key, limits)
	if err != nil {
		return nil, fmt.Errorf("make usage pages of claim %s: %w", key, err)
	}
	pages := make(map[gpu.UUID]Page)
	for _, l := range limits {
		page := Page{Limit: filepath.Join(dir, string(l.GPU))}
		if err := writeLimit(page.Limit, every, l, nonces[l.GPU]); err != nil {
			return nil, fmt.Errorf("write limit page of %s for claim %s: %w", l.GPU, key, err)
		}
		if l.Bytes != None {
			page.Usage = filepath.Join(p.usage, key, string(l.GPU))
		}
		pages[l.GPU] = page
	}
	old, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list limit pages of claim %s: %w", key, err)
	}
	for _, e := range old {
		if _, named := pages[gpu.UUID(e.Name())]; !named {
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, fmt.Errorf("remove old limit page of claim %s: %w", key, err)
			}
		}
	}
	return pages, nil
}

func (l Limit) check() error {
	if !plainName(string(l.GPU)) || len(l.GPU) >= uuidRoom {
		return fmt.Errorf("GPU %q: %w", l.GPU, gpu.ErrInvalid)
	}
	if l.Bytes != None && l.Bytes >= most {
		return fmt.Errorf("limit of %d bytes of %s, which no GPU has: %w", l.Bytes, l.GPU, gpu.ErrInvalid)
	}
	return nil
}

// writeLimit writes one limit page; usage is the nonce of the usage page that
// belongs to it; 0 if that has not changed or there is none.
func writeLimit(path string, every time.Duration, l Limit, usage uint64) error {
	if l.Context == 0 {
		l.Context = DefaultContext
	}
	everyMS := uint64(max(0, every.Milliseconds()))
	if every > 0 {
		everyMS = max(1, everyMS)
	}
	page, err := mapPage(path)
	if err != nil {
		// None, or one that an agent of another time left behind: nothing that
		// a container could go on with.
		return makePage(path, everyMS, l, usage)
	}
	defer page.unmap()
	if uuid := page.b[atUUID : atUUID+uuidRoom]; string(uuid[:len(l.GPU)]) != string(l.GPU) || uuid[len(l.GPU)] != 0 {
		return makePage(path, everyMS, l, usage)
	}
	if usage != 0 {
		// What was learnt of contexts was learnt from who had the old one.
		page.store(atContext, l.Context)
		page.store(atSince, l.since())
		page.store(atUsage, usage)
	}
	if context := page.load(atContext); context < LeastContext || context > DefaultContext {
		page.store(atContext, l.Context) // by another version of the agent
	}
	if page.load(atEvery) != everyMS {
		page.store(atEvery, everyMS)
	}
	if was := page.load(atLimit); was != l.Bytes {
		c := page.reading()
		if was == None {
			c.correction, c.leastOf = 0, 0
		}
		page.store(atNonce, writing) // nobody goes above the new limit by the old ceiling
		page.store(atLimit, l.Bytes)
		c.stamp = 0
		page.publish(c)
	}
	if everyMS == 0 && page.load(atNonce) != 0 {
		// What somebody read once gets older and is never made good: processes
		// would go by less and less. They go by the limit.
		page.publish(reading{})
	}
	return nil
}

// makePage makes a page and puts it in place whole.
func makePage(path string, everyMS uint64, l Limit, usage uint64) error {
	b := make([]byte, pageSize)
	copy(b, limitMagic)
	binary.LittleEndian.PutUint64(b[atLimit:], l.Bytes)
	binary.LittleEndian.PutUint64(b[atContext:], l.Context)
	binary.LittleEndian.PutUint64(b[atEvery:], everyMS)
	binary.LittleEndian.PutUint64(b[atUsage:], usage)
	binary.LittleEndian.PutUint64(b[atSince:], l.since())
	binary.LittleEndian.PutUint64(b[atCeiling:], l.Bytes)
	copy(b[atUUID:atUUID+uuidRoom-1], l.GPU)
	// Written beside the folder of the allocation, in which each file is a GPU's.
	folder, name := filepath.Split(path)
	key := filepath.Base(folder)
	root, err := os.OpenRoot(filepath.Dir(filepath.Clean(folder)))
	if err != nil {
		return err
	}
	defer root.Close()
	// Whatever user a container has reads it.
	return atomicfile.Write(root, filepath.Join(key, name), ".new-"+key, 0o644, atomicfile.Unflushed, func(f *os.File) error {
		_, err := f.Write(b)
		return err
	})
}

// Remove ends an allocation's pages. A container that has them mounted keeps them; a
// allocation without pages is fine.
func (p *Pages) Remove(key string) error {
	if !plainName(key) {
		return fmt.Errorf("remove pages: claim key %q: %w", key, gpu.ErrInvalid)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	// In this order: as long as one of them is left the allocation is listed.
	err := removeRoom(filepath.Join(p.usage, key))
	if err == nil {
		err = os.RemoveAll(filepath.Join(p.dir, key))
	}
	if err != nil {
		return fmt.Errorf("remove pages of claim %s: %w", key, err)
	}
	return nil
}

// List returns the keys of the allocations that have pages, in order, and clears
// what a writer that was killed left half done.
func (p *Pages) List() ([]string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var keys []string
	for _, dir := range []string{p.dir, p.usage} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, fmt.Errorf("list claims' pages: %w", err)
		}
		for _, e := range entries {
			switch {
			case e.IsDir() && plainName(e.Name()):
				keys = append(keys, e.Name())
			case !e.IsDir() && e.Name()[0] == '.':
				os.Remove(filepath.Join(dir, e.Name()))
			}
		}
	}
	slices.Sort(keys)
	return slices.Compact(keys), nil
}

// plainName reports whether s can be a file's name here: no separator, no dot
// in front, nothing unusual.
func plainName(s string) bool {
	if s == "" || len(s) > 128 || s[0] == '.' {
		return false
	}
	for _, c := range []byte(s) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '.', c == '_':
		default:
			return false
		}
	}
	return true
}

// A mappedPage is a limit page in memory.
type mappedPage struct {
	b    []byte
	path string
	// dev and ino tell the file from another in its place: as long as it is mapped
	// no other file of the device has its number.
	dev, ino uint64
}

func mapPage(path string) (mappedPage, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return mappedPage{}, fmt.Errorf("open limit page: %w", err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return mappedPage{}, fmt.Errorf("look at limit page: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size != pageSize {
		return mappedPage{}, fmt.Errorf("limit page %s has %d bytes: %w", path, st.Size, gpu.ErrInvalid)
	}
	b, err := unix.Mmap(fd, 0, pageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return mappedPage{}, fmt.Errorf("map limit page: %w", err)
	}
	if string(b[:8]) != limitMagic {
		unix.Munmap(b)
		return mappedPage{}, fmt.Errorf("limit page %s begins with %q: %w", path, b[:8], gpu.ErrInvalid)
	}
	return mappedPage{b: b, path: path, dev: uint64(st.Dev), ino: st.Ino}, nil
}

func (p mappedPage) unmap() error { return unix.Munmap(p.b) }

// stands reports whether the page is still the one in its place. An allocation that has
// ended and is given out again has new pages.
func (p mappedPage) stands() bool {
	var st unix.Stat_t
	return unix.Lstat(p.path, &st) == nil && uint64(st.Dev) == p.dev && st.Ino == p.ino
}

func (p mappedPage) word(at int) *uint64    { return (*uint64)(unsafe.Pointer(&p.b[at])) }
func (p mappedPage) load(at int) uint64     { return atomic.LoadUint64(p.word(at)) }
func (p mappedPage) store(at int, v uint64) { atomic.StoreUint64(p.word(at), v) }

// wake wakes those who wait for a word to change. There may be any
// number of them: those that are left out wake up by themselves a few milliseconds later.
func (p mappedPage) wake(at int) {
	const futexWake, wakeMost = 1, 64
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(p.word(at))), futexWake, wakeMost, 0, 0, 0)
}

func (p mappedPage) limitLess(c int64) uint64 {
	limit := p.load(atLimit)
	switch {
	case limit == None:
		return None
	case c >= 0 && uint64(c) >= limit:
		return 0
	}
	return min(limit-uint64(c), most)
}

// A reading is what a limit page says about a usage page. If nonce is 0 there was none.
type reading struct {
	nonce, stamp, settled uint64
	correction            int64
	// shown is for views: the figure less what was bound, when shownAt was
	// settled and of what was bound so much was dead processes'.
	shown         int64
	shownAt, dead uint64
	// least is how small the correction may be, as long as the guesses are one less
	// than leastOf; 0 is never.
	least   int64
	leastOf uint64
}

func (p mappedPage) reading() reading {
	if p.load(atNonce) == writing {
		return reading{} // by an agent that was killed there
	}
	r := reading{
		nonce: p.load(atNonce), stamp: p.load(atStamp), settled: p.load(atSettled),
		shown: int64(p.load(atShown)), shownAt: p.load(atShownAt), dead: p.load(atDead), leastOf: p.load(atRoofOf),
	}
	if limit := p.load(atLimit); limit != None && r.nonce != 0 {
		r.correction, r.least = int64(limit-p.load(atCeiling)), int64(limit-p.load(atRoof))
	}
	return r
}

// publish puts a reading into the page. While it is half done processes see
// that, and go by the lower of the limit and the ceiling.
func (p mappedPage) publish(r reading) {
	p.store(atNonce, writing)
	p.store(atCeiling, p.limitLess(r.correction))
	p.store(atStamp, r.stamp)
	p.store(atSettled, r.settled)
	p.store(atShown, uint64(r.shown))
	p.store(atShownAt, r.shownAt)
	p.store(atDead, r.dead)
	p.store(atRoof, p.limitLess(r.least))
	p.store(atRoofOf, r.leastOf)
	p.store(atNonce, r.nonce)
}
