// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"maps"
	"slices"
	"time"

	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/internal/workload"
)

// show makes what metrics and the status tell. Totals are those that have been written.
func (m *Meter) show(at time.Time) {
	shown := usage.Shown{Now: m.parts()}
	written := m.waiting == 0 && m.lost == 0
	var ended []usage.Series
	if written {
		// As far as the journal vouches for: a successor that finds nobody ends it there.
		if last := m.book.Last(); last.Before(at) {
			at = last
		}
		shown.Series = m.book.Series(at)
	}
	idle, conditions, news := m.idleGrants(at)
	shown.Idle = idle

	m.mu.Lock()
	if written {
		for _, k := range m.ended {
			m.fading[k] = fades
		}
		m.ended = m.ended[:0]
		open := map[usage.Key]bool{}
		for i := range shown.Series {
			open[shown.Series[i].Key] = true
		}
		maps.DeleteFunc(m.fading, func(k usage.Key, left int) bool { return open[k] || left <= 0 })
		for k := range m.fading {
			if s, known := m.book.Ended(k); known {
				ended = append(ended, s)
			} else {
				delete(m.fading, k) // nobody has asked for an hour
			}
		}
		shown.Series = rise(m.shown.Series, append(shown.Series, ended...))
	} else {
		shown.Series = m.shown.Series
	}
	shown.Written, shown.Lost = m.trouble == status.Cause{}, m.lostEver+uint64(m.lost+m.missed)
	shown.Dropped = m.dropped
	m.shown, m.idle = shown, conditions
	m.mu.Unlock()
	if news {
		m.changed()
	}
}

// rise keeps totals from falling where the clock was put back.
func rise(before, now []usage.Series) []usage.Series {
	old := make(map[usage.Key]*usage.Series, len(before))
	for i := range before {
		old[before[i].Key] = &before[i]
	}
	for i := range now {
		if o := old[now[i].Key]; o != nil {
			now[i].GrantedGPU, now[i].GrantedMiB = max(now[i].GrantedGPU, o.GrantedGPU), max(now[i].GrantedMiB, o.GrantedMiB)
		}
	}
	return now
}

// Scraped is what a scrape shows. The totals of a container that has ended are in two of
// them.
func (m *Meter) Scraped() usage.Shown {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := m.shown
	out.Series = slices.Clone(m.shown.Series)
	m.shown.Series = slices.DeleteFunc(slices.Clone(m.shown.Series), func(s usage.Series) bool {
		left, fading := m.fading[s.Key]
		if fading {
			m.fading[s.Key] = left - 1
		}
		return fading && left <= 1
	})
	maps.DeleteFunc(m.fading, func(_ usage.Key, left int) bool { return left <= 0 })
	return out
}

// Conditions are the facts that the node tells of the account.
func (m *Meter) Conditions() []status.Condition {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := slices.Clone(m.idle)
	if m.trouble != (status.Cause{}) {
		out = append(out, m.trouble.Condition(status.Noted, ""))
	}
	return out
}

// parts is what containers have now.
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
			by[k].Share += h.Share * (1 - h.Gone)
		}
	}
	keys := slices.SortedFunc(maps.Keys(by), usage.Key.Compare)
	out := make([]usage.Part, len(keys))
	for i, k := range keys {
		out[i] = *by[k]
	}
	return out
}

// idleGrants finds what nobody uses. news says that a grant is that now, or is no more.
func (m *Meter) idleGrants(at time.Time) (idle []usage.Idle, conditions []status.Condition, news bool) {
	for _, g := range m.book.Open() {
		since, known := time.Time{}, g.Pod != "" && len(g.Held) > 0
		for i := range g.Held {
			h := &g.Held[i]
			u := m.uses[place{g.Number, h.Index}]
			if g.First(i) != i {
				continue
			}
			if u == nil || h.Share == 0 { // not seen yet, or there is nothing to be used
				known = false
				continue
			}
			unused := time.Duration(0)
			if !u.Idle.IsZero() {
				unused = max(0, at.Sub(u.Idle))
			}
			if g.Pod != "" {
				idle = append(idle, usage.Idle{Key: usage.Key{Namespace: g.Namespace, Pod: g.Pod, Container: g.Container, GPU: h.GPU}, For: unused})
			}
			if known = known && !u.Idle.IsZero(); u.Idle.After(since) {
				since = u.Idle
			}
		}
		long := m.IdleAfter > 0 && known && at.Sub(since) >= m.IdleAfter
		if long {
			c := status.Why(status.GrantIdle, "%s has not used what it holds (%s) since %s", who(&g.Holder), g.Resource, since.Format(time.RFC3339)).Condition(status.Noted, g.Allocation)
			c.Since = since
			conditions = append(conditions, c)
			if !m.told[g.Number] && m.Tell != nil {
				m.Tell(workload.Pod{Namespace: g.Namespace, Name: g.Pod, UID: g.UID}, string(status.GrantIdle),
					"container "+g.Container+" has had no process on its GPU since "+since.Format(time.RFC3339)+" and holds it ("+g.Resource+"); nothing is done about that")
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

// distinct adds up several grants of a container on a GPU: it is as idle as the one that was
// used last.
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
