// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
)

// Ledger has the allocations of a node. Use [New]. A front-end locks its own mutex before the
// ledger's.
type Ledger struct {
	// wake makes the loop run. The ledger calls it without the mutex, and it must not block.
	wake func()
	// now is the clock. It is a parameter, since packages on this floor have no clock.
	now func() time.Time

	// Ends collects what has ended.
	Ends Ends

	// mu guards everything below.
	mu          sync.Mutex
	allocations map[string]*allocation
	// rooms has, for each GPU with MIG, the instances that exist and can exist.
	rooms map[gpu.UUID]MIG
	// version grows when an allocation is added, renewed or released. epoch grows with each event
	// that Allocation.Epoch lists.
	version, epoch uint64
	// named counts how often an allocation got a first or another holder.
	named uint64
	// released counts the allocations that were released. ended is closed at the next release, and
	// then replaced.
	released uint64
	ended    chan struct{}
	// seen has each transition that has happened.
	seen map[Transition]bool
	// spots counts the spot allocations.
	spots int
}

// allocation is the ledger's entry for an Allocation.
type allocation struct {
	Allocation
	// open is closed when each waiting Prepare must look again: Phase becomes Open, the allocation
	// is superseded, or this entry leaves the ledger. It is replaced when the allocation leaves the
	// phase Open, and when it is superseded.
	open chan struct{}
	// gone is closed when the CDI file of a Superseded allocation is gone. It is also closed when the
	// allocation is reinstated, or when this entry leaves the ledger. Supersede makes a new one.
	gone chan struct{}
	// forPod is After in words for the allocation's own pod.
	forPod string
	// entered is true if Prepare has let a container of this entry through. Renew makes another entry.
	entered bool
}

// New returns an empty ledger. The ledger calls wake when a Prepare waits for an allocation to
// open; wake must not block. now is the clock.
func New(wake func(), now func() time.Time) *Ledger {
	return &Ledger{
		wake: wake, now: now, allocations: map[string]*allocation{}, ended: make(chan struct{}),
		seen: map[Transition]bool{},
	}
}

// Request is what a front-end asks for. ID, Owner, Tier, Resource, Ref and Grants are those of the
// allocation.
type Request struct {
	ID       string
	Owner    FrontEnd
	Tier     Tier
	Resource string
	Ref      string
	Grants   []Grant
	// Overlap permits other allocations on the same pieces. The front-end sets it if it knows that
	// these are ending, or that they are of the same pod. The allocation opens when the others have
	// gone. A guaranteed allocation may always overlap spot ones, which then yield, and a spot one may
	// never overlap a guaranteed one.
	Overlap bool
}

// Take makes an allocation, which is Reserved. The error wraps ErrHeld in three cases: an
// allocation has this ID, another front-end has an allocation that takes room on the same GPU, or
// another allocation has the same pieces and the request does not permit an overlap. Take does not
// wake the loop, since a round of the loop would slow down the caller's answer.
func (l *Ledger) Take(r Request) (Allocation, error) {
	all, err := l.TakeAll([]Request{r})
	if err != nil {
		return Allocation{}, err
	}
	return all[0], nil
}

// TakeAll makes all these allocations, or none. It does not compare the requests of one call with
// each other. Its errors are those of Take.
func (l *Ledger) TakeAll(requests []Request) ([]Allocation, error) {
	now := l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range requests {
		r := &requests[i]
		if l.allocations[r.ID] != nil {
			return nil, fmt.Errorf("there is already an allocation %s: %w", r.ID, ErrHeld)
		}
		if err := l.freeLocked(r); err != nil {
			return nil, err
		}
	}
	out := make([]Allocation, len(requests))
	for i := range requests {
		r := &requests[i]
		a := l.addLocked(Allocation{
			ID: r.ID, Owner: r.Owner, Tier: r.Tier, Resource: r.Resource, Ref: r.Ref, Grants: r.Grants, Given: now,
			Fresh: true,
		})
		l.epoch++
		a.Epoch = l.epoch
	}
	l.yieldLocked()
	for i := range requests {
		out[i] = l.allocations[requests[i].ID].Allocation
	}
	return out, nil
}

