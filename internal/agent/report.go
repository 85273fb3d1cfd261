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
	"example.com/gpu-agent/internal/found"
	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/label"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/nfd"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
)

// Keys of the node's labels, annotations and conditions, below the domain.
const (
	StateLabel        = "gpu.partition.state"
	ReasonAnnotation  = "gpu.partition.reason"
	MessageAnnotation = "gpu.partition.message"
	HealthCondition   = "GPUHealthy"
	ReadyCondition    = "GPUReady"
	// PartitionLabel chooses the partition. ReleaseLabel makes the agent on a cordoned node let the
	// driver go. Both are set by operators.
	PartitionLabel = "gpu.partition"
	ReleaseLabel   = "gpu.driver-release"
)

// Written lists all that the agent writes on its Node below the domain, by name. Of other domains
// it writes labels of GPU Feature Discovery and HoldAnnotation. The admission policy
// (deployments/base/admission.yaml) refuses everything else; a test compares the two.
var Written = struct{ Labels, Annotations, Conditions []string }{
	Labels:      append(slices.Clone(label.Names), StateLabel),
	Annotations: []string{ReasonAnnotation, MessageAnnotation},
	Conditions:  []string{HealthCondition, ReadyCondition},
}

// HoldAnnotation keeps Cluster Autoscaler from removing the node.
const HoldAnnotation = "cluster-autoscaler.kubernetes.io/scale-down-disabled"

// reasons are the reasons of Events, by state.
var reasons = map[State]status.Reason{
	Applied: status.GPUPartitionApplied,
	Pending: status.GPUPartitionPending,
	Blocked: status.GPUPartitionBlocked,
	Failed:  status.GPUPartitionFailed,
	Invalid: status.GPUPartitionInvalid,
}

// announcer reports the results of rounds: on the Node, in Events, and to Node Feature Discovery.
// The loop's decisions do not depend on it. It works in the goroutine of run; any goroutine may
// call setNode and conditions.
type announcer struct {
	domain string
	// labels and hold are Options.Labels and HoldScaleDown.
	labels   Labels
	hold     bool
	cluster  Cluster
	features Features
	log      *slog.Logger
	// latest returns the last round's result, offer what the kubelet is offered, and allocations
	// the ledger's allocations.
	latest      func() *Snapshot
	offer       func() *deviceplugin.Offer
	allocations func() []ledger.Allocation
	// node is the newest Node, an empty one at first.
	node atomic.Pointer[agentkube.Node]
	// kept is why the startup taint could not be removed, nil if it could. wake starts a round,
	// which reports a change of it.
	kept atomic.Pointer[status.Cause]
	wake func()
	// news wakes run; it holds at most one token.
	news chan struct{}
}

func newAnnouncer(o *Options, w *Worlds, latest func() *Snapshot, offer func() *deviceplugin.Offer,
	allocations func() []ledger.Allocation, wake func(), news chan struct{}) *announcer {
	h := &announcer{domain: o.Domain, labels: o.Labels, hold: o.HoldScaleDown,
		cluster: w.Cluster, features: w.Features, log: o.Log,
		latest: latest, offer: offer, allocations: allocations, wake: wake, news: news}
	h.node.Store(new(agentkube.Node))
	return h
}

// setNode takes in the Node. A Node that was created anew has lost the agent's labels.
func (h *announcer) setNode(n *agentkube.Node) {
	h.node.Store(n)
	poke(h.news)
}

// run keeps the node's labels, annotations and conditions equal to the newest snapshot, and sends
// an Event for each change. It runs beside the loop since the API server may be slow or away. It
// writes nothing before the loop has heard of the partitions, so that a restart of the agent does
// not change labels back and forth.
func (h *announcer) run(ctx context.Context) error {
	var told Outcome
	var sick []health.Verdict
	var left []found.Finding
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
				h.log.Error("cannot write the labels for Node Feature Discovery", "err", err)
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
			if !sameFindings(left, snap.found) {
				h.tellFound(c, snap.hardware.Inventory, left, snap.found)
				left = snap.found
			}
			marks := agentkube.Marks{GuestAnnotations: snap.holdAnnotation(h.hold), Guests: guests, KeepLabels: !known,
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
					err = h.removeStartupTaint(ctx, ready)
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
				again = time.After(backOffMax) // the watch may have missed the change that this waits for
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

// nodeLabels returns the labels that describe the node's GPUs: the agent's own, and those of GPU
// Feature Discovery. known is false before this process has read the hardware, and while it cannot.
// Then the earlier labels stay.
func (h *announcer) nodeLabels(snap *Snapshot) (own, guests map[string]string, known bool) {
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
		// No partition is in force in this process. One may have been in the last process, and its
		// labels still hold.
		return own, nil, false
	}
	if h.labels.Guest {
		guests = label.NVIDIA(in)
	}
	return own, guests, true
}

// tellOutcome sends the Event of a new outcome.
func (h *announcer) tellOutcome(c Cluster, o Outcome) {
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
	c.State("partition", kind, string(reasons[o.State]), message)
}

// tellHealth sends Events about changes in the GPUs' health: to the node, and for new faults also
// to the pods on the GPU.
func (h *announcer) tellHealth(c Cluster, snap *Snapshot, before []health.Verdict) {
	news, over := healthNews(before, snap.hardware.Verdicts)
	for _, g := range together(snap.hardware.Inventory, news) {
		message := g.names + " unhealthy: " + g.reason
		c.State(g.names+" "+string(g.class), agentkube.Warning, string(status.GPUUnhealthy), message)
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
		c.State(g.names+" "+string(g.class), agentkube.Normal, string(status.GPURecovered),
			g.names+" healthy again; it was: "+g.reason)
	}
}

// healthNews returns the verdicts that are new, and those that are over.
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

// group is a set of GPUs with the same fault. The reason's text may change while the fault stays.
type group struct {
	// names is "GPU 3 (GPU-…) is", or "GPUs 0, 1, 2 are".
	names, reason string
	class         health.Class
	gpus          []gpu.UUID
}

// together groups verdicts by their class and reason. So a driver that is gone is reported once, and not for
// each GPU.
func together(inv *gpu.Inventory, verdicts []health.Verdict) []group {
	var out []group
	for _, v := range verdicts {
		i := slices.IndexFunc(out, func(g group) bool { return g.reason == v.Reason && g.class == v.Class })
		if i < 0 {
			i = len(out)
			out = append(out, group{reason: v.Reason, class: v.Class})
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

// numbers names GPUs by index: "GPU 3", or "GPUs 0, 1, 2".
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

// podsOn returns the pods that have something of a GPU, each once.
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

// condition returns the node's condition on the GPUs' health.
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
