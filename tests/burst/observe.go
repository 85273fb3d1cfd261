// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"context"
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
		Name, UID       string
		Labels          map[string]string
		OwnerReferences []struct{ Kind, Name string }
	}
	condition struct {
		Type, Status       string
		LastTransitionTime time.Time
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
	status, err := o.of.Agents[Cloud].Status(ctx)
	if err != nil {
		return false, err
	}
	now := time.Since(o.began)
	sample := Sample{At: now}
	sample.Sites[Cloud].GPUs = held(status)
	for i := range workloads.Items {
		o.admission(&workloads.Items[i], now)
	}
	done = true
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
		running, over := false, h.Done != 0
		for i := range h.Pods {
			p := &h.Pods[i]
			if !seen[p.UID] && p.From != 0 && p.Until == 0 {
				p.Until = now // it was deleted while it ran
			}
			over = over || p.Succeeded
			if p.From != 0 && p.Until == 0 {
				running = true
				use := &sample.Sites[p.Site]
				use.GiB, use.Pods = use.GiB+h.GiB, use.Pods+1
			}
		}
		if h.Came != 0 && !over && !running {
			sample.Waiting++
		}
		done = done && h.Done != 0
	}
	o.Samples = append(o.Samples, sample)
	o.Ended = now
	return done, nil
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

// admission notes where a Job's workload is admitted.
func (o *observer) admission(w *workloadObject, now time.Duration) {
	var h *History
	for _, owner := range w.Metadata.OwnerReferences {
		if owner.Kind == "Job" {
			h = o.byName[owner.Name]
		}
	}
	if h == nil {
		return
	}
	var last *Admission
	if n := len(h.Admissions); n > 0 && h.Admissions[n-1].Until == 0 {
		last = &h.Admissions[n-1]
	}
	for _, c := range w.Status.Conditions {
		if c.Type != "Admitted" || c.Status != "True" || w.Status.Admission == nil {
			continue
		}
		site := OnPrem
		for _, set := range w.Status.Admission.PodSetAssignments {
			for _, flavor := range set.Flavors {
				if strings.HasPrefix(flavor, Sites[Cloud]+"-") {
					site = Cloud
				}
			}
		}
		next := Admission{Site: site, From: c.LastTransitionTime.Sub(o.began)}
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
