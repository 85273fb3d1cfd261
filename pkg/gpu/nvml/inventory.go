// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/pkg/gpu"
)

// survey reads inventories.
type survey struct {
	*session
	*presence
	// memory reads a GPU's memory; told is false if the driver has no figures. side reads its MIG
	// side.
	memory func(nvml.Device) (m gpu.Memory, told bool, err error)
	side   interface {
		mig(nvml.Device, gpu.UUID) (gpu.MIG, error)
		see(*gpu.Device)
	}
	links   *linkReader
	machine *machine
	// last is the last good reading of each GPU ever seen. It is used only while locks.calls is
	// held.
	last map[gpu.UUID]gpu.Device
}

func newSurvey(
	s *session, p *presence, memory func(nvml.Device) (gpu.Memory, bool, error), side *migSide,
) *survey {
	return &survey{
		session: s, presence: p, memory: memory, side: side,
		links: &linkReader{session: s, known: map[gpu.UUID]*nvlinks{}}, machine: newMachine(),
		last: map[gpu.UUID]gpu.Device{},
	}
}

func (s *survey) Inventory(ctx context.Context) (gpu.Inventory, error) {
	inv, err := call(ctx, s.session, "read the inventory", func() (gpu.Inventory, error) { return s.inventory(ctx) })
	if err == nil {
		err = s.place(ctx, &inv)
	}
	return inv, err
}

func (s *survey) inventory(ctx context.Context) (gpu.Inventory, error) {
	var inv gpu.Inventory
	version, ret := s.lib.SystemGetDriverVersion()
	if err := nvmlSystemGetDriverVersion.failed("read the driver's version", ret); err != nil {
		return inv, err
	}
	inv.Driver = version
	cuda, ret := s.lib.SystemGetCudaDriverVersion()
	if told, _ := nvmlSystemGetCudaDriverVersion.told("read the CUDA version", ret); told {
		inv.CUDA = fmt.Sprintf("%d.%d", cuda/1000, cuda%1000/10)
	}
	count, ret := s.lib.DeviceGetCount()
	if err := nvmlDeviceGetCount.failed("count the GPUs", ret); err != nil {
		return inv, err
	}

	handles := map[gpu.UUID]nvml.Device{}
	stale := false
	for i := range count {
		if err := ctx.Err(); err != nil {
			return inv, fmt.Errorf("read GPU %d: %w: %w", i, gpu.ErrTimeout, err)
		}
		dev, h, err := s.device(i)
		if err != nil {
			dev = s.remembered(i, dev.UUID)
			dev.Fault, dev.Lost = err.Error(), errors.Is(err, gpu.ErrLost)
			stale = stale || dev.Lost
		} else {
			handles[dev.UUID] = h
		}
		inv.GPUs = append(inv.GPUs, dev)
	}
	if s.reconcile(&inv, handles) {
		stale = true
	}
	s.stale.Store(stale)
	for i := range inv.GPUs {
		dev := &inv.GPUs[i]
		h, ok := handles[dev.UUID]
		if !ok {
			// The indices of its peers may have changed; its own links are known.
			if own := s.links.known[dev.UUID]; own != nil {
				dev.Links = own.joined(i, inv.GPUs)
			}
			continue
		}
		own := s.links.lanesOf(h, dev)
		dev.Lanes, dev.Links, dev.Fabric = len(own.lanes), own.joined(i, inv.GPUs), nil
		if dev.Lanes > 0 {
			dev.Fabric = s.links.fabric(h, s.last[dev.UUID].Fabric)
		}
		s.last[dev.UUID] = *dev
		*dev = clone(*dev)
	}
	return inv, nil
}

// device reads the GPU at an index, except its links. If it fails, the device has the UUID if
// that could be read.
func (s *survey) device(index int) (gpu.Device, nvml.Device, error) {
	dev := gpu.Device{Index: index}
	h, u, err := s.byIndex(index)
	if err != nil {
		return dev, nil, err
	}
	dev.UUID = u
	pci, ret := h.GetPciInfo()
	if err := nvmlDeviceGetPciInfo.failed("read the PCI address of "+string(u), ret); err != nil {
		return dev, nil, err
	}
	dev.PCI = busID(pci)
	dev.PCIDevice = fmt.Sprintf("0x%08X", pci.PciDeviceId)
	dev.PCISubsystem = fmt.Sprintf("0x%08X", pci.PciSubSystemId)
	if dev.Minor, ret = h.GetMinorNumber(); ret != nvml.SUCCESS {
		return dev, nil, nvmlDeviceGetMinorNumber.failed("read the minor number of "+string(u), ret)
	}
	memory, _, err := s.memory(h)
	if err != nil {
		return dev, nil, fmt.Errorf("%s: %w", u, err)
	}
	dev.Memory, dev.Reserved = memory.Total, memory.Reserved

	known, seen := s.last[dev.UUID]
	if seen && known.PCI == dev.PCI {
		dev.Model, dev.ComputeCapability, dev.NUMA = known.Model, known.ComputeCapability, known.NUMA
		dev.SMs = known.SMs
	} else {
		if dev.Model, ret = h.GetName(); ret != nvml.SUCCESS {
			return dev, nil, nvmlDeviceGetName.failed("read the name of "+string(u), ret)
		}
		if err := s.givable(h, u); err != nil {
			return dev, nil, err
		}
		major, minor, ret := h.GetCudaComputeCapability()
		if told, _ := nvmlDeviceGetCudaComputeCapability.told("read the compute capability", ret); told {
			dev.ComputeCapability = fmt.Sprintf("%d.%d", major, minor)
			dev.SMs = s.multiprocessors(h, major, minor)
		}
		dev.NUMA = nearest(h)
	}
	s.side.see(&dev)
	dev.MIG, err = s.side.mig(h, dev.UUID)
	return dev, h, err
}

