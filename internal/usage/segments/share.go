// SPDX-License-Identifier: Apache-2.0

package segments

import (
	"compress/gzip"
	"errors"
	"maps"
	"math"
	"slices"

	"example.com/gpu-agent/internal/usage"
)

const (
	// If the journal is full, a 1/spare part of the room is made free at once, so that the next
	// segments need no work. Refusals keep a 1/ration part of the room if other records need
	// it.
	spare, ration = 8, 8
	// maxTries is how often Tidy shares out the room before it removes the oldest segments
	// whole. The compressed size of an owner's lines is an estimate, so one try may not be
	// enough.
	maxTries = 4
)

// fit makes all segments but the last fit into a room of so many bytes. Owners with more than
// their share lose their oldest lines.
func (s *Store) fit(room int64) error {
	var err error
	var files []info
	for try := 0; try < maxTries && err == nil; try++ {
		total, others, lerr := s.sizes()
		if err = lerr; err != nil || total <= room {
			break
		}
		if files, err = s.infos(); err == nil {
			err = s.rewrite(files, share(files, room-others, try > 0))
		}
	}
	// The bound holds even after an error: others need the disk, too.
	return errors.Join(err, s.bound(room, files))
}

// sizes returns how many bytes all segments but the last take, and how many of these are not
// packed because packing failed.
func (s *Store) sizes() (total, others int64, err error) {
	all, err := list(s.root.FS())
	if err != nil {
		return 0, 0, err
	}
	for _, g := range all.segments {
		if g.n == s.n {
			continue
		}
		stat, err := s.root.Lstat(g.name)
		if err != nil {
			return 0, 0, err
		}
		if total += stat.Size(); !g.packed {
			others += stat.Size()
		}
	}
	return total, others, nil
}

// bound removes the oldest segments, whole, until the rest fits into the room. It counts the
// lost records of those that are in known.
func (s *Store) bound(room int64, known []info) error {
	all, err := list(s.root.FS())
	if err != nil {
		return err
	}
	var errs []error
	for _, g := range slices.Backward(all.segments) {
		if g.n == s.n {
			continue
		}
		stat, err := s.root.Lstat(g.name)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if room -= stat.Size(); room >= 0 {
			continue
		}
		f := info{segment: g}
		if i := slices.IndexFunc(known, func(k info) bool { return k.n == g.n }); i >= 0 {
			f = known[i]
		}
		errs = append(errs, s.drop(f))
	}
	return errors.Join(errs...)
}

// share returns what to trim in each segment, by owner. Refusals go first, until they fit
// into their ration. Then the other owners are cut down to one level; an owner below it
// loses nothing. The oldest lines of an owner go first. The last segment that is needed loses
// only a part of them, unless coarse is true.
func share(files []info, room int64, coarse bool) []map[usage.Owner]usage.Trim {
	held := [2]map[usage.Owner]int64{{}, {}} // index 0: other records; 1: refusals
	over := -(room - room/spare)
	sum := [2]int64{}
	for i := range files {
		over += files[i].size
		for o := range files[i].Of {
			n := files[i].packedOf(o)
			held[class(o)][o] += n
			sum[class(o)] += n
		}
	}
	trims := make([]map[usage.Owner]usage.Trim, len(files))
	for i := range trims {
		trims[i] = map[usage.Owner]usage.Trim{}
	}
	for _, c := range []int{1, 0} {
		most := sum[c]
		if c == 1 {
			most -= room / ration
		}
		take := min(over, most)
		if take <= 0 {
			continue
		}
		over -= take
		least := level(held[c], sum[c]-take)
		for o, n := range held[c] {
			if n > least {
				trim(files, trims, o, n-least, coarse)
			}
		}
	}
	return trims
}

func class(o usage.Owner) int {
	if o.Refused {
		return 1
	}
	return 0
}

// packedOf estimates how many bytes of the packed segment an owner has.
func (i *info) packedOf(o usage.Owner) int64 {
	return int64(float64(i.size) * float64(i.Of[o].Bytes) / float64(max(1, i.Bytes)))
}

// trim marks an owner's records in the oldest segments, about much bytes of them as packed.
func trim(files []info, trims []map[usage.Owner]usage.Trim, o usage.Owner, much int64, coarse bool) {
	for i := range files {
		w, there := files[i].Of[o]
		if !there {
			continue
		}
		if much <= 0 {
			return
		}
		n := files[i].packedOf(o)
		if n <= much || coarse {
			trims[i][o] = usage.Trim{All: true}
		} else {
			trims[i][o] = usage.Trim{Bytes: int64(float64(much) / float64(n) * float64(w.Bytes))}
		}
		much -= n
	}
}

