// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

// long runs the full counts.
var long = flag.Bool("long", false, "every transition with several pins each, not a sample")

func tell(short, full int) int {
	if *long {
		return full
	}
	return short
}

// field is everything that could stand on a card, found by trying: the other
// side of the argument, which shares no code with the package.
type field struct {
	rows       []row
	placements []Placement // a set of placements is a word, bit by bit in this order
	row        []int       // of each placement
	// gi is the GPU instance that each placement is in, by number, and compute the
	// compute slices that it has there.
	gi      []int
	compute []uint8
	// sets are the legal sets, by[v] those with the counts v.
	sets  []uint64
	legal map[uint64]bool
	by    map[vector][]uint64
	want  []vector // the keys of by
	rooms map[uint64]int
}

// vector is how many of each row.
type vector [20]uint8

func newField(t testing.TB, rows []row) *field {
	f := &field{rows: rows}
	for r, row := range rows {
		for _, s := range row.starts {
			f.add(Placement{Profile: name(t, row.name), Start: s, Size: row.size}, r, len(f.placements), 0xff)
		}
	}
	f.fill()
	return f
}

// splits are the compute instances that drivers offer within GPU instances, by
// the slices of these, with their first slices.
var splits = map[int][]struct {
	slices int
	starts []int
}{
	2: {{1, []int{0, 1}}},
	3: {{1, []int{0, 1, 2}}, {2, []int{0}}},
	4: {{1, []int{0, 1, 2, 3}}, {2, []int{0, 2}}},
	7: {{1, []int{0, 1, 2, 3, 4, 5, 6}}, {2, []int{0, 2, 4}}, {3, []int{0, 4}}, {4, []int{0}}},
}

// newSplitField is the field of a table with all its splits.
func newSplitField(t testing.TB, rows []row) *field {
	f := &field{rows: slices.Clone(rows)}
	gis := 0
	for r, row := range rows {
		for _, s := range row.starts {
			f.add(Placement{Profile: name(t, row.name), Start: s, Size: row.size}, r, gis, 0xff)
			gis++
		}
	}
	for i, gi := range slices.Clone(f.placements) {
		for _, c := range splits[gi.Profile.Slices] {
			for _, ci := range c.starts {
				s := gi
				s.Profile.Compute, s.CI = c.slices, ci
				r := slices.IndexFunc(f.rows, func(r row) bool { return r.name == s.Profile.String() })
				if r < 0 {
					r = len(f.rows)
					f.rows = append(f.rows, row{name: s.Profile.String()})
				}
				f.add(s, r, i, uint8(1<<c.slices-1)<<ci)
			}
		}
	}
	f.fill()
	return f
}

func (f *field) add(s Placement, row, gi int, compute uint8) {
	f.placements, f.row = append(f.placements, s), append(f.row, row)
	f.gi, f.compute = append(f.gi, gi), append(f.compute, compute)
}

// fill finds all that is legal.
func (f *field) fill() {
	f.legal, f.by, f.rooms = map[uint64]bool{}, map[vector][]uint64{}, map[uint64]int{}
	var grow func(from int, set uint64)
	grow = func(from int, set uint64) {
		f.sets = append(f.sets, set)
		f.legal[set] = true
		f.rooms[set] = f.measure(set)
		v := f.count(set)
		if f.by[v] == nil {
			f.want = append(f.want, v)
		}
		f.by[v] = append(f.by[v], set)
		for i := from; i < len(f.placements); i++ {
			if f.allowed(set | 1<<i) {
				grow(i+1, set|1<<i)
			}
		}
	}
	grow(0, 0)
}

