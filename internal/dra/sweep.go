// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
)

const (
	// sweepEvery is how often the sweeper looks for claims that have ended without an Unprepare.
	// grace is how long it keeps a new allocation that the kubelet does not know.
	sweepEvery = 30 * time.Second
	grace      = 30 * time.Second
	// impatience is how often a Prepare that waits for a previous holder wakes the sweeper.
	impatience = 3 * time.Second
	// lingers is how long the book remembers that a claim was given back. The API server shows the
	// claim as allocated until it knows that its pod has ended.
	lingers = time.Minute
	// apiPatience is the time limit of one call to the API server. listPatience is that of a list
	// of the claims of the whole cluster, which may be many.
	apiPatience  = 10 * time.Second
	listPatience = 40 * time.Second
	// gonePatience is how long a sweep waits for the loop to remove CDI files.
	gonePatience = 5 * time.Second
)

// sweeper compares the book with the API server, the kubelet and the runtime, and ends claims that
// these know nothing of. It has no lock.
type sweeper struct {
	o     *Options
	book  *book
	in    *intake
	shelf forgetter
	// look wakes the sweeper for claims, and account when the kubelet may have written its account.
	look, account token
}

// forgetter is the part of the shelf that the sweeper needs.
type forgetter interface {
	now() view
	begin(named map[DeviceName]bool)
	forget(named map[DeviceName]bool, written uint64) int
}

// follow lists the claims at the start. After that it sweeps every sweepEvery, when it is woken,
// and when an allocation ends that a reallocated claim may wait for.
func (s *sweeper) follow(ctx context.Context) error {
	pause := newPause()
	for {
		var again <-chan time.Time
		_, ended := s.o.Ledger.Ended()
		switch err := s.sweep(ctx); {
		case err == nil:
			pause = newPause()
			again = time.After(sweepEvery)
		default:
			if ctx.Err() == nil {
				s.o.Log.Warn("cannot compare the claims with the API server; trying again",
					"driver", s.o.Driver, "err", err)
			}
			again = time.After(pause.Step())
		}
		if len(s.book.renewing()) == 0 {
			ended = nil // no claim waits for the end of another
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.look:
		case <-again:
		case <-ended:
		}
	}
}

// followAccount asks the API server about claims that the kubelet has for new pods. The kubelet
// gives a new pod what Prepare has returned for the first one, without another call to the driver.
// This runs in a goroutine of its own, since the list of all claims in follow may take long.
func (s *sweeper) followAccount(ctx context.Context) error {
	pause := newPause()
	for {
		again := time.After(sweepEvery)
		state, err := s.o.Kubelet.DRAState()
		if err == nil {
			_, err = s.ask(ctx, &state, s.book.forOthers(&state))
		}
		if err == nil || errors.Is(err, gpu.ErrNotFound) {
			pause = newPause()
		} else {
			again = time.After(pause.Step())
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.account:
		case <-again:
		}
	}
}

// sweep lists all claims at the start, and while a device waits to leave its slice. Otherwise it
// reads single claims, and only those that need it: the reallocated ones, and those that may have
// ended without an Unprepare.
func (s *sweeper) sweep(ctx context.Context) error {
	state, err := s.o.Kubelet.DRAState()
	if err != nil && !errors.Is(err, gpu.ErrNotFound) {
		return fmt.Errorf("read what the kubelet has prepared: %w", err)
	}
	switch v := s.shelf.now(); {
	case v.offer == nil:
		return nil
	case !v.listed:
		return s.first(ctx, &state)
	}
	// An error here is tried again at the next sweep, and does not stop this one.
	gctx, cancel := context.WithTimeout(ctx, gonePatience)
	_, err = s.in.retire(gctx, "")
	cancel()
	err = errors.Join(err, s.sweepDue(ctx, &state))
	v := s.shelf.now()
	if !v.canForget() {
		return err
	}
	lctx, cancel := context.WithTimeout(ctx, listPatience)
	defer cancel()
	claims, lerr := s.o.API.Claims(lctx, s.o.Driver)
	if lerr != nil {
		return errors.Join(err, fmt.Errorf("list the claims: %w", lerr))
	}
	s.forgetDevices(claims, v.written)
	return err
}

