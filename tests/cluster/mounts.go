// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strconv"

	"golang.org/x/sys/unix"
)

// kernelTunables are the settings of the whole machine that a kubelet changes
// when it starts, and the values it wants. The node gets plain files in their
// place, which hold what it wants to read.
var kernelTunables = map[string]int{
	"vm/overcommit_memory":      1,
	"vm/panic_on_oom":           0,
	"kernel/panic":              10,
	"kernel/panic_on_oops":      1,
	"kernel/keys/root_maxkeys":  1000000,
	"kernel/keys/root_maxbytes": 25000000,
}

// emptied are directories of which the node must see nothing that the host has.
var emptied = []struct {
	path string
	mode os.FileMode
}{
	{"/run", 0o755}, {"/tmp", 0o777 | os.ModeSticky}, {"/var/tmp", 0o777 | os.ModeSticky}, {"/var/log", 0o755},
	{"/etc/cdi", 0o755}, {"/var/lib/cni", 0o755}, {"/var/lib/gpu-agent", 0o755}, {"/var/lib/kubelet", 0o755},
}

// makeRoot turns the new mount namespace into the node's: a writable overlay
// over the host's root, held in memory, with its own /proc, /sys, /dev and
// state directories; then leaves the host's root behind.
func makeRoot(n Node, spec Spec) error {
	// Nothing may travel back to the host.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make / private: %w", err)
	}
	base := n.path("root")
	if err := unix.Mount("node", base, "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mount a tmpfs on %s: %w", base, err)
	}
	upper, work, root := filepath.Join(base, "upper"), filepath.Join(base, "work"), filepath.Join(base, "root")
	for _, dir := range []string{upper, work, root} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	if err := unix.Mount("node", root, "overlay", 0, "lowerdir=/,upperdir="+upper+",workdir="+work); err != nil {
		return fmt.Errorf("lay an overlay over /: %w", err)
	}
	for _, step := range []func(string, Node, Spec) error{makeKernelFiles, makeDevices, makeDirectories} {
		if err := step(root, n, spec); err != nil {
			return err
		}
	}
	if err := os.Chdir(root); err != nil {
		return err
	}
	// The old root lands on top of the new one, from where it is taken away.
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("change the root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("leave the host's root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	// Volumes with mount propagation need a shared root.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("make / shared: %w", err)
	}
	return nil
}

func makeKernelFiles(root string, _ Node, _ Spec) error {
	const safe = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if err := unix.Mount("proc", root+"/proc", "proc", safe, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if err := unix.Mount("sysfs", root+"/sys", "sysfs", safe, ""); err != nil {
		return fmt.Errorf("mount /sys: %w", err)
	}
	if err := unix.Mount(cgroupRoot, root+cgroupRoot, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount the cgroups: %w", err)
	}
	return nil
}

var devices = []struct {
	name         string
	major, minor uint32
	mode         uint32
}{
	{"null", 1, 3, 0o666}, {"zero", 1, 5, 0o666}, {"full", 1, 7, 0o666}, {"random", 1, 8, 0o666},
	{"urandom", 1, 9, 0o666}, {"tty", 5, 0, 0o666}, {"kmsg", 1, 11, 0o644}, {"fuse", 10, 229, 0o666},
}

func makeDevices(root string, _ Node, _ Spec) error {
	dev := root + "/dev"
	if err := unix.Mount("dev", dev, "tmpfs", unix.MS_NOSUID, "mode=755"); err != nil {
		return fmt.Errorf("mount /dev: %w", err)
	}
	for _, d := range devices {
		path := filepath.Join(dev, d.name)
		if err := unix.Mknod(path, unix.S_IFCHR|d.mode, int(unix.Mkdev(d.major, d.minor))); err != nil {
			return fmt.Errorf("make device /dev/%s: %w", d.name, err)
		}
		if err := os.Chmod(path, os.FileMode(d.mode)); err != nil { // the umask
			return err
		}
	}
	for _, m := range []struct{ name, fstype, data string }{
		{"pts", "devpts", "newinstance,ptmxmode=0666,mode=0620,gid=5"},
		{"shm", "tmpfs", "mode=1777"},
		{"mqueue", "mqueue", ""},
	} {
		dir := filepath.Join(dev, m.name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.fstype, dir, m.fstype, unix.MS_NOSUID|unix.MS_NOEXEC, m.data); err != nil {
			return fmt.Errorf("mount /dev/%s: %w", m.name, err)
		}
	}
	for name, target := range map[string]string{
		"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2",
	} {
		if err := os.Symlink(target, filepath.Join(dev, name)); err != nil {
			return err
		}
	}
	return nil
}

func makeDirectories(root string, n Node, spec Spec) error {
	for _, e := range emptied {
		dir := root + e.path
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		options := "mode=" + strconv.FormatUint(uint64(e.mode.Perm()), 8)
		if e.mode&os.ModeSticky != 0 {
			options = "mode=1" + strconv.FormatUint(uint64(e.mode.Perm()), 8)
		}
		if err := unix.Mount("node", dir, "tmpfs", 0, options); err != nil {
			return fmt.Errorf("mount a tmpfs on %s: %w", e.path, err)
		}
	}
	binds := [][2]string{{spec.Cache, spec.Cache}}
	for _, dir := range spec.Binds {
		binds = append(binds, [2]string{dir, dir})
	}
	binds = append(binds,
		[2]string{n.path("runtime"), spec.runtime().state},
		[2]string{n.path("etcd"), "/var/lib/etcd"},
		[2]string{n.path("logs", "pods"), "/var/log/pods"})
	for _, dir := range spec.runtime().etc() {
		binds = append(binds, [2]string{n.path("etc", dir), "/etc/" + dir})
	}
	for _, b := range binds {
		if err := os.MkdirAll(root+b[1], 0o755); err != nil {
			return err
		}
		if err := unix.Mount(b[0], root+b[1], "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind %s to %s: %w", b[0], b[1], err)
		}
	}
	for path, target := range spec.Links {
		if _, err := os.Lstat(root + path); errors.Is(err, fs.ErrNotExist) {
			if err := errors.Join(os.MkdirAll(filepath.Dir(root+path), 0o755), os.Symlink(target, root+path)); err != nil {
				return err
			}
		}
	}
	if err := pointRuntime(root, Layout{cache: spec.Cache}.bin("runc")); err != nil {
		return fmt.Errorf("choose the program that makes containers: %w", err)
	}
	return hideTunables(root)
}

func hideTunables(root string) error {
	dir := root + "/run/tunables"
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	var names []string
	for name := range kernelTunables {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		target := root + "/proc/sys/" + name
		if _, err := os.Stat(target); err != nil {
			continue // this kernel has no such setting
		}
		file := filepath.Join(dir, filepath.Base(name))
		if err := os.WriteFile(file, []byte(strconv.Itoa(kernelTunables[name])+"\n"), 0o644); err != nil {
			return err
		}
		if err := unix.Mount(file, target, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("cover /proc/sys/%s: %w", name, err)
		}
	}
	return nil
}
