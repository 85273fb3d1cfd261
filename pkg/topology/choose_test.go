// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

// take chooses and takes away, as pods that stay do.
func take(t *testing.T, g *Graph, free []gpu.UUID, n int) (set, left []gpu.UUID) {
	t.Helper()
	set, err := g.Choose(Request{Available: free, N: n})
	if err != nil {
		t.Fatalf("choose %d of %v: %v", n, free, err)
	}
	return set, without(free, set)
}

func without(list, out []gpu.UUID) []gpu.UUID {
	return slices.DeleteFunc(slices.Clone(list), func(u gpu.UUID) bool { return slices.Contains(out, u) })
}

// TestMachines plays requests one after the other on machines as they are sold.
// "0-2 3" are the sets that they get; "3 of 4-7" is a request that may take from
// these only; "-0" gives back.
func TestMachines(t *testing.T) {
	dead := bridged(twoSockets(8), 12)
	dead.GPUs[2].Links, dead.GPUs[3].Links = nil, nil
	weak := switched(twoSockets(8), 18)
	weak.GPUs[1].Links[0].NVLink = 17
	asymmetric := twoSockets(8) // each end tells something else, or nothing
	for _, l := range [][3]int{{0, 1, 4}, {1, 0, 2}, {2, 3, 4}, {5, 4, 4}, {6, 7, 1}, {7, 6, 9}} {
		d := &asymmetric.GPUs[l[0]]
		d.Links = append(d.Links, gpu.Link{To: l[1], NVLink: l[2]})
	}
	mixed := twoSockets(8)
	for i := range 4 { // four joined by a ring of thin links, two by a thick one
		join(mixed, i, (i+1)%4, 1)
	}
	join(mixed, 4, 5, 12)
	thick := bridged(twoSockets(8), 12) // as mixed, the other way round
	for i := 4; i < 8; i++ {
		thick.GPUs[i].Links = nil
	}
	for i := range 4 {
		join(thick, 4+i, 4+(i+1)%4, 1)
	}
	oneNode := node(make([][]gpu.Link, 4)...)

	for _, tc := range []struct {
		name  string
		inv   *gpu.Inventory
		steps string
		want  string
	}{
		{"DGX H100", switched(twoSockets(8), 18), "1 3 2 2", "0 | 1 2 3 | 4 5 | 6 7"},
		{"DGX H100, small ones first", switched(twoSockets(8), 18), "1 1 2 4", "0 | 1 | 2 3 | 4 5 6 7"},
		{"DGX H100, odd ones", switched(twoSockets(8), 18), "1 2 1 4", "0 | 2 3 | 1 | 4 5 6 7"},
		{"DGX H100, whole", switched(twoSockets(8), 18), "8", "0 1 2 3 4 5 6 7"},
		{"DGX H100, a lane is down", weak, "1 2 4", "1 | 2 3 | 4 5 6 7"},
		{"16 GPUs", switched(twoSockets(16), 6), "1 3 2 8 2", "0 | 1 2 3 | 4 5 | 8 9 10 11 12 13 14 15 | 6 7"},
		{"DGX-1", cubeMesh(), "4 4", "0 1 2 3 | 4 5 6 7"},
		{"DGX-1, twos", cubeMesh(), "2 2 2 2", "2 3 | 0 4 | 6 7 | 1 5"},
		{"NVLink pairs", bridged(twoSockets(8), 12), "1 3 2 2", "0 | 1 2 3 | 4 5 | 6 7"},
		{"NVLink pairs, odd ones", bridged(twoSockets(8), 12), "1 2 1 3 1", "0 | 2 3 | 1 | 4 5 6 | 7"},
		{"NVLink pairs, one of them dead", dead, "1 2 2 1 2", "2 | 0 1 | 4 5 | 3 | 6 7"},
		{"PCIe only", twoSockets(8), "1 3 2 2", "0 | 1 2 3 | 4 5 | 6 7"},
		{"PCIe only, odd ones", twoSockets(8), "1 2 3 1", "0 | 2 3 | 4 5 6 | 1"},
		{"PCIe only, four do not fit one node", twoSockets(8), "1 1 2 4 -0 -4 -1 2", "0 | 1 | 2 3 | 4 5 6 7 | 0 1"},
		{"asymmetric", asymmetric, "2 2 2 2", "2 3 | 4 5 | 0 1 | 6 7"},
		{"joined before thick", mixed, "4 2 2", "0 1 2 3 | 4 5 | 6 7"},
		{"joined before thick, which comes first", thick, "4 2 2", "4 5 6 7 | 0 1 | 2 3"},
		{"thick before thin", mixed, "2 1 3", "4 5 | 6 | 0 1 2"},
		{"nothing is known", oneNode, "2 1 1", "0 1 | 2 | 3"},
		{"what is left counts beyond what is offered", bridged(twoSockets(8), 12), "1 1:1,2,4 2", "0 | 1 | 2 3"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			g := New(tc.inv)
			free := all(tc.inv)
			var got []string
			for step := range strings.FieldsSeq(tc.steps) {
				if back, ok := strings.CutPrefix(step, "-"); ok {
					free = append(free, gpu.UUID(back))
					continue
				}
				number, of, part := strings.Cut(step, ":")
				r := Request{Available: free, Free: free}
				if part {
					r.Available = nil
					for u := range strings.SplitSeq(of, ",") {
						r.Available = append(r.Available, gpu.UUID(u))
					}
				}
				if _, err := fmt.Sscan(number, &r.N); err != nil {
					t.Fatal(err)
				}
				set, err := g.Choose(r)
				if err != nil {
					t.Fatal(err)
				}
				free = without(free, set)
				got = append(got, strings.Trim(fmt.Sprint(set), "[]"))
			}
			if got := strings.Join(got, " | "); got != tc.want {
				t.Errorf("%s gets %s, want %s", tc.steps, got, tc.want)
			}
		})
	}
}

