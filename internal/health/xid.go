// SPDX-License-Identifier: Apache-2.0

package health

import (
	"fmt"
	"slices"

	"example.com/gpu-agent/pkg/gpu"
)

// Class is the kind of a fault. It decides what the fault affects and what ends it. The strings
// are stable: they are label values of a metric, and are in the state file.
type Class string

// Classes, worst first.
const (
	// ClassLost: the GPU does not answer, or is not listed.
	ClassLost Class = "lost"
	// ClassRemapFailed: the card has no spare row left for a broken one.
	ClassRemapFailed Class = "remap-failed"
	// ClassMemory: memory errors that the card could not confine.
	ClassMemory Class = "memory"
	// ClassRecovery: the driver itself asks for a recovery action.
	ClassRecovery Class = "recovery"
	// ClassFirmware: a processor on the card has stopped or misbehaves.
	ClassFirmware Class = "firmware"
	// ClassLink: an error of NVLink, or of the link to the CPU.
	ClassLink Class = "link"
	// ClassEngine: an engine of the GPU or its program failed, or the error does no harm.
	ClassEngine Class = "engine"
	// ClassContained: a memory error that hit only the programs that used that memory.
	ClassContained Class = "contained"
	// ClassUnknown: an Xid that is not in the table.
	ClassUnknown Class = "unknown-xid"
	// ClassUnreadable: the driver answers, but with an error for this GPU.
	ClassUnreadable Class = "unreadable"
	// ClassDriver: there is no driver to ask. Nothing is wrong with the card.
	ClassDriver Class = "driver"
)

// What an operator has to do: values of Verdict.Needs.
const (
	NeedsNothing = ""
	NeedsReset   = "reset"
	NeedsReboot  = "reboot"
	NeedsDriver  = "driver"
	NeedsRestart = "restart"
)

// rule is how a class behaves.
type rule struct {
	class Class
	// instance is true if a fault that names a MIG instance affects only that instance.
	instance bool
	// reset is true if the fault ends only after a reset of the GPU.
	reset bool
	// proof is true if the figures must be back as well.
	proof bool
	// boot is true if a reboot does not repair the fault, so that it is kept over one.
	boot bool
}

// rules is in the order of severity, worst first.
var rules = []rule{
	{class: ClassLost, reset: true, proof: true},
	{class: ClassRemapFailed, reset: true, proof: true, boot: true},
	{class: ClassMemory, reset: true, proof: true},
	{class: ClassRecovery, reset: true},
	{class: ClassFirmware, reset: true},
	{class: ClassLink, reset: true},
	{class: ClassEngine},
	{class: ClassContained, instance: true},
	{class: ClassUnknown},
	{class: ClassUnreadable},
	{class: ClassDriver},
}

// rank returns a class's index in rules, or -1 for an unknown class.
func rank(c Class) int {
	return slices.IndexFunc(rules, func(r rule) bool { return r.class == c })
}

// DefaultIgnored are the Xids that applications cause. They show nothing about the card.
// NVIDIA's device plugin ignores the same ones.
var DefaultIgnored = []uint64{13, 31, 43, 45, 68, 109}

// Application returns what an event tells of a fatal fault of an application on a whole GPU; empty if it
// tells of none. Under MPS such a fault ends the work of all clients of the GPU. Xid 45 is no fault of its
// own: channels are also torn down when a program is killed.
func Application(e gpu.Event) string {
	if e.Kind != gpu.EventXid || e.Xid == 45 || e.GI >= 0 || !slices.Contains(DefaultIgnored, e.Xid) {
		return ""
	}
	return fmt.Sprintf("Xid %d: %s", e.Xid, meaningOf(e.Xid).what)
}

// meaning is the table's entry for an Xid.
type meaning struct {
	class Class
	what  string // a clause without a full stop
	do    string // an imperative
	needs string
}

const (
	doReset   = "drain the GPU and reset it"
	doReboot  = "drain the node and reset the GPU or reboot"
	doRestart = "restart the application; if it comes again, run the field diagnostics"
)

