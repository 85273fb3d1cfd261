// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// Meter compares what an allocation's processes count with the driver's figure for them, and writes
// the difference to the limit page. A reading is Begin, then the driver's figure, then End.
// Processes go on allocating meanwhile. The meter reads the usage page in Begin and in End, and
// concludes from both what the figure shows.
//
// A Meter is not for concurrent use.
type Meter struct {
	pages *Pages
	page  mappedPage
	usage *Usage

	begun    bool
	frozen   bool // true if newcomers were held when the reading began
	took     time.Duration
	asked    bool
	first    Counters
	lastAsks uint64
	contexts uint64 // living contexts at the last conclusive reading
	taken    taken  // the part of promises that the driver has taken
	each     uint64 // bytes per context by the last reading, for credible; 0: unknown
	// estimated is the time up to which the estimate for a context has risen.
	estimated time.Time
	seen      uint64 // bytes per context by the last quiet reading, for noteBare; 0: unknown
	bare      uint64 // the least that a context was seen to take, in bytes
	worst     uint64 // the most that a context was seen to take, with code, in bytes
}

// Reading is the outcome of one reading.
type Reading struct {
	Counters
	// Used is what counts against the limit, in bytes: the driver's figure plus managed memory.
	// Without a figure, it is bound plus the last correction. What is borrowed from other pages
	// does not count, and what is lent to other pages does.
	Used uint64
	// PeakUsed is the highest use so far, in bytes. It is found by the counters, so it includes
	// what came and went between two readings. It is at most the limit, or Used if that is more. A
	// context counts in it with its estimate (DefaultContext).
	PeakUsed uint64
	// Correction is how much more the container has than is bound, in bytes; negative if it has
	// less.
	Correction int64
	// Quiet is true if nothing was under way, so that the correction is exact.
	Quiet bool
}

// Meter returns a meter for an allocation on a GPU. The pages must exist. The caller closes the
// meter, and the usage page after it.
func (p *Pages) Meter(key string, u gpu.UUID, usage *Usage) (*Meter, error) {
	if !plainName(key) || !plainName(string(u)) {
		return nil, fmt.Errorf("meter allocation %q on GPU %q: %w", key, u, gpu.ErrInvalid)
	}
	if usage == nil {
		return nil, fmt.Errorf("meter allocation %s on %s: no usage page: %w", key, u, gpu.ErrInvalid)
	}
	page, err := mapPage(filepath.Join(p.dir, key, string(u)))
	if err != nil {
		return nil, fmt.Errorf("meter allocation %s on %s: %w", key, u, notFound(err))
	}
	return &Meter{pages: p, page: page, usage: usage, bare: page.bare()}, nil
}

// Close ends the meter. The page keeps its last reading.
func (m *Meter) Close() error {
	if m.page.b == nil {
		return nil
	}
	err := m.page.unmap()
	m.page.b = nil
	return err
}

// Begin begins a reading. Call it before the driver is asked. It returns gpu.ErrInvalid if the
// usage page is not the allocation's.
func (m *Meter) Begin() error {
	m.begun = false
	c, err := m.usage.Read()
	m.took = m.usage.took
	if err != nil {
		return err
	}
	if c.Nonce != m.page.load(atUsage) || !m.page.atPath() {
		return fmt.Errorf("read usage page: it is not, or no longer, the page of the allocation: %w", gpu.ErrInvalid)
	}
	m.first, m.begun, m.frozen = c, true, m.page.load(atControl)&ControlHold != 0
	// Processes that ask wait until a reading is finished.
	m.asked = c.Asks != m.lastAsks
	if m.asked {
		m.pages.mu.Lock()
		m.page.store(atBegun, m.page.load(atBegun)+1)
		m.pages.mu.Unlock()
	}
	return nil
}

// Cost returns the CPU time that the last reading took for the usage page, or the current one so
// far, also if it failed. The processes that write the page decide how much that is.
func (m *Meter) Cost() time.Duration { return m.took }