// sweepDue takes allocations for claims that were allocated anew, and ends claims that have ended
// without an Unprepare.
func (s *sweeper) sweepDue(ctx context.Context, state *node.DRAState) error {
	due, suspects := s.book.due(state, nil, true)
	found, err := s.ask(ctx, state, due)
	over, renewing := map[string]uint64{}, s.book.renewing()
	for _, uid := range slices.Sorted(maps.Keys(found)) {
		c := found[uid]
		_, suspect := suspects[uid]
		switch {
		case c.claim == nil:
			s.book.renewed(uid) // it has no allocation here
			if suspect {
				over[uid] = c.at
			}
		case renewing[uid].UID == uid:
			s.renew(ctx, c.claim, state)
		}
	}
	if len(over) == 0 {
		return err
	}
	rctx, cancel := context.WithTimeout(ctx, apiPatience)
	defer cancel()
	// The last observation may be older than a container's start, so the runtime is asked again.
	used, sure, rerr := inContainers(rctx, s.o.Runtime, s.o.Domain)
	for uid, at := range over {
		if rerr == nil && sure {
			s.book.end(uid, at, suspects[uid], used)
		}
	}
	return errors.Join(err, rerr)
}

// forgetDevices removes devices from their slices that were tainted before the claims were listed.
// written is the last write of slices that the server had then.
func (s *sweeper) forgetDevices(claims []agentkube.Claim, written uint64) {
	if n := s.shelf.forget(s.named(claims), written); n > 0 {
		s.o.Log.Info("removing devices from their ResourceSlices: no claim names them", "devices", n)
	}
}

// named returns the devices that claims name.
func (s *sweeper) named(claims []agentkube.Claim) map[DeviceName]bool {
	out := map[DeviceName]bool{}
	for i := range claims {
		for _, w := range wants(&claims[i], s.o.Driver, s.o.Node) {
			out[DeviceName{w.Pool, w.Device}] = true
		}
	}
	return out
}

// first is the sweep after a start.
func (s *sweeper) first(ctx context.Context, state *node.DRAState) error {
	rctx, cancel := context.WithTimeout(ctx, apiPatience)
	used, sure, err := inContainers(rctx, s.o.Runtime, s.o.Domain)
	cancel()
	if err != nil {
		return err
	}
	written := s.shelf.now().written
	_, suspects := s.book.due(state, used, sure)
	_, at, _ := s.o.Ledger.State()
	lctx, cancel := context.WithTimeout(ctx, listPatience)
	defer cancel()
	claims, err := s.o.API.Claims(lctx, s.o.Driver)
	if err != nil {
		return fmt.Errorf("list the claims: %w", err)
	}
	s.begin(ctx, claims, at, state, used)
	for uid, served := range suspects {
		if !slices.ContainsFunc(claims, func(c agentkube.Claim) bool { return c.UID == uid }) {
			s.book.end(uid, at, served, used)
		}
	}
	s.forgetDevices(claims, written)
	return nil
}

// answer is what the API server says about a claim: nil if the claim is gone or has nothing here.
// at is the ledger's epoch from before it was asked.
type answer struct {
	claim *agentkube.Claim
	at    uint64
}

