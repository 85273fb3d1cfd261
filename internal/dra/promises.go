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

// leavePace is how often Leave reads the kubelet's account, which sends no notice when it is
// written.
const leavePace = 20 * time.Millisecond

// promises finds the claims that the scheduler allocated before it saw a withdrawal.
type promises struct {
	o         *Options
	book      *book
	shelf     withdrawing
	publisher interface{ settled(context.Context) error }

	// mu guards census, the last list of claims that Settle has begun; nil if a caller has used it.
	// mu comes before the shelf's lock.
	mu     sync.Mutex
	census *census
}

// withdrawing is the part of the shelf that promises need.
type withdrawing interface {
	now() view
	leave() bool
}

func (p *promises) Settle(ctx context.Context) (promised []gpu.UUID, err error) {
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
		promised = append(promised, p.settle(&claims[i], at)...)
	}
	return promised, nil
}

// settle takes a claim into the ledger if it is not prepared yet. at is the ledger's epoch from
// before the claim was read. It returns the GPUs whose room the previous holder still has.
func (p *promises) settle(c *agentkube.Claim, at uint64) (promised []gpu.UUID) {
	p.book.agree(c, at, nil)
	wants, err := wanted(c, p.o.Driver, p.o.Node)
	if _, ok := p.book.taken(c.UID); ok || err != nil || p.book.gaveBack(c, wants) {
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
				promised = append(promised, wants[j].device.GPU)
			}
		}
	}
	return promised
}

// census is a list of the claims, which may still be under way.
type census struct {
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
func (p *promises) list(ctx context.Context) (claims []agentkube.Claim, at uint64, err error) {
	for {
		withdrew := p.shelf.now().withdrew
		p.mu.Lock()
		if p.census == nil {
			p.census = p.count(ctx)
		}
		c := p.census
		p.mu.Unlock()
		select {
		case <-c.done:
		case <-ctx.Done():
			return nil, 0, errors.New("the list of claims is still under way")
		}
		p.mu.Lock()
		if p.census == c {
			p.census = nil // the next caller needs a newer list
		}
		p.mu.Unlock()
		if c.written >= withdrew && p.o.Now().Sub(c.began) < 2*listPatience {
			return c.claims, c.at, c.err
		}
	}
}

// count begins a list, which goes on after ctx has ended.
func (p *promises) count(ctx context.Context) *census {
	c := &census{written: p.shelf.now().written, began: p.o.Now(), done: make(chan struct{})}
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

func (p *promises) Leave(ctx context.Context) error {
	if !p.shelf.leave() {
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
		case <-time.After(leavePace):
		case <-ctx.Done():
			return fmt.Errorf("the kubelet has not prepared claim %s/%s", claims[0].Namespace, claims[0].Name)
		}
	}
}
