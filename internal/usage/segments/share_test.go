// SPDX-License-Identifier: Apache-2.0

package segments

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/pkg/gpu"
)

// tenants are containers that come and go on a node whose account a store keeps.
type tenants struct {
	*testing.T
	dir  string
	o    Options
	s    *Store
	r    *rand.Rand
	book *usage.Book
	at   time.Time
	next uint64
	// grants are all that there ever were, open those that have not ended.
	grants map[uint64]*grant
	open   []uint64
	// raw has the bytes that were written for each namespace, and refused those of refusals;
	// written counts lines, but those of use and of books.
	raw     map[string]int
	refused int
	used    int
	written int
	// tidying is called before each Tidy, and tidied after it.
	tidying, tidied func()
}

type grant struct {
	ns           string
	since, until time.Time
}

func newTenants(t *testing.T, o Options, r *rand.Rand) *tenants {
	t.Helper()
	// On a disk these tests would wait for it nearly all the time: each segment is flushed.
	dir, err := os.MkdirTemp("/dev/shm", "gpu-agent-test-")
	if err != nil {
		dir = t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	w := &tenants{T: t, dir: dir, o: o, r: r, book: usage.NewBook(nil), at: newYear, grants: map[uint64]*grant{}, raw: map[string]int{}, tidying: func() {}, tidied: func() {}}
	w.reopen()
	t.Cleanup(func() { _ = w.s.Close() })
	w.write(&usage.Record{Time: w.at, Event: usage.Began, Book: w.book.State(w.at)})
	return w
}

func (w *tenants) reopen() {
	w.Helper()
	if w.s != nil {
		if err := w.s.Close(); err != nil {
			w.Fatal(err)
		}
	}
	var err error
	if w.s, err = Open(w.dir, w.o); err != nil {
		w.Fatal(err)
	}
}

func (w *tenants) text(n int) string {
	out := make([]byte, n)
	for i := range out {
		out[i] = "0123456789abcdefghijklmnopqrstuvwxyz"[w.r.IntN(36)]
	}
	return string(out)
}

// write writes a line as the meter does.
func (w *tenants) write(r *usage.Record) {
	w.Helper()
	w.book.Apply(r)
	text := line(w.T, r)
	if _, err := w.s.Append(text); err != nil {
		w.Fatal(err)
	}
	switch g := w.grants[r.Grant]; {
	case r.Event == usage.Began || r.Event == usage.Used:
		w.used += len(text)
		return
	case r.Event == usage.Refused:
		w.refused += len(text)
	case g != nil:
		w.raw[g.ns] += len(text)
	default:
		w.raw[r.Namespace] += len(text)
	}
	w.written++
	if !w.s.Full() {
		return
	}
	if err := w.s.Next(line(w.T, &usage.Record{Time: w.at, Event: usage.Began, Book: w.book.State(w.at)})); err != nil {
		w.Fatal(err)
	}
	w.tidying()
	if err := w.s.Tidy(); err != nil {
		w.Fatal(err)
	}
	w.tidied()
}

func (w *tenants) pass() time.Time {
	w.at = w.at.Add(time.Duration(1 + w.r.IntN(int(10*time.Second))))
	return w.at
}

func (w *tenants) take(ns string) {
	w.next++
	n := w.next
	g := &grant{since: w.pass()}
	w.grants[n] = g
	w.open = append(w.open, n)
	w.write(&usage.Record{Time: w.at, Event: usage.Allocated, Grant: n, Allocation: w.text(16), FrontEnd: ledger.DevicePlugin, Resource: "example.com/gpu-mem", Count: 1,
		Pieces: []usage.Piece{{GPU: gpu.UUID("GPU-0"), Of: piece.Units{Set: piece.Set{{First: int(n), Last: int(n)}}}, Share: .1, MemoryMiB: 1 << 10}}})
	g.ns = ns // nobody knows before
	w.write(&usage.Record{Time: w.at, Event: usage.Named, Grant: n, Holder: usage.Holder{Namespace: ns, Pod: "pod-" + w.text(8), UID: w.text(32), Container: "main"}})
}

// end ends the i-th of the grants that are open.
func (w *tenants) end(i int) {
	n := w.open[i]
	w.open = slices.Delete(w.open, i, i+1)
	w.grants[n].until = w.pass()
	w.write(&usage.Record{Time: w.at, Event: usage.Released, Grant: n, Used: []usage.Use{{Grant: n, MiBMs: n, BusyMs: n}}})
}

func (w *tenants) sample() {
	r := &usage.Record{Time: w.pass(), Event: usage.Used}
	for _, n := range w.open {
		r.Used = append(r.Used, usage.Use{Grant: n, MiBMs: n, BusyMs: n})
	}
	w.write(r)
}

func (w *tenants) refuse(ns string) {
	w.write(&usage.Record{Time: w.pass(), Event: usage.Refused, FrontEnd: ledger.DRA, Holder: usage.Holder{Namespace: ns}, Reason: "NotOneGPU", Message: w.text(100)})
}

func (w *tenants) kill(ns string) {
	w.write(&usage.Record{Time: w.pass(), Event: usage.Killed, Holder: usage.Holder{Namespace: ns, Pod: w.text(8)}, Reason: "CapExceeded", Message: w.text(60)})
}

// listener is a teller that collects what has ended.
type listener struct{ ended map[uint64]*usage.Grant }

func (*listener) Granted(*usage.Grant, *usage.Held, time.Time, time.Time, float64, float64) {}
func (*listener) Used(*usage.Grant, *usage.Held, time.Time, time.Time, usage.Use)           {}
func (*listener) Parked(*usage.Grant, time.Time, time.Time, uint64)                         {}
func (l *listener) Ended(g *usage.Grant)                                                    { l.ended[g.Number] = g }

// look is what the journal says now.
type look struct {
	ended map[uint64]*usage.Grant
	book  *usage.Book
	lines int
	kills map[string]int
}

func (w *tenants) look() look {
	w.Helper()
	l := &listener{ended: map[uint64]*usage.Grant{}}
	out := look{ended: l.ended, book: usage.NewBook(l), kills: map[string]int{}}
	if err := Read(w.dir, time.Time{}, func(r *usage.Record) {
		out.book.Apply(r)
		if r.Event != usage.Began && r.Event != usage.Used {
			out.lines++
		}
		if r.Event == usage.Killed {
			out.kills[r.Namespace]++
		}
	}); err != nil {
		w.Fatal(err)
	}
	return out
}

// whole complains of grants of a namespace that the journal does not have as they were.
func (w *tenants) whole(l look, ns string) {
	w.Helper()
	lost := 0
	for n, g := range w.grants {
		if g.ns != ns {
			continue
		}
		got := l.ended[n]
		if g.until.IsZero() {
			got = l.book.Of(allocation(l.book, n))
		}
		if got == nil || !got.Since.Equal(g.since) || !got.Until.Equal(g.until) || got.Namespace != ns {
			lost++
		}
	}
	if lost > 0 {
		w.Errorf("of the grants of %s %d are lost or wrong", ns, lost)
	}
}

func allocation(b *usage.Book, n uint64) string {
	for _, g := range b.Open() {
		if g.Number == n {
			return g.Allocation
		}
	}
	return "-"
}

// A hundred times as many refusals as the journal has room for, the kubelet's and those of
// another namespace, push out nothing of what was used.
func TestRefusalsPushOutNothing(t *testing.T) {
	w := newTenants(t, Options{Max: 96 << 10, Segment: 8 << 10}, rand.New(rand.NewPCG(1, 1)))
	flood := 12_000
	if testing.Short() {
		flood = 4_000 // make test-all has all
	}
	w.take("train") // goes on to the end
	for range 40 {
		w.take("train")
		w.kill("train")
		w.end(1)
	}
	for i := range flood {
		w.refuse([]string{"", "greedy"}[i%2])
	}
	l := w.look()
	w.whole(l, "train")
	if l.kills["train"] != 40 {
		t.Errorf("of 40 kills %d are left", l.kills["train"])
	}
	if n := size(t, w.dir); n > w.o.Max {
		t.Errorf("the journal takes %d bytes of %d", n, w.o.Max)
	}
}

// A namespace whose pods come and go without end pushes out nothing of another one, whose
// records begin before the flood, and in its middle, and of which some go on throughout.
func TestANamespacePushesOutNobody(t *testing.T) {
	w := newTenants(t, Options{Max: 96 << 10, Segment: 8 << 10}, rand.New(rand.NewPCG(2, 1)))
	flood := 4_000
	if testing.Short() {
		flood = 1_000 // make test-all has all
	}
	w.take("train")
	w.take("greedy")
	for range 20 {
		w.take("train")
		w.end(2)
	}
	for i := range flood {
		w.take("greedy")
		w.kill("greedy")
		w.end(len(w.open) - 1)
		if i%(flood/20) == 0 {
			w.take("late")
			w.end(len(w.open) - 1)
			w.sample()
		}
	}
	l := w.look()
	w.whole(l, "train")
	w.whole(l, "late")
	greedy := 0
	for _, g := range l.ended {
		if g.Namespace == "greedy" {
			greedy++
		}
	}
	if greedy < 20 {
		t.Errorf("of greedy's own grants only %d are left", greedy)
	}
	if g := l.book.Of(allocation(l.book, 2)); g == nil || !g.Since.Equal(w.grants[2].since) {
		t.Errorf("greedy's grant that goes on is lost, or begins later: %+v", g)
	}
	if n := size(t, w.dir); n > w.o.Max {
		t.Errorf("the journal takes %d bytes of %d", n, w.o.Max)
	}
}

// play plays a history that bytes stand for, and looks after each time that the journal was
// tidied.
func play(t *testing.T, seed uint64, history []byte) {
	o := Options{Max: 64 << 10, Segment: 8 << 10}
	w := newTenants(t, o, rand.New(rand.NewPCG(seed, 7)))
	room := int(o.Max - 2*o.Segment)
	dropped, times := usage.Dropped{}, 0
	w.tidied = func() {
		t.Helper()
		if n := size(t, w.dir); n > o.Max {
			t.Errorf("the journal takes %d bytes of %d", n, o.Max)
		}
		for _, r := range w.s.Dropped() {
			dropped.Add(usage.Owner{Refused: r.Of == usage.Refused, Namespace: r.Namespace}, usage.Loss{Records: r.Count, Before: r.Before})
		}
		if times++; times%3 == 0 {
			w.judge(room, dropped)
		}
	}
	defer func() { w.judge(room, dropped) }()
	for i := 0; i+1 < len(history) && !t.Failed(); i += 2 {
		ns, many := fmt.Sprintf("ns-%d", history[i]>>3&7), int(history[i+1])%32
		for range 1 + many {
			switch history[i] & 7 {
			case 0, 1:
				if len(w.open) < 6 {
					w.take(ns)
				}
			case 2, 3:
				if len(w.open) > 0 {
					w.end(w.r.IntN(len(w.open)))
				}
			case 4: // one that comes and goes
				w.take(ns)
				w.end(len(w.open) - 1)
			case 5:
				w.refuse(ns)
			case 6:
				w.kill(ns)
			case 7:
				w.sample()
				if many == 0 {
					w.reopen()
				}
			}
		}
	}
}

// judge compares the journal with what was.
func (w *tenants) judge(room int, dropped usage.Dropped) {
	w.Helper()
	l := w.look()
	lost, lostUse := 0, 0
	for o, d := range dropped {
		lost += d.Records
		if !o.Refused {
			lostUse += d.Records
		}
	}
	if l.lines+lost != w.written {
		w.Errorf("%d records were written, %d are there and %d are said to be dropped", w.written, l.lines, lost)
	}
	// Compressed lines are no longer than plain ones, so this much fits for certain.
	all := w.used
	for _, n := range w.raw {
		all += n
	}
	if all < room/2 && lostUse > 0 {
		w.Errorf("with %d bytes of use in a room of %d, refusals have pushed out %d records", all, room, lostUse)
	}
	for ns, n := range w.raw {
		if ns != "" && n < room/4/(1+len(w.raw)) {
			w.whole(l, ns)
		}
	}
	// Whatever goes, what goes on is there, and what is told of a grant is so.
	for _, n := range w.open {
		if g := l.book.Of(allocation(l.book, n)); g == nil || !g.Since.Equal(w.grants[n].since) {
			w.Errorf("grant %d of %s, which goes on since %s, is %+v", n, w.grants[n].ns, w.grants[n].since, g)
		}
	}
	if got := len(l.book.Open()); got != len(w.open) {
		w.Errorf("%d grants are open, want %d", got, len(w.open))
	}
	for _, n := range slices.Sorted(maps.Keys(l.ended)) {
		g, was := l.ended[n], w.grants[n]
		if g.Namespace != "" && (!g.Since.Equal(was.since) || !g.Until.Equal(was.until) || g.Namespace != was.ns) {
			w.Errorf("grant %d of %s from %s to %s is told of as of %s from %s to %s", n, was.ns, was.since, was.until, g.Namespace, g.Since, g.Until)
		}
	}
}

// random is a history in which one namespace does much more than others.
func random(seed uint64, n int) []byte {
	r := rand.New(rand.NewPCG(seed, 9))
	out := make([]byte, n)
	greedy, what := byte(r.IntN(8)), byte(4+r.IntN(3))
	for i := range out {
		if out[i] = byte(r.IntN(256)); i%2 == 0 && r.IntN(3) > 0 {
			out[i] = greedy<<3 | what
		}
	}
	return out
}

// Whatever many namespaces do, each has its share.
func TestShares(t *testing.T) {
	seeds := uint64(6)
	switch {
	case *long:
		seeds = 200
	case testing.Short():
		seeds = 2 // make test-all has all
	}
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { play(t, seed, random(seed, 120)) })
	}
}