// End finishes a reading. driver is what the driver reports for the processes that count on the
// page, in bytes; known is false if it reports nothing. each is what each process has, or nil. End
// returns an error if no reading was begun, or if the usage page cannot be read or is invalid.
//
// Let T be the counted memory that the processes really have. It excludes managed memory, which the
// driver's figure lacks, and promises, which it may lack. Suppose that bound and all idle words
// were the same from the beginning of the first look at the page to the end of the second. Then T
// was at most bound, and at least bound less all that was under way. The true correction is the
// figure less T. So the correction in use is moved into that range, and no further.
//
// If nothing was under way, the range is one exact number. Then the page is stamped: no process
// need ask again until something happens that is not known to the byte (Guesses, Settled). If bound
// changed, the figure matches no count, and the stamp stays with the correction. The figure then
// shows only one thing: if it is more than bound ever was, contexts made since take more than their
// estimate.
//
// Of the possible corrections the safe one is used. It may include memory that was lost while the
// driver still had it. So the page also has the least possible correction. A process that would
// have room by that asks for another reading before it refuses.
func (m *Meter) End(driver uint64, known bool, each map[Process]uint64) (Reading, error) {
	if !m.begun {
		return Reading{}, errors.New("end a reading that was not begun")
	}
	m.begun = false
	c, err := m.usage.Read()
	m.took += m.usage.took
	if err != nil {
		return Reading{}, err
	}
	m.pages.mu.Lock()
	defer m.pages.mu.Unlock()

	was := m.page.reading()
	next := was
	if was.nonce != c.Nonce {
		next = reading{nonce: c.Nonce, settled: m.first.Settled}
		m.contexts = 0
		m.taken = nil
		m.bare, m.seen, m.worst = m.page.bare(), 0, 0
	}
	known = known && driver < most && m.first.Nonce == c.Nonce
	// While newcomers are held, processes may be parked: their memory is in bound, and not on the GPU. A
	// ceiling by that figure would be too high when they are back.
	figured := known
	known = known && !m.frozen && m.page.load(atControl)&ControlHold == 0
	if known {
		dying := m.dying(driver, each)
		m.first.lose(dying)
		c.lose(dying)
	}
	// If the second look was steady, so was the first. No attempt may be under way: what it takes
	// beyond bound for a moment would lower the ceiling.
	still := m.first.Word == c.Word && c.Steady && m.first.moves == c.moves &&
		m.first.Attempt == c.Attempt && uint32(c.Attempt) == 0
	r := Reading{Counters: c}
	var context uint64 // bytes that each context takes, by this reading
	next, r.Quiet, context = m.conclude(was, next, c, driver, known, still)
	m.estimate(context, time.Now())
	next.surely = 0
	if r.Quiet {
		next.held = m.held(c, driver, each)
		next.surely = next.held
		m.noteSure()
	}
	r.Correction = next.correction
	figure := uint64(max(0, int64(c.Bound)+next.correction)) // of the processes that count on this page
	if figured {
		figure = driver + c.Managed + m.taken.open(c)
	}
	r.Used = figure + c.Lent - min(figure, c.Borrowed)
	r.PeakUsed = max(r.Used, min(r.Used+max(c.Peak, c.Bound)-c.Bound, m.page.load(atLimit)))
	// Views such as nvidia-smi show the figure itself plus what was counted since. That needs a
	// reading with no large allocation or context under way: the figure may include it or not. A
	// part of Bound may be gone already, with a dead process or after it was exported. Views must
	// not subtract it a second time when a process takes it off Bound.
	switch {
	case known && still && max(underWay(m.first), underWay(c)) <= shownSlack:
		next.shown, next.shownAt = int64(figure+next.held)-int64(c.Bound), c.Settled
		next.dead = c.Dead + min(c.Exported, c.Bound-min(c.Bound, figure))
	case was.nonce != c.Nonce || !known:
		next.shown, next.shownAt, next.dead = next.correction+int64(next.held), next.settled, 0
	}
	if next != was || m.page.load(atCeiling) != m.page.limitLess(next.correction+int64(next.held)) {
		m.page.publish(next)
	}
	if m.asked {
		m.page.store(atDone, m.page.load(atBegun))
		m.page.wake(atDone)
		m.lastAsks = m.first.Asks
	}
	return r, nil
}

