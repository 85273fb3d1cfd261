// SPDX-License-Identifier: Apache-2.0

package health

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

const (
	// DefaultHold and DefaultProbe are what Options mean by zero.
	DefaultHold  = 60 * time.Second
	DefaultProbe = 10 * time.Second

	// flapWindow is for how long a fault that is over is remembered.
	flapWindow = time.Hour
	// maxStrikes bounds the doublings of the hold: 2^4 = 16.
	maxStrikes = 4
	// maxStrangers bounds GPUs of which only events have told, maxKnown those
	// that a caller or a state file may name, maxFaults the faults of one GPU.
	maxStrangers = 64
	maxKnown     = 1024
	maxFaults    = 64
	// maxDetail bounds what is kept of the driver's own words, in bytes.
	maxDetail = 300
)

// Options are a Monitor's settings.
type Options struct {
	// Ignored are the Xids of applications, which change nothing. Nil means
	// DefaultIgnored; an empty slice ignores none.
	Ignored []uint64
	// Hold is how long a GPU must have been without a fault before it is healthy
	// again. Default 60 s.
	Hold time.Duration
	// Probe is the spacing of readings while something is unhealthy. Default 10 s.
	Probe time.Duration
}

// Subject is a GPU, or one MIG instance of it. GI and CI are both -1 for the
// GPU; CI alone is -1 for a whole GPU instance.
type Subject struct {
	GPU gpu.UUID
	GI  int
	CI  int
}

// Reading is what the driver said when it was asked.
type Reading struct {
	// Err is set where nothing could be read; GPUs means nothing then.
	Err  error
	GPUs []GPUReading
}

// GPUReading is what the driver said of one GPU.
type GPUReading struct {
	Device gpu.Device
	// Health is nil where the driver could not tell.
	Health *gpu.Health
	// Err is why Health could not be read; gpu.ErrNotSupported complains of
	// nothing.
	Err error
}

// Verdict is a fault in force.
type Verdict struct {
	Subject
	Class Class
	// Xid is 0 where no Xid told of the fault.
	Xid uint64
	// Reason is a sentence for an operator: what, since when, what to do.
	Reason string
	Since  time.Time
	// Needs is one of the Needs constants, or the driver's own words.
	Needs string
}

// Record is a fault as the state file keeps it, with those that have ended
// within the last hour, which make the next one last longer.
type Record struct {
	GPU     gpu.UUID  `json:"gpu"`
	GI      int       `json:"gi"`
	CI      int       `json:"ci"`
	Class   Class     `json:"class"`
	Xid     uint64    `json:"xid,omitempty"`
	Detail  string    `json:"detail,omitempty"`
	Needs   string    `json:"needs,omitempty"`
	Since   time.Time `json:"since"`
	Last    time.Time `json:"last"`
	Strikes int       `json:"strikes,omitempty"`
	Over    bool      `json:"over,omitempty"`
}

// Monitor decides. It is safe for several goroutines.
type Monitor struct {
	ignored     []uint64
	hold, probe time.Duration

	mu sync.Mutex // guards what follows
	// gpus has every GPU that a reading listed, that Know or Restore named, and
	// up to maxStrangers more.
	gpus map[gpu.UUID]*card
	// waiting is what hangs, empty where nothing does; since says since when.
	waiting      string
	waitingSince time.Time
	lastRead     time.Time // of the last reading, whatever it said
}

// card is a GPU and its faults.
type card struct {
	known  bool
	faults map[key]*fault
}

// key tells the faults of one GPU apart. There is one per class, so that a storm
// of Xids cannot grow memory.
type key struct {
	gi, ci int
	class  Class
}

type fault struct {
	xid         uint64
	detail      string // in place of the table's meaning
	needs       string
	since, last time.Time // of the first and the last complaint
	strikes     int       // doublings of the hold
	clean       bool      // a reading since the last complaint was clean
	over        bool      // recovered; kept to notice flapping
}

// complaint is one reason why a subject is unhealthy.
type complaint struct {
	key
	xid    uint64
	detail string
	needs  string
}

