// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"testing"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// What a failed step has done all the same is undone with the rest.
func TestHappened(t *testing.T) {
	slot := mig.Slot{Profile: mig.Name{Slices: 3, GB: 40}, Start: 4, Size: 4}
	whole := []gpu.Instance{{Profile: "3g.40gb", Placement: gpu.Placement{Start: 4, Size: 4}}}
	empty := []gpu.Instance{{Profile: "3g.40gb", Placement: gpu.Placement{Start: 4, Size: 4}, CI: -1}}
	on, off := true, false
	for _, c := range []struct {
		name string
		op   mig.Op
		now  gpu.MIG
		want bool
	}{
		{"nothing was destroyed", mig.Destroy, gpu.MIG{Instances: whole}, false},
		{"its compute instance was", mig.Destroy, gpu.MIG{Instances: empty}, true},
		{"it was, and the answer an error", mig.Destroy, gpu.MIG{}, true},
		{"nothing was made", mig.Create, gpu.MIG{}, false},
		{"a GPU instance was, and is empty", mig.Create, gpu.MIG{Instances: empty}, true},
		{"what stands whole is not the failed call's", mig.Create, gpu.MIG{Instances: whole}, false},
		{"the mode is as it was", mig.Enable, gpu.MIG{}, false},
		{"the mode was switched on", mig.Enable, gpu.MIG{Enabled: true}, true},
		{"the mode waits for a reset", mig.Enable, gpu.MIG{Pending: &on}, true},
		{"the mode is still on", mig.Disable, gpu.MIG{Enabled: true}, false},
		{"the mode was switched off", mig.Disable, gpu.MIG{}, true},
		{"the end of the mode waits for a reset", mig.Disable, gpu.MIG{Enabled: true, Pending: &off}, true},
	} {
		step := mig.Step{Op: c.op}
		if c.op == mig.Destroy || c.op == mig.Create {
			step.Slot = slot
		}
		if got := happened(&c.now, &step); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}
