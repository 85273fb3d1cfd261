// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"example.com/gpu-agent/internal/desk"
	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/label"
	"example.com/gpu-agent/internal/nfd"
	"example.com/gpu-agent/pkg/gpu"
)

// Keys of the node's labels, annotation and condition, below the domain.
const (
	StateLabel        = "gpu.partition.state"
	MessageAnnotation = "gpu.partition.message"
	HealthCondition   = "GPUHealthy"
	// PartitionLabel is set by operators and chooses the partition. ReleaseLabel
	// is theirs too: on a cordoned node it has the agent let go of the driver.
	PartitionLabel = "gpu.partition"
	ReleaseLabel   = "gpu.driver-release"
)

// Written is all that the agent writes on its Node below the domain, by name. Of
// other domains it writes labels of GPU Feature Discovery. An admission policy
// (deployments/base/admission.yaml) refuses everything else; a test compares.
var Written = struct{ Labels, Annotations, Conditions []string }{
	Labels:      append(slices.Clone(label.Names), StateLabel),
	Annotations: []string{MessageAnnotation},
	Conditions:  []string{HealthCondition},
}

// reasons are the Events' reasons.
var reasons = map[State]string{
	Applied: "GPUPartitionApplied",
	Pending: "GPUPartitionPending",
	Waiting: "GPUPartitionBlocked",
	Failed:  "GPUPartitionFailed",
	Invalid: "GPUPartitionInvalid",
}

// Reasons of Events and of the condition that speak of health.
const (
	unhealthyReason = "GPUUnhealthy"
	recoveredReason = "GPURecovered"
	healthyReason   = "GPUsHealthy"
	hangsReason     = "GPUDriverHangs"
)

// report keeps the node's labels, annotation and condition equal to what the loop
// last found, and sends an Event for each new thing. It runs beside the loop,
// since the API server may be slow or away; the newest snapshot is all it needs.
// It says nothing before the loop has heard what is wanted, so that a restart of
// the agent does not make labels flicker.
func (a *Agent) report(ctx context.Context) error {
	var told Outcome
	var sick []health.Verdict
	failing := ""
	pause := backOff(backOffMax)
	for {
		for !a.snapshot.Load().Heard {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-a.news:
			}
		}
		snap := a.snapshot.Load()
		own, guests, known := a.nodeLabels(snap)
		var errs []error
		if a.features != nil {
			err := a.features.Write(nfd.Features{Labels: own, Guests: guests, Node: a.heardSoFar().labels, Keep: !known})
			if says := fmt.Sprint(err); err != nil && says != failing {
				a.log.Error("cannot leave the labels for Node Feature Discovery", "err", err)
				failing = says
			}
			errs = append(errs, err)
			own, guests, known = nil, nil, true
		}
		if c := a.cluster; c != nil {
			if o := snap.Outcome; o != told {
				a.tellOutcome(c, o)
				told = o
			}
			if !slices.Equal(sick, snap.Verdicts) {
				a.tellHealth(c, snap, sick)
				sick = snap.Verdicts
			}
			marks := kube.Marks{Labels: map[string]string{a.opts.Domain + "/" + StateLabel: string(snap.Outcome.State)},
				Annotations: map[string]string{}, Guests: guests, KeepLabels: !known}
			maps.Copy(marks.Labels, own)
			if m := snap.Outcome.Message; m != "" {
				marks.Annotations[a.opts.Domain+"/"+MessageAnnotation] = m
			}
			err := c.Mark(ctx, marks)
			if err == nil {
				err = c.SetCondition(ctx, condition(a.opts.Domain, snap))
			}
			errs = append(errs, err)
		}
		var again <-chan time.Time
		if errors.Join(errs...) != nil {
			again = time.After(pause.Step())
		} else {
			pause, failing = backOff(backOffMax), ""
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-a.news:
		case <-again:
		}
	}
}

// nodeLabels are what the node's GPUs are, the agent's own words and those of GPU
// Feature Discovery. known is false where that cannot be told now: before this
// process has read the hardware, and while there is none to be read. What was
// written before then stays.
func (a *Agent) nodeLabels(snap *Snapshot) (own, guests map[string]string, known bool) {
	if !a.opts.Label {
		return nil, nil, true
	}
	if !snap.Answered {
		return nil, nil, false
	}
	in := label.Node{Inventory: snap.Inventory, Graph: snap.Topology, Partition: snap.Active, Wanted: snap.Wanted}
	if own = label.Own(a.opts.Domain, in); own == nil {
		return nil, nil, false
	}
	if snap.Wanted == nil {
		// No partition is in force in this process. One may have been in the process
		// before: what followed from that still holds.
		return own, nil, false
	}
	if a.opts.Guest {
		guests = label.NVIDIA(in)
	}
	return own, guests, true
}

// tellOutcome sends the Event of a new outcome.
func (a *Agent) tellOutcome(c Cluster, o Outcome) {
	kind := kube.Normal
	if o.State == Failed || o.State == Invalid || o.State == Applied && o.Message != "" {
		kind = kube.Warning
	}
	message := o.Message
	if o.Partition != "" {
		message = "partition " + o.Partition + " is " + string(o.State) + ": " + o.Message
		if o.Message == "" {
			message = "partition " + o.Partition + " is applied"
		}
	}
	c.Event(kube.Regarding{}, kind, reasons[o.State], message)
}