// Renew gives an allocation to its next holder, under the same ID and with the pieces of the
// request. The next holder is a new pod, whose predecessor may still be ending, or the next
// container of the same pod. The allocation is Reserved again. The error wraps ErrHeld, as Take's
// does, or gpu.ErrNotFound if the front-end has no such allocation.
func (l *Ledger) Renew(r Request) (Allocation, error) {
	now := l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.allocations[r.ID]
	if a == nil || a.Owner != r.Owner {
		return Allocation{}, fmt.Errorf("renew allocation %s of %s: %w", r.ID, r.Owner, gpu.ErrNotFound)
	}
	if err := l.freeLocked(&r); err != nil {
		return Allocation{}, err
	}
	l.Ends.add(a.Allocation, now)
	l.moveLocked(a, Reserved)
	l.removeLocked(a)
	l.epoch++
	next := l.addLocked(Allocation{
		ID: r.ID, Owner: r.Owner, Tier: r.Tier, Resource: r.Resource, Ref: r.Ref, Epoch: l.epoch, Grants: r.Grants,
		Given: now, Fresh: true, Entered: a.Entered, Twice: a.Twice,
	})
	l.yieldLocked()
	return next.Allocation, nil
}

// freeLocked returns an error that wraps ErrHeld if another allocation is in the way of a request.
func (l *Ledger) freeLocked(r *Request) error {
	for _, o := range l.allocations {
		switch {
		case o.ID == r.ID:
		case o.Owner != r.Owner &&
			slices.ContainsFunc(r.Grants, func(g Grant) bool { return !g.NoRoom && o.Takes(g.GPU) }):
			return fmt.Errorf("a GPU is given out through %s now (allocation %s): %w", o.Owner, o.ID, ErrHeld)
		case r.Tier == Guaranteed && o.Tier == Spot: // it yields
		case o.Free(r.Tier) && alters(l.rooms, r.Grants, o.Grants):
			return fmt.Errorf("guaranteed allocation %s lends its MIG instances only as they are: %w", o.ID, ErrHeld)
		case o.Free(r.Tier):
		case r.Tier == Spot && o.Tier == Guaranteed && overlap(l.rooms, r.Grants, o.Grants):
			return fmt.Errorf("guaranteed allocation %s has some of the pieces: %w", o.ID, ErrHeld)
		case !r.Overlap && overlap(l.rooms, r.Grants, o.Grants):
			return fmt.Errorf("allocation %s has some of the pieces: %w", o.ID, ErrHeld)
		}
	}
	return nil
}

// Found adds an allocation that a process before this one made, from its record. given is the time
// at which it was given, zero if that is not known. If the ledger has the allocation already, Found
// only adds the caps and the time that it lacks, and added is false. The error wraps gpu.ErrInvalid
// if the record is not valid, and ErrHeld if another front-end has the ID.
func (l *Ledger) Found(id string, r Record, given time.Time) (added bool, err error) {
	now := l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := r.check(); err != nil {
		return false, fmt.Errorf("take over allocation %s: %w: %w", id, gpu.ErrInvalid, err)
	}
	if a := l.allocations[id]; a != nil {
		if a.Owner != r.Owner {
			return false, fmt.Errorf("take over allocation %s: it belongs to %s: %w", id, a.Owner, ErrHeld)
		}
		a.learn(r.Grants)
		a.date(given, now)
		l.yieldLocked()
		return false, nil
	}
	a := l.addLocked(Allocation{
		ID: id, Owner: r.Owner, Tier: r.Tier, Resource: r.Resource, Ref: r.Ref, Grants: sized(r.Grants, l.rooms),
		Given: now, Adopted: true,
	})
	a.date(given, now)
	l.yieldLocked()
	return true, nil
}

// date sets the time at which an allocation of an earlier process was given or renewed, if that is
// known. Of several records, the last one counts.
func (a *allocation) date(given, now time.Time) {
	if a.Epoch == 0 && !given.IsZero() {
		// Reckoned from now, so that its age stays right when the clock is set back.
		a.Given, a.Adopted, a.Fresh = now.Add(-now.Sub(given)), false, true
	}
}

func (l *Ledger) addLocked(a Allocation) *allocation {
	a.Phase = Reserved
	l.version++
	if a.Tier == Spot {
		l.spots++
	}
	l.allocations[a.ID] = &allocation{Allocation: a, open: make(chan struct{}), gone: make(chan struct{})}
	return l.allocations[a.ID]
}

