// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestCgroupsAbove: those between a cgroup and the root of its hierarchy, nearest
// first, by the names that they have themselves.
func TestCgroupsAbove(t *testing.T) {
	mount := "/sys/fs/cgroup"
	var fs unix.Statfs_t
	if err := unix.Statfs(mount, &fs); err != nil || fs.Type != unix.CGROUP2_SUPER_MAGIC {
		mount += "/unified"
	}
	pod := filepath.Join(mount, fmt.Sprintf("gpu-emulator-above-%d", os.Getpid()))
	if err := os.MkdirAll(pod+"/qos/container", 0o755); err != nil {
		t.Skipf("skipped: needs a cgroup v2 hierarchy that can be written: %v", err)
	}
	t.Cleanup(func() { // after the deferred calls below have closed what is open
		for _, dir := range []string{pod + "/qos/container", pod + "/qos", pod} {
			_ = unix.Rmdir(dir)
		}
	})
	var names []string
	for _, dir := range []string{pod + "/qos/container", pod + "/qos", pod} {
		f, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		c, err := openCgroup("/proc", os.Getpid(), int(f.Fd()))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		names = append(names, c.Name())
		if dir == pod+"/qos/container" {
			defer func() {
				if got := c.Above(); len(got) != 2 || got[0] != names[1] || got[1] != names[2] {
					t.Errorf("above %s: %v, want %v", names[0], got, names[1:])
				}
			}()
		}
		if _, err := os.Stat(dir + "/dmem.max"); c.Dmem() != (err == nil) {
			t.Errorf("dmem files of %s: %v, want %v", dir, c.Dmem(), err == nil)
		}
	}
}
