// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// bar is what is reached in virtual time: on-prem holds at least a part of what a plan of the same patience holds
// there while the cloud is paid, and the cloud costs at most so many times the plan's.
type bar struct{ held, paid float64 }

// figure is a load, and how it comes to its sites. Where Jobs run for seconds, the order in which events fall is worth
// up to ten points either way, so that each seed runs so many times.
type figure struct {
	name string
	load Load
	// patience is that of Jobs and of the plan, every how often a sample is taken, and times how often each seed runs.
	patience, every time.Duration
	times           uint64
	// each is for each seed, zero where only all is asked for, which is for all of them together.
	each, all bar
	// long says that it is left out with -short.
	long bool
}

// settled is Hours with no Job that may be moved.
func settled() Load {
	l := Hours
	l.Checkpoint = 0
	return l
}

var figures = []figure{
	{"seconds", Full, 0, 500 * time.Millisecond, 4, bar{0.85, 1.20}, bar{0.85, 1.15}, false},
	{"seconds", Full, 30 * time.Second, 500 * time.Millisecond, 4, bar{}, bar{0.85, 1.30}, true},
	{"hours", Hours, 0, 10 * time.Second, 1, bar{0.85, 1.20}, bar{0.85, 1.15}, false},
	{"hours", Hours, 2 * time.Minute, 10 * time.Second, 1, bar{0.85, 1.20}, bar{0.85, 1.15}, true},
	{"hours, no checkpoints", settled(), 0, 10 * time.Second, 1, bar{0.85, 1.3}, bar{0.85, 1.2}, true},
	{"hours, no checkpoints", settled(), 2 * time.Minute, 10 * time.Second, 1, bar{0.85, 1.3}, bar{0.85, 1.2}, true},
}

// Loads of seconds and of hours in virtual time. The tables say what kept on-prem idle, in the run and by the plan, in
// the seconds in which the run pays.
func TestOnPremFillsFirst(t *testing.T) {
	seeds := map[bool]int{false: 5, true: 1}[testing.Short()]
	for _, of := range figures {
		t.Run(fmt.Sprintf("%s with a patience of %s", of.name, of.patience), func(t *testing.T) {
			if of.long && testing.Short() {
				t.Skip("make test-all runs it: other loads of the same kind are run with -short, too")
			}
			var names []string
			var records, plans []*Record
			var all Fill
			come := time.Duration(0)
			for _, load := range of.load.Seeds(seeds) {
				f, r, plan := of.reach(t, load)
				all.add(f)
				come += time.Duration(of.times) * asTheyCome(load, of.patience).Paid()
				names = append(names, fmt.Sprint(load.Seed))
				records, plans = append(records, r), append(plans, plan)
			}
			t.Log(IdleTable(names, records))
			t.Log("by the plan,", IdleTable(names, plans))
			t.Logf("all: %s; a plan that does not know who comes later pays × %.2f",
				all, come.Seconds()/all.Planned.Seconds())
			of.all.judge(t, "all", all)
		})
	}
}

// asTheyCome is the plan that takes Jobs as they come: it knows how long those run that are there, and nothing of
// those that come later.
func asTheyCome(load Load, wait time.Duration) *Plan {
	p := &Plan{}
	for kind, n := range Own {
		of := slices.DeleteFunc(Demands(load.Draw()), func(j Demand) bool { return j.Kind != kind })
		one := planInOrder(of, n, wait)
		p.own, p.cloud = append(p.own, one.own...), append(p.cloud, one.cloud...)
	}
	return p
}

// add has f be of two runs together.
func (f *Fill) add(other Fill) {
	f.Held, f.Plan = f.Held+other.Held, f.Plan+other.Plan
	f.Paid, f.Planned = f.Paid+other.Paid, f.Planned+other.Planned
}

// judge says what is not reached. A bar of zeros is always reached.
func (b bar) judge(t *testing.T, of string, f Fill) {
	t.Helper()
	if f.Held < b.held*f.Plan || b.paid > 0 && f.Paid.Seconds() > b.paid*f.Planned.Seconds() {
		t.Errorf("%s: %s of a plan, want %.0f %% and × %.2f", of, f, 100*b.held, b.paid)
	}
}

