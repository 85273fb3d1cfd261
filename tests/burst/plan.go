// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"time"
)

// Planned is how long cloud GPUs are paid for by the best of many plans that are made
// with all knowledge that Bound has. Each gives Jobs their place in another order:
// on-prem where there is room in time, and else where the cloud costs least more. What a
// planner needs at best lies between Bound and this. Nobody is moved: a Job that comes back
// from the cloud can cost less than its plan.
func Planned(jobs []Demand, onPrem map[*Kind]int, wait time.Duration) (paid time.Duration) {
	return NewPlan(jobs, onPrem, wait).Paid()
}

// Plan says when each Job starts, and on which GPU.
type Plan struct{ own, cloud [][]spot }

// NewPlan returns the plan of which Planned tells the cost.
func NewPlan(jobs []Demand, onPrem map[*Kind]int, wait time.Duration) *Plan {
	byKind := map[*Kind][]Demand{}
	for _, j := range jobs {
		byKind[j.Kind] = append(byKind[j.Kind], j)
	}
	p := &Plan{}
	for kind, of := range byKind {
		best := planKind(of, onPrem[kind], wait)
		p.own, p.cloud = append(p.own, best.own...), append(p.cloud, best.cloud...)
	}
	return p
}

// Paid is how long cloud GPUs are paid for, all together.
func (p *Plan) Paid() (paid time.Duration) {
	for _, g := range p.cloud {
		paid += busy(g)
	}
	return paid
}

// Held is what is held on-prem from one moment to another, in GiB × seconds.
func (p *Plan) Held(from, to time.Duration) (sum float64) {
	for _, s := range slices.Concat(p.own...) {
		if first, last := max(from, s.start), min(to, s.end()); first < last {
			sum += float64(s.GiB) * (last - first).Seconds()
		}
	}
	return sum
}

// Beside is a record of the plan at the moments of a run's samples. The cloud counts as paid for where the run
// pays, so that what keeps on-prem idle can be compared. A Job that the plan has wait stands as Queued.
func (p *Plan) Beside(run *Record) *Record {
	out := &Record{Jobs: run.Jobs, Ended: run.Ended}
	for _, was := range run.Samples {
		s := Sample{At: was.At, Jobs: make([]Standing, len(run.Jobs))}
		s.Sites[Cloud].GPUs = was.Sites[Cloud].GPUs
		for site, gpus := range [2][][]spot{OnPrem: p.own, Cloud: p.cloud} {
			for _, j := range slices.Concat(gpus...) {
				is := Standing{Site: Site(site), At: j.at}
				switch {
				case j.start <= s.At && s.At < j.end():
					is.Stage = Running
					s.Sites[site].GiB += j.GiB
				case j.Arrives <= s.At && s.At < j.start:
					is.Stage, s.Waiting = Queued, s.Waiting+1
				}
				s.Jobs[j.Job] = is
			}
		}
		out.Samples = append(out.Samples, s)
	}
	return out
}

func planKind(jobs []Demand, onPrem int, wait time.Duration) *Plan {
	orders := []func(a, b Demand) int{
		func(a, b Demand) int { return cmp.Compare(a.Arrives, b.Arrives) },
		func(a, b Demand) int { return cmp.Compare(b.work(), a.work()) },
		func(a, b Demand) int { return cmp.Compare(b.Runs, a.Runs) },
	}
	var best *Plan
	random := rand.New(rand.NewPCG(1, 1))
	for round := range 3000 {
		order := slices.Clone(jobs)
		if round < len(orders) {
			slices.SortStableFunc(order, orders[round])
		} else {
			random.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		}
		if p := planInOrder(order, onPrem, wait); best == nil || p.Paid() < best.Paid() {
			best = p
		}
	}
	return best
}

// work is what a Job takes, over time, of the dimension of which it takes the largest part.
func (d Demand) work() time.Duration {
	part := 0.0
	for i, holds := range d.Kind.Holds {
		part = max(part, float64(d.Takes[i])/float64(holds))
	}
	return time.Duration(part * float64(d.Runs))
}

// spot is a Job in a plan, and where on its GPU it begins; -1 for one that may lie anywhere.
type spot struct {
	Demand
	start time.Duration
	at    int
}

func (s spot) end() time.Duration { return s.start + s.Runs }

func planInOrder(jobs []Demand, onPrem int, wait time.Duration) *Plan {
	own, cloud := make([][]spot, onPrem), [][]spot{}
next:
	for _, j := range jobs {
		for g := range own {
			for _, start := range starts(j, own[g], wait) {
				if s, ok := place(own[g], j, start); ok {
					own[g] = append(own[g], s)
					continue next
				}
			}
		}
		cloud = append(cloud, nil) // one more than is in use
		var to int
		var at spot
		least := time.Duration(1<<63 - 1)
		for g := range cloud {
			for _, start := range starts(j, cloud[g], wait) {
				s, ok := place(cloud[g], j, start)
				if more := busy(append(slices.Clone(cloud[g]), s)) - busy(cloud[g]); ok && more < least {
					to, at, least = g, s, more
				}
			}
		}
		cloud[to] = append(cloud[to], at)
		cloud = slices.DeleteFunc(cloud, func(g []spot) bool { return len(g) == 0 })
	}
	return &Plan{own, cloud}
}

// starts are the moments at which a Job could well start beside others, in order: when it
// comes, as late as may be, and so that it begins or ends when another does.
func starts(j Demand, beside []spot, wait time.Duration) []time.Duration {
	out := []time.Duration{j.Arrives, j.Arrives + wait}
	for _, s := range beside {
		out = append(out, s.start, s.end(), s.start-j.Runs, s.end()-j.Runs)
	}
	out = slices.DeleteFunc(out, func(at time.Duration) bool { return at < j.Arrives || at > j.Arrives+wait })
	slices.Sort(out)
	return slices.Compact(out)
}

// place finds a place for a Job on a GPU that others have parts of.
func place(others []spot, j Demand, start time.Duration) (s spot, ok bool) {
	if s = (spot{j, start, -1}); len(j.Starts) == 0 {
		return s, room(others, s)
	}
	for _, s.at = range j.Starts {
		if room(others, s) {
			return s, true
		}
	}
	return s, false
}

// room reports whether a GPU that others have parts of has room for one more. What is
// taken is most when one of them starts.
func room(others []spot, next spot) bool {
	long := func(s spot) int { return s.Takes[len(s.Takes)-1] }
	for _, s := range others {
		if next.at >= 0 && s.at >= 0 && s.start < next.end() && next.start < s.end() &&
			s.at < next.at+long(next) && next.at < s.at+long(s) {
			return false
		}
	}
	for _, at := range append([]spot{next}, others...) {
		if at.start < next.start || at.start >= next.end() {
			continue
		}
		for d, holds := range next.Kind.Holds {
			sum := next.Takes[d]
			for _, s := range others {
				if s.start <= at.start && at.start < s.end() {
					sum += s.Takes[d]
				}
			}
			if sum > holds {
				return false
			}
		}
	}
	return true
}

// busy is for how long some Job or other is on a GPU.
func busy(gpu []spot) (sum time.Duration) {
	slices.SortFunc(gpu, func(a, b spot) int { return cmp.Compare(a.start, b.start) })
	until := time.Duration(-1 << 62)
	for _, s := range gpu {
		if from := max(s.start, until); s.end() > from {
			sum += s.end() - from
		}
		until = max(until, s.end())
	}
	return sum
}
