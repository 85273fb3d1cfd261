// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/pkg/gpu"
)

// Inventory reads all GPUs. One that the driver cannot describe is in it
// nevertheless, as it was when it last could, with the reason in Fault; if it
// never could, the index is all that is known of it. A GPU that the driver no
// longer lists stays in the inventory as long as the Driver is open. An error
// means that nothing at all could be read.
//
// What cannot change while a process has the driver open (model, links, NUMA
// node, MIG profiles) is read once per GPU.
func (d *Driver) Inventory(ctx context.Context) (gpu.Inventory, error) {
	return call(ctx, d, "read the inventory", func() (gpu.Inventory, error) { return d.inventory(ctx) })
}

func (d *Driver) inventory(ctx context.Context) (gpu.Inventory, error) {
	var inv gpu.Inventory
	version, ret := d.lib.SystemGetDriverVersion()
	if err := failed("read the driver's version", ret); err != nil {
		return inv, err
	}
	inv.Driver = version
	if cuda, ret := d.lib.SystemGetCudaDriverVersion(); ret == nvml.SUCCESS {
		inv.CUDA = fmt.Sprintf("%d.%d", cuda/1000, cuda%1000/10)
	}
	count, ret := d.lib.DeviceGetCount()
	if err := failed("count the GPUs", ret); err != nil {
		return inv, err
	}

	handles := map[gpu.UUID]nvml.Device{}
	stale := false
	for i := range count {
		if err := ctx.Err(); err != nil {
			return inv, fmt.Errorf("read GPU %d: %w: %w", i, gpu.ErrTimeout, err)
		}
		dev, h, err := d.device(i)
		if err != nil {
			dev = d.remembered(i, dev.UUID)
			dev.Fault = err.Error()
			stale = stale || errors.Is(err, gpu.ErrLost)
		} else {
			handles[dev.UUID] = h
		}
		inv.GPUs = append(inv.GPUs, dev)
	}
	if d.reconcile(&inv, handles) {
		stale = true
	}
	d.stale.Store(stale)
	// A link is named by its peer's address: what was found is kept only if
	// every GPU has told its own.
	addressed := !slices.ContainsFunc(inv.GPUs, func(dev gpu.Device) bool { return dev.PCI == "" })
	for i := range inv.GPUs {
		dev := &inv.GPUs[i]
		h, ok := handles[dev.UUID]
		if !ok {
			continue
		}
		links, ok := d.links[dev.UUID]
		if !ok {
			links = d.readLinks(h, inv.GPUs)
			if addressed {
				d.links[dev.UUID] = links
			}
		}
		dev.Links = links
		d.last[dev.UUID] = *dev
		*dev = clone(*dev)
	}
	return inv, nil
}

// device reads the GPU at an index, all but its links. With an error the
// device's UUID is what could be read of it.
func (d *Driver) device(index int) (gpu.Device, nvml.Device, error) {
	dev := gpu.Device{Index: index}
	h, ret := d.lib.DeviceGetHandleByIndex(index)
	if err := failed(fmt.Sprintf("find GPU %d", index), ret); err != nil {
		return dev, nil, err
	}
	uuid, ret := h.GetUUID()
	if err := failed(fmt.Sprintf("read the UUID of GPU %d", index), ret); err != nil {
		return dev, nil, err
	}
	dev.UUID = gpu.UUID(uuid)
	pci, ret := h.GetPciInfo()
	if err := failed("read the PCI address of "+uuid, ret); err != nil {
		return dev, nil, err
	}
	dev.PCI = busID(pci)
	dev.PCIDevice = fmt.Sprintf("0x%08X", pci.PciDeviceId)
	dev.PCISubsystem = fmt.Sprintf("0x%08X", pci.PciSubSystemId)
	if dev.Minor, ret = h.GetMinorNumber(); ret != nvml.SUCCESS {
		return dev, nil, failed("read the minor number of "+uuid, ret)
	}
	memory, err := d.memory(h, dev.UUID)
	if err != nil {
		return dev, nil, err
	}
	dev.Memory, dev.Reserved = memory.Total, memory.Reserved

	known, seen := d.last[dev.UUID]
	if seen && known.PCI == dev.PCI {
		dev.Model, dev.ComputeCapability, dev.NUMA = known.Model, known.ComputeCapability, known.NUMA
	} else {
		if dev.Model, ret = h.GetName(); ret != nvml.SUCCESS {
			return dev, nil, failed("read the name of "+uuid, ret)
		}
		if major, minor, ret := h.GetCudaComputeCapability(); ret == nvml.SUCCESS {
			dev.ComputeCapability = fmt.Sprintf("%d.%d", major, minor)
		}
		dev.NUMA = d.numa(h, pci)
	}
	dev.MIG, err = d.mig(h, dev.UUID)
	return dev, h, err
}

// remembered is a GPU that cannot be read now: by its UUID if that could be
// read, else by the index it had.
func (d *Driver) remembered(index int, u gpu.UUID) gpu.Device {
	if known, ok := d.last[u]; ok {
		known = clone(known)
		known.Index = index
		return known
	}
	if u == "" {
		for _, known := range d.last {
			if known.Index == index {
				return clone(known)
			}
		}
	}
	return gpu.Device{Index: index, UUID: u}
}

