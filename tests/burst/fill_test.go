// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"testing"
	"time"
)

// A plan that fills on-prem and has one Job in the cloud, and a run that does worse.
func TestFill(t *testing.T) {
	const s = time.Second
	half := units(40)
	whole := units(60)
	plan := &Plan{
		own: [][]spot{{
			{Demand{Kind: Shares, Takes: whole.Takes, Runs: 10 * s, GiB: 60}, 0, -1},
			{Demand{Kind: Shares, Takes: half.Takes, Runs: 10 * s, GiB: 40, Job: 1}, 10 * s, -1},
		}},
		cloud: [][]spot{{{Demand{Kind: Shares, Takes: half.Takes, Runs: 8 * s, GiB: 40, Job: 2}, 0, -1}}},
	}
	for _, test := range []struct {
		from, to time.Duration
		want     float64
	}{{0, 20 * s, 1000}, {5 * s, 15 * s, 500}, {20 * s, 30 * s, 0}, {19 * s, 99 * s, 40}} {
		if got := plan.Held(test.from, test.to); got != test.want {
			t.Errorf("from %s to %s the plan holds %v GiB·s, want %v", test.from, test.to, got, test.want)
		}
	}
	r := &Record{Samples: []Sample{
		{At: 0, Sites: [2]Use{OnPrem: {GiB: 60}}},
		{At: 4 * s, Sites: [2]Use{OnPrem: {GiB: 60}, Cloud: {GPUs: 1}}},
		{At: 6 * s, Sites: [2]Use{OnPrem: {GiB: 0}, Cloud: {GPUs: 2}}},
		{At: 12 * s, Sites: [2]Use{OnPrem: {GiB: 40}, Cloud: {GPUs: 1}}},
		{At: 14 * s, Sites: [2]Use{OnPrem: {GiB: 40}}},
		{At: 30 * s},
	}}
	got := r.against(plan, s)
	want := Fill{Wait: s, Held: 60*2 + 40*2, Plan: 60*6 + 40*4, Paid: (2 + 12 + 2) * s, Planned: 8 * s}
	if got != want || got.String() != "38 %, × 2.00" {
		t.Errorf("got  %+v: %[1]s\nwant %+v", got, want)
	}
	if empty := (&Record{}).Fill(nil, 0); empty.String() != "–, –" {
		t.Errorf("of nothing: %s", empty)
	}
}

// The plan is one that could be carried out: no GPU has more than it holds, and nobody waits too long.
func TestPlanKeepsItsRules(t *testing.T) {
	jobs := Full.Draw()
	const wait = 30 * time.Second
	plan := NewPlan(Demands(jobs), Own, wait)
	n := 0
	for _, gpus := range [][][]spot{plan.own, plan.cloud} {
		for _, g := range gpus {
			for i, one := range g {
				n++
				if one.start < one.Arrives || one.start > one.Arrives+wait || !room(append(g[:i:i], g[i+1:]...), one) {
					t.Errorf("%+v has no room, or starts at a wrong time", one)
				}
			}
		}
	}
	if n != len(jobs) || len(plan.own) != 2 {
		t.Errorf("the plan has %d of %d Jobs, and %d GPUs on-prem", n, len(jobs), len(plan.own))
	}
	if has := plan.Held(0, time.Hour); has <= 0 {
		t.Errorf("on-prem %v GiB·s are held", has)
	}
}

// What lies where another has to begin keeps it out, though the sums would do.
func TestPlanKnowsPlaces(t *testing.T) {
	const s = time.Second
	one, four := instance("1g.10gb"), instance("4g.40gb")
	for _, test := range []struct {
		starts []int
		want   time.Duration
	}{{[]int{0}, 5 * s}, {[]int{0, 6}, 0}, {nil, 0}} {
		one.Starts = test.starts
		jobs := []Job{{Piece: one, Runs: 10 * s}, {Piece: four, Arrives: s, Runs: 5 * s}}
		if got := Planned(Demands(jobs), Own, 0); got != test.want {
			t.Errorf("beside a piece that may begin at %v it pays for %s, want %s", test.starts, got, test.want)
		}
	}
}
