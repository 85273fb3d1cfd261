// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"sync"
	"time"
)

// End is an allocation that has ended, or that was given to the next holder, as it was then.
type End struct {
	Allocation
	At time.Time
}

// Ends has what has ended in a ledger, for somebody who takes it again and again. Before Keep
// nothing is kept. Its mutex is locked after the ledger's.
type Ends struct {
	mu    sync.Mutex
	keeps bool
	list  []End
}

// Keep has it keep what ends from now on.
func (e *Ends) Keep() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.keeps = true
}

// Take returns what has ended since it was last called, in that order.
func (e *Ends) Take() []End {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := e.list
	e.list = nil
	return out
}

func (e *Ends) add(a Allocation, at time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.keeps {
		e.list = append(e.list, End{a, at})
	}
}
