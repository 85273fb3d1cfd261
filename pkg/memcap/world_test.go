// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

var (
	judgeRounds = flag.Int("judge.rounds", 10_000, "samples in TestTruth")
	judgeSeed   = flag.Uint64("judge.seed", 1, "seed of TestTruth")
)

// world is a node of which everything is true: who is in which container, what
// it has and may have. What the judge is shown of it is late, partial and about
// PIDs.
type world struct {
	r          *rand.Rand
	ms         int
	containers []*container
	processes  []*process
	names      int
	// freed is when a PID was last given back, in ms.
	freed map[int]int
	// rows has the process that the driver meant when an unbroken row of samples
	// began to list a PID, by GPU.
	rows [2]map[int]*process
}

type container struct {
	id         string
	caps       [2]uint64 // by GPU; 0: no allocation
	split      bool      // the allocation is two
	allocation string    // what it shares with others, empty if nothing
	born       int       // ms
	listed     int       // ms from which its allocations are known
	known      int       // ms from which the runtime is known to have listed it
	ended      int       // ms, 0: runs
	forgot     int       // ms from which its allocations are gone again
}

// together is what a container has with all those that share its allocation.
func (c *container) together(has map[*container]uint64) uint64 {
	sum := has[c]
	for o, bytes := range has {
		if o != c && c.allocation != "" && o.allocation == c.allocation {
			sum += bytes
		}
	}
	return sum
}

type process struct {
	pid, gpu, start int // start in ms
	container       *container
	bytes           uint64
	listed          int // ms of the first sample that has it
	dead            bool
	// ghost: a child keeps the device open, and the driver lists a process that
	// is dead.
	ghost bool
}

const (
	worldPIDs  = 12
	pidReuse   = 20   // ms: the kernel gives other numbers out before
	latestNews = 4500 // ms, less than the grace
)

func (w *world) freePID() int {
	for range 20 {
		pid := 1 + w.r.IntN(worldPIDs)
		taken := slices.ContainsFunc(w.processes, func(p *process) bool { return p.pid == pid && !p.dead })
		// Nobody can tell a ghost from who has its number if that happened
		// between two samples, or within a tick; a kernel does not come round so
		// fast.
		unseen := slices.ContainsFunc(w.processes, func(p *process) bool {
			return p.pid == pid && (w.rows[p.gpu][pid] != p || ticks(w.ms) <= ticks(p.listed))
		})
		if at, ok := w.freed[pid]; !taken && !unseen && (!ok || w.ms-at >= pidReuse) {
			return pid
		}
	}
	return 0
}

func (w *world) kill(p *process) {
	p.dead = true
	p.ghost = w.r.IntN(4) == 0
	w.freed[p.pid] = w.ms
}

// step lets something happen.
func (w *world) step() {
	switch what := w.r.IntN(20); {
	case what < 2 && len(w.containers) < 8: // a container starts
		w.names++
		c := &container{id: fmt.Sprintf("c%04d", w.names), born: w.ms, split: w.r.IntN(3) == 0}
		for g := range c.caps {
			switch w.r.IntN(4) {
			case 0, 1:
				c.caps[g] = uint64(2+w.r.IntN(30)) * gib
			case 2:
				c.caps[g] = None
			}
		}
		c.listed, c.known = w.ms+w.r.IntN(latestNews), w.ms+w.r.IntN(latestNews)
		if w.r.IntN(2) == 0 { // it shares an allocation with another one
			c.allocation, c.split = c.id, false
			for _, o := range w.containers {
				if o.allocation != "" && o.ended == 0 {
					c.allocation, c.caps = o.allocation, o.caps
				}
			}
		}
		w.containers = append(w.containers, c)
	case what < 3 && len(w.containers) > 0: // one ends, with all of its processes
		c := w.containers[w.r.IntN(len(w.containers))]
		if c.ended == 0 {
			c.ended = w.ms
			c.forgot = w.ms + w.r.IntN(latestNews)
			for _, p := range w.processes {
				if p.container == c && !p.dead {
					w.kill(p)
				}
			}
		}
	case what < 9: // a process starts; one in eight is of no pod
		p := &process{pid: w.freePID(), gpu: w.r.IntN(2), start: w.ms, bytes: uint64(w.r.IntN(8)) * gib}
		if w.r.IntN(8) > 0 && len(w.containers) > 0 {
			p.container = w.containers[w.r.IntN(len(w.containers))]
		}
		if p.pid > 0 && (p.container == nil || p.container.ended == 0) {
			w.processes = append(w.processes, p)
		}
	case what < 11 && len(w.processes) > 0: // one ends
		if p := w.processes[w.r.IntN(len(w.processes))]; !p.dead {
			w.kill(p)
		}
	case what < 12: // the last child lets go
		for _, p := range w.processes {
			p.ghost = p.ghost && w.r.IntN(3) > 0
		}
	case len(w.processes) > 0: // one takes or gives
		if p := w.processes[w.r.IntN(len(w.processes))]; !p.dead {
			p.bytes = uint64(w.r.IntN(20)) * gib
		}
	}
	w.processes = slices.DeleteFunc(w.processes, func(p *process) bool { return p.dead && !p.ghost })
	w.containers = slices.DeleteFunc(w.containers, func(c *container) bool { return c.ended > 0 && w.ms > c.forgot+latestNews })
}

