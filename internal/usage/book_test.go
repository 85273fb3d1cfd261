// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 123456789, time.UTC)

// card is an A100 of 80 GiB, of which the driver keeps nothing.
var card = gpu.Device{Index: 3, UUID: "GPU-3", Memory: 80 << 10, MIG: gpu.MIG{Capable: true, Profiles: []gpu.Profile{
	{Name: "1g.10gb", Memory: 9728, Placements: []gpu.Placement{{Start: 0, Size: 1}, {Start: 6, Size: 1}}},
	{Name: "3g.40gb", Memory: 40192, Placements: []gpu.Placement{{Start: 0, Size: 4}, {Start: 4, Size: 4}}},
	{Name: "7g.80gb", Memory: 80640, Placements: []gpu.Placement{{Start: 0, Size: 8}}},
}}}

func inventory() *gpu.Inventory { return &gpu.Inventory{GPUs: []gpu.Device{card}} }

func units(first, last int) ledger.Grant {
	return ledger.Grant{GPU: "GPU-3", Piece: piece.Units{Set: piece.Set{{First: first, Last: last}}, Unit: 1024}, Cap: piece.CapOf(uint64(last-first+1) << 30)}
}

func placed(profile string, start, size, ci int) ledger.Grant {
	name, err := mig.Parse(profile)
	if err != nil {
		panic(err)
	}
	return ledger.Grant{GPU: "GPU-3", Piece: piece.Placement{At: mig.Placement{Profile: name, Start: start, Size: size, CI: ci}}, Cap: piece.NoCap}
}

// A quarter of a GPU is charged a quarter, a MIG instance its memory slices, a whole GPU one,
// and who only looks after it nothing.
func TestShares(t *testing.T) {
	whole := ledger.Grant{GPU: "GPU-3", Piece: piece.Whole{}, Cap: piece.NoCap}
	watching := whole
	watching.NoRoom = true
	for _, tt := range []struct {
		grant  ledger.Grant
		share  float64
		memory uint64
	}{
		{whole, 1, 80 << 10},
		{watching, 0, 0},
		{units(0, 19), .25, 20 << 10},
		{units(0, 79), 1, 80 << 10},
		{ledger.Grant{GPU: "GPU-3", Piece: piece.Replica{Of: 4}, Cap: piece.CapOf(20 << 30)}, .25, 20 << 10},
		{placed("1g.10gb", 6, 1, 0), .125, 9728},
		{placed("3g.40gb", 4, 4, 0), .5, 40192},
		{placed("3g.40gb", 4, 0, 0), .5, 40192}, // of a size that nobody knows yet
		{placed("7g.80gb", 0, 8, 0), 1, 80640},
		{placed("1c.3g.40gb", 4, 4, 2), .5 / 3, 40192 / 3},
		// Of a record without sizes, by its cap.
		{ledger.Grant{GPU: "GPU-3", Piece: piece.Units{Set: piece.Set{{First: 0, Last: 7}}}, Cap: piece.CapOf(8 << 30)}, .1, 8 << 10},
	} {
		p := PiecesOf([]ledger.Grant{tt.grant}, inventory())[0]
		if math.Abs(p.Share-tt.share) > 1e-12 || p.MemoryMiB != tt.memory || p.Index != 3 {
			t.Errorf("%s: share %v, %d MiB of GPU %d, want %v, %d", p.String(), p.Share, p.MemoryMiB, p.Index, tt.share, tt.memory)
		}
	}
	if p := PiecesOf([]ledger.Grant{units(0, 3)}, &gpu.Inventory{})[0]; p.Share != 0 || p.MemoryMiB != 4096 || p.Index != -1 {
		t.Errorf("of a GPU that is gone: %+v", p)
	}
}

func granted(n uint64, id string, at time.Time, grants ...ledger.Grant) *Record {
	return &Record{Time: at, Event: Allocated, Grant: n, Allocation: id, FrontEnd: ledger.DevicePlugin, Resource: "example.com/gpu-mem", Count: 1, Pieces: PiecesOf(grants, inventory())}
}

