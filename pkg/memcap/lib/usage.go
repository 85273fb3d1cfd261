// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
)

// headSize is the size of the header's used part, in bytes.
const headSize = useWaits + 8

// Usage is an allocation's usage page of one GPU. The processes of its containers write to the
// page, so Usage reads it, never maps it, and trusts nothing in it. It is not safe for concurrent
// use.
type Usage struct {
	fd int
	// The watchdog reads hundreds of pages a second, and should not allocate memory for that.
	head [headSize]byte
	some [pageSize]byte // the slots of one readSome
	// users are the living processes that count, by the last Read.
	users []user
	took  time.Duration // CPU time of the last Read
}

// OpenUsage opens the usage page of an allocation on a GPU. The error is gpu.ErrNotFound if there
// is none, as for a GPU without a limit, and gpu.ErrInvalid if the file is not a usage page.
func (p *Pages) OpenUsage(key string, u gpu.UUID) (*Usage, error) {
	if !plainName(key) || !plainName(string(u)) {
		return nil, fmt.Errorf("open usage page of allocation %q on GPU %q: %w", key, u, gpu.ErrInvalid)
	}
	fd, err := openUsage(filepath.Join(p.usage, key, string(u)))
	if err != nil {
		return nil, fmt.Errorf("open usage page of allocation %s on %s: %w", key, u, notFound(err))
	}
	return &Usage{fd: fd}, nil
}

// openUsage opens a usage page, and checks that it is a file of the right size.
func openUsage(path string) (fd int, err error) {
	fd, err = unix.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil && (st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size != usageSize) {
		err = fmt.Errorf("not a file of %d bytes: %w", usageSize, gpu.ErrInvalid)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func notFound(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", gpu.ErrNotFound, err)
	}
	return err
}

// Close closes the page.
func (u *Usage) Close() error {
	if u.fd < 0 {
		return nil
	}
	err := unix.Close(u.fd)
	u.fd = -1
	return err
}

// Counters are the numbers in a usage page. All are in bytes, except for Nonce, Word, Steady,
// Contexts, Asks, Refusals, Uncounted, Guesses, Attempt and Processes. Sums are over the living
// processes.
//
// Counted too high until the process ends: memory mapped into sparse arrays, exported managed
// memory, and what a context that ended by the old cuCtxDetach had.
//
// Not counted before the next reading: what a green context takes beside the primary context,
// streams and events, code that is loaded when it is first used, stacks that a kernel makes larger
// than the limit, and forms of allocating calls that are newer than this library. A module that
// exceeds the cap exists until it is unloaded. If another container frees memory at that moment,
// only the next reading may see what the module takes.
//
// A process that loads a second copy of libcuda (dlmopen) counts a block twice if both copies have
// memory in it. If the copy that frees its part first does so near the cap, the container may be
// one block over until the next reading.
//
// tests/drivers/classes.txt lists all functions that are not counted, each with the reason. A
// driver's function that is neither counted nor listed fails a test.
type Counters struct {
	Nonce uint64 // differs between any two pages
	Bound uint64 // what the processes may have, less what is idle or lent
	Word  uint64 // Bound's word with its version: while it is equal, Bound has not changed
	// moves is the sum of all slots' words of what is idle, with their versions.
	moves uint64
	// Steady is true if the word had not changed after the rest had been read. If it is false, what
	// was read from the slots (Reserved to Contexts, Dead) may be newer than Bound.
	Steady bool
	// Committed <= what the driver gave <= Reserved. Bound is the sum of the processes' shares and
	// of what dead processes left; see c/count.h.
	Reserved, Committed uint64
	Managed             uint64 // part of Bound that the driver's figures lack
	promises            [promisers]promise
	Exported            uint64 // part of Committed that its owner freed and others may still have open
	Expected            uint64 // part of Bound that contexts were charged
	Contexts            uint64
	Asks                uint64 // how often a process near the cap asked for a reading
	Refusals            uint64
	Peak                uint64 // the highest Bound so far
	Settled             uint64 // sum of what was taken off Bound after the driver already had it back
	Undone              uint64 // the most that the driver gave beyond Bound and got back at once
	Uncounted           uint64 // allocations of an unknown type that were allowed under the open policy
	Guesses             uint64 // changes after which Bound may differ from the driver's figure
	// Attempt has two halves. The upper one counts the allocations made without a reservation so
	// far. The lower one is 1 + the slot of the one under way, or 0.
	Attempt   uint64
	Waits     uint64 // how often a process began to wait as a newcomer ([ControlHold])
	Dead      uint64 // part of Bound that dead processes have left there, at most
	Lent      uint64 // lent to processes that count what they have on another page (c/loan.h)
	Borrowed  uint64 // part of Bound that living processes have borrowed from other pages
	Processes int    // living processes that have used the GPU
}

// readPatience bounds the CPU time that Read takes to look for living processes. A container may
// put any number of locks on the file, and for each slot the kernel goes through all of them. So any
// program could make a read take minutes. A thousand processes take some milliseconds. It is CPU
// time, since a busy node or the agent's CPU limit may hold up the reader through no fault of the
// container.
const readPatience = 50 * time.Millisecond

// threadTime returns the CPU time of the calling thread, in the kernel and outside.
func threadTime() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &now); err != nil {
		return 0
	}
	return time.Duration(now.Nano())
}

