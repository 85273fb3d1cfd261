// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"slices"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/internal/desk"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// usageSize is the most that the counters of a container take, on a file system
// of its own in its memory: a megabyte for a GPU, of which only what is used
// exists.
const usageSize = "size=32m"

// capOf is what a container that has a claim may have of one GPU, in bytes:
// lib.None for a whole one. ok is false where that cannot be said: the GPU is
// not known, or not cut in the way that the claim speaks of.
func capOf(c *desk.Claim, u gpu.UUID, inv *gpu.Inventory, cuts map[gpu.UUID]Cut, unit gpu.MiB) (bytes uint64, ok bool) {
	kind, known := kindOf(c.Resource)
	d := inv.ByUUID(u)
	if !known || d == nil {
		return 0, false
	}
	cut := cuts[u]
	same := cut.Offers && cut.Kind == kind
	switch kind {
	case desk.Whole, desk.Slots: // the hardware holds an instance to its memory
		return lib.None, true
	case desk.Units:
		// A GPU keeps the unit that it was cut with, as long as it is held.
		if same && cut.Unit != 0 {
			unit = cut.Unit
		}
		return memcap.Units(len(c.IDs), unit), true
	default:
		if !same {
			return 0, false
		}
		return memcap.Replica(d, cut.N), true
	}
}

// Caps says what a claim's container may have of each of its GPUs, in the order
// of the claim's GPUs. GPUs of which that cannot be said are left out.
func (a *Agent) Caps(c *desk.Claim) []lib.Limit {
	snap := a.snapshot.Load()
	var out []lib.Limit
	for _, u := range c.GPUs {
		if bytes, ok := capOf(c, u, snap.Inventory, snap.Cuts, a.opts.MemoryUnit); ok {
			out = append(out, lib.Limit{GPU: u, Bytes: bytes})
		}
	}
	return out
}

// Offered returns the GPUs that the agent gives out, in index order: who uses one
// of them without a claim is an intruder.
func (a *Agent) Offered() []gpu.Device {
	snap := a.snapshot.Load()
	var out []gpu.Device
	for _, d := range snap.Inventory.GPUs {
		if snap.Cuts[d.UUID].Offers && !d.Gone {
			out = append(out, d)
		}
	}
	return out
}

// Open reports whether somebody else, too, gives a GPU out: who uses it without a
// claim of ours may have one of theirs.
func (a *Agent) Open(u gpu.UUID) bool { return a.snapshot.Load().Others[u] != "" }

// Stirred has a value when claims, or the GPUs that are given out, may have changed
// since the last one was taken. It is for one taker.
func (a *Agent) Stirred() <-chan struct{} { return a.stirred }

// overlay lays a claim's limit pages and says what its container gets for the
// cap. Every claim gets it, that of a whole GPU too: a container can have two
// claims, and which of them a runtime applies last, and so whose file stands at
// the driver library's path, is chance.
func (a *Agent) overlay(c *desk.Claim) (cdi.Overlay, error) {
	var none cdi.Overlay
	var limits []lib.Limit
	capped := false
	for _, u := range c.GPUs {
		bytes, ok := capOf(c, u, a.inv, a.cuts, a.opts.MemoryUnit)
		if !ok {
			// The GPU has been cut otherwise since: what the claim was given stands.
			var err error
			if bytes, err = a.caps.Limit(c.Key, u); err != nil {
				return none, fmt.Errorf("find the cap of %s on %s, which is %s now: %w", c.Resource, u, a.cuts[u].mode(), err)
			}
		}
		capped = capped || bytes != lib.None
		limits = append(limits, lib.Limit{GPU: u, Bytes: bytes})
	}
	if c.Slots != nil {
		// Programs know an instance by its own UUID.
		instances, _ := a.instancesOf(c)
		for _, i := range instances {
			limits = append(limits, lib.Limit{GPU: i.in.UUID, Bytes: lib.None})
		}
	}
	pages, err := a.caps.Write(c.Key, limits)
	if err != nil {
		return none, err
	}
	bind := func(from, to string) specs.Mount {
		return specs.Mount{HostPath: from, ContainerPath: to, Options: []string{"ro", "nosuid", "nodev", "rbind", "rprivate"}}
	}
	kit := a.opts.Kit
	over := cdi.Overlay{
		Stands: []cdi.Stand{
			{Library: "libcuda.so", HostPath: kit.CUDA, Real: lib.RealCUDA},
			{Library: "libnvidia-ml.so", HostPath: kit.NVML, Real: lib.RealNVML},
		},
		// The container's own: nothing of the host can be filled, and every
		// container starts from zero.
		Mounts: []specs.Mount{{HostPath: "tmpfs", ContainerPath: lib.UsageDir, Type: "tmpfs",
			Options: []string{"nosuid", "nodev", "noexec", "mode=1777", usageSize}}},
	}
	for _, l := range limits {
		over.Mounts = append(over.Mounts, bind(pages[l.GPU], lib.LimitsDir+"/"+string(l.GPU)))
	}
	switch {
	case a.opts.OpenCaps:
		over.Mounts = append(over.Mounts, bind(kit.Mark, lib.OpenMark))
	case capped:
		// The driver libraries that the image brings stand for nobody's cap.
		over.Mounts = append(over.Mounts, bind(kit.Empty, lib.CompatDir))
	}
	return over, nil
}

// sweepCaps removes the limit pages of claims that have ended.
func (a *Agent) sweepCaps(live func(key string) bool) error {
	keys, err := a.caps.List()
	if err != nil {
		return err
	}
	for _, key := range keys {
		if !live(key) {
			if err := a.caps.Remove(key); err != nil {
				return err
			}
		}
	}
	// Libraries of earlier versions go when no claim's file names them.
	if slices.ContainsFunc(a.desk.Claims(), func(c desk.Claim) bool { return !c.Ready }) {
		return nil
	}
	return a.caps.Prune()
}
