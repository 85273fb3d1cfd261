// SPDX-License-Identifier: Apache-2.0

package emulator

import (
	"bytes"
	"encoding/binary"
	"maps"
	"strings"
	"time"
)

// A request on the wire, little-endian:
//
//	u32 handle · u8 length of the name · name · arguments
//
// and its reply:
//
//	i32 return · u16 flags · u16 slot of the call's counter · u64 generation · results
//
// A string is a u16 length and its bytes. The results stand only after Success,
// and the count of a list that did not fit after InsufficientSize.
const (
	// replyStatic says that the same request has the same answer until the
	// page's generation is another one: a program may keep the answer, and
	// counts its use in the page.
	replyStatic = 1

	requestHead = 5
	replyHead   = 16
)

type frame struct {
	name   string
	handle Handle
	in     []byte
	bad    bool // the arguments were cut short
	out    []byte
}

func (f *frame) u32() uint32 {
	if len(f.in) < 4 {
		f.bad = true
		return 0
	}
	v := binary.LittleEndian.Uint32(f.in)
	f.in = f.in[4:]
	return v
}

func (f *frame) u64() uint64 { lo := uint64(f.u32()); return lo | uint64(f.u32())<<32 }

func (f *frame) str() string {
	if len(f.in) < 2 {
		f.bad = true
		return ""
	}
	n := int(binary.LittleEndian.Uint16(f.in))
	if len(f.in) < 2+n {
		f.bad = true
		return ""
	}
	v := string(f.in[2 : 2+n])
	f.in = f.in[2+n:]
	return v
}

func (f *frame) putU32(v ...uint32) {
	for _, n := range v {
		f.out = binary.LittleEndian.AppendUint32(f.out, n)
	}
}

func (f *frame) putU64(v ...uint64) {
	for _, n := range v {
		f.out = binary.LittleEndian.AppendUint64(f.out, n)
	}
}

func (f *frame) putStr(v string) {
	f.out = binary.LittleEndian.AppendUint16(f.out, uint16(len(v)))
	f.out = append(f.out, v...)
}

// Serve answers one request of a program that has loaded the driver's library,
// and appends the reply to buf.
func (s *Session) Serve(request, buf []byte) []byte {
	start := len(buf)
	f := &frame{handle: NoHandle, out: append(buf, make([]byte, replyHead)...)}
	r := InvalidArgument
	var c call
	if name, args, ok := cutName(request); ok {
		f.name, f.handle, f.in = name, Handle(binary.LittleEndian.Uint32(request)), args
		if c, ok = calls[name]; !ok {
			c = call{serve: unsupported}
			if strings.HasPrefix(name, "cu") {
				c = call{serve: charge}
			}
		}
		r = c.serve(s.As(name), f)
		if f.bad {
			r = InvalidArgument
		}
	}
	if r != Success && r != InsufficientSize {
		f.out = f.out[:start+replyHead]
	}

	w := s.p.w
	w.mu.Lock()
	slot := w.slotLocked(f.name)
	static := c.static && r == Success && len(w.faults) == 0
	generation := w.generation
	w.mu.Unlock()
	var flags uint16
	if static && slot < PageWords-1 {
		flags |= replyStatic
	}
	head := f.out[start:]
	binary.LittleEndian.PutUint32(head, uint32(r))
	binary.LittleEndian.PutUint16(head[4:], flags)
	binary.LittleEndian.PutUint16(head[6:], uint16(slot))
	binary.LittleEndian.PutUint64(head[8:], generation)
	return f.out
}

func cutName(request []byte) (name string, args []byte, ok bool) {
	if len(request) < requestHead {
		return "", nil, false
	}
	n := int(request[4])
	if n == 0 || len(request) < requestHead+n {
		return "", nil, false
	}
	name = string(request[requestHead : requestHead+n])
	if bytes.IndexByte(request[requestHead:requestHead+n], 0) >= 0 {
		return "", nil, false
	}
	return name, request[requestHead+n:], true
}

// call is how an exported name is answered. static answers hold until the
// world's generation changes.
type call struct {
	static bool
	serve  func(s *Session, f *frame) Return
}

// unsupported answers the calls that the world has nothing for, with the
// checks that the driver makes first.
func unsupported(s *Session, f *frame) Return {
	r, _ := s.enter(f.name, f.handle)
	if r != Success {
		return r
	}
	defer s.p.w.mu.Unlock()
	if s.p.refs == 0 {
		return Uninitialized
	}
	return NotSupported
}

// put writes a result after Success.
func put[T any](v T, r Return, write func(T)) Return {
	if r == Success {
		write(v)
	}
	return r
}

