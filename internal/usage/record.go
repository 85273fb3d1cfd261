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

// Version is the version of the records. Readers refuse a segment of a newer one.
const Version = 1

// Event is the kind of a record.
type Event string

// Events; the package's comment has an example of each.
const (
	Began     Event = "began"
	Started   Event = "started"
	Allocated Event = "allocated"
	Named     Event = "held"
	Used      Event = "used"
	Yielded   Event = "yielded"
	Restored  Event = "restored"
	Parked    Event = "parked"
	Unparked  Event = "unparked"
	Released  Event = "released"
	Refused   Event = "refused"
	Cut       Event = "cut"
	Killed    Event = "killed"
	Evicted   Event = "evicted"
	Lost      Event = "lost"
	Left      Event = "left-out"
)

// Record is one line of the journal. Event decides which fields are set.
type Record struct {
	Time  time.Time `json:"time"`
	Event Event     `json:"event"`
	// Grant is the number of the grant; 0 if the record is about none.
	Grant uint64 `json:"grant,omitempty"`
	// Allocation, FrontEnd, Tier and Resource are the ledger's; records of versions without tiers have none, which is
	// the guaranteed tier. Count is how many devices the pod
	// asked for, and Pieces what it got; Count is also the number of records in "lost" and
	// "left-out". Adopted is true if the grant is older than the record: the agent that made it
	// ended before it could write it.
	Allocation string          `json:"allocation,omitempty"`
	FrontEnd   ledger.FrontEnd `json:"frontEnd,omitempty"`
	Tier       ledger.Tier     `json:"tier,omitempty"`
	Resource   string          `json:"resource,omitempty"`
	Count      int             `json:"count,omitempty"`
	Pieces     []Piece         `json:"pieces,omitempty"`
	Adopted    bool            `json:"adopted,omitempty"`
	Holder
	// GPU and Index name the GPU of a refusal, a cut or a kill.
	GPU   gpu.UUID `json:"gpu,omitempty"`
	Index *int     `json:"index,omitempty"`
	// Op and Placement are set for a cut: "create" and "3g.40gb@4".
	Op        string        `json:"op,omitempty"`
	Placement string        `json:"placement,omitempty"`
	Reason    status.Reason `json:"reason,omitempty"`
	Message   string        `json:"message,omitempty"`
	// Of and Before are set for "left-out". Of is Refused if refusals were left out, and empty
	// for other records. Before is the time of the last record that was left out.
	Of     Event     `json:"of,omitempty"`
	Before time.Time `json:"before,omitzero"`
	Used   []Use     `json:"used,omitempty"`
	// MiB is what was moved to the host, for "parked".
	MiB  uint64 `json:"mib,omitempty"`
	Book *State `json:"book,omitempty"`
}

// Holder is the container that a grant belongs to. All fields are empty while it is not known.
type Holder struct {
	Namespace string `json:"namespace,omitempty"`
	Pod       string `json:"pod,omitempty"`
	UID       string `json:"uid,omitempty"`
	Container string `json:"container,omitempty"`
	// Labels are the pod's labels that --usage-labels names.
	Labels map[string]string `json:"labels,omitempty"`
}

// Same reports whether two holders are the same container. It ignores labels.
func (h *Holder) Same(o *Holder) bool {
	return h.Namespace == o.Namespace && h.Pod == o.Pod && h.UID == o.UID && h.Container == o.Container
}

// Use is how much a grant's containers have used a GPU since the grant began.
type Use struct {
	Grant uint64 `json:"grant"`
	// GPU is the GPU's index.
	GPU int `json:"gpu"`
	// MiBMs is memory in MiB times milliseconds. BusyMs is the milliseconds with a process on
	// the GPU. SMMs is the milliseconds of all its streaming multiprocessors; nil if the driver
	// has not reported them.
	MiBMs  uint64  `json:"mibMs"`
	BusyMs uint64  `json:"busyMs"`
	SMMs   *uint64 `json:"smMs,omitempty"`
	// Idle is the time since which no process has been on the GPU, to the second; zero while
	// one is.
	Idle time.Time `json:"idle,omitzero"`
}

// State is a book as a record holds it.
type State struct {
	Version int `json:"version"`
	// Next is the number of the next grant.
	Next   uint64   `json:"next"`
	Open   []*Grant `json:"open,omitempty"`
	Series []Past   `json:"series,omitempty"`
}

// Round cuts the time to milliseconds. The times of the ledger stay whole, and so does that of
// a book, since readers ignore a book that is older than a record they have.
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

// Parse reads a line, with or without its newline. It returns nil if the line is not a record.
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