// allowed is what is known of the cards: memory belongs to one GPU instance and
// compute slices to one compute instance; of GPU instances with media
// extensions there is one; RTX PRO 6000 has four of each engine and one
// optical-flow accelerator.
func (f *field) allowed(set uint64) bool {
	var memory [12]int    // the GPU instance that has it, from 1 on
	var compute [32]uint8 // what is taken of a GPU instance
	var instances [20]int // GPU instances of each row
	var engines [4]int    // taken
	const rtx = "24gb"    // what the names of its smallest instances have
	me := 0
	for i, s := range f.placements {
		if set>>i&1 == 0 {
			continue
		}
		gi := f.gi[i]
		if compute[gi]&f.compute[i] != 0 {
			return false
		}
		fresh := compute[gi] == 0
		compute[gi] |= f.compute[i]
		if !fresh {
			continue
		}
		for m := s.Start; m < s.Start+s.Size; m++ {
			if memory[m] != 0 {
				return false
			}
			memory[m] = gi + 1
		}
		// Each GPU instance's own placement comes first, and has its number.
		r := f.row[gi]
		if instances[r]++; instances[r] > f.rows[r].max {
			return false
		}
		n := f.rows[r].name
		if strings.HasSuffix(n, "+me") {
			me++
		}
		if strings.HasSuffix(f.rows[0].name, rtx) {
			e := engineOf(n)
			for k, n := range []int{e.Decode, e.Encode, e.JPEG, e.OFA} {
				engines[k] += n
			}
		}
	}
	return me <= 1 && engines[0] <= 4 && engines[1] <= 4 && engines[2] <= 4 && engines[3] <= 1
}

// shared are the placements of one GPU instance with placement i.
func (f *field) shared(i int) (set uint64) {
	for k, gi := range f.gi {
		if gi == f.gi[i] {
			set |= 1 << k
		}
	}
	return set
}

// engineOf is what an instance of RTX PRO 6000 has, also where the table under
// test leaves it out.
func engineOf(profile string) gpu.Engines {
	for _, r := range pro {
		if r.name == profile {
			return *r.engines
		}
	}
	panic(profile)
}

func (f *field) count(set uint64) (v vector) {
	for i := range f.placements {
		v[f.row[i]] += uint8(set >> i & 1)
	}
	return v
}

func (f *field) counts(t testing.TB, v vector) (out []Count) {
	for r, n := range v {
		if n > 0 {
			out = append(out, Count{name(t, f.rows[r].name), int(n)})
		}
	}
	return out
}

// set finds placements again; it fails on one that the card does not have.
func (f *field) set(t testing.TB, placements []Placement) (set uint64) {
	t.Helper()
	for _, s := range placements {
		i := slices.Index(f.placements, s)
		if i < 0 || set>>i&1 == 1 {
			t.Fatalf("%v has %s, which is not on the card, or twice", placements, s)
		}
		set |= 1 << i
	}
	return set
}

func (f *field) room(set uint64) int { return f.rooms[set] }

// measure is the sum of the sizes of all GPU instances that still find room;
// those that differ by what follows a "+" or "-" are one.
func (f *field) measure(set uint64) (sum int) {
	var memory [12]bool
	for i, s := range f.placements {
		if set>>i&1 == 1 {
			for m := s.Start; m < s.Start+s.Size; m++ {
				memory[m] = true
			}
		}
	}
	seen := map[string]bool{}
	for _, s := range f.placements {
		base, _, _ := strings.Cut(s.GPUInstance().Profile.String(), "+")
		base, _, _ = strings.Cut(base, "-")
		if at := fmt.Sprint(base, s.Start); !seen[at] {
			seen[at] = true
			free := true
			for m := s.Start; m < s.Start+s.Size; m++ {
				free = free && !memory[m]
			}
			if free {
				sum += s.Size
			}
		}
	}
	return sum
}

// scene is what stands, as bits and as the package takes it.
type scene struct {
	set, pinned, empty uint64
	holders            map[int]string
	standing           []Standing
}

// scene pins and empties at random.
func (f *field) scene(r *rand.Rand, set uint64, pin, empty float64) scene {
	s := scene{set: set, holders: map[int]string{}}
	for i := range f.placements {
		if set>>i&1 == 0 {
			continue
		}
		o := Standing{Placement: f.placements[i]}
		if r.Float64() < pin {
			s.pinned |= 1 << i
			o.Pinned = true
			o.Holder = []string{"", "a", "a", "b", "c", fmt.Sprint("pod-", i)}[r.IntN(6)]
			s.holders[i] = o.Holder
		}
		if f.compute[i] == 0xff && r.Float64() < empty {
			s.empty |= 1 << i
			o.Empty = true
		}
		s.standing = append(s.standing, o)
	}
	r.Shuffle(len(s.standing), func(a, b int) { s.standing[a], s.standing[b] = s.standing[b], s.standing[a] })
	return s
}

