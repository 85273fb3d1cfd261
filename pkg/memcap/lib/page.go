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

// The layout of the pages, as in c/page.h; a test compares the two.
const (
	limitMagic = "GPUCAP02"
	usageMagic = "GPUUSE05"

	pageSize  = 4096
	slotSize  = 128
	slots     = 16384
	usageSize = pageSize + slots*slotSize

	unit       = 512
	amountBits = 40
	amounts    = 1<<amountBits - 1
	most       = 1 << 48 // bytes; more than any GPU has
	writing    = ^uint64(0)

	atLimit   = 8
	atContext = 16
	atEvery   = 24
	atUUID    = 32
	atUsage   = 96
	atSince   = 104
	atCode    = 112
	atSure    = 120
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
	atHeld    = 216
	atSurely  = 224
	atBare    = 232
	atPercent = 240
	atControl = 248

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
	useBorrows   = 200

	useUnmeasured = 208
	useUnread     = 216
	useWaits      = 224

	slotReserved  = 0
	slotCommitted = 8
	slotManaged   = 16
	slotExpected  = 24
	slotContexts  = 32
	slotPID       = 40
	slotPIDs      = 48
	slotExported  = 56
	// What all threads but the first have added to reserved and committed.
	slotOthersReserved  = 64
	slotOthersCommitted = 72
	slotPromised        = 80
	slotIdle            = 88
	slotBorrowed        = 96
	slotLends           = 104
	slotSMs             = 112
	slotStarting        = 120
)

// A Limit is what one allocation may use of one GPU.
type Limit struct {
	GPU gpu.UUID
	// Bytes is the cap, with what contexts take. None: the GPU has no cap, and nothing is counted.
	Bytes uint64
	// Context is what a context is expected to take until the driver has been read, in bytes; 0
	// means DefaultContext. An existing page keeps the value that was measured since.
	Context uint64
	// Code is what a context may take later for code that is loaded with its first kernels, in
	// bytes. For each context so much of the cap is held back; see DefaultCode. 0: nothing is held
	// back.
	Code uint64
	// Percent is the holder's share of the GPU's SMs under MPS, from 1 to 100. 0: it has no such
	// share, and its processes are no clients of MPS.
	Percent int
	// Waits makes a usage page also for a GPU without a limit, on which newcomers say that they wait (see
	// ControlHold and Waits). It has an effect only for a new holder: a container that runs cannot be given the page.
	Waits bool
	// Since is when the allocation was made or renewed. An older usage page belongs to an earlier
	// holder and is not used again. Zero: the time is not known, and the page is kept.
	Since time.Time
}

// since returns Since as the page has it: Unix nanoseconds, or 0.
func (l Limit) since() uint64 {
	if l.Since.IsZero() {
		return 0
	}
	return uint64(l.Since.UnixNano())
}

// A Page has the host paths of the two pages of an allocation's GPU.
type Page struct {
	Limit string
	Usage string // empty for a GPU without a limit, unless Limit.Waits asked for it
}

// Pages are the pages of a node's allocations: dir/cap/limits/<key>/<UUID>, and
// dir/cap/usage/<key>/<UUID> (see usagefs.go). Containers have limit pages mounted and mapped. So a
// limit page keeps its inode as long as its allocation lives, and is changed only by atomic stores.
//
// The methods are safe for concurrent use. Only one process at a time may use a directory.
type Pages struct {
	dir, usage, notices string
	// mu guards what is stored in pages: a change of the limit also moves the ceiling that a Meter
	// has written.
	mu sync.Mutex
}

// OpenPages opens the pages below the agent's state directory, and creates their folders.
func OpenPages(dir string) (*Pages, error) {
	p := &Pages{dir: filepath.Join(dir, "cap", limitsName), usage: filepath.Join(dir, "cap", usageName),
		notices: filepath.Join(dir, "cap", noticesName)}
	// On the host only root may reach the usage pages, since any user of a container may write to
	// them.
	if err := errors.Join(os.MkdirAll(p.dir, 0o755), os.MkdirAll(p.usage, 0o700), os.MkdirAll(p.notices, 0o755)); err != nil {
		return nil, fmt.Errorf("make folders of allocations' pages: %w", err)
	}
	return p, nil
}