func named(n uint64, at time.Time, pod, container string) *Record {
	return &Record{Time: at, Event: Named, Grant: n, Holder: Holder{Namespace: "work", Pod: pod, UID: "uid-" + pod, Container: container}}
}

func used(n uint64, at time.Time, mib, busy uint64) *Record {
	return &Record{Time: at, Event: Used, Used: []Use{{Grant: n, GPU: 3, MiBMs: mib, BusyMs: busy}}}
}

func released(n uint64, at time.Time) *Record { return &Record{Time: at, Event: Released, Grant: n} }

func of(series []Series, pod, container string) Series {
	i := slices.IndexFunc(series, func(s Series) bool { return s.Pod == pod && s.Container == container })
	if i < 0 {
		return Series{Index: -2}
	}
	return series[i]
}

// The account of a pod that comes and goes, to the nanosecond; one that comes again under its
// name goes on counting, and after an hour begins anew.
func TestAccount(t *testing.T) {
	b := NewBook(nil)
	end := noon.Add(90*time.Minute + 17*time.Nanosecond)
	for _, r := range []*Record{granted(1, "a", noon, units(0, 19)), named(1, noon.Add(time.Second), "web-0", "main"), used(1, noon.Add(time.Hour), 3600_000*1024, 1800_000)} {
		b.Apply(r)
	}
	s := of(b.Series(noon.Add(time.Hour)), "web-0", "main")
	if s.GrantedGPU != .25*3600 || s.GrantedMiB != 20*1024*3600 || s.UsedMiB != 3600*1024 || s.UsedGPU != .25*1800 || !s.Known || s.SMKnown || s.Share != .25 {
		t.Errorf("after an hour: %+v", s)
	}
	b.Apply(released(1, end))
	if len(b.Series(end)) != 0 || len(b.Open()) != 0 {
		t.Error("what was released is open")
	}
	key := Key{"work", "web-0", "main", "GPU-3", ledger.Guaranteed}
	ended, known := b.Ended(key)
	if s, want := ended, .25*end.Sub(noon).Seconds(); !known || s.GrantedGPU != want {
		t.Errorf("granted %v GPU seconds, want %v", s.GrantedGPU, want)
	}
	before := ended.GrantedGPU
	b.Apply(granted(2, "a", end.Add(time.Minute), units(0, 19)))
	b.Apply(named(2, end.Add(time.Minute), "web-0", "main"))
	if s := of(b.Series(end.Add(2*time.Minute)), "web-0", "main"); s.GrantedGPU != before+.25*60 {
		t.Errorf("the next pod of the name: %v, want %v", s.GrantedGPU, before+.25*60)
	}
	b.Apply(released(2, end.Add(2*time.Minute)))
	late := end.Add(2*time.Minute + kept + time.Second)
	b.Apply(granted(3, "a", late, units(0, 19)))
	b.Apply(named(3, late, "web-0", "main"))
	if s := of(b.Series(late.Add(time.Second)), "web-0", "main"); s.GrantedGPU != .25 {
		t.Errorf("an hour later: %v, want .25", s.GrantedGPU)
	}
}

