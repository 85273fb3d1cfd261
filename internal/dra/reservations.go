// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
)

// drainPoll is how often Leave reads the kubelet's account, which sends no notice when it is
// written.
const drainPoll = 20 * time.Millisecond

// reservations reserves in the ledger what the scheduler allocated before it saw a withdrawal.
type reservations struct {
	o         *Options
	book      *book
	shelf     drainer
	publisher interface{ settled(context.Context) error }

	// mu guards pending, the last list of claims that Settle has begun; nil if a caller has used it.
	// mu comes before the shelf's lock.
	mu      sync.Mutex
	pending *claimList
}

// drainer is the part of the shelf that reservations need.
type drainer interface {
	now() view
	drain() bool
}

func (p *reservations) Settle(ctx context.Context) (held []gpu.UUID, err error) {
	// Before the claims are known, no slice is written: the slices of the previous process are in
	// force, without a taint.
	for v := p.shelf.now(); !v.listed; v = p.shelf.now() {
		select {
		case <-v.news:
		case <-ctx.Done():
			return nil, errors.New("the agent has just started, and has not listed the claims yet")
		}
	}
	if err := p.publisher.settled(ctx); err != nil {
		return nil, err
	}
	claims, at, err := p.list(ctx)
	if err != nil {
		return nil, fmt.Errorf("list the claims: %w", err)
	}
	for i := range claims {
		held = append(held, p.reserve(&claims[i], at)...)
	}
	return held, nil
}

// reserve takes a claim into the ledger if it is not prepared yet. at is the ledger's epoch from
// before the claim was read. It returns the GPUs whose room the previous holder still has.
func (p *reservations) reserve(c *agentkube.Claim, at uint64) (held []gpu.UUID) {
	p.book.reconcile(c, at, nil)
	wants, err := wanted(c, p.o.Driver, p.o.Node)
	if _, ok := p.book.taken(c.UID); ok || err != nil || p.book.wasUnprepared(c, wants) {
		return nil // it is taken already, refused, or given back
	}
	if ready, err := p.shelf.now().find(wants); !ready || err != nil {
		return nil
	}
	// If the claim can never be taken, its Prepare returns the reason. If the room of one result is
	// still taken, the others are taken one by one.
	if _, err := p.book.take(c, wants, nil); errors.Is(err, ledger.ErrHeld) {
		for j := range wants {
			if _, err := p.book.take(c, wants[j:j+1], nil); errors.Is(err, ledger.ErrHeld) {
				held = append(held, wants[j].device.GPU)
			}
		}
	}
	return held
}

// claimList is a list of the claims, which may still be under way.
type claimList struct {
	// written is the last write of slices that the server had when the list began. at is the
	// ledger's epoch, and began the time, of that moment.
	written, at uint64
	began       time.Time
	// done is closed when the fields below are set.
	done   chan struct{}
	claims []agentkube.Claim
	err    error
}

// list returns the claims as they were after the server had all that is withdrawn now, and the
// ledger's epoch from before that. In a large cluster a list takes longer than a caller waits. It
// goes on then, wakes the loop when it is complete, and the next caller gets it.
func (p *reservations) list(ctx context.Context) (claims []agentkube.Claim, at uint64, err error) {
	for {
		withdrew := p.shelf.now().withdrew
		p.mu.Lock()
		if p.pending == nil {
			p.pending = p.startList(ctx)
		}
		c := p.pending
		p.mu.Unlock()
		select {
		case <-c.done:
		case <-ctx.Done():
			return nil, 0, errors.New("the list of claims is still under way")
		}
		p.mu.Lock()
		if p.pending == c {
			p.pending = nil // the next caller needs a newer list
		}
		p.mu.Unlock()
		if c.written >= withdrew && p.o.Now().Sub(c.began) < 2*listPatience {
			return c.claims, c.at, c.err
		}
	}
}

// startList begins a list, which goes on after ctx has ended.
func (p *reservations) startList(ctx context.Context) *claimList {
	c := &claimList{written: p.shelf.now().written, began: p.o.Now(), done: make(chan struct{})}
	_, c.at, _ = p.o.Ledger.State()
	go func() {
		lctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), listPatience)
		defer cancel()
		c.claims, c.err = p.o.API.Claims(lctx, p.o.Driver)
		late := ctx.Err() != nil
		close(c.done)
		if late {
			p.o.Wake()
		}
	}()
	return c
}

func (p *reservations) Leave(ctx context.Context) error {
	if !p.shelf.drain() {
		return nil // the scheduler sends no pods here
	}
	if err := p.publisher.settled(ctx); err != nil {
		return err
	}
	claims, err := p.o.API.Claims(ctx, p.o.Driver)
	if err != nil {
		return fmt.Errorf("list the claims: %w", err)
	}
	claims = slices.DeleteFunc(claims, func(c agentkube.Claim) bool {
		return !c.HasConsumers() || len(wants(&c, p.o.Driver, p.o.Node)) == 0
	})
	for {
		state, err := p.o.Kubelet.DRAState()
		if err != nil && !errors.Is(err, gpu.ErrNotFound) {
			return fmt.Errorf("read what the kubelet has prepared: %w", err)
		}
		claims = slices.DeleteFunc(claims, func(c agentkube.Claim) bool { return answered(&state, p.o.Driver, c.UID) })
		if len(claims) == 0 {
			return nil
		}
		select {
		case <-time.After(drainPoll):
		case <-ctx.Done():
			return fmt.Errorf("the kubelet has not prepared claim %s/%s", claims[0].Namespace, claims[0].Name)
		}
	}
}
