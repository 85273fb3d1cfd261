// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

// TestAwkwardDriver: the right override is found where the driver's answers to
// cuGetProcAddress are no functions that it exports, and nothing is counted
// twice where it calls its own functions by name.
func TestAwkwardDriver(t *testing.T) {
	awkward(t, "awkward")
}

// TestReopenedManyTimesTakesOneSlot: a program that opens and closes the library
// all the time, with an allocation in between, is one process in the count.
func TestReopenedManyTimesTakesOneSlot(t *testing.T) {
	awkward(t, "reopen")
}

// awkward runs a program of testdata in front of the driver of driver.c. It gets
// the path of the cap's library and of its usage page, and has nothing to say.
func awkward(t *testing.T, program string) {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("gcc is not installed")
	}
	const uuid = gpu.UUID("GPU-5a5a5a5a-5a5a-5a5a-5a5a-5a5a5a5a5a5a")
	root := t.TempDir()
	out := filepath.Join(root, "out")
	if err := build(t.Context(), out, root); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"driver", "limits", "usage"} {
		if err := os.Mkdir(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := makePage(filepath.Join(root, "limits", string(uuid)), 0, Limit{GPU: uuid, Bytes: aGiB, Context: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"-std=gnu2x", "-O2", "-shared", "-fPIC", "-Wl,-soname," + cudaName, "-Ic", "-o", filepath.Join(root, "driver", cudaName), "testdata/driver.c", "testdata/stubs.c"},
		{"-std=gnu17", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-Ic", "-o", filepath.Join(root, program), "testdata/" + program + ".c", "-ldl"},
	} {
		if _, err := gcc(t.Context(), "", args...); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(root, program), filepath.Join(out, cudaName), filepath.Join(root, "usage", string(uuid)))
	if got, err := cmd.CombinedOutput(); err != nil || len(got) != 0 {
		t.Errorf("%v\n%s", err, got)
	}
}
