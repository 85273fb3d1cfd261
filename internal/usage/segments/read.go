// SPDX-License-Identifier: Apache-2.0

package segments

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/pkg/gpu"
)

// Read calls apply for each record from since on, and for some before: it begins with the last
// segment whose first record is not later. Zero reads all. What is damaged is left out. A
// directory that is not there is an empty journal. The error wraps gpu.ErrNotSupported where a
// newer version has written.
func Read(dir string, since time.Time, apply func(*usage.Record)) error {
	all, err := list(os.DirFS(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
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

// ReadLast calls apply for the records that make the book of now.
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

// head is the record that a segment begins with, nil where that is not a book.
func head(dir string, g segment) (first *usage.Record) {
	_ = each(dir, g, func(r *usage.Record) bool {
		if r.Event == usage.Began && r.Book != nil {
			first = r
		}
		return false
	})
	return first
}

func read(dir string, of []segment, apply func(*usage.Record)) error {
	for _, g := range of {
		newer := 0
		err := each(dir, g, func(r *usage.Record) bool {
			if r.Book != nil && r.Book.Version > usage.Version {
				newer = r.Book.Version
				return false
			}
			apply(r)
			return true
		})
		switch {
		case newer > 0:
			return fmt.Errorf("read the usage journal: %s is of version %d, and this program knows %d: use the one that wrote it: %w", g.name, newer, usage.Version, gpu.ErrNotSupported)
		case errors.Is(err, fs.ErrNotExist): // it was the oldest, and has gone
		case err != nil:
			return fmt.Errorf("read the usage journal: %w", err)
		}
	}
	return nil
}

// each calls more for each record of a segment until that is false. A segment that is cut
// short, or damaged, ends there.
func each(dir string, g segment, more func(*usage.Record) bool) error {
	f, err := open(dir, g)
	if err != nil {
		return err
	}
	defer f.Close()
	lines := bufio.NewReader(f)
	for {
		line, err := lines.ReadBytes('\n')
		if r := usage.Parse(line); r != nil && !more(r) {
			return nil
		}
		switch {
		case errors.Is(err, io.EOF), err != nil && g.packed:
			return nil
		case err != nil:
			return err
		}
	}
}