// FuzzShares holds of any history: the journal stays within its bound, a namespace with less
// than a share loses nothing, refusals push out no use, what goes on is known, what is told of a grant is so, and what
// was dropped is counted.
func FuzzShares(f *testing.F) {
	for seed := range uint64(2) {
		f.Add(seed, random(seed, 60))
	}
	f.Fuzz(func(t *testing.T, seed uint64, history []byte) {
		play(t, seed, history[:min(len(history), 100)])
	})
}

// older makes a journal's packed segments what an agent without indexes has written.
func (w *tenants) older() {
	w.Helper()
	for name, packed := range w.packed() {
		z, err := gzip.NewReader(bytes.NewReader(packed))
		if err != nil {
			w.Fatal(err)
		}
		var out bytes.Buffer
		to, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
		if err != nil {
			w.Fatal(err)
		}
		if _, err := io.Copy(to, z); err != nil {
			w.Fatal(err)
		}
		if err := errors.Join(to.Close(), os.WriteFile(filepath.Join(w.dir, name), out.Bytes(), 0o600)); err != nil {
			w.Fatal(err)
		}
	}
}

// packed has the packed segments by their names.
func (w *tenants) packed() map[string][]byte {
	w.Helper()
	names, err := filepath.Glob(filepath.Join(w.dir, "*"+packedSuffix))
	if err != nil {
		w.Fatal(err)
	}
	out := map[string][]byte{}
	for _, n := range names {
		if out[filepath.Base(n)], err = os.ReadFile(n); err != nil {
			w.Fatal(err)
		}
	}
	return out
}

