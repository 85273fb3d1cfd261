// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/mps"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// driverFiles keeps what containers need of the driver and of each GPU, and the libraries that
// enforce memory caps. It belongs to the loop's goroutine.
type driverFiles struct {
	driver Driver
	caps   Caps
	log    *slog.Logger
	// parts were learnt in the reader's epoch of; nil before that. err is why the last try failed,
	// nil if it did not.
	parts *parts
	of    uint64
	err   error
}

// parts are the driver files that containers need, and the kit of libraries for that driver.
type parts struct {
	cdi.Parts
	kit lib.Kit
}

// closed returns why no container can get driver files, or "" if containers can.
func (s *driverFiles) closed() string {
	if s.parts == nil && s.err != nil {
		return s.err.Error()
	}
	return ""
}

// learn asks the driver what containers need, in an epoch of the reader. If it fails, what was
// learnt before stays, and the next round asks again.
func (s *driverFiles) learn(ctx context.Context, epoch uint64) error {
	ctx, cancel := context.WithTimeout(ctx, driverPatience)
	defer cancel()
	of, err := s.driver.Parts(ctx)
	if s.err = err; err != nil {
		return status.Because(status.DriverFilesUnknown,
			fmt.Errorf("learn which driver files containers need: %w", err))
	}
	kit, err := s.caps.Fit(of)
	if kit == (lib.Kit{}) {
		s.err = err
		return status.Because(status.FilesFailed, err)
	}
	s.parts, s.of = &parts{of, kit}, epoch
	if err != nil {
		s.log.Warn("programs in containers will find functions that this driver does not have; "+
			"they fail where they are called", "err", err)
	}
	return nil
}

// allocations returns the allocations, with the caps of their holders where these are known. If no
// record has a cap, the limit page tells it, since the size of a unit or the number of replicas may
// have changed since.
func (k *gatekeeper) allocations(inv *gpu.Inventory) []ledger.Allocation {
	allocations := k.ledger.Allocations()
	for i := range allocations {
		if c := &allocations[i]; !c.CapsKnown() {
			_ = k.fixCaps(inv, c, func(g *ledger.Grant, _ *gpu.Device) (uint64, compute.Share, error) {
				bytes, err := k.caps.Limit(c.ID, g.GPU)
				percent, errShare := k.caps.Percent(c.ID, g.GPU)
				return bytes, compute.Share{Ceiling: percent}, errors.Join(err, errShare)
			})
		}
	}
	return allocations
}

// settleCaps decides the caps of an allocation that has neither a record nor a page of them. No
// container can have such a cap yet, so it is computed from the present layout. The error names a
// GPU where that is not possible.
func (k *gatekeeper) settleCaps(on *fileInputs, c *ledger.Allocation) error {
	return k.fixCaps(on.inv, c, func(g *ledger.Grant, d *gpu.Device) (uint64, compute.Share, error) {
		layout := on.layouts[g.GPU]
		of, _ := layout.Of(g.Kind())
		of.Unit = cmp.Or(of.Unit, k.unit) // a GPU keeps its unit as long as it is held
		if _, cap := g.In(piece.Share{Division: of, Usable: d.Usable()}); cap.Known {
			return cap.Bytes, layout.ComputeOf(g.Piece), nil
		}
		_, err := k.caps.Limit(c.ID, g.GPU)
		return 0, compute.Share{}, fmt.Errorf("find the cap of %s on %s, which is %s now: %w", c.Resource, g.GPU, layout.Mode(), err)
	})
}

// fixCaps sets the caps of an allocation's grants that have none, and their shares of the SMs, where known
// returns them.
func (k *gatekeeper) fixCaps(inv *gpu.Inventory, c *ledger.Allocation,
	known func(*ledger.Grant, *gpu.Device) (uint64, compute.Share, error)) error {
	var errs []error
	grants := slices.Clone(c.Grants)
	for i := range grants {
		g := &grants[i]
		d := inv.ByUUID(g.GPU)
		if g.Cap.Known || d == nil {
			continue
		}
		n, share, err := known(g, d)
		if err == nil {
			*g = g.Fix(n, d.Usable())
			g.Compute = share
		}
		errs = append(errs, err)
	}
	k.ledger.Learn(c.ID, grants)
	c.Grants = grants
	return errors.Join(errs...)
}

