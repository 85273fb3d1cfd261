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

// ErrNoDmem says that the kernel keeps device memory by cgroup, and that a
// container's cgroup does not have the controller for that.
var ErrNoDmem = errors.New("no dmem controller")

// CheckDmem tells whether the driver can find what it needs in a container's cgroup.
// From Linux 6.14 on the kernel keeps limits of device memory itself, by the
// controller dmem, which a cgroup has where each one above it has enabled it. The
// driver answers that there is no such cgroup where there is one without it. A kernel
// that has no such controller has the driver count by itself.
//
// An error that answers to ErrNoDmem says what is to be written where; others are
// those of CgroupDir.
func (r *Runtime) CheckDmem(o Owner) error {
	dir, err := r.CgroupDir(o)
	if err != nil {
		return err
	}
	return checkDmem(os.DirFS(strings.TrimSuffix(dir, o.Cgroup)), o.Cgroup)
}

// checkDmem is CheckDmem of a cgroup by its path from the hierarchy's root.
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
