// SPDX-License-Identifier: Apache-2.0

package lib

// held returns how many bytes the processes with contexts may yet take for code, by a quiet
// reading. A driver loads a kernel's code when it is first run. No call asks for that memory, so
// the library cannot refuse it, and programs that have filled their cap would then exceed it. So
// each context is to have what it takes without code (m.bare) and what code may take (atCode). What
// it does not have of that yet is held back:
//
//	a context of 518 MiB, code of 92 MiB, and the driver's figure beyond what was counted is
//	518 MiB          92 MiB are held back
//	560 MiB          50 MiB
//	610 MiB or more   0
//
// Each process is compared by itself: if one has loaded more than its part, the others may still
// load theirs. If each lacks a process, only the sum of all is compared.
//
// Memory that was exported and freed counts as gone here. If it counted as there, its loss would
// look like code that is not loaded yet, and the room that it left would be held back for good.
func (m *Meter) held(c Counters, driver uint64, each map[Process]uint64) uint64 {
	code := m.page.load(atCode)
	if c.Contexts == 0 {
		return 0
	}
	some := m.usage.users
	for i := range some {
		if _, known := each[some[i].Process]; !known {
			rest := c.rest(m.taken.open(c))
			return m.lacks(c.Contexts, code, driver-min(driver, rest))
		}
	}
	var sum uint64
	for i := range some {
		p := &some[i]
		figure, rest := each[p.Process], p.rest+m.taken.in(p.slot, p.PID)
		sum += m.lacks(p.contexts, code, figure-min(figure, rest))
	}
	return sum
}

// lacks returns how many bytes contexts have less than they may take.
func (m *Meter) lacks(contexts, code, has uint64) uint64 {
	if contexts == 0 {
		return 0
	}
	m.worst = max(m.worst, has/contexts)
	may := contexts * (m.bare + code)
	return may - min(may, has)
}

// noteSure notes in the page whether every context seen so far took at most what contexts are
// charged. If so, a program that has just begun need not wait for a reading before it comes near
// its cap. A short program runs for a tenth of that time, and many like it may follow.
func (m *Meter) noteSure() {
	var sure uint64
	if m.worst != 0 && m.worst <= m.page.load(atContext) {
		sure = 1
	}
	if m.worst != 0 && m.page.load(atSure) != sure {
		m.page.store(atSure, sure)
	}
}

// A user is a process that holds the locks of its slots. reserved is their sum in bytes. rest is
// what the driver's figure for it includes besides its contexts, in bytes, without promises
// and without memory that was exported and freed.
type user struct {
	Process
	slot                     int
	contexts, reserved, rest uint64
}

// addUser adds a slot's numbers to its process. A program that has loaded the library twice has two
// slots.
func (u *Usage) addUser(slot int, p Process, contexts, reserved, rest uint64) {
	for i := range u.users {
		if is := &u.users[i]; is.Process == p {
			is.contexts, is.reserved, is.rest = is.contexts+contexts, is.reserved+reserved, is.rest+rest
			return
		}
	}
	u.users = append(u.users, user{p, slot, contexts, reserved, rest})
}

// dying returns how many bytes the slots of dying processes have, 0 if that is not sure. Such a
// process holds its slot's lock, and the driver no longer lists it: the kernel first closes the
// process's descriptors, and with them goes its memory. On a busy node it releases the locks some
// milliseconds later. A reading between the two would find that a context takes no memory, and show
// others all of it as free until the next reading.
//
// A process without a context need not be listed. Nothing can be told where the driver lists a
// process by another name than its slot, as one in a sandbox with a kernel of its own, or where
// its figure has more than each of those that are named.
func (m *Meter) dying(driver uint64, each map[Process]uint64) uint64 {
	if each == nil {
		return 0
	}
	var listed int
	var has, lost uint64
	for i := range m.usage.users {
		u := &m.usage.users[i]
		bytes, is := each[u.Process]
		switch {
		case is:
			listed++
			has += bytes
		case u.contexts > 0:
			lost += u.reserved
		}
	}
	if listed < len(each) || has != driver {
		return 0
	}
	return lost
}

// lose counts so many bytes of living processes as a dead one's.
func (c *Counters) lose(bytes uint64) {
	bytes = min(bytes, c.Reserved)
	c.Reserved -= bytes
	c.Dead += bytes
}
