// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"debug/elf"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
)

// The program needs nothing of a driver to start, but for the one that is
// linked against it; and the lists that tests go through are not empty.
func TestPrograms(t *testing.T) {
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("no gcc to build the probe with")
	}
	dir, err := Cached(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for name, linked := range map[string]bool{Program: false, Linked: true, Plugin: true} {
		f, err := elf.Open(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		libs, err := f.ImportedLibraries()
		if err != nil || slices.Contains(libs, "libcuda.so.1") != linked {
			t.Errorf("%s needs %q (%v); libcuda.so.1 among them: want %t", name, libs, err, linked)
		}
	}
	if out, err := exec.Command(filepath.Join(dir, Program)).CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("without commands it says %q, %v", out, err)
	}
	if n := len(Calls()); n < 20 {
		t.Errorf("%d calls: %q", n, Calls())
	}
	if n := len(Doors()); n != 12 {
		t.Errorf("%d doors: %q", n, Doors())
	}
}