// removeLocked removes an entry from the ledger. Whatever waits for it looks again.
func (l *Ledger) removeLocked(a *allocation) {
	delete(l.allocations, a.ID)
	if a.Tier == Spot {
		l.spots--
	}
	signal(a.open)
	signal(a.gone)
}

// signal closes a channel, unless it is closed already. The caller holds the ledger's mutex.
func signal(ch chan struct{}) {
	select {
	case <-ch:
	default:
		close(ch)
	}
}

// moveLocked brings an allocation into another phase.
func (l *Ledger) moveLocked(a *allocation, to Phase) {
	if a.Phase == to {
		return
	}
	l.seen[Transition{a.Phase, to}] = true
	switch {
	case to == Open:
		a.Opened, a.Fresh, a.Cause = true, false, status.Cause{}
		close(a.open)
	case a.Phase == Open:
		a.open, a.Asked = make(chan struct{}), time.Time{}
	case a.Phase == Parked:
		a.Parks.Until = l.now()
	}
	a.Phase = to
}

// Looked reports which other holders were found on an allocation's pieces. others names them for
// operators, forPod for the allocation's own pod; both are empty if the pieces are free. The ledger
// ignores the report if the allocation has another epoch by now, is open, parked, superseded, or to yield.
func (l *Ledger) Looked(id string, epoch uint64, others, forPod string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.allocations[id]
	if a == nil || a.Epoch != epoch || a.Phase == Open || a.Phase == Parked || a.Superseded || a.Yield.Asked() {
		return
	}
	a.After, a.forPod = others, forPod
	switch {
	case others != "":
		l.moveLocked(a, Waiting)
	case a.Asked.IsZero():
		l.moveLocked(a, Taken)
	default:
		l.moveLocked(a, Making)
	}
}

// Supersede closes an allocation whose name means something else at its front-end now. No container
// is created with it any longer, and it waits for the end of those that have it. others names them
// for operators, forPod for the pod that the name is for now; neither is empty.
//
// Supersede returns nil and does nothing if the allocation has another epoch by now. Otherwise it
// returns a channel that is closed when the allocation's CDI file is gone (see Gone), and also when
// the allocation is reinstated or released. The first call begins a new epoch, and each Prepare that
// waits for the allocation fails. A further call only changes the words.
func (l *Ledger) Supersede(id string, epoch uint64, others, forPod string) (gone <-chan struct{}) {
	now := l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.allocations[id]
	if a == nil || a.Epoch != epoch {
		return nil
	}
	if !a.Superseded {
		l.lendLocked(a, false, now)
		l.epoch++
		a.Superseded, a.gone, a.Epoch = true, make(chan struct{}), l.epoch
		signal(a.open)
		a.open = make(chan struct{})
	}
	if a.Phase == Open {
		l.moveLocked(a, Taken)
	}
	a.After, a.forPod, a.Asked = others, forPod, time.Time{} // no container starts with it
	l.moveLocked(a, Waiting)
	return a.gone
}

// Reinstate undoes Supersede: the name of the allocation means the same again. It begins a new
// epoch. It does nothing if the allocation has another epoch by now.
func (l *Ledger) Reinstate(id string, epoch uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if a := l.allocations[id]; a != nil && a.Epoch == epoch && a.Superseded {
		l.epoch++
		a.Superseded, a.After, a.forPod, a.Epoch = false, "", "", l.epoch
		signal(a.gone)
		if !a.Yield.Asked() {
			l.moveLocked(a, Taken)
		}
		l.yieldLocked()
	}
}

// Gone reports that a Superseded allocation has no CDI file. It closes the channel that Supersede
// returned.
func (l *Ledger) Gone(id string) {
	l.edit(id, func(a *allocation) {
		if a.Superseded {
			signal(a.gone)
		}
	})
}

// Prepare returns nil when the container of an allocation may be created. It may be called any
// number of times. The error wraps ErrNotOpen in three cases: ctx ends first, there is no such
// allocation, or the allocation is superseded, released or renewed before it opens. In the third case
// the caller may try again: it then waits for the allocation that has the ID by then. The loop goes
// on with the work when ctx has ended.
func (l *Ledger) Prepare(ctx context.Context, id string) error {
	a := l.asked(id)
	if a == nil {
		return fmt.Errorf("%w: there is no allocation %s", ErrNotOpen, id)
	}
	for {
		open, err := l.admit(a, true)
		if open == nil {
			return err
		}
		l.wake()
		select {
		case <-open:
			continue // another container may have got through first (see Twice), or it waits in vain
		case <-ctx.Done():
			_, err := l.admit(a, false)
			return err
		}
	}
}