// New returns a Monitor that knows no GPU.
func New(o Options) *Monitor {
	if o.Ignored == nil {
		o.Ignored = DefaultIgnored
	}
	if o.Hold <= 0 {
		o.Hold = DefaultHold
	}
	if o.Probe <= 0 {
		o.Probe = DefaultProbe
	}
	return &Monitor{ignored: slices.Clone(o.Ignored), hold: o.Hold, probe: o.Probe, gpus: make(map[gpu.UUID]*card)}
}

// Know names GPUs that an earlier process has seen: one that the next reading
// does not list is lost.
func (m *Monitor) Know(uuids ...gpu.UUID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, u := range uuids {
		m.knowLocked(u)
	}
}

// knowLocked returns a GPU's card, a new one where need be; nil where there is
// no room or no name.
func (m *Monitor) knowLocked(u gpu.UUID) *card {
	c := m.gpus[u]
	if c == nil {
		if u == "" || len(m.gpus) >= maxKnown {
			return nil
		}
		c = &card{faults: make(map[key]*fault)}
		m.gpus[u] = c
	}
	c.known = true
	return c
}

// Event takes in what the driver reported by itself and says whether a verdict
// changed.
//
// An Xid without a GPU concerns all known ones. A loss without a GPU concerns
// none until a reading tells which.
func (m *Monitor) Event(e gpu.Event, now time.Time) (changed bool) {
	var c complaint
	switch e.Kind {
	case gpu.EventXid:
		if m.Ignores(e) {
			return false
		}
		mean := meaningOf(e.Xid)
		c = complaint{key: place(mean.class, e.GI, e.CI), xid: e.Xid, needs: mean.needs}
	case gpu.EventLost:
		if e.GPU == "" {
			return false
		}
		c = complaint{key: place(ClassLost, -1, -1), detail: "the driver says that the GPU is lost", needs: NeedsReset}
	default:
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if e.GPU == "" {
		c.key = place(c.class, -1, -1) // an instance's number means nothing without its GPU
		for _, g := range m.gpus {
			if g.known {
				changed = g.complain(c, now) || changed
			}
		}
		return changed
	}
	g := m.gpus[e.GPU]
	if g == nil {
		if g = m.strangerLocked(e.GPU); g == nil {
			return false
		}
	}
	return g.complain(c, now)
}

// Ignores reports whether an event is an Xid that applications cause, which changes
// nothing.
func (m *Monitor) Ignores(e gpu.Event) bool {
	return e.Kind == gpu.EventXid && slices.Contains(m.ignored, e.Xid)
}

// strangerLocked makes room for a GPU that no reading has listed yet: its event
// may have been faster. The next reading that does not list it forgets it.
func (m *Monitor) strangerLocked(u gpu.UUID) *card {
	n := 0
	for _, c := range m.gpus {
		if !c.known {
			n++
		}
	}
	if n >= maxStrangers {
		return nil
	}
	c := &card{faults: make(map[key]*fault)}
	m.gpus[u] = c
	return c
}

// place returns where a fault of that class lies: on the instance that was named
// if the class stays within one, else on the GPU.
func place(class Class, gi, ci int) key {
	if r := rank(class); gi < 0 || r < 0 || !rules[r].instance {
		return key{-1, -1, class}
	}
	return key{gi, max(ci, -1), class}
}

// complain notes a complaint and says whether a verdict changed by it.
func (g *card) complain(c complaint, now time.Time) bool {
	f := g.faults[c.key]
	if f == nil && len(g.faults) >= maxFaults {
		// No GPU has that many instances. Whatever the numbers mean, the GPU is
		// faulty.
		c.key = place(c.class, -1, -1)
		f = g.faults[c.key]
	}
	if f == nil {
		g.faults[c.key] = &fault{xid: c.xid, detail: clip(c.detail), needs: c.needs, since: now, last: now}
		return true
	}
	if f.clean || f.over {
		f.strikes = min(f.strikes+1, maxStrikes)
		if now.Sub(f.last) > flapWindow {
			f.strikes = 0
		}
	}
	f.clean = false
	f.last = now
	switch {
	case f.over:
		f.over, f.since = false, now
	case c.class == ClassRecovery && c.xid == 0 && c.needs != f.needs:
		// What the driver asks for now replaces what it asked for, and an Xid
		// that only said that it asks for something.
	case needsRank(c.needs) <= needsRank(f.needs):
		return false // nothing that the operator does not know yet
	}
	f.xid, f.detail, f.needs = c.xid, clip(c.detail), c.needs
	return true
}

// needsRank orders Needs by what they cost; the driver's own words rank highest.
func needsRank(s string) int {
	order := []string{NeedsNothing, NeedsRestart, NeedsDriver, NeedsReset}
	if i := slices.Index(order, s); i >= 0 {
		return i
	}
	return len(order)
}

func clip(s string) string {
	if len(s) > maxDetail {
		s = s[:maxDetail]
	}
	return strings.ToValidUTF8(s, "")
}

// Reading takes in what the driver said when asked and tells whether a verdict,
// or what Waiting says, changed.
func (m *Monitor) Reading(r Reading, now time.Time) (changed bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lastRead = now
	if errors.Is(r.Err, gpu.ErrTimeout) {
		return m.waitLocked(fmt.Sprintf("reading the GPUs: %v", r.Err), now)
	}
	if r.Err != nil {
		changed = m.waitLocked("", now)
		c := noDriver(r.Err)
		for _, g := range m.gpus {
			if g.known {
				changed = g.complain(c, now) || changed
			}
		}
		return changed
	}

	listed := make(map[gpu.UUID]bool, len(r.GPUs))
	var hung []string
	for _, gr := range r.GPUs {
		u := gr.Device.UUID
		if u == "" {
			continue // a GPU without a UUID offers no device
		}
		listed[u] = true
		g := m.knowLocked(u)
		if g == nil {
			continue
		}
		if errors.Is(gr.Err, gpu.ErrTimeout) {
			hung = append(hung, fmt.Sprintf("%s: %v", u, gr.Err))
			continue
		}
		changed = g.read(gr, m.hold, now) || changed
	}
	for u, g := range m.gpus {
		if listed[u] {
			continue
		}
		if !g.known {
			changed = g.unfit() || changed
			delete(m.gpus, u)
			continue
		}
		changed = g.endDriver() || changed
		changed = g.complain(complaint{key: place(ClassLost, -1, -1), detail: "the driver does not list the GPU any more", needs: NeedsNothing}, now) || changed
	}
	slices.Sort(hung)
	return m.waitLocked(strings.Join(hung, "; "), now) || changed
}

// waitLocked notes what hangs; since when stays while anything does.
func (m *Monitor) waitLocked(what string, now time.Time) bool {
	was := m.waiting
	if was == "" && what != "" {
		m.waitingSince = now
	} else if what == "" {
		m.waitingSince = time.Time{}
	}
	m.waiting = clip(what)
	return was != m.waiting
}

// noDriver is the complaint about a driver that cannot be asked.
func noDriver(err error) complaint {
	c := complaint{key: place(ClassDriver, -1, -1), detail: err.Error(), needs: NeedsDriver}
	if errors.Is(err, gpu.ErrReloaded) {
		c.needs = NeedsRestart
	}
	return c
}

// read takes in an answer about this GPU.
func (g *card) read(gr GPUReading, hold time.Duration, now time.Time) (changed bool) {
	complaints := judge(gr)
	if !slices.ContainsFunc(complaints, func(c complaint) bool { return c.class == ClassDriver }) {
		changed = g.endDriver()
	}
	for _, c := range complaints {
		changed = g.complain(c, now) || changed
	}
	answers := gr.Device.Fault == "" && (gr.Err == nil || errors.Is(gr.Err, gpu.ErrNotSupported))
	for k, f := range g.faults {
		if f.last.After(now) {
			f.last = now // the clock was put back
		}
		switch {
		case f.over:
			if now.Sub(f.last) > flapWindow {
				delete(g.faults, k)
			}
			continue
		case !answers || slices.ContainsFunc(complaints, func(c complaint) bool { return c.key == k }):
			continue
		case k.gi >= 0 && !exists(gr.Device, k):
			changed = true
			delete(g.faults, k)
			continue
		case rules[rank(k.class)].proof && !proved(gr.Health):
			continue
		case k.class == ClassFirmware || k.class == ClassLink || k.class == ClassRecovery:
			if gr.Health != nil && gr.Health.Recovery != gpu.RecoveryNone {
				continue
			}
		}
		f.clean = true
		if now.Sub(f.last) >= hold<<f.strikes {
			f.over, changed = true, true
		}
	}
	return changed
}

// endDriver removes a driver's fault without a trace, since the card had none.
func (g *card) endDriver() bool {
	k := place(ClassDriver, -1, -1)
	_, had := g.faults[k]
	delete(g.faults, k)
	return had
}

// unfit reports whether any fault is in force.
func (g *card) unfit() bool {
	for _, f := range g.faults {
		if !f.over {
			return true
		}
	}
	return false
}

// exists reports whether the device still has the instance that a fault names.
func exists(d gpu.Device, k key) bool {
	return slices.ContainsFunc(d.MIG.Instances, func(i gpu.Instance) bool {
		return i.GI == k.gi && (k.ci < 0 || i.CI < 0 || i.CI == k.ci)
	})
}

// proved reports whether the figures are those of a GPU that has been reset.
// A figure that the card does not have counts for neither.
func proved(h *gpu.Health) bool {
	return h == nil || (h.Uncorrected == nil || *h.Uncorrected == 0) &&
		!h.RemapPending && !h.RemapFailed && !h.RetirePending && h.Recovery == gpu.RecoveryNone
}

// judge returns the faults in an answer. Counters by themselves are no fault: an
// uncorrected error may have been contained, and a pending remap
// waits for a reset while the GPU works on.
func judge(gr GPUReading) (all []complaint) {
	add := func(class Class, detail, needs string) {
		all = append(all, complaint{key: place(class, -1, -1), detail: detail, needs: needs})
	}
	if f := gr.Device.Fault; f != "" {
		if gr.Device.Gone || gr.Device.Lost {
			add(ClassLost, f, NeedsReset)
		} else {
			add(ClassUnreadable, f, NeedsNothing)
		}
	}
	switch err := gr.Err; {
	case err == nil || errors.Is(err, gpu.ErrNotSupported):
	case errors.Is(err, gpu.ErrNoDriver) || errors.Is(err, gpu.ErrReloaded):
		all = append(all, noDriver(err))
	case errors.Is(err, gpu.ErrLost) || errors.Is(err, gpu.ErrNotFound):
		add(ClassLost, err.Error(), NeedsReset)
	default:
		add(ClassUnreadable, err.Error(), NeedsNothing)
	}
	if h := gr.Health; h != nil {
		if h.RemapFailed {
			add(ClassRemapFailed, "no spare memory row is left for a broken one", NeedsReset)
		}
		if h.Recovery != gpu.RecoveryNone {
			add(ClassRecovery, fmt.Sprintf("the driver asks for recovery: %s", h.Recovery), string(h.Recovery))
		}
	}
	return all
}

// Verdicts returns what is unhealthy, by GPU and instance, the worst first.
func (m *Monitor) Verdicts() []Verdict {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []Verdict
	for u, g := range m.gpus {
		for k, f := range g.faults {
			if f.over {
				continue
			}
			all = append(all, Verdict{
				Subject: Subject{u, k.gi, k.ci}, Class: k.class, Xid: f.xid,
				Reason: f.reason(k.class), Since: f.since, Needs: f.needs,
			})
		}
	}
	slices.SortFunc(all, func(a, b Verdict) int {
		return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.GI, b.GI), cmp.Compare(a.CI, b.CI), cmp.Compare(rank(a.Class), rank(b.Class)))
	})
	return all
}

