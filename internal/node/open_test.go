// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"os"
	"slices"
	"testing"
)

func TestOpenByNamesWhoHasAFileOpen(t *testing.T) {
	path := t.TempDir() + "/nvidia0"
	if got := OpenBy("/proc", path); len(got) != 0 {
		t.Fatalf("nobody has %s open, and %v do", path, got)
	}
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	comm, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("%s (PID %d)", comm[:len(comm)-1], os.Getpid())
	if got := OpenBy("/proc", path); !slices.Equal(got, []string{want}) {
		t.Errorf("OpenBy: %v, want %s", got, want)
	}
}