// asked notes that a container is to start, and returns the ledger's entry for its allocation; nil if
// there is none. Release and Renew remove the entry, so a caller that keeps it can tell the allocation
// from a later one with the same ID.
func (l *Ledger) asked(id string) *allocation {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.allocations[id]
	// The kubelet starts a pod's containers one after the other.
	if a != nil && a.entered && !a.Twice {
		a.Back = l.now()
	}
	return a
}

// admit returns nil, nil if the container may be created. Otherwise it returns the reason, and a
// channel that is closed when it is worth another look; the channel is nil if the allocation never
// opens for this caller. asks is true if the container is to start, and false if the caller has
// stopped waiting.
func (l *Ledger) admit(a *allocation, asks bool) (open <-chan struct{}, _ error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.allocations[a.ID] != a {
		return nil, fmt.Errorf("%w: allocation %s has ended meanwhile, or was given to its next holder",
			ErrNotOpen, a.ID)
	}
	if a.Phase == Open {
		a.Entered, a.entered, a.Back = l.now(), true, time.Time{}
		if a.Twice {
			// A SetOpen that was decided on before this must not open it for the next container.
			l.epoch++
			a.Epoch = l.epoch
			l.moveLocked(a, Reserved)
		}
		return nil, nil
	}
	if a.Superseded {
		return nil, a.notOpen()
	}
	if asks {
		if a.Asked.IsZero() {
			a.Asked = l.now()
		}
		if a.Phase == Taken {
			l.moveLocked(a, Making)
		}
	}
	return a.open, a.notOpen()
}

// notOpen returns the reason why an allocation is not open, in words for its pod.
func (a *allocation) notOpen() error {
	switch {
	case a.Yield.Asked() && len(a.Yield.To) == 0:
		return fmt.Errorf("%w: it is of the spot tier, and its GPU is laid out anew; delete the pod, unless its "+
			"controller does", ErrNotOpen)
	case a.Yield.Asked():
		return fmt.Errorf("%w: it is of the spot tier, and its room is wanted by %s", ErrNotOpen, a.forPod)
	case a.Phase == Parked:
		return fmt.Errorf("%w: it is of the spot tier, and its container's processes are parked", ErrNotOpen)
	case a.Phase == Waiting && a.Twice:
		return fmt.Errorf("%w: the kubelet has given its devices to another pod too, whose turn it is: %s",
			ErrNotOpen, a.forPod)
	case a.Phase == Waiting:
		return fmt.Errorf("%w: previous holder still ending: %s", ErrNotOpen, a.forPod)
	case a.Cause != (status.Cause{}):
		return fmt.Errorf("%w: %w", ErrNotOpen, a.Cause)
	}
	return fmt.Errorf("%w: the CDI file of allocation %s is not written yet; "+
		"see the agent's log and `gpu-agent status`", ErrNotOpen, a.ID)
}

// SetTwice sets whether the kubelet has given an allocation to two pods. Such an allocation does not lend.
func (l *Ledger) SetTwice(id string, twice bool) {
	now := l.now()
	l.edit(id, func(a *allocation) {
		if a.Twice = twice; twice {
			l.lendLocked(a, false, now)
		}
	})
}

// SetOpen permits the container of an allocation to be created, and reports whether the allocation
// is open now. It does nothing if the allocation has another epoch by now, or if its pieces are not
// known to be free.
func (l *Ledger) SetOpen(id string, epoch uint64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.allocations[id]
	if a == nil || a.Epoch != epoch || a.Phase != Taken && a.Phase != Making && a.Phase != Open {
		return false
	}
	l.moveLocked(a, Open)
	return true
}

// edit calls change under the mutex, if there is an allocation with this ID.
func (l *Ledger) edit(id string, change func(*allocation)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if a := l.allocations[id]; a != nil {
		change(a)
	}
}

// Shut takes back SetOpen: the container of the allocation may no longer be created.
func (l *Ledger) Shut(id string) {
	l.edit(id, func(a *allocation) {
		if a.Phase == Open {
			l.moveLocked(a, Taken)
		}
	})
}

