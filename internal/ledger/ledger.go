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

// Ledger has the allocations of a node. Use [New]. A front-end that has a mutex of
// its own locks that first.
type Ledger struct {
	// wake has the loop look, without the mutex. It must not block.
	wake func()
	// now is the clock, an argument because this floor has none.
	now func() time.Time

	// Ends is what has ended.
	Ends Ends

	// mu guards everything below.
	mu          sync.Mutex
	allocations map[string]*allocation
	// rooms is what can stand on the GPUs with MIG.
	rooms map[gpu.UUID]MIG
	// version grows when an allocation is added or ends, epoch with every Take and
	// Renew.
	version, epoch uint64
	// named grows when the holder of one becomes known, or another.
	named uint64
	// released counts those that have ended, and ended is closed when the next one does.
	released uint64
	ended    chan struct{}
	// seen are the transitions that there have been.
	seen map[Transition]bool
}

// allocation is one that the ledger has.
type allocation struct {
	Allocation
	// open is closed when Phase becomes Open, and replaced when it is that no more.
	open chan struct{}
	// gone is closed when no CDI file stands for one that is Superseded, and replaced when
	// it becomes that.
	gone chan struct{}
	// told is After in words for the allocation's own pod.
	told string
}

// New returns a ledger with no allocation. wake is called when somebody waits for one to
// open and must not block; now is the clock.
func New(wake func(), now func() time.Time) *Ledger {
	return &Ledger{
		wake: wake, now: now, allocations: map[string]*allocation{}, ended: make(chan struct{}),
		seen: map[Transition]bool{},
	}
}

// Request is what a front-end asks for.
type Request struct {
	ID       string
	Owner    FrontEnd
	Resource string
	Ref      string
	Grants   []Grant
	// Overlap says that others may be on the same pieces: the front-end knows that they
	// are ending, or that they are of the same pod. The allocation opens when they are
	// gone.
	Overlap bool
}

// Take makes an allocation that is Reserved. A GPU is one front-end's at a time: the
// error wraps ErrHeld where another one has something of it, and where somebody is on
// the pieces and the request does not permit that. It does not wake the loop, which
// would run beside the caller's answer and hold it up.
func (l *Ledger) Take(r Request) (Allocation, error) {
	all, err := l.TakeAll([]Request{r})
	if err != nil {
		return Allocation{}, err
	}
	return all[0], nil
}

// TakeAll makes several allocations, or none. Requests of one call do not see each other.
func (l *Ledger) TakeAll(requests []Request) ([]Allocation, error) {
	now := l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range requests {
		r := &requests[i]
		if l.allocations[r.ID] != nil {
			return nil, fmt.Errorf("allocation %s is there already: %w", r.ID, ErrHeld)
		}
		if err := l.freeLocked(r); err != nil {
			return nil, err
		}
	}
	out := make([]Allocation, len(requests))
	for i := range requests {
		r := &requests[i]
		a := l.addLocked(Allocation{
			ID: r.ID, Owner: r.Owner, Resource: r.Resource, Ref: r.Ref, Grants: r.Grants, Given: now, Fresh: true,
		})
		l.epoch++
		a.Epoch = l.epoch
		out[i] = a.Allocation
	}
	return out, nil
}

// Renew gives an allocation of a front-end to the next holder, under the same ID, with
// the pieces as they are now: a new pod, whose predecessor may still be ending, or the
// next container of the same pod. It is Reserved again. The error wraps ErrHeld, as
// Take's does, or gpu.ErrNotFound.
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
	l.epoch++
	l.version++
	a.Allocation = Allocation{
		ID: r.ID, Owner: r.Owner, Resource: r.Resource, Ref: r.Ref, Epoch: l.epoch, Grants: r.Grants,
		Phase: Reserved, Given: now, Fresh: true, Entered: a.Entered, Twice: a.Twice,
	}
	a.told = ""
	return a.Allocation, nil
}

// freeLocked says why a request cannot be met beside the other allocations.
func (l *Ledger) freeLocked(r *Request) error {
	for _, o := range l.allocations {
		switch {
		case o.ID == r.ID:
		case o.Owner != r.Owner &&
			slices.ContainsFunc(r.Grants, func(g Grant) bool { return !g.NoRoom && o.Takes(g.GPU) }):
			return fmt.Errorf("a GPU is given out through %s now (allocation %s): %w", o.Owner, o.ID, ErrHeld)
		case !r.Overlap && overlap(l.rooms, r.Grants, o.Grants):
			return fmt.Errorf("allocation %s has a piece of it: %w", o.ID, ErrHeld)
		}
	}
	return nil
}

