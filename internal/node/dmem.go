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
)

// ErrNoDmem means that the kernel limits device memory by cgroup, but that a container's cgroup
// lacks the controller for it.
var ErrNoDmem = errors.New("no dmem controller")

// CheckDmem returns nil if the driver can limit a container's device memory by its cgroup, or need
// not use the cgroup. From Linux 6.14 on the kernel itself limits device memory by the controller
// dmem. A cgroup has the controller if each cgroup above it has enabled it. If a cgroup lacks the
// controller, the driver reports that there is no such cgroup. On a kernel without the controller,
// the driver counts by itself.
//
// An error that wraps ErrNoDmem says what to write to which file. Other errors are those of
// CgroupDir.
func (r *Runtime) CheckDmem(o Owner) error {
	dir, err := r.CgroupDir(o)
	if err != nil {
		return err
	}
	return checkDmem(os.DirFS(strings.TrimSuffix(dir, o.Cgroup)), o.Cgroup)
}

// checkDmem does what CheckDmem does, for a cgroup's path below the hierarchy's root.
func checkDmem(root fs.FS, cgroup string) error {
	has := func(dir, file string) (bool, error) {
		list, err := fs.ReadFile(root, path.Join(dir, file))
		return slices.Contains(strings.Fields(string(list)), "dmem"), err
	}
	own := strings.Trim(cgroup, "/")
	if _, err := fs.Stat(root, path.Join(own, "dmem.max")); err == nil {
		return nil
	}
	if kernel, err := has(".", "cgroup.controllers"); err != nil || !kernel {
		return err
	}
	var without []string
	for dir := path.Dir(own); ; dir = path.Dir(dir) {
		if on, err := has(dir, "cgroup.subtree_control"); err != nil {
			return err
		} else if !on {
			without = append(without, path.Join("/", dir))
		}
		if dir == "." {
			break
		}
	}
	slices.Reverse(without)
	remedy := "it is a threaded cgroup, or about to end"
	if len(without) > 0 {
		remedy = fmt.Sprintf("in the host's cgroup v2 hierarchy, "+
			"write +dmem to the file cgroup.subtree_control of %s, in this order", strings.Join(without, ", "))
	}
	return &failure{is: ErrNoDmem, text: fmt.Sprintf("cgroup %s has no dmem.max, "+
		"by which this kernel limits device memory: %s", cgroup, remedy)}
}
