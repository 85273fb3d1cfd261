// SPDX-License-Identifier: Apache-2.0

package segments

import (
	"bufio"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/pkg/gpu"
)

// Read calls apply for each record since a time, and for some before it: it begins with the
// last segment whose first record is not later than since. A zero since reads all. Read skips
// what is damaged. The error wraps fs.ErrNotExist if there is no such directory, and
// gpu.ErrNotSupported if a newer version wrote a segment.
func Read(dir string, since time.Time, apply func(*usage.Record)) error {
	all, err := list(os.DirFS(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("there is no usage journal in %s: %w", dir, fs.ErrNotExist)
	}
	if err != nil {
		return fmt.Errorf("read the usage journal: %w", err)
	}
	first := 0
	for i := len(all.segments) - 1; i > 0 && !since.IsZero(); i-- {
		if r := head(dir, all.segments[i]); r != nil && !r.Time.After(since) {
			first = i
			break
		}
	}
	return read(dir, all.segments[first:], apply)
}

// ReadLast calls apply for the records that lead to today's book: those from the last segment
// that begins with a book.
func ReadLast(dir string, apply func(*usage.Record)) error {
	all, err := list(os.DirFS(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the usage journal: %w", err)
	}
	for first := len(all.segments) - 1; first >= 0; first-- {
		if first == 0 || head(dir, all.segments[first]) != nil {
			return read(dir, all.segments[first:], apply)
		}
	}
	return nil
}

// head returns the book that a segment begins with, or nil if it begins with something else.
func head(dir string, g segment) (first *usage.Record) {
	f, err := open(dir, g)
	if err != nil {
		return nil
	}
	defer f.Close()
	_, _ = f.each(func(r *usage.Record) bool {
		if r.Event == usage.Began && r.Book != nil {
			first = r
		}
		return false
	})
	return first
}

func read(dir string, of []segment, apply func(*usage.Record)) error {
	files, err := openAll(dir, of)
	if err != nil {
		return fmt.Errorf("read the usage journal: %w", err)
	}
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	covered := uint64(0) // the last segment that was joined to an earlier one
	for _, f := range files {
		if f.n <= covered {
			continue // its removal was interrupted, or is under way
		}
		newer := 0
		x, err := f.each(func(r *usage.Record) bool {
			if r.Book != nil && r.Book.Version > usage.Version {
				newer = r.Book.Version
				return false
			}
			apply(r)
			return true
		})
		switch {
		case newer > 0:
			return fmt.Errorf("read the usage journal: %s is of version %d, and this program knows %d: "+
				"use the one that wrote it: %w", f.name, newer, usage.Version, gpu.ErrNotSupported)
		case err != nil:
			return fmt.Errorf("read the usage journal: %w", err)
		}
		if x != nil {
			covered = x.Last
		}
	}
	return nil
}

// openAll opens segments, so that all of them stay readable: an agent packs, joins and removes
// segments meanwhile. If one has gone before it was opened, openAll lists the directory again.
func openAll(dir string, of []segment) (files []file, err error) {
	for range 5 {
		for _, g := range of {
			var f file
			if f, err = open(dir, g); err != nil {
				break
			}
			files = append(files, f)
		}
		if err == nil {
			return files, nil
		}
		for _, f := range files {
			_ = f.Close()
		}
		files = nil
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		first := of[0].n
		all, lerr := list(os.DirFS(dir))
		if lerr != nil {
			return nil, lerr
		}
		err = nil
		// The first segment may have been joined to an earlier one. Its records are read from
		// there.
		of = all.segments
		for i := len(of) - 1; i > 0; i-- {
			if of[i].n <= first {
				of = of[i:]
				break
			}
		}
	}
	return nil, errors.New("its segments change too fast: try again")
}

// each calls more for each record of a segment until more returns false. It returns the
// segment's index, or nil if there is none. A segment that is cut short or damaged ends there,
// without an error.
func (f *file) each(more func(*usage.Record) bool) (*index, error) {
	var x *index
	from := io.Reader(f)
	if f.packed {
		z, err := gzip.NewReader(f)
		switch {
		case errors.Is(err, gzip.ErrHeader), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return nil, nil // cut short within its header
		case err != nil:
			return nil, fmt.Errorf("read %s: %w", f.Name(), err)
		}
		from, x = z, indexOf(z.Extra)
	}
	lines := bufio.NewReader(from)
	for {
		line, err := lines.ReadBytes('\n')
		if r := usage.Parse(line); r != nil && !more(r) {
			return x, nil
		}
		switch {
		case errors.Is(err, io.EOF), err != nil && f.packed:
			return x, nil
		case err != nil:
			return x, err
		}
	}
}
