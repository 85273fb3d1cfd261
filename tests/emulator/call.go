// SPDX-License-Identifier: Apache-2.0

package emulator

import (
	"fmt"
	"slices"
	"strings"
)

// Init opens the driver; every Init wants a Shutdown. The first one finds the
// GPUs that there are: what comes later is found by the next first one.
func (s *Session) Init() Return { return s.InitFrom("") }

// InitFrom is Init by a library that says of which driver version it is: the
// driver refuses those of another. Empty is a library that does not say.
func (s *Session) InitFrom(library string) Return {
	reachable := s.p.reachable()
	r, late := s.enter("nvmlInit_v2", NoHandle)
	if r != Success {
		return r
	}
	defer s.p.w.mu.Unlock()
	if library != "" && library != s.p.w.driver {
		return LibraryMismatch
	}
	if s.p.refs == 0 && s.p.findLocked(reachable) {
		s.p.w.touchLocked() // what the process has kept is of another list
	}
	if late != Success {
		return late // and nothing is open
	}
	s.p.refs++
	return Success
}

// Shutdown undoes one Init; the last one ends the session's event sets.
func (s *Session) Shutdown() Return {
	_, r := node(s, "nvmlShutdown", func(w *World) (struct{}, Return) {
		if s.p.refs--; s.p.refs == 0 {
			w.dropSetsLocked(s.p)
		}
		return struct{}{}, Success
	})
	return r
}

// DriverVersion is the driver's version, such as 580.159.03.
func (s *Session) DriverVersion() (string, Return) {
	return node(s, "nvmlSystemGetDriverVersion", func(w *World) (string, Return) { return w.driver, Success })
}

// CUDAVersion is the newest CUDA version that the driver serves; 13000 is 13.0.
func (s *Session) CUDAVersion() (int, Return) {
	return node(s, "nvmlSystemGetCudaDriverVersion_v2", func(w *World) (int, Return) { return w.cuda, Success })
}

// DeviceCount counts the GPUs that the process can open, lost ones included.
func (s *Session) DeviceCount() (int, Return) {
	return node(s, "nvmlDeviceGetCount_v2", func(*World) (int, Return) { return len(s.p.gpus), Success })
}

// DeviceByIndex finds a GPU by its place in the driver's order, among those
// that the process can open.
func (s *Session) DeviceByIndex(index int) (Handle, Return) {
	return s.find("nvmlDeviceGetHandleByIndex_v2", InvalidArgument, func(g *gpu) bool { return s.index(g) == index })
}

// DeviceByUUID finds a GPU, or a MIG device, by its UUID.
func (s *Session) DeviceByUUID(uuid string) (Handle, Return) {
	if strings.HasPrefix(uuid, "MIG-") {
		return s.migByUUID(uuid)
	}
	return s.find("nvmlDeviceGetHandleByUUID", NotFound, func(g *gpu) bool { return g.uuid == uuid })
}

// DeviceBySerial finds a GPU by its board's serial number.
func (s *Session) DeviceBySerial(serial string) (Handle, Return) {
	return s.find("nvmlDeviceGetHandleBySerial", NotFound, func(g *gpu) bool { return g.serial() == serial })
}

// DeviceByPCI finds a GPU by its PCI address, in any form that the driver
// reads.
func (s *Session) DeviceByPCI(address string) (Handle, Return) {
	p, ok := parsePCI(address)
	return s.find("nvmlDeviceGetHandleByPciBusId_v2", NotFound, func(g *gpu) bool {
		return ok && g.pci.Domain == p.Domain && g.pci.Bus == p.Bus && g.pci.Device == p.Device
	})
}

func (s *Session) find(call string, missing Return, match func(*gpu) bool) (Handle, Return) {
	return node(s, call, func(*World) (Handle, Return) {
		for _, g := range s.p.gpus {
			switch {
			case !match(g):
			case s.p.dead[g]:
				return NoHandle, GPUIsLost
			default:
				return Handle(g.slot), Success
			}
		}
		return NoHandle, missing
	})
}

// Name is the product's name; a MIG device's ends with its profile's.
func (s *Session) Name(h Handle) (string, Return) {
	return about(s, "nvmlDeviceGetName", h, 0, func(t target) (string, Return) {
		if t.ci != nil {
			return t.g.Name + " MIG " + t.ci.profile.Name, Success
		}
		return t.g.Name, Success
	})
}

// UUID is GPU- and a UUID, or MIG- and one.
func (s *Session) UUID(h Handle) (string, Return) {
	return about(s, "nvmlDeviceGetUUID", h, 0, func(t target) (string, Return) {
		if t.ci != nil {
			return t.ci.uuid, Success
		}
		return t.g.uuid, Success
	})
}

// Serial is the board's serial number.
func (s *Session) Serial(h Handle) (string, Return) {
	return device(s, "nvmlDeviceGetSerial", h, func(g *gpu) (string, Return) { return g.serial(), Success })
}

