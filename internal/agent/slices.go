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

// slice is a time slice that was asked of the driver. note says why it does
// not have it; asking again would not help.
type slice struct {
	is   gpu.TimeSlice
	note string
	// epoch is the reader's, then: the driver of another one may have forgotten it.
	epoch uint64
}

// timeSlices is what was asked of the driver, by GPU. It belongs to the loop's
// goroutine. Use newTimeSlices.
type timeSlices struct {
	driver Driver
	log    *slog.Logger
	of     map[gpu.UUID]slice
}

func newTimeSlices(o *Options, w *Worlds) *timeSlices {
	return &timeSlices{w.Driver, o.Log, map[gpu.UUID]slice{}}
}

// restore takes over what the process before this one had set; the driver may have
// forgotten it.
func (t *timeSlices) restore(of map[gpu.UUID]gpu.TimeSlice) {
	for u, is := range of {
		t.of[u] = slice{is: is}
	}
}

// inForce are the time slices that were set.
func (t *timeSlices) inForce() map[gpu.UUID]gpu.TimeSlice {
	out := map[gpu.UUID]gpu.TimeSlice{}
	for u, s := range t.of {
		if s.note == "" {
			out[u] = s.is
		}
	}
	return out
}

// claimed are the time slices that claims ask for: of one GPU they are alike, which the ledger
// sees to.
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

// stands reports whether the driver has been asked for the time slice of a grant, whether or
// not it can have it. Before that its container may not start: it would keep another one.
func (t *timeSlices) stands(g ledger.Grant) bool {
	return g.TimeSlice == "" || t.of[g.GPU].is == g.TimeSlice
}

// set makes the driver's time slices what claims ask for, and where none does what the
// partition says. A GPU that never had one set is left alone where none is asked for, and so
// is one in MIG mode, which has none.
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
			want = gpu.TimeSliceDefault // what we set is ours to put back
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
					break // so would the others
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