// reason is the sentence of a fault. It names when the fault began, not how long
// ago, so that it stays the same while nothing changes.
func (f *fault) reason(class Class) string {
	since := ", since " + f.since.UTC().Format(time.RFC3339)
	if f.since.IsZero() {
		since = "" // a state file that does not say
	}
	if f.xid != 0 {
		mean := meaningOf(f.xid)
		return fmt.Sprintf("Xid %d: %s%s; %s", f.xid, mean.what, since, mean.do)
	}
	do := map[Class]string{
		ClassLost:        doReboot,
		ClassRemapFailed: xids[64].do,
		ClassRecovery:    "drain the GPU and do that",
		ClassUnreadable:  "it is asked again by itself; if this stays, reset the GPU",
		ClassDriver:      "load the driver",
	}[class]
	if f.needs == NeedsRestart {
		do = "restart the agent's pod"
	}
	if do == "" {
		do = doReset
	}
	return fmt.Sprintf("%s: %s%s; %s", class, cmp.Or(f.detail, "no details are known"), since, do)
}

// Waiting returns which hardware work hangs and since when; an empty string
// where none does. It makes nothing unhealthy.
func (m *Monitor) Waiting() (what string, since time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.waiting, m.waitingSince
}

// Due returns when the next reading is wanted, which may have passed already;
// zero where nothing is unhealthy and nothing hangs. It is never later than one probe
// from now.
func (m *Monitor) Due(now time.Time) time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	next := m.lastRead.Add(m.probe)
	any := m.waiting != ""
	for _, g := range m.gpus {
		for _, f := range g.faults {
			if f.over {
				continue
			}
			any = true
			// The end of a hold need not wait for the next round.
			if end := f.last.Add(m.hold << f.strikes); end.After(m.lastRead) && end.Before(next) {
				next = end
			}
		}
	}
	switch limit := now.Add(m.probe); {
	case !any:
		return time.Time{}
	case m.lastRead.IsZero():
		return now
	case next.After(limit):
		return limit
	}
	return next
}

