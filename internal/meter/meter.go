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
	// DefaultEvery is the time between samples. DefaultIdle is how long a grant must be unused to
	// count as idle. Programs load their data before they use the GPU, and a large model takes half
	// an hour.
	DefaultEvery = time.Minute
	DefaultIdle  = time.Hour
	// leastGap is the least time between writes. Records that come in between are written together.
	leastGap = 100 * time.Millisecond
	// mostPending bounds the records that wait to be written. At most mostRefused of them may be
	// refusals.
	mostPending = 1000
	// flushEvery is the time between flushes of the journal to the disk.
	flushEvery = time.Minute
	// fades is the number of scrapes that show the totals of an ended container.
	fades = 2
	// labelPatience is the timeout of the request for pods' labels.
	labelPatience = 4 * time.Second
	// mostText bounds a record's message, in bytes.
	mostText = 500
)

// Journal stores the account. segments.Store implements it.
type Journal interface {
	// Last calls apply with the records that make up the present book.
	Last(apply func(*usage.Record)) error
	// Append appends lines. It returns how many bytes of them were written.
	Append(lines []byte) (int, error)
	// Full reports whether the next segment is due. Fresh reports whether the last one is empty.
	Full() bool
	Fresh() bool
	Next(first []byte) error
	Tidy() error
	// Dropped returns records of what Tidy has removed since the last call.
	Dropped() []usage.Record
	Flush() error
}

// Options are the options of a Meter.
type Options struct {
	Ledger  *ledger.Ledger
	Journal Journal
	// Inventory returns the node's GPUs as they were last read.
	Inventory func() *gpu.Inventory
	// Heard reports whether the kubelet and the runtime have both named the holders.
	Heard func() bool
	// Used returns what the watchdog last saw.
	Used func() []status.Container
	// Sampled returns the same for a sample, with how busy containers have kept the GPUs since the
	// given time, according to the driver. That time is the last sample's, so that no time counts
	// twice. Nil if there is no such figure.
	Sampled func(context.Context, time.Time) []status.Container
	// Labels returns the labels of the node's pods, by UID. Nil if no labels are wanted. Keys are
	// the wanted labels.
	Labels func(context.Context) (map[string]map[string]string, error)
	Keys   []string
	// Tell sends an Event about a pod. Nil without an API server.
	Tell func(pod workload.Pod, reason, message string)
	// Changed is called when a grant becomes idle or stops being idle, and when writing the journal
	// begins to fail or works again.
	Changed func()
	// Every is the time between samples; zero is the default. IdleAfter is how long a grant must be
	// unused to count as idle; zero is never.
	Every, IdleAfter time.Duration
	Version          string
	Now              func() time.Time
	Log              *slog.Logger
}

// Meter keeps the usage account. Use [New].
type Meter struct {
	opts   Options
	ration *brief.Ration
	news   chan struct{} // holds at most one token

	// looked is the state of the ledger at the last look, or unsettled.
	looked atomic.Uint64
	noted  notes // records from Note
	board  board

	// Only Run's goroutine uses the rest.

	// book is the sum of all records.
	book   *usage.Book
	past   past
	outbox outbox
	// uses are the growing totals.
	uses map[place]*use
	// sampled is the time of the last sample, or the start of the process.
	sampled time.Time
	ended   []usage.Key // since the last successful write
	told    map[uint64]bool
}

// past is what earlier processes have written.
type past struct {
	// read is true if the records of earlier processes have been read.
	read bool
	// before is the number of this process's first grant; earlier processes began those with
	// smaller numbers. began is when this process began.
	before uint64
	began  time.Time
	// lastRecord is the time of an earlier process's last record.
	lastRecord time.Time
}

// outbox has the records that wait to be written.
type outbox struct {
	pending []byte
	waiting int // records in pending
	refused int // those of them that are refusals
	// lost and missed count the records that did not fit since the last successful write. The book
	// has to be written for lost ones, and not for missed ones.
	lost, missed int
	flushed      time.Time
}

// empty reports whether nothing waits to be written and no record is missing.
func (o *outbox) empty() bool { return o.waiting == 0 && o.lost == 0 && o.missed == 0 }