// level returns the limit for each owner at which all owners together keep budget bytes.
func level(held map[usage.Owner]int64, budget int64) int64 {
	sizes := slices.Sorted(maps.Values(held))
	for i, n := range sizes {
		if left := int64(len(sizes) - i); n >= budget/left {
			return max(0, budget/left)
		}
		budget -= n
	}
	return math.MaxInt64
}

// rewrite removes what is trimmed from the segments, and joins those that have become small.
func (s *Store) rewrite(files []info, trims []map[usage.Owner]usage.Trim) error {
	seen := map[usage.Owner]bool{}
	for at := 0; at < len(files); {
		first := at
		size := files[at].after(trims[at])
		noteOwners(seen, &files[at], trims[at])
		if empty(&files[at], trims[at]) {
			if err := s.drop(files[at]); err != nil {
				return err
			}
			at++
			continue
		}
		changed := len(trims[at]) > 0
		for at++; at < len(files) && !files[at-1].Damaged; at++ {
			more := files[at].after(trims[at])
			if size+more > s.o.Segment || begins(seen, &files[at], trims[at]) {
				break
			}
			noteOwners(seen, &files[at], trims[at])
			size += more
			changed = true
		}
		if !changed {
			continue
		}
		if err := s.join(files[first:at], trims[first:at]); err != nil {
			return err
		}
	}
	return nil
}

// after estimates how many bytes are left of a segment, before compression.
func (i *info) after(trims map[usage.Owner]usage.Trim) int64 {
	left := i.Bytes
	for o, t := range trims {
		if t.All {
			left -= i.Of[o].Bytes
		} else {
			left -= t.Bytes
		}
	}
	return left
}

// empty reports whether only books would be left.
func empty(i *info, trims map[usage.Owner]usage.Trim) bool {
	for o := range i.Of {
		if !trims[o].All {
			return false
		}
	}
	return !i.Damaged
}

func noteOwners(seen map[usage.Owner]bool, i *info, trims map[usage.Owner]usage.Trim) {
	for o := range i.Of {
		if !trims[o].All {
			seen[o] = true
		}
	}
}

// begins reports whether an owner needs the book of this segment: it keeps lines here and had
// an open grant, and no earlier segment keeps lines of it.
func begins(seen map[usage.Owner]bool, i *info, trims map[usage.Owner]usage.Trim) bool {
	for o, w := range i.Of {
		if w.Open && !trims[o].All && !seen[o] {
			return true
		}
	}
	return false
}

// join writes segments as one, without what is trimmed, under the number of the first.
func (s *Store) join(files []info, trims []map[usage.Owner]usage.Trim) error {
	c, err := newPacker()
	if err != nil {
		return err
	}
	x := index{Last: files[len(files)-1].Last}
	for i := range files {
		o := usage.Omit{Joined: i > 0}
		if len(trims[i]) > 0 {
			o.Trims = trims[i]
			if err := s.unpack(files[i].name, func(z *gzip.Reader) error {
				o.Survey = usage.NewSurvey(z)
				return nil
			}); err != nil {
				return err
			}
		}
		err := s.unpack(files[i].name, func(z *gzip.Reader) error { return c.Copy(z, o) })
		if errors.Is(err, usage.ErrRead) { // the next segment's book has what is missing
			x.Damaged, x.Last = true, files[i].Last
			files = files[:i+1]
			break
		}
		if err != nil {
			return err
		}
	}
	rest, weights, dropped, err := c.close()
	if err != nil {
		return err
	}
	x.Weights = weights
	if err := s.put(files[0].n, x, rest); err != nil {
		return err
	}
	for o, l := range dropped {
		s.dropped.Add(o, l)
	}
	for _, f := range files[1:] {
		if err := s.root.Remove(f.name); err != nil {
			return err
		}
	}
	return nil
}

func (s *Store) unpack(name string, read func(*gzip.Reader) error) error {
	f, err := s.root.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return errors.Join(usage.ErrRead, err)
	}
	return read(z)
}

// drop removes a segment, and counts its records as dropped.
func (s *Store) drop(f info) error {
	if err := s.root.Remove(f.name); err != nil {
		return err
	}
	for o, w := range f.Of {
		if w.Records > 0 {
			s.dropped.Add(o, usage.Loss{Records: w.Records, Before: f.Until})
		}
	}
	return nil
}

// Dropped returns records of what was removed since the last call.
func (s *Store) Dropped() []usage.Record {
	out := s.dropped.Records()
	clear(s.dropped)
	return out
}
