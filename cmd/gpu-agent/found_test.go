// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/internal/command"
	"example.com/gpu-agent/pkg/gpu/nvml"
	"example.com/gpu-agent/tests/emulator"
	serving "example.com/gpu-agent/tests/emulator/daemon"
	"example.com/gpu-agent/tests/emulator/install"
	"example.com/gpu-agent/tests/emulator/lib"
)

// emulated serves a world until the test's end, and returns the flags that lead to its driver.
func emulated(t *testing.T, spec emulator.Spec) (w *emulator.World, root string, flags []string) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skipf("skipped: the emulated driver's libraries need gcc: %v", err)
	}
	libraries, err := lib.Cached(t.Context())
	must(err)
	w, err = emulator.New(spec)
	must(err)
	dir, err := install.Scratch()
	must(err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	root, err = filepath.EvalSymlinks(dir)
	must(err)
	must(install.Driver(root, libraries, w))
	if err = install.Nodes(filepath.Join(root, "dev"), w); errors.Is(err, fs.ErrPermission) {
		t.Skipf("skipped: making device nodes needs CAP_MKNOD: %v", err)
	}
	must(err)
	must(install.Kernel(root, "Character devices:\n", w))
	l, err := serving.Listen(filepath.Join(root, install.Socket))
	must(err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- (&serving.Server{World: w, Driver: root}).Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		_ = l.Close()
	})
	return w, root, []string{"--driver-root", root, "--proc-root", filepath.Join(root, "proc"), "--sys-root", filepath.Join(root, "sys")}
}

// What earlier owners have left is in inventory, in check and in check --node, with what to do, and is gone from them when it is
// gone from the node. The exit code of check --node says whether it keeps GPUs from being used.
func TestWhatEarlierOwnersHaveLeft(t *testing.T) {
	w, root, flags := emulated(t, emulator.Spec{Count: 2, Model: "A100-SXM4-40GB"})
	partitions := write(t, "p.yaml", "version: v1\npartitions:\n  default:\n    - {devices: [0], mode: shared}\n    - {devices: [1], mode: \"off\"}\n"+
		"  cut:\n    - {devices: all, mode: mig}\n")
	state := t.TempDir() // with no agent's socket
	see := func(exit command.Exit, words []string, args ...string) {
		t.Helper()
		out, said, status := program(t, append(args, flags...)...)
		if status != int(exit) {
			t.Errorf("%v: exit code %d, want %d: %s", args, status, exit, said)
		}
		for _, word := range words {
			if without, found := strings.CutPrefix(word, "!"); strings.Contains(out, without) == found {
				t.Errorf("%v: want %q in\n%s", args, word, out)
			}
		}
	}
	ofNode := []string{"check", "--node"}
	byFile := []string{"check", "--node", "--config", partitions}
	cut := []string{"check", "--node", "--config", partitions, "--partition", "cut"}
	check := []string{"check", "--config", partitions, "--state-dir", state}

	nothing := []string{"!ComputeModeSet", "!PowerCapped", "!ResetBlocked", "!ModesetOn", "!do: "}
	clean := func() {
		t.Helper()
		see(command.Done, append([]string{"2 GPUs: earlier owners have left nothing"}, nothing...), ofNode...)
		see(command.Done, nothing, byFile...)
		see(command.Done, nothing, cut...)
		see(command.Done, append([]string{"partition default fits"}, nothing...), check...)
		see(command.Done, append([]string{"A100-SXM4-40GB"}, nothing...), "inventory")
	}
	clean()

	fresh := w.State().GPUs[1].Setup
	set := fresh
	set.Compute, set.PowerMilliwatts = emulator.ComputeExclusiveProcess, 300_000
	if err := w.SetSetup(1, set); err != nil {
		t.Fatal(err)
	}
	mode := []string{"ComputeModeSet: GPU 1 (", "EXCLUSIVE_PROCESS", "do: end these processes", "nvidia-smi -i 1 -c DEFAULT",
		"PowerCapped: GPU 1 (", "300 W of 700 W", "do: nvidia-smi -i 1 -pl 700"}
	see(command.NotApplied, mode, ofNode...)
	see(command.Done, mode, byFile...) // the partition has that GPU off
	see(command.Done, mode, cut...)    // instances have modes of their own
	see(command.Done, mode, check...)
	see(command.Done, mode, "inventory")
	if err := w.SetSetup(1, fresh); err != nil {
		t.Fatal(err)
	}
	clean()

	// A monitor that has the device open, and the display driver.
	drm := filepath.Join(root, "sys/module/nvidia_drm/parameters")
	fds := filepath.Join(root, "proc/4242/fd")
	for _, dir := range []string{drm, fds} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.WriteFile(filepath.Join(drm, "modeset"), []byte("Y\n"), 0o644),
		os.WriteFile(filepath.Join(root, "proc/4242/comm"), []byte("nv-hostengine\n"), 0o644),
		os.Symlink(filepath.Join(root, "dev/nvidia1"), filepath.Join(fds, "7"))); err != nil { // minor 1 is GPU 0's
		t.Fatal(err)
	}
	held := []string{"ResetBlocked: GPU 0 (", "4242 (nv-hostengine)", "do: end them first", "!GPU 1 (", "ModesetOn: the node"}
	see(command.NotApplied, held, cut...)
	see(command.Done, []string{"!ResetBlocked", "ModesetOn: the node"}, byFile...)
	if err := errors.Join(os.RemoveAll(filepath.Join(root, "sys/module/nvidia_drm")), os.RemoveAll(filepath.Join(root, "proc/4242"))); err != nil {
		t.Fatal(err)
	}
	clean()
}

