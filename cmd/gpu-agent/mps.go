// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"example.com/gpu-agent/internal/mps"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml"
)

// mpsWorld is the agent's way to MPS daemons.
type mpsWorld struct {
	*mps.Client
	options mps.Options
}

func newMPSWorld(stateDir, driverRoot string, log *slog.Logger) mpsWorld {
	return mpsWorld{mps.NewClient(stateDir), mps.Options{StateDir: stateDir, Driver: mps.DriverBelow(driverRoot), Logger: log}}
}

// End ends what a supervisor that is gone has left.
func (w mpsWorld) End(ctx context.Context) error { return mps.End(ctx, w.options) }

// endMPS ends the MPS daemons that are left below a state directory, and sets the compute mode of GPUs
// that had one to DEFAULT. It fails while a supervisor runs.
func endMPS(ctx context.Context, stateDir, driverRoot string, gpus []gpu.UUID, log *slog.Logger) error {
	if w := newMPSWorld(stateDir, driverRoot, log); w.Left() {
		err := w.End(ctx)
		if errors.Is(err, gpu.ErrInUse) {
			err = fmt.Errorf("%w; delete the DaemonSet gpu-agent-mps first", err)
		}
		if err != nil {
			return err
		}
	}
	if len(gpus) == 0 {
		return nil
	}
	driver, err := nvml.Open(ctx, nvml.Options{DriverRoot: driverRoot, Logger: log})
	if err != nil {
		return fmt.Errorf("set compute modes to DEFAULT: %w", err)
	}
	defer driver.Close()
	var errs []error
	for _, u := range gpus {
		// A GPU that has gone took its mode with it.
		if err := driver.SetComputeMode(ctx, u, gpu.ComputeDefault); err != nil && !errors.Is(err, gpu.ErrNotFound) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