// price is what a target costs, compared from left to right.
type price [5]int

// cost of going from a scene to a target: holders and instances sent away,
// destroys, creates, room.
func (f *field) cost(s *scene, target uint64) price {
	full := s.set &^ s.empty
	// A pinned GPU instance without a compute instance stays as it is or goes.
	dropped := s.pinned & (^target | s.empty)
	var p price
	seen := map[string]bool{}
	for i := range f.placements {
		if dropped>>i&1 == 0 {
			continue
		}
		p[1]++
		if h := s.holders[i]; h == "" || !seen[h] {
			seen[h] = true
			p[0]++
		}
	}
	p[2] = bits.OnesCount64(full &^ target)
	for i := range f.placements {
		// One that is filled stays, unless it is pinned.
		if s.empty>>i&1 == 1 && (s.pinned>>i&1 == 1 || target&f.shared(i) == 0) {
			p[2]++
		}
	}
	p[3] = bits.OnesCount64(target &^ full)
	p[4] = -f.room(target)
	return p
}

func less(a, b price) bool { return slices.Compare(a[:], b[:]) < 0 }

// best is the cheapest price of all targets.
func (f *field) best(s *scene, targets []uint64) (best price) {
	for i, t := range targets {
		if p := f.cost(s, t); i == 0 || less(p, best) {
			best = p
		}
	}
	return best
}

// replay does a plan's steps one by one on what stands and fails where one
// could not be done.
func (f *field) replay(t testing.TB, s *scene, steps []Step) uint64 {
	t.Helper()
	now, empty := s.set, s.empty
	for _, step := range steps {
		i := slices.Index(f.placements, step.Placement)
		if i < 0 {
			t.Fatalf("%s: there is no such placement", step)
		}
		bit := uint64(1) << i
		switch step.Op {
		case Destroy:
			if now&bit == 0 || s.pinned&bit != 0 {
				t.Fatalf("%s: it does not stand, or is pinned", step)
			}
			now, empty = now&^bit, empty&^bit
		case Create:
			if fill := empty &^ s.pinned & f.shared(i); fill != 0 {
				now, empty = now&^fill, empty&^fill
			}
			if now&bit != 0 || !f.allowed(now|bit) {
				t.Fatalf("%s: it cannot stand beside what does", step)
			}
			now |= bit
		default:
			t.Fatalf("%s in a plan of instances", step)
		}
	}
	if empty&^s.pinned != 0 {
		t.Fatalf("GPU instances stay empty after %v", steps)
	}
	return now
}

