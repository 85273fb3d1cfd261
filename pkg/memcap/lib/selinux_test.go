// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Containers may read all of the folder but the usage pages, which they may write.
func TestRelabel(t *testing.T) {
	dir := t.TempDir()
	if _, err := OpenPages(dir); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setxattr(dir, labelName, []byte("x"), 0); errors.Is(err, unix.EPERM) || errors.Is(err, unix.EOPNOTSUPP) {
		t.Skipf("label files in %s: %v", dir, err)
	}
	for _, name := range []string{"cap/library", "cap/usage/page"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("library", filepath.Join(dir, "cap/link")); err != nil {
		t.Fatal(err)
	}
	for range 2 { // at each start
		if err := relabel(dir); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{
		"cap": readable, "cap/library": readable, "cap/link": readable, "cap/limits": readable, "cap/usage": writable, "cap/usage/page": "",
	} {
		label := make([]byte, 256)
		n, err := unix.Lgetxattr(filepath.Join(dir, name), labelName, label)
		if errors.Is(err, unix.ENODATA) {
			n = 0
		} else if err != nil {
			t.Fatal(err)
		}
		if want != "" {
			want += "\x00"
		}
		if got := string(label[:n]); got != want {
			t.Errorf("%s has the label %q, want %q", name, got, want)
		}
	}
}
