// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestRuntime: a real CUDA runtime asks the driver the same questions, and tells a
// program the same, with the cap in front of the driver and without it.
func TestRuntime(t *testing.T) {
	b := open(t)
	if _, err := os.Stat("/proc/driver/nvidia/version"); err == nil {
		t.Skip("this machine has an NVIDIA driver: the runtime would use it")
	}
	program := filepath.Join(t.TempDir(), "runtime")
	build(t, "runtime.c", program)
	for _, d := range judges {
		t.Run(d.version, func(t *testing.T) {
			cuda, _ := b.install(t, d)
			has := exports(t, cuda.file)
			bare, capped := witness(t, cuda.real, has), witness(t, cuda.cap, has)
			for _, r := range runtimes {
				cudart := library(t, r.deb, "libcudart.so.")
				for _, env := range []string{"HOME=/", "PRETEND=1"} {
					run := func(libraries string) []string {
						return say(t, "cuMemAlloc\ncuMemAllocAsync\ncuNothing\n", []string{"LD_LIBRARY_PATH=" + libraries, env}, program, cudart)
					}
					// Why there is no GPU depends on the device nodes, which other tests
					// make and remove: bare must say the same before and after.
					want, got := run(bare), run(capped)
					for again := run(bare); !slices.Equal(want, again); again = run(bare) {
						want, got = again, run(capped)
					}
					if !slices.Equal(want, got) {
						t.Errorf("CUDA %s, %s: with the cap it is not the same:\n%s", r.version, env, differ(want, got))
					}
					asked := 0
					for _, line := range want {
						if strings.HasPrefix(line, "asked ") {
							asked++
						}
					}
					// Of a driver that is too old for it a runtime asks nothing.
					const tooOld = "cudaGetDeviceCount: 35"
					if !slices.Contains(want, tooOld) && asked < 300 {
						t.Errorf("CUDA %s, %s: the runtime asked for %d functions: %q", r.version, env, asked, want)
					}
					t.Logf("CUDA %s, %s: %d functions", r.version, env, asked)
				}
			}
		})
	}
}

// witness builds the library that stands for libcuda.so.1 in front of another,
// which has some names, and returns its folder.
func witness(t *testing.T, behind string, has []string) string {
	t.Helper()
	dir := t.TempDir()
	empty, stub := filepath.Join(dir, "stub.c"), filepath.Join(dir, "stub.so")
	write(t, empty, "")
	compile(t, empty, stub, "-shared", "-nostdlib", "-Wl,-soname,"+behind)
	form := func(name string) int {
		if slices.Contains(has, name) {
			return 1
		}
		return 0
	}
	build(t, "witness.c", filepath.Join(dir, cudaName), "-shared", "-fPIC", "-Wl,-soname,"+cudaName, "-Wl,--no-as-needed", fmt.Sprintf("-DBEHIND=%q", behind),
		fmt.Sprintf("-DFORM_1=%d", form("cuGetProcAddress")), fmt.Sprintf("-DFORM_2=%d", form("cuGetProcAddress_v2")), stub)
	return dir
}

// differ shows the first lines that are not the same.
func differ(a, b []string) string {
	var out strings.Builder
	for i, shown := 0, 0; i < max(len(a), len(b)) && shown < 20; i++ {
		line := func(of []string) string {
			if i < len(of) {
				return of[i]
			}
			return "nothing"
		}
		if line(a) != line(b) {
			fmt.Fprintf(&out, "%s\n    with the cap: %s\n", line(a), line(b))
			shown++
		}
	}
	return out.String()
}
