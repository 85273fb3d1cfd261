// SPDX-License-Identifier: Apache-2.0

package label

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/pkg/mig"
)

// NVIDIA returns the labels that GPU Feature Discovery v0.19.3 writes for the node. doc.go lists
// where they differ and why. It returns nil if no GPU is known, like Own.
func NVIDIA(in Node) map[string]string {
	gpus := in.gpus()
	if len(gpus) == 0 {
		return nil
	}
	out := labels{}
	machine := "unknown"
	if in.Inventory.Machine != "" {
		machine = value(in.Inventory.Machine)
	}
	out["gpu.machine"] = machine
	out.versions(in.Inventory.Driver, in.Inventory.CUDA)
	out["mig.capable"] = strconv.FormatBool(slices.ContainsFunc(gpus, func(c card) bool { return c.MIG.Capable }))
	through := slices.ContainsFunc(in.Wanted, func(w config.Want) bool { return w.Compute.MPS })
	out["mps.capable"] = strconv.FormatBool(through)
	out["gpu.mode"] = class(gpus)
	if name := clique(gpus); name != "" {
		out["gpu.clique"] = name
	}
	out.whole(gpus)
	out.instances(gpus)
	out.virtual(gpus)

	full := make(map[string]string, len(out))
	for name, v := range out {
		full["nvidia.com/"+name] = v
	}
	return full
}

// labels are labels, by the part of the key after "nvidia.com/".
type labels map[string]string

// versions writes each version under its present name and its older name.
func (l labels) versions(driver, cuda string) {
	if parts := strings.Split(driver, "."); len(parts) == 2 || len(parts) == 3 {
		parts = append(parts, "")
		for i, name := range []string{"major", "minor", "revision"} {
			l["cuda.driver-version."+name] = value(parts[i])
		}
		l["cuda.driver-version.full"] = value(driver)
		for i, name := range []string{"major", "minor", "rev"} {
			l["cuda.driver."+name] = value(parts[i])
		}
	}
	if major, minor, ok := strings.Cut(cuda, "."); ok {
		for _, prefix := range []string{"cuda.runtime-version.", "cuda.runtime."} {
			l[prefix+"major"], l[prefix+"minor"] = value(major), value(minor)
		}
		l["cuda.runtime-version.full"] = value(cuda)
	}
}

// whole describes the node's GPUs as if all were of one model. If there are several models, it
// takes the most frequent one among the GPUs that are not divided into MIG instances.
func (l labels) whole(gpus []card) {
	pool := slices.DeleteFunc(slices.Clone(gpus), card.mig)
	cut := len(pool) == 0
	if cut {
		pool = gpus
	}
	of := most(pool)
	count := 0
	for _, c := range gpus {
		if c.Model == of.Model {
			count++
		}
	}
	l["gpu.count"] = strconv.Itoa(count)
	if of.Memory > 0 {
		l["gpu.memory"] = number(uint64(of.Memory))
	}
	replicas, suffix, strategy := 1, "", "none"
	switch n := copies(pool, of.Model); {
	case cut:
		replicas = 0
	case n > 1:
		replicas, suffix, strategy = n, "-SHARED", "time-slicing"
		if turns := func(c card) bool { return c.Model == of.Model && !c.want.Compute.MPS }; !slices.ContainsFunc(pool, turns) {
			strategy = "mps"
		}
	}
	l["gpu.product"] = product(of.Model, suffix)
	l["gpu.replicas"], l["gpu.sharing-strategy"] = strconv.Itoa(replicas), strategy
	if major, minor, ok := strings.Cut(of.ComputeCapability, "."); ok {
		l["gpu.compute.major"], l["gpu.compute.minor"] = value(major), value(minor)
		l["gpu.family"] = Family(major, minor)
	}
}

// copies returns the number of replicas of each GPU of a model. It returns 1 if they differ, since
// GPU Feature Discovery cannot express that.
func copies(gpus []card, model string) int {
	n := 0
	for _, c := range gpus {
		if c.Model != model {
			continue
		}
		r := 1
		if c.want.Mode == config.Shared {
			r = max(r, c.want.Replicas)
		}
		if n != 0 && n != r {
			return 1
		}
		n = r
	}
	return n
}

