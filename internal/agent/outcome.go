// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
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
	hardware readout
	shape    shape
	asked    asked
	Outcome  Outcome
	// Conditions are the facts that the outcome follows from, and others.
	Conditions []status.Condition
	blocked    bool // some change waits for holders
	// lasting is what decides the state whatever the partition is.
	lasting []status.Condition
	At      time.Time
	// Heard says that partitions and label have been heard of, if only that
	// there are none or that they may not be read: from then on the outcome is
	// worth telling.
	Heard bool
	// Missing is what Ready waits for, empty once the agent has been ready.
	Missing string
	// Unknown is since when the kubelet has not known resources that are offered it.
	Unknown map[string]time.Time
	// usable is whether pods can be sent here, and inUse whether some have something.
	usable usable
	inUse  bool
	// basis is what the round's last plan was made from, for those who ask what another
	// partition would come to.
	basis *basis
}

// readout is what is known of the GPUs themselves.
type readout struct {
	Inventory *gpu.Inventory
	// Topology is how the GPUs of Inventory are joined, and Matrix shows it; nil
	// before the first.
	Topology *topology.Graph
	Matrix   *topology.Matrix
	// Answered says that this process has read Inventory itself.
	Answered bool
	// Verdicts are the unhealthy GPUs; Hangs is what the driver does
	// not answer.
	Verdicts []health.Verdict
	Hangs    string
}

// shape is what the GPUs are laid out as.
type shape struct {
	Layouts map[gpu.UUID]plan.Layout
	// Others is why GPUs are, or may be, given out by somebody else.
	Others map[gpu.UUID]string
	// Work is what is being done to GPUs' hardware, Made the MIG instances that are
	// the agent's; Leaving and Failing are the MIG devices that go with their
	// holders and those that could not be made, with the reason.
	Work    map[gpu.UUID]string
	Made    map[gpu.UUID]map[mig.Placement]bool
	Leaving map[gpu.UUID]map[mig.Placement]status.Cause
	Failing map[mig.Place]status.Cause
}

// asked is what the partitions ask for.
type asked struct {
	// Wanted is what the partition Active means on this node: the last good one
	// while a newer one cannot be had. Nil before there was one.
	Wanted []config.Want
	Active string
	// Source is where the partition file came from; Generation counts the
	// changes of what is wanted since the start.
	Source     string
	Generation uint64
}

// states are what conditions make of a partition; those of other types leave it Applied.
var states = map[status.Type]State{
	status.Invalid: Invalid,
	status.Failed:  Failed,
	status.Refused: Failed,
	status.Blocked: Blocked,
	status.Pending: Pending,
}

// reporter says what a round came to, and keeps it until the next one. finish is for the loop's
// goroutine, and last for anybody.
type reporter struct {
	ledger  *ledger.Ledger
	plugins Plugins
	claims  remarks
	log     *slog.Logger
	// told is called when there is something new to tell.
	told func()
	// snapshot is what the last round left.
	snapshot atomic.Pointer[Snapshot]
}

// remarks is what is to be said of the front-end for claims; claims says it.
type remarks interface {
	conditions(now time.Time) (failed, noted []status.Condition)
	refused() []status.Condition
	unregistered() (since time.Time, why error, yes bool)
}

func newReporter(l *ledger.Ledger, plugins Plugins, c remarks, log *slog.Logger, told func()) *reporter {
	r := &reporter{ledger: l, plugins: plugins, claims: c, log: log, told: told}
	r.snapshot.Store(&Snapshot{hardware: readout{Inventory: &gpu.Inventory{}},
		Outcome: Outcome{State: Pending, Reason: status.Starting, Message: "starting"}})
	return r
}

// last is what the last round left.
func (r *reporter) last() *Snapshot { return r.snapshot.Load() }

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
	s.At, s.asked.Source, s.shape.Leaving = now, f.in.source, f.changes.Leaving
	// An API server that starts refuses what it permits a moment later.
	refusals := f.in.refusals(now, silentFor)
	failed, noted := r.claims.conditions(now)
	f.work = append(f.work, noted...)
	s.lasting = slices.Concat(refusals, unregistered(resourcesOf(r.plugins, s.Unknown)), failed)
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
	changed := s.Outcome != old.Outcome || s.usable != old.usable || s.inUse != old.inUse ||
		s.hardware.Inventory != old.hardware.Inventory || s.asked.Generation != old.asked.Generation ||
		s.Heard != old.Heard || s.hardware.Hangs != old.hardware.Hangs ||
		!slices.Equal(s.hardware.Verdicts, old.hardware.Verdicts)
	r.snapshot.Store(s)
	r.logHealth(old.hardware.Verdicts, s.hardware.Verdicts)
	if *o != old.Outcome {
		r.log.Info("partition", "name", o.Partition, "state", string(o.State),
			"reason", string(o.Reason), "message", o.Message)
	}
	if changed {
		r.told()
	}
}

// judge puts into one word and a sentence what the partition comes to, and notes all
// conditions that count for it. trouble is told in any case; of the rest, what must be
// seen to first.
func (f *findings) judge(s *Snapshot, trouble []status.Condition) {
	var invalid, failed, note, notes []status.Condition
	if f.configErr != nil {
		why := status.CauseOf(f.configErr, status.PartitionsInvalid)
		if s.asked.Wanted != nil {
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
	if s.hardware.Hangs != "" {
		notes = append(notes, status.Why(status.GPUDriverHangs, "hardware work waits: %s", s.hardware.Hangs).
			Condition(status.Unhealthy, ""))
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
	groups := [][]status.Condition{invalid, failed, of(status.Refused), stuck, note, waits,
		slices.Concat(notes, of(status.Noted))}
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
	for _, v := range s.hardware.Verdicts {
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
	for at, why := range s.shape.Failing {
		out = append(out, why.Condition(status.Leaving, mig.ID(at.GPU, at.Placement)))
	}
	return out
}

// leaves says which MIG devices go, or are withdrawn.
func (s *Snapshot) leaves() (out []status.Condition) {
	for u, placements := range s.shape.Leaving {
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
	offers := slices.ContainsFunc(slices.Collect(maps.Values(s.shape.Layouts)),
		func(l plan.Layout) bool { return l.Offers && l.N > 0 })
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

// logHealth logs what has changed in the GPUs' health, which may be over before
// anybody asks for the status.
func (r *reporter) logHealth(before, now []health.Verdict) {
	news, over := healthNews(before, now)
	for _, v := range news {
		r.log.Warn("GPU is unhealthy", "gpu", string(v.GPU), "gi", v.GI, "ci", v.CI,
			"class", string(v.Class), "reason", v.Reason)
	}
	for _, v := range over {
		r.log.Info("GPU fault is over", "gpu", string(v.GPU), "gi", v.GI, "ci", v.CI, "class", string(v.Class))
	}
}
