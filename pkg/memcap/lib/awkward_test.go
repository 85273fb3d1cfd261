// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
)

// TestAwkwardDriver: the right override is found where the driver's answers to
// cuGetProcAddress are no functions that it exports, and nothing is counted
// twice where it calls its own functions by name.
func TestAwkwardDriver(t *testing.T) {
	awkward(t, "awkward")
}

// TestContextsForGraphics: contexts of OpenGL and VDPAU are counted.
func TestContextsForGraphics(t *testing.T) {
	awkward(t, "graphics")
}

// TestReopenedManyTimesTakesOneSlot: a program that opens and closes the library
// all the time, with an allocation in between, is one process in the count.
func TestReopenedManyTimesTakesOneSlot(t *testing.T) {
	awkward(t, "reopen")
}

// TestUnmapsNeedNoMemory: to register and release a buffer makes no mapping of the
// library's own, which would cost more than all the rest.
func TestUnmapsNeedNoMemory(t *testing.T) {
	awkward(t, "unmap")
}

// TestNamesThatTheDriverLacks: dlsym finds in a fitted library what the driver has,
// and nothing that it does not have; cuGetProcAddress is as before.
func TestNamesThatTheDriverLacks(t *testing.T) {
	awkward(t, "lacks", "cuCtxSynchronize_v2", "cuCtxCreate_v4", "cuGraphInstantiateWithParams_ptsz")
}

// awkward runs a program of testdata in front of the driver of driver.c, without
// the names that this lacks. It gets the path of the cap's library, of its usage
// page, and those names, and has nothing to say.
func awkward(t *testing.T, program string, lacks ...string) {
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
	claim := filepath.Join(root, "claims", string(uuid), aKey)
	usage := filepath.Join(claim, usageName)
	for _, dir := range []string{filepath.Join(root, "driver"), claim} {
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
	hidden, capped := filepath.Join(root, "hidden"), filepath.Join(out, cudaName)
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
		data, err := os.ReadFile(capped)
		if err == nil {
			data, err = Hide(data, filepath.Join(root, "driver", cudaName))
		}
		if err == nil {
			err = os.WriteFile(capped, data, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	// A limit page counts where it is mounted read-only.
	cmd := exec.CommandContext(t.Context(), "/bin/sh", append([]string{"-c", `mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"`,
		filepath.Join(claim, limitName), filepath.Join(root, program), capped, usage}, lacks...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
	}
	if got, err := cmd.CombinedOutput(); err != nil || len(got) != 0 {
		t.Errorf("%v\n%s", err, got)
	}
}