// SetCause sets why what an allocation needs could not be made so far; an empty cause clears it.
// The error of a Prepare whose time has run out names the cause, and ends up in an Event of the
// pod. So the cause must name other pods by Holder.Told only.
func (l *Ledger) SetCause(id string, why status.Cause) {
	l.edit(id, func(a *allocation) { a.Cause = why })
}

// SetFor sets Allocation.For.
func (l *Ledger) SetFor(id, who string) {
	l.edit(id, func(a *allocation) { a.For = who })
}

// SetHolder sets the holder of an allocation, and the other pods that have it.
func (l *Ledger) SetHolder(id string, h Holder, beside ...workload.Pod) {
	l.edit(id, func(a *allocation) {
		if a.Holder != h {
			l.named++
		}
		changed := a.Holder != h
		a.Holder, a.Beside = h, beside
		if changed {
			l.yieldLocked() // its words name holders
		}
	})
}

// Filed reports when an allocation's CDI file was written; zero if that is not known. A file that
// is not older than Given is of the present holder, so Fresh becomes false.
func (l *Ledger) Filed(id string, written time.Time) {
	l.edit(id, func(a *allocation) { a.Fresh = a.Fresh && (written.IsZero() || written.Before(a.Given)) })
}

// Learn adds the caps that an allocation lacks, from another record of the same grants. The room
// that it takes stays the same, so offers need not change.
func (l *Ledger) Learn(id string, grants []Grant) {
	l.edit(id, func(a *allocation) { a.learn(grants) })
}

// learn takes unknown caps, with the size of units or the number of replicas, and the shares of the SMs, from
// another record of the same pieces.
func (a *allocation) learn(grants []Grant) {
	if len(grants) != len(a.Grants) {
		return
	}
	for i := range grants {
		if g := &grants[i]; g.GPU == a.Grants[i].GPU && piece.Same(g.Piece, a.Grants[i].Piece) && g.Cap.Known &&
			!a.Grants[i].Cap.Known {
			a.Grants = slices.Clone(a.Grants) // others may read it
			a.Grants[i].Piece, a.Grants[i].Cap, a.Grants[i].Compute = g.Piece, g.Cap, g.Compute
		}
	}
}

// Release ends an allocation and returns it. It returns false if the front-end has no allocation
// with this ID.
func (l *Ledger) Release(owner FrontEnd, id string) (Allocation, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.allocations[id]
	if a == nil || a.Owner != owner {
		return Allocation{}, false
	}
	l.Ends.add(a.Allocation, l.now())
	l.moveLocked(a, Released)
	l.removeLocked(a)
	l.yieldLocked()
	l.version++
	l.released++
	close(l.ended)
	l.ended = make(chan struct{})
	return a.Allocation, true
}

// Ended returns how many allocations have ended since the start, and a channel that is closed when
// the next one ends.
func (l *Ledger) Ended() (n uint64, next <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.released, l.ended
}

// Get returns the allocation with this ID; false if there is none.
func (l *Ledger) Get(id string) (Allocation, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.allocations[id]
	if a == nil {
		return Allocation{}, false
	}
	return a.Allocation, true
}

// Allocations returns all allocations in the order of their IDs.
func (l *Ledger) Allocations() []Allocation {
	out, _ := l.Look()
	return out
}

// Look returns all allocations in the order of their IDs, and their version. The version grows when
// an allocation is added, renewed or released.
func (l *Ledger) Look() ([]Allocation, uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]Allocation, 0, len(l.allocations))
	for _, a := range l.allocations {
		out = append(out, a.Allocation)
	}
	slices.SortFunc(out, func(a, b Allocation) int { return strings.Compare(a.ID, b.ID) })
	return out, l.version
}

// State returns the version of the allocations, the last epoch, and how often an allocation got
// another holder.
func (l *Ledger) State() (version, epoch, named uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.version, l.epoch, l.named
}

// Held reports whether there is any allocation.
func (l *Ledger) Held() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.allocations) > 0
}

// Unopened reports whether some allocation is not open.
func (l *Ledger) Unopened() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range l.allocations {
		if a.Phase != Open {
			return true
		}
	}
	return false
}

// Passed returns the transitions that have happened, for the tests of the table.
func (l *Ledger) Passed() []Transition {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Collect(maps.Keys(l.seen))
}
