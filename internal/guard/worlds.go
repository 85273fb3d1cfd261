// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// Counters implements Pages with package lib.
type Counters struct{ *lib.Pages }

// Meter opens the limit page and the usage page of an allocation on a GPU.
func (c Counters) Meter(key string, u gpu.UUID) (Meter, error) {
	usage, err := c.OpenUsage(key, u)
	if err != nil {
		return nil, err
	}
	m, err := c.Pages.Meter(key, u, usage)
	if err != nil {
		_ = usage.Close()
		return nil, err
	}
	return pageMeter{m, usage}, nil
}

// pageMeter is a meter and the usage page that it reads. Close closes both.
type pageMeter struct {
	*lib.Meter
	usage *lib.Usage
}

func (m pageMeter) Counted(of map[lib.Process]uint64) error { return m.usage.Counted(of) }

// Compute is as in lib.Usage.
func (m pageMeter) Compute(of map[lib.Process]lib.Compute) (starting time.Duration, err error) {
	return m.usage.Compute(of)
}

func (m pageMeter) Close() error { return errors.Join(m.Meter.Close(), m.usage.Close()) }

// Processes implements Proc with package node.
type Processes struct {
	*node.Proc
	Runtime *node.Runtime
}

// Check returns nil if the node's processes can be seen from here, and otherwise the reason.
func (p Processes) Check() error { return p.SeesNode(p.Runtime) }

// HookOutcomes implements Outcomes with package lib. A container lives as long as its cgroup has
// processes.
type HookOutcomes struct {
	All     *lib.Outcomes
	Runtime *node.Runtime
	swept   time.Time
}

// sweepEvery is the time between two sweeps of outcomes.
const sweepEvery = time.Minute

// Outcomes implements Outcomes. Now and then it removes the files of containers that are gone.
func (h *HookOutcomes) Outcomes() ([]lib.Outcome, error) {
	all, err := h.All.All()
	gone := func(id, cgroup string) bool {
		lives, err := h.Runtime.HasProcesses(node.Owner{ID: id, Cgroup: cgroup, V2: true})
		return err == nil && !lives || errors.Is(err, gpu.ErrNotFound)
	}
	if now := time.Now(); now.Sub(h.swept) >= sweepEvery {
		h.swept = now
		err = errors.Join(err, h.All.Sweep(now, func(id, cgroup string) bool { return cgroup == "" || gone(id, cgroup) }))
	}
	return slices.DeleteFunc(all, func(o lib.Outcome) bool {
		return o.Failed == "" && gone(o.Container, o.Cgroup)
	}), err
}

// ByCgroup implements Limiter: it limits a container by its cgroup.
type ByCgroup struct {
	// Driver is pkg/gpu/nvml's.
	Driver interface {
		SetMemoryLimit(ctx context.Context, u gpu.UUID, cgroup string, bytes uint64) error
		MemoryLimit(ctx context.Context, u gpu.UUID, cgroup string) (gpu.MemoryLimit, error)
	}
	Runtime *node.Runtime
}

// Able returns nil if the driver can limit the memory of containers on a GPU, as far as that can be
// told before there is a container. The error wraps gpu.ErrNotSupported or node.ErrNoDmem otherwise.
func (l ByCgroup) Able(ctx context.Context, u gpu.UUID) error {
	dir, err := l.Runtime.PodsCgroup()
	if err != nil {
		return err
	}
	// The kubelet's own cgroup usually has no limit. An old driver, or a card without limits, answers
	// differently.
	if _, err := l.Driver.MemoryLimit(ctx, u, dir); errors.Is(err, gpu.ErrNotSupported) {
		return err
	}
	return nil
}

// Others returns the driver's limits on a GPU for cgroups that belong to no container. An error of the
// driver ends the list.
func (l ByCgroup) Others(ctx context.Context, u gpu.UUID) (out []gpu.CgroupLimit, err error) {
	for _, c := range l.Runtime.OtherCgroups() {
		is, err := l.Driver.MemoryLimit(ctx, u, c.Dir)
		switch {
		case err == nil:
			out = append(out, gpu.CgroupLimit{Cgroup: c.Path, Limit: is, Pods: c.Pods})
		case errors.Is(err, gpu.ErrNotSupported):
			return nil, nil // an old driver, or a GPU in MIG mode
		case !errors.Is(err, gpu.ErrNotFound):
			return out, err
		}
	}
	return out, nil
}

// Setups reads how GPUs are set, with the driver's limits of cgroups.
type Setups struct {
	Driver interface {
		Setup(context.Context, gpu.UUID) (gpu.Setup, error)
		Surroundings(context.Context) (gpu.Surroundings, error)
		ResetComputeMode(context.Context, gpu.UUID) error
		SetComputeMode(context.Context, gpu.UUID, gpu.ComputeMode) error
	}
	Limits ByCgroup
}

// Setup returns what can be read, also beside an error.
func (s Setups) Setup(ctx context.Context, u gpu.UUID) (gpu.Setup, error) {
	is, err := s.Driver.Setup(ctx, u)
	if err != nil {
		return is, err
	}
	is.Limits, err = s.Limits.Others(ctx, u)
	return is, err
}

// Surroundings is the driver's.
func (s Setups) Surroundings(ctx context.Context) (gpu.Surroundings, error) {
	return s.Driver.Surroundings(ctx)
}

// ResetComputeMode is the driver's.
func (s Setups) ResetComputeMode(ctx context.Context, u gpu.UUID) error {
	return s.Driver.ResetComputeMode(ctx, u)
}

// SetComputeMode is the driver's.
func (s Setups) SetComputeMode(ctx context.Context, u gpu.UUID, to gpu.ComputeMode) error {
	return s.Driver.SetComputeMode(ctx, u, to)
}

// Limit sets the limit and reads it back.
func (l ByCgroup) Limit(ctx context.Context, u gpu.UUID, o node.Owner, bytes uint64) error {
	dir, err := l.Runtime.CgroupDir(o)
	if err != nil {
		return err
	}
	if err := l.Driver.SetMemoryLimit(ctx, u, dir, bytes); errors.Is(err, gpu.ErrNotFound) {
		return cmp.Or(l.Runtime.CheckDmem(o), err)
	} else if err != nil || bytes == lib.None {
		return err
	}
	limit, err := l.Driver.MemoryLimit(ctx, u, dir)
	if err == nil && limit.Bytes > bytes { // the driver may round down, but not up
		err = fmt.Errorf("limit the memory of cgroup %q on %s: %w: it reports a limit of %d bytes after %d were set",
			dir, u, gpu.ErrDriver, limit.Bytes, bytes)
	}
	return err
}