// Found takes over an allocation that is older than this process, from its record; given
// is when it was given, zero where nobody knows. One that the ledger has already learns
// what it did not know. added is false then. The error wraps gpu.ErrInvalid where the
// record is none, and ErrHeld where the ID is another front-end's.
func (l *Ledger) Found(id string, r Record, given time.Time) (added bool, err error) {
	now := l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := r.check(); err != nil {
		return false, fmt.Errorf("take over allocation %s: %w: %w", id, gpu.ErrInvalid, err)
	}
	if a := l.allocations[id]; a != nil {
		if a.Owner != r.Owner {
			return false, fmt.Errorf("take over allocation %s: it is of %s: %w", id, a.Owner, ErrHeld)
		}
		a.learn(r.Grants)
		a.date(given, now)
		return false, nil
	}
	a := l.addLocked(Allocation{
		ID: id, Owner: r.Owner, Resource: r.Resource, Ref: r.Ref, Grants: sized(r.Grants, l.rooms), Given: now,
		Adopted: true,
	})
	a.date(given, now)
	return true, nil
}

// date says when an allocation that was taken over was last given or renewed, if that is
// known; of several records the last one read tells.
func (a *allocation) date(given, now time.Time) {
	if a.Epoch == 0 && !given.IsZero() {
		// As old as it is now, also when the clock is put back.
		a.Given, a.Adopted, a.Fresh = now.Add(-now.Sub(given)), false, true
	}
}

func (l *Ledger) addLocked(a Allocation) *allocation {
	a.Phase = Reserved
	l.version++
	l.allocations[a.ID] = &allocation{Allocation: a, open: make(chan struct{}), gone: make(chan struct{})}
	return l.allocations[a.ID]
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
	}
	a.Phase = to
}

// Looked says what a look at an allocation's pieces came to: who else is on them, and
// that in words for its own pod; both are empty where nobody is. It is not heard where
// the allocation was renewed since epoch, or is open.
func (l *Ledger) Looked(id string, epoch uint64, others, told string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.allocations[id]
	if a == nil || a.Epoch != epoch || a.Phase == Open || a.Superseded {
		return
	}
	a.After, a.told = others, told
	switch {
	case others != "":
		l.moveLocked(a, Waiting)
	case a.Asked.IsZero():
		l.moveLocked(a, Taken)
	default:
		l.moveLocked(a, Making)
	}
}

// Supersede says that the name of an allocation stands for something else at its front-end
// now. No container is created with it any more, and it waits for the end of those that have
// it: others names them, and told does in words for the pod that the name is for now. Neither
// is empty. It is not heard where there has been another epoch since; the channel is nil then,
// and else it is closed when no CDI file stands for it: see Gone. It begins a new epoch, and may
// be said again, with other words, which begins none.
func (l *Ledger) Supersede(id string, epoch uint64, others, told string) (gone <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.allocations[id]
	if a == nil || a.Epoch != epoch {
		return nil
	}
	if !a.Superseded {
		l.epoch++
		a.Superseded, a.gone, a.Epoch = true, make(chan struct{}), l.epoch
	}
	if a.Phase == Open {
		l.moveLocked(a, Taken)
	}
	a.After, a.told, a.Asked = others, told, time.Time{} // nobody starts with it
	l.moveLocked(a, Waiting)
	return a.gone
}

// Reinstate takes Supersede back: the name of an allocation stands for the same again. It begins
// a new epoch.
func (l *Ledger) Reinstate(id string, epoch uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if a := l.allocations[id]; a != nil && a.Epoch == epoch && a.Superseded {
		l.epoch++
		a.Superseded, a.After, a.told, a.Epoch = false, "", "", l.epoch
		l.moveLocked(a, Taken)
	}
}

// Gone says that no CDI file stands for an allocation that is Superseded.
func (l *Ledger) Gone(id string) {
	l.edit(id, func(a *allocation) {
		select {
		case <-a.gone:
		default:
			if a.Superseded {
				close(a.gone)
			}
		}
	})
}

// Prepare waits until the container of an allocation may be created. It may be called
// any number of times. The error wraps ErrNotOpen when ctx ends first, or where there
// is no such allocation; the work goes on.
func (l *Ledger) Prepare(ctx context.Context, id string) error {
	for {
		open, err := l.pass(id, true)
		if open == nil {
			return err
		}
		l.wake()
		select {
		case <-open:
			continue // another one may have been let through
		case <-ctx.Done():
			_, err := l.pass(id, false)
			return err
		}
	}
}

