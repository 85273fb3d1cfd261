// SPDX-License-Identifier: Apache-2.0

package install

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/tests/emulator"
)

// ErrReal says that a machine has a driver that is not the emulated one.
var ErrReal = errors.New("a real driver is on this machine, and the emulated one is for machines without GPUs")

// NoReal refuses, with ErrReal, a machine on which a real driver is loaded or has been.
// root is the machine's, / for this one.
func NoReal(root string) error {
	for _, name := range []string{"proc/driver/nvidia", "sys/module/nvidia", "dev/nvidiactl"} {
		path := filepath.Join(root, name)
		if _, err := os.Lstat(path); err == nil {
			return fmt.Errorf("%s is there: %w", path, ErrReal)
		} else if !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("look for a real driver: %w", err)
		}
	}
	return nil
}

// LayRoot lays a driver as a driver container does: below dir, an absolute path, which
// becomes a mount of its own with the driver's files, its device nodes, and the machine's procfs and a sysfs
// as if the kernel had the driver. built is the folder that lib.Build filled. Programs
// must be told to look there instead of /proc and /sys.
//
// What LayRoot laid before and RemoveRoot has not taken away, as after a kill, goes
// first. A directory with anything else in it is refused.
func LayRoot(dir, built string, w *emulator.World) error {
	if err := RemoveRoot(dir); err != nil {
		return err
	}
	if list, err := os.ReadDir(dir); len(list) > 0 {
		return fmt.Errorf("lay a driver at %s: it has %s in it, which is another's; take that away first", dir, list[0].Name())
	} else if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("lay a driver: %w", err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("lay a driver: %w", err)
	}
	// /run, where it usually stands, is mounted noexec and nodev by many systems, kind's
	// nodes among them: no library could be loaded from there.
	if err := unix.Mount(mountSource, dir, "tmpfs", unix.MS_NOSUID, "mode=0755"); err != nil {
		return fmt.Errorf("mount a file system for the driver at %s: %w", dir, errors.Join(err, os.Remove(dir)))
	}
	err := layRoot(dir, built, w)
	if err != nil {
		err = errors.Join(err, RemoveRoot(dir))
	}
	return err
}

func layRoot(dir, built string, w *emulator.World) error {
	if err := Driver(dir, built, w); err != nil {
		return err
	}
	devices, err := os.ReadFile("/proc/devices")
	if err != nil {
		return fmt.Errorf("read device numbers: %w", err)
	}
	if err := Kernel(dir, string(devices), w); err != nil {
		return err
	}
	if err := overProc(dir); err != nil {
		return fmt.Errorf("lay the driver's files over a procfs: %w", err)
	}
	m := Machine{Driver: dir, Dev: filepath.Join(dir, "dev"), Kernel: dir}
	return errors.Join(Nodes(m.Dev, w), m.Save())
}

// overProc makes dir/proc the machine's procfs, with the files over it that stand there.
func overProc(dir string) error {
	proc, files := filepath.Join(dir, "proc"), filepath.Join(dir, ".proc")
	if err := errors.Join(os.Rename(proc, files), os.Mkdir(proc, 0o555)); err != nil {
		return err
	}
	if err := unix.Mount("proc", proc, "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount a procfs: %w", err)
	}
	list, err := os.ReadDir(files)
	if err != nil {
		return err
	}
	for _, e := range list {
		at := filepath.Join(proc, e.Name())
		if _, err := os.Lstat(at); errors.Is(err, os.ErrNotExist) {
			continue // a kernel without modules has no list of them, and procfs takes no file
		}
		if err := unix.Mount(filepath.Join(files, e.Name()), at, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount over %s: %w", at, err)
		}
	}
	return nil
}

// takes says whether a file can be laid at a path: procfs takes none.
func takes(path string) bool {
	for {
		var on unix.Statfs_t
		if unix.Statfs(path, &on) == nil {
			return on.Type != unix.PROC_SUPER_MAGIC
		}
		path = filepath.Dir(path)
	}
}

// RemoveRoot takes away what LayRoot has laid at dir, and dir; where that is nothing, it
// does nothing. Containers that have files of it keep them until they end.
func RemoveRoot(dir string) error {
	found := false
	for {
		ours, err := topmost(dir)
		if err != nil {
			return fmt.Errorf("find what is mounted at %s: %w", dir, err)
		}
		if !ours {
			break
		}
		found = true
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount the driver at %s: %w", dir, err)
		}
	}
	if !found {
		return nil
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove the driver's root: %w", err)
	}
	return nil
}