func TestChooseMust(t *testing.T) {
	inv := bridged(twoSockets(8), 12)
	g := New(inv)
	for _, tc := range []struct {
		available, must []gpu.UUID
		n               int
		want            []gpu.UUID
	}{
		{all(inv), names(5), 2, names(4, 5)},
		{without(all(inv), names(5)), names(5), 2, names(4, 5)},
		{all(inv), names(5, 2), 2, names(2, 5)},
		{all(inv), names(5, 2), 4, names(2, 3, 4, 5)},
		{all(inv), names(7), 1, names(7)},
		{nil, nil, 0, nil},
	} {
		got, err := g.Choose(Request{Available: tc.available, Must: tc.must, N: tc.n})
		if err != nil || !slices.Equal(got, tc.want) {
			t.Errorf("%d of %v with %v: %v, %v, want %v", tc.n, tc.available, tc.must, got, err, tc.want)
		}
	}
}

func TestChooseStrangers(t *testing.T) {
	g := New(bridged(twoSockets(4), 12))
	for _, tc := range []struct {
		available []gpu.UUID
		n         int
		want      []gpu.UUID
	}{
		{[]gpu.UUID{"z", "a", "3", "2"}, 2, names(2, 3)},
		{[]gpu.UUID{"z", "a", "3", "2"}, 3, []gpu.UUID{"2", "3", "a"}},
		{[]gpu.UUID{"z", "", "a"}, 2, []gpu.UUID{"", "a"}},
		{[]gpu.UUID{"z", "a", "3", "2"}, 1, []gpu.UUID{"a"}}, // breaks no pair
	} {
		if got, err := g.Choose(Request{Available: tc.available, N: tc.n}); err != nil || !slices.Equal(got, tc.want) {
			t.Errorf("%d of %v: %v, %v, want %v", tc.n, tc.available, got, err, tc.want)
		}
	}
	if got, err := New(nil).Choose(Request{Available: []gpu.UUID{"b", "a"}, N: 1}); err != nil || !slices.Equal(got, []gpu.UUID{"a"}) {
		t.Errorf("with an empty graph: %v, %v", got, err)
	}
}

func TestChooseRefuses(t *testing.T) {
	g := New(twoSockets(4))
	for _, tc := range []struct {
		r    Request
		want string
	}{
		{Request{Available: names(0, 1), N: 3}, "choose 3 GPUs: 2 are free"},
		{Request{Available: names(0), Must: names(0, 1), N: 3}, "2 are free"},
		{Request{Available: names(0), Must: names(0, 1), N: 1}, "2 must be among them"},
		{Request{Available: names(0), N: -1}, "0 must be among them"},
		{Request{Available: names(0, 1, 0), N: 1}, `"0" is named twice`},
		{Request{Available: names(0, 1), Must: names(1, 1), N: 2}, `"1" is named twice`},
	} {
		got, err := g.Choose(tc.r)
		if !errors.Is(err, gpu.ErrInvalid) || !strings.Contains(err.Error(), tc.want) || got != nil {
			t.Errorf("%+v: %v, %v, want an error with %q", tc.r, got, err, tc.want)
		}
	}
}

