// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/tests/emulator"
)

// cgroup is a control group of any hierarchy, the unified one or one of v1. Who
// is in it the kernel says at each question, in PIDs of the daemon's namespace.
type cgroup struct {
	dir  *os.File
	name string
}

// openCgroup opens the control group that a process has a descriptor of.
func openCgroup(proc string, pid, fd int) (emulator.Cgroup, error) {
	if fd < 0 {
		return nil, fs.ErrNotExist // the process could not open it
	}
	path := filepath.Join(proc, strconv.Itoa(pid), "fd", strconv.Itoa(fd))
	dir, err := os.OpenFile(path, unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, fmt.Errorf("open the cgroup of descriptor %d of process %d: %w", fd, pid, err)
	}
	var on unix.Statfs_t
	var is unix.Stat_t
	if err = unix.Fstatfs(int(dir.Fd()), &on); err == nil {
		err = unix.Fstat(int(dir.Fd()), &is)
	}
	if err == nil && on.Type != unix.CGROUP2_SUPER_MAGIC && on.Type != unix.CGROUP_SUPER_MAGIC {
		err = fs.ErrInvalid
	}
	if err != nil {
		dir.Close()
		return nil, fmt.Errorf("descriptor %d of process %d is no cgroup: %w", fd, pid, err)
	}
	// As long as it is open, its number is not given to another.
	return &cgroup{dir, fmt.Sprintf("%d:%d", is.Dev, is.Ino)}, nil
}

// containerID is what container runtimes call containers, in the names of their
// cgroups.
var containerID = regexp.MustCompile(`[0-9a-f]{64}`)

// containerOf is the container that a process is in by the names of its cgroups;
// empty is none.
func containerOf(proc string, pid int) string {
	list, _ := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "cgroup")) // of a process that ended: none
	return string(containerID.Find(list))
}

func (c *cgroup) Name() string { return c.name }

func (c *cgroup) Close() error { return c.dir.Close() }

// Dmem looks at the kernel's own files: one without the controller has none anywhere.
func (c *cgroup) Dmem() bool {
	var is unix.Stat_t
	return unix.Fstatat(int(c.dir.Fd()), "dmem.max", &is, 0) == nil
}

func (c *cgroup) Above() []string {
	var names []string
	path, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(int(c.dir.Fd())))
	var root unix.Stat_t
	var on unix.Statfs_t
	for dir := filepath.Dir(path); err == nil && unix.Statfs(dir, &on) == nil; dir = filepath.Dir(dir) {
		var is unix.Stat_t
		if on.Type != unix.CGROUP2_SUPER_MAGIC && on.Type != unix.CGROUP_SUPER_MAGIC || unix.Stat(dir, &is) != nil {
			break
		}
		names, root = append(names, fmt.Sprintf("%d:%d", is.Dev, is.Ino)), is
	}
	if len(names) > 0 && root.Ino == 1 {
		names = names[:len(names)-1]
	}
	return names
}

func (c *cgroup) Members() (map[int]bool, bool) {
	root := "/proc/self/fd/" + strconv.Itoa(int(c.dir.Fd()))
	if _, err := os.Lstat(root + "/cgroup.procs"); err != nil {
		return nil, false // a removed one has no files
	}
	pids := map[int]bool{}
	// Groups below may go while this looks; they have nobody in them then.
	_ = filepath.WalkDir(root+"/.", func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.IsDir() {
			return nil
		}
		list, _ := os.ReadFile(path + "/cgroup.procs")
		for _, field := range bytes.Fields(list) {
			if pid, err := strconv.Atoi(string(field)); err == nil {
				pids[pid] = true
			}
		}
		return nil
	})
	return pids, true
}
