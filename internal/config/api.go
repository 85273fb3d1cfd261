// SPDX-License-Identifier: Apache-2.0

package config

import (
	"maps"
	"slices"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// throughDRA is why a GPU cannot be offered as wanted through DRA, empty where it can or
// is to be offered otherwise.
func throughDRA(w *Want, on *Node) string {
	switch {
	case w.API == ledger.DRA:
	case w.Mode == Dynamic:
		return "mode dynamic needs api dra, and this entry has api " + string(w.API) +
			": what a GPU can be at one time is told to the scheduler, and the device plugin has no way to tell it"
	default:
		return ""
	}
	if on.NoDRA != "" {
		return "api dra cannot be had: " + on.NoDRA
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
	return "api dra cannot express parts of a GPU instance (" + join(splits) +
		"), which the counters of a ResourceSlice do not know: name GPU instances, or use api device-plugin"
}

// offers is which resource names a partition offers through which front-end, on which
// GPUs. Its zero value is of nothing.
type offers struct {
	through map[ledger.FrontEnd]map[string][]int
	// lines are those of the entries that offer a name through DRA.
	lines map[string]int
}

// add notes the resources of one GPU, which its entry has on a line.
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

// check refuses a name that would be offered through both front-ends: of a node that has
// some of it through the device plugin the scheduler does not look at the rest.
func (o *offers) check(m *mistakes) {
	for _, name := range slices.Sorted(maps.Keys(o.lines)) {
		if plugin := o.through[ledger.DevicePlugin][name]; len(plugin) > 0 {
			m.add(o.lines[name], "%s would be offered through %s (%s) and through %s (%s), "+
				"and of one node the scheduler sees a name only through one: give all GPUs that offer %s the same api",
				name, ledger.DevicePlugin, gpus(plugin), ledger.DRA, gpus(o.through[ledger.DRA][name]), name)
		}
	}
}

// resources are the short names of those resources of a GPU that pods can ask for in the
// same words through either front-end. Units of memory are not among them: through DRA
// they are had by a claim alone.
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

// profilesIn are the profiles that a GPU in MIG mode has something of, or can.
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
