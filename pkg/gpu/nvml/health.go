// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/pkg/gpu"
)

func (r *readings) Health(ctx context.Context, u gpu.UUID) (gpu.Health, error) {
	return ask(ctx, r.session, "read the health of", u, r.health)
}

func (r *readings) health(h nvml.Device) (gpu.Health, error) {
	var health gpu.Health
	for _, figure := range []struct {
		call *function
		what string
		read func() nvml.Return
	}{
		{nvmlDeviceGetTotalEccErrors, "ECC errors", func() nvml.Return {
			n, ret := h.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
			if ret == nvml.SUCCESS {
				health.Uncorrected = &n
			}
			return ret
		}},
		{nvmlDeviceGetRemappedRows, "remapped rows", func() nvml.Return {
			_, _, pending, failure, ret := h.GetRemappedRows()
			if ret == nvml.SUCCESS {
				health.Remap = &gpu.Remap{Pending: pending, Failed: failure}
			}
			return ret
		}},
		{nvmlDeviceGetRetiredPagePending, "pages to be retired", func() nvml.Return {
			pending, ret := h.GetRetiredPagesPendingStatus()
			health.RetirePending = ret == nvml.SUCCESS && pending == nvml.FEATURE_ENABLED
			return ret
		}},
		{nvmlDeviceGetFieldValues, "recovery action", func() (ret nvml.Return) {
			health.Recovery, ret = recovery(h)
			return ret
		}},
	} {
		if !r.has(figure.call) {
			continue
		}
		if _, err := figure.call.told(figure.what, figure.read()); err != nil {
			return gpu.Health{}, err
		}
	}
	return health, nil
}

// recovery reads the field with the action that a GPU needs. The call has a result and the field
// has one of its own: a driver that does not know the field fails it there.
func recovery(h nvml.Device) (gpu.Recovery, nvml.Return) {
	fields := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
	if ret := h.GetFieldValues(fields); ret != nvml.SUCCESS {
		return gpu.RecoveryUnknown, ret
	}
	switch ret := nvml.Return(fields[0].NvmlReturn); ret {
	case nvml.SUCCESS:
	case nvml.ERROR_INVALID_ARGUMENT: // the field is newer than the driver
		return gpu.RecoveryUnknown, nvml.ERROR_NOT_SUPPORTED
	default:
		return gpu.RecoveryUnknown, ret
	}
	if nvml.ValueType(fields[0].ValueType) != nvml.VALUE_TYPE_UNSIGNED_INT {
		return gpu.RecoveryUnknown, nvml.ERROR_NOT_SUPPORTED
	}
	return action(binary.NativeEndian.Uint32(fields[0].Value[:])), nvml.SUCCESS
}

// action names a recovery action. One that this package does not know keeps its number, since it
// is not none.
func action(n uint32) gpu.Recovery {
	switch nvml.DeviceGpuRecoveryAction(n) {
	case nvml.GPU_RECOVERY_ACTION_NONE:
		return gpu.RecoveryNone
	case nvml.GPU_RECOVERY_ACTION_GPU_RESET, nvml.GPU_RECOVERY_ACTION_BUS_RESET:
		return gpu.RecoveryReset
	case nvml.GPU_RECOVERY_ACTION_NODE_REBOOT, nvml.GPU_RECOVERY_ACTION_SYSTEM_REBOOT:
		return gpu.RecoveryReboot
	case nvml.GPU_RECOVERY_ACTION_DRAIN_P2P:
		return gpu.RecoveryDrain
	case nvml.GPU_RECOVERY_ACTION_DRAIN_AND_RESET:
		return gpu.RecoveryDrainReset
	}
	return gpu.Recovery(fmt.Sprintf("recovery action %d of the driver", n))
}
