// SPDX-License-Identifier: Apache-2.0

package lib

import "time"

// estimateBack is how long an estimate takes to rise by one MiB towards DefaultContext. A whole
// rise takes about an hour: longer than programs take to start, and short enough for an estimate
// that was wrong.
const estimateBack = 8 * time.Second

// estimate stores in the page what a context of this allocation is expected to take. each is what
// each context has by a reading, in bytes, or 0 if the reading does not show it. The caller holds
// m.pages.mu.
//
// What the driver has beyond all that was counted is contexts, and modules that were loaded into
// them. The figure does not show which is which. But a module needs a context to be loaded into. So
// the reading with the least for each context has the fewest modules in it. A lower figure counts
// at once. Upwards, the estimate only goes back to the default as time passes, and never above it.
//
// The estimate is this allocation's alone: what one tenant loads, or writes into its counters,
// changes nothing for another.
func (m *Meter) estimate(each uint64, now time.Time) {
	if m.estimated.IsZero() {
		m.estimated = now
	}
	steps := now.Sub(m.estimated) / estimateBack
	m.estimated = m.estimated.Add(steps * estimateBack)
	m.page.setContext(expected(m.page.context(), each, uint64(steps)))
}

// noteBare notes the least that contexts were seen to take, by a quiet reading with each bytes for
// each context. It also uses readings that charge other memory by guess: if a guess makes contexts
// look small here, it makes what they have look small in held, too. If there are several contexts,
// the larger of two readings in a row counts, as in credible.
func (m *Meter) noteBare(c Counters, each uint64) {
	was := m.seen
	m.seen = each
	if c.Contexts > 1 {
		each = max(each, was)
	}
	if each = max(each, LeastContext); each < m.bare && m.seen != 0 && (c.Contexts == 1 || was != 0) {
		m.bare = each
		m.page.store(atBare, m.bare) // for the next agent, which may see only contexts with code in them
	}
}

// expected returns the next estimate, in bytes. was is the last one, each what contexts have by a
// reading or 0, and steps how many MiB the estimate may rise.
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

// credible returns what a quiet reading, by which each context takes so many bytes, shows of contexts;
// 0 if nothing. It shows nothing if other memory than the living contexts was charged by guess: a
// guess is mostly too high and makes contexts look small. If there are several contexts, the larger
// of two readings in a row counts, since a dying process loses its memory some time before it
// counts as dead.
func (m *Meter) credible(c Counters, each uint64) uint64 {
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

// perContext returns what the driver has for each context beyond all that was counted, by a quiet
// reading whose figure lacks promised bytes. It is in whole MiB, or 0 if the figures make no sense.
func perContext(c Counters, driver, promised uint64) uint64 {
	rest := c.rest(promised)
	if c.Contexts == 0 || driver <= rest {
		return 0
	}
	const mib = 1 << 20
	return ((driver-rest)/c.Contexts + mib - 1) / mib * mib
}

// rest returns what the driver's figure has besides contexts, in bytes, of a page with so many
// bytes of promises that are open. Memory that was exported and freed counts as gone: a context
// then looks larger than it is if that memory is still there, and never smaller.
func (c *Counters) rest(promised uint64) uint64 {
	return c.Committed - min(c.Committed, c.Expected+c.Managed+promised+c.Exported)
}