// Records returns the memory to be kept over a restart, sorted.
func (m *Monitor) Records() []Record {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all []Record
	for u, g := range m.gpus {
		for k, f := range g.faults {
			all = append(all, Record{
				GPU: u, GI: k.gi, CI: k.ci, Class: k.class, Xid: f.xid, Detail: f.detail, Needs: f.needs,
				Since: f.since.Round(0).UTC(), Last: f.last.Round(0).UTC(), Strikes: f.strikes, Over: f.over,
			})
		}
	}
	slices.SortFunc(all, func(a, b Record) int {
		return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.GI, b.GI), cmp.Compare(a.CI, b.CI), cmp.Compare(rank(a.Class), rank(b.Class)))
	})
	return all
}

// Restore takes in what an earlier process knew; it is for a Monitor that has
// seen nothing yet. sameBoot says that the machine has not been started anew
// since: otherwise only what a reboot does not repair is kept.
//
// A record without a GPU is dropped. One with a class that this version does not
// know becomes an unknown fault of the whole GPU: it is withdrawn for a minute rather
// than offered although a newer version had found it faulty. The GPU of a record is known from now
// on, so if the driver does not list it, it is lost.
func (m *Monitor) Restore(records []Record, sameBoot bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range records {
		if rank(r.Class) < 0 {
			r.Class, r.GI, r.CI = ClassUnknown, -1, -1
		}
		if !sameBoot && !rules[rank(r.Class)].boot {
			continue
		}
		g := m.knowLocked(r.GPU)
		if g == nil || len(g.faults) >= maxFaults {
			continue
		}
		f := &fault{
			xid: r.Xid, detail: clip(r.Detail), needs: clip(r.Needs), since: sane(r.Since), last: sane(r.Last),
			strikes: min(max(r.Strikes, 0), maxStrikes), over: r.Over,
		}
		if f.last.IsZero() {
			f.last = f.since
		}
		k := place(r.Class, r.GI, r.CI)
		if old := g.faults[k]; old == nil || old.over && !f.over {
			g.faults[k] = f
		}
	}
}

// sane returns a time that can be written again: one of a year that JSON cannot
// hold, in UTC, is no time.
func sane(t time.Time) time.Time {
	t = t.UTC()
	if t.Year() < 1 || t.Year() > 9999 {
		return time.Time{}
	}
	return t
}
