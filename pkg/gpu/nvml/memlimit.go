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

// NoLimit is the limit of a cgroup that may have all of a GPU.
const NoLimit = ^uint64(0)

// memoryLimits are the driver's own limits, by cgroup.
type memoryLimits struct{ *session }

func (l *memoryLimits) SetMemoryLimit(ctx context.Context, u gpu.UUID, cgroup string, bytes uint64) error {
	what := fmt.Sprintf("limit the memory of cgroup %q on %s", cgroup, u)
	_, err := call(ctx, l.session, what, func() (none struct{}, _ error) {
		h, err := l.limited(nvmlDeviceSetMemoryLimits, u, cgroup)
		if err != nil {
			return none, err
		}
		// nvml.h: 0 and NoLimit together clear it.
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

// limited finds the GPU of a call about limits.
func (l *memoryLimits) limited(f *function, u gpu.UUID, cgroup string) (nvml.Device, error) {
	if !filepath.IsAbs(cgroup) || strings.ContainsRune(cgroup, 0) {
		return nil, fmt.Errorf("want an absolute path: %w", gpu.ErrInvalid)
	}
	if !l.has(f) {
		return nil, fmt.Errorf("%s has no %s; driver R615 is the first: %w", l.library, f.symbol, gpu.ErrNotSupported)
	}
	return l.handle(u)
}

// limitRefused knows what the operating system's refusal means here: the path does
// not open as a cgroup.
func limitRefused(f *function, ret nvml.Return) error {
	if ret == nvml.ERROR_OPERATING_SYSTEM {
		ret = nvml.ERROR_NOT_FOUND
	}
	return f.refused(ret)
}
