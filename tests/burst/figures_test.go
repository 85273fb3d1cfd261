// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"
)

// bar is what is reached in virtual time: on-prem holds at least a part of what a plan of the same patience holds
// there while the cloud is paid, and the cloud costs at most so many times the plan's.
type bar struct {
	way
	held, paid float64
}

var bars = []bar{
	{way{pace: quiet}, 0.85, 1.20},
}

// Loads of seconds and of hours in virtual time. The tables say what kept on-prem idle, in the run and by the plan, in
// the seconds in which the run pays.
func TestOnPremFillsFirst(t *testing.T) {
	seeds := map[bool]int{false: 5, true: 1}[testing.Short()]
	for _, of := range []struct {
		name  string
		load  Load
		every time.Duration
		times uint64
	}{{"seconds", Full, 500 * time.Millisecond, 4}, {"hours", Hours, 10 * time.Second, 1}} {
		for _, b := range bars {
			t.Run(fmt.Sprintf("%s with a patience of %s", of.name, b.patience), func(t *testing.T) {
				var names []string
				var records, plans []*Record
				for _, load := range of.load.Seeds(seeds) {
					r, plan := b.reach(t, load, of.every, of.times)
					names = append(names, fmt.Sprint(load.Seed))
					records, plans = append(records, r), append(plans, plan)
				}
				t.Log(IdleTable(names, records))
				t.Log("by the plan,", IdleTable(names, plans))
			})
		}
	}
}

// reach runs a load so many times, and returns a record of it, and beside it that of the plan. Where Jobs run for
// seconds, the order in which events fall is worth up to ten points either way, so the bar is for the mean.
func (b bar) reach(t *testing.T, load Load, every time.Duration, times uint64) (r, beside *Record) {
	t.Helper()
	jobs := load.Draw()
	plan := NewPlan(Demands(jobs), Own, b.patience)
	var sum Fill
	for b.luck = range times {
		r = b.run(t, jobs, every, 6*(load.Within+load.Longer))
		c, f := r.Count(), r.against(plan, b.patience)
		t.Logf("seed %d: %s of a plan that pays %.0f s; Jobs wait for %s, and %s at most", load.Seed, f,
			f.Planned.Seconds(), c.MedianWait.Round(time.Second), c.LongestWait.Round(time.Second))
		if c.Stuck+c.Refused+c.Unfinished > 0 {
			t.Errorf("seed %d: some were stuck or refused, or have not ended: %+v", load.Seed, c)
		}
		sum.Held, sum.Plan = sum.Held+f.Held, sum.Plan+f.Plan
		sum.Paid, sum.Planned = sum.Paid+f.Paid, sum.Planned+f.Planned
	}
	if sum.Held < b.held*sum.Plan || sum.Paid.Seconds() > b.paid*sum.Planned.Seconds() {
		t.Errorf("seed %d: %s of a plan, want %.0f %% and × %.2f", load.Seed, sum, 100*b.held, b.paid)
	}
	return r, plan.Beside(r)
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
