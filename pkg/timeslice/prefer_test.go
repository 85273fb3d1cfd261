// SPDX-License-Identifier: Apache-2.0

package timeslice

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sort"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

const (
	gpuA gpu.UUID = "GPU-aaaa"
	gpuB gpu.UUID = "GPU-bbbb"
	gpuC gpu.UUID = "GPU-cccc"
)

var abc = map[gpu.UUID]int{gpuA: 0, gpuB: 1, gpuC: 2}

// pieces is pieces from (included) to (excluded) of a GPU.
func pieces(u gpu.UUID, from, to int) []string {
	var ids []string
	for n := from; n < to; n++ {
		ids = append(ids, ID(u, n))
	}
	return ids
}

func join(lists ...[]string) []string { return slices.Concat(lists...) }

func TestPreferUnits(t *testing.T) {
	for _, c := range []struct {
		name            string
		available, must []string
		n               int
		rank            map[gpu.UUID]int
		want            []string
		refusal         string
	}{
		{name: "the fullest that fits", n: 3, rank: abc,
			available: join(pieces(gpuA, 0, 8), pieces(gpuB, 4, 8), pieces(gpuC, 6, 8)), want: pieces(gpuB, 4, 7)},
		{name: "equal GPUs by rank", n: 2, rank: map[gpu.UUID]int{gpuA: 1, gpuB: 0},
			available: join(pieces(gpuA, 0, 8), pieces(gpuB, 0, 8)), want: pieces(gpuB, 0, 2)},
		{name: "without rank by UUID", n: 2,
			available: join(pieces(gpuB, 0, 8), pieces(gpuA, 0, 8)), want: pieces(gpuA, 0, 2)},
		{name: "ranked before unranked", n: 2, rank: map[gpu.UUID]int{gpuB: 7},
			available: join(pieces(gpuA, 0, 8), pieces(gpuB, 0, 8)), want: pieces(gpuB, 0, 2)},
		{name: "all of one GPU", n: 8, rank: abc, available: pieces(gpuA, 0, 8), want: pieces(gpuA, 0, 8)},
		{name: "lowest numbers, as numbers", n: 3, rank: abc,
			available: []string{ID(gpuA, 10), ID(gpuA, 9), ID(gpuA, 100), ID(gpuA, 2)}, want: []string{ID(gpuA, 2), ID(gpuA, 9), ID(gpuA, 10)}},
		{name: "a must pins its GPU", n: 3, rank: abc,
			available: join(pieces(gpuA, 0, 8), pieces(gpuB, 0, 3)), must: pieces(gpuA, 5, 6), want: []string{ID(gpuA, 0), ID(gpuA, 1), ID(gpuA, 5)}},
		{name: "a must that is not listed as available", n: 2, rank: abc,
			available: pieces(gpuA, 1, 2), must: pieces(gpuA, 0, 1), want: pieces(gpuA, 0, 2)},
		{name: "only musts", n: 2, rank: abc, must: pieces(gpuB, 3, 5), want: pieces(gpuB, 3, 5)},
		{name: "nothing asked", n: 0, rank: abc, available: pieces(gpuA, 0, 2)},

		{name: "too big for any", n: 100, rank: abc, available: join(pieces(gpuA, 24, 79), pieces(gpuB, 40, 79), pieces(gpuC, 70, 79)),
			refusal: "100 units asked for, but a request lives on one GPU and the largest free block is 55 units, on GPU-aaaa; ask for at most 55, or wait until more is freed"},
		{name: "nothing free", n: 1, rank: abc, refusal: "1 unit asked for, but none is free; wait until some are freed"},
		{name: "pinned where there is no room", n: 6, rank: abc, available: join(pieces(gpuA, 0, 3), pieces(gpuB, 0, 8)), must: pieces(gpuA, 2, 3),
			refusal: "6 units asked for, but a request lives on one GPU and on GPU-aaaa this pod already holds 1 unit; it can have 3 there in all; ask for at most 3, or wait until more is freed"},
		{name: "pinned to two", n: 6, rank: abc, must: []string{ID(gpuB, 0), ID(gpuA, 0)}, refusal: "units of both GPU-aaaa and GPU-bbbb"},
		{name: "fewer than the musts", n: 1, rank: abc, must: pieces(gpuA, 0, 2), refusal: "1 devices asked for, but 2 must be in the answer"},
		{name: "a name of another resource", n: 1, rank: abc, available: []string{"GPU-aaaa"}, refusal: `device ID "GPU-aaaa" is not of the form`},
		{name: "a must of another resource", n: 1, rank: abc, must: []string{"MIG-aaaa::1"}, refusal: `device ID "MIG-aaaa::1" is not of the form`},
		{name: "twice the same", n: 2, rank: abc, available: []string{ID(gpuA, 1), ID(gpuA, 1)}, refusal: "GPU-aaaa::1 is named twice"},
		{name: "twice the same must", n: 2, rank: abc, must: []string{ID(gpuA, 1), ID(gpuA, 1)}, refusal: "GPU-aaaa::1 is named twice"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := PreferUnits(c.available, c.must, c.n, c.rank)
			check(t, got, err, c.want, c.refusal)
		})
	}
}

