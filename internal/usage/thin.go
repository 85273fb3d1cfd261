// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"
)

// thinned is how long apart the records of use are that are kept of a segment that is over.
const thinned = 3 * time.Hour

// Thin copies a segment. All is kept but most of the records of use: their totals are
// cumulative, so the last of each three hours tells what the others do. Lines that are no records
// are left out.
func Thin(from io.Reader, to io.Writer) error {
	t := thinner{to: to, last: map[place]Use{}, of: map[string]uint64{}}
	lines := bufio.NewReader(from)
	for {
		line, err := lines.ReadBytes('\n')
		if werr := t.line(line); werr != nil {
			return werr
		}
		if errors.Is(err, io.EOF) {
			return t.flush()
		}
		if err != nil {
			return fmt.Errorf("read a segment: %w", err)
		}
	}
}

type place struct {
	grant uint64
	gpu   int
}

type thinner struct {
	to io.Writer
	// last is what was used until at, since the time since.
	last      map[place]Use
	since, at time.Time
	// of has the last grant of each allocation.
	of  map[string]uint64
	out []byte
}

func (t *thinner) line(line []byte) error {
	r := Parse(line)
	if r == nil {
		return nil
	}
	if len(t.last) > 0 && r.Time.Sub(t.since) >= thinned {
		if err := t.flush(); err != nil {
			return err
		}
	}
	switch r.Event {
	case Began:
		for _, g := range r.Book.open() {
			t.of[g.Allocation] = g.Number
		}
	case Allocated:
		if old := t.of[r.Allocation]; old != 0 && t.has(old) { // it ends here: its release was lost
			if err := t.flush(); err != nil {
				return err
			}
		}
		t.of[r.Allocation] = r.Grant
	case Used:
		if len(t.last) == 0 {
			t.since = r.Time
		}
		for _, u := range r.Used {
			t.last[place{u.Grant, u.GPU}] = u
		}
		t.at = r.Time
		return nil
	case Released: // has the last of its own
		for _, u := range r.Used {
			delete(t.last, place{u.Grant, u.GPU})
		}
	}
	if _, err := t.to.Write(append(bytes.TrimRight(line, "\n"), '\n')); err != nil {
		return fmt.Errorf("write a segment: %w", err)
	}
	return nil
}

func (t *thinner) has(grant uint64) bool {
	for p := range t.last {
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
func (t *thinner) flush() error {
	if len(t.last) == 0 {
		return nil
	}
	r := Record{Time: t.at, Event: Used}
	for _, u := range t.last {
		r.Used = append(r.Used, u)
	}
	slices.SortFunc(r.Used, func(a, b Use) int { return cmp.Or(cmp.Compare(a.Grant, b.Grant), cmp.Compare(a.GPU, b.GPU)) })
	clear(t.last)
	var err error
	if t.out, err = r.Append(t.out[:0]); err != nil {
		return err
	}
	if _, err := t.to.Write(t.out); err != nil {
		return fmt.Errorf("write a segment: %w", err)
	}
	return nil
}
