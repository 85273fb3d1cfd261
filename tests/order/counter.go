// SPDX-License-Identifier: Apache-2.0

package order

import "fmt"

// model makes the programs of the counter. orders are those of the tokens, the places in the
// source that state one; see source.go.
type model struct {
	orders map[string]order
	used   map[string]bool
}

func (m *model) of(token string) order {
	o, ok := m.orders[token]
	if !ok {
		panic("no token " + token)
	}
	m.used[token] = true
	return o
}

func (m *model) load(token, at, into string) access {
	return access{kind: load, at: at, into: into, order: m.of(token)}
}

func (m *model) store(token, at string, v int) access {
	return access{kind: store, at: at, order: m.of(token), value: func(*registers) int { return v }}
}

// add adds n to a word, and notes in into what it was before.
func (m *model) add(token, at, into string, n int) access {
	return access{kind: update, at: at, into: into, order: m.of(token), value: func(r *registers) int { return r.of(into) + n }}
}

// swap is a compare-exchange: it writes where the word still is what is in the register was,
// and ok is true.
func (m *model) swap(token, at, into, was string, to func(r *registers) int, ok func(r *registers) bool) access {
	return access{kind: update, at: at, into: into, order: m.of(token), value: to, when: func(r *registers) bool {
		return r.of(into) == r.of(was) && (ok == nil || ok(r))
	}}
}

// driver is a call of the driver that gives or takes back. It has a lock of its own.
func driver(n int, into string, when func(r *registers) bool) access {
	return access{kind: update, at: "driver", into: into, order: order{acquire: true, release: true}, when: when,
		value: func(r *registers) int { return r.of(into) + n }}
}

// bound is a word with a version: what is bound is in its last digit.
const step = 8

func amount(v int) int { return v % step }

func (m *model) bind(into string, n int) access { return m.add("count_add", "bound", into, step+n) }

// Two steps each of an allocation and a free; see count.h. An allocation changes bound when it has
// looked at it, as often as need be.
func (m *model) allocate(s string) []access {
	return []access{m.add("count_add", "reserved", "r"+s, 1), m.add("try_below", "bound", "b"+s, step+1), driver(1, "d"+s, nil), m.add("count_add", "committed", "c"+s, 1)}
}

// below adds to a word that was read into b, where that fits, and then the driver gives.
func (m *model) below(word string, fits func(r *registers) bool) []access {
	return []access{
		m.swap("try_below", word, "was", "b", func(r *registers) int { return r.of("b") + step + 1 }, fits),
		driver(1, "d", func(r *registers) bool { return fits(r) && r.of("was") == r.of("b") }),
	}
}

func (m *model) free(s string) []access {
	return []access{m.add("count_add", "committed", "c"+s, -1), driver(-1, "d"+s, nil), m.bind("b"+s, -1), m.add("count_add", "reserved", "r"+s, -1)}
}

// repair makes bound what is reserved in a slot, and more where another slot has it.
func (m *model) repair(more int, slots ...string) thread {
	t := thread{name: "repairer", accesses: []access{m.load("count_read", "bound", "b"), m.load("high", "high", "high")}}
	for _, s := range slots {
		t.accesses = append(t.accesses, m.load("count_read", "idle"+s, "before"+s), m.load("slot_reserved", "reserved"+s, "r"+s), m.load("count_read", "idle"+s, "after"+s))
	}
	all := func(r *registers) int {
		n := more
		for _, s := range slots {
			if r.of("high") != 0 {
				n += r.of("r"+s) + amount(r.of("after"+s))
			}
		}
		return n
	}
	t.accesses = append(t.accesses, m.swap("repair", "bound", "was", "b",
		func(r *registers) int { return r.of("b") - amount(r.of("b")) + step + all(r) },
		func(r *registers) bool {
			for _, s := range slots {
				if r.of("before"+s) != r.of("after"+s) {
					return false // it reads again, which is a later repair
				}
			}
			return amount(r.of("b")) > all(r)
		}))
	return t
}

