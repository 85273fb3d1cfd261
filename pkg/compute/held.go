// SPDX-License-Identifier: Apache-2.0

package compute

import "fmt"

// Guarantee is how strongly a share of the compute is held. Its values are published in the status,
// the metrics and the documents.
type Guarantee string

// Guarantees. "partition" is reserved for drivers that give each client SMs of its own.
const (
	// None: nothing that was seen holds the container to a share.
	None Guarantee = "none"
	// Ceiling: every process of the container on the GPU is a client of MPS, with at most the SMs
	// of its share.
	Ceiling Guarantee = "ceiling"
)

// Process is what is known of one process of a container on a GPU.
type Process struct {
	PID int
	// Client is true if the GPU's MPS server lists it as a client.
	Client bool
	// SMs is how many SMs the process has by its own count, on its usage page; 0 if it has not said
	// so. A program may write nonsense there.
	SMs int
}

// Held is how strongly a container's share is held, as it was last seen.
type Held struct {
	Guarantee Guarantee `json:"guarantee"`
	// Ceiling is the share, in percent, with the guarantee Ceiling; otherwise 0.
	Ceiling int `json:"ceiling,omitempty"`
	// Reason is why the guarantee is None, for people; otherwise empty.
	Reason string `json:"reason,omitempty"`
}

// String is "ceiling 26 %" or "none: no process yet".
func (h Held) String() string {
	switch {
	case h.Guarantee == Ceiling:
		return Share{Ceiling: h.Ceiling}.String()
	case h.Reason == "":
		return string(None)
	}
	return string(None) + ": " + h.Reason
}

// NoneFor returns the Held of a container that nothing holds, with the reason.
func NoneFor(reason string) Held { return Held{Guarantee: None, Reason: reason} }

// Verify returns how strongly a container is held to its share of a GPU with so many SMs, from the
// processes that it has there. trouble is why the GPU's MPS daemon cannot be relied on now; empty if
// it can.
func Verify(s Share, all int, trouble string, of []Process) Held {
	switch {
	case s.Ceiling == 0:
		return NoneFor("containers take turns")
	case trouble != "":
		return NoneFor(trouble)
	case len(of) == 0:
		return NoneFor("no process yet")
	case all <= 0:
		return NoneFor("the driver does not tell how many SMs the GPU has")
	}
	for _, p := range of {
		switch {
		case !p.Client:
			return NoneFor(fmt.Sprintf("process %d is no client of MPS", p.PID))
		case p.SMs == 0:
			return NoneFor(fmt.Sprintf("process %d has not said how many SMs it has", p.PID))
		case p.SMs > s.SMs(all):
			return NoneFor(fmt.Sprintf("process %d has %d SMs, and its share is %d of %d", p.PID, p.SMs, s.SMs(all), all))
		}
	}
	return Held{Guarantee: Ceiling, Ceiling: s.Ceiling}
}