func TestSpare(t *testing.T) {
	broken := bridged(twoSockets(8), 12)
	for _, tc := range []struct {
		name string
		inv  *gpu.Inventory
		free []gpu.UUID
		want []gpu.UUID
	}{
		{"pairs, one of them broken up", broken, names(0, 1, 2, 3, 5, 6, 7), names(5, 6, 7, 0, 1, 2, 3)},
		{"a node that is broken up", switched(twoSockets(8), 18), names(0, 1, 2, 3, 5, 6, 7), names(5, 6, 7, 0, 1, 2, 3)},
		{"whole", twoSockets(8), names(7, 6, 5, 4, 3, 2, 1, 0), names(0, 1, 2, 3, 4, 5, 6, 7)},
		{"unlinked ones first", bridged(node(make([][]gpu.Link, 5)...), 4), names(0, 1, 2, 3, 4), names(4, 0, 1, 2, 3)},
		{"strangers", broken, []gpu.UUID{"1", "x", "0", "1"}, []gpu.UUID{"x", "0", "1"}},
		{"none", broken, nil, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			g := New(tc.inv)
			was := slices.Clone(tc.free)
			if got := g.Spare(tc.free); !slices.Equal(got, tc.want) {
				t.Errorf("%v, want %v", got, tc.want)
			}
			if !slices.Equal(tc.free, was) {
				t.Errorf("the argument was changed: %v", tc.free)
			}
		})
	}
}

// A GPU that Spare names first is the one that a request for one gets.
func TestSpareIsChoosingOne(t *testing.T) {
	rng := rand.New(rand.NewPCG(6, 1))
	for range 500 {
		inv := randomNode(rng, 1+rng.IntN(16))
		g := New(inv)
		free := all(inv)
		for _, want := range g.Spare(free) {
			var got []gpu.UUID
			got, free = take(t, g, free, 1)
			if got[0] != want {
				t.Fatalf("%s is chosen, %s is spared first", got[0], want)
			}
		}
	}
}

// randomNode is a machine that nobody would build.
func randomNode(rng *rand.Rand, n int) *gpu.Inventory {
	inv := node(make([][]gpu.Link, n)...)
	linked, wide, speeds, nodes, bridges := rng.IntN(4), 1+rng.IntN(4), rng.IntN(3), 1+rng.IntN(3), 1+rng.IntN(4)
	if rng.IntN(2) == 0 {
		for id := range nodes {
			n := gpu.NUMANode{ID: id}
			for range nodes {
				n.Distances = append(n.Distances, 10+rng.IntN(3)*11)
			}
			inv.NUMA = append(inv.NUMA, n)
		}
	}
	thin := 3
	if rng.IntN(2) == 0 {
		thin = 3 * (1 + n) // a few links in all, so that there are parts
	}
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		if rng.IntN(8) > 0 {
			d.NUMA = numaNode(rng.IntN(nodes) - rng.IntN(2))
		}
		for depth := range rng.IntN(4) {
			d.Path = append(d.Path, fmt.Sprint(depth, rng.IntN(bridges)))
		}
		link := func() gpu.Link {
			l := gpu.Link{NVLink: rng.IntN(wide + 1)}
			if speeds > 0 {
				l.LaneMBps = 25000 * (1 + rng.IntN(speeds))
			}
			return l
		}
		if linked == 3 && rng.IntN(8) > 0 {
			l := link()
			l.Switch = true
			d.Links = append(d.Links, l)
		}
		for to := range n {
			if linked > 0 && rng.IntN(thin) < linked {
				l := link()
				l.To = to
				d.Links = append(d.Links, l)
			}
		}
	}
	return inv
}

// judged is a set's score by the words of the package comment, in the slowest
// and plainest way.
type judged struct{ parts, link, linkLeft, near, nearLeft int }

func (a judged) compare(b judged) int {
	return cmp.Or(cmp.Compare(b.parts, a.parts), cmp.Compare(a.link, b.link), cmp.Compare(a.linkLeft, b.linkLeft),
		cmp.Compare(a.near, b.near), cmp.Compare(a.nearLeft, b.nearLeft))
}