// transition holds a plan against all that could have been planned.
func (f *field) transition(t testing.TB, c *Card, r *rand.Rand, s *scene, v vector) {
	t.Helper()
	want := f.counts(t, v)
	r.Shuffle(len(want), func(a, b int) { want[a], want[b] = want[b], want[a] })
	given, asked := slices.Clone(s.standing), slices.Clone(want)
	fail := func(format string, args ...any) {
		t.Helper()
		t.Fatalf("%v -> %v: %s", given, asked, fmt.Sprintf(format, args...))
	}
	plan, err := c.Plan(s.standing, want)
	if err != nil {
		fail("%v", err)
	}
	if !reflect.DeepEqual(given, s.standing) || !reflect.DeepEqual(asked, want) {
		fail("the arguments were changed")
	}
	best := f.best(s, f.by[v])
	full := s.set &^ s.empty
	kept := f.set(t, plan.Keep)
	if best[0] == 0 {
		if len(plan.Blocked) > 0 {
			fail("blocked by %v, and there is a way", plan.Blocked)
		}
		got := f.replay(t, s, plan.Steps)
		if f.count(got) != v {
			fail("%s makes %v", plan.text(), got)
		}
		if f.set(t, plan.Result) != got {
			fail("%s does not lead to its result", plan.text())
		}
		if kept != full&got {
			fail("%s keeps something else", plan.text())
		}
		var p price
		for _, step := range plan.Steps {
			if step.Op == Destroy {
				p[2]++
			} else {
				p[3]++
			}
		}
		p[4] = -f.room(got)
		if p != best {
			fail("%s costs %v, the best %v", plan.text(), p, best)
		}
		again := s.standing[:0:0]
		for _, d := range plan.Result {
			o := Standing{Placement: d}
			if i := slices.IndexFunc(s.standing, func(o Standing) bool { return o.Placement == d && o.Pinned }); i >= 0 {
				o = s.standing[i]
			}
			again = append(again, o)
		}
		second, err := c.Plan(again, want)
		if err != nil || len(second.Steps)+len(second.Blocked) > 0 {
			fail("once more: %s %v", second.text(), err)
		}
		return
	}
	// Refused: the holders named are enough, and no cheaper set is.
	if len(plan.Steps) > 0 {
		fail("blocked, and has steps: %s", plan.text())
	}
	if f.set(t, plan.Result) != full {
		fail("blocked, and the result is not what stands: %s", plan.text())
	}
	var p price
	seen := map[string]bool{}
	gone := *s
	gone.standing = slices.Clone(s.standing)
	for _, b := range plan.Blocked {
		i := slices.Index(gone.standing, b)
		if i < 0 || !b.Pinned {
			fail("blocked by %v, which is not in the way", b)
		}
		gone.standing[i].Pinned = false
		gone.pinned &^= f.set(t, []Placement{b.Placement})
		p[1]++
		if b.Holder == "" || !seen[b.Holder] {
			seen[b.Holder] = true
			p[0]++
		}
	}
	if p[0] != best[0] || p[1] != best[1] {
		fail("%s: the smallest set is %d holders with %d instances", plan.text(), best[0], best[1])
	}
	// When they are gone the change goes through, and keeps what was said.
	later, err := c.Plan(gone.standing, want)
	if err != nil || len(later.Blocked) > 0 {
		fail("blocked by %v, and also without: %s %v", plan.Blocked, later.text(), err)
	}
	if s.empty == 0 && !slices.Equal(later.Keep, plan.Keep) {
		fail("keeps %v while blocked, %v then", plan.Keep, later.Keep)
	}
}

// TestPlacementSets holds the number of geometries that the field knows.
func TestPlacementSets(t *testing.T) {
	for _, tc := range []struct {
		rows []row
		n    int
	}{{five, 298}, {seven, 2319}} {
		if n := len(newField(t, tc.rows).sets); n != tc.n {
			t.Errorf("%d sets by trying, want %d", n, tc.n)
		}
		// The package's own word on what fits beside what makes the same.
		if n := setsOf(card(t, tc.rows)); n != tc.n {
			t.Errorf("%d sets by Fits, want %d", n, tc.n)
		}
	}
}

// TestRecordedInventories holds the tables that are shipped with the tests
// against the number of sets that the field knows.
func TestRecordedInventories(t *testing.T) {
	dir := filepath.Join("..", "..", "tests", "testdata")
	for file, want := range map[string]int{
		"a100-40.json": 2319, "a100-80.json": 2319, "a100-80-mig.json": 2319, "h100-80.json": 2319, "h200.json": 2319, "b200.json": 2319,
		"a30.json": 76, "rtx-pro-6000.json": 717, "rtx-pro-6000-mig.json": 717,
	} {
		b, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			t.Fatal(err)
		}
		var inv gpu.Inventory
		if err := json.Unmarshal(b, &inv); err != nil || len(inv.GPUs) == 0 {
			t.Fatalf("%s: %d GPUs, %v", file, len(inv.GPUs), err)
		}
		for i := range inv.GPUs {
			m := &inv.GPUs[i].MIG
			c, err := NewCard(m)
			if err != nil || !c.Known() {
				t.Fatalf("%s: %v, known %v", file, err, c.Known())
			}
			if n := setsOf(c); n != want {
				t.Errorf("%s: GPU %d has %d placement sets, want %d", file, i, n, want)
			}
			standing := Stand(m)
			for k, o := range standing {
				if !c.Fits(placements(standing[:k]), o.Placement) {
					t.Errorf("%s: GPU %d: %s does not fit beside %v", file, i, o.Placement, standing[:k])
				}
			}
		}
	}
}

