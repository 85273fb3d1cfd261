// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/desk"
	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/kube"
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

// report keeps the node's label, annotation and condition equal to what the loop
// last found, and sends an Event for each new thing. It runs beside the loop,
// since the API server may be slow or away; the newest snapshot is all it needs.
// It says nothing before the loop has heard what is wanted, so that a restart of
// the agent does not make the label flicker.
func (a *Agent) report(ctx context.Context, c Cluster) error {
	var told Outcome
	var sick []health.Verdict
	pause := backOffMin
	for {
		for !a.snapshot.Load().Heard {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-a.news:
			}
		}
		snap := a.snapshot.Load()
		if o := snap.Outcome; o != told {
			a.tellOutcome(c, o)
			told = o
		}
		if !slices.Equal(sick, snap.Verdicts) {
			a.tellHealth(c, snap, sick)
			sick = snap.Verdicts
		}
		state := string(snap.Outcome.State)
		annotations := map[string]*string{a.opts.Domain + "/" + MessageAnnotation: nil}
		if m := snap.Outcome.Message; m != "" {
			annotations[a.opts.Domain+"/"+MessageAnnotation] = &m
		}
		err := c.PatchNode(ctx, map[string]*string{a.opts.Domain + "/" + StateLabel: &state}, annotations)
		if err == nil {
			err = c.SetCondition(ctx, condition(a.opts.Domain, snap))
		}
		var again <-chan time.Time
		if err != nil {
			again, pause = time.After(pause), min(2*pause, backOffMax)
		} else {
			pause = backOffMin
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-a.news:
		case <-again:
		}
	}
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
	has := func(list []health.Verdict, v health.Verdict) bool {
		return slices.ContainsFunc(list, func(o health.Verdict) bool { return o.Subject == v.Subject && o.Class == v.Class })
	}
	for _, v := range snap.Verdicts {
		if has(before, v) {
			continue
		}
		message := name(snap.Inventory, v.GPU) + " is unfit for work: " + v.Reason
		c.Event(kube.Regarding{}, kube.Warning, unhealthyReason, message)
		for _, pod := range podsOn(a.desk.Claims(), v.GPU) {
			c.Event(pod, kube.Warning, unhealthyReason, message)
		}
	}
	for _, v := range before {
		if !has(snap.Verdicts, v) {
			c.Event(kube.Regarding{}, kube.Normal, recoveredReason, name(snap.Inventory, v.GPU)+" has recovered from: "+v.Reason)
		}
	}
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
		if pod.Pod != "" && slices.Contains(c.GPUs, u) && !slices.Contains(out, pod) {
			out = append(out, pod)
		}
	}
	return out
}

func name(inv *gpu.Inventory, u gpu.UUID) string {
	if d := inv.ByUUID(u); d != nil {
		return describe(d)
	}
	return string(u)
}

// condition puts the GPUs' health into the node's condition.
func condition(domain string, snap *Snapshot) kube.Condition {
	c := kube.Condition{Type: domain + "/" + HealthCondition, Status: kube.True, Reason: healthyReason,
		Message: fmt.Sprintf("%d GPUs are fit for work", len(snap.Inventory.GPUs))}
	var parts []string
	for _, v := range snap.Verdicts {
		parts = append(parts, name(snap.Inventory, v.GPU)+": "+v.Reason)
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
func (a *Agent) tell() {
	select {
	case a.news <- struct{}{}:
	default:
	}
}