type judge struct {
	pool       []gpu.UUID
	link, near [][]int
}

func newJudge(g *Graph, pool []gpu.UUID) *judge {
	j := &judge{pool: pool}
	speeds := true
	for i := range g.inv.GPUs {
		for k := range g.inv.GPUs {
			if p := g.Between(g.inv.GPUs[i].UUID, g.inv.GPUs[k].UUID); p.Linked() && p.MBps == 0 {
				speeds = false
			}
		}
	}
	for _, a := range pool {
		var link, near []int
		for _, b := range pool {
			p := g.Between(a, b)
			l := 0
			switch {
			case p.Linked() && speeds:
				l = p.MBps
			case p.Linked():
				l = max(p.NVLink, 1)
			}
			link = append(link, l)
			far := 0
			if p.NUMA == Different && p.Distance > 0 {
				far = 255 - p.Distance
			}
			near = append(near, map[NUMA]int{Same: 2 << 38, Unknown: 1 << 38}[p.NUMA]+far<<16+
				map[Level]int{LevelSwitch: 5, LevelSwitches: 4, LevelHost: 3, LevelNode: 2, LevelUnknown: 1}[p.Level])
		}
		j.link, j.near = append(j.link, link), append(j.near, near)
	}
	return j
}

func (j *judge) of(set uint) judged {
	var s judged
	rest := set
	for rest != 0 { // parts, by growing each until it does not
		part := rest & -rest
		for grown := true; grown; {
			grown = false
			for a := range j.pool {
				for b := range j.pool {
					if part>>a&1 == 1 && set>>b&1 == 1 && part>>b&1 == 0 && j.link[a][b] > 0 {
						part |= 1 << b
						grown = true
					}
				}
			}
		}
		rest &^= part
		s.parts++
	}
	for a := range j.pool {
		for b := range a {
			switch set>>a&1 + set>>b&1 {
			case 2:
				s.link += j.link[a][b]
				s.near += j.near[a][b]
			case 0:
				s.linkLeft += j.link[a][b]
				s.nearLeft += j.near[a][b]
			}
		}
	}
	return s
}

// best tries every set of n of the pool. Of equal ones it is that whose first
// GPUs come first.
func (j *judge) best(open, must uint, n int) (best uint, score judged) {
	for set := range uint(1) << len(j.pool) {
		if bits.OnesCount(set) != n || set&must != must || set&^(open|must) != 0 {
			continue
		}
		s := j.of(set)
		c := s.compare(score)
		if diff := set ^ best; best == 0 || c > 0 || c == 0 && diff&-diff&set != 0 {
			best, score = set, s
		}
	}
	return best, score
}

func (j *judge) set(uuids []gpu.UUID) uint {
	var set uint
	for _, u := range uuids {
		set |= 1 << slices.Index(j.pool, u)
	}
	return set
}

// checkChoice compares one choice with every other there is.
func checkChoice(t *testing.T, g *Graph, r Request, pool []gpu.UUID) {
	t.Helper()
	got, err := g.Choose(r)
	if err != nil {
		t.Fatal(err)
	}
	j := newJudge(g, pool)
	want, score := j.best(j.set(r.Available), j.set(r.Must), r.N)
	if set := j.set(got); set != want {
		t.Fatalf("%+v of %+v:\n%v, which is %+v,\nwant %b, which is %+v", r, g.inv.GPUs, got, j.of(set), want, score)
	}
}

func TestChooseAgainstBruteForce(t *testing.T) {
	graphs := 10000
	if testing.Short() {
		graphs = 1000
	}
	for i := range graphs {
		rng := rand.New(rand.NewPCG(6, uint64(i)))
		// Sets of twelve are a thousand times as many as those of two.
		n := min(1+rng.IntN(12), 1+rng.IntN(14), 12)
		inv := randomNode(rng, n)
		pool := all(inv)
		var r Request
		for _, u := range pool {
			switch rng.IntN(8) {
			case 0:
				r.Free = append(r.Free, u) // only in the pool
			case 1:
				if len(r.Must) < 3 {
					r.Must = append(r.Must, u)
					break
				}
				fallthrough
			default:
				r.Available = append(r.Available, u)
			}
		}
		r.N = len(r.Must) + rng.IntN(len(r.Available)+1)
		rng.Shuffle(len(r.Available), func(a, b int) { r.Available[a], r.Available[b] = r.Available[b], r.Available[a] })
		pool = slices.DeleteFunc(pool, func(u gpu.UUID) bool {
			return !slices.Contains(r.Free, u) && !slices.Contains(r.Must, u) && !slices.Contains(r.Available, u)
		})
		if r.N > 0 {
			checkChoice(t, New(inv), r, pool)
		}
	}
}