func lineOf(t *testing.T, r *Record) []byte {
	t.Helper()
	out, err := r.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// inSpot is a record of a spot grant.
func inSpot(r *Record) *Record {
	r.Tier = ledger.Spot
	return r
}

// A guaranteed grant takes over the charge for the room of an older spot grant, and gives it back. Room that is lent is
// charged to its holder all the same, and counted as lent. A record without a tier is guaranteed. Totals that a segment
// begins with go on.
func TestTiers(t *testing.T) {
	at := func(s int) time.Time { return noon.Add(time.Duration(s) * time.Second) }
	records := []*Record{
		inSpot(granted(1, "s", at(0), units(0, 39))), named(1, at(0), "batch", "main"),
		granted(2, "g", at(10), units(20, 59)), named(2, at(10), "web", "main"),
		released(2, at(30)),
		granted(3, "h", at(40), units(60, 79)), named(3, at(40), "nb", "main"),
		inSpot(granted(4, "t", at(50), units(70, 79))), named(4, at(50), "night", "main"),
		released(4, at(70)),
	}
	for _, cut := range []int{0, 4, 7, 9} {
		b := NewBook(nil)
		for i, r := range records {
			if i == cut && cut > 0 { // a reader that begins here has only the book
				from := lineOf(t, &Record{Time: records[i-1].Time, Event: Began, Book: b.State(records[i-1].Time)})
				b = NewBook(nil)
				b.Apply(Parse(from))
			}
			b.Apply(r)
		}
		series := b.Series(at(100))
		for pod, want := range map[string]struct {
			tier          ledger.Tier
			granted, lent float64
		}{
			"batch": {ledger.Spot, .5*100 - .25*20, 0},
			"nb":    {ledger.Guaranteed, .25 * 60, .125 * 20},
		} {
			s := of(series, pod, "main")
			if s.Tier != want.tier || math.Abs(s.GrantedGPU-want.granted) > 1e-6 || math.Abs(s.LentGPU-want.lent) > 1e-6 || math.Abs(s.LentMiB-want.lent*80*1024) > 1e-3 {
				t.Errorf("cut at %d: %s: %s, granted %v, lent %v, want %+v", cut, pod, s.Tier.Word(), s.GrantedGPU, s.LentGPU, want)
			}
		}
		if s, _ := b.Ended(Key{"work", "night", "main", "GPU-3", ledger.Spot}); s.GrantedGPU != .125*20 {
			t.Errorf("cut at %d: the spot pod in lent room: %+v", cut, s)
		}
		if s, _ := b.Ended(Key{"work", "web", "main", "GPU-3", ledger.Guaranteed}); s.GrantedGPU != .5*20 {
			t.Errorf("cut at %d: the guaranteed pod: %+v", cut, s)
		}
	}
	// A spot grant that yields to the holder of lent room is charged nothing meanwhile, and nothing is lent to it.
	y := NewBook(nil)
	for _, r := range []*Record{
		granted(1, "n", at(0), units(0, 79)), named(1, at(0), "nb", "main"),
		inSpot(granted(2, "s", at(10), units(0, 39))), named(2, at(10), "night", "main"),
		{Time: at(20), Event: Yielded, Grant: 2}, {Time: at(50), Event: Restored, Grant: 2},
	} {
		y.Apply(r)
	}
	y.Apply(Parse(lineOf(t, &Record{Time: at(50), Event: Began, Book: y.State(at(50))})))
	for pod, want := range map[string][2]float64{"nb": {60, .5 * 20}, "night": {.5 * 20, 0}} {
		if s := of(y.Series(at(60)), pod, "main"); s.GrantedGPU != want[0] || s.LentGPU != want[1] {
			t.Errorf("%s: granted %v, lent %v, want %v", pod, s.GrantedGPU, s.LentGPU, want)
		}
	}
	report := NewReport(at(0), at(100), func(g *Grant) string { return g.Namespace })
	b := NewBook(report)
	for _, r := range records {
		b.Apply(r)
	}
	sums := report.Sum(b)
	Price(sums, 2, 1)
	if len(sums) != 2 || sums[0].Tier != "spot" || sums[1].Tier != "guaranteed" || sums[0].Grants != 2 || sums[1].Grants != 2 {
		t.Fatalf("%+v", sums)
	}
	spot, guaranteed := (45+.125*20)/3600, (.5*20+.25*60)/3600
	if s := sums[0]; math.Abs(s.GrantedGPUHours-spot) > 1e-9 || math.Abs(*s.Cost-spot) > 1e-9 || s.LentGPUHours != 0 {
		t.Errorf("spot: %+v, cost %v", s, *s.Cost)
	}
	if s := sums[1]; math.Abs(s.GrantedGPUHours-guaranteed) > 1e-9 || math.Abs(*s.Cost-2*guaranteed) > 1e-9 || math.Abs(s.LentGiBHours-.125*20*80/3600) > 1e-9 {
		t.Errorf("guaranteed: %+v, cost %v", s, *s.Cost)
	}
}

// Parked time is counted apart: how long, how much and how often. A journal that is cut at any record, or begins anew there,
// gives the same.
func TestParkedTime(t *testing.T) {
	at := func(s int) time.Time { return noon.Add(time.Duration(s) * time.Second) }
	records := []*Record{
		inSpot(granted(1, "s", at(0), units(0, 39))), named(1, at(0), "night", "main"),
		granted(2, "g", at(5), units(40, 79)), named(2, at(5), "web", "main"),
		{Time: at(6), Event: Parked, Grant: 2, MiB: 1024}, // a guaranteed grant is never parked
		{Time: at(10), Event: Parked, Grant: 1, MiB: 2048}, {Time: at(30), Event: Unparked, Grant: 1},
		{Time: at(40), Event: Parked, Grant: 1, MiB: 4096}, {Time: at(60), Event: Released, Grant: 1},
		inSpot(granted(3, "t", at(60), units(0, 39))), named(3, at(60), "night", "main"),
		{Time: at(90), Event: Parked, Grant: 3, MiB: 1024},
	}
	for cut := range records {
		for _, test := range []struct {
			from, to       int
			parks          int
			seconds, space float64 // space in GiB times seconds
		}{{0, 100, 3, 20 + 20 + 10, 2*20 + 4*20 + 10}, {20, 50, 1, 10 + 10, 2*10 + 4*10}, {31, 39, 0, 0, 0}} {
			report := NewReport(at(test.from), at(test.to), func(g *Grant) string { return g.Namespace })
			b := NewBook(report)
			for i, r := range records {
				if b.Apply(r); i == cut {
					b.Apply(Parse(lineOf(t, &Record{Time: r.Time, Event: Began, Book: b.State(r.Time)})))
				}
			}
			for _, s := range report.Sum(b) {
				if s.Tier == Guaranteed {
					if s.Parks != 0 || s.ParkedHours != 0 {
						t.Errorf("guaranteed: %+v", s)
					}
					continue
				}
				if s.Parks != test.parks || math.Abs(s.ParkedHours*3600-test.seconds) > 1e-6 || math.Abs(s.ParkedGiBHours*3600-test.space) > 1e-6 {
					t.Errorf("cut at %d, %d to %d: %d parks, %v s, %v GiB s, want %+v", cut, test.from, test.to, s.Parks, s.ParkedHours*3600, s.ParkedGiBHours*3600, test)
				}
			}
		}
	}
}

// What is given to somebody else before it is released is charged to that one: nobody is
// charged for more than there is.
func TestOverlap(t *testing.T) {
	b := NewBook(nil)
	for _, r := range []*Record{
		granted(1, "init", noon, units(0, 3)), named(1, noon, "a", "init"),
		granted(2, "app", noon.Add(10*time.Second), units(0, 7)), named(2, noon.Add(10*time.Second), "a", "app"),
		granted(3, "half", noon.Add(20*time.Second), units(4, 11)), named(3, noon.Add(20*time.Second), "b", "app"),
	} {
		b.Apply(r)
	}
	at := noon.Add(30 * time.Second)
	series := b.Series(at)
	for _, tt := range []struct {
		pod, container string
		want           float64
	}{{"a", "init", 4 * 10}, {"a", "app", 8*10 + 4*10}, {"b", "app", 8 * 10}} {
		if got := of(series, tt.pod, tt.container).GrantedGPU * 80; math.Abs(got-tt.want) > 1e-9 {
			t.Errorf("%s/%s: %v unit seconds, want %v", tt.pod, tt.container, got, tt.want)
		}
	}
	share := 0.0
	for _, s := range series {
		share += s.Share
	}
	if math.Abs(share-12./80) > 1e-12 {
		t.Errorf("they have %v of the GPU together, and 12 of its 80 units are given out", share)
	}
}

// history makes a random one of a node, in the order in which an agent writes it.
func history(r *rand.Rand, n int) []*Record {
	var out []*Record
	at, next := noon, uint64(1)
	type live struct {
		n         uint64
		mib, busy uint64
	}
	var open []*live
	for len(out) < n {
		at = at.Add(time.Duration(r.Int64N(int64(40*time.Second))) + 1)
		switch k := r.IntN(10); {
		case k < 3:
			first := r.IntN(70)
			out = append(out, granted(next, fmt.Sprintf("id-%d", r.IntN(20)), at, units(first, first+r.IntN(10))))
			// Of the same ID only the last is open.
			open = append(open, &live{n: next})
			next++
		case k < 5 && len(open) > 0:
			l := open[r.IntN(len(open))]
			out = append(out, named(l.n, at, fmt.Sprintf("pod-%d", l.n%7), "main"))
		case k < 8:
			u := &Record{Time: at, Event: Used}
			for _, l := range open {
				l.mib, l.busy = l.mib+uint64(r.IntN(1e6)), l.busy+uint64(r.IntN(30e3))
				u.Used = append(u.Used, Use{Grant: l.n, GPU: 3, MiBMs: l.mib, BusyMs: l.busy, SMMs: new(l.busy / 2)})
			}
			out = append(out, u)
		case len(open) > 0:
			i := r.IntN(len(open))
			l := open[i]
			out = append(out, &Record{Time: at, Event: Released, Grant: l.n, Used: []Use{{Grant: l.n, GPU: 3, MiBMs: l.mib + 5, BusyMs: l.busy + 1, SMMs: new(l.busy / 2)}}})
			open = slices.Delete(open, i, i+1)
		default:
			out = append(out, &Record{Time: at, Event: Refused, Resource: "example.com/gpu-mem", Count: 24, Reason: "NotOneGPU"})
		}
	}
	return out
}

func lines(t *testing.T, of []*Record) (out []byte) {
	t.Helper()
	for _, r := range of {
		var err error
		if out, err = r.Append(out); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

func readBook(text []byte) *Book {
	b := NewBook(nil)
	for line := range bytes.Lines(text) {
		if r := Parse(line); r != nil {
			b.Apply(r)
		}
	}
	return b
}

// The journal cut at every byte is read up to the cut: it gives the book of the records that
// are whole, and no other.
func TestCutAtEveryByte(t *testing.T) {
	records := history(rand.New(rand.NewPCG(1, 1)), rounds(40, 120))
	text := lines(t, records)
	end, whole := noon.Add(24*time.Hour), 0
	want := NewBook(nil)
	at := 0
	for n := range len(text) + 1 {
		for whole < len(records) {
			line := lines(t, records[whole:whole+1])
			// The newline need not be there: the record says all without it.
			if n < at+len(line)-1 {
				break
			}
			want.Apply(records[whole])
			at += len(line)
			whole++
		}
		if n%7 != 0 && n < len(text)-400 { // at every byte of the last lines, and at each seventh before
			if n < at-2 || n > at+2 {
				continue
			}
		}
		got := readBook(text[:n])
		if !reflect.DeepEqual(got.Series(end), want.Series(end)) || got.next != want.next {
			t.Fatalf("cut at byte %d of %d, after %d records: not the book of those", n, len(text), whole)
		}
	}
	if whole != len(records) {
		t.Errorf("%d of %d records were read", whole, len(records))
	}
	// What is appended after a torn line stands on a line of its own.
	torn := append(slices.Clone(text[:len(text)-9]), '\n')
	torn = append(torn, lines(t, []*Record{{Time: end, Event: Refused, Reason: "NoRoom"}})...)
	if r := Parse(torn[bytes.LastIndexByte(bytes.TrimSpace(torn), '\n'):]); r == nil || r.Reason != "NoRoom" {
		t.Errorf("after a torn line: %+v", r)
	}
}

var long = flag.Bool("long", false, "longer histories, and more")

// rounds are few, or many with -long.
func rounds(few, many int) int {
	if *long {
		return many
	}
	return few
}

// Records that are read twice count once; a book that begins with the State of another goes
// on as that one does; and a thinned journal leads to the same.
func TestBooksAgree(t *testing.T) {
	for seed := range uint64(rounds(4, 40)) {
		r := rand.New(rand.NewPCG(seed, 2))
		records := history(r, 300)
		end := records[len(records)-1].Time.Add(time.Second)
		cut := r.IntN(len(records))
		one := NewBook(nil)
		var next []byte
		for i, rec := range records {
			if i == cut {
				began := &Record{Time: records[max(0, i-1)].Time, Event: Began, Book: one.State(records[max(0, i-1)].Time)}
				next = lines(t, []*Record{began})
			}
			one.Apply(rec)
		}
		want := one.Series(end)
		twice := readBook(append(lines(t, records), lines(t, records)...))
		if !same(twice.Series(end), want) {
			t.Errorf("seed %d: twice: %+v\nonce: %+v", seed, twice.Series(end), want)
		}
		later := readBook(append(next, lines(t, records[cut:])...))
		if !same(later.Series(end), want) || later.next != one.next {
			t.Errorf("seed %d: from record %d on: %+v\nfrom the beginning: %+v", seed, cut, later.Series(end), want)
		}
		both := readBook(slices.Concat(lines(t, records[:cut]), next, lines(t, records[cut:])))
		if !same(both.Series(end), want) {
			t.Errorf("seed %d: with a book in between: %+v\nwithout: %+v", seed, both.Series(end), want)
		}
		var thin bytes.Buffer
		c := NewCopier(&thin)
		err := c.Copy(bytes.NewReader(lines(t, records)), Omit{})
		if _, _, cerr := c.Close(); errors.Join(err, cerr) != nil {
			t.Fatal(err)
		}
		if !same(readBook(thin.Bytes()).Series(end), want) {
			t.Errorf("seed %d: a thinned journal differs", seed)
		}
		if n := strings.Count(thin.String(), `"used"`); n > strings.Count(string(lines(t, records)), `"used"`) {
			t.Errorf("seed %d: thinning made more", seed)
		}
	}
}

// same compares amounts to a millionth: sums of other parts differ in their last digits.
func same(a, b []Series) bool {
	return slices.EqualFunc(a, b, func(x, y Series) bool {
		near := func(p, q float64) bool { return math.Abs(p-q) <= 1e-6*max(1, math.Abs(p)) }
		return x.Key == y.Key && near(x.GrantedGPU, y.GrantedGPU) && near(x.GrantedMiB, y.GrantedMiB) && near(x.UsedGPU, y.UsedGPU) && near(x.UsedMiB, y.UsedMiB) && near(x.SM, y.SM) && near(x.Share, y.Share)
	})
}

// A report of any stretch adds up to that of the whole, and who had GPU 3 at noon is known.
func TestReports(t *testing.T) {
	records := history(rand.New(rand.NewPCG(7, 7)), 400)
	end := records[len(records)-1].Time.Add(time.Second)
	report := func(from, to time.Time) (granted, used float64) {
		r := NewReport(from, to, func(g *Grant) string { return g.Pod })
		b := NewBook(r)
		for line := range bytes.Lines(lines(t, records)) {
			b.Apply(Parse(line))
		}
		for _, s := range r.Sum(b) {
			granted += s.GrantedGPUHours
			if s.UsedGiBHours != nil {
				used += *s.UsedGiBHours
			}
		}
		return granted, used
	}
	all, allUsed := report(noon, end)
	middle := noon.Add(end.Sub(noon) / 3)
	a, aUsed := report(noon, middle)
	b, bUsed := report(middle, end)
	if math.Abs(all-a-b) > 1e-9 || math.Abs(allUsed-aUsed-bUsed) > 1e-6 || all == 0 || allUsed == 0 {
		t.Errorf("parts: %v + %v, %v + %v; the whole: %v, %v", a, b, aUsed, bUsed, all, allUsed)
	}

	p := NewPresence(noon.Add(15*time.Second), "3")
	book := NewBook(p)
	for _, r := range []*Record{
		granted(1, "gone", noon, units(0, 3)), named(1, noon, "gone", "main"), released(1, noon.Add(10*time.Second)),
		granted(2, "there", noon.Add(5*time.Second), units(4, 7)),
		granted(3, "late", noon.Add(16*time.Second), units(0, 3)), named(3, noon.Add(16*time.Second), "late", "main"),
		named(2, noon.Add(20*time.Second), "there", "main"), released(2, noon.Add(30*time.Second)),
	} {
		book.Apply(r)
	}
	who := p.Who(book)
	if len(who) != 1 || who[0].Pod != "there" || !who[0].Until.Equal(noon.Add(30*time.Second)) || who[0].Piece != "units 4-7" {
		t.Errorf("on GPU 3 were %+v", who)
	}
}
