// SPDX-License-Identifier: Apache-2.0

package timeslice

import (
	"fmt"

	"example.com/gpu-agent/pkg/gpu"
)

// FitError means that no GPU has as many free units as a request asks for. Its text is for the
// person whose pod was refused; the caller puts the resource's name before it. errors.Is reports it
// as gpu.ErrNoRoom.
type FitError struct {
	// Asked is the size of the request, in units.
	Asked int
	// Largest is the size of the largest free block, in units, and GPU is the GPU that has it. They
	// are 0 and empty if nothing is free.
	Largest int
	GPU     gpu.UUID
	// Held is how many units of GPU the request holds already (a pod's init container had them).
	// They count in Largest. If Held is not 0, the request is bound to that GPU, even if another
	// has more free.
	Held int
	// Capacity is how many units the node's largest GPU has, free or not; 0 means unknown.
	// PreferUnits sees only what is free and leaves it 0. A caller that knows it sets it, so that
	// the text does not say to wait for room that will never come.
	Capacity int
}

func (e *FitError) Error() string {
	const rule = "but a request lives on one GPU"
	switch {
	case e.Capacity > 0 && e.Asked > e.Capacity:
		free := "none is free"
		if e.Largest > 0 {
			free = fmt.Sprintf("the largest free block is %s, on %s", units(e.Largest), e.GPU)
		}
		return fmt.Sprintf("%s asked for, %s and no GPU of this node has more than %d; %s; ask for at most %d",
			units(e.Asked), rule, e.Capacity, free, e.Capacity)
	case e.Largest == 0:
		return fmt.Sprintf("%s asked for, but none is free; wait until some are freed", units(e.Asked))
	case e.Held > 0:
		return fmt.Sprintf("%s asked for, %s and on %s this pod already holds %s; "+
			"it can have %d there in all; ask for at most %d, or wait until more is freed",
			units(e.Asked), rule, e.GPU, units(e.Held), e.Largest, e.Largest)
	default:
		return fmt.Sprintf("%s asked for, %s and the largest free block is %s, on %s; "+
			"ask for at most %d, or wait until more is freed",
			units(e.Asked), rule, units(e.Largest), e.GPU, e.Largest)
	}
}

// Is reports whether target is gpu.ErrNoRoom.
func (e *FitError) Is(target error) bool { return target == gpu.ErrNoRoom }

// SpreadError means that fewer GPUs have a free replica than a request asks for. Its text is for
// the person whose pod was refused. errors.Is reports it as gpu.ErrNoRoom.
type SpreadError struct {
	// Asked is how many replicas were asked for, each on another GPU.
	Asked int
	// Free is how many GPUs have a free replica, or one that the request holds.
	Free int
	// Capacity is how many GPUs of the node have replicas; 0 means unknown. As with FitError, the
	// caller sets it.
	Capacity int
}

func (e *SpreadError) Error() string {
	const rule = "but each is of a different GPU"
	asked := plural(e.Asked, "replica")
	switch {
	case e.Capacity > 0 && e.Asked > e.Capacity:
		return fmt.Sprintf("%s asked for, %s and this node shares %s that way; ask for at most %d",
			asked, rule, plural(e.Capacity, "GPU"), e.Capacity)
	case e.Free == 0:
		return fmt.Sprintf("%s asked for, but none is free; wait until some are freed", asked)
	default:
		return fmt.Sprintf("%s asked for, %s and only %s a free replica; "+
			"ask for at most %d, or wait until more are freed",
			asked, rule, have(e.Free), e.Free)
	}
}

// Is reports whether target is gpu.ErrNoRoom.
func (e *SpreadError) Is(target error) bool { return target == gpu.ErrNoRoom }

func units(n int) string { return plural(n, "unit") }

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func have(gpus int) string {
	if gpus == 1 {
		return "1 GPU has"
	}
	return fmt.Sprintf("%d GPUs have", gpus)
}
