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
	"example.com/gpu-agent/internal/found"
	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/topology"
)

// State is the state of the partition on the node.
type State string

// States are values of the node's label.
const (
	Applied State = "applied"
	Pending State = "pending"
	Blocked State = "blocked"
	Failed  State = "failed"
	Invalid State = "invalid"
)

// Outcome is what the loop reports about the partition in force.
type Outcome struct {
	Partition string
	State     State
	// Reason is the code of the gravest condition behind State. It is empty if the partition is
	// applied without remarks.
	Reason status.Reason
	// Message names what blocks or failed, with file and line for a mistake in the file. It is
	// empty if the partition is applied without remarks, and has at most 4 KiB.
	Message string
}

// Snapshot is the result of a round, for status and metrics. It is immutable.
type Snapshot struct {
	hardware readout
	shape    shape
	asked    asked
	Outcome  Outcome
	// Conditions are the facts behind the outcome, and others.
	Conditions []status.Condition
	blocked    bool // true if a change waits for holders
	// found is what earlier owners have left on the GPUs.
	found []found.Finding
	// lasting are the conditions that decide the state of any partition.
	lasting []status.Condition
	At      time.Time
	// Heard is true once the agent knows the partitions and the node's label: also if there are
	// none, or it may not read them. From then on the outcome is reported.
	Heard bool
	// Missing is what Ready waits for; empty once the agent has been ready.
	Missing string
	// Unknown has, for each offered resource that the kubelet does not know, the time when that
	// began.
	Unknown map[string]time.Time
	// usable decides whether pods can be sent to the node. inUse is true if there are allocations.
	usable usable
	inUse  bool
	// basis is the input of the round's last plan, for Agent.Foresee. It is nil before the first
	// inventory.
	basis *basis
}

// readout is what is known of the GPUs themselves.
type readout struct {
	Inventory *gpu.Inventory
	// Topology is how the GPUs of Inventory are connected, and Matrix a table of it; nil before the
	// first inventory.
	Topology *topology.Graph
	Matrix   *topology.Matrix
	// Answered is true if this process has read Inventory itself.
	Answered bool
	// Verdicts are the faults of GPUs. Hangs is since when the driver has not answered, in words;
	// empty while it does.
	Verdicts []health.Verdict
	Hangs    string
}

// shape is how the GPUs are laid out.
type shape struct {
	Layouts map[gpu.UUID]plan.Layout
	// Others is why GPUs are, or may be, given out by another owner.
	Others map[gpu.UUID]string
	// Work is what is being done to GPUs' hardware, in words. Made are the agent's own MIG
	// instances. Leaving are MIG devices that go with their holders, and Failing those that could
	// not be made, both with the reason. Drained are the GPUs that offer nothing while their change
	// waits for holders, apart from MIG devices that are not Leaving.
	Work    map[gpu.UUID]string
	Made    map[gpu.UUID]map[mig.Placement]bool
	Leaving map[gpu.UUID]map[mig.Placement]status.Cause
	Failing map[mig.Place]status.Cause
	Drained map[gpu.UUID]bool
}

// asked is what the partitions ask for.
type asked struct {
	// Wanted is the meaning of the partition Active on this node. Both stay as they are while a
	// newer partition is invalid. Wanted is nil before the first valid one.
	Wanted []config.Want
	Active string
	// Source is the origin of the partition file. Generation counts the changes of Wanted since the
	// start.
	Source     string
	Generation uint64
}

// states maps the types of conditions to states. Other types leave the partition Applied.
var states = map[status.Type]State{
	status.Invalid: Invalid,
	status.Failed:  Failed,
	status.Refused: Failed,
	status.Blocked: Blocked,
	status.Pending: Pending,
}

// reporter works out the result of a round and keeps it until the next one. finish belongs to the
// loop's goroutine; any goroutine may call last.
type reporter struct {
	ledger  *ledger.Ledger
	plugins Plugins
	claims  remarks
	log     *slog.Logger
	// told is called when there is something new to report.
	told func()
	// snapshot is the result of the last round.
	snapshot atomic.Pointer[Snapshot]
}

// remarks are the conditions of the DRA front-end. claims implements it.
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

// last returns the result of the last round.
func (r *reporter) last() *Snapshot { return r.snapshot.Load() }

