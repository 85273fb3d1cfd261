// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

var long = flag.Bool("long", false, "kill the meter in 100 histories instead of 10")

var errFull = errors.New("no space left on device")

// paper is a journal in memory, which outlives a meter.
type paper struct {
	text  []byte
	full  bool // the disk is, but for so many bytes
	left  int
	cut   int // how many bytes the next write puts down before its process is killed; -1 for all
	began int // where the last segment does
	most  int // size at which the next one begins
	// dropped is what is told of at the next Tidy.
	dropped usage.Dropped
}

func (p *paper) Last(apply func(*usage.Record)) error {
	for line := range bytes.Lines(p.text[p.began:]) {
		if r := usage.Parse(line); r != nil {
			apply(r)
		}
	}
	return nil
}

func (p *paper) Append(lines []byte) (int, error) {
	if p.full {
		n := min(len(lines)/2, p.left) // a part of it finds room
		p.left -= n
		p.put(lines[:n])
		return n, errFull
	}
	if p.cut >= 0 && p.cut < len(lines) {
		lines = lines[:p.cut]
	}
	p.put(lines)
	return len(lines), nil
}

func (p *paper) put(lines []byte) {
	if n := len(p.text); n > 0 && p.text[n-1] != '\n' && len(lines) > 0 {
		p.text = append(p.text, '\n')
	}
	p.text = append(p.text, lines...)
}

func (p *paper) Full() bool  { return len(p.text)-p.began > p.most }
func (p *paper) Fresh() bool { return len(p.text) == p.began }
func (p *paper) Tidy() error { return nil }

func (p *paper) Dropped() []usage.Record {
	out := p.dropped.Records()
	p.dropped = nil
	return out
}

func (p *paper) Flush() error {
	if p.full {
		return errFull
	}
	return nil
}

func (p *paper) Next(first []byte) error {
	if p.full {
		return errFull
	}
	p.put(nil)
	if n := len(p.text); n > 0 && p.text[n-1] != '\n' {
		p.text = append(p.text, '\n')
	}
	p.began = len(p.text)
	p.text = append(p.text, first...)
	return nil
}

// node is a node in memory: what the ledger has, what containers use, and a meter that may be
// killed.
type node struct {
	*testing.T
	now    time.Time
	ledger *ledger.Ledger
	meter  *Meter
	paper  *paper
	seen   []status.Container
	events []string
	heard  bool
}

func newNode(t *testing.T) *node {
	n := &node{T: t, now: noon, paper: &paper{cut: -1, most: 1 << 30}, heard: true}
	n.start()
	return n
}

func (n *node) clock() time.Time { return n.now }

// start starts a process: a ledger without anything, and a meter on the journal.
func (n *node) start() {
	n.ledger = ledger.New(func() {}, n.clock)
	inv := &gpu.Inventory{GPUs: []gpu.Device{{Index: 0, UUID: "GPU-0", Memory: 80 << 10}, {Index: 1, UUID: "GPU-1", Memory: 80 << 10}}}
	n.meter = New(Options{Ledger: n.ledger, Journal: n.paper, Inventory: func() *gpu.Inventory { return inv }, Heard: func() bool { return n.heard },
		Used: func() []status.Container { return n.seen }, Tell: func(p workload.Pod, reason, message string) {
			n.events = append(n.events, p.String()+" "+reason)
		}, IdleAfter: time.Hour, Version: "test", Now: n.clock, Log: slog.New(slog.DiscardHandler)})
	if err := n.meter.start(); err != nil {
		n.Fatal(err)
	}
}

func (n *node) pass(d time.Duration) { n.now = n.now.Add(d) }

func (n *node) turn(sample bool) {
	n.Helper()
	n.meter.turn(context.Background(), sample)
}

func record(u gpu.UUID, first, last int) ledger.Record {
	return ledger.Record{Owner: ledger.DevicePlugin, Resource: "example.com/gpu-mem", Grants: []ledger.Grant{{GPU: u,
		Piece: piece.Units{Set: piece.Set{{First: first, Last: last}}, Unit: 1024}, Cap: piece.CapOf(uint64(last-first+1) << 30)}}}
}

func (n *node) take(id string, r ledger.Record, pod string) {
	n.Helper()
	if _, err := n.ledger.Take(ledger.Request{ID: id, Owner: r.Owner, Tier: r.Tier, Resource: r.Resource, Grants: r.Grants, Overlap: true}); err != nil {
		n.Fatal(err)
	}
	if pod != "" {
		n.hold(id, pod)
	}
}