func (w *world) alive(pid int) *process {
	for _, p := range w.processes {
		if p.pid == pid && !p.dead {
			return p
		}
	}
	return nil
}

func ticks(ms int) uint64 { return uint64(ms/10) + 1 }

// truth is what is so at one sample of a GPU.
type truth struct {
	// used is what each container has, plain what of it the sample shows beyond
	// doubt, blind says that it does not show all.
	used, plain map[*container]uint64
	blind       map[*container]bool
	here        map[*container]bool // is on the GPU, seen or not
	plainlyHere map[*container]bool
}

// sample asks the driver and then, while the world goes on, looks up the PIDs.
func (w *world) sample(g int) (Sample, truth) {
	s := Sample{At: at(w.ms), GPU: gpu.UUID(fmt.Sprintf("GPU-%d", g))}
	tr := truth{map[*container]uint64{}, map[*container]uint64{}, map[*container]bool{}, map[*container]bool{}, map[*container]bool{}}
	var meant []*process
	row := map[int]*process{}
	for _, p := range w.processes {
		if p.gpu != g {
			continue
		}
		meant = append(meant, p)
		if p.listed == 0 {
			p.listed = w.ms
		}
		if row[p.pid] = p; w.rows[g][p.pid] != nil {
			row[p.pid] = w.rows[g][p.pid]
		}
		if c := p.container; c != nil && !p.dead {
			tr.used[c] += p.bytes
			tr.here[c] = true
		}
	}
	w.rows[g] = row
	var lists []gpu.Process
	figures, bytes := map[*process]bool{}, map[*process]uint64{}
	for _, p := range meant {
		figures[p], bytes[p] = w.r.IntN(12) > 0, p.bytes
		kinds := []gpu.ProcessKind{gpu.Compute, gpu.Graphics, gpu.MPS}[:1+w.r.IntN(3)]
		for i, kind := range kinds {
			lists = append(lists, gpu.Process{PID: p.pid, Kind: kind, Bytes: p.bytes, Known: figures[p] && (i == 0 || w.r.IntN(2) > 0), GI: -1, CI: -1})
		}
	}
	w.r.Shuffle(len(lists), func(i, j int) { lists[i], lists[j] = lists[j], lists[i] })
	s.Processes = Merge(lists)
	s.Tick = ticks(w.ms)
	if w.r.IntN(3) == 0 { // the world goes on before the PIDs are looked up
		for range 1 + w.r.IntN(4) {
			w.ms += 1 + w.r.IntN(30)
			w.step()
		}
	}
	seen := map[*process]bool{}
	for i := range s.Processes {
		p := &s.Processes[i]
		if now := w.alive(p.PID); now != nil {
			p.Start = ticks(now.start)
			if now.container != nil {
				p.Container = now.container.id
			}
			seen[now] = true
		}
	}
	for _, p := range meant {
		if p.container == nil || p.dead {
			continue
		}
		// Somebody else's row, or another process of that PID on the list.
		twice := slices.ContainsFunc(meant, func(o *process) bool { return o != p && o.pid == p.pid })
		if !seen[p] || twice || row[p.pid] != p {
			tr.blind[p.container] = true
			continue
		}
		tr.plainlyHere[p.container] = true
		if figures[p] {
			tr.plain[p.container] += bytes[p]
		} else {
			tr.blind[p.container] = true
		}
	}
	return s, tr
}