// covered says whether bound covers what the driver gave to living processes, and the rest of
// the order that each step keeps.
func covered(word func(string) int) bool {
	return word("committed") <= word("driver") && word("driver") <= word("reserved") && word("driver") <= amount(word("bound"))
}

func enough(word func(string) int) bool { return word("driver") <= amount(word("bound")) }

// keep frees as idle, and reserve_idle takes it again.
func (m *model) keep(s string) []access {
	return []access{m.add("count_add", "idle", "i"+s, step+1), m.add("count_add", "reserved", "r"+s, -1)}
}

func (m *model) reuse(s string) []access {
	took := func(r *registers) bool { return r.of("was"+s) == r.of("w"+s) && amount(r.of("w"+s)) == 1 }
	return []access{
		m.load("reserve_idle look", "idle", "w"+s),
		m.add("count_add", "reserved", "q"+s, 1),
		m.swap("reserve_idle", "idle", "was"+s, "w"+s, func(r *registers) int { return r.of("w"+s) + step - 1 }, func(r *registers) bool { return amount(r.of("w"+s)) == 1 }),
		driver(1, "e"+s, took),
	}
}

// reclaimer takes what is idle, and then repairs. It has seen the word at first, or when it
// failed to change it.
func (m *model) reclaimer(saw string) thread {
	t := m.repair(0, "")
	t.name = "reclaimer"
	t.accesses = append([]access{
		m.load(saw, "idle", "idle"),
		m.swap("empty_idle", "idle", "emptied", "idle", func(r *registers) int { return r.of("idle") - amount(r.of("idle")) + step }, func(r *registers) bool { return amount(r.of("idle")) != 0 }),
	}, t.accesses...)
	return t
}

// A limit page's nonce is ours, another page's, or says that it is being written.
const ours, theirs, written = 1, 2, 9

// ceiling is account_ceiling_with.
func (m *model) ceiling() []access {
	return []access{
		m.load("ceiling nonce", "nonce", "nonce"), m.load("ceiling limit first", "limit", "limit first"),
		m.load("ceiling", "ceiling", "ceiling"), m.load("ceiling lost", "settled", "settled"), m.load("ceiling settled", "page settled", "page settled"),
		m.load("ceiling again", "ceiling", "again"), m.load("ceiling now", "nonce", "now"), m.load("ceiling limit", "limit", "limit"),
	}
}

func ceilingBy(of func(string) int) int {
	told := func(n int) bool { return n == ours || n == written }
	if !told(of("nonce")) {
		return of("limit first")
	}
	c, lost := min(of("ceiling"), of("again")), of("settled")-of("page settled")
	if lost < 0 || lost > c {
		lost = c // as unsigned numbers
	}
	c -= lost
	if of("nonce") == ours && of("now") == ours {
		return c
	}
	if told(of("now")) && c < of("limit") {
		return c
	}
	return of("limit")
}

// publish is mappedPage.publish. Its other words are for views.
func (m *model) publish(ceiling, settled, nonce int) []access {
	return []access{m.store("page store", "nonce", written), m.store("page store", "ceiling", ceiling), m.store("page store", "page settled", settled), m.store("page store", "nonce", nonce)}
}

// lose is account_lost.
func (m *model) lose() []access {
	return []access{m.add("count_add", "committed", "c", -1), m.add("count_add", "settled", "s", 1), m.bind("b", -1), m.add("count_add", "reserved", "r", -1)}
}

