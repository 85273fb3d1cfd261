// SPDX-License-Identifier: Apache-2.0

package piece_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"testing"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/mig"
)

func units(first, last int, unit gpu.MiB) piece.Units {
	return piece.Units{Set: piece.Set{{First: first, Last: last}}, Unit: unit}
}

func instance(t testing.TB, profile string, start, size, ci int) piece.Placement {
	t.Helper()
	name, err := mig.Parse(profile)
	if err != nil {
		t.Fatal(err)
	}
	return piece.Placement{At: mig.Placement{Profile: name, Start: start, Size: size, CI: ci}}
}

// unknown is a piece of a kind that only a newer version has.
func unknown(t testing.TB, record string) piece.Piece {
	t.Helper()
	p, err := piece.Read("slot", []byte(record))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// samples are a piece of each kind, with something in each of its fields.
func samples(t testing.TB) []piece.Piece {
	t.Helper()
	all := []piece.Piece{piece.Whole{}, units(0, 3, 1024), piece.Replica{Number: 2, Of: 4},
		instance(t, "1c.3g.40gb", 4, 4, 1)}
	for i, k := range piece.Kinds() {
		if i >= len(all) || all[i].Kind() != k {
			t.Fatalf("the samples lack a piece of kind %s in its place", k)
		}
	}
	return all
}

// own are the fields that records of pieces have for themselves: the ledger's and the usage
// journal's.
var own = []string{"gpu", "kind", "cap", "noRoom", "timeSlice", "index", "share", "memoryMiB", "placement"}

// No field of a piece has the name of one that a record has for itself: it would be read for that.
func TestFieldsBesideARecords(t *testing.T) {
	for _, p := range samples(t) {
		text, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		var fields map[string]any
		if err := json.Unmarshal(text, &fields); err != nil {
			t.Fatal(err)
		}
		for _, name := range own {
			if _, has := fields[name]; has {
				t.Errorf("%s writes %s, and records have a field %s of their own", p.Kind(), text, name)
			}
		}
	}
}

// Every kind is alone on its GPU, shared, or in MIG mode; and its pieces say so of themselves.
func TestKinds(t *testing.T) {
	for _, k := range piece.Kinds() {
		n := 0
		for _, is := range []bool{k.Alone(), k.Shared(), k.InMIG()} {
			if is {
				n++
			}
		}
		if n != 1 || !k.Known() || k.Check() != nil || k.Mode() == "" || k.Several() == "" || (k.Short() == "") != k.InMIG() || k.Together() && !k.Shared() {
			t.Errorf("%s: alone %t, shared %t, in MIG mode %t, together %t; mode %q, short %q, several %q", k, k.Alone(), k.Shared(), k.InMIG(), k.Together(), k.Mode(), k.Short(), k.Several())
		}
		if !k.Counted().Known() || k.Counted() != k && !k.InMIG() {
			t.Errorf("GPUs of %s are counted by %s", k, k.Counted())
		}
	}
	for _, p := range samples(t) {
		_, at := p.Placement()
		if k := p.Kind(); at != k.InMIG() || (len(p.Numbers()) > 0) == k.InMIG() || piece.Count(p) < 1 {
			t.Errorf("%s has a placement: %t, and the numbers %v", p, at, p.Numbers())
		}
		if _, cap := p.In(piece.Share{Division: piece.Division{Kind: p.Kind(), N: 4, Unit: 1024}, Usable: 8192}); !cap.Known || (cap == piece.NoCap) == p.Kind().Shared() {
			t.Errorf("%s has the cap %+v", p, cap)
		}
	}
	var none piece.Kind
	if none.Known() || none.Check() != nil || none.Alone() || none.Shared() || none.InMIG() || none.Mode() != "" {
		t.Error("the empty kind is one")
	}
	if err := piece.Kind("slot").Check(); !errors.Is(err, piece.UnknownKind{Word: "slot"}) || piece.Kind("slot").Shared() || piece.Kind("slot").Counted() != "slot" {
		t.Errorf("an unknown kind: %v", err)
	}
}

// What is read is what was written, and what makes no sense is refused.
func TestRead(t *testing.T) {
	for _, c := range []struct {
		of   piece.Piece
		want string
	}{
		{piece.Whole{}, `{}`},
		{units(0, 2, 1024), `{"units":"0-2","unitMiB":1024}`},
		{units(5, 5, 0), `{"units":"5"}`},
		{piece.Replica{Number: 2, Of: 4}, `{"replica":2,"of":4}`},
		{piece.Replica{}, `{}`},
		{instance(t, "1c.3g.40gb", 4, 4, 1), `{"profile":"1c.3g.40gb","start":4,"size":4,"ci":1}`},
		{unknown(t, `{"slot":3,"of":7}`), `{"of":7,"slot":3}`},
	} {
		got, err := json.Marshal(c.of)
		if err != nil || string(got) != c.want {
			t.Errorf("%v is written as %s, %v; want %s", c.of, got, err, c.want)
		}
		if back, err := piece.Read(c.of.Kind(), got); err != nil || !reflect.DeepEqual(back, c.of) {
			t.Errorf("%s of kind %s is read as %+v, %v", got, c.of.Kind(), back, err)
		}
	}
	for _, c := range []struct {
		kind   piece.Kind
		record string
	}{
		{"", `{}`}, {"slot", `[]`}, {piece.KindUnits, `{}`}, {piece.KindUnits, `{"units":"3-1"}`}, {piece.KindReplica, `{"replica":-1}`}, {piece.KindReplica, `{"of":65537}`},
		{piece.KindPlacement, `{}`}, {piece.KindPlacement, `{"profile":"3g.40gb","start":-1}`}, {piece.KindPlacement, `{"profile":"7x"}`},
	} {
		if p, err := piece.Read(c.kind, []byte(c.record)); !errors.Is(err, gpu.ErrInvalid) {
			t.Errorf("%s of kind %q is read as %v, %v", c.record, c.kind, p, err)
		}
	}
	whole := unknown(t, `{"slot":3,"gpu":"GPU-a","kind":"slot"}`)
	p, err := piece.Read("slot", []byte(`{"kind":"slot","slot":3,"gpu":"GPU-a"}`), "gpu")
	if err != nil || p.Kind() != "slot" || piece.Same(p, whole) {
		t.Errorf("the record's own fields: %v, %v", p, err)
	}
}

// drawn is a piece of one kind, with the memory slices or the numbers that it has.
func drawn(t testing.TB, rng *rand.Rand) (p piece.Piece, has map[int]bool) {
	has = map[int]bool{}
	switch n := rng.IntN(6); rng.IntN(4) {
	case 0:
		has[n] = true
		return piece.Replica{Number: n, Of: 6}, has
	case 1:
		last := n + rng.IntN(3)
		for i := n; i <= last; i++ {
			has[i] = true
		}
		return units(n, last, 1024), has
	case 2:
		size := 1 << rng.IntN(3)
		n = n / size * size
		for i := n; i < n+size; i++ {
			has[i] = true
		}
		return instance(t, map[int]string{1: "1g.10gb", 2: "2g.20gb", 4: "3g.40gb"}[size], n, size, 0), has
	}
	return piece.Whole{}, map[int]bool{0: true}
}

// Two pieces of one kind have in common what they both have, and no piece has room beside one of
// another kind.
func TestCommon(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 5000 {
		a, of := drawn(t, rng)
		b, with := drawn(t, rng)
		both := 0
		for n := range of {
			if with[n] {
				both++
			}
		}
		want := float64(both) / float64(len(of))
		if a.Kind() != b.Kind() {
			want = 0
		}
		if got := piece.Common(a, b); math.Abs(got-want) > 1e-9 {
			t.Fatalf("of %v %v has %v, want %v", a, b, got, want)
		}
		// Instances clash as the card says; without one, as two of one place.
		clash := a.Kind() != b.Kind() || both > 0
		if a.Kind().InMIG() && b.Kind().InMIG() {
			clash = piece.At(a) == piece.At(b)
		}
		if piece.Clash(a, b, nil) != clash || piece.Clash(b, a, nil) != clash {
			t.Fatalf("%v and %v clash: %t and %t, want %t", a, b, piece.Clash(a, b, nil), piece.Clash(b, a, nil), clash)
		}
		if same := a.Kind() == b.Kind() && reflect.DeepEqual(of, with); piece.Same(a, b) != same {
			t.Fatalf("%v and %v are the same: %t, want %t", a, b, !same, same)
		}
	}
	for _, c := range []struct{ a, b piece.Piece }{
		{units(0, 1, 1024), units(2, 3, 2048)}, {piece.Replica{Of: 2}, piece.Replica{Number: 1, Of: 4}}, {unknown(t, `{}`), piece.Whole{}}, {unknown(t, `{}`), unknown(t, `{"slot":1}`)},
	} {
		if !piece.Clash(c.a, c.b, nil) {
			t.Errorf("%+v and %+v do not clash", c.a, c.b)
		}
	}
	one, other := instance(t, "1c.3g.40gb", 4, 4, 0), instance(t, "1c.3g.40gb", 4, 4, 1)
	if piece.Common(one, other) != 0 || piece.Clash(one, other, nil) {
		t.Error("two compute instances of one GPU instance are not beside each other")
	}
}

// A cap follows from a division, and what a record lacks follows from the cap.
func TestCaps(t *testing.T) {
	d := &gpu.Device{Memory: 8292, Reserved: 100}
	for _, c := range []struct {
		of  piece.Piece
		in  piece.Division
		cap piece.Cap
		as  piece.Piece
	}{
		{piece.Whole{}, piece.Division{Kind: piece.KindWhole, N: 1}, piece.NoCap, piece.Whole{}},
		{units(0, 2, 0), piece.Division{Kind: piece.KindUnits, N: 8, Unit: 1024}, piece.CapOf(3 << 30), units(0, 2, 1024)},
		{units(0, 2, 512), piece.Division{}, piece.Cap{}, units(0, 2, 0)},
		{piece.Replica{Number: 1}, piece.Division{Kind: piece.KindReplica, N: 4}, piece.CapOf(2 << 30), piece.Replica{Number: 1, Of: 4}},
		{piece.Replica{Number: 1, Of: 3}, piece.Division{}, piece.Cap{}, piece.Replica{Number: 1, Of: 3}},
		{instance(t, "3g.40gb", 4, 4, 0), piece.Division{}, piece.NoCap, instance(t, "3g.40gb", 4, 4, 0)},
		{unknown(t, `{}`), piece.Division{}, piece.Cap{}, unknown(t, `{}`)},
	} {
		as, cap := c.of.In(piece.Share{Division: c.in, Usable: d.Usable()})
		if cap != c.cap || !reflect.DeepEqual(as, c.as) {
			t.Errorf("%v in %v is %+v with %+v, want %+v with %+v", c.of, c.in, as, cap, c.as, c.cap)
		}
		if cap.Known && cap.Bytes != memcap.None {
			if again := c.of.Fix(cap.Bytes, d.Usable()); !reflect.DeepEqual(again, as) {
				t.Errorf("%v with a cap of %d MiB is %+v, want %+v", c.of, cap.Bytes>>20, again, as)
			}
		}
		share, memory := as.Part(d, cap)
		if c.of.Kind().Shared() && cap.Known && (memory != cap.Bytes>>20 || math.Abs(share-float64(memory)/float64(d.Usable())) > .01) {
			t.Errorf("%v is %v of the GPU, with %d MiB", as, share, memory)
		}
	}
	if as := units(0, 0, 0).Fix(0, 8192); !reflect.DeepEqual(as, units(0, 0, 0)) {
		t.Errorf("a unit of nothing: %+v", as)
	}
	if as := (piece.Replica{}).Fix(memcap.None, 8192); as != (piece.Replica{}) {
		t.Errorf("a replica without a cap: %+v", as)
	}
}

// Whoever finds pieces on a GPU infers how it is divided, and a division of that is what was wished for.
func TestDivisions(t *testing.T) {
	d := &gpu.Device{Memory: 8292, Reserved: 100}
	for _, c := range []struct {
		wish  piece.Wish
		want  piece.Division
		words string
		has   piece.Piece
		lacks piece.Piece // with what it lacks of it
		rest  piece.Division
	}{
		{wish: piece.Wish{Mode: "whole"}, want: piece.Division{Kind: piece.KindWhole, N: 1}, has: piece.Whole{}},
		{wish: piece.Wish{Mode: "shared", Unit: 1024}, want: piece.Division{Kind: piece.KindUnits, N: 8, Unit: 1024}, words: "units of 1024 MiB", has: units(3, 7, 1024),
			lacks: units(6, 9, 1024), rest: piece.Division{Kind: piece.KindUnits, N: 2, Alone: piece.Set{{First: 8, Last: 9}}}},
		{wish: piece.Wish{Mode: "shared", Replicas: 4}, want: piece.Division{Kind: piece.KindReplica, N: 4}, words: "4 replicas", has: piece.Replica{Number: 3, Of: 4},
			lacks: piece.Replica{Number: 5}, rest: piece.Division{Kind: piece.KindReplica, N: 1, Alone: piece.Set{{First: 5, Last: 5}}}},
	} {
		of, ok := piece.Divide(c.wish, d)
		if !ok || !of.Equal(c.want) || of.String() != c.words {
			t.Errorf("%+v is %+v (%s), want %+v (%s)", c.wish, of, of, c.want, c.words)
		}
		if got := piece.Infer([]piece.Piece{c.has}, d, piece.Division{}, 1024); !got.Equal(of) {
			t.Errorf("%v speaks of %+v, want %+v", c.has, got, of)
		}
		again := of.Wish()
		if again.Unit = c.wish.Unit; again != c.wish {
			t.Errorf("%+v is wished for by %+v, want %+v", of, again, c.wish)
		}
		if rest, some := of.Rest(c.has); some {
			t.Errorf("%+v lacks %+v of %v", of, rest, c.has)
		}
		if rest, some := (piece.Division{Kind: "other", N: 100}).Rest(c.has); !some || rest.Kind != c.has.Kind() || rest.N != piece.Count(c.has) {
			t.Errorf("another division lacks %+v of %v", rest, c.has)
		}
		if c.lacks != nil {
			if rest, some := of.Rest(c.lacks); !some || !rest.Equal(c.rest) {
				t.Errorf("%+v lacks %+v of %v, want %+v", of, rest, c.lacks, c.rest)
			}
		}
	}
	for _, w := range []piece.Wish{{}, {Mode: "off"}, {Mode: "mig"}, {Mode: "dynamic"}, {Mode: "half"}} {
		if of, ok := piece.Divide(w, d); ok {
			t.Errorf("%+v is %+v", w, of)
		}
	}
	// A few replicas do not say how many there are.
	few := []piece.Piece{piece.Replica{Number: 1}}
	for n, want := range map[int]int{0: 2, 1: 2, 5: 5} {
		if got := piece.Infer(few, d, piece.Division{Kind: piece.KindReplica, N: n}, 0); got.N != want {
			t.Errorf("one of at least two, where %d are wished for: %d, want %d", n, got.N, want)
		}
	}
	// What is held does not agree with the node's unit: it is more than the GPU has.
	if got := piece.Infer([]piece.Piece{units(0, 20, 0)}, d, piece.Division{}, 1024); got.N != 21 || got.Unit != 0 {
		t.Errorf("21 units of a GPU with 8: %+v", got)
	}
	at := instance(t, "1g.10gb", 6, 1, 0)
	of := piece.Instances([]mig.Placement{at.At, instance(t, "3g.40gb", 0, 4, 0).At})
	if _, some := of.Rest(at); some || of.N != 2 || of.Placements[1] != at.At {
		t.Errorf("%+v of %v", of, at)
	}
	if rest, some := of.Rest(instance(t, "1g.10gb", 4, 1, 0)); !some || rest.N != 1 || rest.Placements[0].Start != 4 {
		t.Errorf("another lacks %+v", rest)
	}
	if a, b := (piece.Division{Kind: piece.KindUnits, N: 8, Unit: 1024}), (piece.Division{Kind: piece.KindUnits, N: 9, Unit: 1024}); !a.SameSize(b) || a.Equal(b) ||
		a.SameSize(piece.Division{Kind: piece.KindUnits, N: 8, Unit: 512}) || (piece.Division{Kind: piece.KindReplica, N: 1}).SameSize(piece.Division{Kind: piece.KindReplica, N: 2}) {
		t.Error("what is of one size")
	}
}

// The part of a piece is its devices among those of the division; without a known division, or in one of
// another kind, it is not known.
func TestPart(t *testing.T) {
	for _, c := range []struct {
		of    piece.Division
		p     piece.Piece
		part  float64
		parts int
	}{
		{piece.Division{Kind: piece.KindUnits, N: 79, Unit: 1024}, units(60, 78, 1024), 19.0 / 79, 0},
		{piece.Division{Kind: piece.KindUnits, N: 8}, units(0, 20, 0), 1, 0},
		{piece.Division{Kind: piece.KindReplica, N: 4}, piece.Replica{Number: 3}, 0.25, 4},
		{piece.Division{Kind: piece.KindReplica, N: 4}, units(0, 0, 0), 0, 4},
		{piece.Division{}, piece.Replica{Number: 3}, 0, 0},
		{piece.Division{Kind: piece.KindWhole, N: 1}, piece.Whole{}, 1, 0},
	} {
		if part, parts := c.of.Part(c.p), c.of.Parts(); part != c.part || parts != c.parts {
			t.Errorf("%v of %+v: part %v of %d, want %v of %d", c.p, c.of, part, parts, c.part, c.parts)
		}
	}
}

func TestJoin(t *testing.T) {
	for want, parts := range map[string][]string{`{}`: {`{}`, `{}`}, `{"a":1,"b":2}`: {`{"a":1}`, `{}`, ` {"b":2} `}, `{"a":1}`: {`{"a":1}`}} {
		var all [][]byte
		for _, p := range parts {
			all = append(all, []byte(p))
		}
		if got := string(piece.Join(all...)); got != want {
			t.Errorf("%v is joined to %s, want %s", parts, got, want)
		}
	}
}

// FuzzRead: what is read as a piece is written as one that says the same, and none sizes anything.
func FuzzRead(f *testing.F) {
	for _, k := range append(piece.Kinds(), "slot", "") {
		for _, text := range []string{`{}`, `{"units":"0-2,7","unitMiB":1024}`, `{"replica":2,"of":4}`, `{"profile":"1c.3g.40gb","start":4,"size":4,"ci":1}`, `{"units":"0-1048576"}`, `[]`, `{"kind":"x","a":{"b":[1,2]}}`} {
			f.Add(string(k), []byte(text))
		}
	}
	f.Fuzz(func(t *testing.T, kind string, data []byte) {
		p, err := piece.Read(piece.Kind(kind), data)
		if err != nil {
			if !errors.Is(err, gpu.ErrInvalid) {
				t.Errorf("%v does not answer to gpu.ErrInvalid", err)
			}
			return
		}
		text, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		back, err := piece.Read(p.Kind(), text)
		if err != nil || fmt.Sprintf("%#v", back) != fmt.Sprintf("%#v", p) {
			t.Errorf("%s is read as %#v, %v; want %#v", text, back, err, p)
		}
		if piece.Count(p) > 1<<20+1 {
			t.Errorf("%s is %d devices", data, piece.Count(p))
		}
	})
}
