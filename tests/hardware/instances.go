// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml"
)

// instances makes and destroys MIG instances where nothing stands, on GPUs that
// are in MIG mode and idle. What stands is left alone.
func instances(t *testing.T, opts nvml.Options, caps Caps) {
	if !caps.Instances {
		t.Skip("skipped: it is not permitted to make MIG instances here (-instances permits it)")
	}
	d := Open(t, opts)
	tried := 0
	skipped := map[string]int{} // GPUs by what they lack
	for _, dev := range read(t, d).GPUs {
		why := ""
		switch {
		case dev.Fault != "":
			why = "a fault: " + dev.Fault
		case !dev.MIG.Capable:
			why = "not capable of MIG"
		case !dev.MIG.Enabled:
			why = "not in MIG mode (nvidia-smi -mig 1 switches it)"
		case slices.ContainsFunc(dev.MIG.Instances, func(in gpu.Instance) bool { return in.Busy }):
			why = "processes run on it"
		}
		if why != "" {
			skipped[why]++
			continue
		}
		tried++
		t.Run(fmt.Sprintf("GPU%d", dev.Index), func(t *testing.T) { instancesOf(t, d, opts, caps, dev) })
	}
	for _, why := range slices.Sorted(maps.Keys(skipped)) {
		t.Logf("skipped: %d GPUs: %s", skipped[why], why)
	}
	if tried == 0 {
		t.Skip("skipped: no GPU is in MIG mode and idle")
	}
}

func instancesOf(t *testing.T, d *nvml.Driver, opts nvml.Options, caps Caps, dev gpu.Device) {
	before := dev.MIG.Instances
	standing := func() []gpu.Instance {
		t.Helper()
		m, err := d.MIG(wait(t), dev.UUID)
		if err != nil {
			t.Fatal(err)
		}
		return m.Instances
	}
	same := func(when string) {
		t.Helper()
		if now := standing(); !slices.Equal(now, before) {
			t.Errorf("%s there is %+v, and was %+v", when, now, before)
		}
	}
	var made, full, split int
	for _, p := range dev.MIG.Profiles {
		for _, at := range p.Placements {
			if slices.ContainsFunc(before, func(in gpu.Instance) bool { return overlap(in.Placement, at) }) {
				continue
			}
			in, err := d.CreateInstance(wait(t), dev.UUID, p.Name, at, 0)
			if errors.Is(err, gpu.ErrNoRoom) && len(before) > 0 {
				full++ // of engines, or of instances of its kind
				continue
			}
			if err != nil {
				t.Errorf("%s at %+v: %v", p.Name, at, err)
				continue
			}
			made++
			gone := false
			t.Cleanup(func() { // the test's own context has ended then
				ctx, cancel := context.WithTimeout(context.Background(), patience)
				defer cancel()
				if !gone {
					t.Errorf("%+v was left behind; destroyed now: %v", in, d.DestroyInstance(ctx, dev.UUID, in))
				}
			})
			checkInstance(t, d, opts, dev, p, at, in, standing())
			if made == 1 {
				busy(t, d, caps, dev, in, standing)
			}
			if err := d.DestroyInstance(wait(t), dev.UUID, in); err != nil {
				t.Fatal(err)
			}
			gone = true
			same("after " + p.Name + " was destroyed")
			if err := d.DestroyInstance(wait(t), dev.UUID, in); !errors.Is(err, gpu.ErrNotFound) {
				t.Errorf("%s at %+v is destroyed twice: %v, want ErrNotFound", p.Name, at, err)
			}
			if p.Slices > 1 && split == 0 && p.Max > 1 {
				split++
				splits(t, d, dev, p, at, standing)
				same("after the parts of " + p.Name + " were destroyed")
			}
		}
	}
	for name, refused := range map[string]struct {
		profile string
		at      gpu.Placement
		want    error
	}{
		"no such profile":   {"9g.999gb", gpu.Placement{Size: 1}, gpu.ErrInvalid},
		"no such placement": {dev.MIG.Profiles[0].Name, gpu.Placement{Start: 64, Size: dev.MIG.Profiles[0].Placements[0].Size}, gpu.ErrInvalid},
	} {
		if in, err := d.CreateInstance(wait(t), dev.UUID, refused.profile, refused.at, 0); !errors.Is(err, refused.want) {
			t.Errorf("%s: made %+v, %v, want %v", name, in, err, refused.want)
		}
	}
	same("in the end")
	t.Logf("made %d instances, %d had no room beside what stands", made, full)
	if made == 0 {
		t.Skipf("skipped: no room beside what stands on GPU %d: %+v", dev.Index, before)
	}
}

