// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/found"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// pass is a round that runs now, with what it has found so far.
type pass struct {
	findings
	allocations []ledger.Allocation // as of the last plan
	// postponed are the GPUs that keep their layouts with their devices withdrawn, because DRA
	// claims may have been allocated devices of them.
	postponed []gpu.UUID
	found     []found.Finding
}

func (p *pass) fail(err error) { p.errs = append(p.errs, err) }

// round runs one round, in the steps that doc.go lists.
func (l *loop) round(ctx context.Context) error {
	in := l.mail.latest()
	p := &pass{findings: findings{in: &in, changes: &plan.Changes{}}}
	l.journal.write()
	if err := l.readHardware(ctx, p); err != nil {
		return err // only a new process can go on
	}
	in = l.mail.latest() // new partitions may have arrived during the reading
	if l.reader.inv != nil {
		l.want(p)
		l.lookAround(ctx, in.migManager)
		l.plan(p)
		l.askHolders(ctx, p)
		l.withdraw(ctx, p)
		l.act(ctx, p)
		l.setDriver(ctx, p)
		p.found = l.finder.look(ctx, l.reader.inv, &l.reader.setups, l.layouts.now, l.others.theirs(),
			l.ledger.Allocations(), l.mps.ours(), l.reader.usable())
		l.openGates(p)
	}
	return l.finish(p)
}

// readHardware takes in the results of jobs and reads the hardware. It returns only errors that
// wrap gpu.ErrReloaded. All others go to the findings, since containers that wait may not need the
// driver.
func (l *loop) readHardware(ctx context.Context, p *pass) error {
	now := time.Now()
	results := l.executor.ended(now)
	for i := range results {
		r := &results[i]
		if l.reader.inv.ByUUID(r.GPU) == nil {
			continue
		}
		if r.read != nil {
			l.reader.stale.Store(true)
		} else {
			l.reader.setMIG(r.GPU, r.mig)
		}
		l.executor.learn(r, l.reader.inv.ByUUID(r.GPU), l.partitions.gen, now)
	}
	err := l.reader.followLetGo(p.in.letGo, len(l.executor.jobs) > 0)
	if errors.Is(err, gpu.ErrReloaded) {
		return err
	}
	p.fail(err)
	news, err := l.reader.look(ctx, l.executor.unsettled)
	if news {
		l.executor.seen(l.reader.inv)
	}
	switch {
	case errors.Is(err, gpu.ErrReloaded):
		return err
	case errors.Is(err, gpu.ErrTimeout) && l.reader.inv != nil: // the round goes on with the last reading; see hangs
	case l.reader.letGo == "":
		p.fail(err)
	}
	if l.reader.letGo != "" {
		p.note = l.reader.absent()
	}
	return nil
}

// want works out what is wanted of the GPUs.
func (l *loop) want(p *pass) {
	if p.in.labelKnown { // until then the cordons of the last process stay
		l.partitions.cordons = cordonsOf(p.in.cordon, l.reader.inv)
		l.partitions.resets = resetsOf(p.in.reset, l.reader.inv, time.Now())
		l.reader.wereReset(l.partitions.resets.at)
	}
	note, err := l.partitions.resolve(p.in, l.reader.inv, l.reader.answered)
	if p.configErr = err; l.reader.letGo == "" {
		p.note = note
	}
}

// lookAround looks for GPUs that others give out. It also checks whether the kubelet knows the
// devices that this agent offers.
func (l *loop) lookAround(ctx context.Context, migManager string) {
	served := l.offering.served
	expected := served.expected(l.offering.front.Offer())
	allocatable, asked := l.others.look(ctx, l.reader.inv, migManager, expected)
	if !asked {
		return
	}
	now := time.Now()
	if served.suspect(expected, allocatable, now); len(served.unknown) > 0 {
		l.others.soon(now.Add(holdersEvery))
	}
}

// plan makes a plan from the present allocations.
func (l *loop) plan(p *pass) {
	now := time.Now()
	l.layouts.expire(now)
	p.allocations = l.gates.allocations(l.reader.inv)
	changes := plan.Make(l.planInput(p.allocations, now))
	l.ledger.SetLayoutYields(changes.Yields)
	p.changes = &changes
}

// planInput returns the present input of a plan.
func (l *loop) planInput(allocations []ledger.Allocation, now time.Time) plan.Input {
	mig := l.executor.input(allocations, now)
	mig.Cards = l.reader.cards.of
	return plan.Input{Inventory: l.reader.inv, Allocations: allocations, Wanted: l.partitions.wanted,
		Layouts: l.layouts.now, Past: l.layouts.past, Others: l.others.theirs(), Unit: l.partitions.on.Unit, MIG: mig}
}