// conclude returns the next reading, whether it is exact, and how many bytes each context takes by
// it, or 0.
func (m *Meter) conclude(
	was, next reading, c Counters, driver uint64, known, still bool,
) (_ reading, quiet bool, each uint64) {
	// What was settled since the correction was found belongs to it.
	effective := next.correction + int64(m.first.Settled-next.settled)
	switch {
	case !known:
		if next.correction == 0 && m.first.Nonce == c.Nonce {
			// The ceiling is the limit and comes from no figure. If what was settled were taken off
			// it, that would be for good.
			next.settled = m.first.Settled
		}
	case still && m.first.Dead == c.Dead:
		var low, high int64
		low, high, quiet = m.span(c, int64(driver), effective)
		next.correction = min(max(effective, low), high)
		if next.correction != was.correction || m.first.Settled != was.settled {
			next.stamp = 0
		}
		next.settled = m.first.Settled
		next.least, next.leastOf = roof(was, m.first, c, int64(driver), high)
		m.contexts = c.Contexts
		if quiet {
			next.least = max(next.least, low)
			each = perContext(c, driver, m.taken.open(c))
			m.noteBare(c, each)
			each = m.credible(c, each)
			if m.first.Guesses == c.Guesses {
				next.stamp = c.Guesses + 1
			}
		}
	case c.Contexts > m.contexts:
		// bound was at most its peak when the driver was asked.
		bound := max(m.first.Bound, c.Bound, c.Peak)
		if least := int64(driver) - int64(bound-min(bound, m.first.Managed, c.Managed)); least > effective {
			next.correction, next.settled, next.stamp = least, m.first.Settled, 0
		}
	}
	return next, quiet, each
}

// shownSlack is how many bytes may be under way in a reading that views use. Processes keep less in
// reserve for small allocations; a context takes more.
const shownSlack = 32 << 20

// underWay returns how many bytes are reserved and not committed.
func underWay(c Counters) uint64 { return max(c.Reserved, c.Committed) - c.Committed }

// roof returns the least possible correction, in bytes, and 1 + the Guesses of a and b. It returns
// 0, 0 if these differ: that number changed during the reading. It subtracts all that is reserved,
// since a process may have that for a moment before it is bound.
func roof(was reading, a, b Counters, driver, high int64) (least int64, of uint64) {
	if a.Guesses != b.Guesses {
		return 0, 0
	}
	most := max(a.Reserved+a.Dead, b.Reserved+b.Dead)
	least = driver - int64(most-min(most, a.Managed, b.Managed))
	// Lost memory can only make the true correction larger.
	if was.nonce == b.Nonce && was.leastOf == b.Guesses+1 && was.least <= high {
		least = max(least, was.least)
	}
	return least, b.Guesses + 1
}

// span returns the least and the greatest correction that the figure allows, with promises, and
// whether the reading was quiet, so that both are the same.
func (m *Meter) span(c Counters, driver, effective int64) (low, high int64, quiet bool) {
	low, high = span(m.first, c, driver)
	if low == high && m.first.Committed == c.Committed && m.first.promises == c.promises {
		m.taken = m.taken.next(c, low+int64(m.taken.open(c))-effective)
		low += int64(m.taken.open(c))
		return low, low, true
	}
	return low, high + int64(max(m.taken.open(m.first), m.taken.open(c))), false
}

// span returns the least and the greatest correction that a driver's figure allows. a and b are two
// looks at the page, before and after the figure, with the same word.
func span(a, b Counters, driver int64) (low, high int64) {
	// The memory of a dead process may be gone or not.
	upper := min(a.Bound, a.Reserved+a.Dead, b.Reserved+b.Dead)
	lower := upper - min(upper, underWay(a)+underWay(b)+a.Dead)
	low = driver - int64(upper-min(upper, a.Managed, b.Managed))
	high = driver - int64(lower-min(lower, max(a.Managed, b.Managed)))
	return low, high
}