func (m *model) programs() []program {
	with := func(name string, a ...[]access) thread {
		t := thread{name: name}
		for _, some := range a {
			t.accesses = append(t.accesses, some...)
		}
		return t
	}
	one := map[string]int{"bound": 1, "reserved": 1, "committed": 1, "driver": 1, "high": 1}
	all := []program{
		{name: "an allocation and its free, beside a repair", first: map[string]int{"bound": 1, "high": 1},
			threads: []thread{with("owner", m.allocate("1"), m.free("2")), m.repair(0, "")}, always: covered},
		{name: "a free and an allocation, beside a repair", first: one,
			threads: []thread{with("owner", m.free("1"), m.allocate("2")), m.repair(0, "")}, always: covered},
		{name: "idle memory is kept and used again, beside a repair", first: map[string]int{"bound": 2, "reserved": 1, "high": 1},
			threads: []thread{with("owner", m.keep("1"), m.reuse("2")), m.repair(0, "")}, always: enough},
		{name: "idle memory is used by its owner or taken by who lacks room", first: map[string]int{"bound": 1, "idle": 1, "high": 1},
			threads: []thread{with("owner", m.reuse("1")), m.reclaimer("count_read")}, always: enough},
		{name: "the same, at the second try", first: map[string]int{"bound": 1, "idle": 1, "high": 1},
			threads: []thread{with("owner", m.reuse("1")), m.reclaimer("empty_idle")}, always: enough},
		{name: "idle memory is kept, and at once taken by who lacks room", first: map[string]int{"bound": 2, "reserved": 2, "driver": 1, "high": 1},
			threads: []thread{with("owner", m.keep("1")), m.reclaimer("count_read")}, always: enough},
		{name: "an allocation that is checked first, beside a repair", first: map[string]int{"bound": 1, "high": 1},
			threads: []thread{with("owner", []access{m.add("count_add", "reserved", "r", 1), m.load("count_read", "bound", "b")},
				m.below("bound", func(*registers) bool { return true })), m.repair(0, "")}, always: enough},
		{name: "a new process, beside a repair", first: map[string]int{"bound": 1},
			threads: []thread{with("newcomer", []access{
				m.load("take_slot look", "high", "old"), m.swap("take_slot", "high", "was", "old", func(*registers) int { return 1 }, nil),
			}, m.allocate("1")), m.repair(0, "")}, always: enough},
		m.roomByLoss("count_read"), m.roomByLoss("try_below"),
		{name: "a reading counts what is settled already", first: map[string]int{"nonce": ours, "ceiling": 2, "settled": 1, "limit": 2},
			threads: []thread{with("agent", m.publish(1, 1, ours)), with("reader", m.ceiling())},
			never:   func(_, reg func(string) int) bool { return ceilingBy(prefixed("reader", reg)) > 1 }},
		{name: "a reading of another usage page", first: map[string]int{"nonce": ours, "ceiling": 2, "limit": 2},
			threads: []thread{with("agent", m.publish(5, 0, theirs)), with("reader", m.ceiling())},
			never:   func(_, reg func(string) int) bool { return ceilingBy(prefixed("reader", reg)) > 2 }},
		{name: "a lower limit, and readings end", first: map[string]int{"nonce": ours, "ceiling": 3, "limit": 3},
			threads: []thread{with("agent", []access{m.store("page store", "limit", 1)}, m.publish(1, 0, 0)), with("reader", m.ceiling())},
			never: func(_, reg func(string) int) bool {
				of := prefixed("reader", reg)
				return of("nonce") == 0 && ceilingBy(of) > 1
			}},
		{name: "who has heard of a reading goes by it", first: map[string]int{"nonce": ours, "ceiling": 3, "limit": 3},
			threads: []thread{with("agent", m.publish(1, 0, ours), []access{m.store("page store", "done", 1)}), with("asker", []access{m.load("count_read", "done", "done")}, m.ceiling())},
			never: func(_, reg func(string) int) bool {
				of := prefixed("asker", reg)
				return of("done") == 1 && ceilingBy(of) > 1
			}},
		{name: "a reading with a higher number has seen what was before the ask", first: map[string]int{"driver": 1},
			threads: []thread{
				with("agent", []access{m.store("page store", "begun", 1), {kind: fence}, {kind: load, at: "driver", into: "figure"}, m.store("page store", "done", 1)}),
				with("asker", []access{driver(-1, "d", nil), m.load("count_read", "begun", "after"), m.add("count_add", "asks", "asks", 1), m.load("count_read", "done", "done")}),
			},
			never: func(_, reg func(string) int) bool {
				return reg("asker.done") >= reg("asker.after")+1 && reg("agent.figure") != 0
			}},
		{name: "what is settled is committed no more", first: one,
			threads: []thread{with("owner", m.lose()), with("agent", []access{{kind: load, at: "settled", into: "settled"}, {kind: fence}, {kind: load, at: "committed", into: "committed"}})},
			never:   func(_, reg func(string) int) bool { return reg("agent.settled")+reg("agent.committed") > 1 }},
		m.repaid(), m.attempts(), m.closed(), m.alone(),
	}
	for killed := 0; killed <= 4; killed++ {
		all = append(all, m.reaped(fmt.Sprintf("a process killed after %d steps of an allocation", killed), 0, m.allocate("1")[:killed]))
		all = append(all, m.reaped(fmt.Sprintf("a process killed after %d steps of a free", killed), 1, m.free("1")[:killed]))
	}
	return all
}

