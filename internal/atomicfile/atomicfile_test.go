// SPDX-License-Identifier: Apache-2.0

package atomicfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func says(text string) func(*os.File) error {
	return func(f *os.File) error { _, err := f.WriteString(text); return err }
}

func TestWrite(t *testing.T) {
	defer unix.Umask(unix.Umask(0o077))
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	elsewhere := filepath.Join(t.TempDir(), "elsewhere")
	if err := os.WriteFile(elsewhere, []byte("theirs"), 0o600); err != nil {
		t.Fatal(err)
	}
	is := func(want string, mode fs.FileMode) {
		t.Helper()
		info, err := root.Lstat("file")
		if err != nil || info.Mode() != mode {
			t.Fatalf("%v, %v, want mode %v", info, err, mode)
		}
		if got, err := root.ReadFile("file"); err != nil || string(got) != want {
			t.Errorf("%q, %v, want %q", got, err, want)
		}
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) != 1 {
			t.Errorf("in the directory: %v, %v", entries, err)
		}
		if got, err := os.ReadFile(elsewhere); err != nil || string(got) != "theirs" {
			t.Errorf("a link was followed: %q, %v", got, err)
		}
	}
	for i, before := range []func() error{
		func() error { return nil },
		func() error { return nil }, // over the one of before
		func() error { return os.WriteFile(filepath.Join(dir, "temp"), []byte("half"), 0) }, // of one that was killed
		func() error { return os.Symlink(elsewhere, filepath.Join(dir, "temp")) },
		func() error {
			return errors.Join(root.Remove("file"), os.Symlink(elsewhere, filepath.Join(dir, "file")))
		},
	} {
		if err := before(); err != nil {
			t.Fatal(err)
		}
		mode := []fs.FileMode{0o644, 0o755}[i%2]
		if err := Write(root, "file", "temp", mode, i%2 == 0, says("ours")); err != nil {
			t.Fatal(err)
		}
		is("ours", mode)
	}

	// One that is not written whole leaves what was there.
	broken := errors.New("broken")
	if err := Write(root, "file", "temp", 0o600, Flushed, func(f *os.File) error { return errors.Join(says("half")(f), broken) }); !errors.Is(err, broken) {
		t.Errorf("%v, want %v", err, broken)
	}
	is("ours", 0o644)
	if err := root.Mkdir("other", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := Write(root, "other", "temp", 0o600, Unflushed, says("ours")); err == nil {
		t.Error("a directory was replaced")
	}
	for _, name := range []string{"../x", "/x"} {
		if Write(root, name, "temp", 0o600, Unflushed, says("x")) == nil || Write(root, "file", name, 0o600, Unflushed, says("x")) == nil {
			t.Errorf("%s was written", name)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil || !slices.EqualFunc(entries, []string{"file", "other"}, func(e fs.DirEntry, name string) bool { return e.Name() == name }) {
		t.Errorf("in the directory: %v, %v", entries, err)
	}
}