// findings are what a round has found, beside its snapshot.
type findings struct {
	in      *input // when the round began
	changes *plan.Changes
	// note is why the partition changes nothing; zero if there is no reason. hwNote is what the
	// hardware does not support; empty if there is nothing. They are remarks.
	note   status.Cause
	hwNote string
	// configErr is why the newest partitions are not in force, nil if they are. errs are the errors
	// of the round's steps, and may have nils. missing is what else the agent needs to be ready.
	configErr error
	errs      []error
	missing   []string
	// work is the work on the hardware that failed and will be tried again, or that the partition
	// waits for.
	work []status.Condition
	// besides are conditions that do not count for the partition.
	besides []status.Condition
}

// finish completes s and puts it in force.
func (r *reporter) finish(s *Snapshot, f *findings) {
	now, old := time.Now(), r.snapshot.Load()
	s.At, s.asked.Source, s.shape.Leaving = now, f.in.source, f.changes.Leaving
	// An API server that starts may refuse for a moment what it permits later.
	refusals := f.in.refusals(now, silentFor)
	failed, noted := r.claims.conditions(now)
	f.work = append(f.work, noted...)
	s.lasting = slices.Concat(refusals, unregistered(resourcesOf(r.plugins, s.Unknown)), failed)
	f.judge(s, s.lasting)
	s.Conditions = slices.Concat(s.Conditions, r.more(s), f.besides)
	status.SortConditions(s.Conditions, old.Conditions, now)
	o := &s.Outcome
	if old.At.IsZero() || old.Missing != "" { // once ready, the agent stays ready
		s.Missing = f.unready(s, now)
	}
	s.Heard = f.in.heard() || len(refusals) > 0
	s.usable.follow(old.usable, s.Missing == "" && delivered(r.plugins, r.claims), now)
	s.inUse = len(r.ledger.Allocations()) > 0
	changed := s.Outcome != old.Outcome || s.usable != old.usable || s.inUse != old.inUse ||
		s.hardware.Inventory != old.hardware.Inventory || s.asked.Generation != old.asked.Generation ||
		s.Heard != old.Heard || !sameFindings(s.found, old.found) || s.hardware.Hangs != old.hardware.Hangs ||
		!slices.Equal(s.hardware.Verdicts, old.hardware.Verdicts)
	ready, _ := readyCondition("", s, now)
	was, _ := readyCondition("", old, now)
	changed = changed || ready != was
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

// judge sets the state, reason and message of s, and the conditions that count for them. The
// message has trouble in any case, and of the rest only the first group that the operator must see
// to.
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

// more returns the conditions that do not count for the partition: unhealthy GPUs, waiting
// containers and claims, and MIG devices that are withdrawn or leave.
func (r *reporter) more(s *Snapshot) (out []status.Condition) {
	for _, v := range s.hardware.Verdicts {
		c := status.Cause{Reason: status.GPUUnhealthy, Message: v.Reason}.Condition(status.Unhealthy, string(v.GPU))
		c.Since = v.Since
		out = append(out, c)
	}
	for _, c := range r.ledger.Allocations() {
		why := c.Cause
		if c.Yield.Asked() {
			why = status.Why(status.Yielded, "the room that it has in the spot tier is taken back: %s", c.After)
		} else if c.After != "" {
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

// leaves returns conditions for the MIG devices that leave or are withdrawn.
func (s *Snapshot) leaves() (out []status.Condition) {
	for u, placements := range s.shape.Leaving {
		for placement, why := range placements {
			out = append(out, why.Condition(status.Leaving, mig.ID(u, placement)))
		}
	}
	return out
}

// messages joins the messages of conditions.
func messages(of []status.Condition) string {
	words := make([]string, len(of))
	for i := range of {
		words[i] = of[i].Message
	}
	return sentences(words...)
}

// sentences joins those texts that are not empty.
func sentences(words ...string) string {
	return strings.Join(slices.DeleteFunc(words, func(s string) bool { return s == "" }), "; ")
}

// unready returns what Ready waits for, or "".
func (f *findings) unready(s *Snapshot, now time.Time) string {
	out := slices.Clone(f.missing)
	offers := slices.ContainsFunc(slices.Collect(maps.Values(s.shape.Layouts)),
		func(l plan.Layout) bool { return l.Offers && l.N > 0 })
	switch {
	case !f.in.labelKnown:
		out = append(out, "the node's labels are not known yet")
	case !f.in.heard():
		out = append(out, "partitions are not known yet")
	case s.Outcome.State == Invalid && !offers:
		out = append(out, "nothing is on offer, and there is no valid partition: "+s.Outcome.Message)
	}
	if !f.in.heard() {
		out = append(out, messages(f.in.refusals(now, 0)))
	}
	return sentences(out...)
}

// logHealth logs the changes in the GPUs' health. They may be over before the status is read again.
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