// A limit of the driver on a cgroup that is no container's is found, and is gone with its cgroup.
func TestLimitElsewhereIsFound(t *testing.T) {
	_, root, flags := emulated(t, emulator.Spec{Count: 1, Model: "A100-SXM4-40GB", Driver: "615.11.02"})
	cgroups := filepath.Join(root, "sys/fs/cgroup")
	if err := os.MkdirAll(cgroups, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("cgroup2", cgroups, "cgroup2", 0, ""); err != nil {
		t.Skipf("skipped: mounting cgroup2 failed: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(cgroups, unix.MNT_DETACH); err != nil { // the emulated driver keeps a cgroup open
			t.Error(err)
		}
	})
	check := func() string {
		t.Helper()
		out, said, status := program(t, append([]string{"check", "--node"}, flags...)...)
		if status != int(command.Done) || said != "" {
			t.Errorf("exit code %d: %s", status, said)
		}
		return out
	}
	service, err := os.MkdirTemp(cgroups, "batch-*.service")
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove(service)
	if out := check(); strings.Contains(out, "LimitElsewhere") {
		t.Errorf("before there is one:\n%s", out)
	}
	driver, err := nvml.Open(t.Context(), nvml.Options{DriverRoot: root, ProcRoot: filepath.Join(root, "proc"), SysRoot: filepath.Join(root, "sys")})
	if err != nil {
		t.Fatal(err)
	}
	defer driver.Close()
	inv, err := driver.Inventory(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := driver.SetMemoryLimit(t.Context(), inv.GPUs[0].UUID, service, 3<<30); err != nil {
		t.Fatal(err)
	}
	if out := check(); !strings.Contains(out, "LimitElsewhere: GPU 0 (") || !strings.Contains(out, "/"+filepath.Base(service)) ||
		!strings.Contains(out, "do: take the program that set them off the node") {
		t.Errorf("with one of 3 GiB:\n%s", out)
	}
	if err := os.Remove(service); err != nil {
		t.Fatal(err)
	}
	if out := check(); strings.Contains(out, "LimitElsewhere") {
		t.Errorf("after the end of its cgroup:\n%s", out)
	}
}