// Write makes the limit pages of an allocation, and a usage page for each GPU with a limit. It
// returns the paths of both. every is how often the agent reads the driver for them; 0 means never.
//
// An existing limit page keeps its inode and its correction. The usage pages are kept as long as
// processes can rely on them and the holder is the same; otherwise all usage pages of the
// allocation are made anew. Pages of GPUs that limits does not name are removed. A second Write
// with the same arguments changes nothing.
//
// The error wraps gpu.ErrNoPermission if this process may not mount the file system of the usage
// pages, and gpu.ErrInvalid if the key or a limit is not valid.
func (p *Pages) Write(key string, every time.Duration, limits []Limit) (map[gpu.UUID]Page, error) {
	if !plainName(key) {
		return nil, fmt.Errorf("write limit pages: allocation key %q: %w", key, gpu.ErrInvalid)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	dir := filepath.Join(p.dir, key)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make folder of limit pages: %w", err)
	}
	for i := range limits {
		if err := limits[i].check(); err != nil {
			return nil, fmt.Errorf("write limit page of allocation %s: %w", key, err)
		}
	}
	used, nonces, err := p.usageLocked(key, limits)
	if err != nil {
		return nil, fmt.Errorf("make usage pages of allocation %s: %w", key, err)
	}
	pages := make(map[gpu.UUID]Page)
	for _, l := range limits {
		page := Page{Limit: filepath.Join(dir, string(l.GPU))}
		if err := writeLimit(page.Limit, every, l, used[l.GPU], nonces[l.GPU]); err != nil {
			return nil, fmt.Errorf("write limit page of %s for allocation %s: %w", l.GPU, key, err)
		}
		if used[l.GPU] {
			page.Usage = filepath.Join(p.usage, key, string(l.GPU))
		}
		pages[l.GPU] = page
	}
	old, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list limit pages of allocation %s: %w", key, err)
	}
	for _, e := range old {
		if _, named := pages[gpu.UUID(e.Name())]; !named {
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, fmt.Errorf("remove old limit page of allocation %s: %w", key, err)
			}
		}
	}
	return pages, nil
}

func (l Limit) check() error {
	if !plainName(string(l.GPU)) || len(l.GPU) >= uuidRoom {
		return fmt.Errorf("GPU %q: %w", l.GPU, gpu.ErrInvalid)
	}
	if l.Context >= most || l.Code >= most {
		return fmt.Errorf("a context of %d bytes and %d of code on %s, which no GPU has: %w",
			l.Context, l.Code, l.GPU, gpu.ErrInvalid)
	}
	if l.Bytes != None && l.Bytes >= most {
		return fmt.Errorf("limit of %d bytes of %s, which no GPU has: %w", l.Bytes, l.GPU, gpu.ErrInvalid)
	}
	if l.Percent < 0 || l.Percent > 100 {
		return fmt.Errorf("a share of %d percent of %s: %w", l.Percent, l.GPU, gpu.ErrInvalid)
	}
	return nil
}