func (n *node) hold(id, pod string) {
	n.ledger.SetHolder(id, ledger.Holder{Pod: workload.Pod{Namespace: "work", Name: pod, UID: "uid-" + pod}, Container: "main"})
}

func (n *node) uses(id string, u gpu.UUID, mib uint64) {
	n.seen = slices.DeleteFunc(n.seen, func(c status.Container) bool { return c.Allocation == id && c.GPU == string(u) })
	n.seen = append(n.seen, status.Container{Allocation: id, GPU: string(u), UsedMiB: &mib})
}

func (n *node) series(pod string) (out usage.Series, ok bool) {
	for _, s := range n.meter.board.shown.Series {
		if s.Pod == pod {
			return s, true
		}
	}
	return out, false
}

// lines are the events of a journal, in order.
func (n *node) lines() (out []string) {
	for line := range bytes.Lines(n.paper.text) {
		if r := usage.Parse(line); r != nil {
			out = append(out, string(r.Event))
		}
	}
	return out
}

// The life of a pod: a line for each thing that happens, totals that are right, and series
// that go two scrapes after its end.
func TestLife(t *testing.T) {
	n := newNode(t)
	n.turn(false)
	n.take("a", record("GPU-0", 0, 19), "")
	n.turn(false)
	if len(n.meter.Scraped().Series) != 0 {
		t.Error("a container that nobody has named has a series")
	}
	n.pass(time.Second)
	n.hold("a", "web")
	n.uses("a", "GPU-0", 1024)
	n.turn(false)
	for range 60 {
		n.pass(time.Minute)
		n.turn(true)
	}
	s, _ := n.series("web")
	if want := .25 * 3601; s.GrantedGPU != want || s.GrantedMiB != 20<<10*3601 || s.UsedMiB != 1024*3601 || s.UsedGPU != want {
		t.Errorf("after an hour: %+v", s)
	}
	n.pass(17*time.Second + 5)
	if _, ok := n.ledger.Release(ledger.DevicePlugin, "a"); !ok {
		t.Fatal("not released")
	}
	n.pass(3 * time.Second)
	n.turn(false)
	if s, _ := n.series("web"); s.GrantedGPU != .25*(3618*time.Second+5).Seconds() || math.Abs(s.UsedMiB-1024*3618) > 1 {
		t.Errorf("at its end: %+v", s)
	}
	if got := fmt.Sprint(n.lines()[:3]) + fmt.Sprint(n.lines()[len(n.lines())-1]); got != "[began started allocated]released" {
		t.Errorf("the journal has %s", n.lines())
	}
	if len(n.meter.board.shown.Now) != 0 {
		t.Errorf("ended, and holds %+v", n.meter.board.shown.Now)
	}
	for i, want := range []int{1, 1, 0, 0} {
		n.turn(false)
		if got := len(n.meter.Scraped().Series); got != want {
			t.Errorf("scrape %d after the end has %d series, want %d", i+1, got, want)
		}
	}
}

// What a spot pod gets is counted in its tier, until a guaranteed one has it.
func TestTiersAreCounted(t *testing.T) {
	n := newNode(t)
	spot := record("GPU-0", 0, 39)
	spot.Tier, spot.Resource = ledger.Spot, spot.Resource+".spot"
	n.take("s", spot, "batch")
	n.turn(false)
	n.pass(10 * time.Second)
	n.take("g", record("GPU-0", 0, 79), "web")
	n.turn(false)
	n.pass(time.Minute)
	n.turn(true)
	if s, _ := n.series("batch"); s.Tier != ledger.Spot || s.GrantedGPU != .5*10 || s.Share != 0 {
		t.Errorf("spot: %+v", s)
	}
	if s, _ := n.series("web"); s.Tier != ledger.Guaranteed || s.GrantedGPU != 60 || s.LentGPU != 0 {
		t.Errorf("guaranteed: %+v", s)
	}
	if _, ok := n.ledger.Release(ledger.DevicePlugin, "g"); !ok {
		t.Fatal("not released")
	}
	n.pass(time.Second)
	n.turn(false)
	n.pass(9 * time.Second)
	n.turn(true)
	if s, _ := n.series("batch"); s.GrantedGPU != .5*10+.5*9 || s.Share != .5 {
		t.Errorf("spot, again: %+v", s)
	}
	n.take("h", record("GPU-0", 0, 79), "web")
	n.turn(false)
	n.start()
	if g := n.meter.book.Of("s"); g == nil || g.Tier != ledger.Spot || g.Held[0].Yielded != 1 {
		t.Errorf("after a restart: %+v", g)
	}
}

