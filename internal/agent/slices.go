// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// slice is a time slice that the driver was asked for. note is why the driver cannot set it, empty
// if it can; then asking again does not help.
type slice struct {
	is   gpu.TimeSlice
	note string
	// epoch is the reader's epoch at that time. The driver of another epoch may have forgotten it.
	epoch uint64
}

// timeSlices has what the driver was asked for, by GPU. It belongs to the loop's goroutine. Use
// newTimeSlices.
type timeSlices struct {
	driver Driver
	log    *slog.Logger
	of     map[gpu.UUID]slice
}

func newTimeSlices(o *Options, w *Worlds) *timeSlices {
	return &timeSlices{w.Driver, o.Log, map[gpu.UUID]slice{}}
}

// restore takes over what the last process had set. The driver may have forgotten it.
func (t *timeSlices) restore(of map[gpu.UUID]gpu.TimeSlice) {
	for u, is := range of {
		t.of[u] = slice{is: is}
	}
}

// inForce returns the time slices that the driver has set.
func (t *timeSlices) inForce() map[gpu.UUID]gpu.TimeSlice {
	out := map[gpu.UUID]gpu.TimeSlice{}
	for u, s := range t.of {
		if s.note == "" {
			out[u] = s.is
		}
	}
	return out
}

// claimed returns the time slices that claims ask for. The ledger ensures that all claims on one
// GPU ask for the same.
func claimed(allocations []ledger.Allocation) map[gpu.UUID]gpu.TimeSlice {
	out := map[gpu.UUID]gpu.TimeSlice{}
	for i := range allocations {
		for _, g := range allocations[i].Grants {
			if g.TimeSlice != "" {
				out[g.GPU] = g.TimeSlice
			}
		}
	}
	return out
}

// wasAsked reports whether the driver was asked for the time slice of a grant, even if it cannot
// set it. Before that the container may not start, since it would keep another time slice.
func (t *timeSlices) wasAsked(g ledger.Grant) bool {
	return g.TimeSlice == "" || t.of[g.GPU].is == g.TimeSlice
}

// set sets the driver's time slices: those that claims ask for, or else those of the partition. It
// leaves a GPU alone if none was ever set or asked for, or if it is in MIG mode, which has none.
func (t *timeSlices) set(ctx context.Context, inv *gpu.Inventory, epoch uint64, wanted []config.Want,
	layouts map[gpu.UUID]plan.Layout, allocations []ledger.Allocation) (note string, err error) {
	var notes []string
	var errs []error
	claims := claimed(allocations)
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		want := claims[d.UUID]
		w := slices.IndexFunc(wanted, func(w config.Want) bool { return w.GPU == d.UUID })
		if d.Fault != "" || d.MIG.Enabled || w < 0 && want == "" {
			continue
		}
		shared := layouts[d.UUID].Mode() == string(config.Shared)
		if want == "" && wanted[w].TimeSlice != gpu.TimeSliceDefault && shared {
			want = wanted[w].TimeSlice
		}
		have, asked := t.of[d.UUID]
		if want == "" {
			if !asked || have.note != "" {
				delete(t.of, d.UUID)
				continue
			}
			want = gpu.TimeSliceDefault // the agent set it, so the agent puts it back
		}
		if !asked || have.is != want || have.epoch != epoch {
			cctx, cancel := context.WithTimeout(ctx, driverPatience)
			err := t.driver.SetTimeSlice(cctx, d.UUID, want)
			cancel()
			have = slice{is: want, epoch: epoch}
			if errors.Is(err, gpu.ErrNotSupported) {
				have.note = fmt.Sprintf("timeSlice %s is not supported on %s: %v", want, d.Name(), err)
			} else if err != nil {
				errs = append(errs, fmt.Errorf("set time slice %s on %s: %w", want, d.Name(), err))
				if errors.Is(err, gpu.ErrTimeout) {
					break // the others would time out, too
				}
				continue
			}
			t.of[d.UUID] = have
			t.log.Info("time slice", "gpu", d.UUID, "slice", string(want), "note", have.note)
		}
		if have.note != "" {
			notes = append(notes, have.note)
		}
	}
	return strings.Join(notes, "; "), status.Because(status.DriverFailed, errors.Join(errs...))
}