// setsOf counts the sets that a card's own word allows.
func setsOf(c *Card) (n int) {
	var grow func(from int, standing []Placement)
	grow = func(from int, standing []Placement) {
		n++
		for i := from; i < len(c.Placements()); i++ {
			if c.Fits(standing, c.Placements()[i]) {
				grow(i+1, append(standing, c.Placements()[i]))
			}
		}
	}
	grow(0, nil)
	return n
}

// TestFitsIsLegality asks of every legal set and every placement.
func TestFitsIsLegality(t *testing.T) {
	for _, family := range families {
		f, c := newField(t, family.rows), card(t, family.rows)
		for _, set := range f.sets {
			var standing []Placement
			for i, s := range f.placements {
				if set>>i&1 == 1 {
					standing = append(standing, s)
				}
			}
			for i, s := range f.placements {
				want := set>>i&1 == 0 && f.legal[set|1<<i]
				if got := c.Fits(standing, s); got != want {
					t.Fatalf("%s: Fits(%v, %s) = %v", family.name, standing, s, got)
				}
			}
		}
	}
}

// TestFeasibleIsEveryVector asks for every number of instances up to one more
// than can be.
func TestFeasibleIsEveryVector(t *testing.T) {
	for _, family := range families {
		f, c := newField(t, family.rows), card(t, family.rows)
		asked, yes := 0, 0
		var v vector
		var walk func(r, sum int)
		walk = func(r, sum int) {
			if r < len(f.rows) {
				for n := 0; n <= f.rows[r].max+1 && sum+n <= 9; n++ {
					v[r] = uint8(n)
					if r > 0 && len(f.rows) > 7 && sum+n > 5 {
						break
					}
					walk(r+1, sum+n)
				}
				v[r] = 0
				return
			}
			asked++
			err := c.Feasible(f.counts(t, v))
			if want := f.by[v] != nil; (err == nil) != want {
				t.Fatalf("%s: Feasible(%v) = %v", family.name, f.counts(t, v), err)
			}
			if err == nil {
				yes++
			} else if !errors.Is(err, gpu.ErrNoRoom) {
				t.Fatalf("%s: %v is no ErrNoRoom", family.name, err)
			}
		}
		walk(0, 0)
		if yes != len(f.want) {
			t.Errorf("%s: %d geometries are feasible, want %d", family.name, yes, len(f.want))
		}
		t.Logf("%s: %d placement sets, %d of %d geometries", family.name, len(f.sets), yes, asked)
	}
}

// TestEveryTransition goes from every set to every geometry, with random pins
// and now and then a GPU instance without a compute instance.
func TestEveryTransition(t *testing.T) {
	for _, family := range families {
		t.Run(family.name, func(t *testing.T) {
			t.Parallel()
			f, c := newField(t, family.rows), card(t, family.rows)
			r := rand.New(rand.NewPCG(5, uint64(len(f.sets))))
			all := len(f.sets) * len(f.want)
			share := float64(tell(12_000, 3*all)) / float64(all)
			done := 0
			for _, set := range f.sets {
				for _, v := range f.want {
					times := int(share)
					if r.Float64() < share-float64(times) {
						times++
					}
					for range min(times, 3) {
						s := f.scene(r, set, []float64{0, 0.3, 0.3, 0.7}[r.IntN(4)], []float64{0, 0, 0, 0.3}[r.IntN(4)])
						f.transition(t, c, r, &s, v)
						done++
					}
				}
			}
			t.Logf("%d of %d transitions (%d sets, %d geometries)", done, all, len(f.sets), len(f.want))
		})
	}
}

