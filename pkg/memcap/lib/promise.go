// SPDX-License-Identifier: Apache-2.0

package lib

import "math/bits"

// A promise is memory that may be missing in the driver's figures: what a process asked
// for by the limits of its contexts, which some drivers take only with the first kernel.
// Nothing tells when they do. But the correction seldom changes by itself. It is
// calculated as if all promises that are not known to be taken were missing in the figure;
// if it would then rise by just the size of one or several promises, these were taken.
//
// If exported memory goes between the same two readings, the rise may not show. Then the
// promise counts as open, and is charged twice, until its process gives it back.
type promise struct {
	slot  int
	pid   uint64
	bytes uint64
}

// promisers is how many processes may have promises; the last has those of all others too.
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

// taken is what is known to be taken of the processes' promises.
type taken []promise

// of returns how many bytes of a promise are taken. What a promise grows by is open.
func (t taken) of(p promise) uint64 {
	for _, is := range t {
		if is.slot == p.slot && is.pid == p.pid {
			return min(is.bytes, p.bytes)
		}
	}
	return 0
}

// in returns how many bytes are taken of what the owner of a slot was promised.
func (t taken) in(slot int, pid uint64) uint64 {
	return t.of(promise{slot, pid, most})
}

// open returns what of a page's promises is not known to be taken.
func (t taken) open(c Counters) uint64 {
	var sum uint64
	for _, p := range c.promises {
		sum += p.bytes - t.of(p)
	}
	return sum
}

// next returns what is known to be taken after a quiet reading. rise is by how many bytes
// the correction would rise if all that is open were missing in the figure. It is not
// exact: what was charged by guess since the last reading changes it, and exported memory
// that is gone makes it smaller. So the nearest sum of promises counts, where no promise
// is a sum too, and the rise must be at least a quarter of it.
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
