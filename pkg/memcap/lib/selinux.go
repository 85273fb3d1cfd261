// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	labelName = "security.selinux"
	// With the policy container-selinux, containers may read and run files of the first label,
	// and write those of the second.
	readable = "system_u:object_r:container_ro_file_t:s0"
	writable = "system_u:object_r:container_file_t:s0"
)

// Relabel gives dir/cap, and what is in it, the SELinux label by which containers may read it,
// and dir/cap/usage the one by which they may write. What is made there later takes the
// directory's, and a usage page is on a file system with the label of dir/cap/usage. Where
// the kernel has no SELinux it does nothing.
func Relabel(dir string) error {
	if !labelled() {
		return nil
	}
	return relabel(dir)
}

func relabel(dir string) error {
	top := filepath.Join(dir, "cap")
	return filepath.WalkDir(top, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		label, next := readable, error(nil)
		if path == filepath.Join(top, usageName) {
			label, next = writable, fs.SkipDir // what is mounted there has its label by the mount
		}
		if err := unix.Lsetxattr(path, labelName, []byte(label+"\x00"), 0); err != nil {
			return fmt.Errorf("give %s the SELinux label %s: %w", path, label, err)
		}
		return next
	})
}

// labelled tells a kernel with SELinux by this process's own label.
func labelled() bool {
	own, err := os.ReadFile("/proc/self/attr/current")
	return err == nil && strings.Count(string(own), ":") >= 3
}

// labelOf returns the SELinux label of a directory, or "" where the kernel has none. What is
// mounted below it gets the same label, as a file would.
func labelOf(dir string) string {
	if !labelled() {
		return ""
	}
	label := make([]byte, 256)
	n, err := unix.Lgetxattr(dir, labelName, label)
	if err != nil {
		return ""
	}
	return strings.TrimRight(string(label[:n]), "\x00\n")
}
