// SPDX-License-Identifier: Apache-2.0

package health

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

const (
	// DefaultHold and DefaultProbe are the defaults of Options.
	DefaultHold  = 60 * time.Second
	DefaultProbe = 10 * time.Second

	// flapWindow is how long a fault is remembered after its end.
	flapWindow = time.Hour
	// maxStrikes bounds the doublings of the hold: 2^4 = 16.
	maxStrikes = 4
	// maxStrangers bounds the GPUs that are known only from events. maxKnown bounds those that
	// readings, a caller or a state file may name, and maxFaults the faults of one GPU.
	maxStrangers = 64
	maxKnown     = 1024
	maxFaults    = 64
	// maxDetail bounds the driver's own text in a fault, in bytes.
	maxDetail = 300
)

// Options are a Monitor's settings.
type Options struct {
	// Ignored are the Xids that applications cause; they change nothing. Nil means
	// DefaultIgnored, and an empty slice ignores none.
	Ignored []uint64
	// Hold is how long a GPU must have been without a complaint before it is healthy again.
	// Zero means 60 s.
	Hold time.Duration
	// Probe is the time between readings while something is unhealthy. Zero means 10 s.
	Probe time.Duration
}

// Subject is a GPU, or one MIG instance of it. GI and CI are both -1 for a GPU. Only CI is -1
// for a whole GPU instance.
type Subject struct {
	GPU gpu.UUID
	GI  int
	CI  int
}

// Reading is the driver's answer about all GPUs.
type Reading struct {
	// Err is the error if nothing could be read. The other fields then mean nothing.
	Err error
	// Load identifies the loading of the driver that has answered (gpu.Inventory).
	Load string
	GPUs []GPUReading
}

// GPUReading is the driver's answer about one GPU.
type GPUReading struct {
	Device gpu.Device
	// Health is nil if the driver could not tell.
	Health *gpu.Health
	// Err is why Health could not be read. gpu.ErrNotSupported is no complaint.
	Err error
}

// Verdict is a fault in force.
type Verdict struct {
	Subject
	Class Class
	// Xid is the driver's error code; 0 if no Xid reported the fault.
	Xid uint64
	// Reason is a sentence for an operator: what, since when, and what to do.
	Reason string
	Since  time.Time
	// Needs is one of the Needs constants, or the driver's own text.
	Needs string
}

// Record is a fault in the state file. Faults that ended within the last hour have records too:
// the next such fault lasts longer.
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
	// Load is the loading of the driver at the last complaint. Reset is true if a reset has
	// been seen since then. Asked, Errors, Failed and Away are signs that only a reset removes;
	// see resetSigns.
	Load   string `json:"load,omitempty"`
	Reset  bool   `json:"reset,omitempty"`
	Asked  bool   `json:"asked,omitempty"`
	Errors bool   `json:"errors,omitempty"`
	Failed bool   `json:"failed,omitempty"`
	Away   bool   `json:"away,omitempty"`
	// Nameless is true if no complaint has named the GPU: the fault may be another GPU's.
	Nameless bool `json:"nameless,omitempty"`
}

// Monitor decides which GPUs are healthy. It is safe for several goroutines.
type Monitor struct {
	ignored     []uint64
	hold, probe time.Duration

	mu sync.Mutex // guards what follows
	// gpus has every GPU that a reading listed, or that Know or Restore named, and up to
	// maxStrangers others.
	gpus map[gpu.UUID]*card
	// waiting describes the work that hangs; empty if none does. waitingSince is its beginning.
	waiting      string
	waitingSince time.Time
	lastRead     time.Time // of the last reading, failed ones too
	load         string    // of the last reading that had it
}

// card is a GPU and its faults. known is false while only events have named it.
type card struct {
	known  bool
	faults map[key]*fault
}

// key identifies a fault of a GPU. There is one fault for each class, so a storm of Xids cannot
// fill the memory.
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
	resetSigns
}

// resetSigns are the signs of a reset since a fault's last complaint.
type resetSigns struct {
	reset bool   // a reset has been seen
	load  string // the loading of the driver at that complaint; empty if not known
	// Signs that were seen since the fault began, and that only a reset removes: the driver
	// asked for a reset, it counted uncorrected errors, no spare row was left, or it had lost
	// the GPU.
	asked, errors, failed, away bool
	// nameless is true if no complaint has named the GPU.
	nameless bool
}

// complaint is one reason why a subject is unhealthy.
type complaint struct {
	key
	xid    uint64
	detail string
	needs  string
	away   bool   // the driver has lost the GPU
	load   string // the loading of the driver that complains; empty if not known
	// nameless is true if the complaint is about all GPUs, since it named none.
	nameless bool
}

