// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// What a failed step has done all the same is undone with the rest.
func TestHappened(t *testing.T) {
	placement := mig.Placement{Profile: mig.Name{Slices: 3, GB: 40}, Start: 4, Size: 4}
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
			step.Placement = placement
		}
		if got := happened(&c.now, &step); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

// What failed is told once for as long as it fails of the same: the words of an error
// have process IDs and times in them, which change from one try to the next.
func TestTheSameFailureInOtherWordsIsToldOnce(t *testing.T) {
	e := newExecutor(&Options{Log: slog.New(slog.DiscardHandler)}, &Worlds{}, nil, nil, nil, nil)
	var told []string
	e.event = func(_ workload.Pod, _ agentkube.EventType, _, message string) { told = append(told, message) }
	d := gpu.Device{UUID: "GPU-a"}
	first := mig.Step{Op: mig.Destroy, Placement: mig.Placement{Profile: mig.Name{Slices: 3, GB: 40}, Start: 4, Size: 4}}
	second := mig.Step{Op: mig.Disable}
	inUse := func(pid int) error { return fmt.Errorf("it is open in dcgm (PID %d): %w", pid, gpu.ErrInUse) }
	for i, c := range []struct {
		step       mig.Step
		err, stuck error
		news       bool
	}{
		{step: first, err: inUse(7), news: true},
		{step: first, err: inUse(8)},
		{step: second, err: inUse(8), news: true},
		{step: second, err: fmt.Errorf("destroy it: %w", gpu.ErrTimeout), news: true},
		{step: second, err: fmt.Errorf("destroy it: %w", gpu.ErrTimeout), stuck: inUse(9), news: true},
		{step: second, err: fmt.Errorf("%w: %w", errResetDue, gpu.ErrTimeout), stuck: inUse(9), news: true},
		{step: second, err: errors.New("of another kind"), stuck: inUse(9), news: true},
		{step: second, err: errors.New("of another kind, at 12:31"), stuck: inUse(10)},
	} {
		told = nil
		e.learn(&result{job: &job{Work: plan.Work{GPU: d.UUID, Steps: []mig.Step{c.step}}}, failed: c.step, err: c.err, stuck: c.stuck}, &d, 1, time.Now())
		if news := len(told) > 0; news != c.news {
			t.Errorf("failure %d: told %q", i, told)
		}
	}
}