// Read reads the page. The error is gpu.ErrInvalid if the numbers in it are impossible.
func (u *Usage) Read() (Counters, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	began := threadTime()
	defer func() { u.took = threadTime() - began }()
	u.users = u.users[:0]
	head := u.head[:]
	if err := u.readAt(head, 0); err != nil {
		return Counters{}, err
	}
	at := func(i int) uint64 { return binary.LittleEndian.Uint64(head[i:]) }
	word := at(useBound)
	c := Counters{
		Nonce: at(useNonce), Word: word, Bound: word & amounts * unit,
		Asks: at(useAsks), Refusals: at(useRefusals), Peak: at(usePeak), Settled: at(useSettled),
		Undone: at(useUndone), Uncounted: at(useUncounted), Guesses: at(useGuesses), Attempt: at(useAttempt), Waits: at(useWaits),
	}
	high := binary.LittleEndian.Uint32(head[useHigh:])
	if slot := uint32(c.Attempt); slot > slots || slot != 0 && !u.alive(int(slot)-1) {
		c.Attempt -= uint64(slot) // a dead process's attempt, or a slot that does not exist
	}
	if string(head[:8]) != usageMagic || c.Nonce == 0 || high > slots {
		return Counters{}, fmt.Errorf("read usage page: its header is invalid: %w", gpu.ErrInvalid)
	}
	c.Undone = min(c.Undone, most)
	if c.Peak >= most || c.Bound >= most {
		return Counters{}, fmt.Errorf("read usage page: %d bytes bound, %d at the peak, which no GPU has: %w",
			c.Bound, c.Peak, gpu.ErrInvalid)
	}
	// The slots are read after the header. So what Settled includes is not in Committed, too.
	var idle uint64
	for i := range int(high) {
		const some = pageSize / slotSize
		if i%some == 0 {
			if err := u.readSome(i, min(some, int(high)-i)); err != nil {
				return Counters{}, err
			}
		}
		s := u.some[i%some*slotSize:][:slotSize]
		slot := func(i int) uint64 { return binary.LittleEndian.Uint64(s[i:]) }
		reserved, committed := slotSums(s)
		c.moves += slot(slotIdle)
		idle += slot(slotIdle) & amounts * unit
		lends := slot(slotLends) != 0
		if lends {
			// What is committed is in no driver figure for this page, whether its owner lives or
			// not: its owner counts on another page.
			lent := min(committed, reserved)
			c.Lent += lent
			reserved, committed = reserved-lent, 0
		}
		if slot(slotPID) == 0 && reserved == 0 {
			continue
		}
		alive := u.alive(i)
		if threadTime()-began > readPatience {
			return Counters{}, fmt.Errorf("read usage page: it takes longer than %v to see which of %d live: %w",
				readPatience, high, gpu.ErrInvalid)
		}
		switch {
		case !alive:
			c.Dead += reserved
		case lends:
			c.Reserved += reserved
		default:
			u.living(&c, i, slot, reserved, committed)
		}
	}
	if err := u.readAt(head[:8], useBound); err != nil {
		return Counters{}, err
	}
	c.Steady = at(0) == word
	if err := c.settle(idle); err != nil {
		return Counters{}, err
	}
	return c, nil
}

