// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"maps"
	"slices"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

// entryDevices is what one entry offers on a node: the number of devices, the indexes of their
// GPUs, and the GPUs among them that it offers in units of memory.
type entryDevices struct {
	devices int
	indices []int
	inUnits []*gpu.Device
}

// add adds one GPU; m may be nil.
func (m *entryDevices) add(w *Want, d *gpu.Device, unit gpu.MiB) *entryDevices {
	if m == nil {
		m = &entryDevices{}
	}
	m.devices += devicesOf(w, d, unit)
	m.indices = append(m.indices, d.Index)
	if w.Mode == Shared && w.Replicas == 0 && w.API != ledger.DRA {
		m.inUnits = append(m.inUnits, d)
	}
	return m
}

// devicesOf returns how many devices of one GPU are listed to the kubelet.
func devicesOf(w *Want, d *gpu.Device, unit gpu.MiB) (n int) {
	switch {
	case w.API == ledger.DRA: // nothing is listed to the kubelet
	case w.Mode == Whole:
		return 1
	case w.Mode == Shared && w.Replicas > 0:
		return w.Replicas
	case w.Mode == Shared:
		return timeslice.Units(d, unit)
	case w.Mode == MIG && w.OnDemand:
		for _, p := range d.MIG.Profiles {
			name, err := mig.Parse(p.Name)
			if err == nil && (len(w.Profiles) == 0 || slices.Contains(w.Profiles, name)) {
				n += len(p.Placements)
			}
		}
	case w.Mode == MIG:
		for _, c := range w.Geometry {
			n += c.N
		}
	}
	return n
}

// checkSum refuses a partition with more devices than a node may have: the kubelet does not
// accept such a list, and the agent would need more memory than it may have. The mistake is on
// the line of the entry with the most devices.
func checkSum(m *mistakes, p *partition, by map[int]*entryDevices, unit gpu.MiB) {
	total, most := 0, -1
	var inUnits []*gpu.Device
	units := 0
	for _, e := range slices.Sorted(maps.Keys(by)) {
		total += by[e].devices
		if most < 0 || by[e].devices > by[most].devices {
			most = e
		}
		for _, d := range by[e].inUnits {
			units += timeslice.Units(d, unit)
		}
		inUnits = append(inUnits, by[e].inUnits...)
	}
	if total <= timeslice.MaxDevices {
		return
	}
	what, advice := "", "ask for fewer replicas"
	switch w := &p.entries[most].want; {
	case w.Replicas > 0:
		what = fmt.Sprintf("%d replicas each", w.Replicas)
	case w.Mode == Shared:
		what = fmt.Sprintf("units of %d MiB", unit)
		if room := timeslice.MaxDevices - (total - units); room > 0 {
			advice = fmt.Sprintf("set --memory-unit to %d MiB or more", timeslice.LeastUnit(inUnits, room))
		}
	default:
		what = string(w.Mode)
	}
	m.add(p.entries[most].line,
		"partition %s gives this node %d devices, %d of them by this entry (%s: %s), and a node may have %d: %s",
		quote(p.name), total, by[most].devices, gpus(by[most].indices), what, timeslice.MaxDevices, advice)
}
