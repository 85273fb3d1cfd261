// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml"
)

// cgroup makes a cgroup in the unified hierarchy, with nobody in it, which goes
// with the test.
func cgroup(t *testing.T) string {
	t.Helper()
	for _, mount := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		var fs unix.Statfs_t
		if err := unix.Statfs(mount, &fs); err != nil || fs.Type != unix.CGROUP2_SUPER_MAGIC {
			continue
		}
		dir := filepath.Join(mount, fmt.Sprintf("gpu-agent-conformance-%d", os.Getpid()))
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Skipf("skipped: needs a cgroup v2 hierarchy that can be written: %v", err)
		}
		t.Cleanup(func() {
			if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
				t.Errorf("remove %s: %v", dir, err)
			}
		})
		return dir
	}
	t.Skip("skipped: needs a cgroup v2 hierarchy at /sys/fs/cgroup or its unified")
	return ""
}

// memoryLimit sets limits on a cgroup of its own, where nobody can meet them.
func memoryLimit(t *testing.T, opts nvml.Options) {
	d := Open(t, opts)
	inv := read(t, d)
	dir := cgroup(t)
	tried := 0
	for _, dev := range inv.GPUs {
		total, u := uint64(dev.Memory)<<20, dev.UUID
		half := total / 2 &^ (2<<20 - 1)
		err := d.SetMemoryLimit(wait(t), u, dir, half)
		if errors.Is(err, gpu.ErrNotSupported) || errors.Is(err, gpu.ErrNoPermission) {
			if dev.MIG.Enabled {
				t.Logf("GPU %d is in MIG mode: %v", dev.Index, err)
			} else {
				t.Logf("GPU %d, driver %s: %v", dev.Index, inv.Driver, err)
			}
			if _, err := d.MemoryLimit(wait(t), u, dir); err == nil {
				t.Errorf("GPU %d has a limit that could not be set", dev.Index)
			}
			continue
		}
		if err != nil {
			t.Error(err)
			continue
		}
		tried++
		if m, err := d.MemoryLimit(wait(t), u, dir); err != nil || m != (gpu.MemoryLimit{Bytes: half}) {
			t.Errorf("GPU %d: %+v, %v, want a limit of %d bytes and nothing used", dev.Index, m, err, half)
		}
		if err := d.SetMemoryLimit(wait(t), u, dir, half/2); err != nil {
			t.Errorf("GPU %d: a lower one: %v", dev.Index, err)
		}
		if m, err := d.MemoryLimit(wait(t), u, dir); err != nil || m.Bytes != half/2 {
			t.Errorf("GPU %d: %+v, %v, want the lower limit of %d bytes", dev.Index, m, err, half/2)
		}
		if err := d.SetMemoryLimit(wait(t), u, dir, total+1<<30); !errors.Is(err, gpu.ErrInvalid) {
			t.Errorf("GPU %d: more than there is: %v, want ErrInvalid", dev.Index, err)
		}
		if err := d.SetMemoryLimit(wait(t), u, dir+"/none", half); !errors.Is(err, gpu.ErrNotFound) {
			t.Errorf("GPU %d: a cgroup that is not there: %v, want ErrNotFound", dev.Index, err)
		}
		if err := d.SetMemoryLimit(wait(t), u, dir, nvml.NoLimit); err != nil {
			t.Errorf("GPU %d: none: %v", dev.Index, err)
		}
		if m, err := d.MemoryLimit(wait(t), u, dir); err == nil && m.Bytes != nvml.NoLimit || err != nil && !errors.Is(err, gpu.ErrNotFound) {
			t.Errorf("GPU %d: %+v, %v after the limit was undone", dev.Index, m, err)
		}
	}
	if tried == 0 {
		t.Skipf("skipped: needs driver R615 or later, root, and a card that can limit cgroups; driver %s on %d GPUs cannot", inv.Driver, len(inv.GPUs))
	}
	if err := d.SetMemoryLimit(wait(t), "GPU-00000000-1111-2222-3333-444444444444", dir, 1<<30); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("on no GPU: %v, want ErrNotFound", err)
	}
}
