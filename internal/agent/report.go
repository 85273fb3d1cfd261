// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
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

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/label"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/nfd"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/topology"
)

// State is the outcome of a partition on the node.
type State string

// States, as the node's label has them.
const (
	Applied State = "applied"
	Pending State = "pending"
	Blocked State = "blocked"
	Failed  State = "failed"
	Invalid State = "invalid"
)

// Outcome is what the loop reports of the partition in force.
type Outcome struct {
	Partition string
	State     State
	// Reason is the code of the gravest condition that it follows from, empty when
	// applied without a remark.
	Reason status.Reason
	// Message says what blocks or failed, with file and line where the file is
	// at fault. Empty when applied without a remark; at most 4 KiB.
	Message string
}

// Snapshot is what a round left, for status and metrics. It is immutable.
type Snapshot struct {
	Inventory *gpu.Inventory
	// Topology is how the GPUs of Inventory are joined, and Matrix shows it; nil
	// before the first.
	Topology *topology.Graph
	Matrix   *topology.Matrix
	// Answered says that this process has read Inventory itself.
	Answered bool
	Layouts  map[gpu.UUID]plan.Layout
	// Wanted is what the partition Active means on this node: the last good one
	// while a newer one cannot be had. Nil before there was one.
	Wanted  []config.Want
	Active  string
	blocked bool // some change waits for holders
	// Others is why GPUs are, or may be, given out by somebody else.
	Others  map[gpu.UUID]string
	Outcome Outcome
	// Conditions are the facts that the outcome follows from, and others.
	Conditions []status.Condition
	// Source is where the partition file came from; Generation counts the
	// changes of what is wanted since the start.
	Source     string
	Generation uint64
	At         time.Time
	// Heard says that partitions and label have been heard of, if only that
	// there are none or that they may not be read: from then on the outcome is
	// worth telling.
	Heard bool
	// Unknown is since when the kubelet has not known resources that are offered it.
	Unknown map[string]time.Time
	// Missing is what Ready waits for, empty once the agent has been ready.
	Missing string
	// Verdicts are the unhealthy GPUs; Hangs is what the driver does
	// not answer.
	Verdicts []health.Verdict
	Hangs    string
	// usable is whether pods can be sent here, and inUse whether some have something.
	usable usable
	inUse  bool
	// Work is what is being done to GPUs' hardware, Made the MIG instances that are
	// the agent's; Leaving and Failing are the MIG devices that go with their
	// holders and those that could not be made, with the reason.
	Work    map[gpu.UUID]string
	Made    map[gpu.UUID]map[mig.Placement]bool
	Leaving map[gpu.UUID]map[mig.Placement]status.Cause
	Failing map[mig.Place]status.Cause
	// basis is what the round's last plan was made from, for those who ask what another
	// partition would come to, and lasting is what decides the state whatever the partition is.
	basis   *basis
	lasting []status.Condition
}

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

// states are what conditions make of a partition; those of other types leave it Applied.
var states = map[status.Type]State{status.Invalid: Invalid, status.Failed: Failed, status.Refused: Failed, status.Blocked: Blocked, status.Pending: Pending}

// reporter tells people and programs what rounds leave: in the status, on the Node, in
// Events and in the log. Nothing that the loop decides follows from it.
type reporter struct {
	opts     *Options
	names    *deviceplugin.Names
	ledger   *ledger.Ledger
	front    *deviceplugin.FrontEnd
	claims   *claims
	plugins  Plugins
	cluster  Cluster
	features Features
	log      *slog.Logger
	// snapshot is what the last round left.
	snapshot atomic.Pointer[Snapshot]
	// node is the Node as it was last heard of.
	node atomic.Pointer[agentkube.Node]
	// kept is why the startup taint could not be taken away, and wake asks for a round,
	// which tells it.
	kept atomic.Pointer[status.Cause]
	wake func()
	// news wakes run; it holds at most one token.
	news chan struct{}
}

func newReporter(o *Options, names *deviceplugin.Names, l *ledger.Ledger, f *deviceplugin.FrontEnd, c *claims, w *Worlds, wake func()) *reporter {
	r := &reporter{wake: wake, opts: o, names: names, ledger: l, front: f, claims: c, plugins: w.Plugins, cluster: w.Cluster, features: w.Features, log: o.Log, news: make(chan struct{}, 1)}
	r.snapshot.Store(&Snapshot{Inventory: &gpu.Inventory{}, Outcome: Outcome{State: Pending, Reason: status.Starting, Message: "starting"}})
	r.node.Store(new(agentkube.Node))
	return r
}

