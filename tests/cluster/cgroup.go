// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const cgroupRoot = "/sys/fs/cgroup"

// ownLeaf is the child of a node's cgroup that the node's own processes are
// in. The kubelet makes kubepods beside it; on version 2 a cgroup that has
// children with controllers may hold no process itself.
const ownLeaf = "node"

func unifiedOnly() bool {
	var st unix.Statfs_t
	return unix.Statfs(cgroupRoot, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC
}

// hierarchies returns the mount points of the cgroup hierarchies, sorted: one
// for each set of controllers on version 1, and the one of version 2, wherever
// it is.
func hierarchies() ([]string, error) {
	if unifiedOnly() {
		return []string{cgroupRoot}, nil
	}
	mounts, err := readMounts()
	if err != nil {
		return nil, err
	}
	var out []string
	for _, m := range mounts {
		if (m.fstype == "cgroup" || m.fstype == "cgroup2") && filepath.Dir(m.target) == cgroupRoot {
			out = append(out, m.target)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("find cgroups: neither version is mounted below %s", cgroupRoot)
	}
	sort.Strings(out)
	return out, nil
}

type mount struct{ root, target, fstype string }

// readMounts returns the mounts that this process sees.
func readMounts() ([]mount, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	return parseMounts(string(b)), nil
}

func parseMounts(mountinfo string) []mount {
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	var out []mount
	for _, line := range strings.Split(mountinfo, "\n") {
		// Optional fields stand between the options and a lone hyphen.
		before, after, ok := strings.Cut(line, " - ")
		fields, rest := strings.Fields(before), strings.Fields(after)
		if !ok || len(fields) < 6 || len(rest) < 1 {
			continue
		}
		out = append(out, mount{root: unescape.Replace(fields[3]), target: unescape.Replace(fields[4]), fstype: rest[0]})
	}
	return out
}

// makeCgroups makes the node's cgroup and its leaf in every hierarchy.
func makeCgroups(name string) error {
	roots, err := hierarchies()
	if err != nil {
		return err
	}
	for _, root := range roots {
		top := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Join(top, ownLeaf), 0o755); err != nil {
			return fmt.Errorf("make cgroup: %w", err)
		}
		if unifiedOnly() {
			if err := delegate(root, top); err != nil {
				return err
			}
		}
		for _, dir := range []string{top, filepath.Join(top, ownLeaf)} {
			if err := inheritCPUSet(dir); err != nil {
				return err
			}
		}
	}
	return nil
}

// delegate turns on, from the root downward, the controllers that the kubelet
// needs in its children.
func delegate(dirs ...string) error {
	for _, dir := range dirs {
		file := filepath.Join(dir, "cgroup.subtree_control")
		available, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
		if err != nil {
			return fmt.Errorf("list the controllers of %s: %w", dir, err)
		}
		for _, controller := range strings.Fields(string(available)) {
			if !slices.Contains([]string{"cpu", "cpuset", "hugetlb", "io", "memory", "pids"}, controller) {
				continue
			}
			if err := os.WriteFile(file, []byte("+"+controller), 0o644); err != nil {
				return fmt.Errorf("turn on the %s controller in %s: %w", controller, dir, err)
			}
		}
	}
	return nil
}

// inheritCPUSet fills a new version 1 cpuset, which starts empty and takes no
// process until it is filled.
func inheritCPUSet(dir string) error {
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
		own, err := os.ReadFile(filepath.Join(dir, file))
		if errors.Is(err, fs.ErrNotExist) || err == nil && strings.TrimSpace(string(own)) != "" || unifiedOnly() {
			continue
		}
		parent, err := os.ReadFile(filepath.Join(filepath.Dir(dir), file))
		if err != nil {
			return fmt.Errorf("fill cpuset: %w", err)
		}
		if err := os.WriteFile(filepath.Join(dir, file), parent, 0o644); err != nil {
			return fmt.Errorf("fill cpuset: %w", err)
		}
	}
	return nil
}

// joinCgroups moves the calling process into the node's leaves.
func joinCgroups(name string) error {
	roots, err := hierarchies()
	if err != nil {
		return err
	}
	for _, root := range roots {
		file := filepath.Join(root, name, ownLeaf, "cgroup.procs")
		if err := os.WriteFile(file, []byte("0"), 0o644); err != nil {
			return fmt.Errorf("join cgroup: %w", err)
		}
	}
	return nil
}

// sweepCgroups ends every process in the node's cgroups, removes them, and
// returns what could not be removed within the limit.
func sweepCgroups(name string, limit time.Duration) (left []string, err error) {
	roots, err := hierarchies()
	if err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(limit); ; time.Sleep(20 * time.Millisecond) {
		left = nil
		for _, root := range roots {
			left = append(left, sweepCgroup(filepath.Join(root, name))...)
		}
		if len(left) == 0 || time.Now().After(deadline) {
			return left, nil
		}
	}
}

func sweepCgroup(top string) (left []string) {
	var dirs []string
	_ = filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		// Cgroups vanish under the walk; what remains is found by Remove below.
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return nil
	})
	for i := len(dirs) - 1; i >= 0; i-- { // children before their parents
		for _, pid := range cgroupProcs(dirs[i]) {
			_ = syscall.Kill(pid, syscall.SIGKILL) // ended meanwhile: as wanted
		}
		if err := os.Remove(dirs[i]); err != nil && !errors.Is(err, fs.ErrNotExist) {
			left = append(left, dirs[i])
		}
	}
	return left
}

// cgroupProcs returns the PIDs in a cgroup, as this process's PID namespace
// counts them. 0 stands for one of another namespace and is left out.
func cgroupProcs(dir string) []int {
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	if err != nil {
		return nil
	}
	var out []int
	for _, f := range strings.Fields(string(b)) {
		if pid, err := strconv.Atoi(f); err == nil && pid > 0 {
			out = append(out, pid)
		}
	}
	return out
}

// findCgroups returns every cgroup directory that a node has now.
func findCgroups(name string) ([]string, error) {
	roots, err := hierarchies()
	if err != nil {
		return nil, err
	}
	var out []string
	for _, root := range roots {
		if _, err := os.Stat(filepath.Join(root, name)); err == nil {
			out = append(out, filepath.Join(root, name))
		}
	}
	return out, nil
}
