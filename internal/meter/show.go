// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"maps"
	"slices"
	"sync"
	"time"

	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/internal/workload"
)

// show prepares what metrics and the status show. Totals are those that have been written.
func (m *Meter) show(at time.Time) {
	shown := usage.Shown{Now: m.parts()}
	written := m.outbox.waiting == 0 && m.outbox.lost == 0
	if written {
		// Show totals up to the last record. If the ledger has no such allocation after a restart,
		// the next process ends the grant at that time.
		if last := m.book.Last(); last.Before(at) {
			at = last
		}
		shown.Series = m.book.Series(at)
	}
	idle, conditions, news := m.idleGrants(at)
	shown.Idle = idle

	lost := uint64(m.outbox.lost + m.outbox.missed)
	if written {
		m.board.put(shown, conditions, lost, m.ended, m.book.Ended)
		m.ended = m.ended[:0]
	} else {
		m.board.keep(shown, conditions, lost)
	}
	if news {
		m.changed()
	}
}

// board is what metrics and the status show.
type board struct {
	mu sync.Mutex
	// Guarded by mu:
	shown    usage.Shown
	fading   map[usage.Key]int // scrapes left for each ended container
	idle     []status.Condition
	cause    status.Cause // why the journal cannot be written; zero if it can
	lostEver uint64
	dropped  usage.DroppedRecords
}

// put shows written totals. ended are the containers that have ended since the last put. totals
// returns the totals of an ended container; the book keeps them for about an hour.
func (b *board) put(
	shown usage.Shown, idle []status.Condition, lost uint64,
	ended []usage.Key, totals func(usage.Key) (usage.Series, bool),
) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, k := range ended {
		b.fading[k] = fades
	}
	open := map[usage.Key]bool{}
	for i := range shown.Series {
		open[shown.Series[i].Key] = true
	}
	maps.DeleteFunc(b.fading, func(k usage.Key, left int) bool { return open[k] || left <= 0 })
	shown.Series = slices.Grow(shown.Series, len(b.fading))
	for k := range b.fading {
		if s, known := totals(k); known {
			shown.Series = append(shown.Series, s)
		} else {
			delete(b.fading, k) // too old: not scraped for an hour
		}
	}
	shown.Series = rise(b.shown.Series, shown.Series)
	b.putLocked(shown, idle, lost)
}

// keep goes on showing the last written totals, since the present ones have not been written.
func (b *board) keep(shown usage.Shown, idle []status.Condition, lost uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	shown.Series = b.shown.Series
	b.putLocked(shown, idle, lost)
}

func (b *board) putLocked(shown usage.Shown, idle []status.Condition, lost uint64) {
	shown.Written, shown.Lost = b.cause == status.Cause{}, b.lostEver+lost
	shown.Dropped = b.dropped
	b.shown, b.idle = shown, idle
}

func (b *board) lose(n uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lostEver += n
}

// drop counts records that the journal had no room to keep.
func (b *board) drop(r *usage.Record) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if r.Of == usage.Refused {
		b.dropped.Refused += uint64(r.Count)
	} else {
		b.dropped.Use += uint64(r.Count)
	}
}

// trouble sets why the journal cannot be written; zero if it can. It reports whether that has begun
// or ended.
func (b *board) trouble(why status.Cause) (news bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	none := status.Cause{}
	news = (b.cause != none) != (why != none)
	b.cause = why
	return news
}

// scraped returns what a scrape shows, and counts the scrape.
func (b *board) scraped() usage.Shown {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := b.shown
	out.Series = slices.Clone(b.shown.Series)
	b.shown.Series = slices.DeleteFunc(slices.Clone(b.shown.Series), func(s usage.Series) bool {
		left, fading := b.fading[s.Key]
		if fading {
			b.fading[s.Key] = left - 1
		}
		return fading && left <= 1
	})
	maps.DeleteFunc(b.fading, func(_ usage.Key, left int) bool { return left <= 0 })
	return out
}

func (b *board) conditions() []status.Condition {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := slices.Clone(b.idle)
	if b.cause != (status.Cause{}) {
		out = append(out, b.cause.Condition(status.Noted, ""))
	}
	return out
}