// setNode takes in the Node. One that was made anew has lost what was written on it.
func (r *reporter) setNode(n agentkube.Node) {
	r.node.Store(&n)
	poke(r.news)
}

// findings are what a round came to, beside its snapshot.
type findings struct {
	in      *input // as the round began
	changes *plan.Changes
	// note says why the partition changes nothing, and hwNote what the hardware has
	// not; they are remarks.
	note   status.Cause
	hwNote string
	// configErr is why the newest word of the partitions is not in force, errs what
	// failed, and missing what else the agent is not ready for.
	configErr error
	errs      []error
	missing   []string
	// work is what failed on the hardware and is tried again, and what the partition
	// waits for there.
	work []status.Condition
	// besides are conditions that do not count for the partition.
	besides []status.Condition
}

// finish makes s what people see.
func (r *reporter) finish(s *Snapshot, f *findings) {
	now, old := time.Now(), r.snapshot.Load()
	s.At, s.Source, s.Leaving = now, f.in.source, f.changes.Leaving
	// An API server that starts refuses what it permits a moment later.
	refusals := f.in.refusals(now, silentFor)
	failed, noted := r.claims.conditions(now)
	f.work = append(f.work, noted...)
	s.lasting = slices.Concat(refusals, unregistered(r.resources(s.Unknown)), failed)
	f.judge(s, s.lasting)
	s.Conditions = slices.Concat(s.Conditions, r.more(s), f.besides)
	status.SortConditions(s.Conditions, old.Conditions, now)
	o := &s.Outcome
	if old.At.IsZero() || old.Missing != "" { // once ready, it stays so
		s.Missing = f.unready(s, now)
	}
	s.Heard = f.in.heard() || len(refusals) > 0
	s.usable.follow(old.usable, s.Missing == "" && delivered(r.plugins, r.claims), now)
	s.inUse = len(r.ledger.Allocations()) > 0
	changed := s.Outcome != old.Outcome || s.usable != old.usable || s.inUse != old.inUse || s.Inventory != old.Inventory || s.Generation != old.Generation || s.Heard != old.Heard || s.Hangs != old.Hangs ||
		!slices.Equal(s.Verdicts, old.Verdicts)
	r.snapshot.Store(s)
	r.logHealth(old.Verdicts, s.Verdicts)
	if *o != old.Outcome {
		r.log.Info("partition", "name", o.Partition, "state", string(o.State), "reason", string(o.Reason), "message", o.Message)
	}
	if changed {
		poke(r.news)
	}
}

// judge puts into one word and a sentence what the partition comes to, and notes all
// conditions that count for it. trouble is told in any case; of the rest, what must be
// seen to first.
func (f *findings) judge(s *Snapshot, trouble []status.Condition) {
	var invalid, failed, note, notes []status.Condition
	if f.configErr != nil {
		why := status.CauseOf(f.configErr, status.PartitionsInvalid)
		if s.Wanted != nil {
			why.Message += "; the last good partition stays in force"
		}
		invalid = append(invalid, why.Condition(status.Invalid, ""))
	}
	for _, err := range f.errs {
		if err != nil {
			failed = append(failed, status.CauseOf(err, status.RoundFailed).Condition(status.Failed, ""))
		}
	}
	if f.note.Message != "" {
		note = append(note, f.note.Condition(status.Pending, ""))
	}
	if s.Hangs != "" {
		notes = append(notes, status.Why(status.GPUDriverHangs, "hardware work waits: %s", s.Hangs).Condition(status.Unhealthy, ""))
	}
	if f.hwNote != "" {
		notes = append(notes, status.Why(status.TimeSliceUnsupported, "%s", f.hwNote).Condition(status.Noted, ""))
	}
	facts := slices.Concat(f.changes.Conditions, f.work)
	for _, b := range f.changes.Blocked {
		facts = append(facts, b.Condition())
	}
	of := func(kind status.Type) []status.Condition {
		return slices.DeleteFunc(slices.Clone(facts), func(c status.Condition) bool { return c.Type != kind })
	}
	stuck, waits := slices.Concat(of(status.Failed), of(status.Blocked)), of(status.Pending)
	if len(stuck) > 0 {
		stuck, waits = slices.Concat(stuck, waits), nil
	}
	groups := [][]status.Condition{invalid, failed, of(status.Refused), stuck, note, waits, slices.Concat(notes, of(status.Noted))}
	s.Conditions = slices.Concat(trouble, slices.Concat(groups...))
	s.blocked = len(f.changes.Blocked) > 0
	told := trouble
	if i := slices.IndexFunc(groups, func(g []status.Condition) bool { return len(g) > 0 }); i >= 0 {
		told = slices.Concat(trouble, groups[i])
	}
	o := &s.Outcome
	o.State, o.Message = Applied, brief.Cut(messages(told), brief.Text)
	if len(told) > 0 {
		gravest := slices.MinFunc(told, status.Condition.Compare)
		o.State, o.Reason = cmp.Or(states[gravest.Type], Applied), gravest.Reason
	}
}