// wrote drops the records that are complete in the first n bytes of out.
func (o *outbox) wrote(out []byte, n int) {
	whole := bytes.LastIndexByte(out[:min(n, len(o.pending))], '\n') + 1
	o.waiting -= bytes.Count(out[:whole], []byte("\n"))
	o.refused -= bytes.Count(out[:whole], []byte(`"event":"refused"`))
	o.pending = o.pending[whole:]
}

// wroteAll resets the outbox after a successful write.
func (o *outbox) wroteAll() {
	*o = outbox{pending: o.pending[:0], flushed: o.flushed}
	if cap(o.pending) > 64<<10 {
		o.pending = nil
	}
}

// place identifies a grant's part of a GPU: the grant's number and the GPU's index.
type place struct {
	grant uint64
	gpu   int
}

// use is the total use of a place, and what the last sample saw there.
type use struct {
	usage.Use
	mib     uint64
	busy    bool
	written usage.Use
}

// New returns a meter. It has not read its journal yet.
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

// Poke makes the meter look at the ledger soon. It does not block.
func (m *Meter) Poke() {
	select {
	case m.news <- struct{}{}:
	default:
	}
}

// Round makes the meter look at the ledger if the ledger has changed. The agent calls it at each
// round. It does not block.
func (m *Meter) Round() {
	if m.state() != m.looked.Load() {
		m.Poke()
	}
}

// unsettled is the state after a look that left something unknown or unwritten. The next look has
// to try again.
const unsettled = math.MaxUint64

// state returns a number that changes whenever an allocation is added, renewed or released, or gets
// another holder.
func (m *Meter) state() uint64 {
	version, _, named := m.opts.Ledger.State()
	return version + named
}

// Note adds a record from another package: a refusal, a cut, a kill or an eviction. It does not
// block. It fills in the time and the GPU's index.
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

