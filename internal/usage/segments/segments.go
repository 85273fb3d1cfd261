// SPDX-License-Identifier: Apache-2.0

package segments

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/usage"
)

const (
	// DefaultMax is the bound on all segments together, in bytes. DefaultSegment is the size at
	// which a segment is full; a starting agent reads about as much.
	DefaultMax     = 64 << 20
	DefaultSegment = 2 << 20

	plainSuffix, packedSuffix, tempSuffix = ".jsonl", ".jsonl.gz", ".tmp"

	fileMode, dirMode = 0o600, 0o700
)

// Options are the sizes of a Store in bytes: Max of all segments, Segment of one. Zero is the
// default.
type Options struct {
	Max, Segment int64
}

// Store writes the journal in a directory. Only one goroutine of one process may use it. The
// directory is in the agent's state directory, which is locked.
type Store struct {
	dir  string
	o    Options
	root *os.Root

	last *os.File
	n    uint64
	size int64
	// torn is true if the last segment does not end in a newline.
	torn bool
	// dropped is what was removed since the last call of Dropped.
	dropped usage.Dropped
}

// Open makes the directory if it is missing, removes what a killed agent has left over, and opens
// the last segment.
func Open(dir string, o Options) (*Store, error) {
	if o.Max <= 0 {
		o.Max = DefaultMax
	}
	if o.Segment <= 0 {
		o.Segment = min(DefaultSegment, o.Max/4)
	}
	s := &Store{dir: dir, o: o, dropped: usage.Dropped{}}
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return nil, fmt.Errorf("make the usage journal's directory: %w", err)
	}
	var err error
	if s.root, err = os.OpenRoot(dir); err != nil {
		return nil, fmt.Errorf("open the usage journal: %w", err)
	}
	if err := s.open(); err != nil {
		return nil, errors.Join(s.hint("open", err), s.Close())
	}
	return s, nil
}

func (s *Store) open() error {
	all, err := list(s.root.FS())
	if err != nil {
		return err
	}
	if err := s.removeLeftovers(all); err != nil {
		return err
	}
	if s.n = 1; len(all.segments) > 0 {
		// A packed last segment has no successor yet, so one is begun.
		if last := all.segments[len(all.segments)-1]; last.packed {
			s.n = last.n + 1
		} else {
			s.n = last.n
		}
	}
	return s.begin()
}

// removeLeftovers removes what a killed agent has left over, or what could not be removed before.
func (s *Store) removeLeftovers(l listing) error {
	var errs []error
	for _, left := range l.leftovers {
		if left != name(s.n, plainSuffix) { // never the segment that is being written
			errs = append(errs, s.root.Remove(left))
		}
	}
	return errors.Join(errs...)
}

// begin opens the segment with number n for writing.
func (s *Store) begin() error {
	f, err := s.root.OpenFile(name(s.n, plainSuffix), os.O_RDWR|os.O_APPEND|os.O_CREATE, fileMode)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", f.Name())
	}
	end := make([]byte, 1)
	if err == nil && info.Size() > 0 {
		_, err = f.ReadAt(end, info.Size()-1)
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	s.last, s.size, s.torn = f, info.Size(), info.Size() > 0 && end[0] != '\n'
	return nil
}

// Last calls apply for the records that lead to today's book.
func (s *Store) Last(apply func(*usage.Record)) error { return ReadLast(s.dir, apply) }

// Append writes lines, each with its newline, in one write. It returns how many bytes of them
// were written. After an error the last line may be torn.
func (s *Store) Append(lines []byte) (int, error) {
	out := lines
	if s.torn {
		out = append([]byte{'\n'}, lines...)
	}
	n, err := s.last.Write(out)
	if s.size += int64(n); n > 0 {
		s.torn = out[n-1] != '\n'
	}
	n = max(0, n-len(out)+len(lines))
	if err != nil {
		return n, s.hint("write to", err)
	}
	return n, nil
}

// Full reports whether the next segment should begin.
func (s *Store) Full() bool { return s.size >= s.o.Segment }

// Fresh reports whether the last segment is empty: its first line is still to be written.
func (s *Store) Fresh() bool { return s.size == 0 }

// Flush makes what was written survive a power failure.
func (s *Store) Flush() error {
	if err := unix.Fdatasync(int(s.last.Fd())); err != nil {
		return s.hint("flush", err)
	}
	return nil
}

