// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
)

const (
	// DefaultEvery is the time between samples, and DefaultIdle that after which a grant that
	// nobody uses is told of. Programs load their data before they come to the GPU, and a
	// large model takes half an hour.
	DefaultEvery = time.Minute
	DefaultIdle  = time.Hour
	// leastGap is the least time between writes: what comes in between is written together.
	leastGap = 100 * time.Millisecond
	// mostPending bounds the records that wait to be written, and mostRefused those of them,
	// too, that tell of refusals.
	mostPending = 1000
	// flushEvery is how often the journal is flushed to the disk.
	flushEvery = time.Minute
	// fades is for how many scrapes the totals of an ended container are shown.
	fades = 2
	// labelPatience bounds the question for pods' labels.
	labelPatience = 4 * time.Second
	// mostText bounds a record's message.
	mostText = 500
)

// Journal is where the account is written. segments.Store is one.
type Journal interface {
	// Last calls apply with the records that make the book of now.
	Last(apply func(*usage.Record)) error
	// Append returns how many bytes of the lines are there.
	Append(lines []byte) (int, error)
	// Full says that the next segment is due, and Fresh that the last one has no line yet.
	Full() bool
	Fresh() bool
	Next(first []byte) error
	Tidy() error
	// Dropped returns records that tell of what Tidy had to remove since the last call.
	Dropped() []usage.Record
	Flush() error
}

// Options are those of a Meter.
type Options struct {
	Ledger  *ledger.Ledger
	Journal Journal
	// Inventory is the node's GPUs as they were last read.
	Inventory func() *gpu.Inventory
	// Heard reports whether kubelet and runtime have both said who holds what.
	Heard func() bool
	// Used is what the watchdog last saw.
	Used func() []status.Container
	// Sampled is the same, with how busy the driver says that containers have kept the GPUs
	// since a time; nil where there is no such figure. It is called for each sample, with the
	// time of the one before, so that no time is counted twice.
	Sampled func(context.Context, time.Time) []status.Container
	// Labels has the labels of the node's pods, by UID; nil where none are wanted. Keys are
	// those that are.
	Labels func(context.Context) (map[string]map[string]string, error)
	Keys   []string
	// Tell sends an Event about a pod; nil where there is no API server.
	Tell func(pod workload.Pod, reason, message string)
	// Changed is called when a grant has become idle, or is no more, and when the journal
	// cannot be written, or can again.
	Changed func()
	// Every is the time between samples, zero for the default. IdleAfter is after how long a
	// grant is idle; zero is never.
	Every, IdleAfter time.Duration
	Version          string
	Now              func() time.Time
	Log              *slog.Logger
}

// Meter keeps the account. Use [New].
type Meter struct {
	opts   Options
	ration *brief.Ration
	news   chan struct{} // holds at most one token

	// looked is the state of the ledger as of the last look, or unsettled.
	looked atomic.Uint64
	noted  notes // by others, not taken yet
	board  board

	// The rest belongs to Run's goroutine.

	// book is what the records come to.
	book   *usage.Book
	past   past
	outbox outbox
	// uses are the totals that grow.
	uses map[place]*use
	// sampled is when the last sample was taken, or the process began.
	sampled time.Time
	ended   []usage.Key // since the last write that succeeded
	told    map[uint64]bool
}

// past is what was before this process.
type past struct {
	// read says that the records of before have been read.
	read bool
	// Grants whose numbers are below before are older than this process, which began at began.
	before uint64
	began  time.Time
	// vouched is the last time that a predecessor has written something.
	vouched time.Time
}

// outbox is what waits to be written.
type outbox struct {
	pending []byte
	waiting int // records in pending
	refused int // those of them that tell of refusals
	// Since the last write that succeeded, lost counts records that did not fit, and missed
	// those without which the book is right all the same: that need not be written for them.
	lost, missed int
	flushed      time.Time
}

// empty says that nothing is to be written, nor that anything is missing.
func (o *outbox) empty() bool { return o.waiting == 0 && o.lost == 0 && o.missed == 0 }

// wrote drops what is whole in the first so many bytes of what was written.
func (o *outbox) wrote(out []byte, n int) {
	whole := bytes.LastIndexByte(out[:min(n, len(o.pending))], '\n') + 1
	o.waiting -= bytes.Count(out[:whole], []byte("\n"))
	o.refused -= bytes.Count(out[:whole], []byte(`"event":"refused"`))
	o.pending = o.pending[whole:]
}

