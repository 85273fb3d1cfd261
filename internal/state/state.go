// SPDX-License-Identifier: Apache-2.0

package state

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/atomicfile"
	"example.com/gpu-agent/pkg/gpu"
)

const (
	documentFile = "state.json"
	badFile      = "state.json.bad"
	journalFile  = "allocations.journal"

	// Socket is the name of the agent's socket in the directory. Commands ask the agent there.
	Socket = "agent.sock"

	fileMode = 0o600
	// dirMode lets a runtime in a user namespace run the hook programs.
	dirMode = 0o711
)

func temporary(name string) string { return "." + name + ".tmp" }

// files lists the files of this package.
var files = []string{documentFile, badFile, journalFile, temporary(documentFile), temporary(journalFile)}

// Store is the agent's directory. It is locked until Close, and for one goroutine.
type Store struct {
	dir  string
	root *os.Root
	lock *os.File

	document    Document     // as found
	allocations []Allocation // as found
	// saved is the document's file when Save looked last: its content in one line, and its
	// info, which is nil before that.
	saved struct {
		line []byte
		info fs.FileInfo
	}

	journal *os.File
	lines   []string // the journal's whole lines, in order
	open    bool     // the journal does not end in a newline
}

// retry is the time between two tries of Wait.
const retry = 200 * time.Millisecond

// Wait calls Open until the directory is free or ctx ends: the agent before this one may still
// be ending.
func Wait(ctx context.Context, dir string, log *slog.Logger) (*Store, error) {
	for said := false; ; said = true {
		store, err := Open(dir, log)
		if !errors.Is(err, gpu.ErrInUse) {
			return store, err
		}
		if !said {
			log.Warn("waiting for the agent before this one to end", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(retry):
		}
	}
}

// Open makes the directory if it is missing, locks it, removes temporary files of a killed
// agent, and reads the two files. dir must be absolute.
//
// The error wraps gpu.ErrInUse while another process has the directory. Open also fails, and
// changes nothing, if a file is of a newer version. If it cannot read state.json, it logs a
// warning, renames the file, and starts with an empty document. Damaged lines of the journal
// are left out.
func Open(dir string, log *slog.Logger) (_ *Store, err error) {
	if !filepath.IsAbs(dir) {
		return nil, fmt.Errorf("open state directory %q: the path must be absolute: %w", dir, gpu.ErrInvalid)
	}
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return nil, fmt.Errorf("make state directory: %w; make it by hand or choose another with --state-dir", err)
	}
	s := &Store{dir: filepath.Clean(dir)}
	defer func() {
		if err != nil {
			_ = s.Close()
		}
	}()
	if s.root, s.lock, err = lock(s.dir); err != nil {
		return nil, err
	}
	for _, name := range files {
		if _, err := s.lstat(name); err != nil {
			return nil, err
		}
	}
	document, err := s.read(documentFile)
	if err != nil {
		return nil, err
	}
	lines, err := s.read(journalFile)
	if err != nil {
		return nil, err
	}

	var unreadable error
	if document != nil {
		s.document, unreadable = decodeDocument(document)
		if newer, ok := errors.AsType[errNewer](unreadable); ok {
			return nil, fmt.Errorf("read %s: %w", s.path(documentFile), newer)
		}
	}
	j := decodeJournal(lines)
	if j.newer > 0 {
		return nil, fmt.Errorf("read %s: %w", s.path(journalFile), errNewer(j.newer))
	}
	s.allocations, s.lines, s.open = j.allocations, j.lines, j.open

	// Nothing has been changed up to here.
	if err := s.tidy(); err != nil {
		return nil, err
	}
	if unreadable != nil {
		if err := s.root.Rename(documentFile, badFile); err != nil {
			return nil, fmt.Errorf("put %s aside, which cannot be read (%v): %w; remove it by hand",
				s.path(documentFile), unreadable, err)
		}
		log.Warn("start without the remembered state: the file cannot be read and was put aside",
			"file", s.path(documentFile), "as", badFile, "err", unreadable)
	}
	if j.dropped > 0 {
		log.Warn("leave out allocations whose lines are damaged, as after a crash",
			"file", s.path(journalFile), "lines", j.dropped)
	}
	if s.journal, err = s.root.OpenFile(journalFile, os.O_WRONLY|os.O_APPEND|os.O_CREATE, fileMode); err != nil {
		return nil, s.hint("open", journalFile, err)
	}
	return s, nil
}

// lock opens the directory and takes its lock. The lock is the directory's own: it needs no
// file, and ends with the process.
func lock(dir string) (*os.Root, *os.File, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, nil, fmt.Errorf("open state directory: %w", err)
	}
	f, err := root.Open(".")
	if err != nil {
		return root, nil, fmt.Errorf("open state directory %s: %w", dir, err)
	}
	switch err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
	case errors.Is(err, unix.EWOULDBLOCK):
		return root, f, fmt.Errorf("state directory %s: another gpu-agent works with it; "+
			"wait until that one has ended: %w", dir, gpu.ErrInUse)
	case err != nil:
		return root, f, fmt.Errorf("lock state directory %s: %w; it must lie on a local file system", dir, err)
	}
	return root, f, nil
}