// A journal that an agent without indexes wrote, and which is full, is read, and its records
// have their shares too. An older agent reads what this one writes: any program that knows
// gzip has the lines in their order.
func TestUpgradeAndDowngrade(t *testing.T) {
	w := newTenants(t, Options{Max: 64 << 10, Segment: 8 << 10}, rand.New(rand.NewPCG(3, 1)))
	for range 10 {
		w.take("train")
		w.end(0)
	}
	for size(t, w.dir) < w.o.Max*2/3 {
		w.refuse("greedy")
	}
	before := w.look()
	w.older()
	w.reopen()
	if l := w.look(); l.lines != before.lines {
		t.Errorf("of %d lines of an older agent's %d are read", before.lines, l.lines)
	}
	for range 1000 {
		w.refuse("greedy")
	}
	w.whole(w.look(), "train")

	lines := 0
	last := time.Time{}
	for _, name := range slices.Sorted(maps.Keys(w.packed())) {
		z, err := gzip.NewReader(bytes.NewReader(w.packed()[name]))
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(z)
		if err != nil {
			t.Fatal(err)
		}
		for line := range bytes.Lines(text) {
			r := usage.Parse(line)
			if r == nil || lines == 0 && r.Event != usage.Began || r.Time.Before(last.Truncate(time.Millisecond)) {
				t.Fatalf("%s has %q after %s", name, line, last)
			}
			lines++
			last = r.Time
		}
	}
}

