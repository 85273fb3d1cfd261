// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"cmp"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"

	"example.com/gpu-agent/pkg/gpu"
)

// amazon is the PCI vendor of Elastic Fabric Adapters, as sysfs writes it.
const amazon = "0x1d0f"

// Read adds to an inventory what sysfs knows: the machine's name, NUMA nodes and RDMA network
// cards, and for each GPU with a PCI address its NUMA node, CPUs and PCI path. sys is the root of
// sysfs. Fields that sysfs has no value for stay as they are, also if sysfs is damaged. Read uses
// only the GPUs' PCI addresses and the fields that it adds to.
//
// A virtual function of a network card is left out if the machine also has the card itself.
//
// PCI paths are the targets of symbolic links, so Read finds them only if sys is an
// [fs.ReadLinkFS], as os.DirFS is. For some files of sysfs the kernel asks a device, which can
// take long if the device hangs.
func Read(sys fs.FS, inv *gpu.Inventory) {
	if name := line(sys, "class/dmi/id/product_name"); name != "" {
		inv.Machine = name
	}
	if nodes := readNUMA(sys); len(nodes) > 0 {
		inv.NUMA = nodes
	}
	if nics, ok := readNICs(sys); ok {
		inv.NICs = nics
	}
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		addr, ok := SysfsAddress(d.PCI)
		if !ok {
			continue
		}
		dir := path.Join("bus/pci/devices", addr)
		d.NUMA = readNode(sys, dir, d.NUMA)
		if list := readCPUs(sys, path.Join(dir, "local_cpulist")); list != "" {
			d.CPUs = list
		} else if d.CPUs == "" && d.NUMA != nil {
			if at := slices.IndexFunc(inv.NUMA, func(n gpu.NUMANode) bool { return n.ID == *d.NUMA }); at >= 0 {
				d.CPUs = inv.NUMA[at].CPUs
			}
		}
		if way, last := pciWay(resolve(sys, dir)); last == addr {
			d.Path = way
		}
	}
}

// readNode returns the NUMA node of a device: nil if the kernel's value is -1 (none), and was if
// there is no value.
func readNode(sys fs.FS, dir string, was *int) *int {
	n, err := strconv.Atoi(line(sys, path.Join(dir, "numa_node")))
	switch {
	case err != nil:
		return was
	case n < 0:
		return nil
	}
	return &n
}

// readCPUs returns a list as the kernel writes it, "0-55,112-167". It is empty if there is none.
func readCPUs(sys fs.FS, name string) string {
	list := line(sys, name)
	if strings.Trim(list, "0123456789,-") != "" {
		return ""
	}
	return list
}

func readNUMA(sys fs.FS) []gpu.NUMANode {
	const dir = "devices/system/node"
	entries, _ := fs.ReadDir(sys, dir) // on error, those that could be read
	var nodes []gpu.NUMANode
	for _, e := range entries {
		number, ok := strings.CutPrefix(e.Name(), "node")
		id, err := strconv.ParseUint(number, 10, 31)
		if !ok || err != nil {
			continue
		}
		nodes = append(nodes, gpu.NUMANode{ID: int(id), CPUs: readCPUs(sys, path.Join(dir, e.Name(), "cpulist"))})
	}
	slices.SortFunc(nodes, func(a, b gpu.NUMANode) int { return cmp.Compare(a.ID, b.ID) })
	for i := range nodes {
		n := &nodes[i]
		n.Distances = readDistances(sys, path.Join(dir, "node"+strconv.Itoa(n.ID), "distance"), len(nodes))
	}
	return nodes
}

// readDistances returns a NUMA node's distance to each node, or nil unless there are that many.
func readDistances(sys fs.FS, name string, nodes int) []int {
	words := strings.Fields(line(sys, name))
	if len(words) != nodes {
		return nil
	}
	out := make([]int, nodes)
	for i, w := range words {
		n, err := strconv.ParseUint(w, 10, 8)
		if err != nil {
			return nil
		}
		out[i] = int(n)
	}
	return out
}

// readNICs returns the RDMA network cards. ok is false if the kernel has no list of them.
func readNICs(sys fs.FS) (nics []gpu.NIC, ok bool) {
	const dir = "class/infiniband"
	entries, err := fs.ReadDir(sys, dir)
	if err != nil {
		return nil, false
	}
	for _, e := range entries {
		if n, ok := readNIC(sys, dir, e.Name()); ok {
			nics = append(nics, n)
		}
	}
	slices.SortFunc(nics, func(a, b gpu.NIC) int { return byNumber(a.Name, b.Name) })
	return nics, true
}