// A parked container's time is not used time, and it is not idle, also if the driver lists its processes.
func TestParkedIsNotUsed(t *testing.T) {
	n := newNode(t)
	s := record("GPU-0", 0, 39)
	s.Tier = ledger.Spot
	n.take("s", s, "batch")
	n.uses("s", "GPU-0", 1000)
	n.turn(true)
	n.pass(10 * time.Second)
	n.turn(true)
	a, _ := n.ledger.Get("s")
	if !n.ledger.SetParked("s", a.Epoch, 1000<<20, n.now) {
		t.Fatal("not parked")
	}
	n.turn(false)
	n.pass(3 * time.Hour)
	n.turn(true)
	if s, _ := n.series("batch"); s.UsedMiB != 1000*10 || s.UsedGPU != .5*10 {
		t.Errorf("while it is parked it has used %+v", s)
	}
	if g := n.meter.book.Of("s"); g.ParkedMiB != 1000 || g.Parked.IsZero() {
		t.Errorf("parked since %v with %d MiB", g.Parked, g.ParkedMiB)
	}
	for _, c := range n.meter.Conditions() {
		t.Errorf("while it is parked: %s", c.Message)
	}
	if !n.ledger.Unpark("s", a.Epoch) {
		t.Fatal("not restored")
	}
	n.turn(false)
	n.pass(10 * time.Second)
	n.turn(true)
	if s, _ := n.series("batch"); s.UsedMiB != 1000*20 || s.UsedGPU != .5*20 {
		t.Errorf("afterwards it has used %+v", s)
	}
}

// What is seen of an allocation's ID once two holders of it have ended is the last one's.
func TestTwoHoldersEndBeforeALook(t *testing.T) {
	n := newNode(t)
	n.take("a", record("GPU-0", 0, 19), "first")
	n.uses("a", "GPU-0", 10)
	n.turn(true)
	n.pass(10 * time.Second)
	n.ledger.Release(ledger.DevicePlugin, "a")
	n.take("a", record("GPU-0", 0, 19), "second")
	n.uses("a", "GPU-0", 1000)
	n.pass(time.Second)
	n.ledger.Release(ledger.DevicePlugin, "a")
	n.turn(false)
	first, _ := n.series("first")
	second, _ := n.series("second")
	if first.UsedMiB != 100 || second.UsedMiB != 1000 {
		t.Errorf("the first used %v and the second %v MiB seconds, want 100 and 1000", first.UsedMiB, second.UsedMiB)
	}
}

// A claim that was allocated anew while the agent was away has another GPU under the same ID. Its
// account went on as that of the GPU that it had before.
func TestIDThatStandsForOtherPieces(t *testing.T) {
	n := newNode(t)
	n.take("a", record("GPU-0", 0, 19), "first")
	n.turn(true)
	n.pass(time.Minute)
	n.turn(true)
	n.start() // it is killed, and its records are lost
	n.pass(time.Hour)
	if _, err := n.ledger.Found("a", record("GPU-1", 0, 39), time.Time{}); err != nil {
		t.Fatal(err)
	}
	n.hold("a", "first") // a pod of the same claim, before a container tells which
	n.turn(true)
	n.pass(time.Minute)
	n.turn(true)
	open := n.meter.book.Open()
	if len(open) != 1 || open[0].Held[0].GPU != "GPU-1" || !open[0].Since.Equal(n.now.Add(-time.Minute)) {
		t.Errorf("open are %+v", open)
	}
	for _, s := range n.meter.board.shown.Series {
		if want := map[gpu.UUID]float64{"GPU-0": .25 * 60, "GPU-1": .5 * 60}[s.GPU]; s.GrantedGPU != want {
			t.Errorf("%s comes to %v GPU seconds, want %v", s.GPU, s.GrantedGPU, want)
		}
	}
}

