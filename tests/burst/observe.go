// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"context"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/tests/lab"
)

// observer makes a record of what the API server and the agents say, look by look.
type observer struct {
	of    *Cluster
	began time.Time
	Record
	byName map[string]*History
}

func (c *Cluster) observe(began time.Time, jobs []Job) *observer {
	o := &observer{of: c, began: began, byName: map[string]*History{}}
	for _, j := range jobs {
		h := &History{Job: j}
		o.Jobs = append(o.Jobs, h)
		o.byName[j.Name] = h
	}
	return o
}

// The parts of objects that are looked at.
type (
	meta struct {
		Name, UID           string
		Labels, Annotations map[string]string
		OwnerReferences     []struct{ Kind, Name string }
	}
	condition struct {
		Type               string    `json:"type"`
		Status             string    `json:"status"`
		Reason             string    `json:"reason"`
		LastTransitionTime time.Time `json:"lastTransitionTime"`
	}
	podObject struct {
		Metadata meta
		Spec     struct{ NodeName string }
		Status   struct {
			Phase, Reason     string
			ContainerStatuses []struct {
				State struct {
					Running    *struct{ StartedAt time.Time }
					Terminated *struct{ StartedAt, FinishedAt time.Time }
				}
			}
		}
	}
	workloadObject struct {
		Metadata meta
		Status   struct {
			Conditions []condition
			Admission  *struct {
				PodSetAssignments []struct{ Flavors map[string]string }
			}
			RequeueState *struct{ RequeueAt time.Time }
		}
	}
	jobObject struct {
		Metadata meta
		Status   struct{ Conditions []condition }
	}
)

// look takes everything in once, and says whether all Jobs have succeeded.
func (o *observer) look(ctx context.Context) (done bool, err error) {
	var pods struct{ Items []podObject }
	var workloads struct{ Items []workloadObject }
	var jobs struct{ Items []jobObject }
	api := o.of.Nodes[OnPrem]
	for path, into := range map[string]any{podsPath: &pods, workloadsPath: &workloads, jobsPath: &jobs} {
		if err := api.Read(ctx, path, into); err != nil {
			return false, err
		}
	}
	var status [2]lab.Status
	for site := range status {
		if status[site], err = o.of.Agents[site].Status(ctx); err != nil {
			return false, err
		}
	}
	now := time.Since(o.began)
	of := map[*History]*workloadObject{}
	for i := range workloads.Items {
		w := &workloads.Items[i]
		if h := o.owner(w); h != nil {
			of[h] = w
			h.admission(w, o.began, now)
		}
	}
	for i := range jobs.Items {
		j := &jobs.Items[i]
		if h := o.byName[j.Metadata.Name]; h != nil {
			for _, c := range j.Status.Conditions {
				if c.Type == "Complete" && c.Status == "True" {
					h.Done = c.LastTransitionTime.Sub(o.began)
				}
			}
		}
	}
	seen := map[string]bool{}
	for i := range pods.Items {
		seen[pods.Items[i].Metadata.UID] = true
		o.pod(&pods.Items[i])
	}
	for _, h := range o.Jobs {
		for i := range h.Pods {
			if p := &h.Pods[i]; !seen[p.UID] && p.From != 0 && p.Until == 0 {
				p.Until = now // it was deleted while it ran
			}
		}
	}
	used := [2]int{held(status[OnPrem]), held(status[Cloud])}
	return o.sample(now, used, of, holders(status[OnPrem])), nil
}

// sample notes how both sites and all Jobs stand. It says whether all Jobs have succeeded.
func (o *observer) sample(
	now time.Duration, gpus [2]int, of map[*History]*workloadObject, has map[string]int,
) (done bool) {
	s := Sample{At: now}
	for site, n := range gpus {
		s.Sites[site].GPUs = n
	}
	done = true
	for _, h := range o.Jobs {
		running, over := false, h.Done != 0
		for _, p := range h.Pods {
			over = over || p.Succeeded
			if p.From != 0 && p.Until == 0 {
				running = true
				use := &s.Sites[p.Site]
				use.GiB, use.Pods = use.GiB+h.GiB, use.Pods+1
			}
		}
		if h.Came != 0 && !over && !running {
			s.Waiting++
		}
		done = done && h.Done != 0
		s.Jobs = append(s.Jobs, h.standing(of[h], has, o.began.Add(now)))
	}
	o.Samples = append(o.Samples, s)
	o.Ended = now
	return done
}

// held is how many GPUs somebody has a part of.
func held(s lab.Status) (n int) {
	for _, g := range s.GPUs {
		if g.Used > 0 || len(g.Holders) > 0 {
			n++
		}
	}
	return n
}

// holders are the Jobs with a piece of a GPU, by the word of the agent, and where it begins; -1 if it has no
// place.
func holders(s lab.Status) map[string]int {
	has := map[string]int{}
	// A Job's pods have its name, with something after it.
	job := func(pod string) string { return pod[:max(strings.LastIndex(pod, "-"), 0)] }
	for _, g := range s.GPUs {
		for _, h := range g.Holders {
			has[job(h.Pod)] = -1
		}
	}
	for _, g := range s.GPUs {
		if g.MIG == nil {
			continue
		}
		for _, slot := range g.MIG.In("held") {
			has[job(slot.Pod)] = slot.Start
		}
	}
	return has
}

