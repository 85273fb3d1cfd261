// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"example.com/gpu-agent/pkg/gpu"
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
			if m := b.message(); !strings.Contains(m, "GPUs 0 and 1: the driver reports no memory") || !strings.Contains(m, "whole and off work") {
				t.Errorf("%s: message %q", mode, m)
			}
		}
	})
}

// The profiles of a Thor, whose names say 0 GB, are offered as others are. A profile that is
// not understood is said on the node; where none is, the partition is refused.
func TestProfilesWithoutMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := migMachine(1, 0)
		at := func(start, size int) []gpu.Placement { return []gpu.Placement{{Start: start, Size: size}} }
		o.inv.GPUs[0].Memory, o.inv.GPUs[0].Reserved = 0, 0
		o.inv.GPUs[0].MIG.Profiles = []gpu.Profile{
			{Name: "1g.0gb", ID: 80, Slices: 1, Max: 1, Placements: at(2, 1)},
			{Name: "2g.0gb+gfx", ID: 83, Slices: 2, Max: 1, Placements: at(0, 2)},
			{Name: "3g.0gb", ID: 0, Slices: 3, Max: 1, Placements: at(0, 3)},
			{Name: "all of it", ID: 1, Slices: 3, Max: 1, Placements: at(0, 3)},
		}
		b := start(t, o, t.TempDir(), migPartition(demand))
		defer b.end()
		synctest.Wait()
		var offered []string
		for _, r := range b.front.Offer().Resources {
			for _, d := range r.Devices {
				offered = append(offered, strings.TrimPrefix(r.Name, "example.com/")+" "+strings.TrimPrefix(d.ID, string(uuid(0))+"::"))
			}
		}
		slices.Sort(offered)
		want := []string{"mig-1g.0gb 1g.0gb@2", "mig-2g.0gb.gfx 2g.0gb+gfx@0", "mig-3g.0gb 3g.0gb@0"}
		if !slices.Equal(offered, want) || b.state() != "applied" {
			t.Errorf("%s: it offers %q, want %q", b.state(), offered, want)
		}
		said := ""
		for _, c := range b.Status().Conditions {
			if c.Reason == "ProfileUnknown" {
				said += c.Message
			}
		}
		if !strings.Contains(said, `"all of it"`) || strings.Contains(said, ".0gb") {
			t.Errorf("of the profile that it does not understand the node says %q", said)
		}
	})
}