// settle takes what is idle in all slots, and what is lent, off Bound. The error is gpu.ErrInvalid
// if the slots' sums are impossible.
func (c *Counters) settle(idle uint64) error {
	if idle >= most {
		return fmt.Errorf("read usage page: %d bytes idle in all slots: %w", idle, gpu.ErrInvalid)
	}
	c.Bound -= min(c.Bound, idle+c.Lent)
	if c.Reserved >= most || c.Committed >= most || c.Dead >= most || c.Lent >= most {
		return fmt.Errorf("read usage page: %d bytes in all slots: %w", c.Reserved, gpu.ErrInvalid)
	}
	return nil
}

// living adds the numbers in the slot of a living process.
func (u *Usage) living(c *Counters, i int, slot func(int) uint64, reserved, committed uint64) {
	exported := min(slot(slotExported), committed)
	rest := committed - min(committed, slot(slotExpected)+slot(slotManaged)+slot(slotPromised)+exported)
	u.addUser(i, Process{slot(slotPIDs), slot(slotPID)}, min(slot(slotContexts), 1<<20), reserved, rest)
	c.Processes++
	c.Borrowed += min(slot(slotBorrowed), reserved)
	c.Reserved += reserved
	c.Committed += committed
	c.Managed += slot(slotManaged)
	c.promise(i, slot(slotPID), slot(slotPromised))
	c.Expected += slot(slotExpected)
	c.Exported += exported
	c.Contexts += min(slot(slotContexts), 1<<20)
}

// Process names a process as a usage page does: by the number of its PID namespace and its PID in
// there.
type Process struct{ Namespace, PID uint64 }

// Counted fills in how many bytes each process in of has counted. That includes allocations under
// way, and excludes managed memory, which the driver's figures lack. It is 0 for processes that do
// not count. The error is gpu.ErrInvalid if the numbers in the page are impossible; then all are 0.
func (u *Usage) Counted(of map[Process]uint64) error {
	nobody := func() {
		for p := range of {
			of[p] = 0
		}
	}
	nobody()
	err := u.eachLiving(func(who Process, s []byte) bool {
		_, asked := of[who]
		return asked && binary.LittleEndian.Uint64(s[slotLends:]) == 0 // else its owner counts that on another page
	}, func(who Process, s []byte) {
		reserved, _ := slotSums(s)
		of[who] += reserved - min(reserved, binary.LittleEndian.Uint64(s[slotManaged:]))
	})
	if err != nil {
		nobody()
	}
	return err
}

// Compute is what a process says of its share of the GPU's SMs under MPS. It may be nonsense.
type Compute struct {
	// SMs is the most SMs that the driver gave the process; 0 if it has not said so.
	SMs int
	// Starting is the time since boot (CLOCK_BOOTTIME) at which it began cuInit; 0 if it is not
	// in cuInit.
	Starting time.Duration
}

// mostSMs bounds what a page may say. It is far above what any GPU has.
const mostSMs = 1 << 16

// Compute fills in what each process in of says; the zero Compute for processes that say nothing.
// starting is when the process began that has been in cuInit the longest, whether of has it or not;
// 0 if there is none. Such a process may be on no list of the driver's yet. The error is
// gpu.ErrInvalid if the page cannot be read in time; then nothing is filled in.
func (u *Usage) Compute(of map[Process]Compute) (starting time.Duration, err error) {
	nobody := func() {
		for p := range of {
			of[p] = Compute{}
		}
	}
	nobody()
	begun := func(s []byte) time.Duration {
		return time.Duration(min(binary.LittleEndian.Uint64(s[slotStarting:]), math.MaxInt64))
	}
	err = u.eachLiving(func(who Process, s []byte) bool {
		_, asked := of[who]
		return asked || begun(s) != 0
	}, func(who Process, s []byte) {
		at := begun(s)
		starting = earlier(starting, at)
		said, asked := of[who]
		if !asked {
			return
		}
		if sms := binary.LittleEndian.Uint64(s[slotSMs:]); sms <= mostSMs {
			said.SMs = max(said.SMs, int(sms))
		}
		said.Starting = earlier(said.Starting, at)
		of[who] = said
	})
	if err != nil {
		nobody()
		return 0, err
	}
	return starting, nil
}

