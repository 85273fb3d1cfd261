// SPDX-License-Identifier: Apache-2.0

package lib

import "time"

// estimateBack is how long an estimate takes for one MiB of its way back to
// DefaultContext: an hour for all of it, which is longer than programs take to start
// and short enough for an estimate that was wrong.
const estimateBack = 8 * time.Second

// estimate puts into the page what a context of this allocation's is expected to take,
// after a reading by which each has so many bytes (0: it does not tell). m.pages.mu
// is held.
//
// What the driver has beyond all that was counted is contexts and what was loaded
// into them, and nothing tells one from the other. But nobody loads a module before
// there is a context for it: of all readings, the one with the least for each
// context has the fewest modules in it. So the least counts, at once, and more only
// as time passes: the estimate goes back to the default by itself, and never above.
// It is this allocation's alone: what one tenant loads, or writes into its counters,
// changes nothing for another.
func (m *Meter) estimate(each uint64, now time.Time) {
	if m.estimated.IsZero() {
		m.estimated = now
	}
	steps := now.Sub(m.estimated) / estimateBack
	m.estimated = m.estimated.Add(steps * estimateBack)
	m.page.setContext(expected(m.page.context(), each, uint64(steps)))
}

// barely notes the least that contexts were seen to take, by a quiet reading with so many bytes
// for each. What was charged by guess counts here: where it makes contexts look small, it makes
// look small in held what they have, too. Of several contexts, as in clean, the larger of two
// readings in a row counts.
func (m *Meter) barely(c Counters, each uint64) {
	was := m.seen
	m.seen = each
	if c.Contexts > 1 {
		each = max(each, was)
	}
	if each = max(each, LeastContext); each < m.bare && m.seen != 0 && (c.Contexts == 1 || was != 0) {
		m.bare = each
		m.page.store(atBare, m.bare) // for the next agent, who may see contexts with code in them alone
	}
}

// expected is the next estimate, in bytes.
func expected(was, each, steps uint64) uint64 {
	next := uint64(DefaultContext)
	if was < next && steps < next>>20 {
		next = min(was+steps<<20, next)
	}
	if each != 0 {
		next = min(next, each)
	}
	return max(next, LeastContext)
}

// clean returns what may be believed of a quiet reading by which each context takes
// so many bytes: nothing where something else than the living contexts was charged by
// guess, which is mostly too much and would make contexts look small; and of several
// contexts the larger of two readings in a row, since a process that dies has lost its
// memory some time before it counts as dead.
func (m *Meter) clean(c Counters, each uint64) uint64 {
	if c.Guesses > c.Contexts {
		each = 0
	}
	was := m.each
	m.each = each
	if c.Contexts > 1 {
		if was == 0 || each == 0 {
			return 0
		}
		return max(each, was)
	}
	return each
}

// perContext returns what the driver has for each context beyond all that was
// counted, by a quiet reading that lacks so much of promises: in whole MiB, 0 where that
// makes no sense.
func perContext(c Counters, driver, promised uint64) uint64 {
	rest := c.Committed - min(c.Committed, c.Expected+c.Managed+promised)
	if c.Contexts == 0 || driver <= rest {
		return 0
	}
	const mib = 1 << 20
	return ((driver-rest)/c.Contexts + mib - 1) / mib * mib
}
