// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/pkg/gpu"
)

// function is a function of the driver's library that this package calls, itself or through
// NVIDIA's generator: a row of the table below. Cards and drivers answer NOT_SUPPORTED to what
// they do not have, an integrated GPU to more than others. What that costs is decided here,
// once for each function, and nowhere else.
type function struct {
	// symbol is the name that the library exports.
	symbol string
	// newer says that R470 may lack it: it is looked up before it is called (session.has).
	newer bool
	// vital is what cannot be had without it, empty for an optional function.
	vital scope
	// unknown is what stays unknown without an optional function, and nothing else does.
	unknown string
}

// scope is what a vital function is vital for. Where the driver does not support it, the
// error, or the fault of the GPU, names the function.
type scope string

const (
	// everything: nothing can be read, of any GPU.
	everything scope = "everything"
	// itsGPU: that GPU has a fault.
	itsGPU scope = "its GPU"
	// itsMIG: that GPU has a fault while it is in MIG mode.
	itsMIG scope = "its GPU in MIG mode"
	// theChange: what was to be changed stays as it is.
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

// The table. go-nvml chooses the newest version of a name by itself, so a name without a
// version stands for all of them, unless another row has one.
var (
	nvmlInit                       = vital("nvmlInit_v2", everything)
	nvmlShutdown                   = vital("nvmlShutdown", everything)
	nvmlSystemGetDriverVersion     = vital("nvmlSystemGetDriverVersion", everything)
	nvmlSystemGetCudaDriverVersion = optional("nvmlSystemGetCudaDriverVersion",
		"the newest CUDA version that the driver serves")
	nvmlDeviceGetCount = vital("nvmlDeviceGetCount_v2", everything)

	// What containers get of a GPU is found by the last three: by NVIDIA's generator.
	nvmlDeviceGetHandleByIndex         = vital("nvmlDeviceGetHandleByIndex_v2", itsGPU)
	nvmlDeviceGetUUID                  = vital("nvmlDeviceGetUUID", itsGPU)
	nvmlDeviceGetHandleByUUID          = vital("nvmlDeviceGetHandleByUUID", itsGPU)
	nvmlDeviceGetName                  = vital("nvmlDeviceGetName", itsGPU)
	nvmlDeviceGetMinorNumber           = vital("nvmlDeviceGetMinorNumber", itsGPU)
	nvmlDeviceGetPciInfo               = vital("nvmlDeviceGetPciInfo_v3", itsGPU)
	nvmlDeviceGetIndex                 = vital("nvmlDeviceGetIndex", itsGPU)
	nvmlDeviceIsMigDeviceHandle        = vital("nvmlDeviceIsMigDeviceHandle", itsGPU)
	nvmlDeviceGetCudaComputeCapability = optional("nvmlDeviceGetCudaComputeCapability", "the compute capability")
	nvmlDeviceGetMemoryAffinity        = optional("nvmlDeviceGetMemoryAffinity",
		"the NUMA node, where the kernel does not know it either")

	// A GPU whose memory is the machine's has no figures of its own. With the first alone,
	// before R510, what the driver keeps for itself counts as used.
	nvmlDeviceGetMemoryInfo = optional("nvmlDeviceGetMemoryInfo",
		"the memory, where the next does not tell it either")
	nvmlDeviceGetMemoryInfoV2 = optionalNewer("nvmlDeviceGetMemoryInfo_v2",
		"the memory that the driver keeps for itself")
	// Else busy instances look idle.
	nvmlDeviceGetComputeProcesses = vital("nvmlDeviceGetComputeRunningProcesses", itsMIG)
	nvmlDeviceGetGraphicProcesses = optional("nvmlDeviceGetGraphicsRunningProcesses", "processes that draw")
	nvmlDeviceGetMPSProcesses     = optionalNewer("nvmlDeviceGetMPSComputeRunningProcesses",
		"clients of MPS, where they are not listed as others are")
	nvmlDeviceGetUtilization = optionalNewer("nvmlDeviceGetProcessUtilization", "how busy processes keep the GPU")

	nvmlDeviceGetTotalEccErrors = optionalNewer("nvmlDeviceGetTotalEccErrors", "uncorrected errors of the memory")
	nvmlDeviceGetRemappedRows   = optionalNewer("nvmlDeviceGetRemappedRows",
		"rows of memory that wait to be replaced, or cannot be")
	nvmlDeviceGetRetiredPagePending = optionalNewer("nvmlDeviceGetRetiredPagesPendingStatus",
		"pages that wait to be retired")
	nvmlDeviceGetFieldValues = optionalNewer("nvmlDeviceGetFieldValues",
		"the recovery that the driver asks for, and how fast NVLinks are")

	nvmlEventSetCreate = optional("nvmlEventSetCreate",
		"errors as they happen: they are seen at the next reading")
	nvmlEventSetWait                 = optional("nvmlEventSetWait_v2", "the same")
	nvmlEventSetFree                 = optional("nvmlEventSetFree", "nothing")
	nvmlDeviceGetSupportedEventTypes = optional("nvmlDeviceGetSupportedEventTypes", "errors of that GPU as they happen")
	nvmlDeviceRegisterEvents         = optional("nvmlDeviceRegisterEvents", "the same")

	nvmlDeviceGetNvLinkState         = optional("nvmlDeviceGetNvLinkState", "NVLinks")
	nvmlDeviceGetNvLinkRemotePciInfo = optional("nvmlDeviceGetNvLinkRemotePciInfo_v2",
		"which GPU an NVLink leads to")
	nvmlDeviceGetNvLinkRemoteDeviceType = optionalNewer("nvmlDeviceGetNvLinkRemoteDeviceType",
		"which NVLinks lead to a switch")
	nvmlDeviceGetNvLinkVersion  = optionalNewer("nvmlDeviceGetNvLinkVersion", "the generation of NVLinks")
	nvmlDeviceGetGpuFabricInfoV = optionalNewer("nvmlDeviceGetGpuFabricInfoV",
		"the NVLink fabric beyond the node")
	nvmlDeviceGetGpuFabricInfo = optionalNewer("nvmlDeviceGetGpuFabricInfo",
		"the same, on drivers without the one above")

	nvmlDeviceGetMigMode = optional("nvmlDeviceGetMigMode",
		"MIG: the GPU counts as one without")
	nvmlDeviceGetGpuInstanceProfileInfoV = optionalNewer("nvmlDeviceGetGpuInstanceProfileInfoV",
		"MIG profiles: the GPU offers none")
	nvmlDeviceGetGpuInstancePossiblePlacements = optional("nvmlDeviceGetGpuInstancePossiblePlacements",
		"placements: some drivers tell them only while MIG is on")
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

// refused translates the driver's answer into an error of package gpu, nil for success.
// The driver's own text and the function stay in the message; the code does not stay in the
// chain.
func (f *function) refused(ret nvml.Return) error {
	if ret == nvml.SUCCESS {
		return nil
	}
	return fmt.Errorf("%w (the driver says %q to %s)", meaning(ret), ret.Error(), f.symbol)
}

// failed is refused with the name of the step.
func (f *function) failed(step string, ret nvml.Return) error { return in(step, f.refused(ret)) }

// told says whether there is an answer. Without an error there may be none: the driver
// does not support an optional function.
func (f *function) told(step string, ret nvml.Return) (bool, error) {
	err := f.failed(step, ret)
	if f.vital == "" && errors.Is(err, gpu.ErrNotSupported) {
		return false, nil
	}
	return err == nil, err
}