// An agent is killed when it has packed a segment and has not removed the plain form, or cannot remove
// it. The next agent removes it, or the next Tidy does. It counted for nothing, stayed for ever, and its records came
// back when the packed form went.
func TestKilledWhilePacking(t *testing.T) {
	for how, restarts := range map[string]bool{"killed": true, "the removal failed": false} {
		t.Run(how, func(t *testing.T) {
			w := newTenants(t, Options{Max: 64 << 10, Segment: 8 << 10}, rand.New(rand.NewPCG(6, 1)))
			plain := func() (out []string) {
				t.Helper()
				names, err := filepath.Glob(filepath.Join(w.dir, "*"+plainSuffix))
				if err != nil {
					t.Fatal(err)
				}
				return names
			}
			packed, dropped := 0, usage.Dropped{}
			w.tidying = func() {
				t.Helper()
				closed := filepath.Join(w.dir, name(w.s.n-1, plainSuffix))
				was, err := os.ReadFile(closed)
				if err != nil {
					t.Fatal(err)
				}
				if err := errors.Join(w.s.pack(w.s.n-1), os.WriteFile(closed, was, 0o600)); err != nil {
					t.Fatal(err)
				}
				if packed++; !restarts {
					return
				}
				w.reopen()
				if left := plain(); len(left) != 1 {
					t.Errorf("opened with plain segments %q", left)
				}
			}
			w.tidied = func() {
				t.Helper()
				if left := plain(); len(left) != 1 {
					t.Errorf("tidied, with plain segments %q", left)
				}
				for _, r := range w.s.Dropped() {
					dropped.Add(usage.Owner{Refused: r.Of == usage.Refused, Namespace: r.Namespace}, usage.Loss{Records: r.Count, Before: r.Before})
				}
				if n := size(t, w.dir); n > w.o.Max {
					t.Errorf("the journal takes %d bytes of %d", n, w.o.Max)
				}
				w.judge(int(w.o.Max-2*w.o.Segment), dropped)
			}
			w.take("train")
			for i := 0; i < 200 && !t.Failed(); i++ {
				for range 5 {
					w.refuse("greedy")
				}
				w.take("greedy")
				w.end(1)
			}
			if packed < 10 || len(dropped) == 0 {
				t.Errorf("%d segments were packed, and %d owners have lost something", packed, len(dropped))
			}
			w.whole(w.look(), "train")
		})
	}
}