// earlier returns the earlier of two times, of which 0 is none.
func earlier(a, b time.Duration) time.Duration {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}

// eachLiving calls use with each slot that wanted accepts, if its owner lives.
func (u *Usage) eachLiving(wanted func(Process, []byte) bool, use func(Process, []byte)) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	began := threadTime()
	head := u.head[:4]
	if err := u.readAt(head, useHigh); err != nil {
		return err
	}
	ever := int(min(binary.LittleEndian.Uint32(head[:]), slots))
	for i := range ever {
		const some = pageSize / slotSize
		if i%some == 0 {
			if err := u.readSome(i, min(some, ever-i)); err != nil {
				return err
			}
		}
		s := u.some[i%some*slotSize:][:slotSize]
		who := Process{binary.LittleEndian.Uint64(s[slotPIDs:]), binary.LittleEndian.Uint64(s[slotPID:])}
		if !wanted(who, s) {
			continue // to look at the clock for each slot would itself take long
		}
		if u.alive(i) {
			use(who, s)
		}
		if threadTime()-began > readPatience {
			return fmt.Errorf("read usage page: it takes longer than %v to find out what each process says: %w",
				readPatience, gpu.ErrInvalid)
		}
	}
	return nil
}

// slotSums returns the sums of a slot's two pairs of words, in bytes.
func slotSums(s []byte) (reserved, committed uint64) {
	at := func(i int) uint64 { return binary.LittleEndian.Uint64(s[i:]) }
	return at(slotReserved) + at(slotOthersReserved), at(slotCommitted) + at(slotOthersCommitted)
}

// readSome reads n slots into u.some, from the given one on. A sum of two words may be below zero
// if one thread adds to it and another subtracts while they are read. Then readSome reads them
// again.
func (u *Usage) readSome(from, n int) error {
	const tries = 10
	var err error
	for range tries {
		if err := u.readAt(u.some[:n*slotSize], pageSize+int64(from)*slotSize); err != nil {
			return err
		}
		if err = u.check(from, n); err == nil {
			return nil
		}
	}
	return err
}

// check returns gpu.ErrInvalid if the numbers in the slots are impossible.
func (u *Usage) check(from, n int) error {
	for i := range n {
		s := u.some[i*slotSize:][:slotSize]
		reserved, committed := slotSums(s)
		for _, v := range []uint64{reserved, committed, binary.LittleEndian.Uint64(s[slotManaged:]),
			binary.LittleEndian.Uint64(s[slotExpected:]), binary.LittleEndian.Uint64(s[slotPromised:])} {
			if v >= most || v%unit != 0 {
				return fmt.Errorf("read usage page: slot %d has %d bytes: %w", from+i, v, gpu.ErrInvalid)
			}
		}
	}
	return nil
}

func (u *Usage) readAt(b []byte, at int64) error {
	for len(b) > 0 {
		n, err := unix.Pread(u.fd, b, at)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fmt.Errorf("read usage page: %w", err)
		case n == 0:
			return fmt.Errorf("read usage page: it has become shorter: %w", gpu.ErrInvalid)
		default:
			b, at = b[n:], at+int64(n)
		}
	}
	return nil
}

// alive reports whether a process holds a slot's lock.
func (u *Usage) alive(slot int) bool {
	lock := unix.Flock_t{Type: unix.F_WRLCK, Start: int64(slot), Len: 1}
	err := unix.FcntlFlock(uintptr(u.fd), unix.F_OFD_GETLK, &lock)
	return err == nil && lock.Type != unix.F_UNLCK
}
