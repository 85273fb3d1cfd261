// SPDX-License-Identifier: Apache-2.0

package crowd

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"example.com/gpu-agent/tests/emulator/mps"
)

// TestMain is also the emulated programs of MPS, which are this binary.
func TestMain(m *testing.M) {
	mps.Main()
	os.Exit(m.Run())
}

// TestMPSCrowd: a crowd of pods with shares of GPUs under MPS, each by its memory or with a percentage of its
// own. All that fits runs, and none is refused.
func TestMPSCrowd(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	const pods = 200
	c := startCluster(t, slices.Repeat([][]string{{"{devices: all, mode: shared, compute: {mps: {factor: 2, max: 80}}, api: dra}"}}, 2), true)
	rng := rand.New(rand.NewPCG(*first, 42))
	began, waves, ran := time.Now(), 0, 0
	for n := 0; n < pods; waves++ {
		for asked := 0.0; asked < demand*float64(gpus*len(c.nodes)) && n < pods; n++ {
			r := &request{name: fmt.Sprintf("mps-%d", n), gib: 4 + rng.IntN(29)}
			if rng.IntN(3) == 0 {
				r.compute = 1 + rng.IntN(100)
			}
			c.send(r)
			asked += r.size()
		}
		ran += len(c.settled())
		c.endAll()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	t.Logf("%d pods in %d waves of more than there is room for, in %.0f s: %d have run at once; %v", pods, waves,
		time.Since(began).Seconds(), ran, c.done)
	for _, line := range c.wrong {
		t.Error(line)
	}
	if ran < pods/2 {
		t.Errorf("%d of %d pods have run", ran, pods)
	}
}
