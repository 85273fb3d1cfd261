// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
)

// What nvidia-smi says of a reset that it refuses.
func TestResetMeaning(t *testing.T) {
	for _, c := range []struct {
		status int
		said   string
		want   error
	}{
		{19, "", gpu.ErrInUse},
		{255, "The following GPUs could not be reset: GPU 00000000:07:00.0: In use by another client", gpu.ErrInUse},
		{1, "1 device is currently being used by one or more other processes", gpu.ErrInUse},
		{2, "Invalid combination of input arguments", gpu.ErrNotSupported},
		{3, "", gpu.ErrNotSupported},
		{255, "Resetting GPU 00000000:07:00.0 is not supported.", gpu.ErrNotSupported},
		{4, "Insufficient Permissions", gpu.ErrNoPermission},
		{6, "No devices were found", gpu.ErrNotFound},
		{9, "", gpu.ErrNoDriver},
		{12, "", gpu.ErrNoDriver},
		{15, "", gpu.ErrLost},
		{255, "Unknown Error", gpu.ErrDriver},
		{-1, "", gpu.ErrDriver},
	} {
		if got := resetMeaning(c.status, c.said); got != c.want {
			t.Errorf("status %d, %q: %v, want %v", c.status, c.said, got, c.want)
		}
	}
}

// Clients are found by the device that they have open, under whatever name.
func TestClients(t *testing.T) {
	root := t.TempDir()
	d := newComponents(&session{opts: Options{DevRoot: root, ProcRoot: filepath.Join(root, "proc")}})
	dev := func(name string, minor uint32) string {
		t.Helper()
		path := filepath.Join(root, "dev", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(195, minor))); err != nil {
			t.Skipf("skipped: making device nodes needs CAP_MKNOD: %v", err)
		}
		return path
	}
	opens := func(pid int, comm string, paths ...string) {
		t.Helper()
		dir := filepath.Join(d.opts.ProcRoot, fmt.Sprint(pid))
		write(t, filepath.Join(dir, "comm"), comm+"\n")
		if err := os.Mkdir(filepath.Join(dir, "fd"), 0o700); err != nil {
			t.Fatal(err)
		}
		for i, path := range paths {
			if err := os.Symlink(path, filepath.Join(dir, "fd", fmt.Sprint(i))); err != nil {
				t.Fatal(err)
			}
		}
	}
	own, other := dev("nvidia3", 3), dev("nvidia4", 4)
	inside := dev("a-container/nvidia3", 3)
	null := filepath.Join(root, "dev/null-nvidia")
	write(t, null, "")
	opens(70, "bash", null, other)
	if got := d.clients(3); !strings.Contains(got, "sees none of them") {
		t.Errorf("nobody has it open: %s", got)
	}
	opens(1200, "dcgm-exporter", null, other, own)
	opens(99, "python3", inside)
	opens(os.Getpid(), "gpu-agent", own)
	if got := d.clients(3); !strings.Contains(got, "99 (python3), 1200 (dcgm-exporter): end them") || strings.Contains(got, "bash") || strings.Contains(got, "gpu-agent") {
		t.Errorf("clients: %s", got)
	}
	for i := range 20 {
		opens(2000+i, "worker", own)
	}
	if got := d.clients(3); !strings.Contains(got, "and 14 more") {
		t.Errorf("22 clients: %s", got)
	}
	for _, minor := range []int{-1, 7} {
		if got := d.clients(minor); got == "" || strings.Contains(got, "dcgm") {
			t.Errorf("minor %d: %s", minor, got)
		}
	}
}

func TestResetWithoutTheTool(t *testing.T) {
	if err := standIn(t, "").Reset(t.Context(), "GPU-a"); !errors.Is(err, gpu.ErrNotSupported) || !strings.Contains(err.Error(), "nvidia-smi") {
		t.Errorf("%v, want ErrNotSupported that names the program", err)
	}
}
