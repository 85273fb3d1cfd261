// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
)

const (
	kernelDevices = "Character devices:\n  1 mem\n236 nvidia-caps\n195 nvidia\n\nBlock devices:\n  8 sd\n 77 nvidia-caps\n"
	migMinors     = "config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu10/gi1/access 300\ngpu10/gi1/ci0/access 301\ngpu0/gi10/access 84\ngpu0/gi10/ci0/access 85\n"
)

// capable is a machine whose driver lists capabilities; it has no nodes.
func capable(t *testing.T) *components {
	t.Helper()
	root := t.TempDir()
	d := newComponents(&session{opts: Options{DriverRoot: root, HostDriverRoot: "/", DevRoot: root, ProcRoot: filepath.Join(root, "proc")}})
	write(t, filepath.Join(d.opts.ProcRoot, "devices"), kernelDevices)
	write(t, filepath.Join(d.opts.ProcRoot, "driver/nvidia-caps/mig-minors"), migMinors)
	if err := os.Mkdir(d.opts.devDir(), 0o755); err != nil {
		t.Fatal(err)
	}
	return d
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// node reads a capability's node.
func node(t *testing.T, d *components, name string) (mode, major, minor uint32) {
	t.Helper()
	var s unix.Stat_t
	if err := unix.Lstat(filepath.Join(d.opts.capsDir(), name), &s); err != nil {
		t.Fatal(err)
	}
	return s.Mode, unix.Major(s.Rdev), unix.Minor(s.Rdev)
}

func TestCapabilities(t *testing.T) {
	d := capable(t)
	if err := makeNode(filepath.Join(d.opts.capsDir(), "nvidia-cap3"), unix.Mkdev(236, 3)); errors.Is(err, unix.EPERM) {
		t.Skipf("skipped: making device nodes needs CAP_MKNOD: %v", err)
	} else if err != nil {
		t.Fatal(err)
	}
	defer unix.Umask(unix.Umask(0o077))
	for _, c := range []struct {
		minor, gi, ci int
		want          []string
		numbers       []uint32
	}{
		{0, 0, 0, []string{"nvidia-cap3", "nvidia-cap4"}, []uint32{3, 4}},
		{0, 1, 0, []string{"nvidia-cap12", "nvidia-cap13"}, []uint32{12, 13}},
		{0, 10, 0, []string{"nvidia-cap84", "nvidia-cap85"}, []uint32{84, 85}},
		{10, 1, 0, []string{"nvidia-cap300", "nvidia-cap301"}, []uint32{300, 301}},
	} {
		for _, again := range []bool{false, true} {
			got, err := d.Capabilities(c.minor, c.gi, c.ci)
			if err != nil || len(got) != 2 {
				t.Fatalf("%d %d %d: %+v, %v", c.minor, c.gi, c.ci, got, err)
			}
			for i, n := range got {
				if n.Path != "/dev/nvidia-caps/"+c.want[i] || n.HostPath != "" || n.Type != "" || n.Major != 0 || n.Minor != 0 || n.Permissions != "rwm" || *n.FileMode != 0o444 {
					t.Errorf("%d %d %d, again %v: node %+v, want %s by its path alone", c.minor, c.gi, c.ci, again, *n, c.want[i])
				}
				if mode, major, minor := node(t, d, c.want[i]); mode != unix.S_IFCHR|0o444 || major != 236 || minor != c.numbers[i] {
					t.Errorf("%s is %o %d:%d, want a character device 236:%d of mode 444", c.want[i], mode, major, minor, c.numbers[i])
				}
			}
		}
	}
	if info, err := os.Stat(d.opts.capsDir()); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("the directory: %v, %v", info, err)
	}

	// The module was loaded again, with another major number.
	write(t, filepath.Join(d.opts.ProcRoot, "devices"), strings.Replace(kernelDevices, "236", "511", 1))
	if _, err := d.Capabilities(0, 0, 0); err != nil {
		t.Fatal(err)
	}
	if _, major, minor := node(t, d, "nvidia-cap3"); major != 511 || minor != 3 {
		t.Errorf("the node of another module is %d:%d", major, minor)
	}
	if left, err := filepath.Glob(filepath.Join(d.opts.capsDir(), ".*")); err != nil || len(left) > 0 {
		t.Errorf("left beside the nodes: %v, %v", left, err)
	}
}

func TestCapabilitiesByHostPath(t *testing.T) {
	d := capable(t)
	d.opts.HostDriverRoot = "/run/nvidia/driver"
	got, err := d.Capabilities(0, 0, 0)
	if errors.Is(err, unix.EPERM) {
		t.Skipf("skipped: making device nodes needs CAP_MKNOD: %v", err)
	}
	if err != nil || got[0].Path != "/dev/nvidia-caps/nvidia-cap3" || got[0].HostPath != "/run/nvidia/driver/dev/nvidia-caps/nvidia-cap3" {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestCapabilitiesRefusals(t *testing.T) {
	for _, c := range []struct {
		name   string
		damage func(t *testing.T, d *components)
		want   error
		said   string
	}{
		{"an instance that the driver does not list", func(t *testing.T, d *components) {
			write(t, filepath.Join(d.opts.ProcRoot, "driver/nvidia-caps/mig-minors"), "gpu0/gi7/access 3\n")
		}, gpu.ErrNotFound, "gpu0/gi0/access"},
		{"a compute instance that it does not list", func(t *testing.T, d *components) {
			write(t, filepath.Join(d.opts.ProcRoot, "driver/nvidia-caps/mig-minors"), "gpu0/gi0/access 3\n")
		}, gpu.ErrNotFound, "gpu0/gi0/ci0/access"},
		{"no number", func(t *testing.T, d *components) {
			write(t, filepath.Join(d.opts.ProcRoot, "driver/nvidia-caps/mig-minors"), "gpu0/gi0/access \n")
		}, gpu.ErrNotFound, "gpu0/gi0/access"},
		{"no list", func(t *testing.T, d *components) {
			if err := os.RemoveAll(filepath.Join(d.opts.ProcRoot, "driver")); err != nil {
				t.Fatal(err)
			}
		}, gpu.ErrNotSupported, "--proc-root"},
		{"no major number", func(t *testing.T, d *components) {
			write(t, filepath.Join(d.opts.ProcRoot, "devices"), "Character devices:\n195 nvidia\n\nBlock devices:\n236 nvidia-caps\n")
		}, gpu.ErrNotSupported, "nvidia-caps"},
		{"something else in the node's place", func(t *testing.T, d *components) {
			write(t, filepath.Join(d.opts.capsDir(), "nvidia-cap3"), "")
		}, gpu.ErrInvalid, "nvidia-cap3"},
		{"no directory of devices", func(t *testing.T, d *components) {
			if err := os.Remove(d.opts.devDir()); err != nil {
				t.Fatal(err)
			}
		}, gpu.ErrNoPermission, "CAP_MKNOD"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := capable(t)
			c.damage(t, d)
			if got, err := d.Capabilities(0, 0, 0); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.said) {
				t.Errorf("%+v, %v, want %v that names %s", got, err, c.want, c.said)
			}
		})
	}
}