func (f *frame) putInt(v int) { f.putU32(uint32(v)) }

func nodeInt(read func(*Session) (int, Return)) call {
	return call{static: true, serve: func(s *Session, f *frame) Return {
		v, r := read(s)
		return put(v, r, f.putInt)
	}}
}

func deviceInt(read func(*Session, Handle) (int, Return)) call {
	return call{static: true, serve: func(s *Session, f *frame) Return {
		v, r := read(s, f.handle)
		return put(v, r, f.putInt)
	}}
}

func deviceStr(read func(*Session, Handle) (string, Return)) call {
	return call{static: true, serve: func(s *Session, f *frame) Return {
		v, r := read(s, f.handle)
		return put(v, r, f.putStr)
	}}
}

func findBy(find func(*Session, *frame) (Handle, Return)) call {
	return call{static: true, serve: func(s *Session, f *frame) Return {
		h, r := find(s, f)
		return put(uint32(h), r, func(v uint32) { f.putU32(v) })
	}}
}

// constant answers a call about a GPU with the same numbers for all of them.
func constant(values ...uint32) call {
	return call{static: true, serve: func(s *Session, f *frame) Return {
		_, r := device(s, f.name, f.handle, func(*gpu) (struct{}, Return) { return struct{}{}, Success })
		return put(values, r, func(v []uint32) { f.putU32(v...) })
	}}
}

func modelInt(read func(*gpu) uint32) call {
	return call{static: true, serve: func(s *Session, f *frame) Return {
		v, r := device(s, f.name, f.handle, func(g *gpu) (uint32, Return) { return read(g), Success })
		return put(v, r, func(v uint32) { f.putU32(v) })
	}}
}

func processes(kind Kind) call {
	return call{serve: func(s *Session, f *frame) Return {
		room := int(f.u32())
		list, r := s.Processes(f.handle, kind)
		if r != Success {
			return r
		}
		f.putInt(len(list))
		if len(list) > room {
			return InsufficientSize
		}
		for _, p := range list {
			used := p.Bytes
			if p.Unknown {
				used = ^uint64(0)
			}
			f.putU32(uint32(p.PID))
			f.putU64(used)
			f.putU32(uint32(int32(p.GI)), uint32(int32(p.CI))) // -1 is NotMIG
		}
		return Success
	}}
}

// set takes a scope, of the machine's node (0) or socket.
func set(read func(s *Session, h Handle, socket bool) ([]uint64, Return)) call {
	return call{static: true, serve: func(s *Session, f *frame) Return {
		words, r := read(s, f.handle, f.u32() != 0)
		return put(words, r, func(words []uint64) {
			f.putInt(len(words))
			f.putU64(words...)
		})
	}}
}

var fabric = call{static: true, serve: func(s *Session, f *frame) Return {
	v, r := s.Fabric(f.handle)
	return put(v, r, func(v Fabric) {
		f.putU32(v.State, v.Clique)
		f.putStr(v.Cluster)
	})
}}

func putPCI(f *frame, p PCI) {
	f.putU32(p.Domain, p.Bus, p.Device, p.DeviceID, p.SubsystemID)
	f.putStr(p.String())
}

func nvlink(write func(f *frame, g *gpu, l Link) Return) call {
	return call{static: true, serve: func(s *Session, f *frame) Return {
		n := int(int32(f.u32()))
		l, r := s.NVLink(f.handle, n)
		if r != Success {
			return r
		}
		return write(f, s.p.w.gpus[f.handle], l)
	}}
}

var remotePCI = nvlink(func(f *frame, _ *gpu, l Link) Return {
	if !l.Active {
		return NotSupported
	}
	putPCI(f, l.Remote)
	return Success
})

var pciInfo = call{static: true, serve: func(s *Session, f *frame) Return {
	p, r := s.PCI(f.handle)
	return put(p, r, func(p PCI) { putPCI(f, p) })
}}

var memoryInfo = call{serve: func(s *Session, f *frame) Return {
	m, r := s.Memory(f.handle)
	return put(m, r, func(m Memory) { f.putU64(m.Total, m.Reserved, m.Free, m.Used) })
}}

// initialise takes the library's version, or nothing.
var initialise = call{serve: func(s *Session, f *frame) Return {
	var library string
	if len(f.in) > 0 {
		library = f.str()
	}
	if f.bad {
		return InvalidArgument
	}
	return s.InitFrom(library)
}}

