// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"fmt"

	"example.com/gpu-agent/pkg/gpu"
)

// Card is what one GPU's driver says can stand on it. It is immutable and safe
// for concurrent use; build it once per inventory.
type Card struct {
	slots []Slot
	known bool
}

// NewCard reads a GPU's profiles. The card is never nil: a profile that makes
// no sense is left out, and the error, which wraps gpu.ErrInvalid, says which
// and why.
func NewCard(m *gpu.MIG) (*Card, error) {
	return &Card{}, fmt.Errorf("read profiles: %w", gpu.ErrNotSupported)
}

// Known says whether the placements of all profiles are known. Some drivers
// tell them only with MIG on.
func (c *Card) Known() bool { return c.known }

// Slots are all slots that are not split, in the order of [Compare] of their
// profiles and then by start. The caller may not change them.
func (c *Card) Slots() []Slot { return c.slots }

// Slot is the slot of a profile at a place, with its size. It is false where
// the driver has no such profile or placement.
func (c *Card) Slot(p Name, start, ci int) (Slot, bool) {
	for _, s := range c.slots {
		if s.Profile == p && s.Start == start && s.CI == ci {
			return s, true
		}
	}
	return Slot{}, false
}

// Fits says whether s may stand beside those that stand.
func (c *Card) Fits(standing []Slot, s Slot) bool {
	return false
}

// Feasible says why an empty GPU could not hold what is wanted. The error wraps
// gpu.ErrInvalid where there is no such profile or count, gpu.ErrNoRoom where
// they do not all find room.
func (c *Card) Feasible(want []Count) error {
	return fmt.Errorf("read profiles: %w", gpu.ErrNotSupported)
}
