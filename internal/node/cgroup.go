// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"path"
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
