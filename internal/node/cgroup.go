// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
)

// CgroupDir returns the directory of a container's own cgroup in the host's unified hierarchy, as
// this process sees it. The error wraps
//
//   - gpu.ErrNotSupported if there is no such hierarchy, or the kubelet does not use it,
//   - gpu.ErrNotFound if the container is gone,
//   - gpu.ErrInvalid if the path is not that of the container.
func (r *Runtime) CgroupDir(o Owner) (string, error) {
	if !o.V2 || o.Cgroup == "" || r.o.Cgroups == "" {
		return "", &failure{is: gpu.ErrNotSupported, text: fmt.Sprintf("container %s is in no cgroup of the unified "+
			"hierarchy (cgroup v2)", o.ID)}
	}
	if err := ownCgroup(o); err != nil {
		return "", fmt.Errorf("cgroup of container %s: %w", o.ID, err)
	}
	base, at, err := unified(r.o.Cgroups)
	if err != nil {
		return "", &failure{is: gpu.ErrNotSupported, text: fmt.Sprintf("cgroup of container %s in %s: %v",
			o.ID, r.o.Cgroups, err)}
	}
	defer unix.Close(base)
	dir, err := openBelow(base, o.Cgroup, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return "", &failure{is: gpu.ErrNotFound, text: fmt.Sprintf("cgroup of container %s: open %s in %s: %v",
			o.ID, o.Cgroup, at, err)}
	}
	defer unix.Close(dir)
	return path.Join(at, o.Cgroup), nil
}

// MemoryCgroup returns the directory of the container's own cgroup in the hierarchy that has the memory controller, and
// that of the hierarchy, as this process sees them. It is one of version 1 on nodes that still have it, and on those
// with both versions. Errors are those of CgroupDir.
func (r *Runtime) MemoryCgroup(o Owner) (dir, root string, err error) {
	if o.Cgroup == "" || r.o.Cgroups == "" {
		return "", "", &failure{is: gpu.ErrNotSupported, text: fmt.Sprintf("container %s is in no cgroup that the agent sees", o.ID)}
	}
	root = path.Join(r.o.Cgroups, "memory")
	base, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err == nil {
		defer unix.Close(base)
		var fs unix.Statfs_t
		if err = unix.Fstatfs(base, &fs); err == nil && fs.Type == unix.CGROUP_SUPER_MAGIC {
			return cgroupBelow(base, root, o)
		}
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return "", "", fmt.Errorf("memory cgroup of container %s in %s: %w", o.ID, root, err)
	}
	dir, err = r.CgroupDir(o)
	return dir, strings.TrimSuffix(dir, o.Cgroup), err
}

// cgroupBelow returns the directory of the container's own cgroup in a hierarchy of version 1.
func cgroupBelow(base int, root string, o Owner) (dir, at string, err error) {
	if err := ownCgroup(o); err != nil {
		return "", "", fmt.Errorf("memory cgroup of container %s: %w", o.ID, err)
	}
	fd, err := openBelow(base, o.Cgroup, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return "", "", &failure{is: gpu.ErrNotFound, text: fmt.Sprintf("memory cgroup of container %s: open %s in %s: %v",
			o.ID, o.Cgroup, root, err)}
	}
	unix.Close(fd)
	return path.Join(root, o.Cgroup), root, nil
}

// HasProcesses reports whether there are processes in a container's cgroup or below it. Some runtimes
// leave the cgroup of a container that has ended for a while. Errors are those of CgroupDir.
func (r *Runtime) HasProcesses(o Owner) (bool, error) {
	dir, err := r.CgroupDir(o)
	if err != nil {
		return false, err
	}
	text, err := os.ReadFile(path.Join(dir, "cgroup.events"))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return false, &failure{is: gpu.ErrNotFound, text: fmt.Sprintf("cgroup of container %s: it was removed", o.ID)}
	}
	if err != nil {
		return false, fmt.Errorf("look for processes of container %s: %w", o.ID, err)
	}
	return slices.Contains(strings.Split(string(text), "\n"), "populated 1"), nil
}

// ownCgroup returns an error if the path is not that of the container's own cgroup.
func ownCgroup(o Owner) error {
	named, ok := ownerByPath([]byte(o.Cgroup))
	if !ok || named.ID != o.ID || named.Cgroup != o.Cgroup || path.Clean(o.Cgroup) != o.Cgroup ||
		!strings.HasPrefix(o.Cgroup, "/") {
		return &failure{is: gpu.ErrInvalid, text: fmt.Sprintf("cgroup %q is not its own", o.Cgroup)}
	}
	return nil
}

// openBelow opens a path below the root of a hierarchy. It does not leave that hierarchy's file
// system.
func openBelow(base int, name string, flags uint64) (fd int, err error) {
	for {
		fd, err = unix.Openat2(base, "."+name, &unix.OpenHow{Flags: flags | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS |
				unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV})
		if err != unix.EINTR && err != unix.EAGAIN {
			return fd, err
		}
	}
}