// resetSigns returns the signs of a fault that begins with this complaint.
func (c *complaint) resetSigns() resetSigns {
	return resetSigns{load: c.load, away: c.away, nameless: c.nameless}
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

// Know names GPUs that an earlier process has seen. If the next reading does not list one of
// them, it is lost.
func (m *Monitor) Know(uuids ...gpu.UUID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, u := range uuids {
		m.knowLocked(u)
	}
}

// knowLocked returns a GPU's card, and makes it if need be. It returns nil if there is no room,
// or the UUID is empty.
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

// Event adds an event from the driver, and reports whether a verdict changed.
//
// An Xid without a GPU affects all known GPUs. A loss without a GPU affects none until a
// reading shows which GPU it is.
func (m *Monitor) Event(e gpu.Event, now time.Time) (changed bool) {
	var c complaint
	switch e.Kind {
	case gpu.EventXid:
		if m.Ignores(e) {
			return false
		}
		mean := meaningOf(e.Xid)
		c = complaint{key: faultKey(mean.class, e.GI, e.CI), xid: e.Xid, needs: mean.needs}
	case gpu.EventLost:
		if e.GPU == "" {
			return false
		}
		c = complaint{
			key: faultKey(ClassLost, -1, -1), detail: "the driver reports the GPU as lost", needs: NeedsReset,
			away: true,
		}
	default:
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	c.load = m.load
	if e.GPU == "" {
		c.key, c.nameless = faultKey(c.class, -1, -1), true // an instance's number means nothing without its GPU
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

// Ignores reports whether an event is an Xid that applications cause, and changes nothing.
func (m *Monitor) Ignores(e gpu.Event) bool {
	return e.Kind == gpu.EventXid && slices.Contains(m.ignored, e.Xid)
}

// strangerLocked adds a GPU that no reading has listed yet, since its event may have come
// first. The next reading that does not list it removes it. It returns nil if there are too
// many.
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

// faultKey returns the key of a fault: the named instance if the class is limited to one, else the
// GPU.
func faultKey(class Class, gi, ci int) key {
	if r := rank(class); gi < 0 || r < 0 || !rules[r].instance {
		return key{-1, -1, class}
	}
	return key{gi, max(ci, -1), class}
}

// complain adds a complaint, and reports whether it changed a verdict.
func (g *card) complain(c complaint, now time.Time) bool {
	f := g.faults[c.key]
	if f == nil && len(g.faults) >= maxFaults {
		// No GPU has that many instances. The numbers may be wrong, but the GPU is faulty.
		c.key = faultKey(c.class, -1, -1)
		f = g.faults[c.key]
	}
	if f == nil {
		g.faults[c.key] = &fault{
			xid: c.xid, detail: clip(c.detail), needs: c.needs, since: now, last: now, resetSigns: c.resetSigns(),
		}
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
	outlook := f.outlook(c.class)
	f.reset, f.load, f.away, f.nameless = false, c.load, f.away || c.away, f.nameless && c.nameless
	switch {
	case f.over:
		f.over, f.since, f.resetSigns = false, now, c.resetSigns()
	case c.class == ClassRecovery && c.xid == 0 && c.needs != f.needs:
		// The driver's request replaces its last one, and also an Xid that only reported that
		// there is one.
	case needsRank(c.needs) <= needsRank(f.needs):
		return f.outlook(c.class) != outlook // else the operator learns nothing new
	}
	f.xid, f.detail, f.needs = c.xid, clip(c.detail), c.needs
	return true
}

// needsRank orders Needs by their cost. The driver's own text ranks highest.
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

// Verdicts returns the faults in force, ordered by GPU and instance, the worst first.
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
				Reason: f.reason(k.class) + f.outlook(k.class), Since: f.since, Needs: f.needs,
			})
		}
	}
	slices.SortFunc(all, func(a, b Verdict) int {
		return cmp.Or(cmp.Compare(a.GPU, b.GPU), cmp.Compare(a.GI, b.GI), cmp.Compare(a.CI, b.CI),
			cmp.Compare(rank(a.Class), rank(b.Class)))
	})
	return all
}

// reason returns the sentence of a fault. It has the time at which the fault began, and not its
// age, so that it stays the same while nothing changes.
func (f *fault) reason(class Class) string {
	since := ", since " + f.since.UTC().Format(time.RFC3339)
	if f.since.IsZero() {
		since = "" // from a state file without the time
	}
	if f.xid != 0 {
		mean := meaningOf(f.xid)
		return fmt.Sprintf("Xid %d: %s%s; %s", f.xid, mean.what, since, mean.do)
	}
	do := map[Class]string{
		ClassLost:        doReboot,
		ClassRemapFailed: xids[64].do,
		ClassRecovery:    "drain the GPU and do that",
		ClassUnreadable:  "the agent asks again; if the fault stays, reset the GPU",
		ClassDriver:      "load the driver",
	}[class]
	if f.needs == NeedsRestart {
		do = "restart the agent's pod"
	}
	switch {
	case do != "":
	case f.waits(class):
		do = doReset
	default:
		do = "it is watched for a while"
	}
	return fmt.Sprintf("%s: %s%s; %s", class, cmp.Or(f.detail, "no details are known"), since, do)
}

// outlook returns what a fault still needs if it ends only after a reset; empty for others.
func (f *fault) outlook(class Class) string {
	switch {
	case !f.waits(class):
		return ""
	case f.reset:
		return "; a reset has been seen, and the GPU is watched"
	case class == ClassLost && f.away:
		return "; it stays unhealthy until the driver has it again"
	}
	return "; it stays unhealthy until a reset is seen"
}

// Waiting returns the hardware work that hangs and since when; an empty string if none does.
// Work that hangs makes nothing unhealthy.
func (m *Monitor) Waiting() (what string, since time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.waiting, m.waitingSince
}

// Due returns the time of the next reading, which may have passed already; zero if nothing is
// unhealthy and nothing hangs. It is at most one probe from now.
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
			// A hold may end before the next probe is due.
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
