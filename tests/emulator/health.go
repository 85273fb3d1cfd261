// SPDX-License-Identifier: Apache-2.0

package emulator

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Health is what a driver keeps of a GPU's faults.
type Health struct {
	// ECC errors of the GPU's memory; all of them are in DRAM.
	Corrected   Errors `json:"corrected"`
	Uncorrected Errors `json:"uncorrected"`
	// Remapped rows of memory, by cause; Ampere and later. RemapPending says
	// that a row waits for the next reset, RemapFailed that there once was no
	// spare one left, which nothing undoes.
	RemappedCorrectable   uint32 `json:"remappedCorrectable"`
	RemappedUncorrectable uint32 `json:"remappedUncorrectable"`
	RemapPending          bool   `json:"remapPending"`
	RemapFailed           bool   `json:"remapFailed"`
	// Retired pages of memory, by cause; before Ampere. RetirePending says
	// that a page waits for the next reset or load of the driver.
	RetiredSingle uint32 `json:"retiredSingle"`
	RetiredDouble uint32 `json:"retiredDouble"`
	RetirePending bool   `json:"retirePending"`
	// Recovery is what the driver says must be done to the GPU.
	Recovery Recovery `json:"recovery"`
}

// Errors is a counter of ECC errors: those since the driver was loaded or the
// GPU reset, and those of its life.
type Errors struct {
	Volatile  uint64 `json:"volatile"`
	Aggregate uint64 `json:"aggregate"`
}

func (e *Errors) add(n uint64) { e.Volatile, e.Aggregate = e.Volatile+n, e.Aggregate+n }

// Recovery is a nvmlDeviceGpuRecoveryAction_t.
type Recovery uint32

// What the driver may ask for.
const (
	RecoveryNone Recovery = iota
	RecoveryReset
	RecoveryReboot
	RecoveryDrain
	RecoveryDrainReset
)

var recoveryNames = []string{"none", "reset", "reboot", "drain", "drain-reset"}

// String names the action.
func (r Recovery) String() string {
	if int(r) < len(recoveryNames) {
		return recoveryNames[r]
	}
	return strconv.Itoa(int(r))
}

// MarshalText names the action.
func (r Recovery) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText reads a name back.
func (r *Recovery) UnmarshalText(text []byte) error {
	i := slices.Index(recoveryNames, string(text))
	if i < 0 {
		return fmt.Errorf("recovery %q: want %s", text, strings.Join(recoveryNames, ", "))
	}
	*r = Recovery(i)
	return nil
}

// Architectures, as NVML_DEVICE_ARCH_*.
const (
	turing = 6
	ampere = 7
)

// remaps says whether the GPU replaces broken rows of memory by spare ones;
// GPUs before Ampere retire pages instead.
func (g *gpu) remaps() bool { return g.Architecture >= ampere }

// mostRetired is how many pages a card can retire.
const mostRetired = 64

// coupleLocked does to a GPU what the fault behind an Xid does to it. Figures
// follow NVIDIA's description of its Xids and of memory error management.
func (w *World) coupleLocked(g *gpu, xid uint64) {
	h := &g.health
	uncorrected := func() {
		if g.ecc {
			h.Uncorrected.add(1)
			w.raiseLocked(place{g.slot, -1, -1}, EventDoubleBitECC, 0)
		}
	}
	switch xid {
	case 48, 94: // double bit error; contained error
		uncorrected()
	case 95: // uncontained error: the GPU takes no new work
		uncorrected()
		h.Recovery = RecoveryReset
	case 63: // a row or page is recorded as broken
		if g.remaps() {
			h.RemappedUncorrectable++
			h.RemapPending = true
		} else if h.RetiredSingle+h.RetiredDouble < mostRetired {
			h.RetiredDouble++
			h.RetirePending = true
		}
	case 64: // it could not be recorded
		h.RemapFailed = h.RemapFailed || g.remaps()
	case XidGPULost:
		w.loseLocked(g)
	}
}

