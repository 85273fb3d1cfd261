// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"context"
	"errors"
	"sync"
	"testing"
)

// pool is nodes that those who try something borrow, one at a time. They are started when
// they are wanted, and closed when there are more than borrowers: an agent that nobody looks
// at takes of the processors too.
type pool struct {
	fresh func(context.Context) (*node, error)
	// room has an element for each node that may be lent besides those that are.
	room chan struct{}

	mu        sync.Mutex
	free      []*node // guarded by mu
	lent      int     // guarded by mu
	borrowers int     // guarded by mu
}

// newPool lends so many nodes at once.
func newPool(size int, fresh func(context.Context) (*node, error)) *pool {
	p := &pool{fresh: fresh, room: make(chan struct{}, size)}
	for range size {
		p.room <- struct{}{}
	}
	return p
}

// join has somebody among the borrowers until leave is called.
func (p *pool) join() (leave func() error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.borrowers++
	return func() error {
		p.mu.Lock()
		p.borrowers--
		p.mu.Unlock()
		return p.trim()
	}
}

// trim closes nodes that are free, of more than there are borrowers.
func (p *pool) trim() (err error) {
	p.mu.Lock()
	var closed []*node
	for len(p.free) > 0 && p.lent+len(p.free) > p.borrowers {
		last := len(p.free) - 1
		closed, p.free = append(closed, p.free[last]), p.free[:last]
	}
	p.mu.Unlock()
	for _, n := range closed {
		err = errors.Join(err, n.close())
	}
	return err
}

// take lends a node.
func (p *pool) take(ctx context.Context) (n *node, err error) {
	<-p.room
	p.mu.Lock()
	p.lent++
	if last := len(p.free) - 1; last >= 0 {
		n, p.free = p.free[last], p.free[:last]
	}
	p.mu.Unlock()
	if n != nil {
		return n, nil
	}
	if n, err = p.fresh(ctx); err != nil {
		p.back()
	}
	return n, err
}

func (p *pool) back() {
	p.mu.Lock()
	p.lent--
	p.mu.Unlock()
	p.room <- struct{}{}
}

// give takes a node back that is as it was.
func (p *pool) give(n *node) error {
	p.mu.Lock()
	p.free = append(p.free, n)
	p.mu.Unlock()
	p.back()
	return p.trim()
}

// drop is give of a node that is not as it was.
func (p *pool) drop(n *node) error {
	defer p.back()
	return n.close()
}

// A pool lends what was given back before it starts another, and no more at once than it may.
func TestThePoolLendsWhatItHas(t *testing.T) {
	made := 0
	p := newPool(2, func(context.Context) (*node, error) {
		if made++; made == 3 {
			return nil, errors.New("there is no more")
		}
		return &node{}, nil
	})
	leave := []func() error{p.join(), p.join()}
	take := func() *node {
		n, err := p.take(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	a := take()
	b := take()
	if len(p.room) != 0 {
		t.Error("two nodes of two are lent, and there is room for another")
	}
	if err := p.give(a); err != nil {
		t.Fatal(err)
	}
	if c := take(); c != a || made != 2 {
		t.Errorf("%d nodes were made, and the one that was given back is not lent", made)
	}
	if err := errors.Join(p.give(a), p.drop(b)); err != nil {
		t.Fatal(err)
	}
	take()
	if _, err := p.take(t.Context()); err == nil || len(p.room) != 1 {
		t.Errorf("a node that did not start is lent: %v, room for %d", err, len(p.room))
	}
	if err := errors.Join(p.give(a), leave[0]()); err != nil || len(p.free) != 1 {
		t.Errorf("%d nodes are free for one borrower, %v", len(p.free), err)
	}
	if err := leave[1](); err != nil || len(p.free) != 0 {
		t.Errorf("%d nodes are free for nobody, %v", len(p.free), err)
	}
}