// more are the conditions that do not count for the partition: which GPUs are unhealthy,
// which containers and claims wait for what, and which MIG devices are withdrawn or leave.
func (r *reporter) more(s *Snapshot) (out []status.Condition) {
	for _, v := range s.Verdicts {
		c := status.Cause{Reason: status.GPUUnhealthy, Message: v.Reason}.Condition(status.Unhealthy, string(v.GPU))
		c.Since = v.Since
		out = append(out, c)
	}
	for _, c := range r.ledger.Allocations() {
		why := c.Cause
		if c.After != "" {
			why = status.Why(status.HeldByPods, "it waits for the end of %s", c.After)
		}
		if !c.IsOpen() && why.Message != "" {
			out = append(out, why.Condition(status.Waiting, c.ID))
		}
	}
	out = append(out, r.claims.refused()...)
	out = append(out, s.leaves()...)
	for at, why := range s.Failing {
		out = append(out, why.Condition(status.Leaving, mig.ID(at.GPU, at.Placement)))
	}
	return out
}

// leaves says which MIG devices go, or are withdrawn.
func (s *Snapshot) leaves() (out []status.Condition) {
	for u, placements := range s.Leaving {
		for placement, why := range placements {
			out = append(out, why.Condition(status.Leaving, mig.ID(u, placement)))
		}
	}
	return out
}

// messages joins what conditions say.
func messages(of []status.Condition) string {
	words := make([]string, len(of))
	for i := range of {
		words[i] = of[i].Message
	}
	return sentences(words...)
}

// sentences joins what there is to say.
func sentences(words ...string) string {
	return strings.Join(slices.DeleteFunc(words, func(s string) bool { return s == "" }), "; ")
}

// unready is what Ready waits for.
func (f *findings) unready(s *Snapshot, now time.Time) string {
	out := slices.Clone(f.missing)
	offers := slices.ContainsFunc(slices.Collect(maps.Values(s.Layouts)), func(l plan.Layout) bool { return l.Offers && l.N > 0 })
	switch {
	case !f.in.labelKnown:
		out = append(out, "the node's labels have not been heard of")
	case !f.in.heard():
		out = append(out, "partitions have not been heard of")
	case s.Outcome.State == Invalid && !offers:
		out = append(out, "nothing is on offer, and there is no valid partition: "+s.Outcome.Message)
	}
	if !f.in.heard() {
		out = append(out, messages(f.in.refusals(now, 0)))
	}
	return sentences(out...)
}