func TestPreferReplicas(t *testing.T) {
	for _, c := range []struct {
		name            string
		available, must []string
		n               int
		want            []string
		refusal         string
	}{
		{name: "the fullest", n: 1, available: join(pieces(gpuA, 0, 4), pieces(gpuB, 2, 4), pieces(gpuC, 1, 4)), want: pieces(gpuB, 2, 3)},
		{name: "different GPUs, fullest first", n: 2, available: join(pieces(gpuA, 0, 4), pieces(gpuB, 2, 4), pieces(gpuC, 1, 4)),
			want: []string{ID(gpuB, 2), ID(gpuC, 1)}},
		{name: "equal GPUs by rank", n: 2, available: join(pieces(gpuC, 0, 4), pieces(gpuB, 0, 4), pieces(gpuA, 0, 4)),
			want: []string{ID(gpuA, 0), ID(gpuB, 0)}},
		{name: "musts first", n: 2, available: join(pieces(gpuA, 0, 4), pieces(gpuB, 2, 4)), must: pieces(gpuA, 3, 4),
			want: []string{ID(gpuA, 3), ID(gpuB, 2)}},
		{name: "one a GPU is all there is", n: 3, available: join(pieces(gpuA, 0, 9), pieces(gpuB, 0, 9)),
			refusal: "3 replicas asked for, but each is of a different GPU and only 2 GPUs have a free replica; ask for at most 2, or wait until more are freed"},
		{name: "one GPU left", n: 2, available: pieces(gpuA, 0, 9),
			refusal: "2 replicas asked for, but each is of a different GPU and only 1 GPU has a free replica; ask for at most 1, or wait until more are freed"},
		{name: "nothing free", n: 1, refusal: "1 replica asked for, but none is free; wait until some are freed"},
		{name: "two musts of one GPU", n: 3, must: pieces(gpuA, 0, 2), refusal: "2 replicas of GPU-aaaa"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := PreferReplicas(c.available, c.must, c.n, abc)
			check(t, got, err, c.want, c.refusal)
		})
	}
}

