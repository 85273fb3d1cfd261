// SPDX-License-Identifier: Apache-2.0

package socket

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// TestSocketIsOursAlone, whatever the process's umask.
func TestSocketIsOursAlone(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0))
	path := filepath.Join(t.TempDir(), "a.sock")
	s, err := Listen(path, ".a")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Remove()
	st, err := os.Lstat(path)
	if err != nil || st.Mode() != os.ModeSocket|0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	if names, err := os.ReadDir(filepath.Dir(path)); len(names) != 1 {
		t.Errorf("in the directory: %q, %v", names, err)
	}
}

func TestStanding(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.sock")
	want := func(s *Socket, want Standing) {
		t.Helper()
		if got, err := s.Standing(); err != nil || got != want {
			t.Errorf("standing %v, %v, want %v", got, err, want)
		}
	}
	older, err := Listen(path, ".a")
	if err != nil {
		t.Fatal(err)
	}
	defer older.Remove()
	want(older, Held)
	newer, err := Listen(path, ".a")
	if err != nil {
		t.Fatal(err)
	}
	want(older, Occupied)
	want(newer, Held)
	if err := older.Remove(); err != nil {
		t.Error(err)
	}
	want(newer, Held)
	_ = newer.Close() // As if killed: the file stays.
	want(older, Gone)
	if err := os.Remove(path); err != nil {
		t.Error(err)
	}
	want(newer, Gone)
}