// An agent is killed when it has joined segments and has not removed the parts: nothing is
// read twice, and the next one removes them.
func TestKilledWhileJoining(t *testing.T) {
	w := newTenants(t, Options{Max: 64 << 10, Segment: 8 << 10}, rand.New(rand.NewPCG(4, 1)))
	before, joined := map[string][]byte{}, 0
	w.tidied = func() {
		t.Helper()
		now, l, parts := w.packed(), look{}, 0
		for name, was := range before {
			if now[name] != nil {
				continue
			}
			if parts++; parts == 1 {
				l = w.look()
			}
			if err := os.WriteFile(filepath.Join(w.dir, name), was, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if parts > 0 {
			if again := w.look(); again.lines > l.lines {
				t.Errorf("%d lines are read, and %d more where parts are left", l.lines, again.lines-l.lines)
			}
		}
		joined += parts
		before = now
	}
	w.take("train")
	for range 500 {
		w.refuse("greedy")
		w.take("greedy")
		w.end(1)
	}
	if joined == 0 {
		t.Error("nothing was joined")
	}
	if n := size(t, w.dir); n > w.o.Max {
		t.Errorf("the journal takes %d bytes of %d", n, w.o.Max)
	}
	w.whole(w.look(), "train")
}

// A reader has all of a journal that is tidied while it reads.
func TestReadWhileTidying(t *testing.T) {
	w := newTenants(t, Options{Max: 64 << 10, Segment: 8 << 10}, rand.New(rand.NewPCG(5, 1)))
	for range 10 {
		w.take("train")
		w.end(0)
	}
	done := make(chan struct{})
	failed := make(chan error, 1)
	go func() {
		defer close(failed)
		for {
			select {
			case <-done:
				return
			default:
			}
			n := 0
			if err := Read(w.dir, time.Time{}, func(r *usage.Record) {
				if r.Event == usage.Released && r.Grant <= 10 {
					n++
				}
			}); err != nil || n != 10 {
				failed <- fmt.Errorf("of 10 ends %d are read, %w", n, err)
				return
			}
		}
	}()
	for range 500 {
		w.refuse("greedy")
		w.take("greedy")
		w.end(0)
	}
	close(done)
	if err := <-failed; err != nil {
		t.Error(err)
	}
}
