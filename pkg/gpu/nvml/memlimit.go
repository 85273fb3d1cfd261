// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/pkg/gpu"
)

// NoLimit is the limit of a cgroup that may use all of a GPU's memory.
const NoLimit = ^uint64(0)

// memoryLimits sets and reads the driver's own memory limits, for cgroups.
type memoryLimits struct{ *session }

func (l *memoryLimits) SetMemoryLimit(ctx context.Context, u gpu.UUID, cgroup string, bytes uint64) error {
	what := fmt.Sprintf("limit the memory of cgroup %q on %s", cgroup, u)
	_, err := call(ctx, l.session, what, func() (none struct{}, _ error) {
		h, err := l.limited(nvmlDeviceSetMemoryLimits, u, cgroup)
		if err != nil {
			return none, err
		}
		// By nvml.h, a soft limit of 0 with NoLimit removes the limit.
		return none, limitRefused(nvmlDeviceSetMemoryLimits, h.SetMemoryLimits_v1(cgroup, 0, bytes))
	})
	return err
}

func (l *memoryLimits) MemoryLimit(ctx context.Context, u gpu.UUID, cgroup string) (gpu.MemoryLimit, error) {
	what := fmt.Sprintf("read the memory limit of cgroup %q on %s", cgroup, u)
	return call(ctx, l.session, what, func() (gpu.MemoryLimit, error) {
		h, err := l.limited(nvmlDeviceGetMemoryLimits, u, cgroup)
		if err != nil {
			return gpu.MemoryLimit{}, err
		}
		m, ret := h.GetMemoryLimits_v1(cgroup)
		limit := gpu.MemoryLimit{Bytes: m.HardLimit, Used: m.CurrentUsed, Guaranteed: m.SoftLimit}
		return limit, limitRefused(nvmlDeviceGetMemoryLimits, ret)
	})
}

// limited returns the GPU's handle for a call about limits. It fails if the cgroup's path is not
// absolute or the driver lacks the function.
func (l *memoryLimits) limited(f *function, u gpu.UUID, cgroup string) (nvml.Device, error) {
	if !filepath.IsAbs(cgroup) || strings.ContainsRune(cgroup, 0) {
		return nil, fmt.Errorf("want an absolute path: %w", gpu.ErrInvalid)
	}
	if !l.has(f) {
		return nil, fmt.Errorf("%s has no %s; driver R615 is the first: %w", l.library, f.symbol, gpu.ErrNotSupported)
	}
	return l.handle(u)
}

// limitRefused is function.refused, but an error of the operating system becomes gpu.ErrNotFound:
// it means that the path cannot be opened as a cgroup.
func limitRefused(f *function, ret nvml.Return) error {
	if ret == nvml.ERROR_OPERATING_SYSTEM {
		ret = nvml.ERROR_NOT_FOUND
	}
	return f.refused(ret)
}
