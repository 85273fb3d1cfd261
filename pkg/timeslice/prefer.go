// SPDX-License-Identifier: Apache-2.0

package timeslice

import (
	"fmt"
	"slices"

	"example.com/gpu-agent/pkg/gpu"
)

// PreferUnits chooses n units of one GPU. Of the GPUs with n free units it takes the fullest, then
// the one of lowest rank, then of lowest UUID. A GPU without a rank comes after all that have one.
// The answer has the lowest numbers, in order.
//
// Units in must are in the answer and fix the GPU. They count as free even if available lacks them.
// Neither list may name an ID twice, and n must be at least len(must).
//
// The error is a [FitError] if no GPU has room. For invalid arguments it wraps gpu.ErrInvalid.
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

// Fullest returns the index of the GPU from which [PreferUnits] takes n units if must is empty, or
// -1 if no GPU has as many free.
func Fullest(of []Free, n int) int {
	best := -1
	for g := range of {
		if of[g].N >= n && (best < 0 || of[g].before(&of[best])) {
			best = g
		}
	}
	return best
}

// PreferReplicas chooses one replica of each of n GPUs: first the GPUs of must, then those with the
// fewest free replicas, then of lowest rank, then of lowest UUID. Of each GPU it takes the replica
// of lowest number. The answer is in that order.
//
// Replicas in must count as free even if available lacks them. Neither list may name an ID twice,
// and n must be at least len(must).
//
// The error is a [SpreadError] if too few GPUs have a free replica. For invalid arguments it wraps
// gpu.ErrInvalid.
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
	// For each GPU take its piece of must, or else the lowest number.
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

// Fewest returns the indexes of the n GPUs from which [PreferReplicas] takes a replica each: those
// with a replica in must first. It returns fewer if fewer have one free.
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

// OneGPU returns the GPU that all units of a grant are on. If they are on several GPUs, it returns
// a [FitError]: the kubelet grants such units, without asking, to a request for all that is free on
// the node.
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

// DistinctGPUs returns the GPUs of a grant's replicas, in the order of ids. If two replicas are on
// one GPU, it returns a [SpreadError].
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
	// Each ID is of another GPU, so the GPUs are in the order of ids.
	uuids := make([]gpu.UUID, len(t.gpus))
	for i := range t.gpus {
		uuids[i] = t.gpus[i].GPU
	}
	return uuids, nil
}
