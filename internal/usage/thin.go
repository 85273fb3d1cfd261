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

// thinned is how long apart the records of use are that are kept of segments that are over.
const thinned = 3 * time.Hour

// Copier writes segments that are over, one after another, as one. All is kept but most of
// the records of use, whose totals are cumulative: the last of each three hours tells what the
// others do. Lines that are no records are left out, so is what ended containers come to,
// which is for the process after, and so is what an [Omit] says. It weighs what it writes.
// Use [NewCopier].
type Copier struct {
	to io.Writer
	// last is what was used until at, since the time since.
	last      map[place]Use
	since, at time.Time
	// of has the last grant of each allocation.
	of    map[string]uint64
	out   []byte
	weigh scale
	left  Dropped
}

// Omit says what of a segment is not copied.
type Omit struct {
	// Trims are what goes of owners, and Survey what the segment has; both are nil where all
	// stays.
	Trims  map[Owner]Trim
	Survey *Survey
	// Joined leaves out the book that the segment begins with: the segment before, which was
	// copied, leads to it.
	Joined bool
}

type place struct {
	grant uint64
	gpu   int
}

// NewCopier returns a copier that writes to a writer, a line at a time.
func NewCopier(to io.Writer) *Copier {
	return &Copier{to: to, last: map[place]Use{}, of: map[string]uint64{}, weigh: newScale(), left: Dropped{}}
}

// Copy copies a segment. After an error that wraps [ErrRead] all is copied that could be read.
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
				c.weigh.meet(r) // what it calls the grants counts on
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

// ErrRead says that a segment could not be read to its end.
var ErrRead = errors.New("read a segment")

// Close writes what is still to be written. It returns what the copy weighs, and what was
// left out of it by trims.
func (c *Copier) Close() (Weights, Dropped, error) {
	err := c.flush()
	return c.weigh.weights(), c.left, err
}

func (c *Copier) begins(r *Record) {
	for _, g := range r.Book.open() {
		c.of[g.Allocation] = g.Number
	}
}

func (c *Copier) record(r *Record, line []byte) error {
	if len(c.last) > 0 && r.Time.Sub(c.since) >= thinned {
		if err := c.flush(); err != nil {
			return err
		}
	}
	switch r.Event {
	case Began:
		c.begins(r)
	case Allocated:
		if old := c.of[r.Allocation]; old != 0 && c.has(old) { // it ends here: its release was lost
			if err := c.flush(); err != nil {
				return err
			}
		}
		c.of[r.Allocation] = r.Grant
	case Used:
		if len(c.last) == 0 {
			c.since = r.Time
		}
		for _, u := range r.Used {
			c.last[place{u.Grant, u.GPU}] = u
		}
		c.at = r.Time
		return nil
	case Released: // has the last of its own
		for _, u := range r.Used {
			delete(c.last, place{u.Grant, u.GPU})
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
	for p := range c.last {
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

// flush writes what was used until now.
func (c *Copier) flush() error {
	if len(c.last) == 0 {
		return nil
	}
	r := Record{Time: c.at, Event: Used, Used: slices.SortedFunc(maps.Values(c.last), func(a, b Use) int {
		return cmp.Or(cmp.Compare(a.Grant, b.Grant), cmp.Compare(a.GPU, b.GPU))
	})}
	clear(c.last)
	var err error
	if c.out, err = r.Append(c.out[:0]); err != nil {
		return err
	}
	return c.write(&r, c.out)
}