func overlap(a, b gpu.Placement) bool { return a.Start < b.Start+b.Size && b.Start < a.Start+a.Size }

// checkInstance holds an instance against what it was asked for, the list, and
// its nodes.
func checkInstance(t *testing.T, d *nvml.Driver, opts nvml.Options, dev gpu.Device, p gpu.Profile, at gpu.Placement, in gpu.Instance, standing []gpu.Instance) {
	t.Helper()
	if in.Profile != p.Name || in.Placement != at || in.CI < 0 || in.CIStart != 0 || in.Busy {
		t.Errorf("%s at %+v was made as %+v", p.Name, at, in)
	}
	i := slices.IndexFunc(standing, func(s gpu.Instance) bool { return s.GI == in.GI })
	if i < 0 {
		t.Fatalf("%+v is not listed: %+v", in, standing)
	}
	listed := standing[i]
	if in.UUID == "" {
		in.UUID = listed.UUID
	}
	if listed != in || !migUUIDForm.MatchString(string(listed.UUID)) {
		t.Errorf("made %+v, and listed is %+v", in, listed)
	}
	if again, err := d.CreateInstance(wait(t), dev.UUID, p.Name, at, 0); err != nil || again != listed {
		t.Errorf("asked for again: %+v, %v, want %+v", again, err, listed)
	}
	for _, other := range dev.MIG.Profiles {
		for _, place := range other.Placements {
			if other.Name == p.Name || !overlap(place, at) {
				continue
			}
			if over, err := d.CreateInstance(wait(t), dev.UUID, other.Name, place, 0); !errors.Is(err, gpu.ErrNoRoom) {
				t.Errorf("%s at %+v over %s at %+v: %+v, %v, want ErrNoRoom", other.Name, place, p.Name, at, over, err)
			}
			break
		}
	}
	nodes, err := d.Capabilities(dev.Minor, in.GI, in.CI)
	if errors.Is(err, gpu.ErrNoPermission) {
		t.Logf("skipped: the nodes of %s at %+v: %v", p.Name, at, err)
		return
	}
	if err != nil || len(nodes) != 2 || nodes[0].Path == nodes[1].Path {
		t.Fatalf("the nodes of %+v: %+v, %v", in, nodes, err)
	}
	for _, n := range nodes {
		if filepath.Dir(n.Path) != "/dev/nvidia-caps" || n.Major != 0 || n.Minor != 0 {
			t.Errorf("node %+v", *n)
		}
		seen := n.Path
		if opts.DriverRoot != "" && opts.DriverRoot != "/" {
			seen = filepath.Join(opts.DriverRoot, n.Path)
		}
		var node unix.Stat_t
		if err := unix.Stat(seen, &node); err != nil || node.Mode&unix.S_IFMT != unix.S_IFCHR {
			t.Errorf("%s: mode %o, %v", seen, node.Mode, err)
		} else if minor := strings.TrimPrefix(filepath.Base(n.Path), "nvidia-cap"); fmt.Sprint(unix.Minor(node.Rdev)) != minor {
			t.Errorf("%s has minor %d", seen, unix.Minor(node.Rdev))
		}
	}
}

