// SPDX-License-Identifier: Apache-2.0

package compute

import (
	"fmt"
	"math"
	"strconv"
)

// Bounds of a Sharing. MostClients is how many processes one MPS server of the drivers before R615
// accepts, by NVIDIA's documentation of MPS.
const (
	LeastFactor = 0.1
	MostFactor  = 100
	MostClients = 48
)

// Sharing is how the containers of a GPU share its SMs. In its zero value they take turns. It can be
// compared with ==.
type Sharing struct {
	// MPS is true if they run at the same time, as clients of MPS, each below a ceiling.
	MPS bool `json:"mps,omitempty"`
	// Factor is how many times its part of the memory a container's ceiling is, from LeastFactor to
	// MostFactor; 0 means 1.
	Factor float64 `json:"factor,omitempty"`
	// Max is the highest ceiling, in percent, from 1 to 100; 0 means 100.
	Max int `json:"max,omitempty"`
}

// Check returns an error that names what is out of bounds.
func (s Sharing) Check() error {
	switch {
	case !s.MPS && (s.Factor != 0 || s.Max != 0):
		return fmt.Errorf("factor and max are for mps")
	case s.Factor != 0 && !(s.Factor >= LeastFactor && s.Factor <= MostFactor):
		return fmt.Errorf("factor %v is not within %v and %v", s.Factor, LeastFactor, MostFactor)
	case s.Max < 0 || s.Max > 100:
		return fmt.Errorf("max %d is not within 1 and 100 percent", s.Max)
	}
	return nil
}

// Normal returns the same Sharing with its defaults written as 0. Two that mean the same are then equal.
func (s Sharing) Normal() Sharing {
	if s.Factor == 1 {
		s.Factor = 0
	}
	if s.Max == 100 {
		s.Max = 0
	}
	return s
}

// Largest returns the largest share that a GPU lets a container have. parts is the number of equal parts of the
// GPU, if a container has one of them; 0 if it may have any part.
func (s Sharing) Largest(parts int) Share { return s.Share(1 / float64(max(1, parts))) }

// Highest returns the highest ceiling that a container may have, in percent; 0 if containers take turns.
func (s Sharing) Highest() int {
	switch {
	case !s.MPS:
		return 0
	case s.Max == 0:
		return 100
	}
	return s.Max
}

// Share returns the share of a container with a part of the GPU's memory, from 0 to 1. It is the
// zero Share if containers take turns, or if the part is not known (0).
func (s Sharing) Share(part float64) Share {
	if !s.MPS || !(part > 0) {
		return Share{}
	}
	factor, most := s.Factor, s.Highest()
	if factor == 0 {
		factor = 1
	}
	// Parts such as 20/80 are not exact, so that a quarter could be rounded up to 26 percent.
	exact := factor * 100 * min(part, 1)
	return Share{Ceiling: min(most, max(1, int(math.Ceil(exact-1e-6))))}
}

// Infer returns how a GPU must be shared so that its holders keep their shares. most is the largest of them.
// wish is how the GPU is wanted, and parts as in Largest. It counts if it lets a container have as much.
func Infer(most Share, parts int, wish Sharing) Sharing {
	if most.Ceiling == 0 {
		return Sharing{}
	}
	if wish.MPS && most.Ceiling <= wish.Largest(parts).Ceiling {
		return wish
	}
	s := Sharing{MPS: true}
	if most.Ceiling > s.Largest(parts).Ceiling {
		s.Factor = min(MostFactor, float64(most.Ceiling)*float64(parts)/100)
	}
	return s
}

// String is "time slices", or "mps" with what differs from the defaults: "mps, factor 2, max 80 %".
func (s Sharing) String() string {
	if !s.MPS {
		return "time slices"
	}
	text := "mps"
	if s.Factor != 0 && s.Factor != 1 {
		text += ", factor " + strconv.FormatFloat(s.Factor, 'g', -1, 64)
	}
	if s.Max != 0 && s.Max != 100 {
		text += fmt.Sprintf(", max %d %%", s.Max)
	}
	return text
}

// Share is what a container may use of a GPU's SMs. The zero Share is none of its own: it takes
// turns with others, or has a whole GPU or a MIG instance.
type Share struct {
	// Ceiling is the largest part of the SMs that a process of the container may use, in percent,
	// from 1 to 100; 0 if there is none.
	Ceiling int `json:"ceiling,omitempty"`
}

// Check returns an error if a share is out of bounds.
func (s Share) Check() error {
	if s.Ceiling < 0 || s.Ceiling > 100 {
		return fmt.Errorf("a ceiling of %d percent", s.Ceiling)
	}
	return nil
}

// SMs returns how many of a GPU's SMs a share is at most; 0 without a ceiling. Drivers round to a
// multiple that depends on the card, so a process may have fewer.
func (s Share) SMs(all int) int {
	if s.Ceiling == 0 {
		return 0
	}
	return (s.Ceiling*all + 99) / 100
}

// String is "ceiling 26 %"; "none" for the zero Share.
func (s Share) String() string {
	if s.Ceiling == 0 {
		return "none"
	}
	return fmt.Sprintf("ceiling %d %%", s.Ceiling)
}