// A new segment's first record vouches for all that the one before did.
func TestASegmentBeginsWithinAMillisecond(t *testing.T) {
	n := newNode(t)
	n.paper.most = 0
	n.pass(1500 * time.Microsecond)
	n.take("a", record("GPU-0", 0, 19), "web")
	n.turn(false)
	before := n.meter.book.Last()
	n.start()
	if n.meter.past.lastRecord.Before(before) {
		t.Errorf("the next process goes by %s, and %s was shown", n.meter.past.lastRecord, before)
	}
}

// A disk that is full stops nothing: the node says so, counters stand still and do not fall,
// and all is written when there is room again.
func TestFullDisk(t *testing.T) {
	n := newNode(t)
	n.take("a", record("GPU-0", 0, 19), "web")
	n.uses("a", "GPU-0", 1024)
	n.turn(true)
	n.pass(time.Minute)
	n.turn(true)
	before, _ := n.series("web")
	n.paper.full, n.paper.left = true, 300
	for range 5 {
		n.pass(time.Minute)
		n.turn(true)
	}
	n.take("b", record("GPU-1", 0, 9), "new")
	n.turn(false)
	if s, _ := n.series("web"); s != before {
		t.Errorf("unwritten totals are shown: %+v, want %+v", s, before)
	}
	if c := n.meter.Conditions(); len(c) != 1 || c[0].Reason != status.UsageUnwritten || n.meter.Scraped().Written {
		t.Errorf("the node says %+v", c)
	}
	if len(n.meter.board.shown.Now) != 2 {
		t.Errorf("what is held now: %+v", n.meter.board.shown.Now)
	}
	n.ledger.Release(ledger.DevicePlugin, "b")
	n.paper.full = false
	n.pass(time.Minute)
	n.turn(true)
	if s, _ := n.series("web"); s.UsedMiB != 1024*7*60 || s.GrantedGPU != .25*7*60 {
		t.Errorf("with room again: %+v", s)
	}
	if c := n.meter.Conditions(); len(c) != 0 || !n.meter.Scraped().Written {
		t.Errorf("the node says %+v", c)
	}
	if got := strings.Count(fmt.Sprint(n.lines()), "allocated"); got != 2 {
		t.Errorf("%d allocations are in the journal, of 2: %s", got, n.lines())
	}

	// So long that records are lost: the book makes up for them.
	n.paper.full = true
	for i := range mostPending + 50 {
		n.meter.Note(usage.Record{Event: usage.Refused, Count: i})
		n.turn(false)
	}
	n.take("c", record("GPU-1", 20, 29), "late")
	n.pass(time.Minute)
	n.turn(true)
	n.paper.full = false
	n.turn(false)
	if lost := n.meter.Scraped().Lost; lost == 0 {
		t.Error("nothing is said to be lost")
	}
	n.kill()
	n.heard = false
	n.start()
	if g := n.meter.book.Of("c"); g == nil || !g.Since.Equal(noon.Add(7*time.Minute)) {
		t.Errorf("after records were lost, the journal has %+v", g)
	}
}

func (n *node) kill() { n.meter = nil }

// A kill -9 at random under load, also in the middle of a write: nothing is counted twice, at
// most one sample interval of use is lost for each kill, what is granted is what the ledger's
// times say to the nanosecond, and no counter falls while it is shown.
func TestKilledAtRandom(t *testing.T) {
	seeds := uint64(4)
	switch {
	case *long:
		seeds = 100
	case testing.Short():
		seeds = 2 // make test-all has all
	}
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { killAtRandom(t, rand.New(rand.NewPCG(seed, 3))) })
	}
}

// held is an allocation as the test knows it.
type held struct {
	id, pod      string
	record       ledger.Record
	since, until time.Time
	mib          uint64
	used         float64 // MiB seconds
	slack        float64 // what may be lost of that
	kills        int
}