// reconcile holds what was read against what is remembered: a guess by index
// must not repeat a GPU that was read at another one, and a GPU that the
// driver stopped listing is kept. It reports whether the machine still has such
// a one: the driver may list it again when it is initialised anew.
func (d *Driver) reconcile(inv *gpu.Inventory, read map[gpu.UUID]nvml.Device) (stale bool) {
	listed := map[gpu.UUID]bool{}
	for i := range inv.GPUs {
		dev := &inv.GPUs[i]
		if _, ok := read[dev.UUID]; ok && dev.Fault != "" {
			*dev = gpu.Device{Index: dev.Index, Fault: dev.Fault}
		}
		listed[dev.UUID] = true
	}
	for _, u := range slices.Sorted(maps.Keys(d.last)) {
		if listed[u] {
			continue
		}
		gone := clone(d.last[u])
		gone.Fault, gone.Gone = "the driver no longer lists it", true
		stale = stale || d.present(gone)
		inv.GPUs = append(inv.GPUs, gone)
	}
	slices.SortStableFunc(inv.GPUs, func(a, b gpu.Device) int { return cmp.Compare(a.Index, b.Index) })
	return stale
}

// clone copies what a caller could change through a slice or pointer.
func clone(dev gpu.Device) gpu.Device {
	dev.Links = slices.Clone(dev.Links)
	dev.MIG.Instances = slices.Clone(dev.MIG.Instances)
	dev.MIG.Profiles = cloneProfiles(dev.MIG.Profiles)
	if dev.NUMA != nil {
		n := *dev.NUMA
		dev.NUMA = &n
	}
	if dev.MIG.Pending != nil {
		p := *dev.MIG.Pending
		dev.MIG.Pending = &p
	}
	return dev
}

// busID is the address as the driver writes it, in lower case.
func busID(pci nvml.PciInfo) string { return strings.ToLower(text(pci.BusId[:])) }

// text is a C string.
func text(c []int8) string {
	var b strings.Builder
	for _, v := range c {
		if v == 0 {
			break
		}
		b.WriteByte(byte(v))
	}
	return b.String()
}

// numa is the node of the GPU's slot. The kernel's word comes first: it is
// what the kubelet and other device plugins go by. Where sysfs is silent (in a
// guest without the topology) the driver may know the memory that is nearest.
func (d *Driver) numa(h nvml.Device, pci nvml.PciInfo) *int {
	file := filepath.Join(d.opts.SysRoot, "bus/pci/devices",
		fmt.Sprintf("%04x:%02x:%02x.0", pci.Domain, pci.Bus, pci.Device), "numa_node")
	if data, err := os.ReadFile(file); err == nil {
		n, err := strconv.Atoi(strings.TrimSpace(string(data)))
		if err == nil && n >= 0 {
			return &n
		}
		return nil // -1: the machine has no such notion
	}
	const most = 1024 // the kernel's own limit, CONFIG_NODES_SHIFT
	mask, ret := h.GetMemoryAffinity(most, nvml.AFFINITY_SCOPE_NODE)
	if ret != nvml.SUCCESS {
		return nil
	}
	node, found := 0, 0
	for i, word := range mask {
		found += bits.OnesCount(word)
		if word != 0 {
			node = i*bits.UintSize + bits.TrailingZeros(word)
		}
	}
	if found != 1 {
		return nil
	}
	return &node
}

// readLinks counts the active NVLink lanes to each peer, by index, and to
// switches.
func (d *Driver) readLinks(h nvml.Device, gpus []gpu.Device) []gpu.Link {
	typed := d.has("nvmlDeviceGetNvLinkRemoteDeviceType")
	lanes, switched := map[int]int{}, 0
	for lane := range nvml.NVLINK_MAX_LINKS {
		state, ret := h.GetNvLinkState(lane)
		if ret == nvml.ERROR_INVALID_ARGUMENT {
			break // the card has fewer
		}
		if ret != nvml.SUCCESS || state != nvml.FEATURE_ENABLED {
			continue
		}
		if typed {
			if kind, ret := h.GetNvLinkRemoteDeviceType(lane); ret == nvml.SUCCESS && kind == nvml.NVLINK_DEVICE_TYPE_SWITCH {
				switched++
				continue
			}
		}
		remote, ret := h.GetNvLinkRemotePciInfo(lane)
		if ret != nvml.SUCCESS {
			continue
		}
		address := busID(remote)
		for _, peer := range gpus {
			if peer.PCI == address {
				lanes[peer.Index]++
			}
		}
	}
	var links []gpu.Link
	for _, to := range slices.Sorted(maps.Keys(lanes)) {
		links = append(links, gpu.Link{To: to, NVLink: lanes[to]})
	}
	if switched > 0 {
		links = append(links, gpu.Link{Switch: true, NVLink: switched})
	}
	return links
}