// Next begins the next segment with the line first; call Tidy afterwards. If many containers
// have ended within the hour, their totals would fill the segment. Next then leaves them out.
func (s *Store) Next(first []byte) error {
	if int64(len(first)) > s.o.Segment/4 {
		first = usage.WithoutSeries(first)
	}
	if err := s.Flush(); err != nil {
		return err
	}
	old := *s
	s.n++
	if err := s.begin(); err != nil {
		*s = old
		return s.hint("begin a segment of", err)
	}
	if _, err := s.Append(first); err != nil {
		// The old segment goes on. The new one holds no record.
		err = errors.Join(err, s.last.Close(), s.root.Remove(name(s.n, plainSuffix)))
		*s = old
		return err
	}
	return old.last.Close()
}

// Tidy packs the closed segments, and makes all segments fit the bound. Refusals go first, then
// the oldest records of the owners with the most. [Store.Dropped] returns what went.
func (s *Store) Tidy() error {
	all, err := list(s.root.FS())
	if err != nil {
		return s.hint("list", err)
	}
	errs := []error{s.removeLeftovers(all)}
	for _, g := range all.segments {
		if g.n != s.n && !g.packed {
			errs = append(errs, s.pack(g.n))
		}
	}
	// The last segment may grow until it is full, and by as much again until it is packed.
	errs = append(errs, s.fit(s.o.Max-2*s.o.Segment))
	if err := errors.Join(errs...); err != nil {
		return s.hint("tidy", err)
	}
	return nil
}

// pack compresses a closed segment.
func (s *Store) pack(n uint64) error {
	from, err := s.root.Open(name(n, plainSuffix))
	if err != nil {
		return err
	}
	defer from.Close()
	c, err := newPacker()
	if err != nil {
		return err
	}
	if err := c.Copy(from, usage.Omit{}); err != nil {
		return err
	}
	rest, weights, _, err := c.close()
	if err != nil {
		return err
	}
	if err := s.put(n, index{Last: n, Weights: weights}, rest); err != nil {
		return err
	}
	return s.root.Remove(name(n, plainSuffix))
}

// Close closes the files.
func (s *Store) Close() error {
	var errs []error
	if s.last != nil {
		errs = append(errs, s.last.Close())
	}
	return errors.Join(append(errs, s.root.Close())...)
}

func (s *Store) hint(verb string, err error) error {
	return fmt.Errorf("%s the usage journal in %s: %w; check free space and permissions there", verb, s.dir, err)
}

func name(n uint64, suffix string) string { return fmt.Sprintf("%010d%s", n, suffix) }

// segment is one file. If a segment exists in both forms, list returns the packed one.
type segment struct {
	n      uint64
	name   string
	packed bool
}

type listing struct {
	segments []segment // ordered by number
	// leftovers are files that no reader needs: temporary files, and the plain form of each segment
	// that is there in both forms.
	leftovers []string
}

func list(dir fs.FS) (listing, error) {
	entries, err := fs.ReadDir(dir, ".")
	if err != nil {
		return listing{}, err
	}
	var l listing
	for _, e := range entries {
		base, _, _ := strings.Cut(e.Name(), ".")
		n, err := strconv.ParseUint(base, 10, 64)
		plain, packed := e.Name() == name(n, plainSuffix), e.Name() == name(n, packedSuffix)
		switch {
		case strings.HasPrefix(e.Name(), ".") && strings.HasSuffix(e.Name(), tempSuffix):
			l.leftovers = append(l.leftovers, e.Name())
		case err != nil || !packed && !plain || !e.Type().IsRegular() || n == 0:
		default:
			l.segments = append(l.segments, segment{n, e.Name(), packed})
		}
	}
	slices.SortFunc(l.segments, func(a, b segment) int {
		if a.n != b.n {
			return int(int64(a.n) - int64(b.n))
		}
		return strings.Compare(b.name, a.name) // the packed form first
	})
	for i := 1; i < len(l.segments); i++ {
		if plain := l.segments[i]; plain.n == l.segments[i-1].n {
			l.leftovers = append(l.leftovers, plain.name)
		}
	}
	l.segments = slices.CompactFunc(l.segments, func(a, b segment) bool { return a.n == b.n })
	return l, nil
}

// file is a segment that is open for reading, in the form that was found.
type file struct {
	segment
	*os.File
}

func open(dir string, g segment) (file, error) {
	f, err := os.Open(filepath.Join(dir, g.name))
	if errors.Is(err, fs.ErrNotExist) && !g.packed { // it was packed meanwhile
		g.packed, g.name = true, name(g.n, packedSuffix)
		f, err = os.Open(filepath.Join(dir, g.name))
	}
	return file{g, f}, err
}