// pass lets a container through, or returns why not and what is closed when it is worth
// another try, nil where there is no such allocation. asks says that the container is to
// start.
func (l *Ledger) pass(id string, asks bool) (open <-chan struct{}, _ error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.allocations[id] // by ID: it may have ended and come again
	if a == nil {
		return nil, fmt.Errorf("%w: there is no allocation %s", ErrNotOpen, id)
	}
	if a.Phase == Open {
		a.Entered = l.now()
		if a.Twice {
			// What was seen before this does not open it for the next one.
			l.epoch++
			a.Epoch = l.epoch
			l.moveLocked(a, Reserved)
		}
		return nil, nil
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

// notOpen is why an allocation is not open, for its pod.
func (a *allocation) notOpen() error {
	switch {
	case a.Phase == Waiting && a.Twice:
		return fmt.Errorf("%w: the kubelet has given its devices to another pod too, whose turn it is: %s",
			ErrNotOpen, a.told)
	case a.Phase == Waiting:
		return fmt.Errorf("%w: previous holder still ending: %s", ErrNotOpen, a.told)
	case a.Cause != (status.Cause{}):
		return fmt.Errorf("%w: %w", ErrNotOpen, a.Cause)
	}
	return fmt.Errorf("%w: the CDI file of allocation %s is not written yet; "+
		"see the agent's log and `gpu-agent status`", ErrNotOpen, a.ID)
}

// SetTwice says whether the kubelet has given an allocation to two pods.
func (l *Ledger) SetTwice(id string, twice bool) {
	l.edit(id, func(a *allocation) { a.Twice = twice })
}

// SetOpen says that the container of an allocation may be created, as of an epoch: one
// that was renewed meanwhile is not open, and stays so. It reports whether it is open
// now.
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

// edit changes an allocation, if there is one with this ID.
func (l *Ledger) edit(id string, change func(*allocation)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if a := l.allocations[id]; a != nil {
		change(a)
	}
}

// Shut says that the container of an allocation may no longer be created.
func (l *Ledger) Shut(id string) {
	l.edit(id, func(a *allocation) {
		if a.Phase == Open {
			l.moveLocked(a, Taken)
		}
	})
}

// SetCause says why what an allocation needs could not be made so far; an empty cause
// clears it. It is in the error of a Prepare that waited in vain, which ends up in an
// Event of the pod. So it names no pod but by Holder.Told.
func (l *Ledger) SetCause(id string, why status.Cause) {
	l.edit(id, func(a *allocation) { a.Cause = why })
}

// SetFor says whom an allocation was given to where that is no pod, in words for people.
func (l *Ledger) SetFor(id, who string) {
	l.edit(id, func(a *allocation) { a.For = who })
}

// SetHolder says who has an allocation, and which other pods do.
func (l *Ledger) SetHolder(id string, h Holder, beside ...workload.Pod) {
	l.edit(id, func(a *allocation) {
		if a.Holder != h {
			l.named++
		}
		a.Holder, a.Beside = h, beside
	})
}

// Filed says that a CDI file stands for an allocation that was written at that time: one
// that is not older than the allocation is its own, not one of the holder before.
func (l *Ledger) Filed(id string, written time.Time) {
	l.edit(id, func(a *allocation) { a.Fresh = a.Fresh && (written.IsZero() || written.Before(a.Given)) })
}

// Learn says what the holder of an allocation was given, where that was not known. No
// offer depends on it.
func (l *Ledger) Learn(id string, grants []Grant) {
	l.edit(id, func(a *allocation) { a.learn(grants) })
}

// learn takes over what a record of the same pieces knows of caps.
func (a *allocation) learn(grants []Grant) {
	if len(grants) != len(a.Grants) {
		return
	}
	for i := range grants {
		if g := &grants[i]; g.GPU == a.Grants[i].GPU && piece.Same(g.Piece, a.Grants[i].Piece) && g.Cap.Known &&
			!a.Grants[i].Cap.Known {
			a.Grants = slices.Clone(a.Grants) // others may read it
			a.Grants[i].Piece, a.Grants[i].Cap = g.Piece, g.Cap
		}
	}
}

// Release ends an allocation, if it is that front-end's. It returns what it was.
func (l *Ledger) Release(owner FrontEnd, id string) (Allocation, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.allocations[id]
	if a == nil || a.Owner != owner {
		return Allocation{}, false
	}
	l.Ends.add(a.Allocation, l.now())
	l.moveLocked(a, Released)
	delete(l.allocations, id)
	l.version++
	l.released++
	close(l.ended)
	l.ended = make(chan struct{})
	return a.Allocation, true
}

// Ended is how many allocations have ended since the start, and a channel that is closed
// when the next one does.
func (l *Ledger) Ended() (n uint64, next <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.released, l.ended
}

// Get returns one allocation.
func (l *Ledger) Get(id string) (Allocation, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.allocations[id]
	if a == nil {
		return Allocation{}, false
	}
	return a.Allocation, true
}

// Allocations returns all of them in the order of their IDs.
func (l *Ledger) Allocations() []Allocation {
	out, _ := l.Look()
	return out
}

// Look returns the allocations and their version, which grows when one is added,
// renewed or released.
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

// State returns the version of the allocations, the epoch of the last one that was taken or
// renewed, and how often one got another holder.
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

// Passed are the transitions that there have been, for the tests of the table.
func (l *Ledger) Passed() []Transition {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Collect(maps.Keys(l.seen))
}
