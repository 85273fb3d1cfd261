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
	// With the policy container-selinux, containers may read and run files with the first label,
	// and write those with the second.
	readable = "system_u:object_r:container_ro_file_t:s0"
	writable = "system_u:object_r:container_file_t:s0"
)

// Relabel gives dir/cap and its contents the SELinux label that lets containers read them, and
// dir/cap/usage the label that lets containers write. Files made there later get their directory's
// label; a usage page is on a file system with the label of dir/cap/usage. Without SELinux in the
// kernel, Relabel does nothing.
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
			label, next = writable, fs.SkipDir // file systems mounted there have their label by the mount
		}
		if err := unix.Lsetxattr(path, labelName, []byte(label+"\x00"), 0); err != nil {
			return fmt.Errorf("give %s the SELinux label %s: %w", path, label, err)
		}
		return next
	})
}

// labelled reports whether the kernel has SELinux, by this process's own label.
func labelled() bool {
	own, err := os.ReadFile("/proc/self/attr/current")
	return err == nil && strings.Count(string(own), ":") >= 3
}

// labelOf returns the SELinux label of a directory, or "" if the kernel has none. A file system
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