// owner is the Job of a workload, nil if it is none of these.
func (o *observer) owner(w *workloadObject) *History {
	for _, owner := range w.Metadata.OwnerReferences {
		if owner.Kind == "Job" {
			return o.byName[owner.Name]
		}
	}
	return nil
}

func (w *workloadObject) is(kind string) bool {
	return slices.ContainsFunc(w.Status.Conditions, func(c condition) bool {
		return c.Type == kind && c.Status == "True"
	})
}

// site is where the workload has quota.
func (w *workloadObject) site() Site {
	for _, set := range w.Status.Admission.PodSetAssignments {
		for _, flavor := range set.Flavors {
			if strings.HasPrefix(flavor, Sites[Cloud]+"-") {
				return Cloud
			}
		}
	}
	return OnPrem
}

// standing is how the Job stands, by its pods, by its workload, which may be nil, and by who has a piece on-prem.
func (h *History) standing(w *workloadObject, has map[string]int, now time.Time) (is Standing) {
	at, holds := has[h.Name]
	if is.At = at; !holds {
		is.At = -1
	}
	quota := w != nil && w.Status.Admission != nil && w.is("QuotaReserved") && !w.is("Finished")
	ended := false
	for _, p := range h.Pods {
		switch {
		case p.From != 0 && p.Until == 0:
			if is.Stage, is.Site = Running, p.Site; quota && p.Site == Cloud && w.is("Evicted") {
				is.Stage = Evicted
			}
			return is
		case p.Succeeded:
			ended = true
		}
	}
	if quota {
		is.Site = w.site()
		// Its last pod has ended, unless that was before it got this quota.
		n := len(h.Pods)
		ended = ended || n > 0 && h.Pods[n-1].Until != 0 && h.Pods[n-1].Site == is.Site
	}
	switch {
	case quota && w.is("Evicted"):
		is.Stage = Evicted
	case quota && ended:
		is.Stage = Leaving
	case quota && w.is("Admitted"):
		is.Stage = Starting
	case quota:
		is.Stage = Asking
	case holds:
		is.Stage = Leaving
	case h.Came == 0 || h.Done != 0 || ended:
		is.Stage = Away
	default:
		is.Stage = w.waits(now)
	}
	return is
}

// called is for how long a workload counts as called. While the placer holds room for it, it calls every 5 s.
const called = 10 * time.Second

// waits is the stage of a workload without quota, or of a Job that has no workload yet.
func (w *workloadObject) waits(now time.Time) Stage {
	switch {
	case w == nil:
		return Queued
	case w.Status.RequeueState != nil && w.Status.RequeueState.RequeueAt.After(now):
		return Delayed
	case w.Metadata.Annotations[lab.Domain+"/gpu.refused-flavors"] != "":
		return Kept
	case slices.ContainsFunc(w.Status.Conditions, func(c condition) bool {
		return c.Type == "Requeued" && c.Reason == "GPUPlacer" && now.Sub(c.LastTransitionTime) < called
	}):
		return Called
	}
	return Queued
}

// admission notes where the Job's workload is admitted.
func (h *History) admission(w *workloadObject, began time.Time, now time.Duration) {
	var last *Admission
	if n := len(h.Admissions); n > 0 && h.Admissions[n-1].Until == 0 {
		last = &h.Admissions[n-1]
	}
	for _, c := range w.Status.Conditions {
		if c.Type != "Admitted" || c.Status != "True" || w.Status.Admission == nil {
			continue
		}
		next := Admission{Site: w.site(), From: c.LastTransitionTime.Sub(began)}
		if last != nil && *last == next {
			return
		}
		if last != nil {
			last.Until = next.From
		}
		h.Admissions = append(h.Admissions, next)
		return
	}
	if last != nil {
		last.Until = now
	}
}

// pod notes how a Job's pod stands.
func (o *observer) pod(p *podObject) {
	h := o.byName[p.Metadata.Labels["batch.kubernetes.io/job-name"]]
	if h == nil || p.Spec.NodeName == "" {
		return
	}
	next := Pod{UID: p.Metadata.UID, Succeeded: p.Status.Phase == "Succeeded"}
	if p.Spec.NodeName == o.of.Nodes[Cloud].Name {
		next.Site = Cloud
	}
	if p.Status.Phase == "Failed" {
		next.Refused = p.Status.Reason
	}
	for _, c := range p.Status.ContainerStatuses {
		if r := c.State.Running; r != nil {
			next.From = r.StartedAt.Sub(o.began)
		}
		if t := c.State.Terminated; t != nil && !t.StartedAt.IsZero() {
			next.From, next.Until = t.StartedAt.Sub(o.began), t.FinishedAt.Sub(o.began)
		}
	}
	for i := range h.Pods {
		if h.Pods[i].UID == next.UID {
			h.Pods[i] = next
			return
		}
	}
	h.Pods = append(h.Pods, next)
}