// freshLocked is what a reset (kept) or a load of the driver does to a GPU: counts
// begin anew, what waited for it is done, and no instance stands. Cards whose
// MIG mode needs a reset keep it for good; others have it until the driver is
// loaded anew.
func (w *World) freshLocked(g *gpu, kept bool) {
	w.clearMIGLocked(g)
	if g.MIG != nil {
		w.setModeLocked(g, g.mig.pending && (kept || g.MIG.ModeNeedsReset))
	}
	h := &g.health
	h.Corrected.Volatile, h.Uncorrected.Volatile = 0, 0
	h.RemapPending, h.RetirePending = false, false
	if h.Recovery != RecoveryReboot {
		h.Recovery = RecoveryNone
	}
	g.timeSlice = TimeSliceDefault
	g.ecc = g.setup.ECCPending
	g.setup = freshSetup(g.ecc, g.setup.Persistence)
	g.pruneLocked(func(*limit) bool { return true })
	g.dmemMin = nil
}

// SetHealth makes a GPU's health whatever a test needs. It refuses figures that
// the card does not have.
func (w *World) SetHealth(index int, h Health) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	g, err := w.gpuLocked(index)
	if err != nil {
		return err
	}
	remap := h.RemappedCorrectable > 0 || h.RemappedUncorrectable > 0 || h.RemapPending || h.RemapFailed
	retire := h.RetiredSingle > 0 || h.RetiredDouble > 0 || h.RetirePending
	switch {
	case remap && !g.remaps():
		return fmt.Errorf("GPU %d: remapped rows: %w before Ampere", index, NotSupported)
	case retire && g.remaps():
		return fmt.Errorf("GPU %d: retired pages: %w on Ampere and later", index, NotSupported)
	case (h.Corrected != Errors{} || h.Uncorrected != Errors{}) && !g.ecc:
		return fmt.Errorf("GPU %d: ECC errors: %w, ECC is off", index, NotSupported)
	case h.RetiredSingle+h.RetiredDouble > mostRetired:
		return fmt.Errorf("GPU %d: retired pages: %w: a card retires %d at most", index, InvalidArgument, mostRetired)
	case int(h.Recovery) >= len(recoveryNames):
		return fmt.Errorf("GPU %d: recovery %d: %w", index, h.Recovery, InvalidArgument)
	}
	g.health = h
	w.touchLocked()
	return nil
}

// ErrorType and Counter are nvmlMemoryErrorType_t and nvmlEccCounterType_t.
type (
	ErrorType uint32
	Counter   uint32
)

// What counters of ECC errors count, and since when.
const (
	ErrorCorrected   ErrorType = 0
	ErrorUncorrected ErrorType = 1

	CounterVolatile  Counter = 0
	CounterAggregate Counter = 1
)

// Location is a nvmlMemoryLocation_t.
type Location uint32

// Where ECC errors are counted.
const (
	LocationL1 Location = iota
	LocationL2
	LocationDRAM
	LocationRegisters
	LocationTexture
	LocationTextureShared
	LocationCBU
	LocationSRAM
	locations
)

// ECCMode says whether ECC is on, and whether it is after the next reset. It can be turned
// by no call.
func (s *Session) ECCMode(h Handle) (on, pending bool, r Return) {
	m, r := device(s, "nvmlDeviceGetEccMode", h, func(g *gpu) ([2]bool, Return) {
		return [2]bool{g.ecc, g.setup.ECCPending}, Success
	})
	return m[0], m[1], r
}

// ECCErrors counts errors of a GPU's memory. Without ECC nothing counts them.
func (s *Session) ECCErrors(h Handle, t ErrorType, c Counter) (uint64, Return) {
	return device(s, "nvmlDeviceGetTotalEccErrors", h, func(g *gpu) (uint64, Return) { return g.errors(t, c, LocationDRAM) })
}

