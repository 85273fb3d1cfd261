// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"fmt"
	"slices"
	"time"
)

// Site is where a Job may run.
type Site int

// The sites, in the order in which they are to be used.
const (
	OnPrem Site = iota
	Cloud
)

// Sites are the values of the label gpu.site.
var Sites = [...]string{OnPrem: "on-prem", Cloud: "cloud"}

func (s Site) String() string { return Sites[s] }

// Patience is how long a Job that was admitted may wait for its pod to run.
const Patience = time.Minute

// Record is what became of the Jobs of a run. Times are since the first could come.
type Record struct {
	Jobs []*History
	// Samples say how both sites stood, in the order of time.
	Samples []Sample
	// Ended is when all Jobs had ended, or nobody waited for them any longer.
	Ended time.Duration
}

// History is what became of a Job.
type History struct {
	Job
	// Came is when it was made, and Done when it had succeeded; zero for one that had not.
	Came, Done time.Duration
	Admissions []Admission
	Pods       []Pod
}

// Admission is when a queue let a Job run at a site, and when it took that back. Until is
// zero for one that it did not take back.
type Admission struct {
	Site        Site
	From, Until time.Duration
}

// Pod is one of a Job's. From and Until are when its container ran; both are zero for one that
// never did, and Until for one that ran to the end of the record.
type Pod struct {
	UID         string
	Site        Site
	From, Until time.Duration
	// Succeeded says that it has ended as it should.
	Succeeded bool
	// Refused is the kubelet's word where it has refused the pod, such as
	// UnexpectedAdmissionError.
	Refused string
}

// Sample is how both sites stood at a moment.
type Sample struct {
	At    time.Duration
	Sites [2]Use
	// Waiting is how many Jobs had come, had no pod that ran, and were not over.
	Waiting int
	// Jobs is how each of Record.Jobs stood.
	Jobs []Standing
}

// Use is what of a site is in use.
type Use struct {
	// GiB is the GPU memory that is held, GPUs of how many GPUs some part is held, and Pods
	// how many run.
	GiB, GPUs, Pods int
}

// Counts are what an arm is judged by.
type Counts struct {
	// Stuck are the Jobs that were admitted to on-prem and whose pod did not run within
	// Patience, and Refused the pods that a kubelet refused.
	Stuck, Refused int
	// Unfinished Jobs had not succeeded when the record ended.
	Unfinished int
	// Ran is how many Jobs have run at each site, and Moved how many at both.
	Ran   [2]int
	Moved int
	// Held is the GPU memory that pods held on-prem, over time; Paid how long cloud GPUs were
	// held, all together.
	Held float64 // GiB × hours
	Paid time.Duration
	// Waited is how long a Job waited from its coming until its first pod ran, at most and
	// for the Job in the middle.
	LongestWait, MedianWait time.Duration
}

// Count counts a record.
func (r *Record) Count() (c Counts) {
	var waits []time.Duration
	for _, h := range r.Jobs {
		if h.stuck(r.Ended) {
			c.Stuck++
		}
		if h.Done == 0 {
			c.Unfinished++
		}
		first, at := r.Ended, [2]bool{}
		for _, p := range h.Pods {
			if p.Refused != "" {
				c.Refused++
			}
			if p.From == 0 {
				continue
			}
			first, at[p.Site] = min(first, p.From), true
			if until := p.until(r.Ended); p.Site == OnPrem {
				c.Held += float64(h.GiB) * (until - p.From).Hours()
			}
		}
		for site, ran := range at {
			if ran {
				c.Ran[site]++
			}
		}
		if at[OnPrem] && at[Cloud] {
			c.Moved++
		}
		waits = append(waits, first-h.Came)
	}
	r.spans(func(s *Sample, lasts time.Duration) { c.Paid += time.Duration(s.Sites[Cloud].GPUs) * lasts })
	if slices.Sort(waits); len(waits) > 0 {
		c.LongestWait, c.MedianWait = waits[len(waits)-1], waits[len(waits)/2]
	}
	return c
}

func (p Pod) until(end time.Duration) time.Duration {
	if p.Until == 0 {
		return end
	}
	return p.Until
}

// stuck reports whether the Job was once admitted to on-prem for Patience without a pod that
// ran there.
func (h *History) stuck(end time.Duration) bool {
	for _, a := range h.Admissions {
		until := a.From + Patience
		if a.Site != OnPrem || a.Until != 0 && a.Until < until || end < until {
			continue
		}
		if !slices.ContainsFunc(h.Pods, func(p Pod) bool {
			return p.Site == OnPrem && p.From != 0 && p.From <= until && p.until(end) >= a.From
		}) {
			return true
		}
	}
	return false
}

// String is what became of the Job, in a line.
func (h *History) String() string {
	out := fmt.Sprintf("%s, %s for %.0f s, came at %.0f s", h.Name, h.Piece, h.Runs.Seconds(), h.Came.Seconds())
	for _, a := range h.Admissions {
		out += fmt.Sprintf("; admitted %s at %.0f", a.Site, a.From.Seconds())
		if a.Until != 0 {
			out += fmt.Sprintf(" until %.0f", a.Until.Seconds())
		}
	}
	for _, p := range h.Pods {
		switch {
		case p.Refused != "":
			out += fmt.Sprintf("; refused %s: %s", p.Site, p.Refused)
		case p.From == 0:
			out += fmt.Sprintf("; a pod %s that never ran", p.Site)
		default:
			out += fmt.Sprintf("; ran %s from %.0f to %.0f", p.Site, p.From.Seconds(), p.Until.Seconds())
		}
	}
	if h.Done == 0 {
		out += "; not done"
	}
	return out
}