// Of 16 GPUs, too, nothing is better than what is chosen.
func TestChooseOf16AgainstBruteForce(t *testing.T) {
	rng := rand.New(rand.NewPCG(6, 16))
	machines := []*gpu.Inventory{cubeMesh16(), bridged(twoSockets(16), 4)}
	for range 3 {
		machines = append(machines, randomNode(rng, 16))
	}
	for _, inv := range machines {
		for n := 1; n <= 16; n++ {
			if testing.Short() && n > 3 && n < 13 {
				continue
			}
			g := New(inv)
			p := g.pool(all(inv))
			open := make([]int, len(p.uuids))
			for i := range open {
				open[i] = i
			}
			if _, ok := p.search(nil, open, n); !ok {
				t.Errorf("%d of 16 are too many to search", n)
			}
			checkChoice(t, g, Request{Available: all(inv), N: n}, all(inv))
		}
	}
}

// cubeMesh16 is two cube meshes without a link between them.
func cubeMesh16() *gpu.Inventory {
	inv := twoSockets(16)
	for side := range 2 {
		for i, d := range cubeMesh().GPUs {
			for _, l := range d.Links {
				l.To += 8 * side
				inv.GPUs[8*side+i].Links = append(inv.GPUs[8*side+i].Links, l)
			}
		}
	}
	return inv
}

// More GPUs than any machine has are no reason to hang, to crash, or to take
// what is not joined where something is.
func TestChooseOfMany(t *testing.T) {
	for _, n := range []int{17, 24, 64, 72} {
		inv := bridged(twoSockets(n), 12)
		g := New(inv)
		if set, err := g.Choose(Request{Available: all(inv)}); err != nil || len(set) > 0 {
			t.Fatalf("none of %d: %v, %v", n, set, err)
		}
		for _, want := range []int{1, 2, 3, n / 2, n - 1, n} {
			set, err := g.Choose(Request{Available: all(inv), N: want})
			if err != nil || len(set) != want {
				t.Fatalf("%d of %d: %v, %v", want, n, set, err)
			}
			pairs := 0
			for _, u := range set {
				if i := g.at[u]; i%2 == 0 && slices.Contains(set, gpu.UUID(fmt.Sprint(i+1))) {
					pairs++
				}
			}
			if pairs != want/2 {
				t.Errorf("%d of %d: %v has %d pairs", want, n, set, pairs)
			}
		}
	}
}

// Where both can answer, adding one GPU after the other is close to the best:
// this keeps the two of one mind about what better means.
func TestGrowIsNeverBetter(t *testing.T) {
	rng := rand.New(rand.NewPCG(6, 17))
	same, tried := 0, 0
	for range 300 {
		inv := randomNode(rng, 2+rng.IntN(9))
		g := New(inv)
		p := g.pool(all(inv))
		j := newJudge(g, p.uuids)
		n := 1 + rng.IntN(len(p.uuids))
		open := make([]int, len(p.uuids))
		for i := range open {
			open[i] = i
		}
		must := open[:rng.IntN(2)]
		need := n - len(must)
		as := func(set []int) judged {
			var s uint
			for _, i := range set {
				s |= 1 << i
			}
			if bits.OnesCount(s) != n {
				t.Fatalf("%v is not %d GPUs", set, n)
			}
			return j.of(s)
		}
		set, ok := p.search(must, open[len(must):], need)
		if !ok {
			t.Fatalf("%d of %d are too many to search", need, len(open))
		}
		exact, grown := as(set), as(p.grow(must, open[len(must):], need))
		if start := open[:max(len(must), 1)]; n >= len(start) {
			set, sum := p.growFrom(start, open, n-len(start))
			if want := as(set); sum.parts != want.parts || sum.in.link != int64(want.link) || sum.in.near != int64(want.near) {
				t.Fatalf("%v is taken for %+v and is %+v", set, sum, want)
			}
		}
		if grown.compare(exact) > 0 {
			t.Fatalf("grown %+v, exact %+v", grown, exact)
		}
		tried++
		if grown == exact {
			same++
		}
	}
	if same < tried*3/4 {
		t.Errorf("%d of %d are as good as they can be", same, tried)
	}
}

