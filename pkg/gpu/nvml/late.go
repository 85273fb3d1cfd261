// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
)

// Late opens the driver at the first call, since a node may start its driver after the agent. If
// that fails, the next call tries again. LetGo closes the driver, so that it can be unloaded. The
// process may end without it: then it does not wait for a slow driver.
type Late struct {
	open func(context.Context) (*Driver, error)
	// called gets each call, for metrics.
	called func(call, code string, took time.Duration)

	// turn holds one token while the fields below are not in use. It is not a mutex, because
	// callers must not wait for an open that hangs beyond their contexts.
	turn   chan struct{}
	driver *Driver // nil until it was opened
	letGo  bool
}

// NewLate returns a Late that opens the driver with open. called gets each call's name, its
// result ("ok" or the kind of the error in one word), and how long it took.
func NewLate(open func(context.Context) (*Driver, error), called func(call, code string, took time.Duration)) *Late {
	l := &Late{open: open, called: called, turn: make(chan struct{}, 1)}
	l.turn <- struct{}{}
	return l
}

var errLetGo = fmt.Errorf("the driver was let go: %w", gpu.ErrNoDriver)

const (
	// openPatience bounds an open. letGoPatience bounds the wait for an open that is under way.
	openPatience  = 10 * time.Second
	letGoPatience = 2 * time.Second
)

