// SPDX-License-Identifier: Apache-2.0

package install

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// modulesFile says which modules the kernel has; one that cannot load any lacks it.
const modulesFile = "/proc/modules"

// Modules makes /proc/modules, with the driver's modules in it, for the calling
// process's mount namespace. Procfs lets nobody make a file, so where the kernel
// has none, /proc becomes a folder of links to what it was: enough for one
// program that reads fixed names, and no place for a daemon, since processes that
// start later are not in it. It refuses the namespace that the machine itself
// runs in.
func Modules() error {
	if err := Guard(); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp("", "gpu-emulator-")
	if err != nil {
		return fmt.Errorf("stage %s: %w", modulesFile, err)
	}
	defer os.Remove(tmp)
	if err := unix.Mount("gpu-emulator", tmp, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return fmt.Errorf("stage %s: %w", modulesFile, err)
	}
	defer unix.Unmount(tmp, unix.MNT_DETACH)
	file := filepath.Join(tmp, filepath.Base(modulesFile))
	if err := os.WriteFile(file, []byte(modules), 0o644); err != nil {
		return fmt.Errorf("stage %s: %w", modulesFile, err)
	}
	if _, err := os.Stat(modulesFile); err == nil {
		if err := unix.Mount(file, modulesFile, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount over %s: %w", modulesFile, err)
		}
		return nil
	}

	const real = "real"
	if err := os.Mkdir(filepath.Join(tmp, real), 0o755); err != nil {
		return fmt.Errorf("stage /proc: %w", err)
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return fmt.Errorf("stage /proc: %w", err)
	}
	for _, e := range entries {
		if err := os.Symlink(filepath.Join(real, e.Name()), filepath.Join(tmp, e.Name())); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("stage /proc: %w", err)
		}
	}
	if err := unix.Mount("/proc", filepath.Join(tmp, real), "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("stage /proc: %w", err)
	}
	if err := unix.Mount(tmp, "/proc", "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount over /proc: %w", err)
	}
	return nil
}
