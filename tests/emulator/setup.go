// SPDX-License-Identifier: Apache-2.0

package emulator

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Setup is how a GPU is set beside its MIG mode, by whoever had it before.
type Setup struct {
	// Compute says how many processes may compute.
	Compute     ComputeMode `json:"compute"`
	Persistence bool        `json:"persistence"`
	Accounting  bool        `json:"accounting"`
	// ECCPending is whether ECC is on after the next reset.
	ECCPending bool `json:"eccPending"`
	// PowerMilliwatts and ClockMHz are the limits that are in force, of PowerDefault
	// and ClockDefault.
	PowerMilliwatts uint32 `json:"powerMilliwatts"`
	ClockMHz        uint32 `json:"clockMHz"`
	// ClockHeld says that a clock that was locked, to HeldMHz, slows the GPU down now.
	ClockHeld bool `json:"clockHeld"`
	// Fabric is the GPU's state in the fabric of Spec.Fabric where it differs from that
	// which the Spec names; empty is no difference.
	Fabric string `json:"fabric,omitempty"`
}

// What the emulated cards have of power and clock, an H100's. Other models have the same: no
// test needs theirs.
const (
	PowerDefault = 700_000 // milliwatts
	PowerLeast   = 200_000
	ClockDefault = 1980 // MHz
	HeldMHz      = 600
)

// ComputeMode is a nvmlComputeMode_t.
type ComputeMode uint32

// The compute modes.
const (
	ComputeDefault ComputeMode = iota
	ComputeExclusiveThread
	ComputeProhibited
	ComputeExclusiveProcess
)

var computeNames = []string{"default", "exclusive-thread", "prohibited", "exclusive-process"}

// String names the mode.
func (m ComputeMode) String() string {
	if int(m) < len(computeNames) {
		return computeNames[m]
	}
	return strconv.Itoa(int(m))
}

// MarshalText names the mode.
func (m ComputeMode) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// UnmarshalText reads a name back.
func (m *ComputeMode) UnmarshalText(text []byte) error {
	i := slices.Index(computeNames, string(text))
	if i < 0 {
		return fmt.Errorf("compute mode %q: want %s", text, strings.Join(computeNames, ", "))
	}
	*m = ComputeMode(i)
	return nil
}

// freshSetup is how a card is after its driver was loaded.
func freshSetup(ecc, persistence bool) Setup {
	return Setup{Persistence: persistence, ECCPending: ecc, PowerMilliwatts: PowerDefault, ClockMHz: ClockDefault}
}

// SetSetup makes a GPU's setup whatever a test needs. It refuses what the card could not
// have: a power limit that its constraints exclude, a clock beyond its own, a compute mode
// other than default in MIG mode, and a fabric state where there is no fabric.
func (w *World) SetSetup(index int, s Setup) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	g, err := w.gpuLocked(index)
	if err != nil {
		return err
	}
	_, state := fabricStates[s.Fabric]
	switch {
	case int(s.Compute) >= len(computeNames) || s.Compute == ComputeExclusiveThread:
		return fmt.Errorf("GPU %d: compute mode %s: %w by drivers of today", index, s.Compute, InvalidArgument)
	case g.mig.on && s.Compute != ComputeDefault:
		return fmt.Errorf("GPU %d: compute mode %s: %w in MIG mode", index, s.Compute, NotSupported)
	case s.PowerMilliwatts < PowerLeast || s.PowerMilliwatts > PowerDefault:
		return fmt.Errorf("GPU %d: power limit %d: %w: want %d to %d mW", index, s.PowerMilliwatts, InvalidArgument, PowerLeast, PowerDefault)
	case s.ClockMHz == 0 || s.ClockMHz > ClockDefault:
		return fmt.Errorf("GPU %d: clock %d: %w: want up to %d MHz", index, s.ClockMHz, InvalidArgument, ClockDefault)
	case s.Fabric != "" && (w.board.fabric == nil || !state):
		return fmt.Errorf("GPU %d: fabric %q: %w", index, s.Fabric, NotSupported)
	}
	g.setup = s
	w.touchLocked()
	return nil
}

// admitsLocked says whether a GPU's compute mode lets one more process compute on it: any
// in the default mode, the first in the exclusive ones, none where it is prohibited.
// Those that compute already go on.
func (w *World) admitsLocked(g *gpu, p *process) bool {
	if g.setup.Compute == ComputeDefault {
		return true
	}
	for at, bytes := range p.charged {
		if at.gpu == g.slot && bytes > 0 {
			return true
		}
	}
	if s := w.serverOfLocked(g); s != nil && g.setup.Compute == ComputeExclusiveProcess {
		return p.mps == s
	}
	if g.setup.Compute == ComputeProhibited {
		return false
	}
	return !slices.ContainsFunc(w.processesLocked(), func(q Process) bool { return q.GPU == g.slot && q.PID != p.pid })
}

