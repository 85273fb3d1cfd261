// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"fmt"

	"example.com/gpu-agent/pkg/gpu"
)

// Count is a part of a geometry: N devices of a profile. Of a split the count
// is of compute instances.
type Count struct {
	Profile Name
	N       int
}

// Standing is a device that exists.
type Standing struct {
	Slot
	// Pinned says that nothing may touch it; Holder (a pod, a process) and
	// Reason say why. Either may be empty.
	Pinned         bool
	Holder, Reason string
	// Empty is a GPU instance without a compute instance, a leftover.
	Empty bool
}

// Op is what a step does.
type Op string

// Ops. Enable and Disable are about MIG mode and have a zero Slot.
const (
	Destroy Op = "destroy"
	Create  Op = "create"
	Enable  Op = "enable"
	Disable Op = "disable"
)

// Step is one thing to do on one GPU.
type Step struct {
	Op Op
	Slot
}

// String is "create 3g.40gb@4", or "enable".
func (s Step) String() string {
	if s.Op == Enable || s.Op == Disable {
		return string(s.Op) + " MIG mode"
	}
	return string(s.Op) + " " + s.Slot.String()
}

// Plan is how one GPU becomes what is wanted.
type Plan struct {
	// Steps are to be done in order; empty where nothing is to do, and where
	// something is in the way.
	Steps []Step
	// Result is what stands afterwards; where blocked, what stands now.
	Result []Slot
	// Keep is what stands now and stays in the target; where blocked, in the
	// target that is to come when those in the way are gone.
	Keep []Slot
	// Blocked is the smallest set of holders in the way.
	Blocked []Standing
}

// Target is what a GPU shall be.
type Target struct {
	// MIG is the mode.
	MIG bool
	// OnDemand leaves instances to [Card.Make]; Geometry is ignored then.
	OnDemand bool
	Geometry []Count
}

// Plan finds the steps from what stands to what is wanted. It fails as
// Feasible does.
func (c *Card) Plan(standing []Standing, want []Count) (Plan, error) {
	return Plan{}, fmt.Errorf("plan: %w", gpu.ErrNotSupported)
}

// Make finds the steps that make s stand.
func (c *Card) Make(standing []Standing, s Slot) (Plan, error) {
	return Plan{}, fmt.Errorf("plan: %w", gpu.ErrNotSupported)
}

// Change finds the steps that make a GPU what is wanted, MIG mode included.
func Change(m *gpu.MIG, c *Card, standing []Standing, to Target) (Plan, error) {
	return Plan{}, fmt.Errorf("plan: %w", gpu.ErrNotSupported)
}

// Stand is what an inventory says stands on a GPU.
func Stand(m *gpu.MIG) []Standing {
	return nil
}