// xids is the table of driver errors. The first six affect a card only if an operator has taken
// them off the ignored list.
//
// The names are meant as those of NVIDIA's Xid catalogue ("XID Errors"), in this package's
// words; where they differ, trust the catalogue. The class of an Xid, what it asks of the
// operator, what it affects and how long to wait are this package's own decisions. NVIDIA's
// documents give:
//
//   - 48, 63 and 64 are the three Xids of page retirement ("Dynamic Page Retirement").
//   - The errors of 121 are corrected and do no harm; a reset, at a time that suits, trains the
//     link anew ("XID Errors").
//   - Xid 154 reports each change of the recovery action, also to none.
//   - While a remap is pending, unaffected applications run on and new ones start; and what each
//     recovery action asks for ("GPU Memory Error Management", error recovery and response flags).
//   - A failed remap stays set once there was one, and remap figures cannot be read while a GPU has
//     MIG instances (NVML's nvmlDeviceGetRemappedRows).
var xids = map[uint64]meaning{
	13:  {ClassEngine, "graphics engine exception, as an application's bad access causes", doRestart, NeedsNothing},
	31:  {ClassEngine, "GPU memory page fault, as an application's bad pointer causes", doRestart, NeedsNothing},
	43:  {ClassEngine, "GPU stopped processing an application's work", doRestart, NeedsNothing},
	45:  {ClassEngine, "an application's channels were torn down", doRestart, NeedsNothing},
	68:  {ClassEngine, "video decoder exception", doRestart, NeedsNothing},
	109: {ClassEngine, "context switch timeout", doRestart, NeedsNothing},

	48: {ClassMemory, "uncorrectable (double bit) ECC error", doReset, NeedsReset},
	61: {ClassFirmware, "internal micro-controller breakpoint", doReset, NeedsReset},
	62: {ClassFirmware, "internal micro-controller halt", doReset, NeedsReset},
	63: {ClassContained, "a memory row or page was marked for replacement",
		"nothing: the next reset replaces it", NeedsNothing},
	64: {ClassRemapFailed, "a broken memory row or page could not be replaced",
		"reset the GPU; if it comes again, have the card replaced", NeedsReset},
	69: {ClassEngine, "graphics engine class error", doRestart, NeedsNothing},
	74: {ClassLink, "NVLink error",
		"drain the GPU and reset it; if it comes again, check the link's hardware", NeedsReset},
	79:  {ClassLost, "the GPU has fallen off the bus", doReboot, NeedsReset},
	92:  {ClassEngine, "high rate of corrected memory errors", "run the field diagnostics", NeedsNothing},
	94:  {ClassContained, "contained memory error", "restart the application that was hit", NeedsNothing},
	95:  {ClassMemory, "uncontained memory error", doReset, NeedsReset},
	119: {ClassFirmware, "the GPU's system processor (GSP) did not answer in time", doReset, NeedsReset},
	120: {ClassFirmware, "error of the GPU's system processor (GSP)", doReset, NeedsReset},
	121: {ClassEngine, "corrected errors of the chip-to-chip link (C2C)",
		"nothing: the next reset trains the link anew", NeedsNothing},
	140: {ClassMemory, "unrecovered ECC error", doReset, NeedsReset},
	143: {ClassFirmware, "the GPU could not be initialised", doReset, NeedsReset},
	149: {ClassLink, "NVLink 5 error", doReset, NeedsReset},
	154: {ClassRecovery, "the driver reports that the GPU needs recovery",
		"see which with nvidia-smi -q (GPU Recovery Action), then do it", NeedsReset},
}

// meaningOf returns the table's entry, or that of an unknown Xid.
func meaningOf(xid uint64) meaning {
	if m, ok := xids[xid]; ok {
		return m
	}
	return meaning{
		ClassUnknown, "a driver error that this agent does not know", "look it up in NVIDIA's Xid catalogue",
		NeedsNothing,
	}
}