// serial is thirteen digits that follow from the UUID.
func (g *gpu) serial() string {
	digits := []byte("1650000000000")
	for i, c := range []byte(strings.ReplaceAll(g.uuid, "-", "")[3:]) {
		at := 3 + i%10
		digits[at] = '0' + (digits[at]-'0'+c)%10
	}
	return string(digits)
}

// Index is the GPU's place in the driver's order, or a MIG device's on its GPU.
func (s *Session) Index(h Handle) (int, Return) {
	return about(s, "nvmlDeviceGetIndex", h, 0, func(t target) (int, Return) {
		if t.ci != nil {
			return s.migIndexLocked(t.ci), Success
		}
		return s.index(t.g), Success
	})
}

// index is a GPU's place among those that the process can open.
func (s *Session) index(g *gpu) int { return slices.Index(s.p.gpus, g) }

// Minor is the number in the name of the GPU's device node, /dev/nvidia<minor>.
func (s *Session) Minor(h Handle) (int, Return) {
	return device(s, "nvmlDeviceGetMinorNumber", h, func(g *gpu) (int, Return) { return g.minor, Success })
}

// PCI is the GPU's address and identity on the bus.
func (s *Session) PCI(h Handle) (PCI, Return) {
	return device(s, "nvmlDeviceGetPciInfo_v3", h, func(g *gpu) (PCI, Return) { return g.pci, Success })
}

// ComputeCapability is the GPU's major and minor compute capability.
func (s *Session) ComputeCapability(h Handle) ([2]int, Return) {
	return device(s, "nvmlDeviceGetCudaComputeCapability", h, func(g *gpu) ([2]int, Return) {
		return [2]int{g.major, g.cc}, Success
	})
}

// NUMANode is the NUMA node that the GPU hangs off.
func (s *Session) NUMANode(h Handle) (int, Return) {
	return device(s, "nvmlDeviceGetNumaNodeId", h, func(g *gpu) (int, Return) {
		if g.numa < 0 {
			return 0, NotSupported
		}
		return g.numa, Success
	})
}

// Memory is a GPU's memory in bytes. Total is Reserved, Used and Free together.
type Memory struct {
	Total, Reserved, Used, Free uint64
}

// Memory reads the memory of a GPU or, of a MIG device, its GPU instance. Used is
// what processes have. Of a GPU in MIG mode only who may see all of it is told.
func (s *Session) Memory(h Handle) (Memory, Return) {
	return about(s, "nvmlDeviceGetMemoryInfo_v2", h, 0, func(t target) (Memory, Return) {
		if t.ci == nil && !s.p.seesAllLocked(t.g) {
			return Memory{}, NoPermission
		}
		s.p.w.buryLocked()
		used := s.p.w.usedOnLocked(t)
		var reserved uint64
		if t.ci == nil {
			reserved = t.g.ReservedMiB << 20
		}
		return Memory{t.room() + reserved, reserved, used, t.room() - used}, Success
	})
}

// Processes lists the processes of one kind of a GPU, all of its instances
// together, or of a MIG device, with PIDs as the session sees them; those that it
// cannot see are left out. Of a GPU in MIG mode only who may see all of it is told.
func (s *Session) Processes(h Handle, kind Kind) ([]Process, Return) {
	call := map[Kind]string{
		Compute:  "nvmlDeviceGetComputeRunningProcesses_v3",
		Graphics: "nvmlDeviceGetGraphicsRunningProcesses_v3",
		MPS:      "nvmlDeviceGetMPSComputeRunningProcesses_v3",
	}[kind]
	list, r := about(s, call, h, 0, func(t target) ([]Process, Return) {
		if t.ci == nil && !s.p.seesAllLocked(t.g) {
			return nil, NoPermission
		}
		var list []Process
		for _, p := range s.p.w.processesLocked() {
			if p.GPU == t.g.slot && p.Kind == kind && (t.ci == nil || p.at() == t.place()) {
				list = append(list, p)
			}
		}
		return list, Success
	})
	// Outside the lock: seeing a PID reads /proc.
	var seen []Process
	for _, p := range list {
		if pid, ok := s.p.see(p.PID); ok {
			p.PID = pid
			seen = append(seen, p)
		}
	}
	return seen, r
}

// TimeSlice is the GPU's time slice.
func (s *Session) TimeSlice(h Handle) (TimeSlice, Return) {
	return device(s, "gpuEmulatorGetTimeSlice", h, func(g *gpu) (TimeSlice, Return) { return g.timeSlice, Success })
}

// SetTimeSlice changes the GPU's time slice; only root may.
func (s *Session) SetTimeSlice(h Handle, t TimeSlice) Return {
	_, r := device(s, "gpuEmulatorSetTimeSlice", h, func(g *gpu) (struct{}, Return) {
		switch {
		case !s.p.root:
			return struct{}{}, NoPermission
		case t > TimeSliceLong:
			return struct{}{}, InvalidArgument
		}
		g.timeSlice = t
		return struct{}{}, Success
	})
	return r
}

// fmtNVML is NVML's own version: that of the CUDA release it came with, then
// the driver's.
func fmtNVML(cuda int, driver string) string { return fmt.Sprintf("%d.%s", cuda/1000, driver) }
