// SPDX-License-Identifier: Apache-2.0

package crowd

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// Groups of pods that are bound together or not at all (PodGroup, Kubernetes 1.36).

var ignorable = flag.Bool("ignorable", false, "TestGangs has a scheduler that goes on without the placer's answer")

const (
	// workloads is the gate of the API server and the scheduler by which there are such groups.
	workloads = "GenericWorkload=true"
	podGroups = "/apis/scheduling.k8s.io/v1alpha2/namespaces/" + namespace + "/podgroups"
)

// gangNodes are nodes of which each has two GPUs that are shared by memory: a pod that fits on neither
// may fit by the sum of both.
var gangNodes = fleet{entries: [][]string{{"{devices: all, mode: shared}"}, {"{devices: all, mode: shared}"}, {"{devices: all, mode: shared}"}}, gangs: true}

// strict is a scheduler's configuration by which it does nothing without the placer's answer, as
// docs/placer.md advises where there are such groups.
func strict(t *testing.T, config string) string {
	t.Helper()
	const was = "ignorable: true"
	text, err := os.ReadFile(config)
	if err == nil && !strings.Contains(string(text), was) {
		err = fmt.Errorf("it does not say %s", was)
	}
	path := filepath.Join(t.TempDir(), "strict.yaml")
	said := strings.Replace(string(text), was, fmt.Sprint("ignorable: ", *ignorable), 1)
	if err := errors.Join(err, os.WriteFile(path, []byte(said), 0o600)); err != nil {
		t.Fatalf("%s: %v", config, err)
	}
	return path
}

// gang is a group of pods, of which at least so many are to run.
type gang struct {
	name  string
	least int
	pods  []*request
}

// state is how many of a gang's pods are bound, run, or were refused by a kubelet.
func (c *named) state(g *gang) (bound, running, failed int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range g.pods {
		p := c.pods[r.name]
		switch {
		case p.failed:
			failed++
		case p.running:
			running++
		}
		if p.node != nil {
			bound++
		}
	}
	return bound, running, failed
}

// decided waits until one of some gangs runs, or was refused by a kubelet.
func (c *named) decided(alive []*gang) (which int) {
	c.t.Helper()
	c.Await(c.t, "a group is decided on", func() error {
		var waits []string
		for i, g := range alive {
			bound, running, failed := c.state(g)
			if which = i; failed > 0 || running >= g.least && running == bound {
				return nil
			}
			waits = append(waits, fmt.Sprintf("%s of %d: %d bound, %d running", g.name, len(g.pods), bound, running))
		}
		return errors.New(strings.Join(waits, "; "))
	})
	return which
}

// drawGang draws a group that fits on the nodes while these are empty: of two to five pods, each of
// which takes more than half a GPU or less. Of one in four a pod may be missing.
func drawGang(rng *rand.Rand, name string) *gang {
	g := &gang{name: name}
	for i := range 2 + rng.IntN(4) {
		g.pods = append(g.pods, &request{name: fmt.Sprintf("%s-%d", name, i), gib: []int{50, 50, 50, 29}[rng.IntN(4)], group: name})
	}
	if g.least = len(g.pods); rng.IntN(4) == 0 {
		g.least--
	}
	return g
}

func (c *named) sendGang(g *gang) {
	c.t.Helper()
	create(c.t, c.Server, podGroups, map[string]any{"metadata": map[string]any{"name": g.name}, "spec": map[string]any{"schedulingPolicy": map[string]any{"gang": map[string]any{"minCount": g.least}}}})
	c.sendAll(g.pods)
}

func (c *named) endGang(g *gang) {
	var names []string
	for _, r := range g.pods {
		names = append(names, r.name)
	}
	c.end(names)
}

// late is how long an answer is held back: one in eight up to 400 ms. The scheduler gives up after 250.
func late() time.Duration {
	if rand.IntN(8) > 0 {
		return 0
	}
	return time.Duration(rand.Int64N(int64(400 * time.Millisecond)))
}

// Groups come, more at a time than there is room for, and answers of the placer are late at random,
// one in twenty too late for the scheduler. Of each group as many pods run as it needs, and none is
// refused by a kubelet.
func TestGangs(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: TestGroupWithoutRoom of internal/fleet and others decide what it shows")
	}
	const all, together = 200, 5
	rng := rand.New(rand.NewPCG(*first, 36))
	c := startNamed(t, gangNodes, true, func(door string) string { return slowWay(t, door, late) })
	var alive []*gang
	broken, began, sent := 0, time.Now(), 0
	for over := 0; over < all; over++ {
		for ; len(alive) < together && sent < all; sent++ {
			g := drawGang(rng, fmt.Sprint("gang-", sent))
			c.sendGang(g)
			alive = append(alive, g)
		}
		i := c.decided(alive)
		g := alive[i]
		if bound, running, failed := c.state(g); failed > 0 {
			broken++
			t.Logf("%s is broken: of %d pods %d are bound, %d run, and %d were refused by kubelets", g.name, len(g.pods), bound, running, failed)
		}
		c.endGang(g)
		alive = slices.Delete(alive, i, i+1)
	}
	unguarded := c.placer.Metric(t, "gpu_agent_placer_unguarded_pods_total")
	t.Logf("seed %d: of %d groups %d are broken, %v pods unguarded, in %.0f s; answers: placed %v, refused %v, deferred %v, late %v", *first, all, broken, unguarded,
		time.Since(began).Seconds(), c.answers("placed"), c.answers("refused"), c.answers("deferred"), c.answers("late"))
	c.mu.Lock()
	refused := c.done["refused"]
	c.mu.Unlock()
	if broken+refused > 0 {
		t.Errorf("%d of %d groups are broken, %d pods were refused by kubelets", broken, all, refused)
	}
	c.over(t)
}

// answers are how many answers to the scheduler's questions had an outcome.
func (c *named) answers(outcome string) float64 {
	return c.placer.Metric(c.t, fmt.Sprintf("gpu_agent_placer_answers_total{outcome=%q,verb=\"filter\"}", outcome))
}
