// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml/internal/ctxlock"
	"example.com/gpu-agent/pkg/topology"
)

// sysWait bounds a reading of sysfs. The kernel has almost all of it in memory. But for the state
// of network ports it asks the card's firmware.
const sysWait = time.Second

// machine reads what the kernel knows of the machine, and of where GPUs are in it. It does not
// use the driver's locks: it makes no call of the driver, and a network card that hangs must not
// look like a GPU that hangs.
//
// A reading hangs if the firmware of a network card does. Then an inventory waits for sysWait and
// reads all but the network cards; these stay as they were. While the first reading hangs, later
// inventories do not wait for it.
type machine struct {
	all, cardless *ctxlock.Mutex // for readings with and without network cards

	mu sync.Mutex
	// Guarded by mu, as last read:
	rest gpu.Inventory           // all but the GPUs
	gpus map[gpu.UUID]gpu.Device // their places, and what kind of PCI device they are
	// silent is true while network cards cannot be read. That is logged once.
	silent bool
}

func newMachine() *machine {
	return &machine{all: ctxlock.NewMutex(), cardless: ctxlock.NewMutex(), gpus: map[gpu.UUID]gpu.Device{}}
}

// place adds to an inventory what the kernel knows. Facts that the kernel does not have now, as
// about a GPU that fell off the bus, stay as they were. The error wraps gpu.ErrTimeout if ctx
// ends first.
func (s *survey) place(ctx context.Context, inv *gpu.Inventory) error {
	if ctx.Err() != nil { // the caller has left
		return fmt.Errorf("read %s: %w: %w", s.opts.SysRoot, gpu.ErrTimeout, context.Cause(ctx))
	}
	m, sys := s.machine, os.DirFS(s.opts.SysRoot)
	read, silent := m.read(ctx, m.all, sys, inv)
	err := silent
	if silent != nil {
		read, err = m.read(ctx, m.cardless, withoutCards{sys}, inv)
	}
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("read %s: %w: %w", s.opts.SysRoot, gpu.ErrTimeout, context.Cause(ctx))
	}

	m.mu.Lock()
	defer m.mu.Unlock()
	if silent != nil && !m.silent {
		what := "network cards do not answer the kernel"
		if err != nil { // the reading without network cards failed too
			what = "the kernel does not answer in " + s.opts.SysRoot
		}
		s.log.Warn(what+"; the last answer stays in use", "within", sysWait)
	}
	if m.silent = silent != nil; !m.silent {
		m.rest.NICs = read.NICs
	}
	if err == nil {
		m.rest.Machine, m.rest.NUMA, m.rest.Load = read.Machine, read.NUMA, read.Load
	}
	inv.Load, inv.Machine = m.rest.Load, m.rest.Machine
	inv.NUMA, inv.NICs = cloneNUMA(m.rest.NUMA), cloneNICs(m.rest.NICs)
	for i := range inv.GPUs {
		dev := &inv.GPUs[i]
		now, known := m.gpus[dev.UUID]
		if err == nil && (!known || dev.Fault == "" || read.GPUs[i].CPUs != "" || read.GPUs[i].Path != nil) {
			now, known = read.GPUs[i], true
			if dev.UUID != "" {
				m.gpus[dev.UUID] = now
			}
		}
		if known {
			now = clone(now)
			dev.NUMA, dev.CPUs, dev.Path, dev.PCIClass, dev.VGPU = now.NUMA, now.CPUs, now.Path, now.PCIClass, now.VGPU
		}
	}
	return nil
}

// read reads sysfs for the GPUs of an inventory, with the lock at held.
func (m *machine) read(ctx context.Context, at *ctxlock.Mutex, sys fs.FS, inv *gpu.Inventory) (gpu.Inventory, error) {
	// A copy, since the reading may go on after the caller has left.
	asked := gpu.Inventory{GPUs: make([]gpu.Device, len(inv.GPUs))}
	m.mu.Lock()
	for i, dev := range inv.GPUs {
		asked.GPUs[i] = clone(gpu.Device{Index: dev.Index, UUID: dev.UUID, PCI: dev.PCI, NUMA: dev.NUMA})
		if was, ok := m.gpus[dev.UUID]; ok && was.PCI == dev.PCI {
			asked.GPUs[i].PCIClass, asked.GPUs[i].VGPU = was.PCIClass, was.VGPU
		}
	}
	m.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, sysWait)
	defer cancel()
	return ctxlock.Do(ctx, at, "read sysfs", func() (gpu.Inventory, error) {
		topology.Read(sys, &asked)
		asked.Load = loaded(sys)
		for i := range asked.GPUs {
			readPCI(sys, &asked.GPUs[i])
		}
		return asked, nil
	}, nil)
}

