// SPDX-License-Identifier: Apache-2.0

package programs

import (
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The list that tests go through is the program's own.
func TestNames(t *testing.T) {
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("no gcc to build the programs with")
	}
	dir, err := Cached(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(filepath.Join(dir, Program)).Output()
	if err != nil {
		t.Fatal(err)
	}
	if names := strings.Fields(string(out)); !slices.Equal(names, Names) {
		t.Errorf("the program has %q, the list %q", names, Names)
	}
}