// ComputeMode reads how many processes may compute on a GPU; in MIG mode that is a matter of
// each MIG device.
func (s *Session) ComputeMode(h Handle) (ComputeMode, Return) {
	return device(s, "nvmlDeviceGetComputeMode", h, func(g *gpu) (ComputeMode, Return) {
		if g.mig.on {
			return 0, NotSupported
		}
		return g.setup.Compute, Success
	})
}

// SetComputeMode changes that; only root may. Processes that compute go on.
func (s *Session) SetComputeMode(h Handle, m ComputeMode) Return {
	_, r := device(s, "nvmlDeviceSetComputeMode", h, func(g *gpu) (struct{}, Return) {
		switch {
		case int(m) >= len(computeNames) || m == ComputeExclusiveThread:
			return struct{}{}, InvalidArgument
		case g.mig.on:
			return struct{}{}, NotSupported
		case !s.p.root:
			return struct{}{}, NoPermission
		}
		g.setup.Compute = m
		s.p.w.touchLocked()
		return struct{}{}, Success
	})
	return r
}

// smClock is NVML_CLOCK_SM, and NVML_CLOCK_GRAPHICS before it the same clock. Others cannot be
// set by applications here.
const (
	smClock    = 1
	clockTypes = 4
)

// Bits of nvmlDeviceGetCurrentClocksEventReasons.
const (
	reasonIdle        = 1 << 0
	reasonClockWasSet = 1 << 1
)

// setupInt answers a call with a number of a GPU's setup.
func setupInt(read func(*gpu) uint32) call {
	return call{static: true, serve: func(s *Session, f *frame) Return {
		v, r := device(s, f.name, f.handle, func(g *gpu) (uint32, Return) { return read(g), Success })
		return put(v, r, func(v uint32) { f.putU32(v) })
	}}
}

// cores is the number of CUDA cores: those of all multiprocessors.
func (g *gpu) cores() uint32 {
	each := uint32(128)
	if g.major < 8 || g.major == 8 && g.cc == 0 {
		each = 64
	}
	return each * target{g: g}.multiprocessors()
}

// clock answers a call that takes a nvmlClockType_t.
func clock(read func(*gpu) uint32) call {
	return call{static: true, serve: func(s *Session, f *frame) Return {
		kind := f.u32()
		v, r := device(s, f.name, f.handle, func(g *gpu) (uint32, Return) {
			switch {
			case kind >= clockTypes:
				return 0, InvalidArgument
			case kind > smClock:
				return 0, NotSupported
			}
			return read(g), Success
		})
		return put(v, r, func(v uint32) { f.putU32(v) })
	}}
}

var clockReasons = call{serve: func(s *Session, f *frame) Return {
	v, r := device(s, f.name, f.handle, func(g *gpu) (uint64, Return) {
		if g.setup.ClockHeld {
			return reasonClockWasSet, Success
		}
		return reasonIdle, Success
	})
	return put(v, r, func(v uint64) { f.putU64(v) })
}}

var setupCalls = map[string]call{
	"nvmlDeviceGetComputeMode": {static: true, serve: func(s *Session, f *frame) Return {
		m, r := s.ComputeMode(f.handle)
		return put(uint32(m), r, func(v uint32) { f.putU32(v) })
	}},
	"nvmlDeviceSetComputeMode": {serve: func(s *Session, f *frame) Return {
		m := ComputeMode(f.u32())
		if f.bad {
			return InvalidArgument
		}
		return s.SetComputeMode(f.handle, m)
	}},
	"nvmlDeviceGetPersistenceMode":             setupInt(func(g *gpu) uint32 { return bit(g.setup.Persistence) }),
	"nvmlDeviceGetAccountingMode":              setupInt(func(g *gpu) uint32 { return bit(g.setup.Accounting) }),
	"nvmlDeviceGetNumGpuCores":                 setupInt((*gpu).cores),
	"nvmlDeviceGetPowerManagementLimit":        setupInt(func(g *gpu) uint32 { return g.setup.PowerMilliwatts }),
	"nvmlDeviceGetPowerManagementDefaultLimit": setupInt(func(*gpu) uint32 { return PowerDefault }),
	"nvmlDeviceGetApplicationsClock":           clock(func(g *gpu) uint32 { return g.setup.ClockMHz }),
	"nvmlDeviceGetDefaultApplicationsClock":    clock(func(*gpu) uint32 { return ClockDefault }),
	"nvmlDeviceGetClockInfo": clock(func(g *gpu) uint32 {
		if g.setup.ClockHeld {
			return HeldMHz
		}
		return g.setup.ClockMHz
	}),
	"nvmlDeviceGetCurrentClocksThrottleReasons": clockReasons,
	"nvmlDeviceGetCurrentClocksEventReasons":    clockReasons,
}