// multiprocessors returns how many multiprocessors (SMs) a GPU has; 0 if the driver does not tell. The
// driver tells the number of CUDA cores, of which each SM has 64 or 128 by its compute capability: see
// the table of arithmetic throughput in NVIDIA's CUDA programming guide.
func (s *survey) multiprocessors(h nvml.Device, major, minor int) int {
	if !s.has(nvmlDeviceGetNumGpuCores) {
		return 0
	}
	cores, ret := h.GetNumGpuCores()
	if told, _ := nvmlDeviceGetNumGpuCores.told("read the number of cores", ret); !told {
		return 0
	}
	switch {
	case major == 7, major == 8 && minor == 0:
		return cores / 64
	case major == 6 && minor == 0:
		return cores / 64
	}
	return cores / 128
}

// givable makes the calls of NVIDIA's generator (Parts) that this package does not make
// otherwise. A GPU that they fail for cannot be given to any container, and its fault shows that
// at once.
func (s *survey) givable(h nvml.Device, u gpu.UUID) error {
	if _, err := s.handle(u); err != nil {
		return err
	}
	if _, ret := h.GetIndex(); ret != nvml.SUCCESS {
		return nvmlDeviceGetIndex.failed("read the index of "+string(u), ret)
	}
	_, ret := h.IsMigDeviceHandle()
	return nvmlDeviceIsMigDeviceHandle.failed("ask whether it is a MIG device of "+string(u), ret)
}

// remembered returns the last good reading of a GPU that cannot be read now: the one with its
// UUID if that could be read, and otherwise the one with its index.
func (s *survey) remembered(index int, u gpu.UUID) gpu.Device {
	if known, ok := s.last[u]; ok {
		known = clone(known)
		known.Index = index
		return known
	}
	if u == "" {
		for _, known := range s.last {
			if known.Index == index {
				return clone(known)
			}
		}
	}
	return gpu.Device{Index: index, UUID: u}
}

// reconcile compares the inventory with the remembered GPUs. A GPU that was found by its index,
// and has been read at another index, loses all but index and fault. A GPU that the driver no
// longer lists is added, with a fault. stale is true if the machine still has such a GPU: after a
// new initialisation the driver may list it again.
func (s *survey) reconcile(inv *gpu.Inventory, read map[gpu.UUID]nvml.Device) (stale bool) {
	listed := map[gpu.UUID]bool{}
	for i := range inv.GPUs {
		dev := &inv.GPUs[i]
		if _, ok := read[dev.UUID]; ok && dev.Fault != "" {
			*dev = gpu.Device{Index: dev.Index, Fault: dev.Fault, Lost: dev.Lost}
		}
		listed[dev.UUID] = true
	}
	for _, u := range slices.Sorted(maps.Keys(s.last)) {
		if listed[u] {
			continue
		}
		gone := clone(s.last[u])
		gone.Fault, gone.Gone, gone.Links = "the driver no longer lists it", true, nil
		stale = stale || s.present(gone)
		inv.GPUs = append(inv.GPUs, gone)
	}
	slices.SortStableFunc(inv.GPUs, func(a, b gpu.Device) int { return cmp.Compare(a.Index, b.Index) })
	return stale
}

// clone copies dev, so that the caller's changes through slices and pointers do not reach the
// original.
func clone(dev gpu.Device) gpu.Device {
	dev.Links, dev.Path = slices.Clone(dev.Links), slices.Clone(dev.Path)
	dev.MIG.Instances = slices.Clone(dev.MIG.Instances)
	dev.MIG.Profiles, dev.MIG.Pending = cloneProfiles(dev.MIG.Profiles), cloned(dev.MIG.Pending)
	dev.NUMA, dev.Fabric, dev.VGPU = cloned(dev.NUMA), cloned(dev.Fabric), cloned(dev.VGPU)
	return dev
}

// cloned returns a pointer to a copy, or nil for nil.
func cloned[T any](p *T) *T {
	if p == nil {
		return nil
	}
	return new(*p)
}

// busID returns the PCI address as the driver writes it, in lower case.
func busID(pci nvml.PciInfo) string { return strings.ToLower(text(pci.BusId[:])) }

// text converts a C string.
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

// nearest returns the NUMA node whose memory the driver calls nearest to a GPU, or nil if it does
// not name exactly one. It counts only if sysfs has none, as in a virtual machine without the
// topology. Otherwise place takes the kernel's answer, as the kubelet and other device plugins
// do.
func nearest(h nvml.Device) *int {
	const most = 1024 // the kernel's own limit, CONFIG_NODES_SHIFT
	mask, ret := h.GetMemoryAffinity(most, nvml.AFFINITY_SCOPE_NODE)
	if told, _ := nvmlDeviceGetMemoryAffinity.told("read the nearest memory", ret); !told {
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
