// SPDX-License-Identifier: Apache-2.0

package lib

import "math/bits"

// A promise is memory that the driver's figures may lack: what a process asked for by the limits of
// its contexts. Some drivers take that memory only with the first kernel, and no call shows when.
//
// But the correction seldom changes by itself. So it is computed as if the figure lacked all
// promises that are not known to be taken. If it would then rise by the size of one or several
// promises, these were taken.
//
// If exported memory goes between the same two readings, the rise may not show. Then the promise
// counts as open, and is charged twice, until its process gives it back.
type promise struct {
	slot  int
	pid   uint64
	bytes uint64
}

// promisers is how many promises are kept apart. The last entry also has those of all further
// processes.
const promisers = 8

func (c *Counters) promise(slot int, pid, bytes uint64) {
	if bytes == 0 {
		return
	}
	for i := range c.promises {
		p := &c.promises[i]
		if p.bytes == 0 {
			*p = promise{slot, pid, bytes}
			return
		}
		if i == promisers-1 {
			p.bytes += bytes
		}
	}
}

// taken has the part of each process's promise that is known to be taken.
type taken []promise

// of returns how many bytes of a promise are taken. If a promise has grown since, the growth is
// open.
func (t taken) of(p promise) uint64 {
	for _, is := range t {
		if is.slot == p.slot && is.pid == p.pid {
			return min(is.bytes, p.bytes)
		}
	}
	return 0
}

// in returns how many bytes are taken of the promise to a slot's owner.
func (t taken) in(slot int, pid uint64) uint64 {
	return t.of(promise{slot, pid, most})
}

// open returns how many bytes of a page's promises are not known to be taken.
func (t taken) open(c Counters) uint64 {
	var sum uint64
	for _, p := range c.promises {
		sum += p.bytes - t.of(p)
	}
	return sum
}

// next returns what is known to be taken after a quiet reading. rise is how many bytes the
// correction would rise if the figure lacked all open promises. It is not exact: what was charged
// by guess since the last reading changes it, and exported memory that is gone makes it smaller. So
// next takes the set of promises whose sum is nearest to it. The set may be empty, and rise must be
// at least a quarter of its sum.
func (t taken) next(c Counters, rise int64) taken {
	var now taken
	for _, p := range c.promises {
		if p.bytes > 0 {
			now = append(now, promise{p.slot, p.pid, t.of(p)})
		}
	}
	best, off := uint(0), rise
	for some := uint(1); rise > 0 && some < 1<<len(now); some++ {
		var sum int64
		for left := some; left != 0; left &= left - 1 {
			i := bits.TrailingZeros(left)
			sum += int64(c.promises[i].bytes - now[i].bytes)
		}
		if by := max(rise-sum, sum-rise-int64(c.Exported), 0); by < off && sum > 0 && rise >= sum/4 {
			best, off = some, by
		}
	}
	for ; best != 0; best &= best - 1 {
		i := bits.TrailingZeros(best)
		now[i].bytes = c.promises[i].bytes
	}
	return now
}
