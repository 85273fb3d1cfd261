// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// On a machine with cgroups of both versions, runc makes a container's in those of version 1 alone.
// After `cluster leaves make`, the link runtimeLink leads to this program, which makes one in the
// unified hierarchy too, at the same path, goes there, and becomes runc: so the container is in it
// from its first process on, and so is whatever is executed in it later. On a machine with version
// 2 alone runc does that itself, and the command says that there is nothing to do.
const (
	unpinnedProgram = "runc-unpinned"
	leafProgram     = "runc-in-leaf"
	// leavesDir has a file for each container, with its path in the unified hierarchy.
	leavesDir = "/run/node/leaves"
)

func leavesCommand(_ context.Context, l Layout, args []string) error {
	fs, name := nodeFlags("leaves", "make|none")
	rest, err := fs.parse(args, 1, 1)
	if err != nil {
		return err
	}
	if rest[0] != "make" && rest[0] != "none" {
		return fmt.Errorf("leaves %q: it is make or none", rest[0])
	}
	n, err := l.running(*name)
	if err != nil {
		return err
	}
	state, err := n.state()
	if err != nil {
		return err
	}
	if unifiedOnly() {
		fmt.Println("runc makes them: this machine has cgroups of version 2 alone")
		return nil
	}
	program := l.bin("runc")
	if rest[0] == "make" {
		fmt.Println("runc makes none on this machine, which has cgroups of both versions: the test node makes them")
		program = n.path(leafProgram)
		err = copySelf(program)
	}
	if err == nil {
		err = pointRuntime(fmt.Sprintf("/proc/%d/root", state.Init.PID), program)
	}
	if err != nil {
		return fmt.Errorf("leaves %s: %w", rest[0], err)
	}
	return nil
}

// runtimeMain is what runtimeLink leads to, by the name of the file.
func runtimeMain(args []string) error {
	self, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return err
	}
	if filepath.Base(self) == leafProgram {
		return leafMain(args)
	}
	return unpinnedMain(args)
}

// leafMain makes and enters a container's leaf, and becomes runc.
func leafMain(args []string) error {
	runc, err := exec.LookPath("runc")
	if err != nil {
		return err
	}
	if len(args) == 0 {
		return errors.New("runc without a command")
	}
	id := filepath.Base(args[len(args)-1])
	note := filepath.Join(leavesDir, id)
	switch command := leafCommand(args); command {
	case "create", "run":
		_, bundle := runcCommand(args)
		path, err := cgroupsPath(bundle)
		if err != nil {
			return err
		}
		if err := os.MkdirAll(leavesDir, 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(note, []byte(path), 0o600); err != nil {
			return err
		}
		if err := enterLeaf(path); err != nil {
			return fmt.Errorf("make a leaf for container %s: %w", id, err)
		}
	case "exec":
		// The last argument may be of the command; the one that names a container that is known is it.
		for _, a := range slices.Backward(args) {
			if path, err := os.ReadFile(filepath.Join(leavesDir, filepath.Base(a))); err == nil {
				if err := enterLeaf(string(path)); err != nil {
					return fmt.Errorf("enter the leaf of container %s: %w", a, err)
				}
				break
			}
		}
	case "delete":
		c := exec.Command(runc, args...)
		c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
		err := c.Run()
		if path, readErr := os.ReadFile(note); readErr == nil && err == nil {
			at := filepath.Join(unifiedRoot(), string(path))
			_ = unix.Rmdir(at)
			_ = unix.Rmdir(filepath.Dir(at)) // while it has others it stays
			_ = os.Remove(note)
		}
		var ended *exec.ExitError
		if errors.As(err, &ended) {
			return exitStatus(ended.ExitCode())
		}
		return err
	}
	if err := syscall.Exec(runc, append([]string{"runc"}, args...), os.Environ()); err != nil {
		return fmt.Errorf("run %s: %w", runc, err)
	}
	return nil
}

// leafCommand finds the command among runc's arguments that concerns leaves. Flags before it may have
// values of any kind but these.
func leafCommand(args []string) string {
	for _, a := range args {
		if slices.Contains([]string{"create", "run", "exec", "delete"}, a) {
			return a
		}
	}
	return ""
}

// cgroupsPath returns the path of a container's cgroups below the root of each hierarchy.
func cgroupsPath(bundle string) (string, error) {
	if bundle == "" {
		bundle = "."
	}
	data, err := os.ReadFile(filepath.Join(bundle, "config.json"))
	if err != nil {
		return "", fmt.Errorf("read the container's configuration: %w", err)
	}
	var config struct {
		Linux struct {
			CgroupsPath string `json:"cgroupsPath"`
		} `json:"linux"`
	}
	if err := json.Unmarshal(data, &config); err != nil {
		return "", fmt.Errorf("read the container's configuration: %w", err)
	}
	path := filepath.Clean("/" + config.Linux.CgroupsPath)
	if path == "/" || strings.Contains(path, ":") {
		return "", fmt.Errorf("the container's cgroups are at %q, which is no path", config.Linux.CgroupsPath)
	}
	return path, nil
}

// unifiedRoot is where the unified hierarchy is mounted beside those of version 1.
func unifiedRoot() string { return filepath.Join(cgroupRoot, "unified") }

// enterLeaf makes a cgroup of the unified hierarchy and moves this process there.
func enterLeaf(path string) error {
	dir := filepath.Join(unifiedRoot(), path)
	var on unix.Statfs_t
	if err := unix.Statfs(unifiedRoot(), &on); err != nil || on.Type != unix.CGROUP2_SUPER_MAGIC {
		return fmt.Errorf("%s is no hierarchy of version 2 (%v)", unifiedRoot(), err)
	}
	// The kubelet may remove the pod's directory between the two.
	for range 3 {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0)
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return fmt.Errorf("%s is removed again and again", dir)
}
