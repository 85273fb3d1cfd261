// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"
)

// keptEvery is the time between two records of use that a copy keeps.
const keptEvery = 3 * time.Hour

// Copier copies closed segments, one after another, into one. It keeps all records, except for
// most of those of use: their totals are cumulative, so the last one of each three hours is
// enough. It leaves out lines that are not records, what [Omit] names, and the totals of ended
// containers, which only a starting agent needs. It weighs what it writes. Use [NewCopier].
type Copier struct {
	to io.Writer
	// pending holds the use up to at that is not written yet; the first of it came at since.
	pending   map[useKey]Use
	since, at time.Time
	// lastGrant maps an allocation to its last grant.
	lastGrant map[string]uint64
	out       []byte
	weigh     weigher
	left      Dropped
}

// Omit is what to leave out of a segment.
type Omit struct {
	// Trims has what is left out for each owner, and Survey describes the segment. Both are nil
	// if all owners keep everything.
	Trims  map[Owner]Trim
	Survey *Survey
	// Joined is true if the segment continues the one that was copied last. The book at its
	// beginning is then left out, since the earlier records lead to it.
	Joined bool
}

type useKey struct {
	grant uint64
	gpu   int
}

// NewCopier returns a copier that writes to a writer, one line at a time.
func NewCopier(to io.Writer) *Copier {
	return &Copier{
		to: to, pending: map[useKey]Use{}, lastGrant: map[string]uint64{}, weigh: newWeigher(), left: Dropped{},
	}
}

// Copy copies a segment. If the error wraps [ErrRead], the segment could not be read to its
// end, and all up to there was copied.
func (c *Copier) Copy(from io.Reader, p Omit) error {
	f := filter{Omit: p, left: map[Owner]int64{}, gone: map[uint64]bool{}, dropped: c.left}
	for o, trim := range p.Trims {
		f.left[o] = trim.Bytes
	}
	lines := bufio.NewReader(from)
	for first := true; ; {
		line, err := lines.ReadBytes('\n')
		if r := Parse(line); r != nil {
			kept := f.record(r, &line)
			if first && p.Joined && r.Event == Began {
				c.weigh.learn(r) // later records need the namespaces in it
				c.begins(r)
				kept = false
			}
			if first = false; kept {
				if werr := c.record(r, line); werr != nil {
					return werr
				}
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%w: %w", ErrRead, err)
		}
	}
}

// ErrRead is the error for a segment that could not be read to its end.
var ErrRead = errors.New("read a segment")

// Close writes the last record of use. It returns the weights of what was written, and what the
// trims left out.
func (c *Copier) Close() (Weights, Dropped, error) {
	err := c.flush()
	return c.weigh.weights(), c.left, err
}

func (c *Copier) begins(r *Record) {
	for _, g := range r.Book.open() {
		c.lastGrant[g.Allocation] = g.Number
	}
}

func (c *Copier) record(r *Record, line []byte) error {
	if len(c.pending) > 0 && r.Time.Sub(c.since) >= keptEvery {
		if err := c.flush(); err != nil {
			return err
		}
	}
	switch r.Event {
	case Began:
		c.begins(r)
	case Allocated:
		if old := c.lastGrant[r.Allocation]; old != 0 && c.has(old) { // it ends here: its release was lost
			if err := c.flush(); err != nil {
				return err
			}
		}
		c.lastGrant[r.Allocation] = r.Grant
	case Used:
		if len(c.pending) == 0 {
			c.since = r.Time
		}
		for _, u := range r.Used {
			c.pending[useKey{u.Grant, u.GPU}] = u
		}
		c.at = r.Time
		return nil
	case Released: // has the last use of the grant
		for _, u := range r.Used {
			delete(c.pending, useKey{u.Grant, u.GPU})
		}
	}
	return c.write(r, append(bytes.TrimRight(line, "\n"), '\n'))
}

func (c *Copier) write(r *Record, line []byte) error {
	c.weigh.add(r, len(line))
	if _, err := c.to.Write(line); err != nil {
		return fmt.Errorf("write a segment: %w", err)
	}
	return nil
}

func (c *Copier) has(grant uint64) bool {
	for p := range c.pending {
		if p.grant == grant {
			return true
		}
	}
	return false
}

func (s *State) open() []*Grant {
	if s == nil {
		return nil
	}
	return s.Open
}

// flush writes the use that is not written yet, as one record.
func (c *Copier) flush() error {
	if len(c.pending) == 0 {
		return nil
	}
	r := Record{Time: c.at, Event: Used, Used: slices.SortedFunc(maps.Values(c.pending), func(a, b Use) int {
		return cmp.Or(cmp.Compare(a.Grant, b.Grant), cmp.Compare(a.GPU, b.GPU))
	})}
	clear(c.pending)
	var err error
	if c.out, err = r.Append(c.out[:0]); err != nil {
		return err
	}
	return c.write(&r, c.out)
}
