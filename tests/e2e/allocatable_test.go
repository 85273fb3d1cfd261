// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

// window is what the agent says to the kubelet, beside what the API server shows.
type window struct {
	*bench
	lists *lab.Recording
	node  *lab.NodeRecording
	// had is what the lists said at first.
	had   map[string]int
	began time.Time
}

// watchWindow begins to watch both.
func (b *bench) watchWindow() *window {
	b.Helper()
	w := &window{bench: b, lists: b.record(), began: time.Now()}
	for name := range placements(demandGPUs) {
		b.hears(w.lists, name)
	}
	ctx, cancel := context.WithCancel(b.ctx)
	var err error
	w.node, err = node.RecordNode(ctx)
	b.must(err)
	b.Cleanup(func() {
		cancel()
		if err := w.node.Wait(); err != nil {
			b.Error(err)
		}
	})
	w.had = w.listed()
	return w
}

// listed is how many healthy devices of each resource the newest lists have.
func (w *window) listed() map[string]int {
	out := map[string]int{}
	for name, devices := range w.lists.Devices() {
		out[name] = 0
		for _, health := range devices {
			if health == "Healthy" {
				out[name]++
			}
		}
	}
	return out
}

// equal waits until the API server shows what the lists say.
func (w *window) equal(when string) {
	w.Helper()
	w.must(lab.Await(w.ctx, time.Minute, "the node to offer what the lists say "+when, func(context.Context) error {
		words := w.node.Words()
		now := words[len(words)-1].Allocatable
		var errs []error
		for name, n := range w.listed() {
			if now[name] != n {
				errs = append(errs, fmt.Errorf("%s: %d, the list has %d", name, now[name], n))
			}
		}
		return errors.Join(errs...)
	}))
}

// falls are how long after each list with fewer devices of a resource the API server
// showed no more than that. A list that another one replaced before then does not count.
func (w *window) falls() (took []time.Duration) {
	turns := slices.DeleteFunc(w.lists.Turns(w.began), func(t lab.Turn) bool { return t.Resource == lab.GPU })
	words, now := w.node.Words(), w.had
	for i, t := range turns {
		was := now[t.Resource]
		if t.From == "Healthy" {
			now[t.Resource]--
		}
		if t.To == "Healthy" {
			now[t.Resource]++
		}
		until := time.Now()
		same := false
		for _, u := range turns[i+1:] {
			if u.Resource == t.Resource {
				same, until = u.At.Sub(t.At) < time.Millisecond, u.At
				break
			}
		}
		if same || now[t.Resource] >= was {
			continue // the same list says more, or it did not fall
		}
		for _, word := range words {
			if shown, there := word.Allocatable[t.Resource]; there && shown <= now[t.Resource] && word.At.After(t.At.Add(-50*time.Millisecond)) {
				if word.At.Before(until) {
					took = append(took, max(0, word.At.Sub(t.At)))
				}
				break
			}
		}
	}
	slices.Sort(took)
	return took
}

func quantiles(took []time.Duration) string {
	if len(took) == 0 {
		return "none"
	}
	at := func(share float64) time.Duration {
		return took[int(share*float64(len(took)-1))].Round(time.Millisecond)
	}
	return fmt.Sprintf("%d falls, p50 %v, p95 %v, at most %v", len(took), at(0.5), at(0.95), at(1))
}

// beginWindow has a node with three GPUs on demand, whose kubelet is as users have it.
func beginWindow(t *testing.T) *bench {
	t.Helper()
	world := migWorld
	world.World += "gpus:\n"
	for index := range demandGPUs {
		world.World += fmt.Sprintf("  - {index: %d, mig: true}\n", index)
	}
	b := beginMIG(t, world, demandPartitions, placements(demandGPUs))
	b.usersStatus()
	b.offersAll(placements(demandGPUs))
	return b
}

