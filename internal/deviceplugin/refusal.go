// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"errors"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
)

// withReason adds a reason to an error for the kubelet, if the error has none. It returns nil for
// nil.
func withReason(err error) error {
	if err == nil {
		return nil
	}
	why := status.NotOffered
	var fit *timeslice.FitError
	var spread *timeslice.SpreadError
	switch {
	case errors.Is(err, ledger.ErrNotOpen):
		why = status.NotReady
	case errors.As(err, &fit):
		why = status.NotOneGPU
	case errors.As(err, &spread):
		why = status.TooFewGPUs
	case errors.Is(err, gpu.ErrNoRoom):
		why = status.NoRoom
	case errors.Is(err, gpu.ErrInvalid):
		why = status.BadRequest
	}
	return status.Because(status.CauseOf(err, why).Reason, err)
}
