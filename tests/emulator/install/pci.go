// SPDX-License-Identifier: Apache-2.0

package install

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/tests/emulator"
)

const (
	vendorNVIDIA   = 0x10de
	vendorMellanox = 0x15b3
	vendorAmazon   = 0x1d0f
	vendorBroadcom = 0x1000
)

// function is a function on the PCI bus: what its files say.
type function struct {
	vendor, device, subVendor, subDevice uint16
	class                                uint32
	numa                                 int
	driver                               string // or none
}

// tree is sysfs as the kernel has it: devices in folders below their bridges, and
// links to them from the folders of buses and classes.
type tree struct {
	files, links map[string]string
	drivers      map[string]bool
	numa         []emulator.NUMASpec
	all          []int // CPUs
}

// sysfs is what the kernel shows of a machine's cards, and of its processors where
// the world describes them.
func sysfs(st emulator.State) (*tree, error) {
	t := &tree{files: map[string]string{}, links: map[string]string{}, drivers: map[string]bool{}, numa: st.Board.NUMA}
	for _, n := range st.Board.NUMA {
		cpus, err := parseList(n.CPUs)
		if err != nil {
			return nil, err
		}
		t.all = append(t.all, cpus...)
	}
	slices.Sort(t.all)
	nvidia := ""
	if st.Loaded {
		nvidia = "nvidia"
	}
	for i, g := range st.GPUs {
		if g.Unplugged {
			continue
		}
		t.add(st.Board.Paths[i], function{
			vendor: vendorNVIDIA, device: uint16(g.PCIDevice >> 16), subVendor: vendorNVIDIA, subDevice: uint16(g.Subsystem >> 16),
			class: 0x030200, numa: g.NUMA, driver: nvidia, // a display controller, 3D
		})
	}
	for _, at := range st.Board.Switches {
		t.add(at, function{vendor: vendorNVIDIA, device: 0x22a3, subVendor: vendorNVIDIA, subDevice: 0x1796, class: 0x068000, driver: nvidia})
	}
	for _, n := range st.Board.NICs {
		t.addNIC(n)
	}
	for name, text := range map[string]string{"product_name": st.Board.Machine, "sys_vendor": st.Board.Vendor} {
		t.files["sys/class/dmi/id/"+name] = text + "\n"
	}
	if st.Board.Named {
		files, links, err := processors(st.Board.NUMA)
		if err != nil {
			return nil, err
		}
		maps.Copy(t.files, files)
		maps.Copy(t.links, links)
	}
	return t, nil
}

// sweep takes away what an earlier machine has below dir and this one has not.
func (t *tree) sweep(dir string) error {
	var stale, folders []string
	for _, pattern := range []string{"sys/devices/pci*", "sys/bus/pci", "sys/class/infiniband", "sys/devices/system/node", "sys/devices/system/cpu"} {
		roots, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			return err
		}
		for _, root := range roots {
			err := filepath.WalkDir(root, func(at string, e fs.DirEntry, err error) error {
				if err != nil {
					return err
				}
				name, err := filepath.Rel(dir, at)
				_, file := t.files[name]
				_, link := t.links[name]
				switch {
				case e.IsDir():
					folders = append(folders, at)
				case !file && !link:
					stale = append(stale, at)
				}
				return err
			})
			if err != nil {
				return err
			}
		}
	}
	if err := removeAll(stale...); err != nil {
		return err
	}
	for _, at := range slices.Backward(folders) {
		if err := os.Remove(at); err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EBUSY) {
			return err
		}
	}
	return nil
}

