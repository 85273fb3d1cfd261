// SPDX-License-Identifier: Apache-2.0

package order

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// order is what an access orders. Arm's instructions have these halves: LDAR and LDAXR
// acquire, STLR and STLXR release. An LDAPR acquires, but may run before an STLR that the
// program has before it; an LDAR may not.
type order struct {
	acquire bool // what follows waits for the read
	release bool // the write waits for what precedes
	total   bool // an acquiring read waits for the releasing writes before it
}

type kind int

const (
	load kind = iota
	store
	update // LDXR and STXR
	fence  // DMB ISH, or a system call that takes a lock
)

// access is one access of a thread to one word.
type access struct {
	kind
	at    string
	order order
	into  string // the register that gets what is read
	// value is what is written, from what was read before. A register that has no value
	// yet makes the access wait: that is its data dependency.
	value func(r *registers) int
	// when says whether it is written at all, nil: always. That is its control dependency;
	// reads do not wait for it, since processors speculate.
	when func(r *registers) bool
	// after names a thread that has ended before: a kernel lock that ends with its owner.
	after string
}

type thread struct {
	name     string
	accesses []access
}

// program is threads that run on words that begin with values, or with 0.
type program struct {
	name    string
	first   map[string]int
	threads []thread
	// always says what is true of the words at every moment, and never what is not in the end.
	always func(word func(string) int) bool
	never  func(word, register func(string) int) bool
}

// machine is Armv8's memory as its architecture permits it to behave: one memory for all,
// since stores become visible to all others at once, and threads that do their accesses in
// any order that nothing forbids. What forbids is in mayRead and mayWrite.
type machine struct {
	p         program
	words     []string
	registers []string
	threads   []compiled
	seen      map[string]bool
	found     []string // how the first bad state came about
	ended     bool     // some execution has come to its end
}

type compiled struct {
	name     string
	accesses []access
	at, into []int // indices, -1: none
}

// state is one state of a machine. Everything is small.
type state struct {
	value, version []int8 // of each word; its version counts its writes
	register       []int8
	known          []bool
	// of each access, in the order of threads: what is done, and the version that was read.
	read, written []bool
	saw           []int8
	// bad: there was a moment that must not be. It counts only if the execution comes to its
	// end: in one that does not, a store was visible that depends on an STXR that fails.
	bad bool
}

// registers are what a thread knows when it computes a value.
type registers struct {
	m       *machine
	s       *state
	thread  int
	missing bool
}

// of returns a register of the thread.
func (r *registers) of(name string) int {
	i := slices.Index(r.m.registers, r.m.threads[r.thread].name+"."+name)
	if i < 0 {
		panic("no access of " + r.m.threads[r.thread].name + " sets " + name)
	}
	if !r.s.known[i] {
		r.missing = true
	}
	return int(r.s.register[i])
}

func index(list *[]string, name string) int {
	i := slices.Index(*list, name)
	if i < 0 {
		*list = append(*list, name)
		i = len(*list) - 1
	}
	return i
}

func newMachine(p program) *machine {
	m := &machine{p: p, seen: map[string]bool{}}
	for _, t := range p.threads {
		c := compiled{name: t.name, accesses: t.accesses}
		for _, a := range t.accesses {
			at, into := -1, -1
			if a.kind != fence {
				at = index(&m.words, a.at)
			}
			if a.into != "" {
				into = index(&m.registers, t.name+"."+a.into)
			}
			c.at, c.into = append(c.at, at), append(c.into, into)
		}
		m.threads = append(m.threads, c)
	}
	for _, w := range slices.Sorted(maps.Keys(p.first)) {
		index(&m.words, w)
	}
	return m
}

// explore returns how a state comes about that must not be, or nil if none does. It panics
// where no execution comes to its end, since that would prove anything.
func (p program) explore() []string {
	m := newMachine(p)
	n := 0
	for _, t := range m.threads {
		n += len(t.accesses)
	}
	s := &state{value: make([]int8, len(m.words)), version: make([]int8, len(m.words)), register: make([]int8, len(m.registers)), known: make([]bool, len(m.registers)),
		read: make([]bool, n), written: make([]bool, n), saw: make([]int8, n)}
	for w, v := range p.first {
		s.value[slices.Index(m.words, w)] = int8(v)
	}
	m.walk(s, nil)
	if !m.ended && m.found == nil {
		panic(p.name + " never ends")
	}
	return m.found
}

func (s *state) key() string {
	var b []byte
	for _, l := range [][]int8{s.value, s.version, s.register, s.saw} {
		for _, v := range l {
			b = append(b, byte(v))
		}
	}
	for _, l := range [][]bool{s.known, s.read, s.written, {s.bad}} {
		var bits uint64
		for i, v := range l {
			if v {
				bits |= 1 << i
			}
		}
		b = binary.LittleEndian.AppendUint64(b, bits)
	}
	return string(b)
}

func (s *state) clone() *state {
	return &state{slices.Clone(s.value), slices.Clone(s.version), slices.Clone(s.register), slices.Clone(s.known), slices.Clone(s.read), slices.Clone(s.written), slices.Clone(s.saw), s.bad}
}

// look says whether a state is bad; over: it is the last one.
func (m *machine) look(s *state, over bool) bool {
	word := func(name string) int {
		if i := slices.Index(m.words, name); i >= 0 {
			return int(s.value[i])
		}
		return 0 // its value before the first write
	}
	return m.p.always != nil && !m.p.always(word) || over && m.p.never != nil && m.p.never(word, func(name string) int {
		return int(s.register[slices.Index(m.registers, name)])
	})
}

