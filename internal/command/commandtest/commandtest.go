// SPDX-License-Identifier: Apache-2.0

package commandtest

import (
	"maps"
	"os"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"example.com/gpu-agent/internal/command"
)

// path is the document's, from the directory of a program.
const path = "../../docs/reference.md"

// Reference fails the test unless the document has these texts in its sections of these names, or writes them
// if update is true.
func Reference(t *testing.T, update bool, sections map[string]string) {
	t.Helper()
	have, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	want := string(have)
	for _, name := range slices.Sorted(maps.Keys(sections)) {
		if want, err = command.Splice(want, name, sections[name]); err != nil {
			t.Fatal(err)
		}
	}
	diff := cmp.Diff(string(have), want)
	switch {
	case diff != "" && update:
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil { //nolint:gosec // it is part of the source
			t.Fatal(err)
		}
	case diff != "":
		t.Errorf("%s, -have +want (-update writes it anew):\n%s", path, diff)
	}
}
