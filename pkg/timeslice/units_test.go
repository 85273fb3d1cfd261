// SPDX-License-Identifier: Apache-2.0

package timeslice

import (
	"errors"
	"strings"
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

func TestCheckUnit(t *testing.T) {
	eight := make([]gpu.Device, 8)
	for i := range eight {
		eight[i].Memory = 81559
	}
	for _, c := range []struct {
		name string
		unit gpu.MiB
		gpus []gpu.Device
		want string // part of the error; empty for none
	}{
		{"GiB", 1024, eight, ""},
		{"256 MiB", 256, eight, ""},
		{"one 80 GB GPU in MiB", 1, eight[:1], "use a unit of 2 MiB or more"},
		{"eight in MiB", 1, eight, "use a unit of 16 MiB or more"},
		{"what it proposes passes", 16, eight, ""},
		{"just below", 8, eight, "makes 81552 devices of this node's 8 GPUs"},
		{"exactly as many as there may be", 1, []gpu.Device{{Memory: MaxDevices}}, ""},
		{"one more", 1, []gpu.Device{{Memory: MaxDevices + 1}}, "60001 devices"},
		{"zero", 0, eight, "at least 1 MiB"},
		{"no GPU", 1, nil, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := CheckUnit(c.unit, c.gpus)
			switch {
			case c.want == "" && err != nil:
				t.Errorf("refused: %v", err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) || !errors.Is(err, gpu.ErrInvalid)):
				t.Errorf("error %v, want one with %q that is gpu.ErrInvalid", err, c.want)
			}
		})
	}
}
