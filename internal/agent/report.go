// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/label"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/nfd"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
)

// Keys of the node's labels, annotation and condition, below the domain.
const (
	StateLabel        = "gpu.partition.state"
	ReasonAnnotation  = "gpu.partition.reason"
	MessageAnnotation = "gpu.partition.message"
	HealthCondition   = "GPUHealthy"
	ReadyCondition    = "GPUReady"
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
	Annotations: []string{ReasonAnnotation, MessageAnnotation},
	Conditions:  []string{HealthCondition, ReadyCondition},
}

// HoldAnnotation keeps Cluster Autoscaler from taking the node away.
const HoldAnnotation = "cluster-autoscaler.kubernetes.io/scale-down-disabled"

// reasons are the Events' reasons.
var reasons = map[State]status.Reason{
	Applied: status.GPUPartitionApplied,
	Pending: status.GPUPartitionPending,
	Blocked: status.GPUPartitionBlocked,
	Failed:  status.GPUPartitionFailed,
	Invalid: status.GPUPartitionInvalid,
}

// herald tells people and programs what rounds leave: on the Node, in Events and to Node
// Feature Discovery. Nothing that the loop decides follows from it. Its goroutine is run;
// setNode and conditions are for anybody.
type herald struct {
	domain string
	// labels and hold are Options.Labels and HoldScaleDown.
	labels   Labels
	hold     bool
	cluster  Cluster
	features Features
	log      *slog.Logger
	// latest is what the last round left, offer what the kubelet is offered, and allocations
	// are the ledger's.
	latest      func() *Snapshot
	offer       func() *deviceplugin.Offer
	allocations func() []ledger.Allocation
	// node is the Node as it was last heard of.
	node atomic.Pointer[agentkube.Node]
	// kept is why the startup taint could not be taken away, and wake asks for a round,
	// which tells it.
	kept atomic.Pointer[status.Cause]
	wake func()
	// news wakes run; it holds at most one token.
	news chan struct{}
}

func newHerald(o *Options, w *Worlds, latest func() *Snapshot, offer func() *deviceplugin.Offer,
	allocations func() []ledger.Allocation, wake func(), news chan struct{}) *herald {
	h := &herald{domain: o.Domain, labels: o.Labels, hold: o.HoldScaleDown,
		cluster: w.Cluster, features: w.Features, log: o.Log,
		latest: latest, offer: offer, allocations: allocations, wake: wake, news: news}
	h.node.Store(new(agentkube.Node))
	return h
}

// setNode takes in the Node. One that was made anew has lost what was written on it.
func (h *herald) setNode(n *agentkube.Node) {
	h.node.Store(n)
	poke(h.news)
}

// run keeps the node's labels, annotation and condition equal to what the loop
// last found, and sends an Event for each new thing. It runs beside the loop,
// since the API server may be slow or away; the newest snapshot is all it needs.
// It says nothing before the loop has heard what is wanted, so that a restart of
// the agent does not make labels flicker.
func (h *herald) run(ctx context.Context) error {
	var told Outcome
	var sick []health.Verdict
	failing := false
	pause := backOff(backOffMax)
	for {
		for !h.latest().Heard {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-h.news:
			}
		}
		snap := h.latest()
		own, guests, known := h.nodeLabels(snap)
		var errs []error
		if h.features != nil {
			err := h.features.Write(nfd.Features{Labels: own, Guests: guests, Node: h.node.Load().Labels, Keep: !known})
			if err != nil && !failing {
				h.log.Error("cannot leave the labels for Node Feature Discovery", "err", err)
			}
			failing = err != nil
			errs = append(errs, err)
			own, guests, known = nil, nil, true
		}
		if c := h.cluster; c != nil {
			if o := snap.Outcome; o != told {
				h.tellOutcome(c, o)
				told = o
			}
			if !slices.Equal(sick, snap.hardware.Verdicts) {
				h.tellHealth(c, snap, sick)
				sick = snap.hardware.Verdicts
			}
			marks := agentkube.Marks{GuestAnnotations: snap.holds(h.hold), Guests: guests, KeepLabels: !known,
				Labels:      map[string]string{h.domain + "/" + StateLabel: string(snap.Outcome.State)},
				Annotations: map[string]string{}}
			maps.Copy(marks.Labels, own)
			if o := snap.Outcome; o.Reason != "" {
				marks.Annotations[h.domain+"/"+ReasonAnnotation] = string(o.Reason)
				marks.Annotations[h.domain+"/"+MessageAnnotation] = o.Message
			}
			err := c.Mark(ctx, marks)
			if err == nil {
				err = c.SetCondition(ctx, condition(h.domain, snap))
			}
			if ready, known := readyCondition(h.domain, snap, time.Now()); err == nil && known {
				if err = c.SetCondition(ctx, ready); err == nil {
					err = h.admit(ctx, ready)
				}
			}
			errs = append(errs, err)
		}
		var again <-chan time.Time
		if errors.Join(errs...) != nil {
			again = time.After(pause.Step())
		} else {
			pause = backOff(backOffMax)
			if left := silentFor - time.Since(snap.usable.began); !snap.usable.offered && left > 0 {
				again = time.After(left)
			} else if h.node.Load().StartupTaint {
				again = time.After(backOffMax) // a list may pass over what it waits for
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-h.news:
		case <-again:
		}
	}
}

