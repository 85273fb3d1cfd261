// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// Presence is which allocations have processes on a GPU, by one answer of the driver. It is immutable.
type Presence struct {
	// At is the time at which the driver was asked.
	At time.Time
	// Sure is true if the allocations of every process are known, so that those that On lacks have none.
	Sure bool
	// On has the allocations with processes there, by ID.
	On map[string]bool
}

// Presence returns what the last look at a GPU found. ok is false if the guard does not run, or has not looked
// at the GPU. A look at which the driver does not answer changes nothing, so the time tells how old the answer is.
// On a GPU with a cap, or whose holders lend, it is renewed every few seconds, also if nothing happens.
func (g *Guard) Presence(u gpu.UUID) (p Presence, ok bool) {
	st := g.state.Load()
	if st.Off != "" {
		return Presence{}, false
	}
	p, ok = st.presences[u]
	return p, ok
}

// presence returns which allocations have processes in a scene. A process counts for all allocations of its
// container, since it may have memory of each.
func (e *examiner) presence(sc *scene) Presence {
	p := Presence{At: sc.sample.At, Sure: sc.whole, On: map[string]bool{}}
	for id := range sc.sums {
		c := e.containers[id]
		if c == nil {
			p.Sure = false // the runtime does not list it, or not yet
			continue
		}
		for _, key := range e.keys(c) {
			p.On[key] = true
		}
		// Of a container whose CDI devices the runtime has not told, it may lack some.
		p.Sure = p.Sure && !c.CDIUnknown
	}
	return p
}
