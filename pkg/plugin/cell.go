// SPDX-License-Identifier: Apache-2.0

package plugin

import "sync"

// cell is a value that goroutines can wait for. get returns it, and a channel that is closed when
// there is a newer one. A slow reader skips values, but always gets the last one.
type cell[T any] struct {
	mu      sync.Mutex
	value   T             // guarded by mu
	changed chan struct{} // guarded by mu; nil if no get has followed the last update
}

func (c *cell[T]) get() (T, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.changed == nil {
		c.changed = make(chan struct{})
	}
	return c.value, c.changed
}

func (c *cell[T]) update(f func(T) T) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.value = f(c.value)
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
}

func (c *cell[T]) set(v T) { c.update(func(T) T { return v }) }
