// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"testing"
	"time"

	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// busyWorld is a world whose driver tells how busy processes keep a GPU, but not of gpu1.
type busyWorld struct {
	*world
	asked []gpu.UUID
	since time.Time
}

func (w *busyWorld) Utilization(_ context.Context, since time.Time, gpus ...gpu.UUID) (map[gpu.UUID]map[int]float64, error) {
	w.asked, w.since = gpus, since
	return map[gpu.UUID]map[int]float64{gpu0: {10: 30, 11: 5, 99: 60}}, nil
}

// How busy a GPU is kept counts for the containers whose processes do it; where the driver does
// not say, there is no figure.
func TestSampled(t *testing.T) {
	w := &busyWorld{world: newWorld()}
	w.container("a", []int{10, 11}, 4*gib, gpu0)
	w.container("b", []int{20}, 4*gib, gpu0)
	w.container("c", []int{30}, lib.None, gpu1)
	w.uses(10, gpu0, gib)
	w.uses(11, gpu0, gib)
	w.uses(20, gpu0, gib)
	w.uses(30, gpu1, gib)
	before := time.Date(2026, 11, 27, 1, 0, 0, 0, time.UTC)
	watch(t, w.world, Options{}, func(g *Guard, pass func(time.Duration)) {
		pass(time.Minute)
		if c := g.Sampled(context.Background(), before); len(c) != 3 || c[0].SMPercent != nil {
			t.Errorf("of a driver that tells nothing: %+v", c)
		}
		g.driver = w
		by := map[string]status.Container{}
		for _, c := range g.Sampled(context.Background(), before) {
			by[c.Pod] = c
		}
		a, b, c := by["pod-a"].SMPercent, by["pod-b"].SMPercent, by["pod-c"].SMPercent
		if a == nil || *a != 35 || b == nil || *b != 0 || c != nil || len(w.asked) != 2 || !w.since.Equal(before) {
			t.Errorf("busy are %v, %v and %v, of %v since %v", a, b, c, w.asked, w.since)
		}
	})
}
