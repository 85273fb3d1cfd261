// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"fmt"

	"example.com/gpu-agent/pkg/gpu"
)

// Offer is a GPU on which slots are on offer.
type Offer struct {
	GPU  gpu.UUID
	Card *Card
	// Taken may not go: claims, busy and foreign instances. Warm stand idle and
	// may go.
	Taken, Warm []Slot
	// Rank decides between GPUs that are as good as each other; less is better.
	Rank int
}

// Place is a slot of a GPU.
type Place struct {
	GPU  gpu.UUID
	Slot Slot
}

// Prefer chooses n of the available places, all of must among them, that can
// stand together.
func Prefer(offers []Offer, available, must []Place, n int) ([]Place, error) {
	return nil, fmt.Errorf("choose slots: %w", gpu.ErrNotSupported)
}
