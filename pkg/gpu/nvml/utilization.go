// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/pkg/gpu"
)

func (r *readings) Utilization(
	ctx context.Context, since time.Time, gpus ...gpu.UUID,
) (map[gpu.UUID]map[int]float64, error) {
	return call(ctx, r.session, "read how busy processes keep GPUs", func() (map[gpu.UUID]map[int]float64, error) {
		out, errs := map[gpu.UUID]map[int]float64{}, []error(nil)
		if !r.has(nvmlDeviceGetUtilization) {
			return out, nil
		}
		since := uint64(max(0, since.UnixMicro()))
		for _, u := range gpus {
			if ctx.Err() != nil {
				break
			}
			h, err := r.handle(u)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			samples, ret := h.GetProcessUtilization(since)
			if ret == nvml.ERROR_NOT_FOUND { // no process was busy
				ret = nvml.SUCCESS
			}
			told, err := nvmlDeviceGetUtilization.told(string(u), ret)
			if told {
				out[u] = busy(samples, since)
			}
			errs = append(errs, err)
		}
		return out, errors.Join(errs...)
	})
}

// busy returns the mean of each process's samples, by PID. It ignores samples before since and
// those above 100 %, which drivers leave in the list.
func busy(samples []nvml.ProcessUtilizationSample, since uint64) map[int]float64 {
	out, n := map[int]float64{}, map[int]int{}
	for _, s := range samples {
		if s.Pid == 0 || s.TimeStamp < since || s.SmUtil > 100 {
			continue
		}
		out[int(s.Pid)] += float64(s.SmUtil)
		n[int(s.Pid)]++
	}
	for pid := range out {
		out[pid] /= float64(n[pid])
	}
	return out
}