// rise keeps totals from falling after the clock was set back.
func rise(before, now []usage.Series) []usage.Series {
	old := make(map[usage.Key]*usage.Series, len(before))
	for i := range before {
		old[before[i].Key] = &before[i]
	}
	for i := range now {
		if o := old[now[i].Key]; o != nil {
			now[i].GrantedGPU = max(now[i].GrantedGPU, o.GrantedGPU)
			now[i].GrantedMiB = max(now[i].GrantedMiB, o.GrantedMiB)
			now[i].LentGPU = max(now[i].LentGPU, o.LentGPU)
			now[i].LentMiB = max(now[i].LentMiB, o.LentMiB)
		}
	}
	return now
}

// Scraped returns what a scrape shows. The totals of an ended container are in two scrapes.
func (m *Meter) Scraped() usage.Shown { return m.board.scraped() }

// Conditions returns the conditions of the account.
func (m *Meter) Conditions() []status.Condition { return m.board.conditions() }

// parts returns the present shares of containers.
func (m *Meter) parts() []usage.Part {
	by := map[usage.Key]*usage.Part{}
	for _, g := range m.book.Open() {
		if g.Pod == "" {
			continue
		}
		for i := range g.Held {
			h := &g.Held[i]
			k := usage.Key{Namespace: g.Namespace, Pod: g.Pod, Container: g.Container, GPU: h.GPU}
			if by[k] == nil {
				by[k] = &usage.Part{Key: k, Index: h.Index}
			}
			by[k].Share += h.Share * h.Part()
		}
	}
	keys := slices.SortedFunc(maps.Keys(by), usage.Key.Compare)
	out := make([]usage.Part, len(keys))
	for i, k := range keys {
		out[i] = *by[k]
	}
	return out
}

// idleGrants finds the idle grants. news is true if a grant has become idle or has stopped being
// idle.
func (m *Meter) idleGrants(at time.Time) (idle []usage.Idle, conditions []status.Condition, news bool) {
	for _, g := range m.book.Open() {
		since, known := time.Time{}, g.Pod != "" && len(g.Held) > 0
		for i := range g.Held {
			h := &g.Held[i]
			u := m.uses[place{g.Number, h.Index}]
			if g.First(i) != i {
				continue
			}
			if u == nil || h.Share == 0 { // not measured yet, or no share to use
				known = false
				continue
			}
			unused := time.Duration(0)
			if !u.Idle.IsZero() {
				unused = max(0, at.Sub(u.Idle))
			}
			if g.Pod != "" {
				key := usage.Key{Namespace: g.Namespace, Pod: g.Pod, Container: g.Container, GPU: h.GPU}
				idle = append(idle, usage.Idle{Key: key, For: unused})
			}
			if known = known && !u.Idle.IsZero(); u.Idle.After(since) {
				since = u.Idle
			}
		}
		long := m.opts.IdleAfter > 0 && known && at.Sub(since) >= m.opts.IdleAfter
		if long {
			from := since.Format(time.RFC3339)
			why := status.Why(status.GrantIdle, "%s has not used what it holds (%s) since %s",
				who(&g.Holder), g.Resource, from)
			c := why.Condition(status.Noted, g.Allocation)
			c.Since = since
			conditions = append(conditions, c)
			if !m.told[g.Number] && m.opts.Tell != nil {
				m.opts.Tell(workload.Pod{Namespace: g.Namespace, Name: g.Pod, UID: g.UID}, string(status.GrantIdle),
					"container "+g.Container+" has had no process on its GPU since "+from+
						" and holds it ("+g.Resource+"); the agent takes nothing away")
			}
		}
		if long != m.told[g.Number] {
			news = true
			if long {
				m.told[g.Number] = true
			} else {
				delete(m.told, g.Number)
			}
		}
	}
	return distinct(idle), conditions, news
}

// distinct joins the grants of one container on one GPU. The container is as idle as the grant that
// was used last.
func distinct(all []usage.Idle) []usage.Idle {
	by := map[usage.Key]time.Duration{}
	for _, i := range all {
		if before, ok := by[i.Key]; !ok || i.For < before {
			by[i.Key] = i.For
		}
	}
	var out []usage.Idle
	for _, k := range slices.SortedFunc(maps.Keys(by), usage.Key.Compare) {
		out = append(out, usage.Idle{Key: k, For: by[k]})
	}
	return out
}
