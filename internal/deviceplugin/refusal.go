// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"errors"
	"fmt"

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

// oneGPU refuses devices of several GPUs for a container if one of them has a share through MPS: the
// container's processes reach one MPS server, which is that of one GPU.
func oneGPU(id string) error {
	return status.Because(status.MPSOneGPU, fmt.Errorf("device %s is a share through MPS, and a container with one holds "+
		"one GPU, since a process reaches one MPS server: ask for 1 device, or for another resource", id))
}

// spotHeld gives the ledger's refusal of a spot request its reason: a guaranteed pod was given the room
// before the kubelet had heard of it.
func spotHeld(r *Resource, err error) error {
	if r.Tier == ledger.Spot && errors.Is(err, ledger.ErrHeld) {
		return status.Because(status.SpotRefused, fmt.Errorf("%s: %w", guaranteedHas, err))
	}
	return err
}