func (m *machine) walk(s *state, path []string) {
	over := !slices.Contains(s.written, false)
	s.bad = s.bad || m.look(s, over)
	key := s.key()
	if m.found != nil || m.seen[key] {
		return
	}
	m.seen[key] = true
	m.ended = m.ended || over
	if over {
		if s.bad {
			m.found = append(slices.Clone(path), "in the end: "+m.text(s))
		}
		return
	}
	base := 0
	for t := range m.threads {
		for i := range m.threads[t].accesses {
			if next, what := m.step(s, t, i, base); next != nil {
				m.walk(next, append(path, what))
			}
		}
		base += len(m.threads[t].accesses)
	}
}

func (m *machine) text(s *state) string {
	var words []string
	for i, w := range m.words {
		words = append(words, fmt.Sprintf("%s=%d", w, s.value[i]))
	}
	return strings.Join(words, " ")
}

// step does the next part of an access, if it may: the read of a load or an update, or the
// write of a store or an update. nil: it may not, or not yet, or what comes of it is no
// execution.
func (m *machine) step(s *state, t, i, base int) (*state, string) {
	c := &m.threads[t]
	a, at := &c.accesses[i], base+i
	if s.written[at] {
		return nil, ""
	}
	reads := a.kind == load || a.kind == update
	if reads && !s.read[at] {
		return m.read(s, t, i, base)
	}
	r := &registers{m: m, s: s, thread: t}
	skips := a.when != nil && !a.when(r)
	if r.missing || !m.mayWrite(s, c, i, base, skips) {
		return nil, ""
	}
	if a.kind == fence {
		n := s.clone()
		n.read[at], n.written[at] = true, true
		return n, c.name + " passes a barrier"
	}
	if skips {
		n := s.clone()
		n.read[at], n.written[at] = true, true
		return n, fmt.Sprintf("%s does not write %s", c.name, a.at)
	}
	v := a.value(r)
	if r.missing {
		return nil, ""
	}
	w := c.at[i]
	if a.kind == update && s.version[w] != s.saw[at] {
		return nil, "" // the STXR fails; the loop around it is a later LDXR
	}
	n := s.clone()
	n.value[w] = int8(v)
	n.version[w]++
	n.read[at], n.written[at] = true, true
	return n, fmt.Sprintf("%s writes %s = %d", c.name, a.at, v)
}

func (m *machine) read(s *state, t, i, base int) (*state, string) {
	c := &m.threads[t]
	a, at, w := &c.accesses[i], base+i, c.at[i]
	if !mayRead(s, c, i, base) {
		return nil, ""
	}
	value, version := s.value[w], s.version[w]
	from := "memory"
	// A load takes what its own thread is about to store in that word. An LDXR waits.
	for j := i - 1; j >= 0; j-- {
		e := &c.accesses[j]
		if c.at[j] != w || e.kind == load || e.kind == fence || s.written[base+j] {
			continue
		}
		if a.kind != load || e.kind != store {
			return nil, ""
		}
		r := &registers{m: m, s: s, thread: t}
		skips := e.when != nil && !e.when(r)
		v := e.value(r)
		if r.missing {
			return nil, ""
		}
		if !skips {
			value, version, from = int8(v), -1-int8(j), "its own store"
			break
		}
	}
	// Of two reads of a word the later one does not see an older write than the earlier one.
	for k := i + 1; k < len(c.accesses); k++ {
		e := &c.accesses[k]
		if c.at[k] != w || e.kind == store || e.kind == fence || !s.read[base+k] {
			continue
		}
		if saw := s.saw[base+k]; saw != version && !(saw < 0 && int(-1-saw) > i) {
			return nil, ""
		}
	}
	n := s.clone()
	n.read[at], n.saw[at] = true, version
	if a.kind == load {
		n.written[at] = true
	}
	if c.into[i] >= 0 {
		n.register[c.into[i]], n.known[c.into[i]] = value, true
	}
	return n, fmt.Sprintf("%s reads %s = %d from %s", c.name, a.at, value, from)
}

// mayRead says whether a read has nothing to wait for.
func mayRead(s *state, c *compiled, i, base int) bool {
	a := &c.accesses[i]
	for j := range i {
		e := &c.accesses[j]
		switch {
		case e.kind == fence && !s.written[base+j]:
			return false
		case e.order.acquire && !s.read[base+j]:
			return false
		case a.order.total && e.order.release && !s.written[base+j]:
			return false
		}
	}
	return true
}

// mayWrite says whether a write, or a barrier, has nothing to wait for. One that is not done
// at all waits for no order.
func (m *machine) mayWrite(s *state, c *compiled, i, base int, skips bool) bool {
	a := &c.accesses[i]
	for j := range i {
		e, done := &c.accesses[j], s.written[base+j]
		switch {
		case skips || done:
		case e.kind == fence, a.kind == fence, a.order.release, c.at[j] == c.at[i]:
			return false
		case e.order.acquire && !s.read[base+j]:
			return false
		}
	}
	if a.after == "" {
		return true
	}
	at := 0
	for t := range m.threads {
		n := len(m.threads[t].accesses)
		if m.threads[t].name == a.after {
			return !slices.Contains(s.written[at:at+n], false)
		}
		at += n
	}
	panic("no thread " + a.after)
}