// start reads what earlier processes have written.
func (m *Meter) start() error {
	book := usage.NewBook(nil)
	if err := m.opts.Journal.Last(book.Apply); err != nil {
		return err
	}
	m.book = book
	m.past.read, m.past.before, m.past.lastRecord = true, book.Next(), book.Last()
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

// turn looks at the ledger and at the noted records, takes a sample if sample is true, writes all
// of that, and shows it.
func (m *Meter) turn(ctx context.Context, sample bool) {
	if !m.past.read {
		if err := m.start(); err != nil {
			_ = m.opts.Ledger.Ends.Take() // dropped; orphans will end their grants
			m.fail(err)
			return
		}
	}
	at := m.opts.Now() // read before the ledger: later ends have later times
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
	if news { // otherwise nothing has changed
		m.show(at)
	}
}

// look records the changes in the ledger, and the noted records. It returns true if something is
// missing that a later look can add.
func (m *Meter) look(ctx context.Context, at time.Time) (lacks bool) {
	inv := m.opts.Inventory()
	known := len(inv.GPUs) > 0 // otherwise the shares of grants are not known yet
	if known {
		past, held, seen := m.opts.Ledger.Ends.Take(), m.opts.Ledger.Allocations(), m.opts.Used()
		for i := range past {
			m.meet(&past[i].Allocation, inv, at, seen)
			has := seen
			if slices.ContainsFunc(held, func(a ledger.Allocation) bool { return a.ID == past[i].ID }) ||
				slices.ContainsFunc(past[i+1:], func(e ledger.End) bool { return e.ID == past[i].ID }) {
				has = nil // seen belongs to the next holder
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

// orphans ends the grants of earlier processes that the ledger does not have.
func (m *Meter) orphans(held []ledger.Allocation) {
	if m.past.before <= 1 || !m.opts.Heard() {
		return
	}
	for _, g := range m.book.Open() {
		there := slices.ContainsFunc(held, func(a ledger.Allocation) bool { return a.ID == g.Allocation })
		if g.Number < m.past.before && !there {
			m.end(g.Allocation, m.past.lastRecord, "it ended while the agent was away", nil)
		}
	}
}

// meet compares an allocation with its open grant in the book, and records what has changed.
func (m *Meter) meet(a *ledger.Allocation, inv *gpu.Inventory, at time.Time, seen []status.Container) {
	g := m.book.Of(a.ID)
	if g != nil && !a.Adopted && a.Given.After(g.Since) && g.Number < m.past.before {
		if a.Given.Before(m.past.began) { // by an earlier process, which did not write it
			m.end(a.ID, a.Given, "it was given to the next holder", nil)
		} else {
			m.end(a.ID, m.past.lastRecord, "it ended while the agent was away", nil)
		}
		g = nil
	}
	// A claim's allocation may have got other pieces meanwhile.
	if g != nil && (!samePieces(g, a.Grants) || g.Tier != a.Tier) {
		when := at
		if g.Number < m.past.before {
			when = m.past.lastRecord
		}
		m.end(a.ID, when, "its ID has other pieces now", nil)
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
			Allocation: a.ID, FrontEnd: a.Owner, Tier: a.Tier, Resource: a.Resource, Pieces: usage.PiecesOf(a.Grants, inv),
		}
		for i := range a.Grants {
			r.Count += piece.Count(a.Grants[i].Piece)
		}
		m.add(&r)
		g = m.book.Of(a.ID)
	}
	if yields := a.Yield.Asked(); yields != g.Yields {
		r := usage.Record{Time: at, Event: usage.Restored, Grant: g.Number}
		if yields {
			r.Event = usage.Yielded
		}
		m.add(&r)
	}
	if parked := a.Phase == ledger.Parked; parked != !g.Parked.IsZero() {
		r := usage.Record{Time: at, Event: usage.Unparked, Grant: g.Number}
		if parked {
			r.Event, r.MiB = usage.Parked, a.Parks.Bytes>>20
		}
		m.add(&r)
	}
	if h.Pod != "" && !g.Same(&h) && (h.Container != "" || g.Container == "") {
		h.Labels = g.Labels
		m.add(&usage.Record{Time: at, Event: usage.Named, Grant: g.Number, Holder: h})
	}
}

// samePieces reports whether a grant has these pieces, in any order. It compares what is known
// without the driver.
func samePieces(g *usage.Grant, grants []ledger.Grant) bool {
	return len(g.Held) == len(grants) && !slices.ContainsFunc(grants, func(now ledger.Grant) bool {
		return !slices.ContainsFunc(g.Held, func(h usage.Held) bool {
			return h.GPU == now.GPU && piece.Same(h.Of, now.Piece)
		})
	})
}

// sameContainer reports whether two names may mean one container. An empty part is not known yet.
func sameContainer(a, b *usage.Holder) bool {
	maybe := func(x, y string) bool { return x == y || x == "" || y == "" }
	return a.Namespace == b.Namespace && a.Pod == b.Pod && maybe(a.UID, b.UID) && maybe(a.Container, b.Container)
}

// end ends a grant, and adds its use since the last sample.
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
		m.addUse(g, i, seen, at)
		if u := m.uses[p]; u != nil {
			r.Used = append(r.Used, u.Use)
			delete(m.uses, p)
		}
	}
	m.ended = append(m.ended, g.Keys()...)
	delete(m.told, g.Number)
	m.add(&r)
}

// sample adds what each grant uses for the time since the last sample.
func (m *Meter) sample(ctx context.Context, at time.Time) {
	seen := m.opts.Used()
	if m.opts.Sampled != nil {
		seen = m.opts.Sampled(ctx, m.sampled)
	}
	r := usage.Record{Time: at, Event: usage.Used}
	for _, g := range m.book.Open() {
		for i := range g.Held {
			m.addUse(g, i, seen, at)
			if u := m.uses[place{g.Number, g.Held[i].Index}]; u != nil && !equal(&u.Use, &u.written) {
				u.written = u.Use
				r.Used = append(r.Used, u.Use)
			}
		}
	}
	m.sampled = at
	m.add(&r) // even if nothing has changed: it shows that the grants go on
}

func equal(a, b *usage.Use) bool {
	sameSM := (a.SMMs == nil) == (b.SMMs == nil) && (a.SMMs == nil || *a.SMMs == *b.SMMs)
	return a.MiBMs == b.MiBMs && a.BusyMs == b.BusyMs && a.Idle.Equal(b.Idle) && sameSM
}

// addUse adds a piece's measured use to its totals, for the time since the last sample.
func (m *Meter) addUse(g *usage.Grant, piece int, seen []status.Container, at time.Time) {
	h := &g.Held[piece]
	if g.First(piece) != piece {
		return // the first piece on a GPU has all use of that GPU
	}
	p := place{g.Number, h.Index}
	u := m.uses[p]
	i := slices.IndexFunc(seen, func(c status.Container) bool {
		return c.Allocation == g.Allocation && c.GPU == string(h.GPU)
	})
	switch {
	case i >= 0 && seen[i].UsedMiB == nil, i < 0 && u == nil:
		return // not known
	case u == nil:
		u = &use{Use: usage.Use{Grant: g.Number, GPU: h.Index}}
		m.uses[p] = u
	}
	from := m.sampled
	if g.Since.After(from) {
		from = g.Since
	}
	ms := uint64(max(0, at.Sub(from)).Milliseconds())
	if i >= 0 { // otherwise it has ended: use what was seen last
		u.mib, u.busy = *seen[i].UsedMiB, *seen[i].UsedMiB > 0 || seen[i].Processes > 0
	}
	if !g.Parked.IsZero() { // the driver may list its processes all the same
		u.mib, u.busy = 0, false
	}
	u.MiBMs += u.mib * ms
	if u.busy {
		u.BusyMs, u.Idle = u.BusyMs+ms, time.Time{}
	} else if !g.Parked.IsZero() {
		u.Idle = time.Time{} // its processes are there, and wait for its room
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

// add applies a record to the book, and queues it for writing.
func (m *Meter) add(r *usage.Record) {
	r.Round()
	m.book.Apply(r)
	switch {
	case r.Event == usage.Refused && m.outbox.refused >= mostRefused:
		m.outbox.missed++ // keep room for other records
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
		// Readers of the journal have missed records, and the book has the totals.
		more = append(more, usage.Record{Time: at, Event: usage.Began, Book: m.book.State(at)})
	}
	for i := range more {
		var err error
		if out, err = more[i].Append(out); err != nil {
			return err
		}
	}
	if n, err := m.opts.Journal.Append(out); err != nil {
		// Complete records need not be written again.
		m.outbox.wrote(out, n)
		return err
	}
	m.board.lose(uint64(m.outbox.lost + m.outbox.missed))
	m.outbox.wroteAll()
	return nil
}

// takeDropped records what the journal had no room to keep.
func (m *Meter) takeDropped(at time.Time) {
	for _, r := range m.opts.Journal.Dropped() {
		r.Time = at
		m.add(&r)
		m.board.drop(&r)
	}
}

// fail records whether the journal can be written: err, or nil if it can.
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

// label requests the labels of pods that lack theirs.
func (m *Meter) label(ctx context.Context) {
	if m.opts.Labels == nil || !slices.ContainsFunc(m.book.Open(), unlabelled) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, labelPatience)
	defer cancel()
	of, err := m.opts.Labels(ctx)
	if err != nil {
		m.ration.Log(slog.LevelWarn, "cannot read the labels of pods for the usage journal", nil, "err", err)
		return
	}
	for _, g := range m.book.Open() {
		if !unlabelled(g) {
			continue
		}
		labels, there := of[g.UID]
		if !there {
			continue // no sandbox yet, try again later
		}
		h := g.Holder
		h.Labels = map[string]string{}
		for _, key := range m.opts.Keys {
			if v, ok := labels[key]; ok {
				h.Labels[key] = v
			}
		}
		if len(h.Labels) == 0 {
			g.Labels = h.Labels // do not ask again
			continue
		}
		m.add(&usage.Record{Time: m.opts.Now(), Event: usage.Named, Grant: g.Number, Holder: h})
	}
}

func unlabelled(g *usage.Grant) bool { return g.UID != "" && g.Labels == nil }

// who names a holder for people.
func who(h *usage.Holder) string {
	return fmt.Sprintf("%s/%s/%s", h.Namespace, h.Pod, h.Container)
}