// MemoryErrors counts errors at one place of a GPU's memory. Turing and later
// tell DRAM and SRAM apart, older cards the caches and files of SRAM.
func (s *Session) MemoryErrors(h Handle, t ErrorType, c Counter, at Location) (uint64, Return) {
	return device(s, "nvmlDeviceGetMemoryErrorCounter", h, func(g *gpu) (uint64, Return) { return g.errors(t, c, at) })
}

func (g *gpu) errors(t ErrorType, c Counter, at Location) (uint64, Return) {
	switch {
	case t > ErrorUncorrected || c > CounterAggregate || at >= locations:
		return 0, InvalidArgument
	case !g.ecc:
		return 0, NotSupported
	case at == LocationDRAM:
	case at == LocationTextureShared || (at == LocationSRAM) != (g.Architecture >= turing):
		return 0, NotSupported
	default:
		return 0, Success
	}
	e := g.health.Corrected
	if t == ErrorUncorrected {
		e = g.health.Uncorrected
	}
	if c == CounterAggregate {
		return e.Aggregate, Success
	}
	return e.Volatile, Success
}

// RemappedRows reads the remap figures of a GPU's health, which cards before
// Ampere do not have.
func (s *Session) RemappedRows(h Handle) (Health, Return) {
	return device(s, "nvmlDeviceGetRemappedRows", h, func(g *gpu) (Health, Return) {
		if !g.remaps() {
			return Health{}, NotSupported
		}
		return g.health, Success
	})
}

// RetirePending says whether a page waits to be retired; Ampere and later
// retire none.
func (s *Session) RetirePending(h Handle) (bool, Return) {
	return device(s, "nvmlDeviceGetRetiredPagesPendingStatus", h, func(g *gpu) (bool, Return) {
		if g.remaps() {
			return false, NotSupported
		}
		return g.health.RetirePending, Success
	})
}

// RetiredPages are the addresses of the pages retired for a cause, a
// nvmlPageRetirementCause_t: 0 is single bit errors, 1 a double bit error. The
// one that is pending is among them.
func (s *Session) RetiredPages(h Handle, cause uint32) ([]uint64, Return) {
	return device(s, "nvmlDeviceGetRetiredPages", h, func(g *gpu) ([]uint64, Return) {
		switch {
		case cause > 1:
			return nil, InvalidArgument
		case g.remaps():
			return nil, NotSupported
		}
		// Which pages they are matters to nobody, but that they differ.
		pages := make([]uint64, []uint32{g.health.RetiredSingle, g.health.RetiredDouble}[cause])
		for i := range pages {
			pages[i] = uint64(2*i+int(cause)+1) << 16
		}
		return pages, Success
	})
}

// Field is the value of a NVML_FI_*, with the type of nvmlValueType_t.
type Field struct {
	Return Return
	Type   uint32
	Value  uint64
}

// The types of fields.
const (
	fieldUint   = 1
	fieldUint64 = 3
)

// mostFields is NVML_FI_MAX of the newest nvml.h known.
const mostFields = 308

// FieldRecovery is NVML_FI_DEV_GET_GPU_RECOVERY_ACTION.
const FieldRecovery = 230

// recoverySince is the first branch of the driver whose recovery action is
// served; the field stands in headers from about there.
const recoverySince = 550

// FieldID names a value by its number, and what of the GPU it is of where the number
// does not say: of link fields, the link.
type FieldID struct{ ID, Scope uint32 }

// The numbers of fields about links: of a single one from the one number on, for the
// first and the others.
const (
	fieldSpeedL0     = 84
	fieldSpeedL6     = 132
	fieldSpeedCommon = 90
	fieldLinkCount   = 91
	fieldRemoteLink  = 146
	fieldLinkSpeed   = 164
	fieldLinkState   = 165
	fieldLinkVersion = 166
)