// run keeps the node's labels, annotation and condition equal to what the loop
// last found, and sends an Event for each new thing. It runs beside the loop,
// since the API server may be slow or away; the newest snapshot is all it needs.
// It says nothing before the loop has heard what is wanted, so that a restart of
// the agent does not make labels flicker.
func (r *reporter) run(ctx context.Context) error {
	var told Outcome
	var sick []health.Verdict
	failing := false
	pause := backOff(backOffMax)
	for {
		for !r.snapshot.Load().Heard {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-r.news:
			}
		}
		snap := r.snapshot.Load()
		own, guests, known := r.nodeLabels(snap)
		var errs []error
		if r.features != nil {
			err := r.features.Write(nfd.Features{Labels: own, Guests: guests, Node: r.node.Load().Labels, Keep: !known})
			if err != nil && !failing {
				r.log.Error("cannot leave the labels for Node Feature Discovery", "err", err)
			}
			failing = err != nil
			errs = append(errs, err)
			own, guests, known = nil, nil, true
		}
		if c := r.cluster; c != nil {
			if o := snap.Outcome; o != told {
				r.tellOutcome(c, o)
				told = o
			}
			if !slices.Equal(sick, snap.Verdicts) {
				r.tellHealth(c, snap, sick)
				sick = snap.Verdicts
			}
			marks := agentkube.Marks{GuestAnnotations: snap.holds(r.opts.HoldScaleDown), Labels: map[string]string{r.opts.Domain + "/" + StateLabel: string(snap.Outcome.State)},
				Annotations: map[string]string{}, Guests: guests, KeepLabels: !known}
			maps.Copy(marks.Labels, own)
			if o := snap.Outcome; o.Reason != "" {
				marks.Annotations[r.opts.Domain+"/"+ReasonAnnotation] = string(o.Reason)
				marks.Annotations[r.opts.Domain+"/"+MessageAnnotation] = o.Message
			}
			err := c.Mark(ctx, marks)
			if err == nil {
				err = c.SetCondition(ctx, condition(r.opts.Domain, snap))
			}
			if ready, known := readyCondition(r.opts.Domain, snap, time.Now()); err == nil && known {
				if err = c.SetCondition(ctx, ready); err == nil {
					err = r.admit(ctx, ready)
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
			} else if r.node.Load().StartupTaint {
				again = time.After(backOffMax) // a list may pass over what it waits for
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-r.news:
		case <-again:
		}
	}
}

// nodeLabels are what the node's GPUs are, the agent's own words and those of GPU
// Feature Discovery. known is false where that cannot be told now: before this
// process has read the hardware, and while there is none to be read. What was
// written before then stays.
func (r *reporter) nodeLabels(snap *Snapshot) (own, guests map[string]string, known bool) {
	if !r.opts.Label {
		return nil, nil, true
	}
	if !snap.Answered {
		return nil, nil, false
	}
	in := label.Node{Inventory: snap.Inventory, Graph: snap.Topology, Partition: snap.Active, Wanted: snap.Wanted}
	if own = label.Own(r.opts.Domain, in); own == nil {
		return nil, nil, false
	}
	if snap.Wanted == nil {
		// No partition is in force in this process. One may have been in the process
		// before: what followed from that still holds.
		return own, nil, false
	}
	if r.opts.Guest {
		guests = label.NVIDIA(in)
	}
	return own, guests, true
}

// tellOutcome sends the Event of a new outcome.
func (r *reporter) tellOutcome(c Cluster, o Outcome) {
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
func (r *reporter) tellHealth(c Cluster, snap *Snapshot, before []health.Verdict) {
	news, over := healthNews(before, snap.Verdicts)
	for _, g := range together(snap.Inventory, news) {
		message := g.names + " unhealthy: " + g.reason
		c.Event(workload.Pod{}, agentkube.Warning, string(status.GPUUnhealthy), message)
		var told []workload.Pod
		for _, u := range g.gpus {
			for _, pod := range podsOn(r.ledger.Allocations(), u) {
				if !slices.Contains(told, pod) {
					told = append(told, pod)
					c.Event(pod, agentkube.Warning, string(status.GPUUnhealthy), message)
				}
			}
		}
	}
	for _, g := range together(snap.Inventory, over) {
		c.Event(workload.Pod{}, agentkube.Normal, string(status.GPURecovered), g.names+" healthy again; it was: "+g.reason)
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
func (r *reporter) logHealth(before, now []health.Verdict) {
	news, over := healthNews(before, now)
	for _, v := range news {
		r.log.Warn("GPU is unhealthy", "gpu", string(v.GPU), "gi", v.GI, "ci", v.CI, "class", string(v.Class), "reason", v.Reason)
	}
	for _, v := range over {
		r.log.Info("GPU fault is over", "gpu", string(v.GPU), "gi", v.GI, "ci", v.CI, "class", string(v.Class))
	}
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
	c := agentkube.Condition{Type: domain + "/" + HealthCondition, Status: agentkube.True, Reason: string(status.GPUsHealthy),
		Message: fmt.Sprintf("%d GPUs are healthy", len(snap.Inventory.GPUs))}
	var parts []string
	for _, g := range together(snap.Inventory, snap.Verdicts) {
		parts = append(parts, g.names+" unhealthy: "+g.reason)
	}
	if snap.Hangs != "" {
		c.Status, c.Reason = agentkube.Unknown, string(status.GPUDriverHangs)
		parts = append(parts, "hardware work waits: "+snap.Hangs)
	}
	if len(snap.Verdicts) > 0 {
		c.Status, c.Reason = agentkube.False, string(status.GPUUnhealthy)
	}
	if len(parts) > 0 {
		c.Message = strings.Join(parts, "; ")
	}
	return c
}