// TestMakeIsCheapest makes every placement beside every set.
func TestMakeIsCheapest(t *testing.T) {
	for i := range 2 * len(families) {
		family, build, what := families[i/2], newField, ""
		if i%2 == 1 {
			if len(family.rows) == len(seven) {
				continue // the same splits as with five, and many more sets
			}
			build, what = newSplitField, ", with splits"
		}
		t.Run(family.name+what, func(t *testing.T) {
			t.Parallel()
			f, c := build(t, family.rows), card(t, family.rows)
			r := rand.New(rand.NewPCG(6, uint64(len(f.sets))))
			share := float64(tell(8_000, 1<<40)) / float64(len(f.sets)*len(f.placements))
			for _, set := range f.sets {
				for i := range f.placements {
					if r.Float64() < share {
						s := f.scene(r, set, []float64{0, 0.3, 0.7}[r.IntN(3)], []float64{0, 0, 0.3}[r.IntN(3)])
						f.make(t, c, &s, i)
					}
				}
			}
		})
	}
}

func (f *field) make(t testing.TB, c *Card, s *scene, i int) {
	t.Helper()
	plan, err := c.Make(s.standing, f.placements[i])
	if err != nil {
		t.Fatal(err)
	}
	fail := func(format string, args ...any) {
		t.Helper()
		t.Fatalf("make %s beside %v: %s", f.placements[i], s.standing, fmt.Sprintf(format, args...))
	}
	bit := uint64(1) << i
	if s.set&^s.empty&bit != 0 {
		if len(plan.Steps)+len(plan.Blocked) > 0 || f.set(t, plan.Keep) != s.set&^s.empty {
			fail("it stands, and %s", plan.text())
		}
		return
	}
	// Try every set of what could go. An empty GPU instance of the same place is
	// filled, unless it is pinned.
	var best price
	found := false
	for gone := s.set; ; gone = (gone - 1) & s.set {
		rest := s.set &^ gone
		if fill := rest & s.empty & f.shared(i); fill&s.pinned == 0 && f.legal[rest&^fill|bit] {
			var p price
			seen := map[string]bool{}
			for k := range f.placements {
				if gone&s.pinned>>k&1 == 1 {
					p[1]++
					if h := s.holders[k]; h == "" || !seen[h] {
						seen[h] = true
						p[0]++
					}
				}
			}
			p[2] = bits.OnesCount64(gone &^ s.pinned)
			p[4] = -f.room(rest&^fill | bit)
			if !found || less(p, best) {
				best, found = p, true
			}
		}
		if gone == 0 {
			break
		}
	}
	var p price
	seen := map[string]bool{}
	for _, b := range plan.Blocked {
		p[1]++
		if b.Holder == "" || !seen[b.Holder] {
			seen[b.Holder] = true
			p[0]++
		}
	}
	if p[0] != best[0] || p[1] != best[1] {
		fail("%s: the smallest set is %d holders with %d instances", plan.text(), best[0], best[1])
	}
	if len(plan.Blocked) > 0 {
		if len(plan.Steps) > 0 || f.set(t, plan.Result) != s.set&^s.empty {
			fail("blocked, and %s", plan.text())
		}
		return
	}
	now, empty := s.set, s.empty
	for k, step := range plan.Steps {
		at := f.set(t, []Placement{step.Placement})
		if last := k == len(plan.Steps)-1; last != (step.Op == Create) {
			fail("%s", plan.text())
		}
		if step.Op == Destroy {
			if now&at == 0 || s.pinned&at != 0 {
				fail("%s cannot be done", step)
			}
			now, empty = now&^at, empty&^at
			p[2]++
			continue
		}
		fill := empty & f.shared(i)
		now, empty = now&^fill|at, empty&^fill
		if !f.legal[now] {
			fail("%s leads to what cannot stand", plan.text())
		}
	}
	p[4] = -f.room(now)
	if p != best {
		fail("%s costs %v, the best %v", plan.text(), p, best)
	}
	if f.set(t, plan.Result) != now&^empty || f.set(t, plan.Keep) != now&^empty&^bit {
		fail("%s does not lead to its result", plan.text())
	}
}
