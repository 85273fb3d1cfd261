// SPDX-License-Identifier: Apache-2.0

package lib_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"golang.org/x/sys/unix"

	"example.com/gpu-agent/tests/emulator"
)

// cgroup makes a cgroup in the unified hierarchy, which goes with the test once
// its last process has.
func cgroup(t *testing.T) string {
	t.Helper()
	for _, mount := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var fs unix.Statfs_t
		if err := unix.Statfs(mount, &fs); err != nil || fs.Type != unix.CGROUP2_SUPER_MAGIC {
			continue
		}
		dir := filepath.Join(mount, fmt.Sprintf("gpu-emulator-test-%d", os.Getpid()))
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Skipf("skipped: needs a cgroup v2 hierarchy that can be written: %v", err)
		}
		t.Cleanup(func() { removeCgroup(t, dir) })
		return dir
	}
	t.Skip("skipped: needs a cgroup v2 hierarchy at /sys/fs/cgroup or its unified")
	return ""
}

// removeCgroup waits for the processes in it to be gone.
func removeCgroup(t *testing.T, dir string) {
	t.Helper()
	for {
		err := unix.Rmdir(dir)
		switch {
		case err == nil || errors.Is(err, unix.ENOENT):
			return
		case !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EINTR):
			t.Errorf("remove %s: %v", dir, err)
			return
		}
		runtime.Gosched()
	}
}

func join(t *testing.T, dir string, pid int) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0); err != nil {
		t.Fatal(err)
	}
}

// TestMemoryLimits: a program in a cgroup, and one in the cgroup below it, get no
// more than both may have; the one beside it does.
func TestMemoryLimits(t *testing.T) {
	n := start(t, emulator.Spec{Driver: "615.11", Count: 2, ContextMiB: 100})
	api := n.open(t)
	d := device(t, api, 0)
	dir := cgroup(t)
	below := filepath.Join(dir, "below")
	if err := os.Mkdir(below, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { removeCgroup(t, below) })

	_, r := d.GetMemoryLimits_v1(dir)
	want(t, "of none yet", r, nvml.ERROR_NOT_FOUND)
	want(t, "of no cgroup", d.SetMemoryLimits_v1(dir+"/none", 0, 400*mib), nvml.ERROR_OPERATING_SYSTEM)
	want(t, "of a directory that is none", d.SetMemoryLimits_v1(t.TempDir(), 0, 400*mib), nvml.ERROR_OPERATING_SYSTEM)
	want(t, "more than the card has", d.SetMemoryLimits_v1(dir, 0, 1<<50), nvml.ERROR_INVALID_ARGUMENT)
	ok(t, d.SetMemoryLimits_v1(dir, 400*mib, 400*mib), "set")

	first, second, beside := startProbe(t, probeWith{}), startProbe(t, probeWith{}), startProbe(t, probeWith{})
	join(t, dir, first.pid)
	join(t, below, second.pid)
	for _, p := range []*probe{first, second, beside} {
		p.must("cuInit 0; cuCtxCreate_v2 &c 0 0")
	}
	first.must("cuMemAlloc_v2 &p 104857600; cuMemAllocManaged &m 1073741824 1")
	second.must("cuMemAlloc_v2 &p 100663296")
	want(t, "a little more than is left", second.do("cuMemAlloc_v2 &q 6291456"), cudaOutOfMemory)
	second.must("cuMemAlloc_v2 &q 4194304")
	want(t, "another context", first.do("cuCtxCreate_v2 &d 0 0"), cudaOutOfMemory)
	beside.must("cuMemAlloc_v2 &p 1073741824")
	m, r := d.GetMemoryLimits_v1(dir)
	ok(t, r, "get")
	want(t, "limits", m, nvml.MemoryLimits_v1{NameSpace: dir, SoftLimit: 400 * mib, HardLimit: 400 * mib, CurrentUsed: 400 * mib})

	// What a program had is free when it is dead, to the others of its cgroup.
	second.cmd.Process.Signal(syscall.SIGKILL)
	second.cmd.Wait()
	first.must("cuMemAlloc_v2 &q 104857600")

	ok(t, d.SetMemoryLimits_v1(dir, 0, ^uint64(0)), "clear")
	_, r = d.GetMemoryLimits_v1(dir)
	want(t, "of none any more", r, nvml.ERROR_NOT_FOUND)
	first.must("cuMemAlloc_v2 &r 1073741824")

	// The end of a cgroup is the end of its limits, also if another has its name.
	ok(t, d.SetMemoryLimits_v1(below, 0, mib), "set below")
	removeCgroup(t, below)
	if err := os.Mkdir(below, 0o755); err != nil {
		t.Fatal(err)
	}
	_, r = d.GetMemoryLimits_v1(below)
	want(t, "of another of that name", r, nvml.ERROR_NOT_FOUND)
}

func TestMemoryLimitsOfAnOldDriver(t *testing.T) {
	n := start(t, emulator.Spec{Driver: "580.159.03", Count: 1})
	d := device(t, n.open(t), 0)
	dir := cgroup(t)
	want(t, "set", d.SetMemoryLimits_v1(dir, 0, mib), nvml.ERROR_NOT_SUPPORTED)
	_, r := d.GetMemoryLimits_v1(dir)
	want(t, "get", r, nvml.ERROR_NOT_SUPPORTED)
}

// TestMemoryLimitsNeedDmemFiles: on a kernel with the dmem controller a cgroup for
// which nobody has switched it on is "not found", though it is there.
func TestMemoryLimitsNeedDmemFiles(t *testing.T) {
	n := start(t, emulator.Spec{Driver: "615.11", Count: 1, Dmem: true})
	d := device(t, n.open(t), 0)
	dir := cgroup(t)
	has := func() bool { _, err := os.Stat(filepath.Join(dir, "dmem.max")); return err == nil }()
	r := d.SetMemoryLimits_v1(dir, mib, mib)
	want(t, "found, as it has dmem.max", r != nvml.ERROR_NOT_FOUND, has)
	if got := n.world.State().DmemMin; len(got) != 0 {
		t.Errorf("dmem.min %v of a cgroup below the root", got)
	}
	want(t, "of no cgroup", d.SetMemoryLimits_v1(dir+"/none", 0, mib), nvml.ERROR_OPERATING_SYSTEM)
}