// linkFieldLocked answers the fields about NVLinks.
func (w *World) linkFieldLocked(g *gpu, id FieldID) (f Field, is bool) {
	number := func(v uint32) (Field, bool) { return Field{Type: fieldUint, Value: uint64(v)}, true }
	speed := func(up bool) (Field, bool) {
		if !up {
			return number(0)
		}
		return number(laneMBps[g.NVLinkVersion])
	}
	link := id.Scope
	switch {
	case id.ID == fieldLinkCount:
		return number(uint32(g.NVLinks))
	case id.ID == fieldSpeedCommon:
		return speed(slices.ContainsFunc(w.linkStatesLocked(g), func(l LinkState) bool { return l.Up }))
	case id.ID >= fieldSpeedL0 && id.ID < fieldSpeedL0+6:
		link = id.ID - fieldSpeedL0
	case id.ID >= fieldSpeedL6 && id.ID < fieldSpeedL6+6:
		link = id.ID - fieldSpeedL6 + 6
	case id.ID != fieldRemoteLink && id.ID != fieldLinkSpeed && id.ID != fieldLinkState && id.ID != fieldLinkVersion:
		return Field{}, false
	}
	switch {
	case link >= maxNVLinks:
		return Field{Return: InvalidArgument}, true
	case int(link) >= g.NVLinks:
		return Field{Return: NotSupported}, true
	}
	l := w.linkLocked(g, int(link))
	switch id.ID {
	case fieldLinkState:
		return number(bit(l.Active))
	case fieldLinkVersion:
		return number(nvlinkVersions[g.NVLinkVersion])
	case fieldRemoteLink:
		if !l.Active {
			return Field{Return: NotSupported}, true
		}
		return number(uint32(l.Far))
	}
	return speed(l.Active)
}

// Fields reads values by number; each has its own outcome.
func (s *Session) Fields(h Handle, ids []FieldID) ([]Field, Return) {
	return device(s, "nvmlDeviceGetFieldValues", h, func(g *gpu) ([]Field, Return) {
		out := make([]Field, len(ids))
		for i, id := range ids {
			f, is := s.p.w.linkFieldLocked(g, id)
			if !is {
				f = s.p.w.fieldLocked(g, id.ID)
			}
			out[i] = f
		}
		return out, Success
	})
}

func (w *World) fieldLocked(g *gpu, id uint32) Field {
	// The totals in the order of their numbers; DRAM's have the same figures.
	totals := [][2]uint32{{3, 11}, {4, 12}, {5, 22}, {6, 23}}
	h := g.health
	number := func(is bool, v uint32) Field {
		if !is {
			return Field{Return: NotSupported}
		}
		return Field{Type: fieldUint, Value: uint64(v)}
	}
	switch id {
	case 1:
		return number(true, bit(g.ecc))
	case 2:
		return number(true, bit(g.setup.ECCPending))
	case 29:
		return number(!g.remaps(), h.RetiredSingle)
	case 30:
		return number(!g.remaps(), h.RetiredDouble)
	case 31:
		return number(!g.remaps(), bit(h.RetirePending))
	case 142:
		return number(g.remaps(), h.RemappedCorrectable)
	case 143:
		return number(g.remaps(), h.RemappedUncorrectable)
	case 144:
		return number(g.remaps(), bit(h.RemapPending))
	case 145:
		return number(g.remaps(), bit(h.RemapFailed))
	case FieldRecovery:
		return number(w.branchLocked() >= recoverySince, uint32(h.Recovery))
	}
	for i, ids := range totals {
		if id == ids[0] || id == ids[1] {
			n, r := g.errors(ErrorType(i%2), Counter(i/2), LocationDRAM)
			return Field{Return: r, Type: fieldUint64, Value: n}
		}
	}
	if id == 0 || id >= mostFields {
		return Field{Return: InvalidArgument}
	}
	return Field{Return: NotSupported}
}

// branchLocked is the first number of the driver's version.
func (w *World) branchLocked() int {
	branch, _, _ := strings.Cut(w.driver, ".")
	n, _ := strconv.Atoi(branch) // of the form that validate wants
	return n
}
