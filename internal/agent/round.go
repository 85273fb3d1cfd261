// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// pass is a round under way, with what it has found so far.
type pass struct {
	findings
	allocations []ledger.Allocation // as of the last plan
	// postponed are the GPUs that keep their layouts, withdrawn, since nobody knows who was
	// promised what of them through DRA.
	postponed []gpu.UUID
}

func (p *pass) fail(err error) { p.errs = append(p.errs, err) }

// round is one look at everything and what follows from it: the walk that doc.go draws.
func (a *Agent) round(ctx context.Context) error {
	in := a.mail.latest()
	p := &pass{findings: findings{in: &in, changes: &plan.Changes{}}}
	a.journal.write()
	if err := a.readHardware(ctx, p); err != nil {
		return err // only a new process can go on
	}
	in = a.mail.latest() // a reading takes a while: the partitions may have arrived meanwhile
	if a.reader.inv != nil {
		a.want(p)
		a.lookAround(ctx, in.migManager)
		a.plan(p)
		a.askHolders(ctx, p)
		a.withdraw(ctx, p)
		a.act(ctx, p)
		a.setDriver(ctx, p)
		a.openGates(p)
	}
	return a.finish(p)
}

// readHardware takes in what jobs came to, and the hardware as it is. It returns an
// error that wraps gpu.ErrReloaded, and leaves every other to the findings: the
// containers that wait need no driver.
func (a *Agent) readHardware(ctx context.Context, p *pass) error {
	now := time.Now()
	results := a.executor.ended(now)
	for i := range results {
		r := &results[i]
		if a.reader.inv.ByUUID(r.GPU) == nil {
			continue
		}
		if r.read != nil {
			a.reader.stale.Store(true)
		} else {
			a.reader.setMIG(r.GPU, r.mig)
		}
		a.executor.learn(r, a.reader.inv.ByUUID(r.GPU), a.partitions.gen, now)
	}
	err := a.reader.mind(p.in.letGo, len(a.executor.jobs) > 0)
	if errors.Is(err, gpu.ErrReloaded) {
		return err
	}
	p.fail(err)
	news, err := a.reader.look(ctx, a.executor.unsettled)
	if news {
		a.executor.seen(a.reader.inv)
	}
	switch {
	case errors.Is(err, gpu.ErrReloaded):
		return err
	case errors.Is(err, gpu.ErrTimeout) && a.reader.inv != nil: // everything else goes on; see hangs
	case a.reader.letGo == "":
		p.fail(err)
	}
	if a.reader.letGo != "" {
		p.note = a.reader.absent()
	}
	return nil
}

// want works out what is wanted of the GPUs.
func (a *Agent) want(p *pass) {
	if p.in.labelKnown { // until then the last agent's
		a.partitions.cordons = cordonsOf(p.in.cordon, a.reader.inv)
		a.partitions.resets = resetsOf(p.in.reset, a.reader.inv, time.Now())
		a.reader.wereReset(a.partitions.resets.at)
	}
	note, err := a.partitions.resolve(p.in, a.reader.inv, a.reader.answered)
	if p.configErr = err; a.reader.letGo == "" {
		p.note = note
	}
}

// lookAround looks for GPUs that somebody else gives out, and whether the kubelet knows
// what we offer.
func (a *Agent) lookAround(ctx context.Context, migManager string) {
	served := a.offering.served
	expected := served.expected(a.offering.front.Offer())
	allocatable, asked := a.others.look(ctx, a.reader.inv, migManager, expected)
	if !asked {
		return
	}
	now := time.Now()
	if served.suspect(expected, allocatable, now); len(served.unknown) > 0 {
		a.others.soon(now.Add(holdersEvery))
	}
}

// plan plans with the allocations as they are now.
func (a *Agent) plan(p *pass) {
	now := time.Now()
	a.layouts.expire(now)
	p.allocations = a.gates.allocations(a.reader.inv)
	changes := plan.Make(a.planInput(p.allocations, now))
	p.changes = &changes
}

// planInput is what a plan is made from now.
func (a *Agent) planInput(allocations []ledger.Allocation, now time.Time) plan.Input {
	mig := a.executor.input(allocations, now)
	mig.Cards = a.reader.cards.of
	return plan.Input{Inventory: a.reader.inv, Allocations: allocations, Wanted: a.partitions.wanted,
		Layouts: a.layouts.now, Past: a.layouts.past, Others: a.others.theirs(), Unit: a.partitions.on.Unit, MIG: mig}
}