// wroteAll begins anew.
func (o *outbox) wroteAll() {
	*o = outbox{pending: o.pending[:0], flushed: o.flushed}
	if cap(o.pending) > 64<<10 {
		o.pending = nil
	}
}

// place is a grant on a GPU, by its number and the GPU's index.
type place struct {
	grant uint64
	gpu   int
}

// use is what was used, and what the last sample saw.
type use struct {
	usage.Use
	mib     uint64
	busy    bool
	written usage.Use
}

// New returns a meter that has not read its journal yet.
func New(o Options) *Meter {
	if o.Every <= 0 {
		o.Every = DefaultEvery
	}
	o.Ledger.Ends.Keep()
	now := o.Now()
	m := &Meter{
		opts: o, ration: brief.NewRation(o.Log, time.Now, time.AfterFunc), news: make(chan struct{}, 1),
		board: board{fading: map[usage.Key]int{}, shown: usage.Shown{Written: true}},
		book:  usage.NewBook(nil), past: past{began: now}, outbox: outbox{flushed: now},
		uses: map[place]*use{}, sampled: now, told: map[uint64]bool{},
	}
	m.looked.Store(unsettled)
	return m
}

// Poke has the meter look at the ledger soon. It does not block.
func (m *Meter) Poke() {
	select {
	case m.news <- struct{}{}:
	default:
	}
}

// Round has the meter look at the ledger where there may be something to see. It is called
// at each of the agent's rounds, most of which change nothing, and does not block.
func (m *Meter) Round() {
	if m.state() != m.looked.Load() {
		m.Poke()
	}
}

// unsettled is the state of the ledger after a look at which something was not known or could
// not be written down, and may be at the next one.
const unsettled = math.MaxUint64

// state is another number whenever an allocation was added, renewed or released, or got
// another holder.
func (m *Meter) state() uint64 {
	version, _, named := m.opts.Ledger.State()
	return version + named
}

// Note leaves a record that others know of: what was refused, cut, killed or evicted. It does
// not block. A GPU's index is filled in.
func (m *Meter) Note(r usage.Record) {
	if r.Time.IsZero() {
		r.Time = m.opts.Now()
	}
	if r.GPU != "" && r.Index == nil {
		if d := m.opts.Inventory().ByUUID(r.GPU); d != nil {
			r.Index = &d.Index
		}
	}
	r.Message = brief.Cut(r.Message, mostText)
	m.noted.add(r)
	m.Poke()
}

// Run keeps the account until ctx ends, and returns its error.
func (m *Meter) Run(ctx context.Context) error {
	ticker := time.NewTicker(m.opts.Every)
	defer ticker.Stop()
	for {
		m.turn(ctx, false)
		select {
		case <-ctx.Done():
		case <-time.After(leastGap):
		}
		select {
		case <-ctx.Done():
			m.turn(context.WithoutCancel(ctx), true)
			return ctx.Err()
		case <-m.news:
		case <-ticker.C:
			m.turn(ctx, true)
		}
	}
}

// start takes over what the process before has written.
func (m *Meter) start() error {
	book := usage.NewBook(nil)
	if err := m.opts.Journal.Last(book.Apply); err != nil {
		return err
	}
	m.book = book
	m.past.read, m.past.before, m.past.vouched = true, book.Next(), book.Last()
	for _, g := range m.book.Open() {
		for i := range g.Held {
			if u := g.Held[i].Use; u != nil {
				m.uses[place{g.Number, u.GPU}] = &use{Use: *u, written: *u, busy: u.Idle.IsZero()}
			}
		}
	}
	now := m.opts.Now()
	if m.opts.Journal.Fresh() {
		m.add(&usage.Record{Time: now, Event: usage.Began, Book: m.book.State(now)})
	}
	m.add(&usage.Record{Time: now, Event: usage.Started, Message: m.opts.Version})
	return nil
}

// turn looks at the ledger and at what others have noted, takes a sample where one is due,
// writes all that, and shows it.
func (m *Meter) turn(ctx context.Context, sample bool) {
	if !m.past.read {
		if err := m.start(); err != nil {
			_ = m.opts.Ledger.Ends.Take() // what ends until then is missing at the end of that
			m.fail(err)
			return
		}
	}
	at := m.opts.Now() // before the ledger is asked: what ends after that, ends later
	state := m.state() // likewise
	if m.look(ctx, at) {
		state = unsettled
	}
	if sample {
		m.sample(ctx, at)
	}
	news := sample || !m.outbox.empty()
	m.write(at)
	if !m.outbox.empty() {
		state = unsettled
	}
	m.looked.Store(state)
	if news { // else all is as it was shown
		m.show(at)
	}
}

