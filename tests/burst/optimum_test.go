// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"math/rand/v2"
	"testing"
	"time"
)

// cheapest is the true optimum of a small case whose times are whole numbers: it tries
// every place and every start of every Job. With whole numbers whole starts are enough,
// since what a plan has to keep are differences between two starts.
func cheapest(jobs []Demand, onPrem map[*Kind]int, wait time.Duration) time.Duration {
	type placed struct {
		Demand
		start time.Duration
		gpu   int // below 0 in the cloud
	}
	var plan []placed
	fits := func(next placed) bool {
		for at := next.start; at < next.start+next.Runs; at++ {
			for d, holds := range next.Kind.Holds {
				sum := next.Takes[d]
				for _, p := range plan {
					if p.Kind == next.Kind && p.gpu == next.gpu && p.start <= at && at < p.start+p.Runs {
						sum += p.Takes[d]
					}
				}
				if sum > holds {
					return false
				}
			}
		}
		return true
	}
	paid := func() (sum time.Duration) {
		type moment struct {
			kind *Kind
			gpu  int
			at   time.Duration
		}
		seen := map[moment]bool{}
		for _, p := range plan {
			for at := p.start; p.gpu < 0 && at < p.start+p.Runs; at++ {
				seen[moment{p.Kind, p.gpu, at}] = true
			}
		}
		return time.Duration(len(seen))
	}
	best := time.Duration(1 << 62)
	var try func(int)
	try = func(i int) {
		if i == len(jobs) {
			best = min(best, paid())
			return
		}
		for gpu := -len(jobs); gpu < onPrem[jobs[i].Kind]; gpu++ {
			for start := jobs[i].Arrives; start <= jobs[i].Arrives+wait; start++ {
				if next := (placed{jobs[i], start, gpu}); fits(next) {
					plan = append(plan, next)
					try(i + 1)
					plan = plan[:len(plan)-1]
				}
			}
		}
	}
	try(0)
	return best
}

// A plan is never below the optimum, and the bound never above it.
func TestOptimumIsBetweenBoundAndPlan(t *testing.T) {
	shares, instances := &Kind{"shares", []int{4}, 4}, &Kind{"instances", []int{7, 8}, 8}
	profiles := [][]int{{1, 1}, {2, 2}, {3, 4}, {4, 4}, {7, 8}}
	random := rand.New(rand.NewPCG(1, 2))
	var bound, optimum, planned time.Duration
	for range 150 {
		onPrem := map[*Kind]int{shares: random.IntN(2), instances: random.IntN(2)}
		var jobs []Demand
		for range 1 + random.IntN(3) {
			j := Demand{Kind: shares, Takes: []int{1 + random.IntN(4)}, Arrives: time.Duration(random.IntN(4)), Runs: time.Duration(1 + random.IntN(4))}
			if random.IntN(2) == 0 {
				j.Kind, j.Takes = instances, profiles[random.IntN(len(profiles))]
			}
			jobs = append(jobs, j)
		}
		wait := time.Duration(random.IntN(3))
		b, o, p := Bound(jobs, onPrem, wait), cheapest(jobs, onPrem, wait), Planned(jobs, onPrem, wait)
		if b > o || p < o {
			t.Fatalf("of %+v with %v on-prem and a wait of %d the bound is %d, the optimum %d and the plan %d", jobs, onPrem, wait, b, o, p)
		}
		bound, optimum, planned = bound+b, optimum+o, planned+p
	}
	t.Logf("in these cases the bound is %.0f %% of the optimum, and the plans are %.0f %%",
		100*float64(bound)/float64(optimum), 100*float64(planned)/float64(optimum))
}

// Where Jobs fill GPUs, nothing is cut and nothing left empty: the bound is the optimum.
func TestBoundIsReached(t *testing.T) {
	whole, half := &Kind{"whole", []int{1}, 1}, &Kind{"half", []int{2}, 2}
	job := func(k *Kind, takes, arrives, runs int) Demand {
		return Demand{Kind: k, Takes: []int{takes}, Arrives: time.Duration(arrives), Runs: time.Duration(runs)}
	}
	for _, test := range []struct {
		name string
		jobs []Demand
		gpus int
		wait time.Duration
		want time.Duration
	}{
		{"nothing on-prem", []Demand{job(whole, 1, 0, 3), job(whole, 1, 0, 5)}, 0, 0, 8},
		{"all on-prem, one after the other", []Demand{job(whole, 1, 0, 3), job(whole, 1, 0, 3)}, 1, 3, 0},
		{"one cannot wait so long", []Demand{job(whole, 1, 0, 3), job(whole, 1, 0, 3)}, 1, 0, 3},
		{"two share a GPU of the cloud", []Demand{job(half, 1, 0, 4), job(half, 1, 0, 4)}, 0, 0, 4},
		{"two share one on-prem, two in the cloud", []Demand{job(half, 1, 0, 4), job(half, 1, 0, 4), job(half, 1, 0, 4), job(half, 1, 0, 4)}, 1, 0, 4},
		{"a later one finds room", []Demand{job(half, 2, 0, 4), job(half, 2, 4, 4)}, 1, 0, 0},
	} {
		onPrem := map[*Kind]int{whole: test.gpus, half: test.gpus}
		if got := Bound(test.jobs, onPrem, test.wait); got != test.want {
			t.Errorf("%s: the bound is %d, want %d", test.name, got, test.want)
		}
		if got := cheapest(test.jobs, onPrem, test.wait); got != test.want {
			t.Errorf("%s: the optimum is %d, want %d", test.name, got, test.want)
		}
		if got := Planned(test.jobs, onPrem, test.wait); got != test.want {
			t.Errorf("%s: the plan takes %d, want %d", test.name, got, test.want)
		}
	}
}
