// SPDX-License-Identifier: Apache-2.0

package advise

import (
	"cmp"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

var long = flag.Bool("long", false, "as many random traces as a night has time for")

const unit = 6000

// small is a GPU with four memory slices, laid out as an A30's.
func small(n int) gpu.Device {
	profile := func(name string, slices int, memory gpu.MiB, size int, starts ...int) gpu.Profile {
		p := gpu.Profile{Name: name, Slices: slices, Memory: memory, Max: len(starts)}
		for _, s := range starts {
			p.Placements = append(p.Placements, gpu.Placement{Start: s, Size: size})
		}
		return p
	}
	return gpu.Device{Index: n, UUID: gpu.UUID(fmt.Sprintf("GPU-%d", n)), Model: "small", Memory: 24576, Reserved: 576,
		MIG: gpu.MIG{Capable: true, Profiles: []gpu.Profile{
			profile("1g.6gb", 1, 5950, 1, 0, 1, 2, 3), profile("2g.12gb", 2, 11970, 2, 0, 2), profile("4g.24gb", 4, 24000, 4, 0)}}}
}

func smalls(n int) Node {
	inv := &gpu.Inventory{}
	for i := range n {
		inv.GPUs = append(inv.GPUs, small(i))
	}
	return Node{Inventory: inv, Unit: unit}
}

func profile(name string) mig.Name {
	n, err := mig.Parse(name)
	if err != nil {
		panic(err)
	}
	return n
}

// What follows is the same once more, as simple as can be: GPUs of four cells.

// model is how one GPU is laid out: "whole", "shared", "demand" or "fixed", and then with how
// many instances of one, two and four cells.
type model struct {
	kind  string
	fixed [3]int
}

var (
	cells  = [3]int{1, 2, 4}
	memory = [3]int{5950, 11970, 24000}
	labels = [3]string{"1g.6gb", "2g.12gb", "4g.24gb"}
)

// models are all that a GPU can be.
func models() []model {
	out := []model{{kind: "whole"}, {kind: "shared"}, {kind: "demand"}}
	for a := range 5 {
		for b := range 3 {
			for c := range 2 {
				if n := a + 2*b + 4*c; n > 0 && n <= 4 {
					out = append(out, model{"fixed", [3]int{a, b, c}})
				}
			}
		}
	}
	return out
}

func (m model) want(u gpu.UUID) config.Want {
	w := config.Want{GPU: u, API: ledger.DevicePlugin}
	switch m.kind {
	case "dynamic":
		w.Mode, w.API, w.OnDemand = config.Dynamic, ledger.DRA, true
	case "whole":
		w.Mode = config.Whole
	case "shared":
		w.Mode, w.TimeSlice = config.Shared, gpu.TimeSliceDefault
	case "demand":
		w.Mode, w.OnDemand = config.MIG, true
	default:
		w.Mode = config.MIG
		for i, n := range m.fixed {
			if n > 0 {
				w.Geometry = append(w.Geometry, mig.Count{Profile: profile(labels[i]), N: n})
			}
		}
	}
	return w
}

// thing is what can be asked for: 0 to 2 MIG instances, 3 memory in units, 4 whole GPUs.
type thing struct{ what, n int }

// simple is a node. The scheduler knows of so many MIG instances of each kind that there are,
// and how many pods have.
type simple struct {
	gpus         []*cardboard
	known, inUse [3]int
	// dynamic says that an idle GPU becomes what is asked for.
	dynamic bool
}

// hear tells the scheduler how many there are: only of more, or of less too.
func (s *simple) hear(less bool) {
	for what := range s.known {
		if n := s.count(thing{what, 1}) + s.inUse[what]; less || n > s.known[what] {
			s.known[what] = n
		}
	}
}

// sees is how many of a thing the scheduler takes to be free.
func (s *simple) sees(t thing) int {
	if t.what < 3 {
		return s.known[t.what] - s.inUse[t.what]
	}
	return s.count(t)
}

// cardboard is a GPU: of a shared one how many units are taken, of one with MIG who has each
// cell and where instances stand, in order.
type cardboard struct {
	model
	holders, taken int
	busy           [4]bool
	warm           []spot
}

// card is an empty GPU. Fixed instances stand where they leave the most room, and from left to
// right, small ones first.
func card(m model) *cardboard {
	c := &cardboard{model: m}
	if m.kind != "fixed" {
		return c
	}
	var all, best []spot
	for what := range cells {
		all = append(all, spots(what)...)
	}
	room := -1
	sets(len(all), m.fixed[0]+m.fixed[1]+m.fixed[2], func(pick []int) {
		try, left := cardboard{}, m.fixed
		var at []spot
		for _, i := range pick {
			if left[all[i].what]--; left[all[i].what] < 0 || !try.free(all[i]) {
				return
			}
			try.cover(all[i], true)
			at = append(at, all[i])
		}
		order := func(a, b spot) int { return cmp.Or(cmp.Compare(a.start, b.start), cmp.Compare(a.what, b.what)) }
		slices.SortFunc(at, order)
		if r := try.room(); r > room || r == room && slices.CompareFunc(at, best, order) < 0 {
			room, best = r, at
		}
	})
	c.warm = best
	return c
}

func (c *cardboard) cover(s spot, taken bool) {
	for i := range c.busy {
		if s.covers(i) {
			c.busy[i] = taken
		}
	}
}

// places are where an instance can be had.
func (c *cardboard) places(what int) (out []spot) {
	of := spots(what)
	switch c.kind {
	case "fixed":
		of = c.warm
	case "demand":
	default:
		return nil
	}
	for _, s := range of {
		if s.what == what && c.free(s) {
			out = append(out, s)
		}
	}
	return out
}

type spot struct{ what, start int }

func (s spot) covers(i int) bool { return i >= s.start && i < s.start+cells[s.what] }
func (s spot) clash(o spot) bool { return s.covers(o.start) || o.covers(s.start) }
func (c *cardboard) free(s spot) bool {
	for i := range c.busy {
		if c.busy[i] && s.covers(i) {
			return false
		}
	}
	return true
}

func spots(what int) (out []spot) {
	for at := 0; at+cells[what] <= 4; at += cells[what] {
		out = append(out, spot{what, at})
	}
	return out
}

// room is the sum of the sizes of all that could be made.
func (c *cardboard) room() (n int) {
	for what := range cells {
		for _, s := range spots(what) {
			if c.free(s) {
				n += cells[what]
			}
		}
	}
	return n
}

// count is how many of a thing the scheduler sees.
func (s *simple) count(t thing) (n int) {
	for _, c := range s.gpus {
		switch {
		case t.what == 4 && c.kind == "whole" && c.holders == 0:
			n++
		case t.what == 3 && c.kind == "shared":
			n += 4 - c.taken
		case t.what < 3:
			n += len(c.places(t.what))
		}
	}
	return n
}

// part is what a pod has of a GPU.
type part struct {
	gpu, what, n int
	at           spot
}

// take finds room for a thing; nil where there is none.
func (s *simple) take(t thing) []part {
	for {
		if out := s.find(t); out != nil || !s.dynamic {
			return out
		}
		kind := []string{"demand", "demand", "demand", "shared", "whole"}[t.what]
		i := slices.IndexFunc(s.gpus, func(c *cardboard) bool { return c.holders == 0 && c.kind != kind })
		if i < 0 {
			return nil
		}
		s.gpus[i] = card(model{kind: kind})
	}
}

// find finds room on GPUs as they are.
func (s *simple) find(t thing) (out []part) {
	if t.what == 3 {
		best := -1
		for i, c := range s.gpus {
			if c.kind == "shared" && 4-c.taken >= t.n && (best < 0 || c.taken > s.gpus[best].taken) {
				best = i
			}
		}
		if best < 0 {
			return nil
		}
		s.gpus[best].taken += t.n
		s.gpus[best].holders++
		return []part{{gpu: best, what: 3, n: t.n}}
	}
	if s.count(t) < t.n {
		return nil
	}
	if t.what == 4 {
		for i, c := range s.gpus {
			if c.kind == "whole" && c.holders == 0 && len(out) < t.n {
				c.holders++
				out = append(out, part{gpu: i, what: 4})
			}
		}
		return out
	}
	return s.instances(t)
}

// instances tries every set of places.
func (s *simple) instances(t thing) []part {
	var all []part
	for i, c := range s.gpus {
		for _, at := range c.places(t.what) {
			all = append(all, part{gpu: i, what: t.what, at: at})
		}
	}
	var best []part
	var worth []int
	sets(len(all), t.n, func(pick []int) {
		var set []part
		for _, i := range pick {
			set = append(set, all[i])
		}
		if w := s.worth(set); best == nil || slices.Compare(w, worth) > 0 {
			best, worth = set, w
		}
	})
	for _, p := range best {
		c := s.gpus[p.gpu]
		c.holders++
		s.inUse[p.what]++
		c.cover(p.at, true)
		if c.kind == "demand" {
			c.warm = slices.DeleteFunc(c.warm, func(o spot) bool { return o.clash(p.at) })
			c.warm = append(c.warm, p.at)
		}
	}
	return best
}

// worth is how good a set of places is: how much room is left, how many stand, how many idle
// ones stay, and then on which GPUs and where it is.
func (s *simple) worth(set []part) []int {
	w := make([]int, 4)
	after := make([]cardboard, len(s.gpus))
	for i, c := range s.gpus {
		after[i] = *c
	}
	for _, p := range set {
		c := &after[p.gpu]
		if slices.Contains(c.warm, p.at) {
			w[1]++
		}
		c.cover(p.at, true)
		rank := p.gpu
		if s.gpus[p.gpu].holders == 0 {
			rank += len(s.gpus)
		}
		w[3] -= rank
	}
	for i := range after {
		w[0] += after[i].room()
		for _, o := range after[i].warm {
			if after[i].free(o) {
				w[2]++
			}
		}
	}
	return w
}

// sets calls f with every set of k of n.
func sets(n, k int, f func([]int)) {
	pick := make([]int, 0, k)
	var grow func(from int)
	grow = func(from int) {
		if len(pick) == k {
			f(pick)
			return
		}
		for i := from; i < n; i++ {
			pick = append(pick, i)
			grow(i + 1)
			pick = pick[:len(pick)-1]
		}
	}
	grow(0)
}

func (s *simple) put(parts []part) {
	for _, p := range parts {
		c := s.gpus[p.gpu]
		c.holders--
		switch {
		case p.what == 3:
			c.taken -= p.n
		case p.what < 3:
			s.inUse[p.what]--
			c.cover(p.at, false)
		}
	}
}

// share is what a pod has of its GPUs, in quarters.
func share(parts []part) (n int) {
	for _, p := range parts {
		switch p.what {
		case 3:
			n += p.n
		case 4:
			n += 4
		default:
			n += cells[p.what]
		}
	}
	return n
}

// offers says whether a node has a resource at all.
func (s *simple) offers(what int) bool { return s.dynamic || s.count(thing{what, 1}) > 0 }

// way is what a thing is asked for as, and fits whether an empty node can serve it.
func (s *simple) way(t thing) (as thing, fits bool) {
	type option struct {
		thing
		memory int
	}
	var all []option
	ok := func(o thing) bool {
		if !s.offers(o.what) {
			return false
		}
		had := s.take(o)
		s.put(had)
		return had != nil
	}
	if s.offers(t.what) && ok(t) {
		return t, true
	}
	need := 24000
	if t.what < 3 {
		need = memory[t.what]
	} else if t.what == 3 {
		need = t.n * unit
	}
	n := t.n
	if t.what == 3 {
		n = 1
	}
	for what := range cells {
		if t.what != 4 && memory[what] >= need && (t.what > 2 || what > t.what) || t.what == 4 && what == 2 {
			all = append(all, option{thing{what, n}, n * memory[what]})
		}
	}
	if t.what < 3 {
		units := (n*need + unit - 1) / unit
		all = append(all, option{thing{3, units}, units * unit})
	} else if t.what == 4 && t.n == 1 {
		all = append(all, option{thing{3, 4}, 24000})
	}
	if t.what != 4 && need <= 24000 {
		all = append(all, option{thing{4, n}, n * 24000})
	}
	// Equal memory goes by the resource's name: gpu, gpu-mem, mig-….
	name := func(what int) string { return []string{"mig-1", "mig-2", "mig-4", "gpu-mem", "gpu"}[what] }
	slices.SortStableFunc(all, func(a, b option) int {
		return cmp.Or(cmp.Compare(a.memory, b.memory), cmp.Compare(name(a.what), name(b.what)))
	})
	for _, o := range all {
		if ok(o.thing) {
			return o.thing, true
		}
	}
	if s.offers(t.what) {
		return t, false
	}
	return thing{-1, 0}, false
}

// job is a pod of a simple demand.
type job struct {
	at, hold int
	thing
}

// figures are what comes of it; times are in seconds.
type figures struct {
	served, refused, never, waited, waiting, wait, longest, renamed int
	packed, idle                                                    float64
}

// simulate steps through every second.
func simulate(layout []model, jobs []job, span, lag int, placer bool) (f figures) {
	s := &simple{}
	for _, m := range layout {
		s.gpus, s.dynamic = append(s.gpus, card(m)), m.kind == "dynamic"
	}
	placer = placer || s.dynamic
	fits := make([]bool, len(jobs))
	as := make([]thing, len(jobs))
	for i, j := range jobs {
		as[i], fits[i] = s.way(j.thing)
		if s.dynamic && !fits[i] {
			as[i] = j.thing // nothing else would do
		}
		if s.dynamic && as[i].what == 3 && fits[i] { // by a claim
			f.renamed++
		}
		if as[i].what < 0 || s.dynamic && as[i].what == 3 && !fits[i] {
			as[i].what = -1
			f.never++
		} else if as[i] != j.thing {
			f.renamed++
		}
	}
	ends := map[int][][]part{}
	for i, m := range layout { // what was made to find the ways is no more
		s.gpus[i] = card(m)
	}
	s.inUse = [3]int{}
	s.hear(true)
	heard := map[int]bool{}
	var queue []int
	passed := make([]bool, len(jobs))
	busy, given := 0, 0
	var running [][]part
	for now := range span {
		for again := true; again; {
			again = false
			for _, parts := range ends[now] {
				s.put(parts)
				s.hear(false)
				running = slices.DeleteFunc(running, func(o []part) bool { return &o[0] == &parts[0] })
			}
			delete(ends, now)
			if heard[now] {
				s.hear(true)
			}
			delete(heard, now)
			for i, j := range jobs {
				if j.at == now && !slices.Contains(queue, i) && as[i].what >= 0 && !passed[i] && jobs[i].at >= 0 {
					queue = append(queue, i)
				}
			}
			var still []int
			for _, i := range queue {
				if !placer && s.sees(as[i]) < as[i].n {
					passed[i] = true
					still = append(still, i)
					continue
				}
				had := s.take(as[i])
				switch {
				case had == nil && placer:
					passed[i] = true
					still = append(still, i)
					continue
				case had == nil:
					f.refused++
					jobs[i].at = -1
					continue
				}
				f.served++
				if lag == 0 {
					s.hear(true)
				} else if as[i].what < 3 {
					heard[now+lag] = true
				}
				if passed[i] {
					f.waited++
					f.wait += now - jobs[i].at
					f.longest = max(f.longest, now-jobs[i].at)
				}
				running = append(running, had)
				if jobs[i].hold >= 0 {
					ends[now+jobs[i].hold] = append(ends[now+jobs[i].hold], had)
					again = again || jobs[i].hold == 0
				}
				jobs[i].at = -1
			}
			queue = still
		}
		for _, c := range s.gpus {
			if c.holders > 0 {
				busy++
			}
		}
		for _, parts := range running {
			given += share(parts)
		}
	}
	for _, i := range queue {
		if !fits[i] {
			f.never++
			continue
		}
		f.waited, f.waiting, f.wait = f.waited+1, f.waiting+1, f.wait+span-jobs[i].at
		f.longest = max(f.longest, span-jobs[i].at)
	}
	if busy > 0 {
		f.packed = float64(given) / 4 / float64(busy)
	}
	f.idle = 1 - float64(busy)/float64(span*len(layout))
	return f
}

// draw is a random demand, of few kinds so that they compete.
func draw(r *rand.Rand, span int) (jobs []job) {
	var kinds []thing
	for range 1 + r.IntN(3) {
		switch r.IntN(5) {
		case 0:
			kinds = append(kinds, thing{4, 1 + r.IntN(2)})
		case 1, 2:
			kinds = append(kinds, thing{3, 1 + r.IntN(5)})
		default:
			kinds = append(kinds, thing{r.IntN(3), 1 + r.IntN(2)*r.IntN(2)})
		}
	}
	n := 3 + r.IntN(20)
	for range n {
		hold := r.IntN(40)
		if r.IntN(8) == 0 {
			hold = -1
		}
		jobs = append(jobs, job{at: r.IntN(span), hold: hold, thing: kinds[r.IntN(len(kinds))]})
	}
	slices.SortStableFunc(jobs, func(a, b job) int { return cmp.Compare(a.at, b.at) })
	return jobs
}

func (j *job) request(i int) Request {
	r := Request{Name: fmt.Sprintf("%03d", i), At: time.Duration(j.at) * time.Second, Hold: time.Duration(j.hold) * time.Second}
	if j.hold < 0 {
		r.Hold = ToTheEnd
	}
	switch j.what {
	case 4:
		r.Asks = []Ask{{Kind: piece.KindWhole, Count: j.n}}
	case 3:
		r.Asks = []Ask{{Kind: piece.KindUnits, Count: 1, Memory: gpu.MiB(j.n) * unit}}
	default:
		r.Asks = []Ask{{Kind: piece.KindPlacement, Count: j.n, Profile: profile(labels[j.what])}}
	}
	return r
}

// TestBruteForce replays random demands on every partition of one and of two GPUs. Each figure
// of each partition is that of the simple simulation above, and no partition is better than
// what the search has found.
func TestBruteForce(t *testing.T) {
	const span = 120
	rounds := 20
	if *long {
		rounds = 2000
	}
	var met figures
	for round := range rounds {
		r := rand.New(rand.NewPCG(19, uint64(round)))
		n := 1 + round%2
		node, placer, lag := smalls(n), r.IntN(3) == 0, r.IntN(2)*r.IntN(4)
		jobs := draw(r, span)
		d := &Demand{Begin: time.Unix(0, 0), End: time.Unix(span, 0)}
		for i := range jobs {
			d.Requests = append(d.Requests, jobs[i].request(i))
		}
		rules := Rules{Placer: placer, Lag: time.Duration(lag) * time.Second}
		var best *Alternative
		all := models()
		mixtures := int(math.Pow(float64(len(all)), float64(n)))
		for pick := range mixtures + 1 {
			var layout []model
			var wants []config.Want
			for i, rest := 0, pick; i < n; i, rest = i+1, rest/len(all) {
				if layout = append(layout, all[rest%len(all)]); pick == mixtures {
					layout[i] = model{kind: "dynamic"}
				}
				wants = append(wants, layout[i].want(node.Inventory.GPUs[i].UUID))
			}
			want := simulate(layout, slices.Clone(jobs), span, lag, placer)
			met.refused, met.never, met.waiting, met.renamed = met.refused+want.refused, met.never+want.never, met.waiting+want.waiting, met.renamed+want.renamed
			got, err := Replay(node, wants, d, rules)
			if err != nil {
				t.Fatalf("round %d: %v: %v", round, layout, err)
			}
			as := figures{got.Served, got.Refused, got.Never, got.Waited, got.Waiting, int(got.Wait / time.Second), int(got.Longest / time.Second), got.Renamed, want.packed, want.idle}
			if as != want || math.Abs(got.Packed-want.packed) > 1e-9 || math.Abs(got.Idle-want.idle) > 1e-9 {
				t.Fatalf("round %d, %v, placer %t, lag %d, %+v:\n%+v, packed %v, idle %v, want\n%+v", round, layout, placer, lag, jobs, as, got.Packed, got.Idle, want)
			}
			a := &Alternative{Wants: wants, Outcome: got}
			if best == nil || Better(a, best) < 0 {
				best = a
			}
		}
		advice, err := Search(node, nil, d, rules, Limits{Tries: 1000, Dynamic: true})
		if err != nil {
			t.Fatal(err)
		}
		if !advice.All || len(advice.Tried) != advice.Possible+1 {
			t.Errorf("round %d: tried %d of %d, all: %t", round, len(advice.Tried), advice.Possible, advice.All)
		}
		if c := Better(best, &advice.Tried[0]); c != 0 {
			t.Errorf("round %d, placer %t, %v: the best is %+v\n%+v, found %s\n%+v", round, placer, jobs, best.Wants, best.Outcome, advice.Tried[0].Name, advice.Tried[0].Outcome)
		}
	}
	if met.refused == 0 || met.never == 0 || met.waiting == 0 || met.renamed == 0 {
		t.Errorf("the demands do not try everything: %+v", met)
	}
}