// busy runs a process on an instance.
func busy(t *testing.T, d *nvml.Driver, caps Caps, dev gpu.Device, in gpu.Instance, standing func() []gpu.Instance) {
	i := slices.IndexFunc(standing(), func(s gpu.Instance) bool { return s.GI == in.GI })
	pid, end, err := caps.Hold(t.Context(), standing()[i].UUID, 64)
	if err != nil {
		t.Logf("skipped: no process can hold memory on %s: %v", standing()[i].UUID, err)
		return
	}
	defer end()
	if !standing()[i].Busy {
		t.Errorf("process %d runs on %+v, which is not busy", pid, standing()[i])
	}
	list, err := d.Processes(wait(t), dev.UUID)
	if err != nil || !slices.ContainsFunc(list, func(p gpu.Process) bool { return p.PID == pid && p.GI == in.GI && p.CI == in.CI }) {
		t.Errorf("process %d is not listed on GPU instance %d, compute instance %d: %+v, %v", pid, in.GI, in.CI, list, err)
	}
	if err := d.DestroyInstance(wait(t), dev.UUID, in); !errors.Is(err, gpu.ErrInUse) {
		t.Fatalf("destroyed under process %d: %v, want ErrInUse", pid, err)
	}
	if err := d.SetMIGMode(wait(t), dev.UUID, true); err != nil && !errors.Is(err, gpu.ErrInUse) {
		t.Errorf("the mode that it is in: %v", err)
	}
	end()
	Await(t, fmt.Sprintf("process %d leaves %+v", pid, in), func() bool { return !standing()[i].Busy })
}

// splits puts two parts of one compute slice in a GPU instance.
func splits(t *testing.T, d *nvml.Driver, dev gpu.Device, p gpu.Profile, at gpu.Placement, standing func() []gpu.Instance) {
	name := "1c." + p.Name
	var parts []gpu.Instance
	for _, slice := range []int{1, 0} {
		in, err := d.CreateInstance(wait(t), dev.UUID, name, at, slice)
		if errors.Is(err, gpu.ErrNotSupported) || errors.Is(err, gpu.ErrInvalid) {
			t.Logf("skipped: %s from slice %d: %v", name, slice, err)
			break
		}
		if err != nil {
			t.Errorf("%s from slice %d: %v", name, slice, err)
			break
		}
		if in.Profile != name || in.CIStart != slice || in.Placement != at {
			t.Errorf("%s from slice %d was made as %+v", name, slice, in)
		}
		parts = append(parts, in)
		if now := standing(); !slices.ContainsFunc(now, func(s gpu.Instance) bool {
			return s.Profile == name && s.GI == in.GI && s.CI == in.CI && s.CIStart == slice
		}) {
			t.Errorf("%+v is not listed: %+v", in, now)
		}
	}
	for _, in := range parts {
		if err := d.DestroyInstance(wait(t), dev.UUID, in); err != nil {
			t.Error(err)
		}
	}
}

// capsList says whether the machine's driver lists capabilities.
func capsList(opts nvml.Options) bool {
	root := opts.ProcRoot
	if root == "" {
		root = "/proc"
	}
	_, err := os.Stat(filepath.Join(root, "driver/nvidia-caps/mig-minors"))
	return err == nil
}

// capabilities need no instance to stand: the kernel module lists them all.
func capabilities(t *testing.T, opts nvml.Options) {
	d := Open(t, opts)
	inv := read(t, d)
	i := slices.IndexFunc(inv.GPUs, func(dev gpu.Device) bool { return dev.MIG.Capable && dev.Fault == "" })
	if i < 0 {
		t.Skip("skipped: no GPU is capable of MIG")
	}
	if !capsList(opts) {
		t.Skip("skipped: there is no driver/nvidia-caps/mig-minors in this procfs")
	}
	if nodes, err := d.Capabilities(inv.GPUs[i].Minor, 9999, 0); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("of an instance that cannot be: %+v, %v, want ErrNotFound", nodes, err)
	}
}