// tidy removes temporary files, and takes from others the permission to write.
func (s *Store) tidy() error {
	for _, name := range []string{temporary(documentFile), temporary(journalFile)} {
		if err := s.root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove left-over %s: %w; remove it by hand", s.path(name), err)
		}
	}
	info, err := s.lock.Stat()
	if err != nil {
		return fmt.Errorf("look at state directory %s: %w", s.dir, err)
	}
	if now := info.Mode().Perm(); now&^0o022 != now {
		if err := s.lock.Chmod(now &^ 0o022); err != nil {
			return fmt.Errorf("keep others from writing to state directory %s: %w", s.dir, err)
		}
	}
	return nil
}

// Document returns the document that Open found; zero if there was none.
func (s *Store) Document() Document { return s.document }

// Allocations returns the allocations that Open found, oldest first, each set of devices once.
func (s *Store) Allocations() []Allocation { return slices.Clone(s.allocations) }

// Save writes d for the next Open. It writes nothing if the file has d already. If writing
// fails, the old document remains.
func (s *Store) Save(d Document) error {
	line, err := encodeDocument(d)
	if err != nil {
		return err
	}
	info, err := s.lstat(documentFile)
	if err != nil {
		return err
	}
	if now := s.saved.info; info != nil && now != nil && bytes.Equal(line, s.saved.line) &&
		os.SameFile(info, now) && info.Size() == now.Size() && info.ModTime().Equal(now.ModTime()) {
		return nil // every round calls Save
	}
	var data bytes.Buffer
	if err := json.Indent(&data, line, "", "  "); err != nil {
		return fmt.Errorf("encode the state: %w", err)
	}
	s.saved.info = nil
	if old, err := s.read(documentFile); err != nil || !bytes.Equal(old, data.Bytes()) {
		if err := s.put(documentFile, data.String(), func() error { return nil }); err != nil {
			return err
		}
	}
	s.saved.line = line
	s.saved.info, err = s.lstat(documentFile)
	return err
}

// Append adds an allocation with one write, and does not flush it. After an error the
// allocation may or may not be in the journal; the others are unharmed.
func (s *Store) Append(c Allocation) error {
	line, err := encodeLine(c)
	if err != nil {
		return err
	}
	out := line
	if s.open {
		out = append([]byte{'\n'}, line...)
	}
	if n, err := s.journal.Write(out); err != nil {
		s.open = s.open || n > 0
		return s.hint("add an allocation to", journalFile, err)
	}
	s.open = false
	s.lines = append(s.lines, string(line))
	return nil
}

// Keep replaces the journal's allocations by these. It writes nothing if the journal has them
// already.
func (s *Store) Keep(allocations []Allocation) error {
	var want []string
	for _, c := range allocations {
		line, err := encodeLine(c)
		if err != nil {
			return err
		}
		want = append(want, string(line))
	}
	slices.Sort(want)
	want = slices.Compact(want)
	if s.intact() && slices.Equal(slices.Sorted(slices.Values(s.lines)), want) {
		return nil
	}
	var journal *os.File
	if err := s.put(journalFile, strings.Join(want, ""), func() (err error) {
		journal, err = s.root.OpenFile(temporary(journalFile), os.O_WRONLY|os.O_APPEND, 0)
		return err
	}); err != nil {
		if journal != nil {
			_ = journal.Close()
		}
		return err
	}
	_ = s.journal.Close() // Its file is replaced, and nothing was left to be written.
	s.journal, s.lines, s.open = journal, want, false
	return nil
}

// intact reports whether the journal is still at its name and ends in a whole line. It may have
// been removed.
func (s *Store) intact() bool {
	here, err := s.journal.Stat()
	if err != nil || s.open {
		return false
	}
	there, err := s.root.Lstat(journalFile)
	return err == nil && os.SameFile(here, there)
}

// Close releases the lock. What was written stays.
func (s *Store) Close() error {
	var errs []error
	for _, f := range []*os.File{s.journal, s.lock} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	if s.root != nil {
		errs = append(errs, s.root.Close())
	}
	if err := errors.Join(errs...); !errors.Is(err, fs.ErrClosed) {
		return err
	}
	return nil // closed before
}

// put replaces a file. It calls whole once the text is written under the temporary name, before
// the rename.
func (s *Store) put(name, text string, whole func() error) error {
	temp := temporary(name)
	if _, err := s.lstat(temp); err != nil {
		return err
	}
	if err := atomicfile.Write(s.root, name, temp, fileMode, atomicfile.Unflushed, func(f *os.File) error {
		if _, err := f.WriteString(text); err != nil {
			return err
		}
		return whole()
	}); err != nil {
		return s.hint("replace", name, err)
	}
	return nil
}

// lstat returns the info of a regular file, or nil if there is none. It fails for anything else
// of that name.
func (s *Store) lstat(name string) (fs.FileInfo, error) {
	info, err := s.root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("look at %s: %w", s.path(name), err)
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("look at %s: it is not a regular file (%s): %w; remove it",
			s.path(name), info.Mode(), gpu.ErrInvalid)
	}
	return info, nil
}

// read returns a file's content, or nil if there is no file.
func (s *Store) read(name string) ([]byte, error) {
	info, err := s.lstat(name)
	if info == nil {
		return nil, err
	}
	data, err := s.root.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", s.path(name), err)
	}
	return data, nil
}

func (s *Store) path(name string) string { return filepath.Join(s.dir, name) }

func (s *Store) hint(verb, name string, err error) error {
	return fmt.Errorf("%s %s: %w; check free space and permissions there", verb, s.path(name), err)
}
