// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/pkg/gpu"
)

// function is a function of the driver's library that this package calls, itself or through
// NVIDIA's generator. Each is a row of the table below. Cards and drivers answer NOT_SUPPORTED to
// what they do not have, an integrated GPU to more than others. The table alone decides what that
// means for each function.
type function struct {
	// symbol is the name that the library exports.
	symbol string
	// newer is true if R470 may lack the function: then it is looked up before each call
	// (session.has).
	newer bool
	// vital is what fails without the function; empty for an optional one.
	vital scope
	// unknown is the only thing that stays unknown without an optional function; empty for a
	// vital one.
	unknown string
}

// scope is what fails if the driver does not support a vital function. The error, or the fault of
// the GPU, then names the function.
type scope string

const (
	// everything: no GPU can be read.
	everything scope = "everything"
	// itsGPU: that GPU has a fault.
	itsGPU scope = "its GPU"
	// itsMIG: that GPU has a fault while it is in MIG mode.
	itsMIG scope = "its GPU in MIG mode"
	// theChange: the requested change is not made.
	theChange scope = "the change"
)

// functions are all rows, in the order of the table.
var functions []*function

func row(f function) *function {
	functions = append(functions, &f)
	return &f
}

func vital(symbol string, to scope) *function { return row(function{symbol: symbol, vital: to}) }

func vitalNewer(symbol string, to scope) *function {
	return row(function{symbol: symbol, vital: to, newer: true})
}

func optional(symbol, unknown string) *function {
	return row(function{symbol: symbol, unknown: unknown})
}

func optionalNewer(symbol, unknown string) *function {
	return row(function{symbol: symbol, unknown: unknown, newer: true})
}

