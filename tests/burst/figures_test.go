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
	{way{pace: quiet}, 0.75, 1.30},
}

// Loads of seconds and of hours in virtual time. The tables say what kept on-prem idle, in the run and by the plan, in
// the seconds in which the run pays.
func TestOnPremFillsFirst(t *testing.T) {
	seeds := map[bool]int{false: 5, true: 1}[testing.Short()]
	for _, of := range []struct {
		name  string
		load  Load
		every time.Duration
	}{{"seconds", Full, 500 * time.Millisecond}, {"hours", Hours, 10 * time.Second}} {
		for _, b := range bars {
			t.Run(fmt.Sprintf("%s with a patience of %s", of.name, b.patience), func(t *testing.T) {
				var names []string
				var records, plans []*Record
				for _, load := range of.load.Seeds(seeds) {
					r, plan := b.reach(t, load, of.every)
					names = append(names, fmt.Sprint(load.Seed))
					records, plans = append(records, r), append(plans, plan)
				}
				t.Log(IdleTable(names, records))
				t.Log("by the plan,", IdleTable(names, plans))
			})
		}
	}
}

// reach runs a load, and returns its record, and beside it that of the plan.
func (b bar) reach(t *testing.T, load Load, every time.Duration) (r, beside *Record) {
	t.Helper()
	jobs := load.Draw()
	r = b.run(t, jobs, every, 48*time.Hour)
	plan := NewPlan(Demands(jobs), Own, b.patience)
	c, f := r.Count(), r.against(plan, b.patience)
	t.Logf("seed %d: %s of a plan that pays %.0f s; Jobs wait for %s, and %s at most", load.Seed, f,
		f.Planned.Seconds(), c.MedianWait.Round(time.Second), c.LongestWait.Round(time.Second))
	if f.Held < b.held*f.Plan || f.Paid.Seconds() > b.paid*f.Planned.Seconds() {
		t.Errorf("seed %d: %s of a plan, want %.0f %% and × %.2f", load.Seed, f, 100*b.held, b.paid)
	}
	if c.Stuck+c.Refused+c.Unfinished > 0 {
		t.Errorf("seed %d: some were stuck or refused, or have not ended: %+v", load.Seed, c)
	}
	return r, plan.Beside(r)
}

// Virtual time is worth something if a run is the same each time.
func TestVirtualTimeIsAlwaysTheSame(t *testing.T) {
	jobs := Full.Draw()
	y := way{pace: quiet}
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

// Quota is given as Kueue gives it: first of on-prem, to older workloads first, and to all that may have some.
func TestModelOfKueue(t *testing.T) {
	const s = time.Second
	job := func(name string, p Piece, arrives time.Duration) Job {
		return Job{Name: name, Piece: p, Arrives: arrives, Runs: 30 * s}
	}
	r := way{pace: quiet}.run(t, []Job{
		job("one", units(60), 1*s),
		job("two", units(60), 2*s),             // quota would do, no GPU
		job("three", units(10), 3*s),           // beside the first
		job("four", instance("4g.40gb"), 4*s),  //
		job("five", instance("4g.40gb"), 5*s),  // no quota on-prem, as the export has one such piece
		job("six", units(60), 35*s),            // when the first has ended
		job("seven", instance("3g.40gb"), 6*s), // beside the fourth
		job("eight", instance("1g.10gb"), 7*s), // no compute is left
	}, time.Second, time.Hour)
	var got []string
	for _, h := range r.Jobs {
		for _, p := range h.Pods {
			got = append(got, fmt.Sprintf("%s %s", h.Name, p.Site))
		}
	}
	want := "one on-prem, two cloud, three on-prem, four on-prem, five cloud, six on-prem, seven on-prem, eight cloud"
	if strings.Join(got, ", ") != want {
		t.Errorf("they ran: %s\nwant:     %s", strings.Join(got, ", "), want)
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
	// One runs on-prem and one after it, four on the cloud's four GPUs for shares, and three have to wait for these.
	if c := r.Count(); most != 240 || c.Ran != [2]int{2, 7} || c.Unfinished != 0 {
		t.Errorf("up to %d GiB of the cloud were held; %+v", most, c)
	}
}
