// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"errors"
	"fmt"
	"testing"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
)

// The metric of refusals has a series for each reason: what the kubelet is answered has
// one of a few.
func TestRefusalsHaveAReason(t *testing.T) {
	for _, c := range []struct {
		err  error
		want status.Reason
	}{
		{errors.New("device x was withdrawn"), status.NotOffered},
		{fmt.Errorf("x: %w", gpu.ErrInvalid), status.BadRequest},
		{fmt.Errorf("x: %w", gpu.ErrNoRoom), status.NoRoom},
		{fmt.Errorf("%w; some leave", &timeslice.FitError{Asked: 3}), status.NotOneGPU},
		{&timeslice.SpreadError{Asked: 3}, status.TooFewGPUs},
		{fmt.Errorf("%w: it is being made", ledger.ErrNotOpen), status.NotReady},
		{fmt.Errorf("%w: %w", ledger.ErrNotOpen, status.Why(status.GPUChange, "it is being made")), status.GPUChange},
		{status.Why(status.GPUUnhealthy, "x"), status.GPUUnhealthy},
	} {
		if err := withReason(c.err); status.CauseOf(err, "").Reason != c.want || err.Error() != c.err.Error() || !errors.Is(err, c.err) {
			t.Errorf("%v: %v for %q, want %s", c.err, err, status.CauseOf(err, "").Reason, c.want)
		}
	}
	if withReason(nil) != nil {
		t.Error("nil is refused")
	}
}
