// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"fmt"
	"strings"
	"time"
)

// Waits are the patiences at which a planner is asked.
var Waits = []time.Duration{0, 30 * time.Second, 2 * time.Minute, 10 * time.Minute}

// Fill compares a run with a plan for the same Jobs, each of which may wait so long.
type Fill struct {
	Wait time.Duration
	// Held is what on-prem held while the run paid for anything in the cloud, in GiB × seconds, and Plan what
	// the plan holds there in these very seconds.
	Held, Plan float64
	// Paid and Planned are for how long cloud GPUs were paid for, all together, and are by the plan.
	Paid, Planned time.Duration
}

// Fill compares the record with the best plan at a patience.
func (r *Record) Fill(jobs []Job, wait time.Duration) Fill {
	return r.against(NewPlan(Demands(jobs), Own, wait), wait)
}

func (r *Record) against(p *Plan, wait time.Duration) Fill {
	f := Fill{Wait: wait, Planned: p.Paid()}
	r.spans(func(s *Sample, lasts time.Duration) {
		if n := s.Sites[Cloud].GPUs; n > 0 {
			f.Paid += time.Duration(n) * lasts
			f.Held += float64(s.Sites[OnPrem].GiB) * lasts.Seconds()
			f.Plan += p.Held(s.At, s.At+lasts)
		}
	})
	return f
}

// String is the two figures: what on-prem held as a part of what the plan holds there, and what was paid over
// what the plan pays.
func (f Fill) String() string {
	part, ratio := "–", "–"
	if f.Plan > 0 {
		part = fmt.Sprintf("%.0f %%", 100*f.Held/f.Plan)
	}
	if f.Planned > 0 {
		ratio = fmt.Sprintf("× %.2f", float64(f.Paid)/float64(f.Planned))
	}
	return part + ", " + ratio
}

// FillTable has a row for each run, and a column for each of Waits.
func FillTable(names []string, records []*Record, jobs [][]Job) string {
	var out strings.Builder
	fmt.Fprint(&out, "while the cloud is paid, on-prem holds this part of what a plan holds; paid over the plan's\n")
	fmt.Fprint(&out, "| run | on-prem is full while the cloud is paid |")
	for _, wait := range Waits {
		fmt.Fprintf(&out, " a plan that waits %s |", wait)
	}
	fmt.Fprintf(&out, "\n|%s\n", strings.Repeat("---|", len(Waits)+2))
	for i, r := range records {
		paid, _ := r.Idle()
		for n, wait := range Waits {
			f := r.Fill(jobs[i], wait)
			if n == 0 {
				fmt.Fprintf(&out, "| %s | %.0f %% |", names[i], 100*f.Held/max(f.Held+paid.Sum(), 1))
			}
			fmt.Fprintf(&out, " %s |", f)
		}
		fmt.Fprintln(&out)
	}
	return out.String()
}
