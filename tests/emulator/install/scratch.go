// SPDX-License-Identifier: Apache-2.0

package install

import (
	"os"

	"golang.org/x/sys/unix"
)

// memory is where Linux has a file system in memory that everybody may write to.
const memory = "/dev/shm"

// Scratch makes a directory to lay a machine in, for the caller to remove: a world
// with a topology is thousands of small files, which takes seconds on some disks. It
// is in memory where programs and device nodes are allowed there (in many
// containers they are not), else where os.MkdirTemp puts one.
func Scratch() (string, error) {
	var fs unix.Statfs_t
	if unix.Statfs(memory, &fs) == nil && fs.Flags&(unix.ST_NOEXEC|unix.ST_NODEV|unix.ST_RDONLY) == 0 {
		if dir, err := os.MkdirTemp(memory, "emulated-driver-"); err == nil {
			return dir, nil
		}
	}
	return os.MkdirTemp("", "emulated-driver-")
}