func prefixed(thread string, register func(string) int) func(string) int {
	return func(name string) int { return register(thread + "." + name) }
}

// roomByLoss: the container is full, and a process finds that some of it is gone. Until the
// next reading that is no room for anybody who looks at bound, in the place saw.
func (m *model) roomByLoss(saw string) program {
	p := program{name: "lost memory is no room, seen by " + saw, first: map[string]int{"bound": 1, "reserved": 1, "committed": 1, "nonce": ours, "ceiling": 1, "limit": 1}}
	fits := func(r *registers) bool { return amount(r.of("b"))+1 <= ceilingBy(r.of) }
	other := thread{name: "other"}
	other.accesses = append([]access{m.load(saw, "bound", "b")}, m.ceiling()...)
	other.accesses = append(other.accesses, m.below("bound", fits)...)
	p.threads = []thread{{name: "loser", accesses: m.lose()}, other}
	p.always = func(word func(string) int) bool { return word("driver") == 0 }
	return p
}

// repaid: what is given back to a lender is no room at home, and the lender may have it again
// only when it is not used at home any more.
func (m *model) repaid() program {
	home := thread{name: "borrower", accesses: []access{
		driver(-1, "d", nil),
		m.load("count_read", "borrowed", "w"),
		m.swap("take_off", "borrowed", "was", "w", func(r *registers) int { return r.of("w") - 1 }, nil),
		m.bind("b", -1), m.add("count_add", "reserved", "r", -1),
		m.add("count_add", "lent committed", "lc", -1), m.add("count_add", "lent bound", "lb", step-1),
	}}
	other := thread{name: "other", accesses: append([]access{
		m.load("count_read", "bound", "b"), m.load("borrows", "borrows", "borrows"), m.load("borrowed_for", "borrowed", "borrowed"),
	}, m.below("bound", func(r *registers) bool { return amount(r.of("b"))+1 <= 1+r.of("borrows")*r.of("borrowed") })...)}
	lender := thread{name: "lender", accesses: append([]access{m.load("count_read", "lent bound", "b")},
		m.below("lent bound", func(r *registers) bool { return amount(r.of("b"))+1 <= 1 })...)}
	return program{name: "what was borrowed is given back", first: map[string]int{"bound": 2, "reserved": 2, "borrowed": 1, "borrows": 1, "lent bound": 1, "lent committed": 1, "driver": 2},
		threads: []thread{home, other, lender}, always: func(word func(string) int) bool { return word("driver") <= 2 }}
}

