// SPDX-License-Identifier: Apache-2.0

package lib

import "math/bits"

// A promise is memory of which the driver's figures may have nothing yet: what a process
// has asked for by the limits of its contexts, and some drivers take with the first
// kernel only. Nothing tells when they do. But the correction hardly changes by itself:
// where all that is not known to be taken is thought to be missing in a figure, and the
// correction by that figure would rise by just what one of them is, or several, they have
// been taken.
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

// of returns how much of a promise is taken. A process whose promises grow makes new ones.
func (t taken) of(p promise) uint64 {
	for _, is := range t {
		if is.slot == p.slot && is.pid == p.pid {
			return min(is.bytes, p.bytes)
		}
	}
	return 0
}

// open returns what of a page's promises is not known to be taken.
func (t taken) open(c Counters) uint64 {
	var sum uint64
	for _, p := range c.promises {
		sum += p.bytes - t.of(p)
	}
	return sum
}

// next is what is known after a reading by which the correction, with all that is open
// missing in the driver's figure, rises by so many bytes. That may be off: up by what was
// charged by guess since the reading before, down also by all exported memory that is gone.
// So the nearest sum counts, nothing being one of them; and a quarter of it has to be seen.
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