func killAtRandom(t *testing.T, r *rand.Rand) {
	n := newNode(t)
	n.paper.most = 6000
	var open, all []*held
	next, slot := 0, make([]bool, 16)
	shown := map[usage.Key]usage.Series{}
	check := func() {
		t.Helper()
		now := map[usage.Key]usage.Series{}
		for _, s := range n.meter.board.shown.Series {
			now[s.Key] = s
			if o, ok := shown[s.Key]; ok && (s.GrantedGPU < o.GrantedGPU || s.GrantedMiB < o.GrantedMiB || s.UsedMiB < o.UsedMiB || s.UsedGPU < o.UsedGPU) {
				t.Fatalf("a counter has fallen: %+v\nfrom %+v", s, o)
			}
		}
		shown = now
	}
	pass := func(d time.Duration) {
		n.pass(d)
		for _, h := range open {
			h.used += float64(h.mib) * d.Seconds()
		}
	}
	sampleEvery := 0 * time.Second
	for range 300 {
		d := time.Duration(r.Int64N(int64(5*time.Second))) + 1
		pass(d)
		sampleEvery += d
		switch k := r.IntN(20); {
		case k < 5:
			i := slices.Index(slot, false)
			if i < 0 {
				break
			}
			next++
			h := &held{id: fmt.Sprintf("id-%d", i), pod: fmt.Sprintf("pod-%d", next), record: record(gpu.UUID(fmt.Sprintf("GPU-%d", i/8)), i%8*10, i%8*10+9), since: n.now, mib: uint64(r.IntN(10 << 10))}
			slot[i] = true
			n.take(h.id, h.record, h.pod)
			n.uses(h.id, h.record.Grants[0].GPU, h.mib)
			// Before its first sample nobody knows what it uses.
			h.slack = float64(h.mib) * 61
			open, all = append(open, h), append(all, h)
		case k < 8 && len(open) > 0:
			i := r.IntN(len(open))
			h := open[i]
			n.ledger.Release(ledger.DevicePlugin, h.id)
			h.until, open = n.now, slices.Delete(open, i, i+1)
			var at int
			fmt.Sscanf(h.id, "id-%d", &at)
			slot[at] = false
		case k < 9:
			killed(t, n, r, open, all)
			check()
		default:
			n.turn(sampleEvery >= DefaultEvery)
			if sampleEvery >= DefaultEvery {
				sampleEvery = 0
			}
			check()
		}
	}
	n.turn(true)
	check()
	judge(t, n, all)
}