// attempts: one at a time is made, so the driver has given at most one request too much.
func (m *model) attempts() program {
	p := program{name: "two attempts", always: func(word func(string) int) bool { return word("driver") <= 1 }}
	for i, name := range []string{"one", "two"} {
		got := func(r *registers) bool { return r.of("was") == 0 && r.of("turn") == 0 }
		p.threads = append(p.threads, thread{name: name, accesses: []access{
			m.load("count_read", "attempt", "turn"),
			m.swap("attempt_begin", "attempt", "was", "turn", func(*registers) int { return i + 1 }, func(r *registers) bool { return r.of("turn") == 0 }),
			{kind: update, at: "driver", into: "more", when: got, value: func(r *registers) int { return r.of("more") + 1 }},
			{kind: update, at: "driver", into: "less", when: got, value: func(r *registers) int { return r.of("less") - 1 }},
			m.load("count_read", "attempt", "mine"),
			m.swap("attempt_end", "attempt", "over", "mine", func(*registers) int { return 0 }, func(r *registers) bool { return r.of("mine") == i+1 }),
		}})
	}
	return p
}

func (m *model) closes() access {
	return access{kind: update, at: "closed", into: "was", order: m.of("gate_close"), value: func(*registers) int { return 1 }}
}

// closed: of a thread that enters a gate and one that closes it, one sees the other.
func (m *model) closed() program {
	return program{name: "a gate is entered and closed", threads: []thread{
		{name: "enters", accesses: []access{m.add("count_add", "flight", "was", 1), m.load("gate_enter", "closed", "closed")}},
		{name: "closes", accesses: []access{m.closes(), m.load("count_read", "flight", "flight")}},
	}, never: func(_, reg func(string) int) bool { return reg("enters.closed") == 0 && reg("closes.flight") == 0 }}
}

// alone: of two threads that close a gate, the second finds what the first has changed.
func (m *model) alone() program {
	p := program{name: "two close a gate", never: func(word, reg func(string) int) bool {
		return reg("one.was") == 0 && reg("two.was") == 0 && word("charge") != 2
	}}
	got := func(r *registers) bool { return r.of("was") == 0 }
	open := m.store("gate_open", "closed", 0)
	open.when = got
	for _, name := range []string{"one", "two"} {
		p.threads = append(p.threads, thread{name: name, accesses: []access{
			m.closes(), {kind: load, at: "charge", into: "charge"},
			{kind: store, at: "charge", when: got, value: func(r *registers) int { return r.of("charge") + 1 }}, open,
		}})
	}
	return p
}

// reaped: a process dies after some steps, and another reaps it, which may itself be killed
// after each of its own; a third has what it has, and a fourth repairs.
func (m *model) reaped(name string, had int, steps []access) program {
	dead := thread{name: "dead"}
	for _, a := range steps {
		if a.at == "driver" {
			continue // the driver has that back
		}
		if a.at == "reserved" || a.at == "committed" {
			a.at += " dead"
		}
		dead.accesses = append(dead.accesses, a)
	}
	lock := access{kind: fence, after: "dead"} // the kernel's
	reaper := thread{name: "reaper", accesses: []access{
		lock,
		{kind: update, at: "committed dead", into: "c", order: m.of("clear committed"), value: func(*registers) int { return 0 }},
		{kind: update, at: "settled", into: "s", order: m.of("count_add"), value: func(r *registers) int { return r.of("s") + r.of("c") }},
		{kind: update, at: "bound", into: "b", order: m.of("count_add"), value: func(r *registers) int { return r.of("b") + step - r.of("c") },
			when: func(r *registers) bool { return r.of("c") != 0 }},
		m.store("clear reserved", "reserved dead", 0),
	}}
	p := program{name: name, first: map[string]int{"bound": 1 + had, "reserved dead": had, "committed dead": had, "driver": 1, "high": 1},
		threads: []thread{dead, reaper, m.repair(1, " dead"), {name: "living", accesses: []access{{kind: load, at: "driver", into: "d"}}}}, always: enough}
	return p
}
