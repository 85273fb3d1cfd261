// SPDX-License-Identifier: Apache-2.0

package crowd

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"

	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/hollow"
)

// request is what a pod asks for: a whole GPU, so many GiB of one, or MIG instances, all
// of one GPU.
type request struct {
	name     string
	whole    bool
	gib      int
	profiles []string
	// compute is the share of the SMs that its claim names, in percent; 0 for what follows from its memory.
	compute int
	// group is the PodGroup of its pod; empty for none.
	group string
}

func (r *request) String() string {
	switch {
	case r.whole:
		return "a whole GPU"
	case r.gib > 0:
		return fmt.Sprintf("%d GiB", r.gib)
	default:
		return strings.Join(r.profiles, " and ")
	}
}

// profiles are those of the GPUs, by name, as the driver was recorded to tell them.
var profiles = sync.OnceValue(func() map[string]emulator.MIGProfile {
	out, err := emulator.Profiles(model)
	if err != nil {
		panic(err) // it is part of this module
	}
	return out
})

// slots is how many memory slices a GPU has.
const slots = 8

// size is what part of a GPU a request is.
func (r *request) size() float64 {
	switch {
	case r.whole:
		return 1
	case r.gib > 0:
		return float64(r.gib) / units
	}
	sum := 0.0
	for _, p := range r.profiles {
		sum += float64(profiles()[p].Size) / slots
	}
	return sum
}

// draw draws a request: a tenth whole GPUs, three tenths memory, the rest instances, one
// in six of those a pair.
func draw(rng *rand.Rand, name string) *request {
	names := slices.Sorted(maps.Keys(profiles()))
	switch n := rng.IntN(10); {
	case n < 1:
		return &request{name: name, whole: true}
	case n < 4:
		return &request{name: name, gib: 4 + rng.IntN(29)}
	case n < 5:
		small := []string{"1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb"}
		return &request{name: name, profiles: []string{small[rng.IntN(len(small))], small[rng.IntN(len(small))]}}
	default:
		return &request{name: name, profiles: []string{names[rng.IntN(len(names))]}}
	}
}

// claim is the ResourceClaim by which a pod asks for it.
func (r *request) claim() map[string]any {
	type object = map[string]any
	ask := func(name, class string) object {
		return object{"name": name, "exactly": object{"deviceClassName": class + ".example.com"}}
	}
	var devices object
	switch {
	case r.whole:
		devices = object{"requests": []any{ask("gpu", "gpu")}}
	case r.gib > 0:
		of := ask("gpu", "gpu-memory")
		amounts := object{"memory": fmt.Sprintf("%dGi", r.gib)}
		if r.compute > 0 {
			amounts["compute"] = fmt.Sprint(r.compute)
		}
		of["exactly"].(object)["capacity"] = object{"requests": amounts}
		devices = object{"requests": []any{of}}
	default:
		var all []any
		for i, p := range r.profiles {
			all = append(all, ask(fmt.Sprintf("gpu-%d", i), "mig-"+strings.ReplaceAll(p, "+", ".")))
		}
		devices = object{"requests": all}
		if len(all) > 1 {
			devices["constraints"] = []any{object{"matchAttribute": hollow.Driver + "/parentUUID"}}
		}
	}
	return object{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": object{"name": r.name, "namespace": namespace}, "spec": object{"devices": devices}}
}

// resources are what a pod asks a device plugin for, which cannot be told that a pair is
// to be of one GPU.
func (r *request) resources() map[string]int {
	const domain = "example.com/"
	out := map[string]int{}
	switch {
	case r.whole:
		out[domain+"gpu"] = 1
	case r.gib > 0:
		out[domain+"gpu-mem"] = r.gib
	}
	for _, p := range r.profiles {
		out[domain+"mig-"+strings.ReplaceAll(p, "+", ".")]++
	}
	return out
}

// pod is the pod that asks, by its claim or by names of resources.
func (r *request) pod(byClaim bool) map[string]any {
	type object = map[string]any
	container := object{"name": "main", "image": "none", "resources": object{"limits": r.limits()}}
	spec := object{"automountServiceAccountToken": false, "restartPolicy": "Never", "tolerations": []any{object{"operator": "Exists"}}, "containers": []any{container}}
	if byClaim {
		container["resources"] = object{"claims": []any{object{"name": "gpu"}}}
		spec["resourceClaims"] = []any{object{"name": "gpu", "resourceClaimName": r.name}}
	}
	if r.group != "" {
		spec["schedulingGroup"] = object{"podGroupName": r.group}
	}
	return object{"apiVersion": "v1", "kind": "Pod", "metadata": object{"name": r.name, "namespace": namespace}, "spec": spec}
}

func (r *request) limits() map[string]any {
	out := map[string]any{}
	for name, n := range r.resources() {
		out[name] = fmt.Sprint(n)
	}
	return out
}