// add lays a function and the bridges before it.
func (t *tree) add(at string, f function) {
	if parent := path.Dir(at); strings.Contains(parent, "/") {
		if _, there := t.files["sys/devices/"+parent+"/class"]; !there {
			t.add(parent, function{vendor: vendorBroadcom, device: 0xc030, subVendor: vendorBroadcom, subDevice: 0xa064, class: 0x060400, numa: f.numa})
		}
	}
	dir := "sys/devices/" + at + "/"
	near := t.all
	if f.numa >= 0 {
		near, _ = parseList(t.numa[f.numa].CPUs) // sysfs has read it
	}
	for name, v := range map[string]string{
		"vendor":           fmt.Sprintf("%#04x\n", f.vendor),
		"device":           fmt.Sprintf("%#04x\n", f.device),
		"subsystem_vendor": fmt.Sprintf("%#04x\n", f.subVendor),
		"subsystem_device": fmt.Sprintf("%#04x\n", f.subDevice),
		"class":            fmt.Sprintf("%#06x\n", f.class),
		"revision":         "0xa1\n",
		"numa_node":        fmt.Sprintf("%d\n", f.numa),
		"local_cpulist":    formatList(near) + "\n",
		"local_cpus":       formatMask(near) + "\n",
		"resource":         "0x0000000000000000 0x0000000000000000 0x0000000000000000\n",
		"config":           f.config(),
	} {
		t.files[dir+name] = v
	}
	up := strings.Repeat("../", strings.Count(at, "/")+2) // to sys
	t.links[dir+"subsystem"] = up + "bus/pci"
	t.links["sys/bus/pci/devices/"+path.Base(at)] = "../../../devices/" + at
	if f.driver != "" {
		t.drivers[f.driver] = true
		t.links[dir+"driver"] = up + "bus/pci/drivers/" + f.driver
	}
}

// config is the function's configuration space: who it is, and no capability.
func (f function) config() string {
	b := make([]byte, 256)
	le := binary.LittleEndian
	le.PutUint16(b[0x00:], f.vendor)
	le.PutUint16(b[0x02:], f.device)
	le.PutUint32(b[0x08:], f.class<<8|0xa1)
	if f.class == 0x060400 {
		b[0x0e] = 1 // the header of a bridge
	} else {
		le.PutUint16(b[0x2c:], f.subVendor)
		le.PutUint16(b[0x2e:], f.subDevice)
	}
	return string(b)
}

func (t *tree) addNIC(n emulator.NIC) {
	f := function{vendor: vendorMellanox, device: 0x1021, subVendor: vendorMellanox, subDevice: 0x0023, class: 0x020700, numa: n.NUMA, driver: "mlx5_core"}
	layer, kind, rate := "InfiniBand", "1: CA", "400 Gb/sec (4X NDR)"
	switch n.Kind {
	case emulator.RoCE:
		f.class, layer = 0x020000, "Ethernet"
	case emulator.EFA:
		f = function{vendor: vendorAmazon, device: 0xefa1, subVendor: vendorAmazon, subDevice: 0xefa1, class: 0x020000, numa: n.NUMA, driver: "efa"}
		layer, kind, rate = "Unspecified", "7: unspecified", "100 Gb/sec (4X EDR)"
	}
	t.add(n.Path, f)
	state, physical := "4: ACTIVE", "5: LinkUp"
	if !n.Active {
		state, physical = "1: DOWN", "3: Disabled"
	}
	dir := n.Path + "/infiniband/" + n.Name
	t.links["sys/class/infiniband/"+n.Name] = "../../devices/" + dir
	dir = "sys/devices/" + dir + "/"
	t.links[dir+"device"] = "../../../" + path.Base(n.Path)
	for name, v := range map[string]string{
		"node_type": kind, "ports/1/link_layer": layer, "ports/1/state": state, "ports/1/phys_state": physical, "ports/1/rate": rate,
	} {
		t.files[dir+name] = v + "\n"
	}
}

// formatMask is a set as the kernel writes it in full: words of 32, the highest
// first.
func formatMask(numbers []int) string {
	words := []uint32{0}
	for _, n := range numbers {
		for n/32 >= len(words) {
			words = append(words, 0)
		}
		words[n/32] |= 1 << (n % 32)
	}
	var parts []string
	for _, w := range slices.Backward(words) {
		parts = append(parts, fmt.Sprintf("%08x", w))
	}
	return strings.Join(parts, ",")
}