// The table. go-nvml chooses the newest version of a function by itself. So a row whose symbol
// has no version covers all versions, except those that have a row of their own.
//
// Later drivers than R470 added:
//
//	R510   the memory that the driver keeps for itself; MIG profiles, and with them all instances;
//	       the compute slice of a split in its GPU instance
//	R515   (about) the states of all of a GPU's NVLinks in one call, and the speed of each link;
//	       before, a call for each link, and one speed for all
//	R525   (about) the NVLink fabric
//	R615   memory limits of cgroups (SetMemoryLimit)
var (
	nvmlInit                       = vital("nvmlInit_v2", everything)
	nvmlShutdown                   = vital("nvmlShutdown", everything)
	nvmlSystemGetDriverVersion     = vital("nvmlSystemGetDriverVersion", everything)
	nvmlSystemGetCudaDriverVersion = optional("nvmlSystemGetCudaDriverVersion",
		"the newest CUDA version that the driver supports")
	nvmlDeviceGetCount = vital("nvmlDeviceGetCount_v2", everything)

	// NVIDIA's generator calls the last three to find a GPU's device nodes.
	nvmlDeviceGetHandleByIndex         = vital("nvmlDeviceGetHandleByIndex_v2", itsGPU)
	nvmlDeviceGetUUID                  = vital("nvmlDeviceGetUUID", itsGPU)
	nvmlDeviceGetHandleByUUID          = vital("nvmlDeviceGetHandleByUUID", itsGPU)
	nvmlDeviceGetName                  = vital("nvmlDeviceGetName", itsGPU)
	nvmlDeviceGetMinorNumber           = vital("nvmlDeviceGetMinorNumber", itsGPU)
	nvmlDeviceGetPciInfo               = vital("nvmlDeviceGetPciInfo_v3", itsGPU)
	nvmlDeviceGetIndex                 = vital("nvmlDeviceGetIndex", itsGPU)
	nvmlDeviceIsMigDeviceHandle        = vital("nvmlDeviceIsMigDeviceHandle", itsGPU)
	nvmlDeviceGetCudaComputeCapability = optional("nvmlDeviceGetCudaComputeCapability", "the compute capability")
	nvmlDeviceGetNumGpuCores           = optionalNewer("nvmlDeviceGetNumGpuCores",
		"how many multiprocessors there are, so that no share of them is seen to be held")
	nvmlDeviceGetMemoryAffinity = optional("nvmlDeviceGetMemoryAffinity",
		"the NUMA node, if the kernel does not know it either")

	// A GPU that uses the machine's memory, such as GB10 and Thor, answers NOT_SUPPORTED to both
	// (seen with driver 580). Otherwise it lists its processes, and computes, as any other. If only
	// the first function exists (before R510), the memory that the driver keeps for itself counts
	// as used.
	nvmlDeviceGetMemoryInfo = optional("nvmlDeviceGetMemoryInfo",
		"the memory, if the next one does not report it either")
	nvmlDeviceGetMemoryInfoV2 = optionalNewer("nvmlDeviceGetMemoryInfo_v2",
		"the memory that the driver keeps for itself")
	// Without it, busy instances would look idle.
	nvmlDeviceGetComputeProcesses = vital("nvmlDeviceGetComputeRunningProcesses", itsMIG)
	nvmlDeviceGetGraphicProcesses = optional("nvmlDeviceGetGraphicsRunningProcesses", "processes that draw")
	nvmlDeviceGetMPSProcesses     = optionalNewer("nvmlDeviceGetMPSComputeRunningProcesses",
		"clients of MPS, if they are not listed as compute processes")
	nvmlDeviceGetUtilization = optionalNewer("nvmlDeviceGetProcessUtilization", "how busy processes keep the GPU")

	nvmlDeviceGetTotalEccErrors = optionalNewer("nvmlDeviceGetTotalEccErrors", "uncorrected errors of the memory")
	nvmlDeviceGetRemappedRows   = optionalNewer("nvmlDeviceGetRemappedRows",
		"rows of memory that wait to be replaced, or cannot be")
	nvmlDeviceGetRetiredPagePending = optionalNewer("nvmlDeviceGetRetiredPagesPendingStatus",
		"pages that wait to be retired")
	nvmlDeviceGetFieldValues = optionalNewer("nvmlDeviceGetFieldValues",
		"the recovery that the driver asks for, and how fast NVLinks are")

	nvmlDeviceGetComputeMode = optionalNewer("nvmlDeviceGetComputeMode",
		"how many processes may compute on the GPU")
	nvmlDeviceGetPersistenceMode = optionalNewer("nvmlDeviceGetPersistenceMode",
		"whether the driver keeps the GPU initialised")
	nvmlDeviceGetAccountingMode = optionalNewer("nvmlDeviceGetAccountingMode",
		"whether the driver keeps figures of ended processes")
	nvmlDeviceGetEccMode        = optionalNewer("nvmlDeviceGetEccMode", "whether ECC is on, and will be")
	nvmlDeviceGetDefaultEccMode = optionalNewer("nvmlDeviceGetDefaultEccMode", "whether ECC is on in a new card")
	nvmlDeviceGetPowerLimit     = optionalNewer("nvmlDeviceGetPowerManagementLimit", "the power limit")
	// Without one of two, it stays unknown whether the other was lowered.
	nvmlDeviceGetPowerDefault = optionalNewer("nvmlDeviceGetPowerManagementDefaultLimit",
		"the power limit of a card that no program has changed")
	nvmlDeviceGetApplicationsClock = optionalNewer("nvmlDeviceGetApplicationsClock", "the clock of applications")
	nvmlDeviceGetDefaultClock      = optionalNewer("nvmlDeviceGetDefaultApplicationsClock",
		"the clock of a card that no program has changed")
	// Later drivers have it as nvmlDeviceGetCurrentClocksEventReasons as well.
	nvmlDeviceGetClocksReasons = optionalNewer("nvmlDeviceGetCurrentClocksThrottleReasons",
		"whether a clock that was set slows the GPU down")
	nvmlDeviceGetClockInfo   = optionalNewer("nvmlDeviceGetClockInfo", "the same")
	nvmlDeviceSetComputeMode = vitalNewer("nvmlDeviceSetComputeMode", theChange)

	nvmlEventSetCreate = optional("nvmlEventSetCreate",
		"errors as they happen: they are seen at the next reading")
	nvmlEventSetWait                 = optional("nvmlEventSetWait_v2", "errors as they happen")
	nvmlEventSetFree                 = optional("nvmlEventSetFree", "nothing")
	nvmlDeviceGetSupportedEventTypes = optional("nvmlDeviceGetSupportedEventTypes", "errors of that GPU as they happen")
	nvmlDeviceRegisterEvents         = optional("nvmlDeviceRegisterEvents", "errors of that GPU as they happen")

	nvmlDeviceGetNvLinkState         = optional("nvmlDeviceGetNvLinkState", "NVLinks")
	nvmlDeviceGetNvLinkRemotePciInfo = optional("nvmlDeviceGetNvLinkRemotePciInfo_v2",
		"which GPU an NVLink leads to")
	nvmlDeviceGetNvLinkRemoteDeviceType = optionalNewer("nvmlDeviceGetNvLinkRemoteDeviceType",
		"which NVLinks lead to a switch")
	nvmlDeviceGetNvLinkVersion  = optionalNewer("nvmlDeviceGetNvLinkVersion", "the generation of NVLinks")
	nvmlDeviceGetGpuFabricInfoV = optionalNewer("nvmlDeviceGetGpuFabricInfoV",
		"the NVLink fabric beyond the node")
	nvmlDeviceGetGpuFabricInfo = optionalNewer("nvmlDeviceGetGpuFabricInfo",
		"the same, on drivers without the function above")

	nvmlDeviceGetMigMode = optional("nvmlDeviceGetMigMode",
		"MIG: the GPU counts as one without")
	nvmlDeviceGetGpuInstanceProfileInfoV = optionalNewer("nvmlDeviceGetGpuInstanceProfileInfoV",
		"MIG profiles: the GPU offers none")
	nvmlDeviceGetGpuInstancePossiblePlacements = optional("nvmlDeviceGetGpuInstancePossiblePlacements",
		"placements: some drivers report them only while MIG is on")
	nvmlDeviceGetGpuInstances                    = vital("nvmlDeviceGetGpuInstances", itsMIG)
	nvmlGpuInstanceGetInfo                       = vital("nvmlGpuInstanceGetInfo", itsMIG)
	nvmlDeviceGetMaxMigDeviceCount               = vital("nvmlDeviceGetMaxMigDeviceCount", itsMIG)
	nvmlDeviceGetMigDeviceHandleByIndex          = vital("nvmlDeviceGetMigDeviceHandleByIndex", itsMIG)
	nvmlDeviceGetGpuInstanceId                   = vital("nvmlDeviceGetGpuInstanceId", itsMIG)
	nvmlDeviceGetComputeInstanceId               = vital("nvmlDeviceGetComputeInstanceId", itsMIG)
	nvmlDeviceGetAttributes                      = vital("nvmlDeviceGetAttributes_v2", itsMIG)
	nvmlGpuInstanceGetComputeInstanceById        = vital("nvmlGpuInstanceGetComputeInstanceById", itsMIG)
	nvmlComputeInstanceGetInfo                   = vital("nvmlComputeInstanceGetInfo_v2", itsMIG)
	nvmlDeviceSetMigMode                         = vital("nvmlDeviceSetMigMode", theChange)
	nvmlDeviceCreateGpuInstanceWithPlacement     = vital("nvmlDeviceCreateGpuInstanceWithPlacement", theChange)
	nvmlDeviceGetGpuInstanceById                 = vital("nvmlDeviceGetGpuInstanceById", theChange)
	nvmlGpuInstanceDestroy                       = vital("nvmlGpuInstanceDestroy", theChange)
	nvmlGpuInstanceGetComputeInstanceProfileInfo = vital("nvmlGpuInstanceGetComputeInstanceProfileInfo", theChange)
	nvmlGpuInstanceGetComputeInstances           = vital("nvmlGpuInstanceGetComputeInstances", theChange)
	nvmlGpuInstanceGetComputePlacements          = vitalNewer(
		"nvmlGpuInstanceGetComputeInstancePossiblePlacements", theChange)
	nvmlGpuInstanceCreateComputeInstance = vital("nvmlGpuInstanceCreateComputeInstance", theChange)
	nvmlGpuInstanceCreateComputeAt       = vitalNewer(
		"nvmlGpuInstanceCreateComputeInstanceWithPlacement", theChange)
	nvmlComputeInstanceDestroy = vital("nvmlComputeInstanceDestroy", theChange)

	nvmlDeviceSetMemoryLimits = vitalNewer("nvmlDeviceSetMemoryLimits_v1", theChange)
	nvmlDeviceGetMemoryLimits = vitalNewer("nvmlDeviceGetMemoryLimits_v1", theChange)
)

// refused turns the driver's answer into an error that wraps one of package gpu, or nil for
// success. The message has the driver's own text and the function; the return code is not in the
// error chain.
func (f *function) refused(ret nvml.Return) error {
	if ret == nvml.SUCCESS {
		return nil
	}
	return fmt.Errorf("%w (the driver says %q to %s)", meaning(ret), ret.Error(), f.symbol)
}

// failed is refused with the step's name before it.
func (f *function) failed(step string, ret nvml.Return) error { return in(step, f.refused(ret)) }

// told reports whether the driver has answered. It returns false and no error if the driver does
// not support an optional function.
func (f *function) told(step string, ret nvml.Return) (bool, error) {
	err := f.failed(step, ret)
	if f.vital == "" && errors.Is(err, gpu.ErrNotSupported) {
		return false, nil
	}
	return err == nil, err
}
