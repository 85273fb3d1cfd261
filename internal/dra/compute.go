// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"fmt"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"

	resourcev1 "k8s.io/api/resource/v1"
)

// computeShare is the capacity of a GPU's SMs of which each claim has a share through MPS, in percent.
const computeShare = "compute"

// computeCapacity returns the capacity of the SMs. Shares are ceilings, so there are 100 percent for each
// client that MPS accepts. A claim that names no amount takes 0, and gets its share by its part of the memory.
func computeCapacity(s compute.Sharing) resourcev1.DeviceCapacity {
	return resourcev1.DeviceCapacity{Value: count(100 * compute.MostClients),
		RequestPolicy: &resourcev1.CapacityRequestPolicy{Default: new(count(0)),
			ValidRange: &resourcev1.CapacityRequestPolicyRange{
				Min: new(count(0)), Max: new(count(s.Highest())), Step: new(count(1))}}}
}

// putCompute sets the share of the SMs in a result's grant: the percentage that the claim names, or else what
// follows from its part of the memory. The error is permanent.
func putCompute(g *ledger.Grant, w *want, layout plan.Layout) error {
	through := layout.Compute.MPS && g.Kind().Shared() && !g.NoRoom
	switch {
	case !through && w.percent != 0 && !g.NoRoom:
		return permanent(status.ClaimOutdated, fmt.Errorf("%d percent of the SMs of device %s: the containers of its GPU "+
			"have no shares of the SMs now: make the claim anew: %w", w.percent, w.Device, gpu.ErrInvalid))
	case !through:
		return nil
	case g.TimeSlice != "":
		return permanent(status.ClaimUnsupported, fmt.Errorf("configuration asks for a time slice in request %s, and the "+
			"containers of its device's GPU (%s) take no turns, but share it through MPS: leave the configuration out: %w",
			w.Request, w.Device, gpu.ErrInvalid))
	case w.percent < 0 || w.percent > int64(layout.Compute.Highest()):
		return permanent(status.ClaimRefused, fmt.Errorf("%d percent of the SMs of device %s: an amount is 0 to %d: "+
			"make the claim anew: %w", w.percent, w.Device, layout.Compute.Highest(), gpu.ErrInvalid))
	case w.percent > 0:
		g.Compute = compute.Share{Ceiling: int(w.percent)}
	default:
		g.Compute = layout.ComputeOf(g.Piece)
	}
	return nil
}

// checkAlone returns a permanent error if a claim has a share through MPS and another device: a container with
// both would hold two GPUs, or two shares, and its processes reach one MPS server with one percentage.
func checkAlone(o *Offer, wants []want) error {
	takes, through := 0, ""
	for i := range wants {
		w := &wants[i]
		if w.Admin {
			continue
		}
		takes++
		if w.device.Kind.Shared() && o.Changes.Layouts[w.device.GPU].Compute.MPS {
			through = w.Device
		}
	}
	if takes < 2 || through == "" {
		return nil
	}
	return permanent(status.ClaimUnsupported, fmt.Errorf("the claim has %d devices, and device %s is a share through MPS: "+
		"a container with one holds nothing else, since a process reaches one MPS server: "+
		"make a claim for each container, with one device: %w", takes, through, gpu.ErrInvalid))
}
