// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"bufio"
	"bytes"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
)

// Owner is what a record counts against when the journal is full: a namespace, or a namespace's
// refusals. The zero value is the node. It owns changes of GPUs, and grants whose holder was
// never named.
type Owner struct {
	Refused   bool
	Namespace string
}

// refusedMark begins the text of an owner of refusals. No namespace can contain it.
const refusedMark = "!"

// MarshalText implements encoding.TextMarshaler.
func (o Owner) MarshalText() ([]byte, error) {
	if o.Refused {
		return []byte(refusedMark + o.Namespace), nil
	}
	return []byte(o.Namespace), nil
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (o *Owner) UnmarshalText(text []byte) error {
	o.Namespace, o.Refused = strings.CutPrefix(string(text), refusedMark)
	return nil
}

// Compare orders owners by namespace, those of refusals last.
func (o Owner) Compare(p Owner) int {
	if o.Refused != p.Refused {
		if o.Refused {
			return 1
		}
		return -1
	}
	return strings.Compare(o.Namespace, p.Namespace)
}

// owner returns the owner of a record; names maps a grant's number to its namespace. A record
// of use has several owners, and a book has none: do not call it for these.
func (r *Record) owner(names map[uint64]string) Owner {
	switch {
	case r.Event == Refused || r.Event == Left && r.Of == Refused:
		return Owner{Refused: true, Namespace: r.Namespace}
	case r.Namespace != "":
		return Owner{Namespace: r.Namespace}
	}
	return Owner{Namespace: names[r.Grant]}
}

// Weight is how much of a segment an owner has.
type Weight struct {
	// Bytes is the length of the owner's lines, before compression. Records is their number,
	// without records of use and books.
	Bytes   int64 `json:"b,omitempty"`
	Records int   `json:"n,omitempty"`
	// Open is true if the owner had an open grant when the segment began.
	Open bool `json:"o,omitempty"`
}

// Weights are the weights of all owners in a segment. Bytes is the length of all lines, with
// books, and Until is the time of the last record.
type Weights struct {
	Bytes int64            `json:"raw"`
	Until time.Time        `json:"until"`
	Of    map[Owner]Weight `json:"of"`
}

// weigher computes the weights of records. A grant is often named after its first line, so its
// lines are counted by its number until all records have been seen.
type weigher struct {
	w      Weights
	names  map[uint64]string
	grants map[uint64]Weight
	seen   bool
}

func newWeigher() weigher {
	return weigher{w: Weights{Of: map[Owner]Weight{}}, names: map[uint64]string{}, grants: map[uint64]Weight{}}
}

// learn notes the namespaces of grants in a record.
func (s *weigher) learn(r *Record) { learn(s.names, r) }

func learn(names map[uint64]string, r *Record) {
	for _, g := range r.Book.open() {
		if g.Namespace != "" {
			names[g.Number] = g.Namespace
		}
	}
	if r.Grant != 0 && r.Namespace != "" {
		names[r.Grant] = r.Namespace
	}
}

func (s *weigher) add(r *Record, size int) {
	s.learn(r)
	s.w.Bytes += int64(size)
	if r.Time.After(s.w.Until) {
		s.w.Until = r.Time
	}
	count := func(w Weight) Weight {
		w.Bytes, w.Records = w.Bytes+int64(size), w.Records+1
		return w
	}
	switch {
	case r.Event == Began:
		for _, g := range r.Book.open() {
			w := s.grants[g.Number]
			w.Open = w.Open || !s.seen // a later book opens no grant that was not there before
			s.grants[g.Number] = w
		}
	case r.Event == Used:
		for i := range r.Used {
			w := s.grants[r.Used[i].Grant]
			w.Bytes += int64(size / len(r.Used))
			s.grants[r.Used[i].Grant] = w
		}
	case r.Grant != 0:
		s.grants[r.Grant] = count(s.grants[r.Grant])
	default:
		o := r.owner(nil)
		s.w.Of[o] = count(s.w.Of[o])
	}
	s.seen = true
}

func (s *weigher) weights() Weights {
	out := s.w
	out.Of = maps.Clone(s.w.Of)
	for n, g := range s.grants {
		o := Owner{Namespace: s.names[n]}
		w := out.Of[o]
		w.Bytes, w.Records, w.Open = w.Bytes+g.Bytes, w.Records+g.Records, w.Open || g.Open
		out.Of[o] = w
	}
	return out
}

// Survey holds what a copier must know about a segment before it leaves out parts of it: the
// namespaces of grants, and which grants began and ended there.
type Survey struct {
	names        map[uint64]string
	began, ended map[uint64]bool
}

// ofGrants are texts in lines that tell about grants. Other lines need not be parsed: in a
// flood of refusals that is most of them.
var ofGrants = [][]byte{
	[]byte(`"event":"began"`), []byte(`"event":"allocated"`), []byte(`"event":"held"`),
	[]byte(`"event":"released"`),
}

// NewSurvey reads a segment, to its end or to the first error.
func NewSurvey(from io.Reader) *Survey {
	s := &Survey{names: map[uint64]string{}, began: map[uint64]bool{}, ended: map[uint64]bool{}}
	lines := bufio.NewReader(from)
	for {
		line, err := lines.ReadBytes('\n')
		if slices.ContainsFunc(ofGrants, func(e []byte) bool { return bytes.Contains(line, e) }) {
			if r := Parse(line); r != nil {
				learn(s.names, r)
				switch r.Event {
				case Allocated:
					s.began[r.Grant] = true
				case Released:
					s.ended[r.Grant] = true
				}
			}
		}
		if err != nil {
			return s
		}
	}
}

// Trim is which of an owner's lines are left out of a segment. If All is true, all of them go,
// and also the owner's grants in the book. Otherwise about Bytes of the oldest lines go.
//
// A trim by Bytes removes only grants that began and ended in the segment: a grant that goes on
// must keep its beginning. For grants without a namespace in this segment that holds even if
// All is true: the next segment may name their holder.
type Trim struct {
	All   bool
	Bytes int64
}

// Dropped is what was left out, by owner.
type Dropped map[Owner]Loss

// Loss is how many records an owner has lost, and the time of the last of them.
type Loss struct {
	Records int
	Before  time.Time
}

// Add adds a loss to an owner's.
func (d Dropped) Add(o Owner, l Loss) {
	old := d[o]
	if l.Before.Before(old.Before) {
		l.Before = old.Before
	}
	l.Records += old.Records
	d[o] = l
}

// Noting returns a function that adds the losses in "left-out" records to d, and calls apply.
func (d Dropped) Noting(apply func(*Record)) func(*Record) {
	return func(r *Record) {
		if r.Event == Left {
			d.Add(Owner{Refused: r.Of == Refused, Namespace: r.Namespace}, Loss{Records: r.Count, Before: r.Before})
		}
		apply(r)
	}
}

// Records returns one "left-out" record for each owner. The records have no time yet.
func (d Dropped) Records() (out []Record) {
	for _, o := range slices.SortedFunc(maps.Keys(d), Owner.Compare) {
		r := Record{Event: Left, Count: d[o].Records, Before: d[o].Before, Holder: Holder{Namespace: o.Namespace}}
		if o.Refused {
			r.Of = Refused
		}
		out = append(out, r)
	}
	return out
}

// filter applies an [Omit] to the records of a segment.
type filter struct {
	Omit
	left    map[Owner]int64 // bytes that are still to be left out
	gone    map[uint64]bool // grants whose lines are left out
	dropped Dropped
}

// record reports whether a record stays. If only a part of it stays, it changes the record or
// its line.
func (f *filter) record(r *Record, line *[]byte) bool {
	switch {
	case r.Event == Began:
		f.book(r, line)
		return true
	case len(f.Trims) == 0:
		return true
	case r.Event == Used:
		had := len(r.Used)
		r.Used = slices.DeleteFunc(r.Used, func(u Use) bool {
			return f.gone[u.Grant] || f.all(u.Grant)
		})
		return len(r.Used) > 0 || had == 0
	}
	o := r.owner(f.Survey.names)
	trim, trimmed := f.Trims[o]
	switch {
	case !trimmed:
		return true
	case trim.All && (r.Grant == 0 || f.all(r.Grant)):
	case r.Event == Allocated && (trim.All || f.left[o] > 0) && f.Survey.began[r.Grant] && f.Survey.ended[r.Grant]:
		f.gone[r.Grant] = true
	case r.Grant != 0 && !f.gone[r.Grant], r.Grant == 0 && f.left[o] <= 0:
		return true
	}
	f.left[o] -= int64(len(*line))
	l := Loss{Records: 1, Before: r.Time}
	if r.Event == Left { // the records that it counts are still lost
		l = Loss{Records: r.Count, Before: r.Before}
	}
	f.dropped.Add(o, l)
	return false
}

// all reports whether everything of a grant goes: its namespace is known, and is trimmed whole.
func (f *filter) all(grant uint64) bool {
	name := f.Survey.names[grant]
	return name != "" && f.Trims[Owner{Namespace: name}].All
}

// book removes the trimmed grants, and the totals of ended containers, from a record of a book.
func (f *filter) book(r *Record, line *[]byte) {
	if r.Book == nil || len(r.Book.Series) == 0 && len(f.Trims) == 0 {
		return
	}
	r.Book.Series = nil
	if len(f.Trims) > 0 {
		r.Book.Open = slices.DeleteFunc(r.Book.Open, func(g *Grant) bool {
			return f.all(g.Number)
		})
	}
	if out, err := r.Append(nil); err == nil {
		*line = out
	}
}

// WithoutSeries returns a book's line without the totals of ended containers. It returns any
// other line unchanged.
func WithoutSeries(line []byte) []byte {
	if r := Parse(line); r != nil && r.Event == Began {
		(&filter{}).book(r, &line)
	}
	return line
}
