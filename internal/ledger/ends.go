// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"sync"
	"time"
)

// End is a copy of an allocation from the time At, when it ended or was given to the next holder.
type End struct {
	Allocation
	At time.Time
}

// Ends collects what has ended in a ledger, until a reader takes it. It keeps nothing before
// [Ends.Keep] is called. Its mutex is locked after the ledger's.
type Ends struct {
	mu    sync.Mutex
	keeps bool
	list  []End
}

// Keep makes it keep what ends from now on.
func (e *Ends) Keep() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.keeps = true
}

// Take returns what has ended since the last call, oldest first.
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
