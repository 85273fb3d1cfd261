// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"cmp"
	"slices"
	"sync"

	"example.com/gpu-agent/internal/usage"
)

const (
	// mostNoted bounds the noted records. mostRefused bounds the refusals among them: a quarter,
	// since refused pods cost their tenants nothing.
	mostNoted, mostRefused = 1000, 250
)

// notes are the records from Note that have not been taken. If there are too many, the owner with
// the most loses the newest one. The zero value is empty.
type notes struct {
	mu sync.Mutex
	// Guarded by mu:
	use, refused queue
	seq          uint64
	missed       int // records that did not fit
}

// queue is a part of notes with its own bound.
type queue struct {
	of map[usage.Owner][]note
	n  int
}

type note struct {
	seq uint64
	usage.Record
}

// add adds a record. It returns false if this record is lost, or another one in its place.
func (n *notes) add(r usage.Record) (fits bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.seq++
	o := usage.Owner{Refused: r.Event == usage.Refused, Namespace: r.Namespace}
	if o.Refused {
		fits = n.refused.add(o, note{n.seq, r}, mostRefused)
	} else {
		fits = n.use.add(o, note{n.seq, r}, mostNoted-mostRefused)
	}
	if !fits {
		n.missed++
	}
	return fits
}

func (q *queue) add(o usage.Owner, r note, most int) bool {
	fits := q.n < most
	if !fits {
		longest := o
		for p := range q.of {
			c := cmp.Compare(len(q.of[p]), len(q.of[longest]))
			if c > 0 || c == 0 && p != o && longest != o && p.Compare(longest) < 0 {
				longest = p
			}
		}
		if longest == o {
			return false
		}
		last := len(q.of[longest]) - 1
		q.of[longest][last] = note{}
		q.of[longest] = q.of[longest][:last]
		q.n--
	}
	if q.of == nil {
		q.of = map[usage.Owner][]note{}
	}
	q.of[o] = append(q.of[o], r)
	q.n++
	return fits
}

// take returns the records in the order of their arrival, and forgets them.
func (n *notes) take() []usage.Record {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := make([]note, 0, n.use.n+n.refused.n)
	for _, q := range []*queue{&n.use, &n.refused} {
		for _, of := range q.of {
			all = append(all, of...)
		}
		*q = queue{}
	}
	slices.SortFunc(all, func(a, b note) int { return cmp.Compare(a.seq, b.seq) })
	out := make([]usage.Record, len(all))
	for i := range all {
		out[i] = all[i].Record
	}
	return out
}

// takeMissed returns how many records were lost since its last call.
func (n *notes) takeMissed() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	missed := n.missed
	n.missed = 0
	return missed
}
