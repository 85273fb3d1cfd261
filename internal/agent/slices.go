// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/pkg/gpu"
)

// slice is a time slice that was asked of the driver. note says why it does
// not have it; asking again would not help.
type slice struct {
	is   gpu.TimeSlice
	note string
	// epoch is the reader's, then: the driver of another one may have forgotten it.
	epoch uint64
}

// setTimeSlices makes the driver's time slices what the partition says. A GPU
// that never had one set is left alone where none is asked for.
func (a *Agent) setTimeSlices(ctx context.Context) (note string, err error) {
	var notes []string
	var errs []error
	for _, w := range a.wanted {
		d := a.reader.inv.ByUUID(w.GPU)
		if d == nil || d.Fault != "" {
			continue
		}
		want := w.TimeSlice
		if want == gpu.TimeSliceDefault || a.layouts[w.GPU].Mode() != string(config.Shared) {
			want = ""
		}
		have, asked := a.slices[w.GPU]
		if want == "" {
			if !asked || have.note != "" {
				delete(a.slices, w.GPU)
				continue
			}
			want = gpu.TimeSliceDefault // what we set is ours to put back
		}
		if !asked || have.is != want || have.epoch != a.reader.epoch {
			cctx, cancel := context.WithTimeout(ctx, driverPatience)
			err := a.driver.SetTimeSlice(cctx, w.GPU, want)
			cancel()
			have = slice{is: want, epoch: a.reader.epoch}
			if errors.Is(err, gpu.ErrNotSupported) {
				have.note = fmt.Sprintf("timeSlice %s is not supported on %s: %v", want, d.Name(), err)
			} else if errors.Is(err, gpu.ErrTimeout) {
				return strings.Join(notes, "; "), errors.Join(append(errs, fmt.Errorf("set time slice %s on %s: %w", want, d.Name(), err))...)
			} else if err != nil {
				errs = append(errs, fmt.Errorf("set time slice %s on %s: %w", want, d.Name(), err))
				continue
			}
			a.slices[w.GPU] = have
			a.log.Info("time slice", "gpu", w.GPU, "slice", string(want), "note", have.note)
		}
		if have.note != "" {
			notes = append(notes, have.note)
		}
	}
	return strings.Join(notes, "; "), errors.Join(errs...)
}
