// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/tests/hardware/ask"
)

// mostProfiles is beyond the numbers that NVML has for profiles of GPU instances.
const mostProfiles = 32

// mig are about MIG, without a change of its mode and of what stands.
func (k *kit) mig() []ask.Question {
	return []ask.Question{
		{
			Name: "mig-profiles", Asks: "How many MIG profiles does the driver tell of?", Limit: 20 * time.Second, Within: -1,
			Code: []string{"pkg/gpu/nvml/mig.go", "tests/emulator/model.go"},
			Ask: k.on(func(_ context.Context, room *ask.Room, c *card) (ask.Answer, error) {
				now, next, ret := c.GetMigMode()
				room.Note("nvmlDeviceGetMigMode", int(ret), []int{now, next})
				known, same := 0, 0
				for number := range mostProfiles {
					v1, ret1 := c.GetGpuInstanceProfileInfo(number)
					if ret1 == nvml.ERROR_INVALID_ARGUMENT || ret1 == nvml.ERROR_NOT_SUPPORTED {
						continue
					}
					room.Note("nvmlDeviceGetGpuInstanceProfileInfo", int(ret1), map[string]any{"number": number, "info": v1})
					v2, ret2 := c.GetGpuInstanceProfileInfoV(number).V2()
					room.Note("nvmlDeviceGetGpuInstanceProfileInfoV, form 2", int(ret2), map[string]any{"number": number, "name": text(v2.Name[:]), "info": v2})
					v3, ret3 := c.GetGpuInstanceProfileInfoV(number).V3()
					room.Note("nvmlDeviceGetGpuInstanceProfileInfoV, form 3", int(ret3), map[string]any{"number": number, "name": text(v3.Name[:]), "info": v3})
					places, ret := c.GetGpuInstancePossiblePlacements(&v1)
					room.Note("nvmlDeviceGetGpuInstancePossiblePlacements_v2", int(ret), map[string]any{"number": number, "placements": places})
					known++
					if text(v2.Name[:]) == text(v3.Name[:]) {
						same++
					}
				}
				return ask.Count(float64(known), "profiles", "MIG mode %d, pending %d; forms 2 and 3 give %d of them the same name", now, next, same), nil
			}),
		},
		{
			Name: "mig-refused", Asks: "Is an instance refused where MIG mode is off?", Limit: 20 * time.Second,
			Code: []string{"pkg/gpu/nvml/mig.go", "tests/emulator/mig.go"},
			Ask: k.on(func(_ context.Context, room *ask.Room, c *card) (ask.Answer, error) {
				now, _, ret := c.GetMigMode()
				room.Note("nvmlDeviceGetMigMode", int(ret), now)
				if ret != nvml.SUCCESS || now != nvml.DEVICE_MIG_DISABLE {
					return ask.CouldNotTell("MIG mode is %d: %s", now, nvml.ErrorString(ret)), nil
				}
				info, ret := c.GetGpuInstanceProfileInfo(0)
				room.Note("nvmlDeviceGetGpuInstanceProfileInfo", int(ret), info)
				left, ret := c.GetGpuInstanceRemainingCapacity(&info)
				room.Note("nvmlDeviceGetGpuInstanceRemainingCapacity", int(ret), left)
				standing, ret := c.GetGpuInstances(&info)
				room.Note("nvmlDeviceGetGpuInstances", int(ret), len(standing))
				most, ret := c.GetMaxMigDeviceCount()
				room.Note("nvmlDeviceGetMaxMigDeviceCount", int(ret), most)
				_, made := c.CreateGpuInstance(&info)
				room.Note("nvmlDeviceCreateGpuInstance", int(made), nil)
				return ask.Tell(made != nvml.SUCCESS, "%s", nvml.ErrorString(made)), nil
			}),
		},
	}
}

// text is what stands in a field of C up to its end.
func text[T int8 | uint8](field []T) string {
	var out []byte
	for _, c := range field {
		if c == 0 {
			break
		}
		out = append(out, byte(c))
	}
	return string(out)
}
