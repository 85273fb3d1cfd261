// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

// TestAwkwardDriver runs programs of testdata in front of drivers that answer as none
// should, each with a library and pages of its own.
func TestAwkwardDriver(t *testing.T) {
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("gcc is not installed")
	}
	root := t.TempDir()
	built := filepath.Join(root, "built")
	if err := build(t.Context(), built, root); err != nil {
		t.Fatal(err)
	}
	library, err := os.ReadFile(filepath.Join(built, cudaName))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		program, why string
		lacks        []string // of the driver's names
	}{
		{"awkward", "the right override is found where the driver's answers to cuGetProcAddress are no functions that it exports, " +
			"and nothing is counted twice where it calls its own functions by name", nil},
		{"graphics", "contexts of OpenGL and VDPAU are counted", nil},
		{"reopen", "a program that opens and closes the library all the time, with an allocation in between, is one process in the count", nil},
		{"unmap", "to register and release a buffer makes no mapping of the library's own, which would cost more than all the rest", nil},
		{"lacks", "dlsym finds in a fitted library what the driver has, and nothing that it does not have; cuGetProcAddress is as before",
			[]string{"cuCtxSynchronize_v2", "cuCtxCreate_v4", "cuGraphInstantiateWithParams_ptsz"}},
	} {
		t.Run(c.program, func(t *testing.T) {
			if said, err := awkward(t, root, library, c.program, c.lacks); err != nil || said != "" {
				t.Errorf("%s: %v\n%s", c.why, err, said)
			}
		})
	}
}

// awkward runs a program below root in front of the driver of driver.c, without the names
// that this lacks. The program gets the path of the cap's library, of its usage page, and
// those names, and has nothing to say.
func awkward(t *testing.T, root string, library []byte, program string, lacks []string) (string, error) {
	t.Helper()
	const uuid = gpu.UUID("GPU-5a5a5a5a-5a5a-5a5a-5a5a-5a5a5a5a5a5a")
	claim := filepath.Join(root, "claims", string(uuid), aKey)
	usage := filepath.Join(claim, usageName)
	for _, dir := range []string{filepath.Join(root, "driver"), claim} {
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	nonce, err := makeUsage(usage, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := makePage(filepath.Join(claim, limitName), 0, Limit{GPU: uuid, Bytes: aGiB, Context: 1 << 20}, nonce); err != nil {
		t.Fatal(err)
	}
	hidden, capped := filepath.Join(root, "hidden"), filepath.Join(root, cudaName)
	if err := os.WriteFile(hidden, []byte("{ local: "+strings.Join(append([]string{"nothing"}, lacks...), ";")+"; };"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"-std=gnu2x", "-O2", "-shared", "-fPIC", "-Wl,-soname," + cudaName, "-Wl,--version-script," + hidden, "-Ic", "-o", filepath.Join(root, "driver", cudaName), "testdata/driver.c", "testdata/stubs.c"},
		{"-std=gnu17", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-Ic", "-o", filepath.Join(root, program), "testdata/" + program + ".c", "-ldl"},
	} {
		if _, err := gcc(t.Context(), "", args...); err != nil {
			t.Fatal(err)
		}
	}
	if lacks != nil {
		if library, err = Hide(library, filepath.Join(root, "driver", cudaName)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(capped, library, 0o755); err != nil {
		t.Fatal(err)
	}
	// A limit page counts where it is mounted read-only.
	cmd := exec.CommandContext(t.Context(), "unshare", append([]string{"--mount", "/bin/sh", "-c", `mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"`,
		filepath.Join(claim, limitName), filepath.Join(root, program), capped, usage}, lacks...)...)
	if os.Geteuid() != 0 {
		cmd.Args = slices.Insert(cmd.Args, 1, "--map-root-user")
	}
	out, err := cmd.CombinedOutput()
	return string(out), err
}