// killed ends the process, perhaps in the middle of its write, and starts the next one on what
// there is.
func killed(t *testing.T, n *node, r *rand.Rand, open, all []*held) {
	t.Helper()
	if r.IntN(2) == 0 {
		n.meter.look(context.Background(), n.now)
		if r.IntN(2) == 0 {
			n.meter.sample(context.Background(), n.now)
		}
		if n.meter.outbox.waiting > 0 {
			n.paper.cut = r.IntN(len(n.meter.outbox.pending) + 1)
			if err := n.meter.writePending(n.now); err != nil {
				t.Fatal(err)
			}
			n.paper.cut = -1
		}
	}
	down := time.Duration(r.IntN(int(time.Second)))
	n.pass(down)
	n.start()
	taken := map[string]time.Time{}
	for _, h := range open {
		h.used += float64(h.mib) * down.Seconds()
		// The state's journal knows when it was taken, as long as its container has not
		// started.
		if r.IntN(2) == 0 {
			taken[h.id] = h.since
		}
		if _, err := n.ledger.Found(h.id, h.record, taken[h.id]); err != nil {
			t.Fatal(err)
		}
		n.hold(h.id, h.pod)
	}
	written := n.written()
	for _, h := range all {
		g := n.meter.book.Of(h.id)
		known := g != nil && g.Since.Equal(h.since)
		// A write that was cut may have recorded a grant without its holder. The grant is then given
		// to the holder that is seen next.
		unnamed := g != nil && g.Pod == ""
		at := taken[h.id]
		if h.until.IsZero() {
			h.kills++
			h.slack += float64(h.mib) * 62
			if !known && at.IsZero() && unnamed {
				h.since = g.Since
			} else if !known && at.IsZero() { // nobody had written it down: it begins when the ledger takes it over
				h.used -= float64(h.mib) * n.now.Sub(h.since).Seconds()
				h.since = n.now
			}
			continue
		}
		// Its end may be known to nobody.
		i := slices.IndexFunc(open, func(o *held) bool { return o.id == h.id })
		until := h.until
		switch {
		case known && unnamed:
			until = h.since
		case known && i < 0:
			until = n.meter.past.lastRecord
		case known && at.IsZero():
			until = n.now
		case known:
			until = at
		case !written[fmt.Sprint(h.id, h.since.UnixNano())]:
			until = h.since // nor its beginning
		}
		h.used -= float64(h.mib) * h.until.Sub(until).Seconds()
		h.slack += float64(h.mib) * 62 * truth(known)
		h.until = until
	}
	n.turn(false)
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// written are the allocations that the journal has, with their times.
func (n *node) written() map[string]bool {
	out := map[string]bool{}
	for line := range bytes.Lines(n.paper.text) {
		if r := usage.Parse(line); r != nil && r.Event == usage.Allocated {
			out[fmt.Sprint(r.Allocation, r.Time.UnixNano())] = true
		}
	}
	return out
}

// judge compares the journal's account with what was.
func judge(t *testing.T, n *node, all []*held) {
	t.Helper()
	b := usage.NewBook(nil)
	totals := map[string]usage.Amounts{}
	for line := range bytes.Lines(n.paper.text) {
		if r := usage.Parse(line); r != nil {
			b.Apply(r)
		}
	}
	for _, h := range all {
		k := usage.Key{Namespace: "work", Pod: h.pod, Container: "main", GPU: h.record.Grants[0].GPU}
		if h.until.IsZero() {
			for _, s := range b.Series(n.now) {
				if s.Key == k {
					totals[h.pod] = s.Amounts
				}
			}
		} else if s, ok := b.Ended(k); ok {
			totals[h.pod] = s.Amounts
		}
	}
	for _, h := range all {
		got, end := totals[h.pod], h.until
		if end.IsZero() {
			end = n.now
		}
		if want := 10. / 80 * end.Sub(h.since).Seconds(); math.Abs(got.GrantedGPU-want) > 1e-9 {
			t.Errorf("%s was granted %v GPU seconds, want %v (%d kills)", h.pod, got.GrantedGPU, want, h.kills)
		}
		if got.UsedMiB > h.used+float64(h.mib)/1000+1 {
			t.Errorf("%s used %v MiB seconds, and %v are counted: something is counted twice", h.pod, h.used, got.UsedMiB)
		}
		if got.UsedMiB < h.used-h.slack-1 {
			t.Errorf("%s used %v MiB seconds, and %v are counted: more than an interval for each of %d kills is lost", h.pod, h.used, got.UsedMiB, h.kills)
		}
	}
}

// A grant that nobody uses for an hour is told of, once, until somebody does; where it is not
// known what is used, nobody is idle.
func TestIdleGrants(t *testing.T) {
	n := newNode(t)
	n.take("a", record("GPU-0", 0, 19), "lazy")
	n.take("b", record("GPU-0", 20, 29), "busy")
	n.take("c", record("GPU-1", 0, 9), "unknown")
	n.uses("a", "GPU-0", 0)
	n.uses("b", "GPU-0", 100)
	n.seen = append(n.seen, status.Container{Allocation: "c", GPU: "GPU-1"})
	step := func(minutes int) {
		t.Helper()
		for range minutes {
			n.pass(time.Minute)
			n.turn(true)
		}
	}
	step(59)
	if c := n.meter.Conditions(); len(c) != 0 || len(n.events) != 0 {
		t.Errorf("after less than an hour: %+v, %q", c, n.events)
	}
	step(2)
	c := n.meter.Conditions()
	if len(c) != 1 || c[0].Reason != status.GrantIdle || c[0].Subject != "a" || c[0].Type != status.Noted || !c[0].Since.Equal(noon) {
		t.Errorf("after an hour: %+v", c)
	}
	idle := map[string]time.Duration{}
	for _, i := range n.meter.Scraped().Idle {
		idle[i.Pod] = i.For
	}
	if len(idle) != 2 || idle["lazy"] != 61*time.Minute || idle["busy"] != 0 {
		t.Errorf("idle are %v", idle)
	}
	// A restart does not begin the hour anew.
	n.kill()
	n.start()
	for id, first := range map[string]int{"a": 0, "b": 20} {
		last := first + 19
		if id == "b" {
			last = 29
		}
		if _, err := n.ledger.Found(id, record("GPU-0", first, last), time.Time{}); err != nil {
			t.Fatal(err)
		}
	}
	n.hold("a", "lazy")
	n.hold("b", "busy")
	step(1)
	if c := n.meter.Conditions(); len(c) != 1 || !c[0].Since.Equal(noon) {
		t.Errorf("after a restart: %+v", c)
	}
	if len(n.events) == 0 || n.events[0] != "work/lazy GrantIdle" {
		t.Errorf("told: %q", n.events)
	}
	n.uses("a", "GPU-0", 5)
	step(1)
	if c := n.meter.Conditions(); len(c) != 0 {
		t.Errorf("it is used again: %+v", c)
	}
}

// Labels are asked for until the runtime has the pod, which has its devices before it has a
// sandbox, and only the keys that are wanted are written.
func TestLabels(t *testing.T) {
	n := newNode(t)
	asked := 0
	n.meter.opts.Keys = []string{"team"}
	n.meter.opts.Labels = func(context.Context) (map[string]map[string]string, error) {
		asked++
		of := map[string]map[string]string{}
		if asked > 1 {
			of["uid-bare"] = map[string]string{"secret": "y"}
		}
		if asked > 2 {
			of["uid-web"] = map[string]string{"team": "x", "secret": "y"}
		}
		return of, nil
	}
	n.take("a", record("GPU-0", 0, 19), "web")
	n.take("b", record("GPU-0", 20, 29), "bare")
	for range 5 {
		n.pass(time.Second)
		n.turn(false)
	}
	if asked != 3 {
		t.Errorf("asked %d times, want 3", asked)
	}
	if g := n.meter.book.Of("a"); len(g.Labels) != 1 || g.Labels["team"] != "x" {
		t.Errorf("labels are %v", g.Labels)
	}
	if bytes.Contains(n.paper.text, []byte("secret")) {
		t.Error("a label that nobody wants is in the journal")
	}
}

// What the driver says of streaming multiprocessors counts for the time since the sample
// before, and nothing does where it says nothing.
func TestSMTime(t *testing.T) {
	n := newNode(t)
	n.take("a", record("GPU-0", 0, 19), "web")
	n.take("b", record("GPU-1", 0, 19), "mig")
	n.uses("a", "GPU-0", 10)
	n.uses("b", "GPU-1", 10)
	var since []time.Duration // how far back it is asked, each time
	n.meter.opts.Sampled = func(_ context.Context, at time.Time) []status.Container {
		since = append(since, n.meter.opts.Now().Sub(at))
		out := slices.Clone(n.seen)
		out[0].SMPercent = new(float64(25))
		return out
	}
	gaps := []time.Duration{time.Minute, 30 * time.Second, 2 * time.Minute, 30 * time.Second}
	for _, gap := range gaps {
		n.pass(gap)
		n.turn(true)
	}
	if !slices.Equal(since, gaps) {
		t.Errorf("it asked for %v, want the time since the sample before, %v", since, gaps)
	}
	if s, _ := n.series("web"); !s.SMKnown || s.SM != 60 {
		t.Errorf("web has %v seconds of all multiprocessors, want 60", s.SM)
	}
	if s, _ := n.series("mig"); s.SMKnown {
		t.Errorf("mig has %v, and nobody knows", s.SM)
	}
}

// The next holder of a claim is charged from when it has it, the first one until then.
func TestHandedOn(t *testing.T) {
	n := newNode(t)
	n.take("a", record("GPU-0", 0, 19), "first")
	n.turn(true)
	n.pass(10 * time.Minute)
	n.hold("a", "second")
	n.turn(true)
	n.pass(5 * time.Minute)
	n.turn(true)
	first, _ := n.series("first")
	second, _ := n.series("second")
	if first.GrantedGPU != .25*600 || second.GrantedGPU != .25*300 {
		t.Errorf("charged are %v and %v GPU seconds", first.GrantedGPU, second.GrantedGPU)
	}
}

// Most of the agent's rounds change nothing, and cost the account nothing: it looks again
// where somebody came, went or got a name, and where something is still to be learned.
func TestRoundsWithoutNews(t *testing.T) {
	n := newNode(t)
	woken := func(what string, want bool) {
		t.Helper()
		n.meter.Round()
		got := len(n.meter.news) > 0
		if got {
			<-n.meter.news
		}
		if got != want {
			t.Errorf("%s: it looks: %v, want %v", what, got, want)
		}
	}
	woken("before the first look", true)
	n.turn(false)
	woken("nothing has happened", false)
	n.take("a", record("GPU-0", 0, 19), "")
	woken("an allocation", true)
	n.turn(false)
	woken("nothing since", false)
	h := ledger.Holder{Pod: workload.Pod{Namespace: "work", Name: "web", UID: "1"}, Container: "main"}
	n.ledger.SetHolder("a", h)
	woken("its holder is known", true)
	n.turn(false)
	n.ledger.SetHolder("a", h)
	woken("the same holder again", false)
	n.ledger.Release(ledger.DevicePlugin, "a")
	woken("its end", true)
	n.turn(false)
	woken("nothing since its end", false)
}

// counts of a journal's records by namespace; those of refusals have a "!".
func (n *node) counts() map[string]int {
	out := map[string]int{}
	for line := range bytes.Lines(n.paper.text) {
		switch r := usage.Parse(line); {
		case r == nil:
		case r.Event == usage.Refused:
			out["!"+r.Namespace]++
		case r.Event == usage.Killed, r.Event == usage.Evicted, r.Event == usage.Cut, r.Event == usage.Lost, r.Event == usage.Began:
			out[string(r.Event)+r.Namespace] += max(1, r.Count)
		}
	}
	return out
}

func of(event usage.Event, namespace string) usage.Record {
	return usage.Record{Event: event, Holder: usage.Holder{Namespace: namespace}}
}

// More refusals than fit between two looks leave room for what others tell, and those of one
// namespace for those of another one. They have no book written for them.
func TestNotedRefusalsLeaveRoom(t *testing.T) {
	n := newNode(t)
	n.turn(true)
	for range 5000 {
		n.meter.Note(of(usage.Refused, "greedy"))
	}
	for range 20 {
		n.meter.Note(of(usage.Refused, "train"))
		n.meter.Note(of(usage.Killed, "train"))
		n.meter.Note(of(usage.Cut, ""))
	}
	n.turn(false)
	got := n.counts()
	if got["killedtrain"] != 20 || got["cut"] != 20 || got["!train"] != 20 || got["!greedy"] != mostRefused-20 {
		t.Errorf("of 20 of each of train, and 5000 refusals of another namespace, there are %v", got)
	}
	if got["lost"] != 5000-(mostRefused-20) || int(n.meter.Scraped().Lost) != got["lost"] {
		t.Errorf("%d are said to be lost, want %d", got["lost"], 5000-(mostRefused-20))
	}
	if got["began"] != 1 {
		t.Errorf("%d books were written, want the first alone", got["began"])
	}
}

// The same of what is no refusal, and in the order in which it came.
func TestNotedRecordsHaveShares(t *testing.T) {
	var q notes
	lost := 0
	for i := range 3000 {
		r := of(usage.Killed, "greedy")
		r.Count = i
		if !q.add(r) {
			lost++
		}
		if i%100 == 0 {
			r.Namespace = fmt.Sprint("train-", i%300)
			if !q.add(r) {
				lost++
			}
		}
	}
	got := q.take()
	by, last := map[string]int{}, -1
	for _, r := range got {
		by[r.Namespace]++
		if r.Count < last {
			t.Errorf("%d comes after %d", r.Count, last)
		}
		last = r.Count
	}
	if len(got) != mostNoted-mostRefused || lost != 3030-len(got) || by["train-0"] != 10 || by["train-100"] != 10 || by["train-200"] != 10 {
		t.Errorf("%d have found room, %d are lost: %v", len(got), lost, by)
	}
	if len(q.take()) != 0 {
		t.Error("they are taken twice")
	}
}

// While the disk is full, refusals take a quarter of what waits, and others' records are
// written when there is room again.
func TestWaitingRefusalsLeaveRoom(t *testing.T) {
	n := newNode(t)
	n.turn(true)
	n.paper.full = true
	for range 2 * mostPending {
		n.meter.Note(of(usage.Refused, "greedy"))
		n.turn(false)
	}
	for range 20 {
		n.meter.Note(of(usage.Killed, "train"))
		n.turn(false)
	}
	n.paper.full = false
	n.turn(false)
	got := n.counts()
	if got["killedtrain"] != 20 || got["!greedy"] != mostRefused || got["lost"] != 2*mostPending-mostRefused {
		t.Errorf("with room again there are %v", got)
	}
}

// What the journal had no room for any more is written down, and counted.
func TestDroppedRecords(t *testing.T) {
	n := newNode(t)
	n.paper.most = 0
	n.paper.dropped = usage.Dropped{{Namespace: "greedy"}: {Records: 7, Before: noon}, {Refused: true}: {Records: 30, Before: noon}}
	n.turn(true)
	if got := n.meter.Scraped().Dropped; got != (usage.DroppedRecords{Use: 7, Refused: 30}) {
		t.Errorf("counted are %+v", got)
	}
	if got := strings.Count(string(n.paper.text), `"event":"left-out"`); got != 2 || n.meter.outbox.waiting != 0 {
		t.Errorf("%d lines tell of it, and %d records wait", got, n.meter.outbox.waiting)
	}
}
