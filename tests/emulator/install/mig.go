// SPDX-License-Identifier: Apache-2.0

package install

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"example.com/gpu-agent/tests/emulator"
)

// A process reaches a GPU instance, or a compute instance, by a device node of
// its own: a capability. The first two are about MIG as such: to change it, and to
// look at all of it. The others the kernel module numbers once and for all when it
// is loaded (emulator.CapabilityMinor), for so many GPUs, by minor.
const (
	CapabilityConfig  = 1
	capabilityMonitor = 2

	mostGPUs             = 32
	mostGPUInstances     = 15
	mostComputeInstances = 8
)

// CapabilityNode is where the node of a minor stands below /dev.
func CapabilityNode(minor int) string { return fmt.Sprintf("nvidia-caps/nvidia-cap%d", minor) }

// capability is the text that stands for a capability in /proc: the module asks
// for a node that its owner alone may open where MIG can be changed through it,
// else for one that all may.
func capability(minor int) string {
	return fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: %d\nDeviceFileModify: 1\n", minor, capabilityMode(minor))
}

func capabilityMode(minor int) uint32 {
	if minor == CapabilityConfig {
		return 0o400
	}
	return 0o444
}

// migMinors lists the numbers of all capabilities, whether or not there is such
// an instance, or GPU.
func migMinors() string {
	var b strings.Builder
	fmt.Fprintf(&b, "config %d\nmonitor %d\n", CapabilityConfig, capabilityMonitor)
	for gpu := range mostGPUs {
		for gi := range mostGPUInstances {
			fmt.Fprintf(&b, "gpu%d/gi%d/access %d\n", gpu, gi, emulator.CapabilityMinor(gpu, gi, -1))
			for ci := range mostComputeInstances {
				fmt.Fprintf(&b, "gpu%d/gi%d/ci%d/access %d\n", gpu, gi, ci, emulator.CapabilityMinor(gpu, gi, ci))
			}
		}
	}
	return b.String()
}

// capabilities are the minors of a GPU's instances, by their folders below
// /proc/driver/nvidia/capabilities.
func capabilities(g emulator.GPUState) map[string]int {
	all := map[string]int{}
	if g.MIG == nil || g.Unplugged {
		return all
	}
	for _, gi := range g.MIG.Instances {
		at := fmt.Sprintf("gpu%d/mig/gi%d", g.Minor, gi.ID)
		all[at] = gi.Minor
		for _, ci := range gi.Compute {
			all[fmt.Sprintf("%s/ci%d", at, ci.ID)] = ci.Minor
		}
	}
	return all
}

const capabilitiesDir = "proc/driver/nvidia/capabilities"

// instances lets the folders of instances below dir follow the world.
func instances(dir string, st emulator.State) error {
	want := map[string]int{}
	for _, g := range st.GPUs {
		if st.Loaded {
			maps.Copy(want, capabilities(g))
		}
	}
	var gone []string
	for _, pattern := range []string{"gpu*/mig/gi*/ci*", "gpu*/mig/gi*"} {
		there, err := filepath.Glob(filepath.Join(dir, capabilitiesDir, pattern))
		if err != nil {
			return fmt.Errorf("find instances: %w", err)
		}
		for _, at := range there {
			name, err := filepath.Rel(filepath.Join(dir, capabilitiesDir), at)
			if err != nil {
				return fmt.Errorf("find instances: %w", err)
			}
			if _, ok := want[name]; !ok {
				gone = append(gone, at)
			}
		}
	}
	if err := removeAll(gone...); err != nil {
		return fmt.Errorf("remove instances: %w", err)
	}
	files := map[string]string{}
	for at, minor := range want {
		files[filepath.Join(capabilitiesDir, at, "access")] = capability(minor)
	}
	return write(dir, files)
}

// capabilityNodes makes the nodes of capabilities in dir, such as /dev. Those of
// instances are not the kernel module's work: whoever needs one first makes it,
// and nobody takes it away. So they are here for GPUs with an even minor, as if
// somebody had needed them, and for the others they are not.
func capabilityNodes(dir string, st emulator.State) error {
	if !st.Loaded {
		there, err := filepath.Glob(filepath.Join(dir, "nvidia-caps/nvidia-cap*"))
		if err == nil {
			err = removeAll(there...)
		}
		if err != nil {
			return fmt.Errorf("remove device node: %w", err)
		}
		return nil
	}
	if err := os.MkdirAll(filepath.Join(dir, filepath.Dir(CapabilityNode(0))), 0o755); err != nil {
		return fmt.Errorf("make device folder: %w", err)
	}
	minors := []int{CapabilityConfig, capabilityMonitor}
	for _, g := range st.GPUs {
		if g.Minor%2 == 0 {
			minors = slices.AppendSeq(minors, maps.Values(capabilities(g)))
		}
	}
	for _, minor := range minors {
		if err := node(filepath.Join(dir, CapabilityNode(minor)), MajorCapabilities, uint32(minor), capabilityMode(minor)); err != nil {
			return err
		}
	}
	return nil
}

// FollowInstances is Follow for the files of MIG instances alone, which come and
// go more often than all else.
func FollowInstances(driver string, w *emulator.World) error {
	if driver == "" {
		return nil
	}
	m, err := Find(driver)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := m.guard(); err != nil {
		return err
	}
	st := w.State()
	if m.Kernel != "" && (m.Kernel != "/" || mounted("/"+capabilitiesDir)) {
		if err := instances(m.Kernel, st); err != nil {
			return err
		}
	}
	return capabilityNodes(m.Dev, st)
}