// writeLimit writes one limit page. usage is the nonce of the usage page that belongs to it, or 0
// if there is none or it has not changed; used is false if there is none.
func writeLimit(path string, every time.Duration, l Limit, used bool, usage uint64) error {
	if l.Context == 0 {
		l.Context = DefaultContext
	}
	// What is held back must leave room for one context.
	l.Code = min(l.Code, l.Bytes-min(l.Bytes, l.Context))
	everyMS := uint64(max(0, every.Milliseconds()))
	if every > 0 {
		everyMS = max(1, everyMS)
	}
	page, err := mapPage(path)
	if err != nil {
		// There is no page, or it is from another version of the agent; no container can go on
		// using that.
		return makePage(path, everyMS, l, usage)
	}
	defer page.unmap()
	if uuid := page.b[atUUID : atUUID+uuidRoom]; string(uuid[:len(l.GPU)]) != string(l.GPU) || uuid[len(l.GPU)] != 0 {
		return makePage(path, everyMS, l, usage)
	}
	context := page.context()
	if usage != 0 {
		// What was measured of contexts was measured with the old page's holder.
		context = l.Context
		page.store(atSure, 0)
		page.store(atBare, 0)
		page.store(atSince, l.since())
		page.store(atUsage, usage)
	}
	if !used { // it is known whose the page is, and that this holder has no usage page; see usesLocked
		page.store(atUsage, 0)
		page.store(atSince, max(page.load(atSince), l.since()))
	}
	if context < LeastContext || context > DefaultContext {
		context = l.Context // from another version of the agent
	}
	page.store(atPercent, uint64(l.Percent))
	page.store(atCode, l.Code)
	page.setContext(context)
	if page.load(atEvery) != everyMS {
		page.store(atEvery, everyMS)
	}
	if was := page.load(atLimit); was != l.Bytes {
		c := page.reading()
		if was == None {
			c.correction, c.leastOf = 0, 0
		}
		page.store(atNonce, writing) // the old ceiling may exceed the new limit
		page.store(atLimit, l.Bytes)
		c.stamp = 0
		page.publish(c)
	}
	if everyMS == 0 && page.load(atNonce) != 0 {
		// Readings have ended, and an old one would never be corrected: processes would have less
		// and less room. Without a reading they go by the limit.
		page.publish(reading{})
	}
	return nil
}

// makePage writes a new page and moves it into place.
func makePage(path string, everyMS uint64, l Limit, usage uint64) error {
	b := make([]byte, pageSize)
	copy(b, limitMagic)
	binary.LittleEndian.PutUint64(b[atLimit:], l.Bytes)
	binary.LittleEndian.PutUint64(b[atContext:], l.Context+l.Code)
	binary.LittleEndian.PutUint64(b[atCode:], l.Code)
	binary.LittleEndian.PutUint64(b[atEvery:], everyMS)
	binary.LittleEndian.PutUint64(b[atUsage:], usage)
	binary.LittleEndian.PutUint64(b[atSince:], l.since())
	binary.LittleEndian.PutUint64(b[atCeiling:], l.Bytes)
	binary.LittleEndian.PutUint64(b[atPercent:], uint64(l.Percent))
	copy(b[atUUID:atUUID+uuidRoom-1], l.GPU)
	// It is written outside the allocation's folder, where each file is a GPU's page.
	folder, name := filepath.Split(path)
	key := filepath.Base(folder)
	root, err := os.OpenRoot(filepath.Dir(filepath.Clean(folder)))
	if err != nil {
		return err
	}
	defer root.Close()
	// Any user of a container may read it.
	file, half := filepath.Join(key, name), ".new-"+key
	return atomicfile.Write(root, file, half, 0o644, atomicfile.Unflushed, func(f *os.File) error {
		_, err := f.Write(b)
		return err
	})
}

// Remove removes an allocation's pages and its notice, if it has any. A container that has them mounted keeps
// them. Remove can take some hundredths of a second; meanwhile the pages of other allocations may
// be written. It must not run at the same time as a Write of the same key.
func (p *Pages) Remove(key string) error {
	if !plainName(key) {
		return fmt.Errorf("remove pages: allocation key %q: %w", key, gpu.ErrInvalid)
	}
	// As long as one of the two folders is left, List returns the key, and the caller tries again.
	// The kernel's unmount waits for all processors, so it runs without the lock.
	err := removeRoom(filepath.Join(p.usage, key))
	if err == nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		if err = os.Remove(filepath.Join(p.notices, key)); err == nil || errors.Is(err, fs.ErrNotExist) {
			err = os.RemoveAll(filepath.Join(p.dir, key))
		}
	}
	if err != nil {
		return fmt.Errorf("remove pages of allocation %s: %w", key, err)
	}
	return nil
}

