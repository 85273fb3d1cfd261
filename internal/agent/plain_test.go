// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
)

// plainOwner is the front-end of plain.
const plainOwner ledger.FrontEnd = "plain"

// plain is a second front-end, as small as one can be: somebody asks for a whole GPU
// by a plain ID, prepares it, runs on it and releases it. It knows no device ID, no
// kubelet and no witness: who has what is what it was told itself.
type plain struct {
	s    *storm
	next int
	// has is the GPU of each allocation, runs those whose work has begun.
	has  map[string]gpu.UUID
	runs map[string]bool
}

// step does one thing that a user of the front-end may do.
func (p *plain) step() {
	ids := slices.Sorted(maps.Keys(p.has))
	if len(ids) == 0 || p.s.rng.IntN(3) == 0 {
		p.take(uuid(p.s.rng.IntN(p.s.gpus)))
		return
	}
	switch id := ids[p.s.rng.IntN(len(ids))]; p.s.rng.IntN(3) {
	case 0:
		p.release(id)
	default:
		p.prepare(id)
	}
}

func (p *plain) take(u gpu.UUID) {
	p.next++
	id := fmt.Sprintf("%016x", p.next)
	a, err := p.s.agent.ledger.Take(ledger.Request{ID: id, Owner: plainOwner, Resource: "plain/gpu",
		Grants: []ledger.Grant{{GPU: u, Piece: ledger.Piece{Kind: ledger.Whole}, Cap: ledger.NoCap}}})
	if err != nil {
		return // the kubelet has it, or somebody else of ours
	}
	p.s.note("plain: %s has %s", id, u)
	p.has[id] = u
	p.s.agent.granted(&a)
	p.s.locked(func() { p.s.done["plain"]++ })
}

// prepare begins the work of an allocation that may have its container made. Nobody
// is on a GPU that no allocation has.
func (p *plain) prepare(id string) {
	l := p.s.agent.ledger
	if a, ok := l.Get(id); ok {
		l.Looked(id, a.Epoch, "", "")
	}
	ctx, cancel := context.WithTimeout(p.s.ctx, 10*time.Millisecond)
	defer cancel()
	if err := l.Prepare(ctx, id); err != nil {
		return
	}
	p.runs[id] = true
	p.s.locked(func() { p.s.done["plain runs"]++ })
}

func (p *plain) release(id string) {
	if _, ok := p.s.agent.ledger.Release(plainOwner, id); !ok {
		p.s.t.Errorf("the ledger does not have %s", id)
	}
	p.s.note("plain: %s is released", id)
	delete(p.has, id)
	delete(p.runs, id)
	p.s.agent.wake()
}

// restart is for after an agent has taken its predecessor's allocations over. What this
// front-end has not is released: nobody else would. What the records have lost is taken
// over from its own word, as the device plugin takes the kubelet's.
func (p *plain) restart() {
	l := p.s.agent.ledger
	for _, a := range l.Allocations() {
		if a.Owner == plainOwner && p.has[a.ID] != a.Grants[0].GPU {
			l.Release(plainOwner, a.ID)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(p.has)) {
		r := ledger.Record{Owner: plainOwner, Resource: "plain/gpu", Grants: []ledger.Grant{{GPU: p.has[id], Piece: ledger.Piece{Kind: ledger.Whole}, Cap: ledger.NoCap}}}
		lost, err := l.Found(id, r, time.Time{})
		if err != nil || lost && p.runs[id] {
			p.s.t.Errorf("%s runs, and was not taken over from its records: %v", id, err)
		}
		l.Looked(id, 0, "", "") // nobody else can be on its GPU
	}
}

// check is what must be true at any moment: a GPU is one front-end's.
func (p *plain) check(when string) {
	of := map[gpu.UUID]string{}
	for id, u := range p.has {
		if of[u] != "" {
			p.s.t.Errorf("%s: %s and %s have %s", when, id, of[u], u)
		}
		of[u] = id
		if p.runs[id] && p.s.specs[id] == nil && p.s.agent.reader.answered && !p.s.agent.gates.faulty(u) {
			p.s.t.Errorf("%s: %s runs on %s and its file is gone", when, id, u)
		}
	}
	for _, c := range p.s.containers {
		for _, ids := range c.ids {
			for _, dev := range ids {
				u := gpu.UUID(strings.Split(dev, "::")[0])
				if of[u] != "" && p.runs[of[u]] {
					p.s.t.Errorf("%s: %s of the kubelet's and %s of another front-end run on %s", when, c.ID, of[u], u)
				}
			}
		}
	}
}