// TestAllocatableAtOnce: an allocation of one placement withdraws those of other profiles
// that overlap it, and the scheduler hears of that long before the kubelet tells it. In
// the end the node offers what the lists say, also where agent or kubelet have started
// anew in between.
func TestAllocatableAtOnce(t *testing.T) {
	b := beginWindow(t)
	w := b.watchWindow()
	draw := rand.New(rand.NewPCG(17, 3))
	profiles := []string{"1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"}
	for round := range count(3, 30) {
		pod := b.pod(fmt.Sprintf("at-once-%d", round), lab.MIG(profiles[draw.IntN(len(profiles))]), 1)
		b.must(pod.Running(b.ctx))
		if *long {
			switch draw.IntN(4) {
			case 0:
				b.must(agent.Crash(b.ctx))
			case 1:
				b.must(node.CrashKubelet(b.ctx))
			}
		}
		w.equal("while " + pod.Name + " runs")
		b.must(pod.Delete(b.ctx))
		w.equal("after " + pod.Name)
	}
	m, err := agent.Metrics(b.ctx)
	b.must(err)
	b.Logf("from the list to the API server: %s; lowered %v times after a list, %v times after the kubelet's word",
		quantiles(w.falls()), m[`gpu_agent_allocatable_writes_total{cause="list"}`], m[`gpu_agent_allocatable_writes_total{cause="kubelet"}`])
}

// everyOther sends a pod every two seconds, each for some seconds, and returns how many
// were refused.
func (b *bench) everyOther(pods int) (refused int) {
	b.Helper()
	draw := rand.New(rand.NewPCG(17, 9))
	var names []string
	b.Cleanup(func() {
		for _, name := range names {
			if err := node.DeleteJob(context.Background(), name); err != nil {
				b.Error(err)
			}
		}
	})
	profiles := []string{"1g.10gb", "1g.10gb", "1g.10gb", "2g.20gb", "2g.20gb", "3g.40gb", "3g.40gb", "7g.80gb"}
	tick := time.NewTicker(2 * time.Second)
	defer tick.Stop()
	for i := range pods {
		profile := profiles[draw.IntN(len(profiles))]
		name := fmt.Sprintf("%s-%d", strings.ReplaceAll(b.short(), "_", "-"), i)
		b.must(node.CreateRetried(b.ctx, lab.Pod{Name: name, Containers: []lab.Container{{Resources: map[string]int{lab.MIG(profile): 1},
			Then: fmt.Sprintf("sleep %d; exit 0\n", 4+draw.IntN(12))}}}, 0))
		names = append(names, name)
		<-tick.C
	}
	b.must(lab.Await(b.ctx, 5*time.Minute, "every pod to have run or been refused", func(ctx context.Context) error {
		refused = 0
		for _, name := range names {
			s, err := node.JobState(ctx, name)
			if err != nil {
				return err
			}
			if s.Ended == "" {
				return fmt.Errorf("%s has not", name)
			}
			refused += s.FailedPods
		}
		return nil
	}))
	return refused
}

// TestWindow measures what it costs that the scheduler hears late of an allocation: how
// many pods the kubelet refuses, and how often the Node is written. The short form has the
// agent's own way alone; -long compares it with kubelets that look every ten seconds and
// every second, five runs of each.
func TestWindow(t *testing.T) {
	b := beginWindow(t)
	type arm struct {
		name    string
		env     map[string]string
		kubelet string
	}
	off := map[string]string{"GPU_AGENT_LOWER_ALLOCATABLE": "false"}
	arms := []arm{{name: "patch"}}
	if *long {
		arms = []arm{{"ten-seconds", off, ""}, {"one-second", off, "nodeStatusUpdateFrequency: 1s\nnodeStatusReportFrequency: 5m\n"}, {"patch", nil, ""}}
	}
	for _, a := range arms {
		if *long {
			b.redeploy(lab.DeployOptions{Partitions: demandPartitions, Env: a.env})
			b.must(node.SetKubelet(b.ctx, a.kubelet))
		}
		for run := range count(1, 5) {
			b.sub(fmt.Sprintf("%s-%d", a.name, run), func(b *bench) {
				b.offersAll(placements(demandGPUs))
				w := b.watchWindow()
				pods := count(10, 60)
				refused := b.everyOther(pods)
				said := fmt.Sprintf("one every 2 s: %d of %d refused", refused, pods)
				if *long {
					said += "; 22 at once: " + b.atOnce(false)
				}
				span := time.Since(w.began)
				b.Logf("%s; from the list to the API server: %s; the Node was written %d times in %.0f s", said, quantiles(w.falls()), len(w.node.Words())-1, span.Seconds())
			})
		}
	}
}
