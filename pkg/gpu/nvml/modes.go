// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/pkg/gpu"
)

// modes changes how a GPU as a whole works.
type modes struct {
	*session
	*requests
}

func (m *modes) SetMIGMode(ctx context.Context, u gpu.UUID, on bool) error {
	word, mode := "off", nvml.DEVICE_MIG_DISABLE
	if on {
		word, mode = "on", nvml.DEVICE_MIG_ENABLE
	}
	what := fmt.Sprintf("switch MIG %s on %s", word, u)
	m.hurry()
	_, err := work(ctx, m.session, u, what, onGPU(m.session, u, func(h nvml.Device) (none struct{}, _ error) {
		activation, ret := h.SetMigMode(mode)
		if ret == nvml.ERROR_IN_USE || ret == nvml.SUCCESS && activation == nvml.ERROR_IN_USE {
			// The client that is in the way may be this process, which waits for events.
			if err := m.locks.waiting.Lock(ctx); err != nil {
				return none, fmt.Errorf("stop waiting for events: %w", err)
			}
			activation, ret = h.SetMigMode(mode)
			m.locks.waiting.Unlock()
		}
		if err := nvmlDeviceSetMigMode.refused(ret); err != nil {
			if errors.Is(err, gpu.ErrInUse) {
				err = fmt.Errorf("%w; destroy its instances and end its clients", err)
			}
			return none, err
		}
		if activation == nvml.SUCCESS {
			select {
			case m.again <- struct{}{}: // the driver may have forgotten which GPUs were registered
			default:
			}
			return none, nil
		}
		_, pending, ret := h.GetMigMode()
		if ret == nvml.SUCCESS && pending == mode {
			m.log.Debug("a change of MIG mode waits for a reset", "gpu", u, "on", on, "driver", activation.Error())
			return none, nil
		}
		return none, nvmlDeviceSetMigMode.refused(activation)
	}))
	return err
}