// ask reads single claims at the API server, and compares them with the book. The error covers the
// claims that it returns no answer for.
func (s *sweeper) ask(ctx context.Context, state *node.DRAState, due map[string]dra.Claim) (map[string]answer, error) {
	out := map[string]answer{}
	var errs []error
	for _, uid := range slices.Sorted(maps.Keys(due)) {
		actx, cancel := context.WithTimeout(ctx, apiPatience)
		c, at, err := s.in.read(actx, due[uid])
		cancel()
		switch {
		case errors.Is(err, gpu.ErrNotFound) || err == nil && len(wants(c, s.o.Driver, s.o.Node)) == 0:
			out[uid] = answer{nil, at}
		case err != nil:
			errs = append(errs, fmt.Errorf("claim %s/%s: %w", due[uid].Namespace, due[uid].Name, err))
		default:
			s.book.reconcile(c, at, podsOf(state, uid))
			out[uid] = answer{c, at}
		}
	}
	return out, errors.Join(errs...)
}

// begin starts from the first list of claims. It compares them with what records have told. It
// takes over prepared claims, and claims in containers, that no record names. Then it starts to
// publish, with the devices that claims name in their slices. at is the ledger's epoch from before
// the list.
func (s *sweeper) begin(ctx context.Context, claims []agentkube.Claim, at uint64, state *node.DRAState,
	used map[string][]workload.Pod) {
	s.book.guess(used)
	for i := range claims {
		s.book.reconcile(&claims[i], at, podsOf(state, claims[i].UID))
		s.takeOver(&claims[i], state, used)
	}
	for i := range claims {
		c := &claims[i]
		shares, ok := s.book.taken(c.UID)
		switch {
		case !ok:
		case answered(state, s.o.Driver, c.UID): // the kubelet may not call Prepare for it again: see renew
			go s.in.finish(ctx, c, shares)
		case !c.Told: // the previous process may have ended before it wrote the devices
			go s.in.tell(c, shares)
		}
	}
	s.shelf.begin(s.named(claims))
	s.o.Wake() // the loop has to see what was taken over
}

// takeOver takes over what a claim has and no record names, if the claim is prepared or in a
// container.
func (s *sweeper) takeOver(c *agentkube.Claim, state *node.DRAState, used map[string][]workload.Pod) {
	wants, name := wants(c, s.o.Driver, s.o.Node), c.Namespace+"/"+c.Name
	if !slices.ContainsFunc(wants, func(w want) bool { _, ok := s.o.Ledger.Get(w.id()); return !ok }) {
		return
	}
	switch inUse := slices.ContainsFunc(wants, func(w want) bool { return len(used[w.id()]) > 0 }); {
	case givenToPod(c, wants, s.o.Driver, state, used):
		if err := s.book.takeOver(c, podsOf(state, c.UID)); err != nil {
			s.o.Log.Warn("cannot take over what a claim has; its GPU may be given to another claim",
				"claim", name, "err", err)
		}
	case inUse, answered(state, s.o.Driver, c.UID): // with what the claim had before it was allocated anew
		if inUse {
			s.o.Log.Warn("a container still has what its claim had before it was allocated anew, and "+
				"no record names the device; its GPU may be given to another claim", "claim", name)
		}
		s.book.setReallocated(c)
		s.look.poke()
	}
}

// renew takes allocations for a claim that was allocated anew, if there is room. The kubelet may
// not call Prepare for it: it regards a claim that it has prepared once as prepared, and gives the
// claim's next pods the names of its CDI devices (1.36.3).
func (s *sweeper) renew(ctx context.Context, c *agentkube.Claim, state *node.DRAState) {
	wants, err := wanted(c, s.o.Driver, s.o.Node)
	if err == nil {
		var ready bool
		if ready, err = s.shelf.now().find(wants); !ready {
			return
		}
	}
	if err == nil {
		_, err = s.book.take(c, wants, podsOf(state, c.UID))
	}
	if _, lasts := lasting(err); err != nil && !lasts {
		return // the previous holder has not ended yet; the next sweep tries again
	}
	s.in.refusals.note(c, err)
	s.book.renewed(c.UID)
	if err == nil && answered(state, s.o.Driver, c.UID) {
		go s.in.finish(ctx, c, sharesOf(wants))
	}
}