// unchecked reports whether there is an allocation whose devices are not known to be free: the
// witnesses have not been asked yet, or the previous holder still had them.
func unchecked(allocations []ledger.Allocation) bool {
	return slices.ContainsFunc(allocations, func(c ledger.Allocation) bool {
		return c.Phase == ledger.Reserved || c.Phase == ledger.Waiting && !c.Out()
	})
}

// askHolders asks the witnesses who holds what, if that is due, and plans again.
func (l *loop) askHolders(ctx context.Context, p *pass) {
	takes := len(p.changes.Changing) > 0 || withdraws(l.due(p.changes.Work))
	full := l.witnesses.Due(takes, len(p.changes.Blocked) > 0, time.Now())
	if !l.witnesses.Started() && !full && !unchecked(p.allocations) {
		return
	}
	ended, err := l.witnesses.Look(ctx, full)
	p.fail(err)
	if holders, asked, sure := l.witnesses.Holders(); sure {
		l.offering.claims.observe(holders, asked)
	}
	for i := range ended {
		if c := &ended[i]; l.offering.names.Ours(c.Resource) {
			l.layouts.linger(c)
			if c.Kind().InMIG() { // the free instance may be wanted for something else, so read what it has
				l.reader.stale.Store(true)
			}
		}
	}
	if full {
		p.fail(l.gates.lookForFiles())
	}
	l.plan(p)
}

// due returns the work that may begin now.
func (l *loop) due(work []plan.Work) []plan.Work {
	if l.reader.letGoNext != "" || !l.reader.usable() {
		return nil
	}
	return l.executor.due(work, l.partitions.gen, l.witnesses.Heard(), time.Now())
}

// withdraw withdraws what the plan takes away, and plans again. An allocation that was made before
// the withdrawal keeps its devices.
func (l *loop) withdraw(ctx context.Context, p *pass) {
	if !l.layouts.offerAny(p.changes.Changing) && !withdraws(l.due(p.changes.Work)) {
		return
	}
	withdrawn := *p.changes
	withdrawn.Layouts = l.layouts.now // the layouts change in act
	l.publish(deviceplugin.Input{Changes: &withdrawn, Changing: p.changes.Changing})
	claims := l.offering.claims
	if slices.ContainsFunc(p.changes.Changing, claims.offered) ||
		slices.ContainsFunc(p.changes.Work, func(w plan.Work) bool { return w.Takes() && claims.offered(w.GPU) }) {
		promised, err := claims.settle(ctx)
		if err != nil {
			p.fail(err)
			defer p.postpone(claims.offered, l.layouts.now)
		} else if len(promised) > 0 {
			defer func() {
				p.postpone(func(u gpu.UUID) bool { return slices.Contains(promised, u) }, l.layouts.now)
				if len(p.postponed) > 0 {
					p.fail(status.Because(status.HeldByPods, fmt.Errorf("%v stay as they are: "+
						"claims were allocated devices of them that other pods still hold", p.postponed)))
				}
			}()
		}
	}
	l.plan(p)
}

// postpone removes from the plan the changes to GPUs that claims may have been allocated. These
// GPUs keep their layouts, which now has.
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

// act puts the plan in force and begins its work. Before that it saves what the next process must
// know: the devices to go on listing, and the agent's own instances.
func (l *loop) act(ctx context.Context, p *pass) {
	now := time.Now()
	l.layouts.settle(p.changes)
	l.executor.planned(p.changes, now)
	if every := l.executor.busyLook; every > 0 && now.Sub(l.reader.readAt) >= every {
		l.reader.stale.Store(true)
	}
	if n, _ := l.ledger.Ended(); n != l.journal.released {
		l.journal.released, l.journal.due, l.gates.swept = n, true, false
	}
	work := l.due(p.changes.Work)
	l.executor.ownMade(work)
	unsaved := l.save()
	if p.fail(unsaved); unsaved == nil {
		l.executor.begin(ctx, l.reader.inv, work)
	}
	l.fileInputs().correct(p.changes, unsaved)
}

