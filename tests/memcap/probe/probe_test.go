// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"debug/elf"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The program needs nothing of a driver to start, but for the one that is
// linked against it; and the lists that tests go through are its own.
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
	// The lists that tests go through are those of the program.
	list := exec.Command(filepath.Join(dir, Program))
	list.Stdin = strings.NewReader("calls\n")
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for line := range strings.Lines(string(out)) {
		if name, ok := strings.CutPrefix(line, "call name="); ok {
			names = append(names, strings.Fields(name)[0])
		}
	}
	if !slices.Equal(names, Calls) {
		t.Errorf("the program's calls are %q, ours %q", names, Calls)
	}
	for _, door := range append([]string{"trapdoor"}, Doors...) {
		enter := exec.Command(filepath.Join(dir, Program), "-door", door)
		enter.Stdin = strings.NewReader("info\n")
		out, err := enter.CombinedOutput()
		if unknown := strings.Contains(string(out), "no door of this name"); err != nil || unknown != (door == "trapdoor") {
			t.Errorf("door %s: %q, %v", door, out, err)
		}
	}
}