func (l *Late) get(ctx context.Context) (*Driver, error) {
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

// LetGo closes the driver for good: all later calls fail with gpu.ErrNoDriver. It may be repeated
// until it succeeds.
func (l *Late) LetGo() error {
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

// timed runs f on the open driver and passes name, result and time to l.called.
func timed[T any](ctx context.Context, l *Late, call string, f func(*Driver) (T, error)) (T, error) {
	began := time.Now()
	var out T
	d, err := l.get(ctx)
	if err == nil {
		out, err = f(d)
	}
	l.called(call, code(err), time.Since(began))
	return out, err
}

// done is timed for a function that returns only an error.
func done(ctx context.Context, l *Late, call string, f func(*Driver) error) error {
	_, err := timed(ctx, l, call, func(d *Driver) (struct{}, error) { return struct{}{}, f(d) })
	return err
}

// code returns an error's kind in one word, "ok" for nil.
func code(err error) string {
	if err == nil {
		return "ok"
	}
	return cmp.Or(map[error]string{
		gpu.ErrTimeout: "timeout", gpu.ErrReloaded: "reloaded", gpu.ErrNoDriver: "no_driver", gpu.ErrLost: "lost",
		gpu.ErrInUse: "in_use", gpu.ErrNoRoom: "no_room", gpu.ErrNotSupported: "not_supported",
		gpu.ErrNoPermission: "no_permission", gpu.ErrNotFound: "not_found",
	}[gpu.ErrorKind(err)], "error")
}

func (l *Late) Inventory(ctx context.Context) (gpu.Inventory, error) {
	return timed(ctx, l, "inventory", func(d *Driver) (gpu.Inventory, error) { return d.Inventory(ctx) })
}

func (l *Late) LinksChanged(ctx context.Context) (bool, error) {
	return timed(ctx, l, "links", func(d *Driver) (bool, error) { return d.LinksChanged(ctx) })
}

func (l *Late) Health(ctx context.Context, u gpu.UUID) (gpu.Health, error) {
	return timed(ctx, l, "health", func(d *Driver) (gpu.Health, error) { return d.Health(ctx, u) })
}

func (l *Late) Setup(ctx context.Context, u gpu.UUID) (gpu.Setup, error) {
	return timed(ctx, l, "setup", func(d *Driver) (gpu.Setup, error) { return d.Setup(ctx, u) })
}

// Surroundings reads the kernel, not the driver's library, so it is not timed.
func (l *Late) Surroundings(ctx context.Context) (gpu.Surroundings, error) {
	d, err := l.get(ctx)
	if err != nil {
		return gpu.Surroundings{}, err
	}
	return d.Surroundings(), nil
}

func (l *Late) ResetComputeMode(ctx context.Context, u gpu.UUID) error {
	return done(ctx, l, "reset_compute_mode", func(d *Driver) error { return d.ResetComputeMode(ctx, u) })
}

func (l *Late) SetComputeMode(ctx context.Context, u gpu.UUID, mode gpu.ComputeMode) error {
	return done(ctx, l, "set_compute_mode", func(d *Driver) error { return d.SetComputeMode(ctx, u, mode) })
}

func (l *Late) Parts(ctx context.Context) (cdi.Parts, error) {
	return timed(ctx, l, "parts", func(d *Driver) (cdi.Parts, error) { return d.Parts(ctx) })
}

func (l *Late) SetTimeSlice(ctx context.Context, u gpu.UUID, s gpu.TimeSlice) error {
	return done(ctx, l, "set_time_slice", func(d *Driver) error { return d.SetTimeSlice(ctx, u, s) })
}

func (l *Late) MIG(ctx context.Context, u gpu.UUID) (gpu.MIG, error) {
	return timed(ctx, l, "mig", func(d *Driver) (gpu.MIG, error) { return d.MIG(ctx, u) })
}

func (l *Late) CreateInstance(
	ctx context.Context, u gpu.UUID, profile string, at gpu.Placement, ci int,
) (gpu.Instance, error) {
	return timed(ctx, l, "create_instance", func(d *Driver) (gpu.Instance, error) {
		return d.CreateInstance(ctx, u, profile, at, ci)
	})
}

func (l *Late) DestroyInstance(ctx context.Context, u gpu.UUID, in gpu.Instance) error {
	return done(ctx, l, "destroy_instance", func(d *Driver) error { return d.DestroyInstance(ctx, u, in) })
}

func (l *Late) SetMIGMode(ctx context.Context, u gpu.UUID, on bool) error {
	return done(ctx, l, "set_mig_mode", func(d *Driver) error { return d.SetMIGMode(ctx, u, on) })
}

func (l *Late) Reset(ctx context.Context, u gpu.UUID) error {
	return done(ctx, l, "reset", func(d *Driver) error { return d.Reset(ctx, u) })
}

// Capabilities reads the kernel, not the driver's library, so it is not timed.
func (l *Late) Capabilities(minor, gi, ci int) ([]*specs.DeviceNode, error) {
	d, err := l.get(context.Background()) // bounded by openPatience
	if err != nil {
		return nil, err
	}
	return d.Capabilities(minor, gi, ci)
}

func (l *Late) SetMemoryLimit(ctx context.Context, u gpu.UUID, cgroup string, bytes uint64) error {
	return done(ctx, l, "set_memory_limit", func(d *Driver) error { return d.SetMemoryLimit(ctx, u, cgroup, bytes) })
}

func (l *Late) MemoryLimit(ctx context.Context, u gpu.UUID, cgroup string) (gpu.MemoryLimit, error) {
	return timed(ctx, l, "memory_limit", func(d *Driver) (gpu.MemoryLimit, error) {
		return d.MemoryLimit(ctx, u, cgroup)
	})
}

func (l *Late) Processes(ctx context.Context, u gpu.UUID) ([]gpu.Process, error) {
	return timed(ctx, l, "processes", func(d *Driver) ([]gpu.Process, error) { return d.Processes(ctx, u) })
}

func (l *Late) Memory(ctx context.Context, gpus ...gpu.UUID) (map[gpu.UUID]gpu.Memory, error) {
	return timed(ctx, l, "memory", func(d *Driver) (map[gpu.UUID]gpu.Memory, error) { return d.Memory(ctx, gpus...) })
}

func (l *Late) Utilization(
	ctx context.Context, since time.Time, gpus ...gpu.UUID,
) (map[gpu.UUID]map[int]float64, error) {
	return timed(ctx, l, "utilization", func(d *Driver) (map[gpu.UUID]map[int]float64, error) {
		return d.Utilization(ctx, since, gpus...)
	})
}

// Events is not timed, since it waits.
func (l *Late) Events(ctx context.Context, fn func(gpu.Event)) error {
	d, err := l.get(ctx)
	if err != nil {
		return err
	}
	return d.Events(ctx, fn)
}
