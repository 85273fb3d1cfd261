// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"strings"
	"testing"
	"testing/synctest"
)

// A GPU that has no memory of its own (GB10) is offered whole, and nothing is said of its
// memory. A partition that would share it is refused with that reason, and changes nothing.
func TestGPUWithoutMemoryOfItsOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := newOutside(2)
		for i := range o.inv.GPUs {
			o.inv.GPUs[i].Model, o.inv.GPUs[i].Memory, o.inv.GPUs[i].Reserved = "NVIDIA GB10", 0, 0
		}
		b := start(t, o, t.TempDir(), allWhole)
		defer b.end()
		b.want("applied", "", "0 1")
		wantHistory(t, o, map[string]string{"example.com/gpu.count": "2", "example.com/gpu.memory": "-", "nvidia.com/gpu.memory": "-"})
		for _, g := range b.Status().GPUs {
			if g.Health != "healthy" || g.MemoryMiB != 0 {
				t.Errorf("GPU %d is %s, with %d MiB", g.Index, g.Health, g.MemoryMiB)
			}
		}
		for _, mode := range []string{"mode: shared", "mode: shared, replicas: 2", "mode: dynamic, api: dra"} {
			b.SetFile("p.yaml", []byte("version: v1\npartitions:\n  default:\n    - {devices: all, "+mode+"}\n"))
			b.want("invalid", "", "0 1")
			if m := b.message(); !strings.Contains(m, "GPUs 0 and 1: the driver tells no memory") || !strings.Contains(m, "whole and off work") {
				t.Errorf("%s: message %q", mode, m)
			}
		}
	})
}