// TestTruth lets a world run and holds the judge against what is so: never a
// verdict on who did nothing, and none missed that two samples show.
func TestTruth(t *testing.T) {
	w := &world{r: rand.New(rand.NewPCG(*judgeSeed, 0)), ms: 1000, freed: map[int]int{}}
	policy := Policy{}.withDefaults()
	j := NewJudge(Policy{})
	type key struct {
		c *container
		g int
	}
	// overSince and hereSince are the samples that show an offence beyond doubt,
	// without one in between that does not; lately has what was true at each
	// sample of a doubt's length.
	overSince, hereSince := map[key]time.Time{}, map[key]time.Time{}
	// sharedSince and judgedBefore are the same for allocations that are shared, and whom of
	// those the last verdict named: it begins anew when that one is gone.
	type shared struct {
		allocation string
		g          int
	}
	sharedSince, judgedBefore := map[shared]time.Time{}, map[shared]string{}
	type moment struct {
		at time.Time
		truth
	}
	var lately [2][]moment
	last := [2]time.Time{}
	found, verdicts, reused, jointly := map[Kind]int{}, 0, 0, 0
	for round := range *judgeRounds {
		for range w.r.IntN(4) {
			w.ms += w.r.IntN(120)
			w.step()
		}
		w.ms += 1 + w.r.IntN(60)
		if w.r.IntN(300) == 0 {
			w.ms += 6000 // the driver hangs
		}
		g := w.r.IntN(2)
		if w.r.IntN(10) == 0 {
			continue // a sample that could not be taken
		}
		s, tr := w.sample(g)
		if s.At.Sub(last[g]) > policy.Memory {
			for k := range overSince {
				if k.g == g {
					delete(overSince, k)
				}
			}
			for k := range hereSince {
				if k.g == g {
					delete(hereSince, k)
				}
			}
			for k := range sharedSince {
				if k.g == g {
					delete(sharedSince, k)
				}
			}
		}
		last[g] = s.At
		for pid, p := range w.rows[g] {
			if now := w.alive(pid); now != nil && now != p {
				reused++
			}
		}

		byID := map[string]*container{}
		for _, c := range w.containers {
			byID[c.id] = c
		}
		known := func(id string) bool { c := byID[id]; return c != nil && w.ms >= c.known }

		var allowances []Allowance
		for _, c := range w.containers {
			for g, limit := range c.caps {
				if limit == 0 || w.ms < c.listed || c.ended > 0 && w.ms >= c.forgot {
					continue
				}
				h := Allowance{c.id, gpu.UUID(fmt.Sprintf("GPU-%d", g)), limit, c.allocation}
				if c.split && limit != None {
					h.Cap = limit - gib
					allowances = append(allowances, Allowance{c.id, h.GPU, gib, ""})
				}
				if !c.split || known(c.id) { // half a truth, as long as it is not known well
					allowances = append(allowances, h)
				}
			}
		}
		w.r.Shuffle(len(allowances), func(i, j int) { allowances[i], allowances[j] = allowances[j], allowances[i] })
		got := j.Judge(s, allowances, known)
		lately[g] = slices.DeleteFunc(append(lately[g], moment{s.At, tr}), func(m moment) bool { return s.At.Sub(m.at) > 2*time.Minute })
		convicted, named := map[string]bool{}, map[string]string{}
		for _, v := range got {
			verdicts++
			if v.Told == 0 {
				found[v.Kind]++
				if v.Kind == Over && v.Own <= policy.Limit(v.Cap) {
					jointly++
				}
			}
			convicted[v.Container] = true
			c := byID[v.Container]
			if c != nil && c.allocation != "" && v.Kind == Over {
				if named[c.allocation] != "" {
					t.Fatalf("seed %d, round %d: %s and %s of one allocation at once", *judgeSeed, round, named[c.allocation], c.id)
				}
				named[c.allocation] = c.id
			}
			i := slices.IndexFunc(lately[g], func(m moment) bool { return m.at.Equal(v.First) })
			switch {
			case c == nil || s.At.Sub(v.First) < policy.Spacing:
				t.Fatalf("seed %d, round %d: %+v, of nobody or too soon", *judgeSeed, round, v)
			case i < 0 && s.At.Sub(v.First) <= 2*time.Minute:
				t.Fatalf("seed %d, round %d: %+v was first seen when nobody looked", *judgeSeed, round, v)
			case v.Kind == Over && (c.caps[g] == 0 || v.Cap != c.caps[g] || c.together(tr.used) <= policy.Limit(c.caps[g]) || v.Used > c.together(tr.used) || v.Own > tr.used[c]):
				t.Fatalf("seed %d, round %d: %+v, which truly has %d", *judgeSeed, round, v, c.together(tr.used))
			case v.Kind == Over && i >= 0 && c.together(lately[g][i].used) <= policy.Limit(c.caps[g]):
				t.Fatalf("seed %d, round %d: %+v, which then truly had %d", *judgeSeed, round, v, c.together(lately[g][i].used))
			case v.Kind == Intruder && (c.caps[g] != 0 || !tr.here[c] || i >= 0 && !lately[g][i].here[c] || s.At.Sub(v.First) < policy.Grace):
				t.Fatalf("seed %d, round %d: %+v, which has an allocation or is not there", *judgeSeed, round, v)
			}
		}

		// Whatever two samples show beyond doubt must be found.
		plain, limits := map[shared]uint64{}, map[shared]uint64{}
		for _, c := range w.containers {
			k := key{c, g}
			shown := known(c.id) && (c.ended == 0 || w.ms < c.forgot)
			if c.allocation != "" {
				its := shared{c.allocation, g}
				if limits[its] = c.caps[g]; shown && w.ms >= c.listed {
					plain[its] += tr.plain[c]
				}
			} else if shown && c.caps[g] != 0 && w.ms >= c.listed && tr.plain[c] > policy.Limit(c.caps[g]) {
				if _, ok := overSince[k]; !ok {
					overSince[k] = s.At
				} else if s.At.Sub(overSince[k]) >= policy.Spacing && !convicted[c.id] {
					t.Fatalf("seed %d, round %d: %s on GPU %d has at least %d of %d since %v and goes free", *judgeSeed, round, c.id, g, tr.plain[c], c.caps[g], s.At.Sub(overSince[k]))
				}
			} else {
				delete(overSince, k)
			}
			if known(c.id) && c.caps[g] == 0 && tr.plainlyHere[c] {
				if _, ok := hereSince[k]; !ok {
					hereSince[k] = s.At
				} else if s.At.Sub(hereSince[k]) >= policy.Grace && !convicted[c.id] {
					t.Fatalf("seed %d, round %d: intruder %s on GPU %d since %v goes free", *judgeSeed, round, c.id, g, s.At.Sub(hereSince[k]))
				}
			} else {
				delete(hereSince, k)
			}
		}
		for its, limit := range limits {
			if who := judgedBefore[its]; who != "" && !slices.ContainsFunc(s.Processes, func(p Process) bool { return p.Container == who }) {
				delete(sharedSince, its)
			}
			judgedBefore[its] = named[its.allocation]
			if limit == 0 || plain[its] <= policy.Limit(limit) {
				delete(sharedSince, its)
			} else if _, ok := sharedSince[its]; !ok {
				sharedSince[its] = s.At
			} else if s.At.Sub(sharedSince[its]) >= policy.Spacing && named[its.allocation] == "" {
				t.Fatalf("seed %d, round %d: those of allocation %s on GPU %d have at least %d of %d since %v and go free", *judgeSeed, round, its.allocation, g, plain[its], limit, s.At.Sub(sharedSince[its]))
			}
		}
		// Now and then an offender is ended, as its watchdog would do.
		for _, v := range got {
			if c := byID[v.Container]; v.Told > 3 && c.ended == 0 {
				c.ended, c.forgot = w.ms, w.ms+w.r.IntN(latestNews)
				for _, p := range w.processes {
					if p.container == c && !p.dead {
						w.kill(p)
					}
				}
			}
		}
	}
	t.Logf("%d rounds: %d verdicts on %d offences, %d of them of several containers together, %d looks at a reused PID", *judgeRounds, verdicts, found[Over]+found[Intruder], jointly, reused)
	if *judgeRounds >= 10_000 && (found[Over] < 50 || found[Intruder] < 5 || reused < 50 || jointly < 1) {
		t.Errorf("too little happened: %v, %d together, %d reused", found, jointly, reused)
	}
}