// look writes down what the ledger and others tell. It reports whether something is lacking
// that they will tell.
func (m *Meter) look(ctx context.Context, at time.Time) (lacks bool) {
	inv := m.opts.Inventory()
	known := len(inv.GPUs) > 0 // else nobody can tell yet what a grant comes to
	if known {
		past, held, seen := m.opts.Ledger.Ends.Take(), m.opts.Ledger.Allocations(), m.opts.Used()
		for i := range past {
			m.meet(&past[i].Allocation, inv, at, seen)
			has := seen
			if slices.ContainsFunc(held, func(a ledger.Allocation) bool { return a.ID == past[i].ID }) ||
				slices.ContainsFunc(past[i+1:], func(e ledger.End) bool { return e.ID == past[i].ID }) {
				has = nil // what is seen now is the next holder's
			}
			m.end(past[i].ID, past[i].At, "", has)
		}
		for i := range held {
			m.meet(&held[i], inv, at, seen)
		}
		m.orphans(held)
	}
	noted := m.noted.take()
	for i := range noted {
		m.add(&noted[i])
	}
	m.outbox.missed += m.noted.takeMissed()
	m.label(ctx)
	return !known || m.past.before > 1 && !m.opts.Heard() ||
		m.opts.Labels != nil && slices.ContainsFunc(m.book.Open(), unlabelled)
}

// orphans ends what a predecessor has given out and the ledger does not have.
func (m *Meter) orphans(held []ledger.Allocation) {
	if m.past.before <= 1 || !m.opts.Heard() {
		return
	}
	for _, g := range m.book.Open() {
		there := slices.ContainsFunc(held, func(a ledger.Allocation) bool { return a.ID == g.Allocation })
		if g.Number < m.past.before && !there {
			m.end(g.Allocation, m.past.vouched, "it ended while the agent was away", nil)
		}
	}
}

// meet compares an allocation with its grant in the book.
func (m *Meter) meet(a *ledger.Allocation, inv *gpu.Inventory, at time.Time, seen []status.Container) {
	g := m.book.Of(a.ID)
	if g != nil && !a.Adopted && a.Given.After(g.Since) && g.Number < m.past.before {
		if a.Given.Before(m.past.began) { // by a predecessor, which had no time to write that down
			m.end(a.ID, a.Given, "it was given to the next holder", nil)
		} else {
			m.end(a.ID, m.past.vouched, "it ended while the agent was away", nil)
		}
		g = nil
	}
	// What a claim's name stands for may have changed while nobody looked.
	if g != nil && !samePieces(g, a.Grants) {
		when := at
		if g.Number < m.past.before {
			when = m.past.vouched
		}
		m.end(a.ID, when, "its name stands for other pieces now", nil)
		g = nil
	}
	h := usage.Holder{
		Namespace: a.Holder.Namespace, Pod: a.Holder.Name, UID: a.Holder.UID, Container: a.Holder.Container,
	}
	since := a.Given
	if g != nil && g.Pod != "" && h.Pod != "" && !sameContainer(&g.Holder, &h) {
		m.end(a.ID, at, "its next holder is "+h.Namespace+"/"+h.Pod, seen)
		g, since = nil, at
	}
	if g == nil {
		r := usage.Record{
			Time: since, Event: usage.Allocated, Grant: m.book.Next(), Adopted: a.Adopted,
			Allocation: a.ID, FrontEnd: a.Owner, Resource: a.Resource, Pieces: usage.PiecesOf(a.Grants, inv),
		}
		for i := range a.Grants {
			r.Count += piece.Count(a.Grants[i].Piece)
		}
		m.add(&r)
		g = m.book.Of(a.ID)
	}
	if h.Pod != "" && !g.Same(&h) && (h.Container != "" || g.Container == "") {
		h.Labels = g.Labels
		m.add(&usage.Record{Time: at, Event: usage.Named, Grant: g.Number, Holder: h})
	}
}

