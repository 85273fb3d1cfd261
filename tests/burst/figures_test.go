// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"
)

// What is reached in virtual time with a patience of 0: on-prem holds at least this part of what a plan holds there
// while the cloud is paid, and the cloud costs at most so many times the plan's.
const (
	leastHeld = 0.75
	mostPaid  = 1.30
)

// Five loads of seconds and five of hours in virtual time. The tables say what kept on-prem idle, in the run and by
// the plan that may not wait, in the seconds in which the run pays.
func TestOnPremFillsFirst(t *testing.T) {
	n := map[bool]int{false: 5, true: 1}[testing.Short()]
	for _, of := range []struct {
		name  string
		load  Load
		every time.Duration
	}{{"seconds", Full, 500 * time.Millisecond}, {"hours", Hours, 10 * time.Second}} {
		t.Run(of.name, func(t *testing.T) {
			var names []string
			var records, plans []*Record
			var jobs [][]Job
			for _, load := range of.load.Seeds(n) {
				all := load.Draw()
				r := quiet.run(t, all, of.every, 48*time.Hour)
				c := r.Count()
				t.Logf("seed %d: %+v", load.Seed, c)
				if c.Stuck+c.Refused+c.Unfinished > 0 {
					t.Errorf("seed %d: %d Jobs were stuck, %d pods refused, %d Jobs have not ended",
						load.Seed, c.Stuck, c.Refused, c.Unfinished)
				}
				plan := NewPlan(Demands(all), Own, 0)
				f := r.against(plan, 0)
				if f.Held < leastHeld*f.Plan || f.Paid.Seconds() > mostPaid*f.Planned.Seconds() {
					t.Errorf("seed %d: %s of a plan that may not wait", load.Seed, f)
				}
				names = append(names, fmt.Sprint(load.Seed))
				records, plans, jobs = append(records, r), append(plans, plan.Beside(r)), append(jobs, all)
			}
			t.Log(IdleTable(names, records))
			t.Log("the plan:\n", IdleTable(names, plans))
			if !testing.Short() {
				t.Log(FillTable(names, records, jobs))
			}
		})
	}
}

// Virtual time is worth something if a run is the same each time.
func TestVirtualTimeIsAlwaysTheSame(t *testing.T) {
	jobs := Full.Draw()
	first, second := quiet.run(t, jobs, time.Second, time.Hour), quiet.run(t, jobs, time.Second, time.Hour)
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
	r := quiet.run(t, []Job{
		job("one", units(60), 1*s),
		job("two", units(60), 2*s),                  // quota would do, no GPU
		job("three", units(10), 3*s),                // beside the first
		job("four", instance("4g.40gb"), 4*s),       //
		job("five", instance("4g.40gb"), 5*s),       // no quota on-prem, as the export has one such piece
		job("six", units(60), 35*s),                 // when the first has ended
		job("seven", instance("3g.40gb"), 6*s),      // beside the fourth
		job("eight", instance("1g.10gb"), 6500*1e6), // no compute is left
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
