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
	// sweepEvery is how often claims are looked for that have ended without an Unprepare,
	// while there are any, and grace how long one is kept that nobody knows.
	sweepEvery = 30 * time.Second
	grace      = 30 * time.Second
	// impatience is how often a Prepare that waits for the holder before it has that done
	// sooner.
	impatience = 3 * time.Second
	// lingers is for how long it is remembered that a claim was given back. The API server
	// has it allocated until its pod is known to have ended.
	lingers = time.Minute
	// apiPatience bounds one question to the API server, and listPatience the list of all
	// claims of the cluster, which is many.
	apiPatience  = 10 * time.Second
	listPatience = 40 * time.Second
	// gonePatience is how long a sweep waits for the loop to take CDI files away.
	gonePatience = 5 * time.Second
)

// sweeper compares the book with what the API server, the kubelet and the runtime say, and ends
// what they know nothing of. It has no lock.
type sweeper struct {
	o     *Options
	book  *book
	in    *intake
	shelf parting
	// look has a token when claims are to be looked at anew, and account when the kubelet may
	// have written its account.
	look, account token
}

// parting is what the sweeper asks of the shelf.
type parting interface {
	now() view
	begin(named map[DeviceName]bool)
	part(named map[DeviceName]bool, written uint64) int
}

// follow lists the claims at the start, and then looks after them where something depends on
// that.
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
				s.o.Log.Warn("cannot tell which claims there are; trying again", "driver", s.o.Driver, "err", err)
			}
			again = time.After(pause.Step())
		}
		if len(s.book.renewing()) == 0 {
			ended = nil // nobody waits for it here
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

// followAccount asks the API server about the claims that the kubelet has for other pods than before. It
// gives these what it was answered for the first one, without a word to the driver. It does
// so beside the list of all claims, which may take long.
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

// sweep lists the claims at the start, and while a device is leaving. Otherwise it asks for
// single claims, and only for those of which something is due: that were allocated anew, and
// that may have ended unheard.
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
	// What cannot be told now is asked again at the next look, and holds up nobody else.
	gctx, cancel := context.WithTimeout(ctx, gonePatience)
	_, err = s.in.retire(gctx, "")
	cancel()
	err = errors.Join(err, s.sweepDue(ctx, &state))
	v := s.shelf.now()
	if !v.parts() {
		return err
	}
	lctx, cancel := context.WithTimeout(ctx, listPatience)
	defer cancel()
	claims, lerr := s.o.API.Claims(lctx, s.o.Driver)
	if lerr != nil {
		return errors.Join(err, fmt.Errorf("list the claims: %w", lerr))
	}
	s.part(claims, v.written)
	return err
}

// sweepDue renews the claims that were allocated anew, and ends those that have ended unheard.
func (s *sweeper) sweepDue(ctx context.Context, state *node.DRAState) error {
	due, suspects := s.book.due(state, nil, true)
	found, err := s.ask(ctx, state, due)
	over, renewing := map[string]uint64{}, s.book.renewing()
	for _, uid := range slices.Sorted(maps.Keys(found)) {
		c := found[uid]
		_, suspect := suspects[uid]
		switch {
		case c.claim == nil:
			s.book.renewed(uid) // it has nothing
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
	// What was observed may be of before a container's start.
	used, sure, rerr := inContainers(rctx, s.o.Runtime, s.o.Domain)
	for uid, at := range over {
		if rerr == nil && sure {
			s.book.end(uid, at, suspects[uid], used)
		}
	}
	return errors.Join(err, rerr)
}

// part lets devices go that were tainted at the server before the claims were listed, as of the
// last writing before that.
func (s *sweeper) part(claims []agentkube.Claim, written uint64) {
	if n := s.shelf.part(s.named(claims), written); n > 0 {
		s.o.Log.Info("devices leave their ResourceSlices: no claim names them", "devices", n)
	}
}

// named are the devices that claims name.
func (s *sweeper) named(claims []agentkube.Claim) map[DeviceName]bool {
	out := map[DeviceName]bool{}
	for i := range claims {
		for _, w := range wants(&claims[i], s.o.Driver, s.o.Node) {
			out[DeviceName{w.Pool, w.Device}] = true
		}
	}
	return out
}

// first is the look after a start.
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
	s.part(claims, written)
	return nil
}

// answer is what the API server says of a claim: nil where it is no more, or has nothing here. at
// is the ledger's epoch before it was asked.
type answer struct {
	claim *agentkube.Claim
	at    uint64
}

// ask asks the API server about single claims, and compares what they have here. The error is of those
// that it returns nothing of.
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
			s.book.agree(c, at, podsOf(state, uid))
			out[uid] = answer{c, at}
		}
	}
	return out, errors.Join(errs...)
}

// begin compares what was found in records with what the API server says, as of at, takes over
// the claims that are prepared, or that containers have, and of which no record is left, and
// keeps the devices that claims name in their slices.
func (s *sweeper) begin(ctx context.Context, claims []agentkube.Claim, at uint64, state *node.DRAState,
	used map[string][]workload.Pod) {
	s.book.guess(used)
	for i := range claims {
		s.book.agree(&claims[i], at, podsOf(state, claims[i].UID))
		s.takeOver(&claims[i], state, used)
	}
	for i := range claims {
		c := &claims[i]
		shares, ok := s.book.taken(c.UID)
		switch {
		case !ok:
		case answered(state, s.o.Driver, c.UID): // the kubelet may ask for it no more: see renew
			go s.in.finish(ctx, c, shares)
		case !c.Told: // the process before this one may have ended before it had said it
			go s.in.tell(c, shares)
		}
	}
	s.shelf.begin(s.named(claims))
	s.o.Wake() // for what was taken over
}

// takeOver takes over what a claim has of which no record is left, if that is prepared or in a
// container.
func (s *sweeper) takeOver(c *agentkube.Claim, state *node.DRAState, used map[string][]workload.Pod) {
	wants, name := wants(c, s.o.Driver, s.o.Node), c.Namespace+"/"+c.Name
	if !slices.ContainsFunc(wants, func(w want) bool { _, ok := s.o.Ledger.Get(w.id()); return !ok }) {
		return
	}
	switch inUse := slices.ContainsFunc(wants, func(w want) bool { return len(used[w.id()]) > 0 }); {
	case theirs(c, wants, s.o.Driver, state, used):
		if err := s.book.takeOver(c, podsOf(state, c.UID)); err != nil {
			s.o.Log.Warn("cannot take over what a claim has; its GPU may be given to somebody else",
				"claim", name, "err", err)
		}
	case inUse, answered(state, s.o.Driver, c.UID): // with what it had before
		if inUse {
			s.o.Log.Warn("a container has what a claim had before it was allocated anew, and "+
				"no record says what that is; its GPU may be given to somebody else", "claim", name)
		}
		s.book.setAnew(c)
		s.look.poke()
	}
}

// renew takes what a claim has that was allocated anew, where there is room. The kubelet may
// not ask for it: it takes a claim that it has prepared once for prepared, and gives the names
// of its CDI devices to the claim's next pods (1.36.3).
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
		return // the holder before has not ended yet: it is tried again
	}
	s.in.refusals.note(c, err)
	s.book.renewed(c.UID)
	if err == nil && answered(state, s.o.Driver, c.UID) {
		go s.in.finish(ctx, c, sharesOf(wants))
	}
}
