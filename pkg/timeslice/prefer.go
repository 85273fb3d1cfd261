// SPDX-License-Identifier: Apache-2.0

package timeslice

import (
	"fmt"
	"slices"

	"example.com/gpu-agent/pkg/gpu"
)

// PreferUnits chooses n units of one GPU: of those that have n free the
// fullest, then the one of lowest rank, then of lowest UUID; and of it the
// lowest numbers, in order. A GPU that rank lacks comes after all that it has.
//
// Units in must are in the answer and pin the GPU. They count as free whether
// or not available names them too. Neither list may name an ID twice, and n is
// at least len(must).
//
// The error is a [FitError] where no GPU has room; everything else that is
// wrong with the arguments answers to gpu.ErrInvalid.
func PreferUnits(available, must []string, n int, rank map[gpu.UUID]int) ([]string, error) {
	t, err := count(available, must, n)
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return nil, nil
	}
	t.ranked(rank)
	best, largest, pinned := Fullest(t.gpus, n), -1, -1
	for g := range t.gpus {
		if t.gpus[g].Must > 0 {
			if pinned >= 0 {
				a, b := t.gpus[pinned].GPU, t.gpus[g].GPU
				return nil, fmt.Errorf("units of both %s and %s are to be in the answer, "+
					"but a request lives on one GPU: %w", min(a, b), max(a, b), gpu.ErrInvalid)
			}
			pinned = g
		}
		better := largest < 0 || t.gpus[g].N > t.gpus[largest].N
		if better || t.gpus[g].N == t.gpus[largest].N && t.gpus[g].before(&t.gpus[largest]) {
			largest = g
		}
	}
	held := 0
	if pinned >= 0 {
		largest, held = pinned, t.gpus[pinned].Must
		if best = pinned; t.gpus[pinned].N < n {
			best = -1
		}
	}
	if best < 0 {
		e := &FitError{Asked: n, Held: held}
		if largest >= 0 {
			e.Largest, e.GPU = t.gpus[largest].N, t.gpus[largest].GPU
		}
		return nil, e
	}
	return t.lowest(best, n)
}

// Fullest is the GPU of which [PreferUnits] chooses n units where none are given: where it is in
// the list, -1 where none has as many free.
func Fullest(of []Free, n int) int {
	best := -1
	for g := range of {
		if of[g].N >= n && (best < 0 || of[g].before(&of[best])) {
			best = g
		}
	}
	return best
}

// PreferReplicas chooses one replica of each of n GPUs: those of must, then the
// GPUs with the fewest free replicas, then of lowest rank, then of lowest UUID;
// of each GPU the replica of lowest number. The answer is in that order.
//
// Replicas in must count as free whether or not available names them too.
// Neither list may name an ID twice, and n is at least len(must).
//
// The error is a [SpreadError] where too few GPUs have a free replica;
// everything else that is wrong with the arguments answers to gpu.ErrInvalid.
func PreferReplicas(available, must []string, n int, rank map[gpu.UUID]int) ([]string, error) {
	t, err := count(available, must, n)
	if err != nil {
		return nil, err
	}
	for g := range t.gpus {
		if t.gpus[g].Must > 1 {
			return nil, fmt.Errorf("%d replicas of %s are to be in the answer, but each is of a different GPU: %w",
				t.gpus[g].Must, t.gpus[g].GPU, gpu.ErrInvalid)
		}
	}
	if n > len(t.gpus) {
		return nil, &SpreadError{Asked: n, Free: len(t.gpus)}
	}
	// One replica a GPU: a must, or else the lowest number.
	of := make([]int, len(t.gpus))
	for i := range of {
		of[i] = -1
	}
	for i, p := range t.pieces {
		if p.gpu < 0 {
			continue
		}
		old := of[p.gpu]
		switch {
		case old < 0, p.must && !t.pieces[old].must, p.must == t.pieces[old].must && p.number < t.pieces[old].number:
			of[p.gpu] = i
		}
	}
	t.ranked(rank)
	answer := make([]string, 0, n)
	for _, g := range Fewest(t.gpus, n) {
		answer = append(answer, t.id(of[g]))
	}
	return answer, nil
}

// Fewest are the n GPUs of which [PreferReplicas] chooses a replica each, by their places in the
// list, those of which one is given first; fewer where fewer have one free.
func Fewest(of []Free, n int) []int {
	var all []int
	for g := range of {
		if of[g].N > 0 {
			all = append(all, g)
		}
	}
	slices.SortFunc(all, func(a, b int) int {
		switch x, y := &of[a], &of[b]; {
		case x.Must != y.Must:
			return y.Must - x.Must
		case x.before(y):
			return -1
		}
		return 1
	})
	return all[:min(n, len(all))]
}

// OneGPU is the GPU that all units of a grant are on. Units of several GPUs are
// a [FitError]: the kubelet grants them, unasked, where a request takes all
// that is free on the node.
func OneGPU(ids []string) (gpu.UUID, error) {
	t, err := count(ids, nil, len(ids))
	if err != nil {
		return "", err
	}
	switch len(t.gpus) {
	case 0:
		return "", fmt.Errorf("no device granted: %w", gpu.ErrInvalid)
	case 1:
		return t.gpus[0].GPU, nil
	}
	e := &FitError{Asked: len(ids)}
	for _, g := range t.gpus {
		if g.N > e.Largest || g.N == e.Largest && g.GPU < e.GPU {
			e.Largest, e.GPU = g.N, g.GPU
		}
	}
	return "", e
}

// DistinctGPUs is the GPUs of a grant's replicas, in the order of ids. Two
// replicas of one GPU are a [SpreadError].
func DistinctGPUs(ids []string) ([]gpu.UUID, error) {
	t, err := count(ids, nil, len(ids))
	if err != nil {
		return nil, err
	}
	if len(ids) == 0 {
		return nil, fmt.Errorf("no device granted: %w", gpu.ErrInvalid)
	}
	if len(t.gpus) < len(ids) {
		return nil, &SpreadError{Asked: len(ids), Free: len(t.gpus)}
	}
	// Each ID brought a GPU of its own, so the GPUs are in the order of ids.
	uuids := make([]gpu.UUID, len(t.gpus))
	for i := range t.gpus {
		uuids[i] = t.gpus[i].GPU
	}
	return uuids, nil
}
