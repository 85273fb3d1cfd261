// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"

	"example.com/gpu-agent/pkg/gpu"
)

// without is a library that lacks some symbols. Whatever is not mocked ends the
// test, as a call of a missing symbol would end the process.
type without []string

func (w without) LookupSymbol(name string) error {
	for _, missing := range w {
		if name == missing {
			return errors.New("undefined symbol: " + name)
		}
	}
	return nil
}

func TestMemoryLimitWithoutTheSymbol(t *testing.T) {
	lib := &mock.Interface{ExtensionsFunc: func() nvml.ExtendedInterface {
		return without{"nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1"}
	}}
	stopped, stop := context.WithCancel(t.Context())
	defer stop()
	d := newComponents(&session{library: "libnvidia-ml.so.1", lib: lib, locks: newLocks(), stopped: stopped})
	if err := d.SetMemoryLimit(t.Context(), "GPU-0", "/sys/fs/cgroup/a", 1<<30); !errors.Is(err, gpu.ErrNotSupported) || !strings.Contains(err.Error(), "R615") {
		t.Errorf("set: %v, want ErrNotSupported that names the first driver", err)
	}
	if _, err := d.MemoryLimit(t.Context(), "GPU-0", "/sys/fs/cgroup/a"); !errors.Is(err, gpu.ErrNotSupported) {
		t.Errorf("get: %v, want ErrNotSupported", err)
	}
}

// TestMemoryLimitArguments: how the call is made, which the header alone says.
func TestMemoryLimitArguments(t *testing.T) {
	var path string
	var soft, hard uint64
	answer := nvml.SUCCESS
	card := &mock.Device{
		SetMemoryLimits_v1Func: func(p string, s, h uint64) nvml.Return {
			path, soft, hard = p, s, h
			return answer
		},
		GetMemoryLimits_v1Func: func(string) (nvml.MemoryLimits_v1, nvml.Return) {
			return nvml.MemoryLimits_v1{SoftLimit: 1, HardLimit: 2, CurrentUsed: 3}, answer
		},
	}
	lib := &mock.Interface{
		ExtensionsFunc:            func() nvml.ExtendedInterface { return without{} },
		DeviceGetHandleByUUIDFunc: func(string) (nvml.Device, nvml.Return) { return card, nvml.SUCCESS },
	}
	d := newComponents(&session{lib: lib, locks: newLocks(), stopped: t.Context()})
	const cgroup = "/sys/fs/cgroup/kubepods.slice/a.scope"
	for _, c := range []struct{ bytes, soft, hard uint64 }{{1 << 30, 0, 1 << 30}, {NoLimit, 0, NoLimit}} {
		if err := d.SetMemoryLimit(t.Context(), "GPU-0", cgroup, c.bytes); err != nil || path != cgroup || soft != c.soft || hard != c.hard {
			t.Errorf("%d: soft %d, hard %d of %s, %v", c.bytes, soft, hard, path, err)
		}
	}
	if m, err := d.MemoryLimit(t.Context(), "GPU-0", cgroup); err != nil || m != (gpu.MemoryLimit{Bytes: 2, Used: 3, Guaranteed: 1}) {
		t.Errorf("%+v, %v", m, err)
	}
	for ret, want := range map[nvml.Return]error{
		nvml.ERROR_OPERATING_SYSTEM: gpu.ErrNotFound,
		nvml.ERROR_NOT_FOUND:        gpu.ErrNotFound,
		nvml.ERROR_NOT_SUPPORTED:    gpu.ErrNotSupported,
		nvml.ERROR_INVALID_ARGUMENT: gpu.ErrInvalid,
		nvml.ERROR_NO_PERMISSION:    gpu.ErrNoPermission,
	} {
		answer = ret
		if err := d.SetMemoryLimit(t.Context(), "GPU-0", cgroup, 1); !errors.Is(err, want) {
			t.Errorf("set, %d: %v, want %v", ret, err, want)
		}
		if _, err := d.MemoryLimit(t.Context(), "GPU-0", cgroup); !errors.Is(err, want) {
			t.Errorf("get, %d: %v, want %v", ret, err, want)
		}
	}
	for _, bad := range []string{"", "a", "/a\x00b"} {
		path = ""
		if err := d.SetMemoryLimit(t.Context(), "GPU-0", bad, 1); !errors.Is(err, gpu.ErrInvalid) || path != "" {
			t.Errorf("cgroup %q: %v, and the driver was asked of %q", bad, err, path)
		}
	}
}