func check(t *testing.T, got []string, err error, want []string, refusal string) {
	t.Helper()
	switch {
	case refusal != "" && err == nil:
		t.Errorf("got %q, want it refused with %q", got, refusal)
	case refusal != "" && !strings.Contains(err.Error(), refusal):
		t.Errorf("refused with %q, want %q", err, refusal)
	case refusal == "" && err != nil:
		t.Errorf("refused: %v", err)
	case !slices.Equal(got, want):
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

func TestCapacityEndsFalseHope(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{
		{&FitError{Asked: 100, Largest: 55, GPU: gpuA, Capacity: 79},
			"100 units asked for, but a request lives on one GPU and no GPU of this node has more than 79; the largest free block is 55 units, on GPU-aaaa; ask for at most 79"},
		{&FitError{Asked: 60, Largest: 55, GPU: gpuA, Capacity: 79},
			"60 units asked for, but a request lives on one GPU and the largest free block is 55 units, on GPU-aaaa; ask for at most 55, or wait until more is freed"},
		{&SpreadError{Asked: 9, Free: 3, Capacity: 8},
			"9 replicas asked for, but each is of a different GPU and this node shares 8 GPUs that way; ask for at most 8"},
	} {
		if c.err.Error() != c.want {
			t.Errorf("got  %q\nwant %q", c.err, c.want)
		}
		if !errors.Is(c.err, gpu.ErrNoRoom) {
			t.Errorf("%q is not gpu.ErrNoRoom", c.err)
		}
	}
}

func TestOneGPU(t *testing.T) {
	if u, err := OneGPU(pieces(gpuB, 3, 9)); err != nil || u != gpuB {
		t.Errorf("OneGPU of one GPU's units = %q, %v", u, err)
	}
	if u, err := OneGPU(nil); err == nil {
		t.Errorf("OneGPU of nothing = %q", u)
	}
	if u, err := OneGPU([]string{"GPU-aaaa"}); err == nil {
		t.Errorf("OneGPU of a whole GPU = %q", u)
	}
	// What the kubelet grants unasked: all that is free on the node.
	_, err := OneGPU(join(pieces(gpuC, 0, 2), pieces(gpuB, 3, 9), pieces(gpuA, 0, 6)))
	var fit *FitError
	if !errors.As(err, &fit) || *fit != (FitError{Asked: 14, Largest: 6, GPU: gpuA}) {
		t.Errorf("OneGPU of three GPUs' units: %v", err)
	}
}

func TestDistinctGPUs(t *testing.T) {
	if us, err := DistinctGPUs([]string{ID(gpuB, 3), ID(gpuA, 3)}); err != nil || !slices.Equal(us, []gpu.UUID{gpuB, gpuA}) {
		t.Errorf("DistinctGPUs of two = %q, %v", us, err)
	}
	if us, err := DistinctGPUs(nil); err == nil {
		t.Errorf("DistinctGPUs of nothing = %q", us)
	}
	_, err := DistinctGPUs([]string{ID(gpuB, 3), ID(gpuA, 3), ID(gpuB, 1)})
	var spread *SpreadError
	if !errors.As(err, &spread) || *spread != (SpreadError{Asked: 3, Free: 2}) {
		t.Errorf("two replicas of one GPU: %v", err)
	}
}

// TestPreferAsByDefinition holds both functions against the rules written down
// the slow way, in random worlds listed in random order.
func TestPreferAsByDefinition(t *testing.T) {
	const worlds = 20_000
	for seed := range uint64(worlds) {
		r := rand.New(rand.NewPCG(seed, 2))
		w := randomWorld(r)
		got, err := PreferUnits(w.available, w.must, w.n, w.rank)
		want, wantErr := slowUnits(w)
		if !slices.Equal(got, want) || fmt.Sprint(err) != fmt.Sprint(wantErr) {
			t.Fatalf("seed %d: PreferUnits(%q, must %q, %d)\ngot  %q, %v\nwant %q, %v", seed, w.available, w.must, w.n, got, err, want, wantErr)
		}
		if len(got) > 0 {
			if _, err := OneGPU(got); err != nil {
				t.Fatalf("seed %d: preferred units would be refused: %v", seed, err)
			}
		}
		got, err = PreferReplicas(w.available, w.must, w.n, w.rank)
		want, wantErr = slowReplicas(w)
		if wantErr == errAny && err != nil {
			wantErr = err
		}
		if !slices.Equal(got, want) || fmt.Sprint(err) != fmt.Sprint(wantErr) {
			t.Fatalf("seed %d: PreferReplicas(%q, must %q, %d)\ngot  %q, %v\nwant %q, %v", seed, w.available, w.must, w.n, got, err, want, wantErr)
		}
		if len(got) > 0 {
			if _, err := DistinctGPUs(got); err != nil {
				t.Fatalf("seed %d: preferred replicas would be refused: %v", seed, err)
			}
		}
	}
}

type world struct {
	available, must []string
	n               int
	rank            map[gpu.UUID]int
}

func randomWorld(r *rand.Rand) world {
	w := world{rank: map[gpu.UUID]int{}}
	pinned := r.IntN(3) == 0
	for g := range r.IntN(6) {
		u := gpu.UUID(fmt.Sprintf("GPU-%c%d", 'a'+r.IntN(26), g))
		if r.IntN(4) > 0 {
			w.rank[u] = r.IntN(3)
		}
		for _, n := range r.Perm(12)[:r.IntN(13)] {
			held := pinned && r.IntN(3) == 0
			if held {
				w.must = append(w.must, ID(u, n))
			}
			if !held || r.IntN(2) == 0 {
				w.available = append(w.available, ID(u, n))
			}
		}
		pinned = pinned && len(w.must) == 0
	}
	w.n = len(w.must) + r.IntN(14)
	r.Shuffle(len(w.available), func(i, j int) { w.available[i], w.available[j] = w.available[j], w.available[i] })
	r.Shuffle(len(w.must), func(i, j int) { w.must[i], w.must[j] = w.must[j], w.must[i] })
	return w
}

// byGPU is the numbers of what is free, sorted, and the GPUs in the order in
// which they are used up.
func (w world) byGPU() (free map[gpu.UUID][]int, order []gpu.UUID) {
	free = map[gpu.UUID][]int{}
	for _, id := range join(w.available, w.must) {
		u, n, err := ParseID(id)
		if err != nil {
			panic(err)
		}
		if !slices.Contains(free[u], n) {
			free[u] = append(free[u], n)
		}
	}
	for u := range free {
		sort.Ints(free[u])
		order = append(order, u)
	}
	sort.Slice(order, func(i, j int) bool {
		a, b := order[i], order[j]
		if len(free[a]) != len(free[b]) {
			return len(free[a]) < len(free[b])
		}
		ra, oka := w.rank[a]
		rb, okb := w.rank[b]
		if oka != okb {
			return oka
		}
		if ra != rb {
			return ra < rb
		}
		return a < b
	})
	return free, order
}

func slowUnits(w world) ([]string, error) {
	free, order := w.byGPU()
	if w.n == 0 {
		return nil, nil
	}
	if len(w.must) > 0 {
		u, _, _ := ParseID(w.must[0])
		order = []gpu.UUID{u}
	}
	for _, u := range order {
		if len(free[u]) < w.n {
			continue
		}
		answer := slices.Clone(w.must)
		for _, n := range free[u] {
			if len(answer) < w.n && !slices.Contains(answer, ID(u, n)) {
				answer = append(answer, ID(u, n))
			}
		}
		sort.Slice(answer, func(i, j int) bool {
			_, a, _ := ParseID(answer[i])
			_, b, _ := ParseID(answer[j])
			return a < b
		})
		return answer, nil
	}
	e := &FitError{Asked: w.n, Held: len(w.must)}
	for _, u := range order {
		if len(free[u]) > e.Largest {
			e.Largest, e.GPU = len(free[u]), u
		}
	}
	return nil, e
}

var errAny = errors.New("some error")

func slowReplicas(w world) ([]string, error) {
	free, order := w.byGPU()
	if len(w.must) > 1 { // randomWorld's musts are all of one GPU
		return nil, errAny
	}
	if w.n > len(order) {
		return nil, &SpreadError{Asked: w.n, Free: len(order)}
	}
	answer := slices.Clone(w.must)
	for _, u := range order {
		if len(answer) < w.n && !(len(w.must) > 0 && strings.HasPrefix(w.must[0], string(u)+"::")) {
			answer = append(answer, ID(u, free[u][0]))
		}
	}
	return answer, nil
}

// BenchmarkPreferUnits asks as the kubelet does: all free IDs, in random order,
// each a string of its own.
func BenchmarkPreferUnits(b *testing.B) {
	for _, c := range []struct{ gpus, units int }{{1, 80}, {8, 80}, {8, 320}, {16, 160}, {1, 2560}, {8, 7500}} {
		b.Run(fmt.Sprintf("devices=%d/gpus=%d", c.gpus*c.units, c.gpus), func(b *testing.B) {
			available, rank := node(c.gpus, c.units)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := PreferUnits(available, nil, 24, rank); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkPreferReplicas(b *testing.B) {
	available, rank := node(16, 160)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := PreferReplicas(available, nil, 4, rank); err != nil {
			b.Fatal(err)
		}
	}
}

func node(gpus, units int) (available []string, rank map[gpu.UUID]int) {
	r := rand.New(rand.NewPCG(1, 2))
	rank = map[gpu.UUID]int{}
	for g := range gpus {
		u := gpu.UUID(fmt.Sprintf("GPU-%08x-%04x-%04x-%04x-%012x", r.Uint32(), r.IntN(1<<16), r.IntN(1<<16), r.IntN(1<<16), r.Uint64N(1<<48)))
		rank[u] = g
		available = append(available, pieces(u, 0, units)...)
	}
	r.Shuffle(len(available), func(i, j int) { available[i], available[j] = available[j], available[i] })
	return available, rank
}