// unchecked reports whether there is an allocation of which nobody has looked whether
// its devices are free, or that they were not.
func unchecked(allocations []ledger.Allocation) bool {
	return slices.ContainsFunc(allocations, func(c ledger.Allocation) bool {
		return c.Phase == ledger.Reserved || c.Phase == ledger.Waiting
	})
}

// askHolders asks the witnesses who has what, where that is due, and plans again.
func (a *Agent) askHolders(ctx context.Context, p *pass) {
	takes := len(p.changes.Changing) > 0 || withdraws(a.due(p.changes.Work))
	full := a.witnesses.Due(takes, len(p.changes.Blocked) > 0, time.Now())
	if !a.witnesses.Started() && !full && !unchecked(p.allocations) {
		return
	}
	ended, err := a.witnesses.Look(ctx, full)
	p.fail(err)
	if holders, asked, sure := a.witnesses.Holders(); sure {
		a.offering.claims.observe(holders, asked)
	}
	for i := range ended {
		if c := &ended[i]; a.offering.names.Ours(c.Resource) {
			a.layouts.linger(c)
			if c.Kind().InMIG() { // look what is on the instance: it may be wanted for something else
				a.reader.stale.Store(true)
			}
		}
	}
	if full {
		p.fail(a.gates.lookForFiles())
	}
	a.plan(p)
}

// due picks the work that is to be begun now.
func (a *Agent) due(work []plan.Work) []plan.Work {
	if a.reader.letting != "" || !a.reader.usable() {
		return nil
	}
	return a.executor.due(work, a.partitions.gen, a.witnesses.Heard(), time.Now())
}

// withdraw withdraws what the plan takes away, and plans again: an allocation that came
// before the withdrawal keeps what it has.
func (a *Agent) withdraw(ctx context.Context, p *pass) {
	if !a.layouts.offerAny(p.changes.Changing) && !withdraws(a.due(p.changes.Work)) {
		return
	}
	withdrawn := *p.changes
	withdrawn.Layouts = a.layouts.now // not laid out anew yet
	a.publish(deviceplugin.Input{Changes: &withdrawn, Changing: p.changes.Changing})
	claims := a.offering.claims
	if slices.ContainsFunc(p.changes.Changing, claims.offered) ||
		slices.ContainsFunc(p.changes.Work, func(w plan.Work) bool { return w.Takes() && claims.offered(w.GPU) }) {
		promised, err := claims.settle(ctx)
		if err != nil {
			p.fail(err)
			defer p.postpone(claims.offered, a.layouts.now)
		} else if len(promised) > 0 {
			defer func() {
				p.postpone(func(u gpu.UUID) bool { return slices.Contains(promised, u) }, a.layouts.now)
				if len(p.postponed) > 0 {
					p.fail(status.Because(status.HeldByPods, fmt.Errorf("%v stay as they are: "+
						"claims were promised devices of them that others have until they end", p.postponed)))
				}
			}()
		}
	}
	a.plan(p)
}

// postpone leaves GPUs laid out as they are now whose devices somebody may have been
// promised through DRA.
func (p *pass) postpone(promised func(gpu.UUID) bool, now map[gpu.UUID]plan.Layout) {
	p.changes.Changing = slices.DeleteFunc(p.changes.Changing, func(u gpu.UUID) bool {
		if !promised(u) {
			return false
		}
		p.postponed = append(p.postponed, u)
		p.changes.Layouts[u] = now[u]
		return true
	})
	p.changes.Work = slices.DeleteFunc(p.changes.Work, func(w plan.Work) bool { return w.Takes() && promised(w.GPU) })
}

// act makes the plan the one in force and begins its work, after what a successor must
// know of it has been written down: what to go on listing, and which instances are ours.
func (a *Agent) act(ctx context.Context, p *pass) {
	now := time.Now()
	a.layouts.settle(p.changes)
	a.executor.planned(p.changes, now)
	if every := a.executor.busyLook; every > 0 && now.Sub(a.reader.readAt) >= every {
		a.reader.stale.Store(true)
	}
	if n, _ := a.ledger.Ended(); n != a.journal.released {
		a.journal.released, a.journal.due, a.gates.swept = n, true, false
	}
	work := a.due(p.changes.Work)
	a.executor.ownMade(work)
	unsaved := a.save()
	if p.fail(unsaved); unsaved == nil {
		a.executor.begin(ctx, a.reader.inv, work)
	}
	a.ground().correct(p.changes, unsaved)
}

