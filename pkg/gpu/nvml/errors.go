// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/pkg/gpu"
)

// in adds to an error the step that failed. It returns nil for nil.
func in(step string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", step, err)
}

// meaning returns the error of package gpu for a return code of the driver.
func meaning(ret nvml.Return) error {
	switch ret {
	case nvml.ERROR_UNINITIALIZED, nvml.ERROR_DRIVER_NOT_LOADED, nvml.ERROR_LIBRARY_NOT_FOUND,
		nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return gpu.ErrNoDriver
	case nvml.ERROR_NOT_FOUND:
		return gpu.ErrNotFound
	case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND, nvml.ERROR_ARGUMENT_VERSION_MISMATCH,
		nvml.ERROR_DEPRECATED:
		return gpu.ErrNotSupported
	case nvml.ERROR_NO_PERMISSION:
		return gpu.ErrNoPermission
	case nvml.ERROR_IN_USE:
		return gpu.ErrInUse
	case nvml.ERROR_INSUFFICIENT_RESOURCES:
		return gpu.ErrNoRoom
	case nvml.ERROR_INVALID_ARGUMENT:
		return gpu.ErrInvalid
	case nvml.ERROR_GPU_IS_LOST, nvml.ERROR_GPU_NOT_FOUND, nvml.ERROR_RESET_REQUIRED:
		return gpu.ErrLost
	case nvml.ERROR_TIMEOUT:
		return gpu.ErrTimeout
	}
	return gpu.ErrDriver
}
