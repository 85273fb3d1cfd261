// SPDX-License-Identifier: Apache-2.0

package timeslice

import (
	"fmt"
	"math"

	"example.com/gpu-agent/pkg/gpu"
)

// tally is what is free, by GPU. The kubelet asks with thousands of IDs in map
// order while a pod waits, so it is made in one pass, without an allocation
// for an ID, and nothing is sorted.
type tally struct {
	available, must []string
	// pieces is available, then must, parsed.
	pieces []piece
	// gpus is in order of first appearance, which no answer may depend on.
	gpus []onGPU
	at   map[string]int // where in gpus a UUID is
}

type piece struct {
	// gpu is an index into tally.gpus; -1 for a must that available names too,
	// so that it is counted once.
	gpu    int32
	number uint16 // below MaxListed
	must   bool
}

type onGPU struct {
	uuid       string
	free, must int
}

func count(available, must []string, n int) (*tally, error) {
	switch {
	case n < len(must):
		return nil, fmt.Errorf("%d devices asked for, of which %d are given: %w", n, len(must), gpu.ErrInvalid)
	case len(available) > MaxListed || len(must) > MaxListed:
		return nil, fmt.Errorf("%d devices named, more than the %d that a resource can have: %w", max(len(available), len(must)), MaxListed, gpu.ErrInvalid)
	}
	t := &tally{
		available: available,
		must:      must,
		pieces:    make([]piece, len(available), len(available)+len(must)),
		gpus:      make([]onGPU, 0, 16),
		at:        make(map[string]int, 16),
	}
	for i, id := range available {
		uuid, number, ok := split(id)
		if !ok {
			return nil, idError(id)
		}
		g := t.find(uuid)
		if g < 0 {
			return nil, idError(id)
		}
		t.gpus[g].free++
		t.pieces[i] = piece{gpu: int32(g), number: uint16(number)}
	}
	if len(must) == 0 {
		return t, nil
	}
	// The kubelet names the musts among the available, too.
	type key struct {
		gpu    int32
		number uint16
	}
	musts := make(map[key]struct{}, len(must))
	for _, id := range must {
		uuid, number, ok := split(id)
		if !ok {
			return nil, idError(id)
		}
		g := t.find(uuid)
		if g < 0 {
			return nil, idError(id)
		}
		k := key{int32(g), uint16(number)}
		if _, twice := musts[k]; twice {
			return nil, fmt.Errorf("device %s is named twice: %w", id, gpu.ErrInvalid)
		}
		musts[k] = struct{}{}
		t.gpus[g].free++
		t.gpus[g].must++
		t.pieces = append(t.pieces, piece{gpu: k.gpu, number: k.number, must: true})
	}
	for i := range available {
		p := &t.pieces[i]
		if t.gpus[p.gpu].must == 0 {
			continue
		}
		if _, ok := musts[key{p.gpu, p.number}]; ok {
			t.gpus[p.gpu].free--
			p.gpu = -1
		}
	}
	return t, nil
}

// find returns the index of a GPU in gpus, where it puts one that is new, and -1
// for what is not a UUID.
func (t *tally) find(uuid string) int {
	if g, ok := t.at[uuid]; ok {
		return g
	}
	if !validUUID(uuid) {
		return -1
	}
	t.gpus = append(t.gpus, onGPU{uuid: uuid})
	t.at[uuid] = len(t.gpus) - 1
	return len(t.gpus) - 1
}

// before is the order in which GPUs are used up: the fullest first, then by
// rank, then by UUID, so that no two are equal.
func (t *tally) before(a, b int, rank map[gpu.UUID]int) bool {
	x, y := &t.gpus[a], &t.gpus[b]
	if x.free != y.free {
		return x.free < y.free
	}
	if rx, ry := rankOf(x, rank), rankOf(y, rank); rx != ry {
		return rx < ry
	}
	return x.uuid < y.uuid
}

func rankOf(g *onGPU, rank map[gpu.UUID]int) int {
	if r, ok := rank[gpu.UUID(g.uuid)]; ok {
		return r
	}
	return math.MaxInt
}

func (t *tally) id(i int) string {
	if i < len(t.available) {
		return t.available[i]
	}
	return t.must[i-len(t.available)]
}

// lowest is n pieces of a GPU, musts included, by number: a table over the
// numbers instead of a sort.
func (t *tally) lowest(g, n int) ([]string, error) {
	top := 0
	for _, p := range t.pieces {
		if p.gpu == int32(g) {
			top = max(top, int(p.number))
		}
	}
	at := make([]int32, top+1) // index into pieces, plus one
	for i, p := range t.pieces {
		if p.gpu != int32(g) {
			continue
		}
		if at[p.number] != 0 {
			return nil, fmt.Errorf("device %s is named twice: %w", t.id(i), gpu.ErrInvalid)
		}
		at[p.number] = int32(i) + 1
	}
	optional := n - t.gpus[g].must
	answer := make([]string, 0, n)
	for _, i := range at {
		switch {
		case i == 0:
			continue
		case t.pieces[i-1].must:
		case optional == 0:
			continue
		default:
			optional--
		}
		if answer = append(answer, t.id(int(i)-1)); len(answer) == n {
			break
		}
	}
	return answer, nil
}
