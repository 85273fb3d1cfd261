// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// throughDRA returns why a GPU cannot be offered through DRA as wanted. It is empty if it can,
// or if the GPU is not to be offered through DRA.
func throughDRA(w *Want, on *Node) string {
	switch {
	case w.API == ledger.DRA:
	case w.Mode == Dynamic:
		return "mode dynamic needs api dra, and this entry has api " + string(w.API) +
			": the scheduler must know which layouts exclude each other, and the device plugin cannot tell it"
	default:
		return ""
	}
	if on.NoDRA != "" {
		return "api dra is not available: " + on.NoDRA
	}
	var splits []mig.Name
	for _, c := range w.Geometry {
		if c.Profile.Compute != 0 {
			splits = append(splits, c.Profile)
		}
	}
	if len(splits) == 0 {
		return ""
	}
	return "api dra cannot offer parts of a GPU instance (" + join(splits) +
		"), since a ResourceSlice has no counters for them: name GPU instances, or use api device-plugin"
}

// spotThrough returns why a GPU's room cannot be offered to spot pods as wanted; empty if it can, or is not
// to be.
func spotThrough(w *Want) string {
	if !w.Spot.On || w.API != ledger.DRA {
		return ""
	}
	return "spot needs api device-plugin, and this entry has api dra: what spot pods may have changes with every claim, " +
		"and a ResourceSlice is not written for each claim"
}

// throughMPS returns why a GPU cannot be shared through MPS as wanted. It is empty if it can, or if it is
// not to be.
func throughMPS(w *Want, d *gpu.Device, on *Node) string {
	switch {
	case !w.Compute.MPS:
		return ""
	case on.NoMPS != "":
		return "compute mps is not available: " + on.NoMPS
	case d.ComputeCapability == "":
		return "" // a faulty GPU must not stop the others from being configured
	}
	if major, err := strconv.Atoi(strings.Split(d.ComputeCapability, ".")[0]); err == nil && major < leastForMPS {
		return fmt.Sprintf("compute mps needs a GPU of compute capability %d.0 or later, and this one has %s: "+
			"before, MPS limits no process to a part of the SMs; timeslice works", leastForMPS, d.ComputeCapability)
	}
	return ""
}

// leastForMPS is the major compute capability from which on MPS limits a client's SMs: Volta's (NVIDIA's
// documentation of MPS, "Volta MPS Execution Resource Provisioning").
const leastForMPS = 7

// offers maps each front-end to the resource names that a partition offers through it, and to
// the indexes of their GPUs. The zero value is empty.
type offers struct {
	through map[ledger.FrontEnd]map[string][]int
	// lines has, for each name through DRA, the line of the first entry that offers it.
	lines map[string]int
}

// add adds the resources of one GPU. line is that of its entry.
func (o *offers) add(w *Want, d *gpu.Device, line int) {
	if o.through == nil {
		o.through = map[ledger.FrontEnd]map[string][]int{ledger.DevicePlugin: {}, ledger.DRA: {}}
		o.lines = map[string]int{}
	}
	for _, name := range resources(w, d) {
		o.through[w.API][name] = append(o.through[w.API][name], d.Index)
		if _, told := o.lines[name]; !told && w.API == ledger.DRA {
			o.lines[name] = line
		}
	}
}

// check refuses a name that would be offered through both front-ends. If a node offers a name
// through the device plugin, the scheduler does not see the part through DRA.
func (o *offers) check(m *mistakes) {
	for _, name := range slices.Sorted(maps.Keys(o.lines)) {
		if plugin := o.through[ledger.DevicePlugin][name]; len(plugin) > 0 {
			m.add(o.lines[name], "%s would be offered through %s (%s) and through %s (%s), "+
				"and on one node the scheduler sees a name through one only: give all GPUs that offer %s the same api",
				name, ledger.DevicePlugin, gpus(plugin), ledger.DRA, gpus(o.through[ledger.DRA][name]), name)
		}
	}
}

// resources returns the short names of a GPU's resources that pods can request by the same name
// through both front-ends. Units of memory are not among them: through DRA, only a claim can
// request them.
func resources(w *Want, d *gpu.Device) (names []string) {
	var profiles []mig.Name
	switch w.Mode {
	case Keep, Off:
	case Whole:
		names = append(names, "gpu")
	case Shared:
		if w.Replicas > 0 {
			names = append(names, "gpu.shared")
		}
	case MIG:
		profiles = profilesIn(w, d)
	case Dynamic:
		names, profiles = append(names, "gpu"), profilesIn(w, d)
	}
	for _, p := range profiles {
		names = append(names, p.Resource())
	}
	return names
}

// profilesIn returns the profiles that a GPU in MIG mode has or can have.
func profilesIn(w *Want, d *gpu.Device) (profiles []mig.Name) {
	switch {
	case !w.OnDemand:
		return profilesOf(w.Geometry)
	case len(w.Profiles) > 0:
		return w.Profiles
	}
	for i := range d.MIG.Profiles {
		if name, err := mig.Parse(d.MIG.Profiles[i].Name); err == nil {
			profiles = append(profiles, name)
		}
	}
	return profiles
}