// loaded returns a text that differs for each time that the driver's module was loaded, or an
// empty one if the module has no directory in sysfs. The text is the directory's inode number.
// sysfs makes the directory anew each time and numbers inodes one after the other (kernfs, since
// Linux 4.13). Before that a number may come again, and then two times look like one.
func loaded(sys fs.FS) string {
	info, err := fs.Stat(sys, "module/nvidia")
	if err != nil {
		return ""
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return strconv.FormatUint(st.Ino, 10)
	}
	return ""
}

// withoutCards is sysfs without RDMA network cards.
type withoutCards struct{ fs.FS }

func (w withoutCards) Open(name string) (fs.File, error) {
	if name == cards || strings.HasPrefix(name, cards+"/") {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return w.FS.Open(name)
}

func (w withoutCards) ReadLink(name string) (string, error)   { return fs.ReadLink(w.FS, name) }
func (w withoutCards) Lstat(name string) (fs.FileInfo, error) { return fs.Lstat(w.FS, name) }

// cards is the directory of RDMA network cards in sysfs.
const cards = "class/infiniband"

func cloneNUMA(list []gpu.NUMANode) []gpu.NUMANode {
	list = slices.Clone(list)
	for i := range list {
		list[i].Distances = slices.Clone(list[i].Distances)
	}
	return list
}

func cloneNICs(list []gpu.NIC) []gpu.NIC {
	list = slices.Clone(list)
	for i := range list {
		list[i].Path, list[i].NUMA = slices.Clone(list[i].Path), cloned(list[i].NUMA)
	}
	return list
}

// readPCI reads what kind of PCI device a GPU is. It does so once for each GPU, since the kernel
// must ask the card for its configuration.
func readPCI(sys fs.FS, dev *gpu.Device) {
	addr, ok := topology.SysfsAddress(dev.PCI)
	if !ok || dev.PCIClass != "" {
		return
	}
	dir := path.Join("bus/pci/devices", addr)
	class, err := fs.ReadFile(sys, path.Join(dir, "class"))
	if err != nil {
		return
	}
	dev.PCIClass = strings.TrimSpace(string(class))
	if config, err := fs.ReadFile(sys, path.Join(dir, "config")); err == nil {
		dev.VGPU = vgpu(config)
	}
}

// Offsets in a PCI device's configuration space, and the kind of capability whose meaning is the
// vendor's (PCI Local Bus Specification 3.0, section 6 and appendix H).
const (
	configStatus       = 0x06
	statusCapabilities = 1 << 4
	configCapabilities = 0x34
	vendorSpecific     = 0x09
)

// vgpu returns the host driver's version and branch of a virtual GPU, or nil for another GPU. It
// reads them from the configuration space: from record 0 of the vendor's capability "VF", ten
// characters each. A process without privileges sees only the first 64 bytes, and then the result
// is nil.
func vgpu(config []byte) *gpu.VGPU {
	if len(config) < 256 || config[configStatus]&statusCapabilities == 0 {
		return nil
	}
	config = config[:256]
	at := int(config[configCapabilities])
	for range len(config) / 4 { // a bound, since the list may be a circle
		if at == 0 || at+3 > len(config) {
			return nil
		}
		if config[at] != vendorSpecific {
			at = int(config[at+1])
			continue
		}
		capability := config[at:min(at+int(config[at+2]), len(config))]
		if len(capability) < 5 || string(capability[3:5]) != "VF" {
			return nil
		}
		v := new(gpu.VGPU)
		for records := capability[5:]; len(records) >= 2; {
			if records[0] == 0 {
				if len(records) >= 22 {
					v.HostDriver = unix.ByteSliceToString(records[2:12])
					v.HostBranch = unix.ByteSliceToString(records[12:22])
				}
				break
			}
			records = records[min(max(int(records[1]), 2), len(records)):]
		}
		return v
	}
	return nil
}