// overlay writes an allocation's limit pages, and returns the mounts and libraries that its
// container gets for the cap. Every allocation gets them, also that of a whole GPU. A container can
// have two allocations, and it is chance which of them the runtime applies last, and so whose file
// is at the path of the driver's library.
func (k *gatekeeper) overlay(on *fileInputs, c *ledger.Allocation) (cdi.Overlay, error) {
	var none cdi.Overlay
	var limits []lib.Limit
	hold := lib.Hold{Key: c.ID, Limits: map[gpu.UUID]uint64{}, Open: k.openCaps}
	capped := false
	if err := k.settleCaps(on, c); err != nil {
		return none, err
	}
	lends := func(u gpu.UUID) bool { return c.Tier == ledger.Guaranteed && on.layouts[u].Spot.Lend > 0 }
	var since time.Time // zero if it is not known
	if !c.Adopted {
		since = c.Given
	}
	for _, u := range c.GPUs() {
		limit := c.Cap(u)
		if !limit.Known {
			return none, fmt.Errorf("find the cap of %s on %s: %w", c.Resource, u, gpu.ErrNotFound)
		}
		if limit.Bytes != lib.None {
			capped = true
			hold.Limits[u] = limit.Bytes
		}
		l := lib.Limit{GPU: u, Bytes: limit.Bytes, Code: lib.DefaultCode, Since: since, Waits: lends(u)}
		l.Percent = shareOf(c, u).Ceiling
		limits = append(limits, l)
	}
	if c.Kind().InMIG() {
		// Programs know an instance by its own UUID.
		instances, _ := on.instancesOf(c)
		for _, i := range instances {
			limits = append(limits, lib.Limit{GPU: i.in.UUID, Bytes: lib.None, Since: since, Waits: lends(i.gpu.UUID)})
		}
	}
	k.pages.await(c.ID) // those of the previous holder
	pages, err := k.caps.Write(c.ID, limits)
	if err != nil {
		return none, err
	}
	bind := func(from, to string) specs.Mount {
		return specs.Mount{HostPath: from, ContainerPath: to,
			Options: []string{"ro", "nosuid", "nodev", "rbind", "rprivate"}}
	}
	kit := on.parts.kit
	over := cdi.Overlay{
		Overrides: []cdi.Override{
			{Library: "libcuda.so", HostPath: kit.CUDA, Real: lib.RealCUDA},
			{Library: "libnvidia-ml.so", HostPath: kit.NVML, Real: lib.RealNVML},
		},
		Mounts: lib.Mounts(c.ID, pages),
	}
	if c.Tier == ledger.Spot {
		notice, err := k.caps.Notice(c.ID)
		if err != nil {
			return none, err
		}
		over.Mounts = append(over.Mounts, lib.NoticeMount(notice))
	}
	switch {
	case k.openCaps:
		over.Mounts = append(over.Mounts, bind(kit.Mark, lib.OpenMark))
	case capped:
		over.Hooks = append(over.Hooks, kit.Hook())
	}
	over.Hooks = append(over.Hooks, k.holder.hook(kit, hold)...)
	for _, g := range c.Grants {
		if g.Compute.Ceiling == 0 {
			continue
		}
		// A container with a share has one GPU, so it reaches one daemon. The library sets the
		// variables again; without it, a program that keeps them is held to the same.
		over.Mounts = append(over.Mounts, bind(mps.PipeDir(k.stateDir, g.GPU), lib.MPSDir))
		over.Env = append(over.Env, "CUDA_MPS_PIPE_DIRECTORY="+lib.MPSDir,
			fmt.Sprintf("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=%d", g.Compute.Ceiling))
	}
	return over, nil
}

// shareOf returns the share of a GPU's SMs that an allocation has; the largest, if it has several.
func shareOf(c *ledger.Allocation, u gpu.UUID) (most compute.Share) {
	for _, g := range c.Grants {
		if g.GPU == u {
			most.Ceiling = max(most.Ceiling, g.Compute.Ceiling)
		}
	}
	return most
}

// pageSweeper removes the limit pages of ended allocations beside the loop. The kernel takes its
// time for it, and the next container waits for the loop.
type pageSweeper struct {
	caps Caps
	wake func()
	// going has a channel for each allocation whose pages are being removed. It is closed when they
	// are gone. The map belongs to the loop's goroutine.
	going map[string]chan struct{}
	// failed is true if some pages could not be removed. The loop then tries again itself. It
	// reports the error, and its pauses grow.
	failed atomic.Bool
}

// remove removes the pages of these allocations, except those that are being removed already.
func (s *pageSweeper) remove(keys []string) error {
	if s.failed.Load() {
		for _, key := range keys {
			s.await(key)
			if err := s.caps.Remove(key); err != nil {
				return err
			}
		}
		s.failed.Store(false)
		return nil
	}
	maps.DeleteFunc(s.going, func(_ string, gone chan struct{}) bool {
		select {
		case <-gone:
			return true
		default:
			return false
		}
	})
	keys = slices.DeleteFunc(keys, func(key string) bool { return s.going[key] != nil })
	if len(keys) == 0 {
		return nil
	}
	gone := make([]chan struct{}, len(keys))
	for i, key := range keys {
		gone[i] = make(chan struct{})
		s.going[key] = gone[i]
	}
	go func() {
		for i, key := range keys {
			if s.caps.Remove(key) != nil {
				s.failed.Store(true)
				s.wake()
			}
			close(gone[i])
		}
	}()
	return nil
}

// await waits until no pages of an allocation are being removed, so that it can get new ones.
func (s *pageSweeper) await(key string) {
	if gone := s.going[key]; gone != nil {
		<-gone
	}
}

// sweepCaps removes the pages of ended allocations, beside the loop.
func (k *gatekeeper) sweepCaps(live func(key string) bool) error {
	keys, err := k.caps.List()
	if err != nil {
		return err
	}
	if err := k.pages.remove(slices.DeleteFunc(keys, live)); err != nil {
		return err
	}
	// Libraries of earlier versions go once no allocation's file names them, so once all are open.
	if slices.ContainsFunc(k.ledger.Allocations(), func(c ledger.Allocation) bool { return !c.IsOpen() }) {
		return nil
	}
	return k.caps.Prune()
}