// instances describes the wanted MIG instances, each profile once. A GPU whose instances are made
// on demand has none to count, but its resources have the names of profiles.
func (l labels) instances(gpus []card) {
	count := map[mig.Name]int{}
	for _, c := range gpus {
		if !c.mig() {
			continue
		}
		l["mig.strategy"] = "mixed"
		for _, g := range c.want.Geometry {
			if g.N > 0 && count[g.Profile] == 0 {
				l.profile(c, g.Profile)
			}
			count[g.Profile] += g.N
		}
	}
	for _, p := range slices.SortedFunc(maps.Keys(count), mig.Compare) {
		if count[p] > 0 {
			l[p.Resource()+".count"] = strconv.Itoa(count[p])
		}
	}
}

// profile describes the instances of a profile on a GPU.
func (l labels) profile(c card, p mig.Name) {
	at := p.Resource() + "."
	l[at+"product"] = product(c.Model, "-MIG-"+strings.TrimPrefix(p.Resource(), "mig-"))
	l[at+"replicas"], l[at+"sharing-strategy"] = "1", "none"
	l[at+"slices.gi"], l[at+"slices.ci"] = strconv.Itoa(p.Slices), strconv.Itoa(p.Slices)
	if p.Compute > 0 {
		l[at+"slices.ci"] = strconv.Itoa(p.Compute)
	}
	for _, have := range c.MIG.Profiles {
		if have.Name != p.GPUInstance().String() {
			continue
		}
		sms := have.SMs
		if p.Compute > 0 && p.Slices > 0 { // a compute instance has its share
			sms = sms * p.Compute / p.Slices
		}
		if have.Memory > 0 {
			l[at+"memory"] = number(uint64(have.Memory))
		}
		if sms > 0 {
			l[at+"multiprocessors"] = strconv.Itoa(sms)
		}
		if e := have.Engines; e != nil {
			for name, n := range map[string]int{
				"copy": e.Copy, "decoder": e.Decode, "encoder": e.Encode, "jpeg": e.JPEG, "ofa": e.OFA,
			} {
				l[at+"engines."+name] = strconv.Itoa(n)
			}
		}
		return
	}
}

// virtual writes whether the node is a virtual machine with vGPUs.
func (l labels) virtual(gpus []card) {
	l["vgpu.present"] = "false"
	for _, c := range gpus {
		if c.VGPU == nil {
			continue
		}
		l["vgpu.present"] = "true"
		if v := value(c.VGPU.HostDriver); v != "" {
			l["vgpu.host-driver-version"], l["vgpu.host-driver-branch"] = v, value(c.VGPU.HostBranch)
		}
	}
}

// class returns the mode that GPU Feature Discovery derives from the PCI classes of the GPUs:
// whether they have display outputs.
func class(gpus []card) string {
	for _, c := range gpus {
		if c.PCIClass != gpus[0].PCIClass {
			return "unknown"
		}
	}
	switch gpus[0].PCIClass {
	case "0x030000":
		return "graphics"
	case "0x030200":
		return "compute"
	}
	return "unknown"
}

// Family returns the architecture of a compute capability, by NVIDIA's own table.
func Family(major, minor string) string {
	switch major {
	case "1":
		return "tesla"
	case "2":
		return "fermi"
	case "3":
		return "kepler"
	case "5":
		return "maxwell"
	case "6":
		return "pascal"
	case "7":
		if minor < "5" {
			return "volta"
		}
		return "turing"
	case "8":
		if minor < "9" {
			return "ampere"
		}
		return "ada-lovelace"
	case "9":
		return "hopper"
	case "10", "12":
		return "blackwell"
	}
	return "undefined"
}

// product returns a model's name with a suffix. It shortens the name if both together are too long.
func product(model, suffix string) string {
	return trim(trim(clean(model), maxValue-len(suffix))+suffix, maxValue)
}