// readNIC returns false if this is no card of a kind in gpu.RDMA: software on top of an Ethernet
// card, a virtual function, or iWARP.
func readNIC(sys fs.FS, dir, name string) (gpu.NIC, bool) {
	nic := gpu.NIC{Name: name}
	device := resolve(sys, path.Join(dir, name, "device"))
	way, addr := pciWay(device)
	if addr == "" {
		return nic, false
	}
	if _, err := fs.Stat(sys, path.Join(device, "physfn")); err == nil {
		return nic, false
	}
	nic.Path, nic.PCI = way, deviceAddress(addr)
	nic.NUMA = readNode(sys, device, nil)

	ports, _ := fs.ReadDir(sys, path.Join(dir, name, "ports")) // on error, the card has no ports
	for _, p := range ports {
		port := path.Join(dir, name, "ports", p.Name())
		switch line(sys, path.Join(port, "link_layer")) {
		case "InfiniBand":
			nic.Kind = gpu.InfiniBand
		case "Ethernet":
			nic.Kind = cmp.Or(nic.Kind, gpu.RoCE)
		}
		// "4: ACTIVE". In the other states the port is down, or not up yet.
		nic.Active = nic.Active || strings.HasPrefix(line(sys, path.Join(port, "state")), "4:")
	}
	if line(sys, path.Join(device, "vendor")) == amazon {
		nic.Kind = gpu.EFA
	} else if kind := line(sys, path.Join(dir, name, "node_type")); kind != "" && !strings.HasPrefix(kind, "1:") {
		return nic, false // no channel adapter: "4: RNIC" is iWARP
	}
	return nic, nic.Kind != ""
}

// byNumber compares names. Numbers in them compare by value: mlx5_2 comes before mlx5_10, and
// rdmap79s0 before rdmap113s0.
func byNumber(a, b string) int {
	const digits = "0123456789"
	restA, restB := a, b
	for restA != "" && restB != "" {
		// A word, then a number; either may be empty.
		i, j := len(restA), len(restB)
		if at := strings.IndexAny(restA, digits); at >= 0 {
			i = at
		}
		if at := strings.IndexAny(restB, digits); at >= 0 {
			j = at
		}
		if c := cmp.Compare(restA[:i], restB[:j]); c != 0 {
			return c
		}
		tailA, tailB := strings.TrimLeft(restA[i:], digits), strings.TrimLeft(restB[j:], digits)
		numA := strings.TrimLeft(restA[i:len(restA)-len(tailA)], "0")
		numB := strings.TrimLeft(restB[j:len(restB)-len(tailB)], "0")
		if c := cmp.Or(cmp.Compare(len(numA), len(numB)), cmp.Compare(numA, numB)); c != 0 {
			return c
		}
		restA, restB = tailA, tailB
	}
	return cmp.Or(cmp.Compare(len(restA), len(restB)), cmp.Compare(a, b))
}

// line returns a file's text without leading and trailing space. It is empty if the file cannot
// be read.
func line(sys fs.FS, name string) string {
	data, err := fs.ReadFile(sys, name)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// resolve returns the path that a name leads to if all its symbolic links are followed. It is
// empty if they lead out of sys or in a circle.
func resolve(sys fs.FS, name string) string {
	const mostLinks = 40 // the limit of Linux
	at, links := ".", 0
	for rest := strings.Split(name, "/"); len(rest) > 0; {
		part := rest[0]
		rest = rest[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			if at == "." {
				return ""
			}
			at = path.Dir(at)
			continue
		}
		next := path.Join(at, part)
		target, err := fs.ReadLink(sys, next)
		if err != nil {
			at = next // not a link
			continue
		}
		if links++; links > mostLinks || path.IsAbs(target) {
			return ""
		}
		rest = append(strings.Split(target, "/"), rest...)
	}
	return at
}

// pciWay returns the bridges above a PCI device, from the host bridge on, and the device's
// address. Both come from a path below devices, which may begin with other buses. It returns
// nothing if the path does not end in a PCI device.
func pciWay(name string) (way []string, addr string) {
	for part := range strings.SplitSeq(name, "/") {
		host := isHostBridge(part)
		switch {
		case len(way) == 0 && !host:
			continue
		case !host && !isAddress(part):
			return nil, "" // not a PCI device but something on it
		}
		way = append(way, part)
	}
	if len(way) == 0 || isHostBridge(way[len(way)-1]) {
		return nil, ""
	}
	return way[:len(way)-1], way[len(way)-1]
}

// isHostBridge reports whether s is like "pci0000:16".
func isHostBridge(s string) bool {
	number, ok := strings.CutPrefix(s, "pci")
	domain, bus, ok2 := strings.Cut(number, ":")
	return ok && ok2 && isHex(domain, 4, 8) && isHex(bus, 2, 2)
}

// isAddress reports whether s is like "0000:17:00.0", with a domain of four to eight digits.
func isAddress(s string) bool {
	domain, rest, ok := strings.Cut(s, ":")
	bus, rest, ok2 := strings.Cut(rest, ":")
	slot, function, ok3 := strings.Cut(rest, ".")
	return ok && ok2 && ok3 && isHex(domain, 4, 8) && isHex(bus, 2, 2) && isHex(slot, 2, 2) && isHex(function, 1, 1)
}

func isHex(s string, least, most int) bool {
	return len(s) >= least && len(s) <= most && strings.Trim(s, "0123456789abcdef") == ""
}

// SysfsAddress returns a PCI address as sysfs writes it (bus/pci/devices): with a domain of four
// digits, or more if it needs them. It returns false if s is no PCI address.
func SysfsAddress(s string) (string, bool) {
	s = strings.ToLower(s)
	if !isAddress(s) {
		return "", false
	}
	domain, rest, _ := strings.Cut(s, ":")
	n, _ := strconv.ParseUint(domain, 16, 32) // isAddress has checked it
	return fmt.Sprintf("%04x:%s", n, rest), true
}

// deviceAddress returns an address in the form of gpu.Device.PCI.
func deviceAddress(s string) string {
	domain, rest, _ := strings.Cut(s, ":")
	return strings.Repeat("0", 8-len(domain)) + domain + ":" + rest
}