// setDriver learns which driver files containers need, if the driver or its GPUs have changed, and
// sets time slices and compute modes.
func (l *loop) setDriver(ctx context.Context, p *pass) {
	// Nothing needs them before there is a partition, a layout or an allocation.
	needed := func() bool { return l.partitions.wanted != nil || len(l.layouts.now) > 0 || l.ledger.Held() }
	if l.gates.driverFiles.of != l.reader.epoch && l.reader.usable() && needed() {
		// Learning takes a while, so publish faults, and the first offer of a new process, before
		// it. A container that comes meanwhile waits for its allocation's file.
		p.fail(l.offering.served.set(l.publish(deviceplugin.Input{Changes: p.changes, Changing: p.postponed})))
		switch err := l.gates.driverFiles.learn(ctx, l.reader.epoch); {
		case err == nil:
			for _, c := range l.ledger.Allocations() {
				l.ledger.Shut(c.ID) // openGates writes the file again, if it differs
			}
		case l.gates.driverFiles.parts == nil || !errors.Is(err, gpu.ErrTimeout):
			p.fail(err)
		}
	}
	if l.reader.usable() {
		var err error
		p.hwNote, err = l.slices.set(ctx, l.reader.inv, l.reader.epoch, l.partitions.wanted, l.layouts.now,
			l.ledger.Allocations())
		p.fail(err)
	}
	l.mps.want(l.reader.inv, l.layouts.now)
	if l.reader.usable() {
		p.fail(l.mps.setModes(ctx, l.reader.inv, l.reader.epoch, l.layouts.now, &l.reader.setups))
	}
}

// openGates writes the CDI files of allocations whose containers may start, and then publishes what
// is on offer. It removes the files of ended allocations first, or the next holder's container
// could start with the previous holder's file.
func (l *loop) openGates(p *pass) {
	p.fail(l.gates.sweep(l.witnesses.Heard(), l.witnesses.Used))
	p.fail(l.gates.write(l.fileInputs(), l.gates.allocations(l.reader.inv), p.changes.Trouble))
	l.gates.tellWaiting(p.changes.Trouble, l.executor.failedFor)
	p.fail(l.offering.served.set(l.publish(deviceplugin.Input{Changes: p.changes, Changing: p.postponed})))
}

// publish adds the present state to in, which has the changes, and publishes the resulting offer.
func (l *loop) publish(in deviceplugin.Input) *deviceplugin.Offer {
	in.Inventory, in.Topology, in.Cards = l.reader.inv, l.reader.topology, l.reader.cards.of
	in.Past, in.OnDemand, in.Cordoned = l.layouts.past, l.partitions.onDemand, l.partitions.cordons.gpus
	in.Failing, in.Others = l.executor.failingPlacements(time.Now()), l.others.theirs()
	in.Closed, in.Daemons = l.gates.driverFiles.closed(), l.mps.closed()
	offer := l.offering.publish(&in)
	if l.partitions.judged {
		// Before that the ResourceSlices stay as the last process left them. New ones would have
		// nothing but held devices, and the scheduler would refuse claims for the rest.
		l.offering.publishClaims(&in, offer, l.mail.latest().allocatable, l.executor.refusedPlacements(time.Now()))
	}
	return offer
}

// finish passes the round's results to the reporter, and returns what failed.
func (l *loop) finish(p *pass) error {
	f := &p.findings
	if l.reader.inv != nil {
		f.work = l.executor.conditions(l.reader.inv, p.changes.Work, l.partitions.gen)
	}
	s := &Snapshot{hardware: l.reader.hardware(), asked: l.partitions.asked(),
		usable: usable{absent: l.reader.absent()},
		shape: shape{Layouts: l.layouts.now, Others: l.others.theirs(), Work: l.executor.now(), Made: l.executor.made(),
			Failing: l.executor.failingPlacements(time.Now())},
		Outcome: Outcome{Partition: l.partitions.chosen}, Unknown: l.offering.served.unknown}
	for _, b := range p.changes.Blocked {
		if p.changes.Drains(b.GPU, l.offering.drain) {
			if s.shape.Drained == nil {
				s.shape.Drained = map[gpu.UUID]bool{}
			}
			s.shape.Drained[b.GPU] = true
		}
	}
	if l.reader.inv == nil {
		s.hardware.Inventory = l.reporter.last().hardware.Inventory // an empty one
	}
	if !l.reader.answered {
		why := "the first reading has not ended"
		if l.reader.readErr != nil {
			why = l.reader.readErr.Error()
		}
		f.missing = append(f.missing, "this process has not read the driver: "+why)
	}
	if closed := l.gates.driverFiles.closed(); closed != "" {
		f.missing = append(f.missing, "it does not know which driver files containers need: "+closed)
	}
	if l.reader.inv != nil {
		s.basis = l.basis(p.allocations)
	}
	s.found = p.found
	deciding, others := conditionsOf(p.found)
	daemons, crowds := l.mps.conditions()
	f.work = slices.Concat(f.work, deciding, daemons)
	f.besides = slices.Concat(l.background.conditions(), l.partitions.conditions(s.hardware.Inventory), others, crowds)
	l.reporter.finish(s, f)
	poke(l.waker.stirred)
	for _, turn := range l.background.afterRound {
		turn(l.witnesses.Heard())
	}
	return errors.Join(f.errs...)
}
