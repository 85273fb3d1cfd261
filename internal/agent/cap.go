// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"slices"
	"sync"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/internal/desk"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// limitPages are the limit pages of claims. What those of inherited claims said first
// is kept: the watchdog asks for it at every look.
type limitPages struct {
	Caps
	mu sync.Mutex
	// said is guarded by mu, by key.
	said map[string]map[gpu.UUID]uint64
}

// stands is what a claim's page says of a GPU.
func (p *limitPages) stands(c *desk.Claim, u gpu.UUID) (uint64, error) {
	if !c.Inherited {
		return p.Limit(c.Key, u)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if bytes, ok := p.said[c.Key][u]; ok {
		return bytes, nil
	}
	bytes, err := p.Limit(c.Key, u)
	if err != nil {
		return 0, err
	}
	if p.said == nil {
		p.said = map[string]map[gpu.UUID]uint64{}
	}
	if p.said[c.Key] == nil {
		p.said[c.Key] = map[gpu.UUID]uint64{}
	}
	p.said[c.Key][u] = bytes
	return bytes, nil
}

// Remove removes a claim's pages.
func (p *limitPages) Remove(key string) error {
	p.mu.Lock()
	delete(p.said, key)
	p.mu.Unlock()
	return p.Caps.Remove(key)
}

// capOf is what a container that has a claim may have of one GPU, in bytes:
// lib.None for a whole one. The page and the watchdog go by it.
//
// A cap is fixed when devices are given out. Of a claim from before this process,
// and of one whose GPU is not cut any more in the way that it speaks of, the page
// that stands tells: the size of a unit or the number of replicas may have changed
// since, and what was written down of them may be lost. Only where there is no
// page, so that no container can have come by one, is the cap what it would be now.
// The error says that nobody knows.
func (p *limitPages) capOf(c *desk.Claim, u gpu.UUID, inv *gpu.Inventory, cuts map[gpu.UUID]Cut, unit gpu.MiB) (uint64, error) {
	kind, known := kindOf(c.Resource)
	d := inv.ByUUID(u)
	switch {
	case !known || d == nil:
		return 0, fmt.Errorf("%s on %s: %w", c.Resource, u, gpu.ErrNotFound)
	case kind == desk.Whole || kind == desk.Slots: // the hardware holds an instance to its memory
		return lib.None, nil
	}
	cut := cuts[u]
	same := cut.Offers && cut.Kind == kind && (kind == desk.Replicas || cut.Unit != 0)
	var err error
	if c.Inherited || !same {
		var bytes uint64
		if bytes, err = p.stands(c, u); err == nil {
			return bytes, nil
		}
	}
	switch {
	case kind == desk.Units && same: // a GPU keeps the unit that it was cut with, as long as it is held
		return memcap.Units(len(c.IDs), cut.Unit), nil
	case kind == desk.Units:
		return memcap.Units(len(c.IDs), unit), nil
	case same:
		return memcap.Replica(d, cut.N), nil
	}
	return 0, fmt.Errorf("find the cap of %s on %s, which is %s now: %w", c.Resource, u, cut.mode(), err)
}

// paged says how GPUs must be cut of which that is not known, by the pages of the
// claims on them: of memory units, how large they are, and of replicas, how many
// there are.
func (a *Agent) paged(claims []desk.Claim) map[gpu.UUID]Cut {
	out := map[gpu.UUID]Cut{}
	for i := range claims {
		c := &claims[i]
		kind, known := kindOf(c.Resource)
		if !known || !c.Inherited || kind != desk.Units && kind != desk.Replicas {
			continue
		}
		for _, u := range c.GPUs {
			d := a.inv.ByUUID(u)
			if d == nil || a.cuts[u].Known || out[u].Known {
				continue
			}
			bytes, err := a.caps.stands(c, u)
			switch mib, n := gpu.MiB(bytes>>20), gpu.MiB(len(c.IDs)); {
			case err != nil || mib == 0:
			case kind == desk.Replicas:
				// What the driver keeps for itself can have moved by some MiB.
				out[u] = Cut{Known: true, Kind: kind, N: int((d.Usable() + mib/2) / mib)}
			case mib%n == 0:
				out[u] = Cut{Known: true, Kind: kind, Unit: mib / n}
			}
		}
	}
	return out
}

// Caps says what a claim's container may have of each of its GPUs, in the order
// of the claim's GPUs. GPUs of which that cannot be said are left out.
func (a *Agent) Caps(c *desk.Claim) []lib.Limit {
	snap := a.snapshot.Load()
	var out []lib.Limit
	for _, u := range c.GPUs {
		if bytes, err := a.caps.capOf(c, u, snap.Inventory, snap.Cuts, a.opts.MemoryUnit); err == nil {
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

// overlay lays a claim's pages and says what its container gets for the
// cap. Every claim gets it, that of a whole GPU too: a container can have two
// claims, and which of them a runtime applies last, and so whose file stands at
// the driver library's path, is chance.
func (a *Agent) overlay(c *desk.Claim) (cdi.Overlay, error) {
	var none cdi.Overlay
	var limits []lib.Limit
	capped := false
	for _, u := range c.GPUs {
		bytes, err := a.caps.capOf(c, u, a.inv, a.cuts, a.opts.MemoryUnit)
		if err != nil {
			return none, err
		}
		capped = capped || bytes != lib.None
		l := lib.Limit{GPU: u, Bytes: bytes}
		if !c.Adopted {
			l.Since = c.Allocated
		}
		limits = append(limits, l)
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
	kit := a.parts.kit
	over := cdi.Overlay{
		Stands: []cdi.Stand{
			{Library: "libcuda.so", HostPath: kit.CUDA, Real: lib.RealCUDA},
			{Library: "libnvidia-ml.so", HostPath: kit.NVML, Real: lib.RealNVML},
		},
		Mounts: lib.Mounts(c.Key, pages),
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

// sweepCaps removes the pages of claims that have ended.
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