// tellHealth sends Events of what has changed in the GPUs' health: to the node,
// and of what is new to those whose pods are on it.
func (a *Agent) tellHealth(c Cluster, snap *Snapshot, before []health.Verdict) {
	news, over := healthNews(before, snap.Verdicts)
	for _, g := range together(snap.Inventory, news) {
		message := g.names + " unhealthy: " + g.reason
		c.Event(kube.Regarding{}, kube.Warning, unhealthyReason, message)
		var told []kube.Regarding
		for _, u := range g.gpus {
			for _, pod := range podsOn(a.desk.Claims(), u) {
				if !slices.Contains(told, pod) {
					told = append(told, pod)
					c.Event(pod, kube.Warning, unhealthyReason, message)
				}
			}
		}
	}
	for _, g := range together(snap.Inventory, over) {
		c.Event(kube.Regarding{}, kube.Normal, recoveredReason, g.names+" healthy again; it was: "+g.reason)
	}
}

// healthNews are the verdicts that were not there before, and those that are over.
func healthNews(before, now []health.Verdict) (news, over []health.Verdict) {
	less := func(list, of []health.Verdict) []health.Verdict {
		return slices.DeleteFunc(slices.Clone(list), func(v health.Verdict) bool {
			return slices.ContainsFunc(of, func(o health.Verdict) bool { return o.Subject == v.Subject && o.Class == v.Class })
		})
	}
	return less(now, before), less(before, now)
}

// logHealth logs what has changed in the GPUs' health, which may be over before
// anybody asks for the status.
func (a *Agent) logHealth(before, now []health.Verdict) {
	news, over := healthNews(before, now)
	for _, v := range news {
		a.log.Warn("GPU is unfit for work", "gpu", string(v.GPU), "gi", v.GI, "ci", v.CI, "class", string(v.Class), "reason", v.Reason)
	}
	for _, v := range over {
		a.log.Info("GPU fault is over", "gpu", string(v.GPU), "gi", v.GI, "ci", v.CI, "class", string(v.Class))
	}
}

// group is GPUs of which the same is to be said.
type group struct {
	// names is "GPU 3 (GPU-…) is", or "GPUs 0, 1, 2 are".
	names, reason string
	gpus          []gpu.UUID
}

// together puts verdicts with the same reason into one sentence: a driver that is
// gone is one piece of news, not one for each GPU.
func together(inv *gpu.Inventory, verdicts []health.Verdict) []group {
	var out []group
	for _, v := range verdicts {
		i := slices.IndexFunc(out, func(g group) bool { return g.reason == v.Reason })
		if i < 0 {
			i = len(out)
			out = append(out, group{reason: v.Reason})
		}
		if !slices.Contains(out[i].gpus, v.GPU) {
			out[i].gpus = append(out[i].gpus, v.GPU)
		}
	}
	for i := range out {
		g := &out[i]
		if len(g.gpus) == 1 {
			g.names = name(inv, g.gpus[0]) + " is"
			continue
		}
		var indices []int
		for _, u := range g.gpus {
			if d := inv.ByUUID(u); d != nil {
				indices = append(indices, d.Index)
			}
		}
		slices.Sort(indices)
		words := make([]string, len(indices))
		for j, n := range indices {
			words[j] = strconv.Itoa(n)
		}
		g.names = "GPUs " + strings.Join(words, ", ") + " are"
	}
	return out
}

// podsOn lists the pods that have something of a GPU, each once.
func podsOn(claims []desk.Claim, u gpu.UUID) []kube.Regarding {
	var out []kube.Regarding
	for i := range claims {
		c := &claims[i]
		pod := kube.Regarding{Namespace: c.Holder.Namespace, Pod: c.Holder.Pod}
		if len(c.PodUIDs) > 0 {
			pod.UID = c.PodUIDs[0]
		}
		if pod.Pod != "" && c.On(u) && !slices.Contains(out, pod) {
			out = append(out, pod)
		}
	}
	return out
}

func name(inv *gpu.Inventory, u gpu.UUID) string {
	if d := inv.ByUUID(u); d != nil {
		return d.Name()
	}
	return string(u)
}

// condition puts the GPUs' health into the node's condition.
func condition(domain string, snap *Snapshot) kube.Condition {
	c := kube.Condition{Type: domain + "/" + HealthCondition, Status: kube.True, Reason: healthyReason,
		Message: fmt.Sprintf("%d GPUs are healthy", len(snap.Inventory.GPUs))}
	var parts []string
	for _, g := range together(snap.Inventory, snap.Verdicts) {
		parts = append(parts, g.names+" unhealthy: "+g.reason)
	}
	if snap.Hangs != "" {
		c.Status, c.Reason = kube.Unknown, hangsReason
		parts = append(parts, "hardware work waits: "+snap.Hangs)
	}
	if len(snap.Verdicts) > 0 {
		c.Status, c.Reason = kube.False, unhealthyReason
	}
	if len(parts) > 0 {
		c.Message = strings.Join(parts, "; ")
	}
	return c
}

// tell wakes report.
func (a *Agent) tell() { poke(a.news) }