// setDriver learns what containers need of the driver, where it or its GPUs are others
// than before, and sets time slices.
func (a *Agent) setDriver(ctx context.Context, p *pass) {
	// Not before somebody can need the parts: the partitions may arrive meanwhile.
	needed := func() bool { return a.partitions.wanted != nil || len(a.layouts.now) > 0 || a.ledger.Held() }
	if a.gates.supplies.of != a.reader.epoch && a.reader.usable() && needed() {
		// It takes a while to learn them. A fault is told before that, and so is what a
		// new process offers: a container that comes meanwhile waits for its allocation's
		// file.
		p.fail(a.offering.served.set(a.publish(deviceplugin.Input{Changes: p.changes, Changing: p.postponed})))
		switch err := a.gates.supplies.learn(ctx, a.reader.epoch); {
		case err == nil:
			for _, c := range a.ledger.Allocations() {
				a.ledger.Shut(c.ID) // written again below, if the files differ
			}
		case a.gates.supplies.parts == nil || !errors.Is(err, gpu.ErrTimeout):
			p.fail(err)
		}
	}
	if a.reader.usable() {
		var err error
		p.hwNote, err = a.slices.set(ctx, a.reader.inv, a.reader.epoch, a.partitions.wanted, a.layouts.now,
			a.ledger.Allocations())
		p.fail(err)
	}
}

// openGates writes the CDI files of the allocations that may start, and then publishes what
// is on offer. Files of ended allocations go first: the next holder's container must not find
// the gate of the one before it open.
func (a *Agent) openGates(p *pass) {
	p.fail(a.gates.sweep(a.witnesses.Heard(), a.witnesses.Used))
	p.fail(a.gates.write(a.ground(), a.gates.allocations(a.reader.inv), p.changes.Trouble))
	a.gates.tellWaiting(p.changes.Trouble, a.executor.failedFor)
	p.fail(a.offering.served.set(a.publish(deviceplugin.Input{Changes: p.changes, Changing: p.postponed})))
}

// publish offers what follows from in, which says what changes, and from what is known.
func (a *Agent) publish(in deviceplugin.Input) *deviceplugin.Offer {
	in.Inventory, in.Topology, in.Cards = a.reader.inv, a.reader.topology, a.reader.cards.of
	in.Past, in.OnDemand, in.Cordoned = a.layouts.past, a.partitions.onDemand, a.partitions.cordons.gpus
	in.Failing, in.Others = a.executor.failingPlacements(time.Now()), a.others.theirs()
	in.Closed = a.gates.supplies.closed()
	offer := a.offering.publish(&in)
	if a.partitions.judged {
		// Before that the slices stay as the last process has left them: what is held is
		// all that would be in them, and claims of the rest would be refused.
		a.offering.publishClaims(&in, offer, a.mail.latest().allocatable, a.executor.refusedPlacements(time.Now()))
	}
	return offer
}

// finish hands what the round left to the reporter, and returns what failed.
func (a *Agent) finish(p *pass) error {
	f := &p.findings
	if a.reader.inv != nil {
		f.work = a.executor.conditions(a.reader.inv, p.changes.Work, a.partitions.gen)
	}
	s := &Snapshot{hardware: a.reader.hardware(), asked: a.partitions.asked(),
		usable: usable{absent: a.reader.absent()},
		shape: shape{Layouts: a.layouts.now, Others: a.others.theirs(), Work: a.executor.now(), Made: a.executor.made(),
			Failing: a.executor.failingPlacements(time.Now())},
		Outcome: Outcome{Partition: a.partitions.chosen}, Unknown: a.offering.served.unknown}
	if a.reader.inv == nil {
		s.hardware.Inventory = a.reporter.last().hardware.Inventory // an empty one
	}
	if !a.reader.answered {
		why := "the first reading has not ended"
		if a.reader.readErr != nil {
			why = a.reader.readErr.Error()
		}
		f.missing = append(f.missing, "this process has not read the driver: "+why)
	}
	if closed := a.gates.supplies.closed(); closed != "" {
		f.missing = append(f.missing, "it does not know which driver files containers need: "+closed)
	}
	if a.reader.inv != nil {
		s.basis = a.basis(p.allocations)
	}
	f.besides = slices.Concat(a.beside.conditions(), a.partitions.conditions(s.hardware.Inventory))
	a.reporter.finish(s, f)
	poke(a.bell.stirred)
	for _, turn := range a.beside.turns {
		turn(a.witnesses.Heard())
	}
	return errors.Join(f.errs...)
}
