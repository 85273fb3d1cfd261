// SPDX-License-Identifier: Apache-2.0

package diagnosis

import (
	"cmp"
	"strings"
)

// job returns what holds the Job up.
func (f *Facts) job() []Finding {
	j := f.Job
	switch {
	case j.Complete:
		return []Finding{{Code: Over, Cause: "the Job has completed"}}
	case j.Suspended && f.Workload != nil:
		return f.queued(f.Workload)
	case j.Suspended && j.Queue != "" && !f.unseen("Workloads"):
		return []Finding{find(Queued, "the Job waits for queue %s of Kueue, which has made no Workload for it: "+
			"does Kueue run, and does it manage this namespace?", j.Queue)}
	case j.Suspended && j.Queue != "":
		return []Finding{find(Queued, "Kueue holds the Job in queue %s, and its Workload was not seen", j.Queue)}
	case j.Suspended:
		return []Finding{find(Suspended, "the Job is suspended (spec.suspend), and no queue of Kueue has it")}
	}
	var out []Finding
	if f.Pod != nil {
		out = f.pod()
	}
	if j.Failed != "" {
		failed := find(Crash, "the Job has failed for good: %s", j.Failed)
		failed.Next = "create it anew once the cause is gone"
		if len(out) == 0 || out[0].Code == Fine || out[0].Code == Over {
			return append([]Finding{failed}, out...)
		}
		return append(out, failed)
	}
	if f.Pod == nil {
		return []Finding{find(Unknown, "the Job has no pods, for no known reason; see its Events")}
	}
	return out
}

// queued returns why Kueue does not let a workload run.
func (f *Facts) queued(w *Workload) (out []Finding) {
	if w.Inactive {
		stopped := find(Queued, "its Workload %s is not active (spec.active)", w.Name)
		stopped.Next = "set spec.active of the Workload to true once the cause is gone"
		out = append(out, stopped)
	}
	queue := cmp.Or(w.Queue, "its queue")
	reserved, seen := false, false
	for _, c := range w.Conditions {
		switch {
		case c.Type == "QuotaReserved" && !c.True:
			seen = true
			code, why := Queued, "queue "+queue+" does not admit it"
			if strings.Contains(c.Message, "quota") {
				code, why = Quota, "queue "+queue+" has no quota left for it"
			}
			found := find(code, "%s: %s", why, cmp.Or(c.Message, c.Reason))
			if strings.Contains(c.Message, "maximum capacity") { // Kueue's words for what can never fit
				found.Cause = "queue " + queue + " can never have as much quota: " + c.Message
				found.Next = "ask for less, or have the queue's quota raised; waiting does not help"
			}
			out = append(out, found)
		case c.Type == "QuotaReserved":
			seen, reserved = true, true
		case c.Type == "Evicted" && c.True:
			out = append(out, find(Queued, "Kueue has evicted it (%s): %s", c.Reason, c.Message))
		}
	}
	// The placer, or another controller, writes into its check what it still waits for.
	for _, c := range w.Checks {
		if c.State != "Ready" {
			found := find(Queued, "admission check %s is %s: %s", c.Name, c.State, cmp.Or(c.Message, "it says nothing"))
			if reserved {
				out = append([]Finding{found}, out...)
			} else {
				out = append(out, found)
			}
		}
	}
	if !seen && len(out) == 0 {
		out = append(out, find(Queued, "Kueue has not looked at its Workload %s yet; queue %s", w.Name, queue))
	}
	if len(out) == 0 {
		out = append(out, find(Queued, "Kueue has admitted it, and the Job is to start"))
	}
	return out
}
