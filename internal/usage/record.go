// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// Version is that of the records. A segment of a newer one is not read.
const Version = 1

// Event says what a record is about.
type Event string

// Events; see the package's comment.
const (
	Began     Event = "began"
	Started   Event = "started"
	Allocated Event = "allocated"
	Named     Event = "held"
	Used      Event = "used"
	Released  Event = "released"
	Refused   Event = "refused"
	Cut       Event = "cut"
	Killed    Event = "killed"
	Evicted   Event = "evicted"
	Lost      Event = "lost"
	Left      Event = "left-out"
)

// Record is one line of the journal. Which fields count depends on Event.
type Record struct {
	Time  time.Time `json:"time"`
	Event Event     `json:"event"`
	// Grant is the number of the grant that it is about.
	Grant uint64 `json:"grant,omitempty"`
	// Allocation, FrontEnd and Resource are the ledger's, Count is how many devices were
	// asked for, and Pieces what was given. Adopted says that the grant is older: its agent
	// was ended before it had written it down.
	Allocation string          `json:"allocation,omitempty"`
	FrontEnd   ledger.FrontEnd `json:"frontEnd,omitempty"`
	Resource   string          `json:"resource,omitempty"`
	Count      int             `json:"count,omitempty"`
	Pieces     []Piece         `json:"pieces,omitempty"`
	Adopted    bool            `json:"adopted,omitempty"`
	Holder
	// GPU and Index are those that a refusal, a cut or a kill is about.
	GPU   gpu.UUID `json:"gpu,omitempty"`
	Index *int     `json:"index,omitempty"`
	// Op and Placement are a cut's: "create" and "3g.40gb@4".
	Op        string        `json:"op,omitempty"`
	Placement string        `json:"placement,omitempty"`
	Reason    status.Reason `json:"reason,omitempty"`
	Message   string        `json:"message,omitempty"`
	// Of and Before are of what was left out of the journal: Refused where that is what it
	// tells of, and the time of the last of those records.
	Of     Event     `json:"of,omitempty"`
	Before time.Time `json:"before,omitzero"`
	Used   []Use     `json:"used,omitempty"`
	Book   *State    `json:"book,omitempty"`
}

// Holder is whose something is. All of it is empty where nobody has named one.
type Holder struct {
	Namespace string `json:"namespace,omitempty"`
	Pod       string `json:"pod,omitempty"`
	UID       string `json:"uid,omitempty"`
	Container string `json:"container,omitempty"`
	// Labels are those of the pod that --usage-labels names.
	Labels map[string]string `json:"labels,omitempty"`
}

// Same reports whether two holders are one container, whatever their labels are.
func (h *Holder) Same(o *Holder) bool {
	return h.Namespace == o.Namespace && h.Pod == o.Pod && h.UID == o.UID && h.Container == o.Container
}

// Use is what a grant's containers have used of a GPU since the grant began.
type Use struct {
	Grant uint64 `json:"grant"`
	// GPU is the GPU's index.
	GPU int `json:"gpu"`
	// MiBMs is memory in MiB times milliseconds, BusyMs the milliseconds with a process on
	// the GPU, and SMMs those of all its streaming multiprocessors, nil where the driver has
	// not told.
	MiBMs  uint64  `json:"mibMs"`
	BusyMs uint64  `json:"busyMs"`
	SMMs   *uint64 `json:"smMs,omitempty"`
	// Idle is since when no process has been on the GPU, to the second; zero while one is.
	Idle time.Time `json:"idle,omitzero"`
}

// State is a book in a record.
type State struct {
	Version int `json:"version"`
	// Next is the number of the next grant.
	Next   uint64   `json:"next"`
	Open   []*Grant `json:"open,omitempty"`
	Series []Past   `json:"series,omitempty"`
}

// Round drops what is less than a millisecond of times that are not the ledger's. A book's time is
// kept whole, since it vouches for all that is older.
func (r *Record) Round() {
	if r.Time = r.Time.UTC(); r.Event != Allocated && r.Event != Released && r.Event != Began {
		r.Time = r.Time.Truncate(time.Millisecond)
	}
}

// Append adds the record's line to out.
func (r *Record) Append(out []byte) ([]byte, error) {
	r.Round()
	line, err := json.Marshal(r)
	if err != nil {
		return out, fmt.Errorf("write a record of %s: %w", r.Event, err)
	}
	return append(append(out, line...), '\n'), nil
}

// Parse reads a line, with its newline or without. It is nil for a line that is no record.
func Parse(line []byte) *Record {
	if line = bytes.TrimSpace(line); len(line) == 0 {
		return nil
	}
	var r Record
	if json.Unmarshal(line, &r) != nil || r.Event == "" || r.Time.IsZero() {
		return nil
	}
	return &r
}