// samePieces reports whether a grant is of these pieces, in whatever order, as far as they are
// known without the driver.
func samePieces(g *usage.Grant, grants []ledger.Grant) bool {
	return len(g.Held) == len(grants) && !slices.ContainsFunc(grants, func(now ledger.Grant) bool {
		return !slices.ContainsFunc(g.Held, func(h usage.Held) bool {
			return h.GPU == now.GPU && piece.Same(h.Of, now.Piece)
		})
	})
}

// sameContainer reports whether two names may be of one container: what is empty is not known
// yet.
func sameContainer(a, b *usage.Holder) bool {
	maybe := func(x, y string) bool { return x == y || x == "" || y == "" }
	return a.Namespace == b.Namespace && a.Pod == b.Pod && maybe(a.UID, b.UID) && maybe(a.Container, b.Container)
}

// end ends a grant, with what was used of it since the last sample.
func (m *Meter) end(id string, at time.Time, why string, seen []status.Container) {
	g := m.book.Of(id)
	if g == nil {
		return
	}
	if at.Before(g.Since) { // the clock was put back
		at = g.Since
	}
	r := usage.Record{Time: at, Event: usage.Released, Grant: g.Number, Message: why}
	for i := range g.Held {
		h := &g.Held[i]
		p := place{g.Number, h.Index}
		m.grow(g, i, seen, at)
		if u := m.uses[p]; u != nil {
			r.Used = append(r.Used, u.Use)
			delete(m.uses, p)
		}
	}
	m.ended = append(m.ended, g.Keys()...)
	delete(m.told, g.Number)
	m.add(&r)
}

// sample counts what is used for the time since the last sample.
func (m *Meter) sample(ctx context.Context, at time.Time) {
	seen := m.opts.Used()
	if m.opts.Sampled != nil {
		seen = m.opts.Sampled(ctx, m.sampled)
	}
	r := usage.Record{Time: at, Event: usage.Used}
	for _, g := range m.book.Open() {
		for i := range g.Held {
			m.grow(g, i, seen, at)
			if u := m.uses[place{g.Number, g.Held[i].Index}]; u != nil && !equal(&u.Use, &u.written) {
				u.written = u.Use
				r.Used = append(r.Used, u.Use)
			}
		}
	}
	m.sampled = at
	m.add(&r) // also where nothing has changed: it vouches for what is granted
}

func equal(a, b *usage.Use) bool {
	sameSM := (a.SMMs == nil) == (b.SMMs == nil) && (a.SMMs == nil || *a.SMMs == *b.SMMs)
	return a.MiBMs == b.MiBMs && a.BusyMs == b.BusyMs && a.Idle.Equal(b.Idle) && sameSM
}

// grow adds to a piece's totals what it was seen to use, for the time since the last sample.
func (m *Meter) grow(g *usage.Grant, piece int, seen []status.Container, at time.Time) {
	h := &g.Held[piece]
	if g.First(piece) != piece {
		return // the first piece of a GPU has all that is used there
	}
	p := place{g.Number, h.Index}
	u := m.uses[p]
	i := slices.IndexFunc(seen, func(c status.Container) bool {
		return c.Allocation == g.Allocation && c.GPU == string(h.GPU)
	})
	switch {
	case i >= 0 && seen[i].UsedMiB == nil, i < 0 && u == nil:
		return // not known: nothing is added
	case u == nil:
		u = &use{Use: usage.Use{Grant: g.Number, GPU: h.Index}}
		m.uses[p] = u
	}
	from := m.sampled
	if g.Since.After(from) {
		from = g.Since
	}
	ms := uint64(max(0, at.Sub(from)).Milliseconds())
	if i >= 0 { // else it has gone, and what was seen last counts
		u.mib, u.busy = *seen[i].UsedMiB, *seen[i].UsedMiB > 0 || seen[i].Processes > 0
	}
	u.MiBMs += u.mib * ms
	if u.busy {
		u.BusyMs, u.Idle = u.BusyMs+ms, time.Time{}
	} else if u.Idle.IsZero() {
		u.Idle = from.UTC().Truncate(time.Second)
	}
	if i < 0 {
		return
	}
	if sm := seen[i].SMPercent; sm != nil {
		total := uint64(*sm * float64(ms) / 100)
		if u.SMMs != nil {
			total += *u.SMMs
		}
		u.SMMs = &total
	}
}

