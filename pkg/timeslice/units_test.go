// SPDX-License-Identifier: Apache-2.0

package timeslice

import (
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

func TestUnits(t *testing.T) {
	for _, c := range []struct {
		name             string
		memory, reserved gpu.MiB
		unit             gpu.MiB
		want             int
	}{
		{"H100-80GB in GiB", 81559, 0, 1024, 79},
		{"reserved memory is nobody's", 81920, 590, 1024, 79},
		{"exact", 8192, 0, 1024, 8},
		{"one MiB short", 8191, 0, 1024, 7},
		{"smaller than a unit", 512, 0, 1024, 0},
		{"more reserved than there is", 512, 1024, 1, 0},
		{"no unit", 8192, 0, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := gpu.Device{Memory: c.memory, Reserved: c.reserved}
			if got := Units(&d, c.unit); got != c.want {
				t.Errorf("Units(%d-%d MiB, %d) = %d, want %d", c.memory, c.reserved, c.unit, got, c.want)
			}
		})
	}
}

func TestLeastUnit(t *testing.T) {
	var eight []*gpu.Device
	for range 8 {
		eight = append(eight, &gpu.Device{Memory: 81559})
	}
	for _, c := range []struct {
		name string
		gpus []*gpu.Device
		most int
		want gpu.MiB
	}{
		{"one 80 GB GPU", eight[:1], MaxDevices, 4},
		{"eight", eight, MaxDevices, 32},
		{"exactly as many", []*gpu.Device{{Memory: MaxDevices}}, MaxDevices, 1},
		{"one more", []*gpu.Device{{Memory: MaxDevices + 1}}, MaxDevices, 2},
		{"no room at all", eight, 0, 1 << 17},
		{"no GPU", nil, 0, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := LeastUnit(c.gpus, c.most); got != c.want {
				t.Errorf("%d MiB, want %d", got, c.want)
			}
		})
	}
}