// reach runs a load, and returns how it compares with the plan, a record of it, and beside it that of the plan.
func (of figure) reach(t *testing.T, load Load) (sum Fill, r, beside *Record) {
	t.Helper()
	jobs := load.Draw()
	plan := NewPlan(Demands(jobs), Own, of.patience)
	for luck := range of.times {
		y := way{pace: quiet, patience: of.patience, luck: luck}
		r = y.run(t, jobs, of.every, 6*(load.Within+load.Longer))
		c, f := r.Count(), r.against(plan, of.patience)
		t.Logf("seed %d: %s of a plan that pays %.0f s; Jobs wait for %s, and %s at most", load.Seed, f,
			f.Planned.Seconds(), c.MedianWait.Round(time.Second), c.LongestWait.Round(time.Second))
		if c.Stuck+c.Refused+c.Unfinished > 0 {
			t.Errorf("seed %d: some were stuck or refused, or have not ended: %+v", load.Seed, c)
		}
		sum.add(f)
	}
	of.each.judge(t, fmt.Sprintf("seed %d", load.Seed), sum)
	return sum, r, plan.Beside(r)
}

// Virtual time is worth something if a run is the same each time.
func TestVirtualTimeIsAlwaysTheSame(t *testing.T) {
	jobs := Full.Draw()
	y := way{pace: quiet, luck: 7}
	first, second := y.run(t, jobs, time.Second, time.Hour), y.run(t, jobs, time.Second, time.Hour)
	if !reflect.DeepEqual(first.Samples, second.Samples) {
		t.Error("the samples differ")
	}
	for i, h := range first.Jobs {
		if !reflect.DeepEqual(h, second.Jobs[i]) {
			t.Errorf("one Job, two lives:\n%s\n%s", h, second.Jobs[i])
		}
	}
}

// Quota is given as Kueue gives it, and room as there is, however events fall.
func TestModelOfKueue(t *testing.T) {
	const s = time.Second
	job := func(name string, p Piece, arrives time.Duration) Job {
		return Job{Name: name, Piece: p, Arrives: arrives, Runs: time.Minute}
	}
	jobs := []Job{
		job("one", units(60), 1*s),
		job("two", units(60), 5*s),    // there is no quota for it on-prem
		job("three", units(10), 10*s), // beside the first
		job("four", instance("3g.40gb"), 15*s),
		job("five", instance("2g.20gb"), 20*s),  // beside the fourth
		job("six", instance("4g.40gb"), 25*s),   // quota would do, and it can begin nowhere
		job("seven", instance("1g.10gb"), 30*s), // beside the others
		job("eight", units(60), 70*s),           // when the first has ended
	}
	const want = "one on-prem, two cloud, three on-prem, four on-prem, " +
		"five on-prem, six cloud, seven on-prem, eight on-prem"
	for luck := range uint64(5) {
		var got []string
		for _, h := range (way{pace: quiet, luck: luck}).run(t, jobs, s, time.Hour).Jobs {
			for _, p := range h.Pods {
				got = append(got, fmt.Sprintf("%s %s", h.Name, p.Site))
			}
		}
		if strings.Join(got, ", ") != want {
			t.Errorf("they ran: %s\nwant:     %s", strings.Join(got, ", "), want)
		}
	}
}

// Nobody has more of the cloud than the spending limit, and who waits for it runs when some is given back.
func TestModelOfTheLimit(t *testing.T) {
	var jobs []Job
	for i := range 9 {
		jobs = append(jobs, Job{Name: fmt.Sprint("job-", i), Piece: units(60), Arrives: time.Second, Runs: time.Minute})
	}
	r := way{pace: quiet}.run(t, jobs, time.Second, time.Hour)
	most := 0
	for _, s := range r.Samples {
		most = max(most, s.Sites[Cloud].GiB)
	}
	// One runs on-prem, four on the cloud's four GPUs for shares, and the others have to wait for these.
	if c := r.Count(); most != 240 || c.Ran[OnPrem] == 0 || c.Ran[OnPrem]+c.Ran[Cloud] != 9 || c.Unfinished != 0 {
		t.Errorf("up to %d GiB of the cloud were held; %+v", most, c)
	}
}
