// SPDX-License-Identifier: Apache-2.0

package lib_test

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/tests/emulator"
)

// BenchmarkCall is what a driver call costs: one that is kept and one that
// asks the daemon.
func BenchmarkCall(b *testing.B) {
	n := start(b, emulator.Spec{Count: 2})
	api := n.open(b)
	d, r := api.DeviceGetHandleByIndex(0)
	if r != nvml.SUCCESS {
		b.Fatal(r)
	}
	b.Run("kept", func(b *testing.B) {
		for b.Loop() {
			if _, r := d.GetNvLinkState(3); r != nvml.SUCCESS {
				b.Fatal(r)
			}
		}
	})
	b.Run("asked", func(b *testing.B) {
		for b.Loop() {
			if _, r := d.GetMemoryInfo(); r != nvml.SUCCESS {
				b.Fatal(r)
			}
		}
	})
}