// add takes a record into the book, and has it written.
func (m *Meter) add(r *usage.Record) {
	r.Round()
	m.book.Apply(r)
	switch {
	case r.Event == usage.Refused && m.outbox.refused >= mostRefused:
		m.outbox.missed++ // others' records need the room
		return
	case m.outbox.waiting >= mostPending:
		m.outbox.lost++
		return
	}
	out, err := r.Append(m.outbox.pending)
	if err != nil {
		m.outbox.lost++
		m.ration.Log(slog.LevelError, "cannot write a usage record", nil, "err", err)
		return
	}
	m.outbox.pending = out
	if m.outbox.waiting++; r.Event == usage.Refused {
		m.outbox.refused++
	}
}

// write writes what waits.
func (m *Meter) write(at time.Time) {
	if !m.outbox.empty() {
		if err := m.writePending(at); err != nil {
			m.fail(err)
			return
		}
	}
	m.fail(nil)
	if m.opts.Journal.Full() {
		line, err := (&usage.Record{Time: at, Event: usage.Began, Book: m.book.State(at)}).Append(nil)
		if err == nil {
			err = m.opts.Journal.Next(line)
		}
		if err == nil {
			err = m.opts.Journal.Tidy()
			m.takeDropped(at)
			if err == nil && m.outbox.waiting > 0 {
				err = m.writePending(at)
			}
		}
		m.fail(err)
	}
	if at.Sub(m.outbox.flushed) >= flushEvery {
		m.outbox.flushed = at
		m.fail(m.opts.Journal.Flush())
	}
}

func (m *Meter) writePending(at time.Time) error {
	out := m.outbox.pending
	var more []usage.Record
	if m.outbox.lost > 0 || m.outbox.missed > 0 {
		more = append(more, usage.Record{Time: at, Event: usage.Lost, Count: m.outbox.lost + m.outbox.missed})
	}
	if m.outbox.lost > 0 {
		// Whoever reads has missed something: the book tells what it came to.
		more = append(more, usage.Record{Time: at, Event: usage.Began, Book: m.book.State(at)})
	}
	for i := range more {
		var err error
		if out, err = more[i].Append(out); err != nil {
			return err
		}
	}
	if n, err := m.opts.Journal.Append(out); err != nil {
		// What is whole there need not be written again.
		m.outbox.wrote(out, n)
		return err
	}
	m.board.lose(uint64(m.outbox.lost + m.outbox.missed))
	m.outbox.wroteAll()
	return nil
}

// takeDropped takes down what the journal had no room for any more.
func (m *Meter) takeDropped(at time.Time) {
	for _, r := range m.opts.Journal.Dropped() {
		r.Time = at
		m.add(&r)
		m.board.drop(&r)
	}
}

// fail notes that the journal could not be written, or that it could.
func (m *Meter) fail(err error) {
	why := status.Cause{}
	if err != nil {
		why = status.Why(status.UsageUnwritten, "%s", brief.Cut(err.Error(), brief.Text))
		m.ration.Log(slog.LevelError, "cannot write the usage journal; containers are served all the same", nil,
			"err", err)
	}
	if m.board.trouble(why) {
		m.changed()
	}
}

func (m *Meter) changed() {
	if m.opts.Changed != nil {
		m.opts.Changed()
	}
}

// label asks for the labels of pods that lack theirs.
func (m *Meter) label(ctx context.Context) {
	if m.opts.Labels == nil || !slices.ContainsFunc(m.book.Open(), unlabelled) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, labelPatience)
	defer cancel()
	of, err := m.opts.Labels(ctx)
	if err != nil {
		m.ration.Log(slog.LevelWarn, "cannot learn the labels of pods for the usage journal", nil, "err", err)
		return
	}
	for _, g := range m.book.Open() {
		if !unlabelled(g) {
			continue
		}
		labels, there := of[g.UID]
		if !there {
			continue // a pod has its devices before it has a sandbox: it is asked again
		}
		h := g.Holder
		h.Labels = map[string]string{}
		for _, key := range m.opts.Keys {
			if v, ok := labels[key]; ok {
				h.Labels[key] = v
			}
		}
		if len(h.Labels) == 0 {
			g.Labels = h.Labels // asked, and not asked again
			continue
		}
		m.add(&usage.Record{Time: m.opts.Now(), Event: usage.Named, Grant: g.Number, Holder: h})
	}
}

func unlabelled(g *usage.Grant) bool { return g.UID != "" && g.Labels == nil }

// String names a holder for people.
func who(h *usage.Holder) string {
	return fmt.Sprintf("%s/%s/%s", h.Namespace, h.Pod, h.Container)
}
