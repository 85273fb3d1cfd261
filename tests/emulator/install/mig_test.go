// SPDX-License-Identifier: Apache-2.0

package install_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/install"
)

// mig is a world of two cards in MIG mode: GPU 0 has minor 1, and GPU 1 minor 0.
func mig(t *testing.T) *emulator.World {
	t.Helper()
	w := world(t, emulator.Spec{Model: "A100-SXM4-80GB", Count: 2})
	for gpu := range 2 {
		if err := w.SetMIG(gpu, true); err != nil {
			t.Fatal(err)
		}
	}
	return w
}

func create(t *testing.T, w *emulator.World, gpu int, profile string, start int) emulator.GPUInstanceState {
	t.Helper()
	if err := w.CreateInstance(gpu, profile, start, false); err != nil {
		t.Fatal(err)
	}
	for _, gi := range w.State().GPUs[gpu].MIG.Instances {
		if gi.Start == start {
			return gi
		}
	}
	t.Fatalf("no instance at %d of GPU %d after it was made", start, gpu)
	panic("unreachable")
}

// folders are those of instances, below /proc/driver/nvidia/capabilities.
func folders(t *testing.T, dir string) []string {
	t.Helper()
	var all []string
	root := filepath.Join(dir, "proc/driver/nvidia/capabilities")
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if name, ok := strings.CutPrefix(path, root+"/gpu"); ok && d.Name() == "access" {
			all = append(all, "gpu"+strings.TrimSuffix(name, "/access"))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func TestCapabilitiesFollowInstances(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	w := mig(t)
	m := install.Machine{Driver: dir, Dev: filepath.Join(dir, "dev"), Kernel: dir}
	driver(t, w, dir)
	if err := m.Save(); err != nil {
		t.Fatal(err)
	}
	if err := install.Kernel(dir, "Character devices:\n", w); err != nil {
		t.Fatal(err)
	}
	follow := func() {
		t.Helper()
		if err := install.FollowInstances(dir, w); err != nil {
			t.Fatal(err)
		}
	}
	if got := folders(t, dir); len(got) != 0 {
		t.Errorf("without instances there are %q", got)
	}

	odd, even := create(t, w, 0, "3g.40gb", 4), create(t, w, 1, "1g.10gb", 6)
	follow()
	name := func(minor int, gi emulator.GPUInstanceState) []string {
		at := fmt.Sprintf("gpu%d/mig/gi%d", minor, gi.ID)
		return []string{at, at + "/ci0"}
	}
	want := append(name(1, odd), name(0, even)...)
	slices.Sort(want)
	got := folders(t, dir)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("folders %q, want %q", got, want)
	}

	// What stands in /proc leads to the same node as the list of all minors.
	minors, err := os.ReadFile(filepath.Join(dir, "proc/driver/nvidia-caps/mig-minors"))
	if err != nil {
		t.Fatal(err)
	}
	for _, at := range got {
		text, err := os.ReadFile(filepath.Join(dir, "proc/driver/nvidia/capabilities", at, "access"))
		if err != nil {
			t.Fatal(err)
		}
		var minor, mode int
		if _, err := fmt.Sscanf(string(text), "DeviceFileMinor: %d\nDeviceFileMode: %d\n", &minor, &mode); err != nil || mode != 0o444 {
			t.Errorf("access of %s: %q (%v)", at, text, err)
		}
		if line := fmt.Sprintf("\n%s/access %d\n", strings.Replace(at, "/mig", "", 1), minor); !strings.Contains(string(minors), line) {
			t.Errorf("mig-minors lacks %q", line)
		}
	}

	// Nodes are there for some, so that nobody can count on them.
	node := func(minor int) string { return filepath.Join(dir, "dev", install.CapabilityNode(minor)) }
	for minor, there := range map[int]bool{
		1: true, 2: true, even.Minor: true, even.Compute[0].Minor: true, odd.Minor: false, odd.Compute[0].Minor: false,
	} {
		var st unix.Stat_t
		err := unix.Lstat(node(minor), &st)
		if is := err == nil; is != there {
			t.Errorf("node of minor %d: there %v, want %v", minor, is, there)
		}
		if err == nil && (st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != unix.Mkdev(install.MajorCapabilities, uint32(minor))) {
			t.Errorf("node of minor %d: mode %o, device %x", minor, st.Mode, st.Rdev)
		}
	}

	if err := w.DestroyInstance(1, 6); err != nil {
		t.Fatal(err)
	}
	follow()
	if got := folders(t, dir); !slices.Equal(got, name(1, odd)) {
		t.Errorf("after a destroy: folders %q, want %q", got, name(1, odd))
	}
	if _, err := os.Lstat(node(even.Minor)); err != nil {
		t.Errorf("the node of an instance that is gone: %v; nobody takes nodes away", err)
	}

	if err := w.Unload(); err != nil {
		t.Fatal(err)
	}
	if err := m.Sync(w); err != nil {
		t.Fatal(err)
	}
	if left, err := filepath.Glob(node(0)[:len(node(0))-1] + "*"); err != nil || len(left) > 0 {
		t.Errorf("nodes without a driver: %q (%v)", left, err)
	}
}
