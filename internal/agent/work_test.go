// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
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
		if got := tookEffect(&c.now, &step); got != c.want {
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

// ending is a driver under which the process is told to end at a call that makes an instance.
type ending struct {
	*outside
	at  int
	end context.CancelFunc
}

func (e *ending) CreateInstance(ctx context.Context, u gpu.UUID, profile string, at gpu.Placement, ci int) (gpu.Instance, error) {
	in, err := e.outside.CreateInstance(ctx, u, profile, at, ci)
	if e.at--; e.at == 0 {
		e.end()
	}
	return in, err
}

// A process that is told to end takes no step any more, nor puts back what it has done: its
// successor has looked at the GPU by then, and would take what comes later for somebody else's.
func TestNothingIsDoneAtTheEnd(t *testing.T) {
	for _, ends := range []int{1, 2, 3} {
		o := migMachine(1, 0)
		d := o.inv.GPUs[0]
		var steps []mig.Step
		for _, start := range []int{0, 1, 2} {
			steps = append(steps, mig.Step{Op: mig.Create, Placement: mig.Placement{Profile: mig.Name{Slices: 1, GB: 10}, Start: start, Size: 1}})
		}
		ctx, end := context.WithCancel(t.Context())
		e := newExecutor(&Options{Log: slog.New(slog.DiscardHandler)}, &Worlds{Observer: o}, nil, func(gpu.UUID, mig.Step, error) {}, nil, nil)
		e.driver = &ending{outside: o, at: ends, end: end}
		e.execute(ctx, &job{Work: plan.Work{GPU: d.UUID, Steps: steps}}, d)
		if got := len(o.inv.GPUs[0].MIG.Instances); got != ends {
			t.Errorf("told to end at step %d: %d instances stand", ends, got)
		}
		end()
	}
	// In the middle of what is put back.
	o := migMachine(1, 0)
	o.inv.GPUs[0].MIG.Instances = nil
	for _, start := range []int{0, 1, 2, 3} {
		o.inv.GPUs[0].MIG.Instances = append(o.inv.GPUs[0].MIG.Instances, gpu.Instance{Profile: "1g.10gb", Placement: gpu.Placement{Start: start, Size: 1}, GI: start + 1})
	}
	d := o.inv.GPUs[0]
	var steps []mig.Step
	for _, in := range d.MIG.Instances {
		at, err := mig.PlacementOf(&in)
		if err != nil {
			t.Fatal(err)
		}
		steps = append(steps, mig.Step{Op: mig.Destroy, Placement: at})
	}
	o.failAt = map[int]error{4: errors.New("it broke")}
	ctx, end := context.WithCancel(t.Context())
	e := newExecutor(&Options{Log: slog.New(slog.DiscardHandler)}, &Worlds{Observer: o}, nil, func(gpu.UUID, mig.Step, error) {}, nil, nil)
	e.driver = &ending{outside: o, at: 1, end: end}
	e.execute(ctx, &job{Work: plan.Work{GPU: d.UUID, Steps: steps}}, d)
	if want := []string{"0: destroy 1g.10gb@0", "0: destroy 1g.10gb@1", "0: destroy 1g.10gb@2", "0: create 1g.10gb@2"}; !slices.Equal(o.ops, want) {
		t.Errorf("told to end in the middle of what is put back: %q, want %q", o.ops, want)
	}
}
