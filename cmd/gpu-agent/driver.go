// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml"
)

// lateDriver opens the driver when it is first needed, and again at the next
// need where that failed: a node may start its driver after the agent. It is let
// go where somebody wants to unload the driver, and not at the end: the end of the
// process does that, and does not wait for a driver that takes its time.
type lateDriver struct {
	open func(context.Context) (*nvml.Driver, error)
	// called is told of each call, for metrics.
	called func(call, code string, took time.Duration)

	// turn has a token while nobody works with what follows. It is no mutex: an
	// open that hangs must not hold up those who can wait no longer.
	turn   chan struct{}
	driver *nvml.Driver // nil until it opened
	letGo  bool
}

func newLateDriver(open func(context.Context) (*nvml.Driver, error), called func(call, code string, took time.Duration)) *lateDriver {
	l := &lateDriver{open: open, called: called, turn: make(chan struct{}, 1)}
	l.turn <- struct{}{}
	return l
}

var errLetGo = fmt.Errorf("the driver was let go: %w", gpu.ErrNoDriver)

const (
	// openPatience bounds an open, and letGoPatience the wait for one under way.
	openPatience  = 10 * time.Second
	letGoPatience = 2 * time.Second
)

func (l *lateDriver) get(ctx context.Context) (*nvml.Driver, error) {
	ctx, cancel := context.WithTimeout(ctx, openPatience)
	defer cancel()
	select {
	case <-l.turn:
	case <-ctx.Done():
		return nil, fmt.Errorf("open the driver: %w: another open has not returned", gpu.ErrTimeout)
	}
	defer func() { l.turn <- struct{}{} }()
	if l.letGo {
		return nil, errLetGo
	}
	if l.driver == nil {
		d, err := l.open(ctx)
		if err != nil {
			return nil, err
		}
		l.driver = d
	}
	return l.driver, nil
}

// LetGo gives up every handle of the driver, for good. It may be repeated until
// there is no error.
func (l *lateDriver) LetGo() error {
	select {
	case <-l.turn:
	case <-time.After(letGoPatience):
		return fmt.Errorf("let the driver go: %w: an open has not returned", gpu.ErrTimeout)
	}
	defer func() { l.turn <- struct{}{} }()
	l.letGo = true
	if l.driver == nil {
		return nil
	}
	return l.driver.Close()
}

// timed runs f on the open driver and tells how it went.
func timed[T any](ctx context.Context, l *lateDriver, call string, f func(*nvml.Driver) (T, error)) (T, error) {
	began := time.Now()
	var out T
	d, err := l.get(ctx)
	if err == nil {
		out, err = f(d)
	}
	l.called(call, code(err), time.Since(began))
	return out, err
}

// code is an error's kind in one word.
func code(err error) string {
	if err == nil {
		return "ok"
	}
	for _, kind := range []struct {
		is   error
		word string
	}{
		{gpu.ErrTimeout, "timeout"}, {gpu.ErrReloaded, "reloaded"}, {gpu.ErrNoDriver, "no_driver"}, {gpu.ErrLost, "lost"},
		{gpu.ErrInUse, "in_use"}, {gpu.ErrNoRoom, "no_room"}, {gpu.ErrNotSupported, "not_supported"}, {gpu.ErrNoPermission, "no_permission"}, {gpu.ErrNotFound, "not_found"},
	} {
		if errors.Is(err, kind.is) {
			return kind.word
		}
	}
	return "error"
}

func (l *lateDriver) Inventory(ctx context.Context) (gpu.Inventory, error) {
	return timed(ctx, l, "inventory", func(d *nvml.Driver) (gpu.Inventory, error) { return d.Inventory(ctx) })
}

func (l *lateDriver) Health(ctx context.Context, u gpu.UUID) (gpu.Health, error) {
	return timed(ctx, l, "health", func(d *nvml.Driver) (gpu.Health, error) { return d.Health(ctx, u) })
}

func (l *lateDriver) Parts(ctx context.Context) (cdi.Parts, error) {
	return timed(ctx, l, "parts", func(d *nvml.Driver) (cdi.Parts, error) { return d.Parts(ctx) })
}

func (l *lateDriver) SetTimeSlice(ctx context.Context, u gpu.UUID, s gpu.TimeSlice) error {
	_, err := timed(ctx, l, "set_time_slice", func(d *nvml.Driver) (struct{}, error) { return struct{}{}, d.SetTimeSlice(ctx, u, s) })
	return err
}

func (l *lateDriver) MIG(ctx context.Context, u gpu.UUID) (gpu.MIG, error) {
	return timed(ctx, l, "mig", func(d *nvml.Driver) (gpu.MIG, error) { return d.MIG(ctx, u) })
}

func (l *lateDriver) CreateInstance(ctx context.Context, u gpu.UUID, profile string, at gpu.Placement, ci int) (gpu.Instance, error) {
	return timed(ctx, l, "create_instance", func(d *nvml.Driver) (gpu.Instance, error) { return d.CreateInstance(ctx, u, profile, at, ci) })
}

func (l *lateDriver) DestroyInstance(ctx context.Context, u gpu.UUID, in gpu.Instance) error {
	_, err := timed(ctx, l, "destroy_instance", func(d *nvml.Driver) (struct{}, error) { return struct{}{}, d.DestroyInstance(ctx, u, in) })
	return err
}

func (l *lateDriver) SetMIGMode(ctx context.Context, u gpu.UUID, on bool) error {
	_, err := timed(ctx, l, "set_mig_mode", func(d *nvml.Driver) (struct{}, error) { return struct{}{}, d.SetMIGMode(ctx, u, on) })
	return err
}

func (l *lateDriver) Reset(ctx context.Context, u gpu.UUID) error {
	_, err := timed(ctx, l, "reset", func(d *nvml.Driver) (struct{}, error) { return struct{}{}, d.Reset(ctx, u) })
	return err
}

// Capabilities asks the kernel, not the driver's library: it is not counted.
func (l *lateDriver) Capabilities(minor, gi, ci int) ([]*specs.DeviceNode, error) {
	d, err := l.get(context.Background()) // bounded by openPatience
	if err != nil {
		return nil, err
	}
	return d.Capabilities(minor, gi, ci)
}

func (l *lateDriver) SetMemoryLimit(ctx context.Context, u gpu.UUID, cgroup string, bytes uint64) error {
	_, err := timed(ctx, l, "set_memory_limit", func(d *nvml.Driver) (struct{}, error) {
		return struct{}{}, d.SetMemoryLimit(ctx, u, cgroup, bytes)
	})
	return err
}

func (l *lateDriver) MemoryLimit(ctx context.Context, u gpu.UUID, cgroup string) (nvml.MemoryLimit, error) {
	return timed(ctx, l, "memory_limit", func(d *nvml.Driver) (nvml.MemoryLimit, error) { return d.MemoryLimit(ctx, u, cgroup) })
}

// Events is not timed: waiting is its business.
func (l *lateDriver) Events(ctx context.Context, fn func(gpu.Event)) error {
	d, err := l.get(ctx)
	if err != nil {
		return err
	}
	return d.Events(ctx, fn)
}