// Speeds are compared although a GPU that is named twice has, under its second
// entry, a link of unknown speed. Found by FuzzChoose.
func TestSpeedsBesideARepeatedGPU(t *testing.T) {
	link := func(to, lanes, mbps int) gpu.Link { return gpu.Link{To: to, NVLink: lanes, LaneMBps: mbps} }
	inv := &gpu.Inventory{GPUs: []gpu.Device{
		{Index: 0, UUID: "a", Links: []gpu.Link{link(1, 4, 10), link(2, 2, 100)}},
		{Index: 1, UUID: "b"},
		{Index: 2, UUID: "c"},
		{Index: 3, UUID: "b", Links: []gpu.Link{link(2, 1, 0)}},
	}}
	got, err := New(inv).Choose(Request{Available: []gpu.UUID{"a", "b", "c"}, N: 2})
	if want := []gpu.UUID{"a", "c"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("chose %v, %v; want %v: 200 MB/s over two lanes, not 40 over four", got, err, want)
	}
}

// FuzzChoose holds that whatever a graph and a request are, the answer is a legal
// set, the same whatever the order of the lists, and as good as any other.
func FuzzChoose(f *testing.F) {
	f.Add([]byte{8, 2, 0, 1, 4, 1, 0, 4}, uint16(0xff), uint16(1), int8(3))
	f.Add([]byte{16, 1, 1, 1, 18, 1, 1}, uint16(0xffff), uint16(0), int8(8))
	f.Add([]byte{3, 255, 7, 255, 7, 200}, uint16(7), uint16(0xf000), int8(5))
	f.Add([]byte{}, uint16(1), uint16(1), int8(-1))
	f.Fuzz(func(t *testing.T, data []byte, available, must uint16, n int8) {
		next := func() int {
			if len(data) == 0 {
				return 0
			}
			b := data[0]
			data = data[1:]
			return int(int8(b))
		}
		inv := new(gpu.Inventory)
		for range next() & 31 {
			d := gpu.Device{Index: next() & 15, UUID: gpu.UUID(fmt.Sprint(next() & 15)), NUMA: numaNode(next() & 3)}
			for range next() & 7 {
				d.Links = append(d.Links, gpu.Link{To: next() & 15, NVLink: next() << (next() & 63), LaneMBps: next() << (next() & 63), Switch: next()&1 == 1})
			}
			for range next() & 3 {
				d.Path = append(d.Path, fmt.Sprint(next()&3))
			}
			inv.GPUs = append(inv.GPUs, d)
		}
		r := Request{N: int(n)}
		for i := range 16 {
			if available>>i&1 == 1 {
				r.Available = append(r.Available, gpu.UUID(fmt.Sprint(i)))
			}
			if must>>i&1 == 1 {
				r.Must = append(r.Must, gpu.UUID(fmt.Sprint(i)))
			}
		}
		g := New(inv)
		got, err := g.Choose(r)
		union := bits.OnesCount16(available | must)
		if legal := r.N >= len(r.Must) && r.N <= union; legal != (err == nil) || err != nil && !errors.Is(err, gpu.ErrInvalid) {
			t.Fatalf("%+v: %v", r, err)
		}
		if err != nil {
			return
		}
		if _, twice := repeated(got); twice || len(got) != r.N {
			t.Fatalf("%+v: %v", r, got)
		}
		for _, u := range r.Must {
			if !slices.Contains(got, u) {
				t.Fatalf("%+v: %v", r, got)
			}
		}
		for _, u := range got {
			if !slices.Contains(r.Available, u) && !slices.Contains(r.Must, u) {
				t.Fatalf("%+v: %v", r, got)
			}
		}
		slices.Reverse(r.Available)
		slices.Reverse(r.Must)
		if again, err := g.Choose(r); err != nil || !slices.Equal(again, got) {
			t.Fatalf("%+v: %v, and in another order %v (%v)", r, got, again, err)
		}
		if union <= 8 && r.N > 0 {
			checkChoice(t, g, r, g.pool(r.Available, r.Must).uuids)
		}
		g.Spare(r.Available)
		g.Weak()
		g.Matrix()
	})
}