// nodeLabels are what the node's GPUs are, the agent's own words and those of GPU
// Feature Discovery. known is false where that cannot be told now: before this
// process has read the hardware, and while there is none to be read. What was
// written before then stays.
func (h *herald) nodeLabels(snap *Snapshot) (own, guests map[string]string, known bool) {
	if !h.labels.Own {
		return nil, nil, true
	}
	if !snap.hardware.Answered {
		return nil, nil, false
	}
	in := label.Node{Inventory: snap.hardware.Inventory, Graph: snap.hardware.Topology,
		Partition: snap.asked.Active, Wanted: snap.asked.Wanted}
	if own = label.Own(h.domain, in); own == nil {
		return nil, nil, false
	}
	if snap.asked.Wanted == nil {
		// No partition is in force in this process. One may have been in the process
		// before: what followed from that still holds.
		return own, nil, false
	}
	if h.labels.Guest {
		guests = label.NVIDIA(in)
	}
	return own, guests, true
}

// tellOutcome sends the Event of a new outcome.
func (h *herald) tellOutcome(c Cluster, o Outcome) {
	kind := agentkube.Normal
	if o.State == Failed || o.State == Invalid || o.State == Applied && o.Message != "" {
		kind = agentkube.Warning
	}
	message := o.Message
	if o.Partition != "" {
		message = fmt.Sprintf("partition %s is %s (%s): %s", o.Partition, o.State, o.Reason, o.Message)
		if o.Message == "" {
			message = "partition " + o.Partition + " is applied"
		}
	}
	c.Event(workload.Pod{}, kind, string(reasons[o.State]), message)
}

// tellHealth sends Events of what has changed in the GPUs' health: to the node,
// and of what is new to those whose pods are on it.
func (h *herald) tellHealth(c Cluster, snap *Snapshot, before []health.Verdict) {
	news, over := healthNews(before, snap.hardware.Verdicts)
	for _, g := range together(snap.hardware.Inventory, news) {
		message := g.names + " unhealthy: " + g.reason
		c.Event(workload.Pod{}, agentkube.Warning, string(status.GPUUnhealthy), message)
		var told []workload.Pod
		for _, u := range g.gpus {
			for _, pod := range podsOn(h.allocations(), u) {
				if !slices.Contains(told, pod) {
					told = append(told, pod)
					c.Event(pod, agentkube.Warning, string(status.GPUUnhealthy), message)
				}
			}
		}
	}
	for _, g := range together(snap.hardware.Inventory, over) {
		c.Event(workload.Pod{}, agentkube.Normal, string(status.GPURecovered),
			g.names+" healthy again; it was: "+g.reason)
	}
}

// healthNews are the verdicts that were not there before, and those that are over.
func healthNews(before, now []health.Verdict) (news, over []health.Verdict) {
	less := func(list, of []health.Verdict) []health.Verdict {
		return slices.DeleteFunc(slices.Clone(list), func(v health.Verdict) bool {
			return slices.ContainsFunc(of, func(o health.Verdict) bool {
				return o.Subject == v.Subject && o.Class == v.Class
			})
		})
	}
	return less(now, before), less(before, now)
}

// group is GPUs of which the same is to be said.
type group struct {
	// names is "GPU 3 (GPU-…) is", or "GPUs 0, 1, 2 are".
	names, reason string
	gpus          []gpu.UUID
}

// together puts verdicts with the same reason into one sentence, so that a driver that
// is gone is reported once and not for each GPU.
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
		g.names = numbers(inv, g.gpus) + " are"
	}
	return out
}

// numbers says which GPUs these are: "GPU 3", or "GPUs 0, 1, 2".
func numbers(inv *gpu.Inventory, of []gpu.UUID) string {
	var out []string
	for i := range inv.GPUs { // in index order
		if d := &inv.GPUs[i]; slices.Contains(of, d.UUID) {
			out = append(out, strconv.Itoa(d.Index))
		}
	}
	if len(out) == 1 {
		return "GPU " + out[0]
	}
	return "GPUs " + strings.Join(out, ", ")
}

// podsOn lists the pods that have something of a GPU, each once.
func podsOn(allocations []ledger.Allocation, u gpu.UUID) []workload.Pod {
	var out []workload.Pod
	for i := range allocations {
		if !allocations[i].On(u) {
			continue
		}
		for _, pod := range allocations[i].Pods() {
			if !slices.Contains(out, pod) {
				out = append(out, pod)
			}
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
func condition(domain string, snap *Snapshot) agentkube.Condition {
	c := agentkube.Condition{Type: domain + "/" + HealthCondition, Status: agentkube.True,
		Reason:  string(status.GPUsHealthy),
		Message: fmt.Sprintf("%d GPUs are healthy", len(snap.hardware.Inventory.GPUs))}
	var parts []string
	for _, g := range together(snap.hardware.Inventory, snap.hardware.Verdicts) {
		parts = append(parts, g.names+" unhealthy: "+g.reason)
	}
	if snap.hardware.Hangs != "" {
		c.Status, c.Reason = agentkube.Unknown, string(status.GPUDriverHangs)
		parts = append(parts, "hardware work waits: "+snap.hardware.Hangs)
	}
	if len(snap.hardware.Verdicts) > 0 {
		c.Status, c.Reason = agentkube.False, string(status.GPUUnhealthy)
	}
	if len(parts) > 0 {
		c.Message = strings.Join(parts, "; ")
	}
	return c
}
