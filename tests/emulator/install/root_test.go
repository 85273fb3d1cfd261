// SPDX-License-Identifier: Apache-2.0

package install_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/install"
	"example.com/gpu-agent/tests/emulator/lib"
)

func TestRealDriverIsRefused(t *testing.T) {
	if err := install.NoReal(t.TempDir()); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"proc/driver/nvidia/version", "sys/module/nvidia/version", "dev/nvidiactl"} {
		root := t.TempDir()
		if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(root, name)), 0o755), os.WriteFile(filepath.Join(root, name), nil, 0o644)); err != nil {
			t.Fatal(err)
		}
		if err := install.NoReal(root); !errors.Is(err, install.ErrReal) {
			t.Errorf("with %s: %v", name, err)
		}
	}
}

// TestRootIsOneMount lays a driver as on a node, in a mount namespace of its own.
func TestRootIsOneMount(t *testing.T) {
	needRoot(t)
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), "INSTALL_TEST_ROLE=root")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func layRootAndLook() error {
	built, err := lib.Cached(context.Background())
	if err != nil {
		return err
	}
	w, err := emulator.New(emulator.Spec{Count: 2})
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "root-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	root := filepath.Join(dir, "run/nvidia/driver")
	for range 2 { // the second in place of one that nobody took away
		if err := install.LayRoot(root, built, w); err != nil {
			return err
		}
	}
	for name, want := range map[string]string{
		"proc/self/status":                                 "Pid:",
		"proc/devices":                                     "195 nvidia\n",
		"proc/driver/nvidia-caps/mig-minors":               "gpu0/gi0/access 3\n",
		"sys/bus/pci/devices/0000:07:00.0/device":          "0x2330",
		"usr/lib/x86_64-linux-gnu/libcuda.so.1":            "ELF",
		"proc/driver/nvidia/gpus/0000:07:00.0/information": w.State().GPUs[0].UUID,
	} {
		data, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			return err
		}
		if !strings.Contains(string(data), want) {
			return fmt.Errorf("%s does not say %q", name, want)
		}
	}
	m, err := install.Find(root)
	if err != nil {
		return err
	}
	if err := errors.Join(w.Unplug(0), m.Sync(w)); err != nil {
		return err
	}
	for _, gone := range []string{"proc/driver/nvidia/gpus/0000:07:00.0", "dev/nvidia1"} {
		if _, err := os.Lstat(filepath.Join(root, gone)); !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("%s of an unplugged GPU: %v", gone, err)
		}
	}
	for range 2 { // the second finds nothing to do
		if err := install.RemoveRoot(root); err != nil {
			return err
		}
	}
	if _, err := os.Lstat(root); !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("a driver's root stays: %v", err)
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err != nil || strings.Contains(string(mounts), dir) {
		return fmt.Errorf("mounts stay (%v):\n%s", err, mounts)
	}
	// Another's.
	if err := os.MkdirAll(filepath.Join(root, "usr"), 0o755); err != nil {
		return err
	}
	if err := install.LayRoot(root, built, w); err == nil || !strings.Contains(err.Error(), "another's") {
		return fmt.Errorf("over another driver: %v", err)
	}
	if err := install.RemoveRoot(root); err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(root, "usr")); err != nil {
		return fmt.Errorf("what is another's was taken away: %w", err)
	}
	return nil
}