// List returns the keys of the allocations that have pages, in order. It removes files that a
// killed writer left unfinished.
func (p *Pages) List() ([]string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var keys []string
	for _, dir := range []string{p.dir, p.usage} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, fmt.Errorf("list allocations' pages: %w", err)
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

// plainName reports whether s may be the name of a file or folder of ours: letters, digits and a
// few marks, no separator, and no dot at its beginning.
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
	// dev and ino identify the file. While it is mapped, no other file on the device can get its
	// inode number.
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

// atPath reports whether the page still is the file at its path. An allocation that has ended and
// was made again has new pages.
func (p mappedPage) atPath() bool {
	var st unix.Stat_t
	return unix.Lstat(p.path, &st) == nil && uint64(st.Dev) == p.dev && st.Ino == p.ino
}

func (p mappedPage) word(at int) *uint64    { return (*uint64)(unsafe.Pointer(&p.b[at])) }
func (p mappedPage) load(at int) uint64     { return atomic.LoadUint64(p.word(at)) }
func (p mappedPage) store(at int, v uint64) { atomic.StoreUint64(p.word(at), v) }

// wake wakes processes that wait for a word to change, at most 64 to bound the work, and returns how
// many. The others wake up by themselves a little later.
func (p mappedPage) wake(at int) (woken int) {
	const futexWake, wakeMost = 1, 64
	n, _, errno := unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(p.word(at))), futexWake, wakeMost, 0, 0, 0)
	if errno != 0 {
		return 0
	}
	return int(n)
}

// context returns what a context is expected to take, in bytes, and setContext sets it. The page
// has the sum of this and what its code may take, since a process charges both.
func (p mappedPage) context() uint64 {
	context := p.load(atContext)
	return context - min(context, p.load(atCode))
}

// bare returns the least that a context was seen to take, in bytes, or the estimate if none was
// seen.
func (p mappedPage) bare() uint64 {
	if bytes := p.load(atBare); bytes >= LeastContext && bytes <= DefaultContext {
		return bytes
	}
	return p.context()
}

func (p mappedPage) setContext(bytes uint64) {
	if sum := bytes + p.load(atCode); sum != p.load(atContext) {
		p.store(atContext, sum)
	}
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

// A reading is what the agent last found out about a usage page. The limit page has it. Nonce 0:
// there was no reading.
type reading struct {
	nonce, stamp, settled uint64
	correction            int64
	// held is how much room is held back for code, in bytes, beyond the correction; see held in
	// held.go. surely is the same for the roof.
	held, surely uint64
	// shown is for the views of programs: the driver's figure less bound. At that time shownAt had
	// been settled, and dead bytes of bound were gone: of dead processes, or exported.
	shown         int64
	shownAt, dead uint64
	// least is a lower bound of the correction. It holds as long as the usage page's guesses are
	// leastOf - 1. leastOf 0: none is known.
	least   int64
	leastOf uint64
}

func (p mappedPage) reading() reading {
	if p.load(atNonce) == writing {
		return reading{} // an agent was killed while it wrote
	}
	r := reading{
		nonce: p.load(atNonce), stamp: p.load(atStamp), settled: p.load(atSettled),
		shown: int64(p.load(atShown)), shownAt: p.load(atShownAt), dead: p.load(atDead), leastOf: p.load(atRoofOf),
		held: p.load(atHeld), surely: p.load(atSurely),
	}
	if limit := p.load(atLimit); limit != None && r.nonce != 0 {
		r.correction = int64(limit-p.load(atCeiling)) - int64(r.held)
		r.least = int64(limit-p.load(atRoof)) - int64(r.surely)
	}
	return r
}

// publish stores a reading in the page. Meanwhile the nonce is writing, and processes go by the
// lower of the limit and the ceiling.
func (p mappedPage) publish(r reading) {
	p.store(atNonce, writing)
	p.store(atCeiling, p.limitLess(r.correction+int64(r.held)))
	p.store(atStamp, r.stamp)
	p.store(atSettled, r.settled)
	p.store(atShown, uint64(r.shown))
	p.store(atShownAt, r.shownAt)
	p.store(atDead, r.dead)
	p.store(atRoof, p.limitLess(r.least+int64(r.surely)))
	p.store(atRoofOf, r.leastOf)
	p.store(atHeld, r.held)
	p.store(atSurely, r.surely)
	p.store(atNonce, r.nonce)
}
