// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"log/slog"
	"sync"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/state"
)

// trimEvery is after how many lines the journal is replaced by one with the allocations
// that need it, where some always do.
const trimEvery = 256

// journal is the agent's memory on disk. It writes allocations down of which no file tells yet.
// note is for anybody, all else for the loop's goroutine.
type journal struct {
	store Store
	// boot is Options.Boot.
	boot   string
	log    *slog.Logger
	ration *brief.Ration

	mu    sync.Mutex
	noted []state.Allocation // guarded by mu; not yet written down

	// released is how many allocations had ended when the last round looked.
	released uint64
	written  int // lines since the journal was last replaced
	// due says that it lacks an allocation, or has one that has ended, which a successor would
	// take for a holder.
	due bool
}

// note takes down an allocation, which write writes down.
func (j *journal) note(c *ledger.Allocation) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.noted = append(j.noted, recordOf(c))
}

// write writes the allocations down that were noted since the last time.
func (j *journal) write() {
	j.mu.Lock()
	noted := j.noted
	j.noted = nil
	j.mu.Unlock()
	for _, c := range noted {
		if err := j.append(c); err != nil {
			j.ration.Log(slog.LevelWarn, "cannot write an allocation down; the kubelet's checkpoint must do", nil,
				"resource", c.Resource, "err", err)
			j.due = true // the journal is written anew, as soon as that can be done
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

// trim drops from the journal all but these, where that is worth it.
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

// recordOf is what the journal says of an allocation. When one that was adopted was
// allocated is not known; zero has the next process adopt it too.
func recordOf(c *ledger.Allocation) state.Allocation {
	record := state.Allocation{Key: c.ID, Record: c.Record()}
	if !c.Adopted {
		record.Allocated = c.Given
	}
	return record
}
