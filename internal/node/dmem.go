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

// PodsCgroup returns the directory of the unified hierarchy in which the kubelet makes the cgroups of
// pods, as this process sees it. The error wraps gpu.ErrNotSupported if there is no such hierarchy, or
// the kubelet does not use it, and ErrNoDmem if the kernel limits device memory by the controller dmem
// and a cgroup there has not enabled it for those below.
func (r *Runtime) PodsCgroup() (string, error) {
	if r.o.Cgroups == "" {
		return "", &failure{is: gpu.ErrNotSupported, text: "the host's cgroups are not visible to the agent"}
	}
	base, at, err := unified(r.o.Cgroups)
	if err != nil {
		return "", &failure{is: gpu.ErrNotSupported, text: fmt.Sprintf("the host has no unified cgroup hierarchy (v2): %v", err)}
	}
	unix.Close(base)
	return podsCgroup(os.DirFS(at), at, at == r.o.Cgroups)
}

// OtherCgroup is a cgroup that is no container's.
type OtherCgroup struct {
	// Path is below the root of the unified hierarchy, and Dir its directory as this process sees it.
	Path, Dir string
	// Pods is true if it is the kubelet's, or a pod's.
	Pods bool
}

// othersDepth is how deep OtherCgroups looks: a pod's cgroup is at most there.
const othersDepth = 4

// OtherCgroups lists the cgroups of the unified hierarchy that belong to no container: those of the host's
// services, of the kubelet and of pods. It returns at most 256, and none where the host has no such
// hierarchy.
func (r *Runtime) OtherCgroups() []OtherCgroup {
	base, at, err := unified(r.o.Cgroups)
	if r.o.Cgroups == "" || err != nil {
		return nil
	}
	unix.Close(base)
	return otherCgroups(os.DirFS(at), at)
}

func otherCgroups(root fs.FS, at string) (out []OtherCgroup) {
	// What cannot be read has ended.
	_ = fs.WalkDir(root, ".", func(name string, e fs.DirEntry, err error) error {
		switch {
		case err != nil || !e.IsDir() || name == ".":
			return nil
		case len(out) >= mostOthers:
			return fs.SkipAll
		}
		owner, container := ownerByPath([]byte("/" + name))
		if container || owner.PodUID != "" && isBelowPod(name) {
			return fs.SkipDir // a container's, or what a pod has made for itself
		}
		out = append(out, OtherCgroup{Path: "/" + name, Dir: path.Join(at, name),
			Pods: owner.PodUID != "" || strings.Contains(name, "kubepods")})
		if strings.Count(name, "/") >= othersDepth-1 {
			return fs.SkipDir
		}
		return nil
	})
	return out
}

// isBelowPod reports whether a cgroup is below that of a pod.
func isBelowPod(name string) bool {
	above, _ := ownerByPath([]byte("/" + path.Dir(name)))
	return above.PodUID != ""
}

// mostOthers bounds the cgroups that OtherCgroups returns.
const mostOthers = 256

// podsDepth is how deep below the root the kubelet's top cgroup is looked for: --cgroup-root can name
// a place for it. mostCgroups bounds the search.
const podsDepth, mostCgroups = 3, 4096

// podsCgroup does what PodsCgroup does for the root of a hierarchy, which is at the path at. only is
// true if there is no other hierarchy.
func podsCgroup(root fs.FS, at string, only bool) (string, error) {
	top, looked := "", 0
	err := fs.WalkDir(root, ".", func(name string, e fs.DirEntry, err error) error {
		switch {
		case err != nil || !e.IsDir():
			return nil // it has ended, or is a file
		case e.Name() == "kubepods" || strings.HasSuffix(e.Name(), "kubepods.slice"):
			top = name
			return fs.SkipAll
		case looked >= mostCgroups:
			return fs.SkipAll
		case strings.Count(name, "/") >= podsDepth-1 && name != ".":
			return fs.SkipDir
		}
		looked++
		return nil
	})
	if err != nil {
		return "", err
	}
	if top == "" && only {
		return at, nil // it cannot be elsewhere
	}
	if top == "" {
		return "", &failure{is: gpu.ErrNotSupported, text: fmt.Sprintf(
			"the kubelet does not use the unified cgroup hierarchy (v2) at %s", at)}
	}
	if kernel, err := hasDmem(root, ".", "cgroup.controllers"); err != nil || !kernel {
		return path.Join(at, top), err
	}
	parents := []string{top}
	classes, err := fs.ReadDir(root, top)
	if err != nil {
		return "", err
	}
	for _, e := range classes {
		if e.IsDir() && (strings.Contains(e.Name(), "burstable") || strings.Contains(e.Name(), "besteffort")) {
			parents = append(parents, path.Join(top, e.Name()))
		}
	}
	for _, dir := range parents {
		if on, err := hasDmem(root, dir, "cgroup.subtree_control"); err != nil {
			return "", err
		} else if !on {
			return "", &failure{is: ErrNoDmem, text: fmt.Sprintf("cgroup /%s does not enable the controller dmem for pods, "+
				"by which this kernel limits device memory: write +dmem to its cgroup.subtree_control, "+
				"and to those of the cgroups above it first", dir)}
		}
	}
	return path.Join(at, top), nil
}

// hasDmem reports whether a list of controllers names dmem.
func hasDmem(root fs.FS, dir, file string) (bool, error) {
	list, err := fs.ReadFile(root, path.Join(dir, file))
	return slices.Contains(strings.Fields(string(list)), "dmem"), err
}

// checkDmem does what CheckDmem does, for a cgroup's path below the hierarchy's root.
func checkDmem(root fs.FS, cgroup string) error {
	has := func(dir, file string) (bool, error) { return hasDmem(root, dir, file) }
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
