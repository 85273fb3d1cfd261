// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"encoding/json"
	"errors"
	"reflect"
	"testing"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/compute"
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
		{Grant{GPU: "GPU-a", Piece: piece.Units{Set: piece.SetOf([]int{0, 1, 2, 7}), Unit: 1024}, Cap: piece.CapOf(4 << 30)},
			`{"gpu":"GPU-a","kind":"units","units":"0-2,7","unitMiB":1024,"cap":4294967296}`},
		{Grant{GPU: "GPU-a", Piece: piece.Units{Set: piece.SetOf([]int{5})}, Cap: piece.Cap{}}, `{"gpu":"GPU-a","kind":"units","units":"5"}`},
		{Grant{GPU: "GPU-a", Piece: piece.Replica{Number: 2, Of: 4}, Cap: piece.CapOf(0)}, `{"gpu":"GPU-a","kind":"replica","replica":2,"of":4,"cap":0}`},
		{Grant{GPU: "GPU-a", Piece: piece.Whole{}, Cap: piece.NoCap}, `{"gpu":"GPU-a","kind":"whole"}`},
		{Grant{GPU: "GPU-a", Piece: piece.Placement{At: mig.Placement{Profile: name(t, "1c.3g.40gb"), Start: 4, Size: 4, CI: 1}}, Cap: piece.NoCap},
			`{"gpu":"GPU-a","kind":"placement","profile":"1c.3g.40gb","start":4,"size":4,"ci":1}`},
		{Grant{GPU: "GPU-a", Piece: piece.Whole{}, Cap: piece.NoCap, NoRoom: true}, `{"gpu":"GPU-a","kind":"whole","noRoom":true}`},
		{Grant{GPU: "GPU-a", Piece: piece.Replica{Number: 1, Of: 4}, Cap: piece.CapOf(1024), Compute: compute.Share{Ceiling: 26}},
			`{"gpu":"GPU-a","kind":"replica","replica":1,"of":4,"cap":1024,"compute":{"ceiling":26}}`},
		{Grant{GPU: "GPU-a", Piece: piece.Whole{}, Cap: piece.NoCap, TimeSlice: gpu.TimeSliceLong}, `{"gpu":"GPU-a","kind":"whole","timeSlice":"long"}`},
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
		``, `null`, `[]`, `{}`, `{"gpu":"GPU-a"}`, `{"gpu":"GPU-a","kind":""}`, `{"gpu":"MIG-a","kind":"whole"}`, `{"gpu":"GPU-a","kind":"units"}`,
		`{"gpu":"GPU-a","kind":"units","units":""}`, `{"gpu":"GPU-a","kind":"units","units":"3-1"}`, `{"gpu":"GPU-a","kind":"units","units":"1,1"}`,
		`{"gpu":"GPU-a","kind":"units","units":"0-4294967296"}`, `{"gpu":"GPU-a","kind":"units","units":"0","unitMiB":-1}`,
		`{"gpu":"GPU-a","kind":"units","units":"0-16777216"}`, `{"gpu":"GPU-a","kind":"replica","of":4000000000}`, `{"gpu":"GPU-a","kind":"replica","replica":2147483647}`,
		`{"gpu":"GPU-a","kind":"placement","profile":"7x"}`, `{"gpu":"GPU-a","kind":"replica","replica":-1}`, `{"gpu":"GPU-a","kind":"replica","cap":-1}`,
		`{"gpu":"GPU-a","kind":"whole","compute":{"ceiling":26}}`, `{"gpu":"GPU-a","kind":"replica","of":4,"compute":{"ceiling":101}}`,
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

// A newer version's piece, of a kind that this one does not know, is kept as it was and
// leaves nobody room on its GPU.
func TestRecordOfAnUnknownKind(t *testing.T) {
	const text = `{"gpu":"GPU-a","kind":"slot","of":7,"slot":3,"cap":1024,"timeSlice":"long"}`
	var g Grant
	if err := json.Unmarshal([]byte(text), &g); err != nil {
		t.Fatal(err)
	}
	if err := g.Kind().Check(); !errors.Is(err, piece.UnknownKind{Word: "slot"}) {
		t.Errorf("its kind's error is %v", err)
	}
	if got, err := json.Marshal(g); err != nil || string(got) != text {
		t.Errorf("it is written again as %s, %v; want %s", got, err, text)
	}
	for _, other := range []piece.Piece{piece.Whole{}, piece.Units{}, piece.Replica{}, piece.Placement{}, g.Piece} {
		if !overlap(nil, []Grant{g}, []Grant{{GPU: "GPU-a", Piece: other}}) || !overlap(nil, []Grant{{GPU: "GPU-a", Piece: other}}, []Grant{g}) {
			t.Errorf("%v has room beside it", other)
		}
	}
}

// A cap tells what follows from it, and nothing where nothing does.
func TestFix(t *testing.T) {
	units, replica := piece.Units{Set: piece.SetOf([]int{3, 4})}, piece.Replica{Number: 1}
	for _, c := range []struct {
		of    piece.Piece
		bytes uint64
		want  piece.Piece
	}{
		{units, 2 << 30, piece.Units{Set: units.Set, Unit: 1024}},
		{units, 2047 << 20, units},
		{units, memcap.None, units},
		{replica, 2050 << 20, piece.Replica{Number: 1, Of: 2}},
		{replica, 1025 << 20, piece.Replica{Number: 1, Of: 4}},
		{replica, 0, replica},
		{piece.Whole{}, memcap.None, piece.Whole{}},
	} {
		g := Grant{GPU: "GPU-a", Piece: c.of}.Fix(c.bytes, 4100)
		if g.Cap != piece.CapOf(c.bytes) || !reflect.DeepEqual(g.Piece, c.want) {
			t.Errorf("%+v with a cap of %d MiB is %+v", c.of, c.bytes>>20, g)
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
