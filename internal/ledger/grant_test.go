// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"encoding/json"
	"errors"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/mig"
)

func name(t testing.TB, s string) mig.Name {
	t.Helper()
	n, err := mig.Parse(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// A grant's record says all of it, in the words that doc.go has.
func TestRecord(t *testing.T) {
	for _, c := range []struct {
		grant Grant
		want  string
	}{
		{Grant{GPU: "GPU-a", Piece: Piece{Kind: Units, Units: SetOf([]int{0, 1, 2, 7}), Unit: 1024}, Cap: CapOf(4 << 30)},
			`{"gpu":"GPU-a","kind":"units","units":"0-2,7","unitMiB":1024,"cap":4294967296}`},
		{Grant{GPU: "GPU-a", Piece: Piece{Kind: Units, Units: SetOf([]int{5})}, Cap: Cap{}}, `{"gpu":"GPU-a","kind":"units","units":"5"}`},
		{Grant{GPU: "GPU-a", Piece: Piece{Kind: Replica, Replica: 2, Of: 4}, Cap: CapOf(0)}, `{"gpu":"GPU-a","kind":"replica","replica":2,"of":4,"cap":0}`},
		{Grant{GPU: "GPU-a", Piece: Piece{Kind: Whole}, Cap: NoCap}, `{"gpu":"GPU-a","kind":"whole"}`},
		{Grant{GPU: "GPU-a", Piece: Piece{Kind: Placement, Placement: mig.Placement{Profile: name(t, "1c.3g.40gb"), Start: 4, Size: 4, CI: 1}}, Cap: NoCap},
			`{"gpu":"GPU-a","kind":"placement","profile":"1c.3g.40gb","start":4,"size":4,"ci":1}`},
		{Grant{GPU: "GPU-a", Piece: Piece{Kind: Whole}, Cap: NoCap, NoRoom: true}, `{"gpu":"GPU-a","kind":"whole","noRoom":true}`},
		{Grant{GPU: "GPU-a", Piece: Piece{Kind: Whole}, Cap: NoCap, TimeSlice: gpu.TimeSliceLong}, `{"gpu":"GPU-a","kind":"whole","timeSlice":"long"}`},
	} {
		got, err := json.Marshal(c.grant)
		if err != nil || string(got) != c.want {
			t.Errorf("%+v is written as %s, %v; want %s", c.grant, got, err, c.want)
		}
		var back Grant
		if err := json.Unmarshal(got, &back); err != nil || !reflect.DeepEqual(back, c.grant) {
			t.Errorf("%s is read as %+v, %v", got, back, err)
		}
	}
}

func TestRecordsThatAreRefused(t *testing.T) {
	for _, text := range []string{
		``, `null`, `[]`, `{}`, `{"gpu":"GPU-a"}`, `{"gpu":"GPU-a","kind":"half"}`, `{"gpu":"MIG-a","kind":"whole"}`, `{"gpu":"GPU-a","kind":"units"}`,
		`{"gpu":"GPU-a","kind":"units","units":""}`, `{"gpu":"GPU-a","kind":"units","units":"3-1"}`, `{"gpu":"GPU-a","kind":"units","units":"1,1"}`,
		`{"gpu":"GPU-a","kind":"units","units":"0-4294967296"}`, `{"gpu":"GPU-a","kind":"units","units":"0","unitMiB":-1}`,
		`{"gpu":"GPU-a","kind":"units","units":"0-16777216"}`, `{"gpu":"GPU-a","kind":"replica","of":4000000000}`, `{"gpu":"GPU-a","kind":"replica","replica":2147483647}`,
		`{"gpu":"GPU-a","kind":"placement","profile":"7x"}`, `{"gpu":"GPU-a","kind":"replica","replica":-1}`, `{"gpu":"GPU-a","kind":"replica","cap":-1}`,
		`{"gpu":"GPU-a","kind":"whole","timeSlice":"2ms"}`, `{"gpu":"GPU-a","kind":"whole","noRoom":true,"timeSlice":"long"}`,
		`{"gpu":"GPU-a","kind":"placement","profile":"3g.40gb","start":4,"size":4,"timeSlice":"long"}`,
	} {
		g := Grant{GPU: "GPU-before"}
		err := json.Unmarshal([]byte(text), &g)
		if text != "null" && err == nil || g.GPU != "GPU-before" { // null is no value: package json asks nobody
			t.Errorf("%q is read as %+v, %v", text, g, err)
		}
		if err != nil && text != `` && !errors.Is(err, gpu.ErrInvalid) {
			t.Errorf("%q: %v does not answer to gpu.ErrInvalid", text, err)
		}
	}
}

// A cap tells what follows from it, and nothing where nothing does.
func TestFix(t *testing.T) {
	units, replica := Piece{Kind: Units, Units: SetOf([]int{3, 4})}, Piece{Kind: Replica, Replica: 1}
	for _, c := range []struct {
		piece Piece
		bytes uint64
		unit  gpu.MiB
		of    int
	}{
		{units, 2 << 30, 1024, 0},
		{units, 2047 << 20, 0, 0},
		{units, memcap.None, 0, 0},
		{replica, 2050 << 20, 0, 2},
		{replica, 1025 << 20, 0, 4},
		{replica, 0, 0, 0},
		{Piece{Kind: Whole}, memcap.None, 0, 0},
	} {
		g := Grant{GPU: "GPU-a", Piece: c.piece}.Fix(c.bytes, 4100)
		if g.Cap != CapOf(c.bytes) || g.Unit != c.unit || g.Of != c.of {
			t.Errorf("%+v with a cap of %d MiB is %+v", c.piece, c.bytes>>20, g)
		}
	}
}

// A set is what a map of the same numbers is.
func TestUnitSet(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	draw := func() (UnitSet, []int) {
		var numbers []int
		for n := range 40 {
			if rng.IntN(3) == 0 {
				numbers = append(numbers, n)
			}
		}
		return SetOf(numbers), numbers
	}
	for range 2000 {
		a, in := draw()
		if got := slices.Collect(a.All()); !slices.Equal(got, in) || a.Len() != len(in) {
			t.Fatalf("%v has %v, want %v", a, got, in)
		}
		if want := len(in) > 0 && a.Most() == in[len(in)-1] || len(in) == 0 && a.Most() == -1; !want {
			t.Fatalf("the largest of %v is said to be %d", in, a.Most())
		}
		from := rng.IntN(42)
		if got, want := slices.Collect(a.From(from).All()), slices.DeleteFunc(slices.Clone(in), func(n int) bool { return n < from }); !slices.Equal(got, want) {
			t.Fatalf("%v from %d on is %v", in, from, got)
		}
		text, err := a.MarshalText()
		var back UnitSet
		if err == nil && len(in) > 0 {
			err = back.UnmarshalText(text)
		}
		if err != nil || !slices.Equal(a, back) {
			t.Fatalf("%q is read as %v, %v; want %v", text, back, err, a)
		}
	}
}

// FuzzRecord: what is read as a record is written again as one that says the same.
func FuzzRecord(f *testing.F) {
	f.Add([]byte(`{"gpu":"GPU-a","kind":"units","units":"0-2,7","unitMiB":1024,"cap":4294967296}`))
	f.Add([]byte(`{"gpu":"GPU-a","kind":"placement","profile":"1c.3g.40gb","start":4,"size":4,"ci":1}`))
	f.Add([]byte(`{"gpu":"GPU-a","kind":"whole","units":"1","cap":3}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		var g, again Grant
		if json.Unmarshal(data, &g) != nil || g.GPU == "" {
			return
		}
		text, err := json.Marshal(g)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(text, &again); err != nil || !reflect.DeepEqual(g, again) {
			t.Fatalf("%s: %+v is read again as %+v, %v", data, g, again, err)
		}
	})
}
