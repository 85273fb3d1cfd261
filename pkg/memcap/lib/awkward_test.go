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
		{"-std=gnu17", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-Ic", "-o", filepath.Join(root, "awkward"), "testdata/awkward.c", "-ldl"},
	} {
		if _, err := gcc(t.Context(), "", args...); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(root, "awkward"), filepath.Join(out, cudaName), filepath.Join(root, "usage", string(uuid)))
	if got, err := cmd.CombinedOutput(); err != nil || len(got) != 0 {
		t.Errorf("%v\n%s", err, got)
	}
}
