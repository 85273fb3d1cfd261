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

// Owner is whose part of the journal a record takes: a namespace's, of which what was refused
// is counted for itself. The zero value is the node, which has what is nobody's: changes of
// GPUs, and grants whose holder was not named.
type Owner struct {
	Refused   bool
	Namespace string
}

// refusedMark is no letter of a namespace.
const refusedMark = "!"

// MarshalText is encoding.TextMarshaler's.
func (o Owner) MarshalText() ([]byte, error) {
	if o.Refused {
		return []byte(refusedMark + o.Namespace), nil
	}
	return []byte(o.Namespace), nil
}

// UnmarshalText is encoding.TextUnmarshaler's.
func (o *Owner) UnmarshalText(text []byte) error {
	o.Namespace, o.Refused = strings.CutPrefix(string(text), refusedMark)
	return nil
}

// Compare orders owners.
func (o Owner) Compare(p Owner) int {
	if o.Refused != p.Refused {
		if o.Refused {
			return 1
		}
		return -1
	}
	return strings.Compare(o.Namespace, p.Namespace)
}

// owner is whose a record is, where names has the namespaces of grants. A record of use is
// several owners', and a book is nobody's.
func (r *Record) owner(names map[uint64]string) Owner {
	switch {
	case r.Event == Refused || r.Event == Left && r.Of == Refused:
		return Owner{Refused: true, Namespace: r.Namespace}
	case r.Namespace != "":
		return Owner{Namespace: r.Namespace}
	}
	return Owner{Namespace: names[r.Grant]}
}

// Weight is what an owner has of a segment.
type Weight struct {
	// Bytes are those of its lines, as they were before the segment was compressed, and
	// Records how many those are. Records of use and books are not counted.
	Bytes   int64 `json:"b,omitempty"`
	Records int   `json:"n,omitempty"`
	// Open says that a grant of the owner was open when the segment began.
	Open bool `json:"o,omitempty"`
}

// Weights are what a segment has of everybody. Bytes are all of its bytes, books included,
// and Until is the time of its last record.
type Weights struct {
	Bytes int64            `json:"raw"`
	Until time.Time        `json:"until"`
	Of    map[Owner]Weight `json:"of"`
}

// scale weighs records. A grant is often named after its first line, so that the lines of
// grants are kept by their numbers until all have been seen.
type scale struct {
	w      Weights
	names  map[uint64]string
	grants map[uint64]Weight
	seen   bool
}

func newScale() scale {
	return scale{w: Weights{Of: map[Owner]Weight{}}, names: map[uint64]string{}, grants: map[uint64]Weight{}}
}

// meet learns what a record calls the grants.
func (s *scale) meet(r *Record) { learn(s.names, r) }

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

func (s *scale) add(r *Record, size int) {
	s.meet(r)
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
			w.Open = w.Open || !s.seen // a book in the middle opens nothing that was not there
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

func (s *scale) weights() Weights {
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

// Survey is what has to be known of a segment before some of it is left out.
type Survey struct {
	names        map[uint64]string
	began, ended map[uint64]bool
}

// ofGrants are in lines that tell something of grants: others need not be read, and most lines
// of a flood are others.
var ofGrants = [][]byte{
	[]byte(`"event":"began"`), []byte(`"event":"allocated"`), []byte(`"event":"held"`),
	[]byte(`"event":"released"`),
}

// NewSurvey reads a segment, to its end or as far as it can be read.
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

// Trim is what goes of an owner's lines in a segment: all of them, and its grants in the book
// too, or about so many bytes of the oldest. Then what goes of grants is those that began and
// ended in the segment: one that goes on must not lose its beginning. The same holds of grants
// that are nobody's in this segment, however much goes: they may be named in the next one.
type Trim struct {
	All   bool
	Bytes int64
}

// Dropped is what was left out for owners.
type Dropped map[Owner]Loss

// Loss is how many records an owner has lost, and the time of the last of them.
type Loss struct {
	Records int
	Before  time.Time
}

// Add adds a loss.
func (d Dropped) Add(o Owner, l Loss) {
	old := d[o]
	if l.Before.Before(old.Before) {
		l.Before = old.Before
	}
	l.Records += old.Records
	d[o] = l
}

// Noting returns apply, with what records tell of losses added to these.
func (d Dropped) Noting(apply func(*Record)) func(*Record) {
	return func(r *Record) {
		if r.Event == Left {
			d.Add(Owner{Refused: r.Of == Refused, Namespace: r.Namespace}, Loss{Records: r.Count, Before: r.Before})
		}
		apply(r)
	}
}

// Records are the lines that tell of what was left out, by owner. They have no time yet.
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

// filter leaves out of a segment what its trims say.
type filter struct {
	Omit
	left    map[Owner]int64 // bytes that still go
	gone    map[uint64]bool // grants whose lines go
	dropped Dropped
}

// record reports whether a record stays. Where only a part of it does, it changes the record
// and its line.
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
	if r.Event == Left { // what it counted is still lost
		l = Loss{Records: r.Count, Before: r.Before}
	}
	f.dropped.Add(o, l)
	return false
}

// all reports whether all goes that is known of a grant.
func (f *filter) all(grant uint64) bool {
	name := f.Survey.names[grant]
	return name != "" && f.Trims[Owner{Namespace: name}].All
}

// book takes out of a book what is trimmed.
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

// WithoutSeries is the line of a book without what ended containers come to. A line that is
// none stays as it is.
func WithoutSeries(line []byte) []byte {
	if r := Parse(line); r != nil && r.Event == Began {
		(&filter{}).book(r, &line)
	}
	return line
}
