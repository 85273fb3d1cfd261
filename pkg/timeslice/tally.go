// SPDX-License-Identifier: Apache-2.0

package timeslice

import (
	"fmt"
	"math"

	"example.com/gpu-agent/pkg/gpu"
)

// tally is what is free, by GPU. The kubelet asks with thousands of IDs in map order while a pod
// waits. So count makes the tally in one pass, without allocating memory for each ID or sorting.
type tally struct {
	available, must []string
	// pieces has the parsed IDs of available, then of must.
	pieces []piece
	// gpus is in order of first appearance. No answer may depend on that order.
	gpus []Free
	at   map[string]int // index in gpus, by UUID
}

type piece struct {
	// gpu is an index into tally.gpus, or -1 for an available piece that must also names, so that
	// it is counted once.
	gpu    int32
	number uint16 // below MaxListed
	must   bool
}

// Free is how many devices of a GPU are free. Callers that count devices without a list of IDs make
// their own.
type Free struct {
	GPU gpu.UUID
	// N is how many devices are free, and Must how many of these are to be in the answer.
	N, Must int
	// Rank is the GPU's rank; math.MaxInt means none.
	Rank int
}

func count(available, must []string, n int) (*tally, error) {
	switch {
	case n < len(must):
		return nil, fmt.Errorf("%d devices asked for, but %d must be in the answer: %w", n, len(must), gpu.ErrInvalid)
	case len(available) > MaxListed || len(must) > MaxListed:
		return nil, fmt.Errorf("%d devices named, more than the %d that a resource can have: %w",
			max(len(available), len(must)), MaxListed, gpu.ErrInvalid)
	}
	t := &tally{
		available: available,
		must:      must,
		pieces:    make([]piece, len(available), len(available)+len(must)),
		gpus:      make([]Free, 0, 16),
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
		t.gpus[g].N++
		t.pieces[i] = piece{gpu: int32(g), number: uint16(number)}
	}
	if len(must) == 0 {
		return t, nil
	}
	// The kubelet names the pieces of must among the available ones, too.
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
		t.gpus[g].N++
		t.gpus[g].Must++
		t.pieces = append(t.pieces, piece{gpu: k.gpu, number: k.number, must: true})
	}
	for i := range available {
		p := &t.pieces[i]
		if t.gpus[p.gpu].Must == 0 {
			continue
		}
		if _, ok := musts[key{p.gpu, p.number}]; ok {
			t.gpus[p.gpu].N--
			p.gpu = -1
		}
	}
	return t, nil
}

// find returns the index of a GPU in gpus, and adds a new GPU to it. It returns -1 if uuid is not
// valid.
func (t *tally) find(uuid string) int {
	if g, ok := t.at[uuid]; ok {
		return g
	}
	if !validUUID(uuid) {
		return -1
	}
	t.gpus = append(t.gpus, Free{GPU: gpu.UUID(uuid), Rank: math.MaxInt})
	t.at[uuid] = len(t.gpus) - 1
	return len(t.gpus) - 1
}

// ranked notes the GPUs' ranks.
func (t *tally) ranked(rank map[gpu.UUID]int) {
	for i := range t.gpus {
		if r, ok := rank[t.gpus[i].GPU]; ok {
			t.gpus[i].Rank = r
		}
	}
}

// before reports whether f is used up before o: the fullest GPU comes first, then the one of lower
// rank, then of lower UUID. No two GPUs are equal.
func (f *Free) before(o *Free) bool {
	if f.N != o.N {
		return f.N < o.N
	}
	if f.Rank != o.Rank {
		return f.Rank < o.Rank
	}
	return f.GPU < o.GPU
}

func (t *tally) id(i int) string {
	if i < len(t.available) {
		return t.available[i]
	}
	return t.must[i-len(t.available)]
}

// lowest returns the n lowest-numbered pieces of a GPU, with all of must among them, by number. It
// uses a table over the numbers and does not sort.
func (t *tally) lowest(g, n int) ([]string, error) {
	top := 0
	for _, p := range t.pieces {
		if p.gpu == int32(g) {
			top = max(top, int(p.number))
		}
	}
	at := make([]int32, top+1) // 1 + index into pieces; 0: none
	for i, p := range t.pieces {
		if p.gpu != int32(g) {
			continue
		}
		if at[p.number] != 0 {
			return nil, fmt.Errorf("device %s is named twice: %w", t.id(i), gpu.ErrInvalid)
		}
		at[p.number] = int32(i) + 1
	}
	optional := n - t.gpus[g].Must
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
