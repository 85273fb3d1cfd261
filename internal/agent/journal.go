// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"log/slog"
	"sync"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/state"
)

// trimEvery is the number of lines after which the journal is replaced by one with only the
// allocations that need it. A journal that needs none is emptied at once.
const trimEvery = 256

// journal saves allocations that no CDI file records yet. Any goroutine may call note; all else
// belongs to the loop's goroutine.
type journal struct {
	store Store
	// boot is Options.Boot.
	boot   string
	log    *slog.Logger
	ration *brief.Ration

	mu    sync.Mutex
	noted []state.Allocation // guarded by mu; not yet written

	// released is the number of ended allocations in the last round.
	released uint64
	written  int // lines since the journal was last replaced
	// due is true if the journal lacks an allocation, or has one that has ended. The next process
	// would take the latter for a holder.
	due bool
}

// note adds an allocation for the next write.
func (j *journal) note(c *ledger.Allocation) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.noted = append(j.noted, recordOf(c))
}

// write writes the allocations that were noted since the last write.
func (j *journal) write() {
	j.mu.Lock()
	noted := j.noted
	j.noted = nil
	j.mu.Unlock()
	for _, c := range noted {
		if err := j.append(c); err != nil {
			j.ration.Log(slog.LevelWarn, "cannot save an allocation; only the kubelet's checkpoint has it", nil,
				"resource", c.Resource, "err", err)
			j.due = true // save writes the journal anew as soon as it can
		}
	}
}

func (j *journal) append(c state.Allocation) error {
	err := j.store.Append(c)
	if err == nil {
		j.written++
	}
	return err
}

// trim drops all allocations but need from the journal, if that is worth it.
func (j *journal) trim(need []state.Allocation) error {
	if !j.due && (j.written == 0 || j.written < trimEvery && len(need) > 0) {
		return nil
	}
	j.written = 0
	if err := j.store.Keep(need); err != nil {
		return err
	}
	j.due = false
	return nil
}

// recordOf returns the journal's record of an allocation. It has no time if the allocation was
// adopted, since that is not known. The next process then adopts it, too.
func recordOf(c *ledger.Allocation) state.Allocation {
	record := state.Allocation{Key: c.ID, Record: c.Record()}
	if !c.Adopted {
		record.Allocated = c.Given
	}
	return record
}
