// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"slices"
	"time"
)

// Kind is one way in which a GPU is given out. A Job's piece is of one kind.
type Kind struct {
	// Name is the kind's, for tables.
	Name string
	// Holds is what one GPU has, in each of the kind's dimensions, and GiB its memory.
	Holds []int
	GiB   int
}

// Demand is a Job as a planner sees it that knows everything.
type Demand struct {
	Kind *Kind
	// Takes is what the Job takes of a GPU, in each dimension.
	Takes []int
	// Arrives is when it comes, and Runs how long it runs.
	Arrives, Runs time.Duration
	// GiB is how much GPU memory it has.
	GiB int
	// Starts are the places in the last dimension where it may begin; none for one that may lie anywhere.
	Starts []int
	// Job is its number, for Plan.Beside.
	Job int
}

// Bound is how long cloud GPUs have to be paid for at least, all together, by a planner that
// knows every Job and every run time beforehand, and may let a Job wait so long before it
// starts, but no longer. Each kind has so many GPUs on-prem.
//
// It is a lower bound of that planner's optimum and not the optimum itself, for three
// reasons, all of which make it smaller. On-prem, Jobs may be cut into parts and run in
// any order within their time, at their own pace or slower. In the cloud, they fill GPUs
// without a gap. And a pod takes no time to start or to end. What then is left for the
// cloud is what a greatest flow through time leaves over, in the dimension in which that
// is most.
func Bound(jobs []Demand, onPrem map[*Kind]int, wait time.Duration) (paid time.Duration) {
	byKind := map[*Kind][]Demand{}
	for _, j := range jobs {
		byKind[j.Kind] = append(byKind[j.Kind], j)
	}
	for kind, of := range byKind {
		var most time.Duration
		for d, holds := range kind.Holds {
			work := time.Duration(0)
			for _, j := range of {
				work += time.Duration(j.Takes[d]) * j.Runs
			}
			left := work - onPremWork(of, d, onPrem[kind]*holds, wait)
			most = max(most, left/time.Duration(holds))
		}
		paid += most
	}
	return paid
}

// onPremWork is the most work, in one dimension, that can be done with so much of it at a
// time: the greatest flow from Jobs, each of which has its work to give, through the spans
// between the moments at which something changes, in each of which a Job gives no more
// than it takes when it runs, and all together no more than there is.
func onPremWork(jobs []Demand, dimension, holds int, wait time.Duration) time.Duration {
	var moments []time.Duration
	for _, j := range jobs {
		moments = append(moments, j.Arrives, j.Arrives+wait+j.Runs)
	}
	slices.Sort(moments)
	moments = slices.Compact(moments)
	spans := max(len(moments)-1, 0)

	// Nodes: the source, the Jobs, the spans, the sink.
	n := 1 + len(jobs) + spans + 1
	left := make([][]time.Duration, n)
	for i := range left {
		left[i] = make([]time.Duration, n)
	}
	for i, j := range jobs {
		takes := time.Duration(j.Takes[dimension])
		left[0][1+i] = takes * j.Runs
		for s := range spans {
			if moments[s] >= j.Arrives && moments[s+1] <= j.Arrives+wait+j.Runs {
				left[1+i][1+len(jobs)+s] = takes * (moments[s+1] - moments[s])
			}
		}
	}
	for s := range spans {
		left[1+len(jobs)+s][n-1] = time.Duration(holds) * (moments[s+1] - moments[s])
	}
	return flow(left)
}

// flow is the greatest from the first node to the last, by shortest paths (Edmonds and
// Karp). It uses up what it is given.
func flow(left [][]time.Duration) (total time.Duration) {
	source, sink := 0, len(left)-1
	for {
		from := make([]int, len(left))
		for i := range from {
			from[i] = -1
		}
		from[source] = source
		for queue := []int{source}; len(queue) > 0 && from[sink] < 0; queue = queue[1:] {
			for to, capacity := range left[queue[0]] {
				if capacity > 0 && from[to] < 0 {
					from[to] = queue[0]
					queue = append(queue, to)
				}
			}
		}
		if from[sink] < 0 {
			return total
		}
		least := left[from[sink]][sink]
		for at := sink; at != source; at = from[at] {
			least = min(least, left[from[at]][at])
		}
		for at := sink; at != source; at = from[at] {
			left[from[at]][at] -= least
			left[at][from[at]] += least
		}
		total += least
	}
}
