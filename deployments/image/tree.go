// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// tree is files by their path, without a slash in front. Directories with mode 0755 need
// no entry.
type tree map[string]entry

// entry is a link if it has a target, a directory if its mode says so, else a file.
type entry struct {
	mode int64
	link string
	data []byte
}

func (e entry) isDir() bool { return e.link == "" && fs.FileMode(e.mode)&fs.ModeDir != 0 }

// directory is an entry's mode for one.
const directory = int64(fs.ModeDir)

// add puts in a file of this machine, with a mode of its own: that of the source depends on
// who checked it out.
func (t tree) add(file, at string, mode int64) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	t[at] = entry{mode: mode, data: data}
	return nil
}

// addAll puts in all files below a folder, those behind links too.
func (t tree) addAll(dir, at string) error {
	list, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, d := range list {
		from, to := filepath.Join(dir, d.Name()), path.Join(at, d.Name())
		st, err := os.Stat(from)
		if err != nil {
			return err
		}
		if st.IsDir() {
			err = t.addAll(from, to)
		} else {
			err = t.add(from, to, 0o644)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// take returns a file; or of a path that ends in /, one of all files below it, in the order of
// their paths, each ended by a line's end. ok says that there is any.
func (t tree) take(name string) (e entry, ok bool) {
	if !strings.HasSuffix(name, "/") {
		e, ok = t[name]
		return e, ok && e.link == ""
	}
	e.mode = 0o644
	for _, at := range slices.Sorted(maps.Keys(t)) {
		if strings.HasPrefix(at, name) && t[at].link == "" && len(t[at].data) > 0 {
			e.data = append(append(e.data, bytes.TrimRight(t[at].data, "\n")...), '\n')
			ok = true
		}
	}
	return e, ok
}

// write writes the files as a tar archive: sorted, all of one date, owned by root.
func (t tree) write(w io.Writer, date time.Time) error {
	all := maps.Clone(t)
	for name := range t {
		for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
			if _, ok := all[dir]; !ok {
				all[dir] = entry{mode: directory | 0o755}
			}
		}
	}
	out := tar.NewWriter(w)
	for _, name := range slices.Sorted(maps.Keys(all)) { // a directory before what is in it
		e := all[name]
		h := &tar.Header{
			Name: name, Mode: e.mode & 0o7777, ModTime: date, Size: int64(len(e.data)), Linkname: e.link,
			Typeflag: tar.TypeReg, Format: tar.FormatPAX,
		}
		switch {
		case e.link != "":
			h.Typeflag, h.Mode = tar.TypeSymlink, 0o777
		case e.isDir():
			h.Typeflag, h.Name = tar.TypeDir, name+"/"
		}
		if err := out.WriteHeader(h); err != nil {
			return fmt.Errorf("archive %s: %w", name, err)
		}
		if _, err := out.Write(e.data); err != nil {
			return fmt.Errorf("archive %s: %w", name, err)
		}
	}
	return out.Close()
}

// writeFile has a file appear when it is whole.
func writeFile(file string, write func(io.Writer) error) error {
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(file), ".new-")
	if err != nil {
		return err
	}
	err = errors.Join(write(f), f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), file)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", file, err), os.Remove(f.Name()))
	}
	return nil
}

// writeText has a file with a text appear when it is whole.
func writeText(file, text string) error {
	return writeFile(file, func(w io.Writer) error { _, err := io.WriteString(w, text); return err })
}
