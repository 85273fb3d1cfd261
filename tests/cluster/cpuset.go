// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// A kubelet that was shown more CPUs than the machine has (its sysfs may be
// mounted over, as anything of the node's may) gives containers CPUs that are not
// there, and runc cannot make a cgroup of those. containerd starts what the link
// runtimeLink leads to: runc itself, or, after `cluster cpusets drop`, this
// program, which is runc but for the CPUs. What the kubelet gave to whom is in
// its state and its PodResources API as ever.
const runtimeLink = "/run/node/runc"

// pointRuntime makes program be what makes the node's containers. root is where
// the caller sees the node's /. There is no moment without the link.
func pointRuntime(root, program string) error {
	link := root + runtimeLink
	if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
		return err
	}
	next := link + ".next"
	if err := os.Remove(next); err != nil && !os.IsNotExist(err) {
		return err
	}
	if err := os.Symlink(program, next); err != nil {
		return err
	}
	return os.Rename(next, link)
}

func cpusetsCommand(_ context.Context, l Layout, args []string) error {
	fs, name := nodeFlags("cpusets", "keep|drop")
	rest, err := fs.parse(args, 1, 1)
	if err != nil {
		return err
	}
	if rest[0] != "keep" && rest[0] != "drop" {
		return fmt.Errorf("cpusets %q: it is keep or drop", rest[0])
	}
	n, err := l.running(*name)
	if err != nil {
		return err
	}
	state, err := n.state()
	if err != nil {
		return err
	}
	program := l.bin("runc")
	if rest[0] == "drop" {
		program = n.path(unpinnedProgram)
		err = copySelf(program)
	}
	if err == nil {
		err = pointRuntime(fmt.Sprintf("/proc/%d/root", state.Init.PID), program)
	}
	if err != nil {
		return fmt.Errorf("cpusets %s: %w", rest[0], err)
	}
	return nil
}

// copySelf puts this program where the node sees it, wherever it lies itself.
func copySelf(to string) error {
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	if err := os.WriteFile(to+".next", self, 0o755); err != nil {
		return err
	}
	return os.Rename(to+".next", to)
}

// unpinnedMain takes the CPUs out of what runc is told of a container, and
// becomes runc.
func unpinnedMain(args []string) error {
	runc, err := exec.LookPath("runc")
	if err != nil {
		return err
	}
	command, value := runcCommand(args)
	switch command {
	case "create", "run":
		if value == "" {
			value = "."
		}
		file := filepath.Join(value, "config.json")
		old, err := os.ReadFile(file)
		if err != nil {
			return fmt.Errorf("read the container's configuration: %w", err)
		}
		config, err := without(old, "linux", "resources", "cpu")
		if err == nil {
			err = os.WriteFile(file, config, 0o600)
		}
		if err != nil {
			return fmt.Errorf("take the CPUs out of %s: %w", file, err)
		}
	case "update":
		if value != "-" {
			return fmt.Errorf("update a container: its resources are in %q, and containerd writes them to runc's input", value)
		}
		old, err := io.ReadAll(os.Stdin)
		if err != nil {
			return fmt.Errorf("read the container's resources: %w", err)
		}
		resources, err := without(old, "cpu")
		if err == nil {
			err = replaceStdin(resources)
		}
		if err != nil {
			return fmt.Errorf("take the CPUs out of the container's resources: %w", err)
		}
	}
	if err := syscall.Exec(runc, append([]string{"runc"}, args...), os.Environ()); err != nil {
		return fmt.Errorf("run %s: %w", runc, err)
	}
	return nil
}

// runcCommand finds the command among runc's arguments that concerns CPUs, and
// what it is about: the bundle's directory, or where the resources are.
func runcCommand(args []string) (command, value string) {
	flags := map[string]string{"create": "bundle", "run": "bundle", "update": "resources"}
	for i, a := range args {
		if command == "" {
			if _, ok := flags[a]; ok {
				command = a
			}
			continue
		}
		name, v, joined := strings.Cut(strings.TrimLeft(a, "-"), "=")
		if !strings.HasPrefix(a, "-") || name != flags[command] {
			continue
		}
		if joined {
			return command, v
		}
		if i+1 < len(args) {
			return command, args[i+1]
		}
	}
	return command, ""
}

// without returns a JSON object without the CPUs and memory nodes of the one that
// a path leads to; all else stays byte for byte, but for the order of keys.
func without(data []byte, path ...string) ([]byte, error) {
	var o map[string]json.RawMessage
	if err := json.Unmarshal(data, &o); err != nil {
		return nil, err
	}
	if len(path) == 0 {
		delete(o, "cpus")
		delete(o, "mems")
		return json.Marshal(o)
	}
	inner, ok := o[path[0]]
	if !ok || bytes.Equal(inner, []byte("null")) {
		return data, nil
	}
	inner, err := without(inner, path[1:]...)
	if err != nil {
		return nil, err
	}
	o[path[0]] = inner
	return json.Marshal(o)
}

// replaceStdin makes data the standard input of the program that this one
// becomes.
func replaceStdin(data []byte) error {
	fd, err := unix.MemfdCreate("stdin", 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), "stdin")
	defer f.Close()
	if _, err := f.Write(data); err != nil {
		return err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	return unix.Dup2(fd, 0)
}