var eventWait = call{serve: func(s *Session, f *frame) Return {
	set, ms := f.u32(), f.u32()
	e, r := s.EventSetWait(set, time.Duration(ms)*time.Millisecond)
	return put(e, r, func(e Event) {
		f.putU32(uint32(e.GPU))
		f.putU64(uint64(e.Type), e.Data)
		f.putU32(e.GPUInstance, e.ComputeInstance)
	})
}}

// calls is the table of what the world answers, by exported name; whatever is
// not in it is unsupported.
var calls = map[string]call{
	"nvmlInit":     initialise,
	"nvmlInit_v2":  initialise,
	"nvmlShutdown": {serve: func(s *Session, _ *frame) Return { return s.Shutdown() }},
	// Its flags (no GPUs is fine; do not attach) make no difference here.
	"nvmlInitWithFlags": initialise,

	"nvmlSystemGetDriverVersion": {static: true, serve: func(s *Session, f *frame) Return {
		v, r := s.DriverVersion()
		return put(v, r, f.putStr)
	}},
	"nvmlSystemGetNVMLVersion": {static: true, serve: func(s *Session, f *frame) Return {
		v, r := node(s, f.name, func(w *World) (string, Return) {
			return fmtNVML(w.cuda, w.driver), Success
		})
		return put(v, r, f.putStr)
	}},
	"nvmlSystemGetCudaDriverVersion":    nodeInt((*Session).CUDAVersion),
	"nvmlSystemGetCudaDriverVersion_v2": nodeInt((*Session).CUDAVersion),
	"nvmlUnitGetCount":                  none,
	"nvmlGetExcludedDeviceCount":        none,

	"nvmlDeviceGetCount":               nodeInt((*Session).DeviceCount),
	"nvmlDeviceGetCount_v2":            nodeInt((*Session).DeviceCount),
	"nvmlDeviceGetHandleByIndex":       byIndex,
	"nvmlDeviceGetHandleByIndex_v2":    byIndex,
	"nvmlDeviceGetHandleByUUID":        findBy(func(s *Session, f *frame) (Handle, Return) { return s.DeviceByUUID(f.str()) }),
	"nvmlDeviceGetHandleByUUIDV":       findBy(func(s *Session, f *frame) (Handle, Return) { return s.DeviceByUUID(f.str()) }),
	"nvmlDeviceGetHandleBySerial":      findBy(func(s *Session, f *frame) (Handle, Return) { return s.DeviceBySerial(f.str()) }),
	"nvmlDeviceGetHandleByPciBusId":    byPCI,
	"nvmlDeviceGetHandleByPciBusId_v2": byPCI,

	"nvmlDeviceGetName":                   deviceStr((*Session).Name),
	"nvmlDeviceGetUUID":                   deviceStr((*Session).UUID),
	"nvmlDeviceGetSerial":                 deviceStr((*Session).Serial),
	"nvmlDeviceGetIndex":                  deviceInt((*Session).Index),
	"nvmlDeviceGetMinorNumber":            deviceInt((*Session).Minor),
	"nvmlDeviceGetNumaNodeId":             deviceInt((*Session).NUMANode),
	"nvmlDeviceGetCpuAffinity":            set((*Session).CPUAffinity),
	"nvmlDeviceGetCpuAffinityWithinScope": set((*Session).CPUAffinity),
	"nvmlDeviceGetMemoryAffinity":         set((*Session).MemoryAffinity),
	"nvmlDeviceGetModuleId":               modelInt(func(g *gpu) uint32 { return uint32(g.slot + 1) }),
	"nvmlDeviceGetBoardId":                modelInt(func(g *gpu) uint32 { return g.pci.Bus << 8 }),
	"nvmlDeviceGetBrand":                  modelInt(func(g *gpu) uint32 { return g.Brand }),
	"nvmlDeviceGetArchitecture":           modelInt(func(g *gpu) uint32 { return g.Architecture }),
	"nvmlDeviceGetCudaComputeCapability": {static: true, serve: func(s *Session, f *frame) Return {
		v, r := s.ComputeCapability(f.handle)
		return put(v, r, func(v [2]int) { f.putU32(uint32(v[0]), uint32(v[1])) })
	}},
	"nvmlDeviceGetPciInfo":    pciInfo,
	"nvmlDeviceGetPciInfo_v2": pciInfo,
	"nvmlDeviceGetPciInfo_v3": pciInfo,
	"nvmlDeviceGetPciInfoExt": pciInfo,

	"nvmlDeviceGetMemoryInfo":    memoryInfo,
	"nvmlDeviceGetMemoryInfo_v2": memoryInfo,
	"nvmlDeviceGetBAR1MemoryInfo": {serve: func(s *Session, f *frame) Return {
		v, r := device(s, f.name, f.handle, func(g *gpu) (uint64, Return) {
			// The BAR covers the memory, rounded up to a power of two.
			size := uint64(1)
			for size < g.MemoryMiB {
				size *= 2
			}
			return size << 20, Success
		})
		return put(v, r, func(v uint64) { f.putU64(v, v-1<<20, 1<<20) })
	}},

	"nvmlDeviceGetProcessUtilization": {serve: func(s *Session, f *frame) Return {
		since, room := f.u64(), int(f.u32())
		list, r := s.Utilization(f.handle, since)
		if r != Success {
			return r
		}
		f.putInt(len(list))
		if len(list) > room {
			return InsufficientSize
		}
		for _, u := range list {
			f.putInt(u.PID)
			f.putU64(u.Micros)
			f.putInt(u.SM)
		}
		return Success
	}},

	"nvmlDeviceGetComputeRunningProcesses":       processes(Compute),
	"nvmlDeviceGetComputeRunningProcesses_v2":    processes(Compute),
	"nvmlDeviceGetComputeRunningProcesses_v3":    processes(Compute),
	"nvmlDeviceGetGraphicsRunningProcesses":      processes(Graphics),
	"nvmlDeviceGetGraphicsRunningProcesses_v2":   processes(Graphics),
	"nvmlDeviceGetGraphicsRunningProcesses_v3":   processes(Graphics),
	"nvmlDeviceGetMPSComputeRunningProcesses":    processes(MPS),
	"nvmlDeviceGetMPSComputeRunningProcesses_v2": processes(MPS),
	"nvmlDeviceGetMPSComputeRunningProcesses_v3": processes(MPS),

	// A card of the data centre: no display.
	"nvmlDeviceGetDisplayMode":        constant(0),
	"nvmlDeviceGetDisplayActive":      constant(0),
	"nvmlDeviceGetDefaultEccMode":     constant(1),
	"nvmlDeviceGetMultiGpuBoard":      constant(0),
	"nvmlDeviceGetVirtualizationMode": constant(0),

	"nvmlDeviceGetEccMode": {static: true, serve: func(s *Session, f *frame) Return {
		on, pending, r := s.ECCMode(f.handle)
		return put(bit(on), r, func(v uint32) { f.putU32(v, bit(pending)) })
	}},
	"nvmlDeviceGetTotalEccErrors": {serve: func(s *Session, f *frame) Return {
		n, r := s.ECCErrors(f.handle, ErrorType(f.u32()), Counter(f.u32()))
		return put(n, r, func(v uint64) { f.putU64(v) })
	}},
	"nvmlDeviceGetMemoryErrorCounter": {serve: func(s *Session, f *frame) Return {
		n, r := s.MemoryErrors(f.handle, ErrorType(f.u32()), Counter(f.u32()), Location(f.u32()))
		return put(n, r, func(v uint64) { f.putU64(v) })
	}},
	"nvmlDeviceGetRemappedRows": {serve: func(s *Session, f *frame) Return {
		h, r := s.RemappedRows(f.handle)
		return put(h, r, func(h Health) {
			f.putU32(h.RemappedCorrectable, h.RemappedUncorrectable, bit(h.RemapPending), bit(h.RemapFailed))
		})
	}},
	"nvmlDeviceGetRetiredPagesPendingStatus": {serve: func(s *Session, f *frame) Return {
		is, r := s.RetirePending(f.handle)
		return put(bit(is), r, func(v uint32) { f.putU32(v) })
	}},
	"nvmlDeviceGetRetiredPages": {serve: func(s *Session, f *frame) Return {
		cause, room := f.u32(), int(f.u32())
		pages, r := s.RetiredPages(f.handle, cause)
		if r != Success {
			return r
		}
		f.putInt(len(pages))
		if len(pages) > room {
			return InsufficientSize
		}
		f.putU64(pages...)
		return Success
	}},
	"nvmlDeviceGetFieldValues": {serve: func(s *Session, f *frame) Return {
		var ids []FieldID
		for len(f.in) > 0 && !f.bad {
			ids = append(ids, FieldID{f.u32(), f.u32()})
		}
		list, r := s.Fields(f.handle, ids)
		return put(list, r, func(list []Field) {
			for _, v := range list {
				f.putU32(uint32(v.Return), v.Type)
				f.putU64(v.Value)
			}
		})
	}},

	"nvmlDeviceGetTopologyCommonAncestor": {static: true, serve: func(s *Session, f *frame) Return {
		l, r := s.CommonAncestor(f.handle, Handle(f.u32()))
		return put(uint32(l), r, func(v uint32) { f.putU32(v) })
	}},
	"nvmlDeviceGetTopologyNearestGpus": {static: true, serve: func(s *Session, f *frame) Return {
		list, r := s.NearestGPUs(f.handle, Level(f.u32()))
		return put(list, r, func(list []Handle) {
			f.putInt(len(list))
			for _, h := range list {
				f.putU32(uint32(h))
			}
		})
	}},
	"nvmlDeviceOnSameBoard": {static: true, serve: func(s *Session, f *frame) Return {
		l, r := s.CommonAncestor(f.handle, Handle(f.u32()))
		return put(bit(l == LevelSame), r, func(v uint32) { f.putU32(v) })
	}},
	"nvmlDeviceGetP2PStatus": {static: true, serve: func(s *Session, f *frame) Return {
		other, index := f.u32(), f.u32()
		v, r := s.P2PStatus(f.handle, Handle(other), index)
		return put(v, r, func(v uint32) { f.putU32(v) })
	}},
	"nvmlDeviceGetGpuFabricInfo":  fabric,
	"nvmlDeviceGetGpuFabricInfoV": fabric,
	"nvmlDeviceGetNvLinkState": nvlink(func(f *frame, _ *gpu, l Link) Return {
		f.putU32(bit(l.Active))
		return Success
	}),
	"nvmlDeviceGetNvLinkVersion": nvlink(func(f *frame, g *gpu, _ Link) Return {
		f.putU32(nvlinkVersions[g.NVLinkVersion])
		return Success
	}),
	"nvmlDeviceGetNvLinkRemoteDeviceType": nvlink(func(f *frame, _ *gpu, l Link) Return {
		if !l.Active {
			return NotSupported
		}
		f.putU32(2 * bit(l.Switch))
		return Success
	}),
	// All that a link can be asked for, a link that is up can do.
	"nvmlDeviceGetNvLinkCapability": nvlink(func(f *frame, _ *gpu, l Link) Return {
		f.putU32(bit(l.Active))
		return Success
	}),
	"nvmlDeviceGetNvLinkRemotePciInfo":    remotePCI,
	"nvmlDeviceGetNvLinkRemotePciInfo_v2": remotePCI,

	"nvmlEventSetCreate": {serve: func(s *Session, f *frame) Return {
		set, r := s.EventSetCreate()
		return put(set, r, func(v uint32) { f.putU32(v) })
	}},
	"nvmlEventSetFree": {serve: func(s *Session, f *frame) Return { return s.EventSetFree(f.u32()) }},
	"nvmlDeviceGetSupportedEventTypes": {static: true, serve: func(s *Session, f *frame) Return {
		t, r := s.SupportedEvents(f.handle)
		return put(uint64(t), r, func(v uint64) { f.putU64(v) })
	}},
	"nvmlDeviceRegisterEvents": {serve: func(s *Session, f *frame) Return {
		set, types := f.u32(), f.u64()
		return s.RegisterEvents(f.handle, EventType(types), set)
	}},
	"nvmlEventSetWait":    eventWait,
	"nvmlEventSetWait_v2": eventWait,

	"gpuEmulatorGetMatrix": {static: true, serve: func(s *Session, f *frame) Return {
		v, r := s.Matrix()
		return put(v, r, f.putStr)
	}},
	"gpuEmulatorGetTimeSlice": {serve: func(s *Session, f *frame) Return {
		t, r := s.TimeSlice(f.handle)
		return put(uint32(t), r, func(v uint32) { f.putU32(v) })
	}},
	"gpuEmulatorSetTimeSlice": {serve: func(s *Session, f *frame) Return {
		return s.SetTimeSlice(f.handle, TimeSlice(f.u32()))
	}},
}

var (
	byIndex = findBy(func(s *Session, f *frame) (Handle, Return) { return s.DeviceByIndex(int(f.u32())) })
	byPCI   = findBy(func(s *Session, f *frame) (Handle, Return) { return s.DeviceByPCI(f.str()) })
	none    = nodeInt(func(s *Session) (int, Return) {
		return node(s, "", func(*World) (int, Return) { return 0, Success })
	})
)

func init() {
	maps.Copy(calls, cudaCalls)
	maps.Copy(calls, mpsCalls)
	maps.Copy(calls, checkpointCalls)
	maps.Copy(calls, limitCalls)
	maps.Copy(calls, migCalls)
	maps.Copy(calls, setupCalls)
}

func bit(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}
