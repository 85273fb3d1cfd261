// SPDX-License-Identifier: Apache-2.0

package queues

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"

	"example.com/gpu-agent/pkg/mig"
)

const (
	one, three = "example.com/mig-1g.10gb", "example.com/mig-3g.40gb"
	full       = 14 // jobs of one slice on two GPUs
)

// fill fills a node's two GPUs with jobs of one slice; scatter, so that the last three are no
// neighbours of each other.
func (c *cluster) fill(scatter bool) {
	c.t.Helper()
	for i := range full {
		c.send(job{name: fmt.Sprint("job-", i), asks: map[string]int{one: 1}})
	}
	for i := range full {
		c.awaitAt(fmt.Sprint("job-", i), "on-prem", 1)
	}
	if !scatter {
		return
	}
	last, where := 0, c.slices()
	first := slices.Min(slices.Collect(maps.Values(where)))
	for name, at := range where {
		if gpu, slice, _ := strings.Cut(at, "@"); slice == "1" || slice == "5" && strings.HasPrefix(first, gpu) {
			c.end(name)
			last++
		}
	}
	for i := range last {
		name := fmt.Sprint("last-", i)
		c.send(job{name: name, asks: map[string]int{one: 1}})
		c.awaitAt(name, "on-prem", 1)
	}
}

// slices are the first memory slice of each job that runs, by "GPU@slice".
func (c *cluster) slices() map[string]string {
	c.t.Helper()
	var list core.PodList
	if err := c.get("/api/v1/namespaces/"+team+"/pods", &list); err != nil {
		c.t.Fatal(err)
	}
	out := map[string]string{}
	for i := range list.Items {
		p := &list.Items[i]
		if p.Status.Phase != core.PodRunning || p.DeletionTimestamp != nil {
			continue
		}
		for _, s := range p.Status.ContainerStatuses {
			for _, r := range s.AllocatedResourcesStatus {
				for _, d := range r.Resources {
					gpu, _, at, _, err := mig.ParseID(string(d.ResourceID))
					if err != nil {
						c.t.Fatal(err)
					}
					out[p.Labels["batch.kubernetes.io/job-name"]] = fmt.Sprintf("%s@%d", gpu, at)
				}
			}
		}
	}
	return out
}

// ended are the jobs of those before that do not run any more.
func (c *cluster) ended(before map[string]string) (out []string) {
	now := c.slices()
	for name := range before {
		if now[name] == "" {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

var cut = []string{"{devices: all, mode: mig, profiles: [1g.10gb, 3g.40gb]}"}

// An urgent 3g takes the room of three jobs of 1g that lie next to each other, and of nobody else.
// They run again when it is gone. The short form of it has the jobs where they come, and ends there:
// it takes a minute until an agent hears of an end from the kubelet that is played here.
func TestUrgentJobTakesRoom(t *testing.T) {
	c := startCluster(t, options{nodes: []node{{"gpu-1", "on-prem", cut}}, export: []string{"--cloud", "none", "--checks"}, may: ",urgent"})
	c.fill(*long)
	before := c.slices()
	urgent := map[string]string{"kueue.x-k8s.io/queue-name": "gpus-urgent", "kueue.x-k8s.io/priority-class": "gpus-urgent"}
	c.send(job{name: "urgent", asks: map[string]int{three: 1}, labels: urgent})
	c.awaitAt("urgent", "on-prem", 1)
	gone := c.ended(before)
	t.Logf("for a 3g, of %d jobs of 1g there ended %v, which lay at %v", len(before), gone, places(before, gone))
	if len(gone) != 3 {
		t.Errorf("%d jobs have made room, and 3 are enough", len(gone))
	}
	w, err := c.workload(gone[0])
	if err != nil || w.is("Admitted") || !strings.Contains(c.says(gone[0]), "a workload of a higher priority") {
		t.Errorf("%s says %v, %s", gone[0], err, c.says(gone[0]))
	}
	if !*long {
		c.noneRefused()
		return
	}
	c.send(job{name: "second", asks: map[string]int{three: 1}, labels: map[string]string{"kueue.x-k8s.io/queue-name": "gpus-urgent"}})
	c.Await(t, "who names no class takes nobody's room", func() error {
		if says := c.says("second"); !strings.Contains(says, "gpu-placer-urgent Pending (no room, nor would there be any") {
			return fmt.Errorf("it says %s", says)
		}
		return nil
	})
	if now := c.ended(before); !slices.Equal(now, gone) {
		t.Errorf("there have ended %v, and %v before", now, gone)
	}
	c.end("urgent")
	c.awaitAt("second", "on-prem", 1)
	c.end("second")
	for _, name := range gone {
		c.awaitAt(name, "on-prem", 1)
	}
	c.noneRefused()
}

func places(of map[string]string, names []string) (out []string) {
	for _, name := range names {
		_, slice, _ := strings.Cut(of[name], "@")
		out = append(out, slice)
	}
	return out
}

// What Kueue does by itself on the same layout: it ends those that came last, until its sums are right,
// and the urgent job has no room.
func TestKueueEndsOthersInVain(t *testing.T) {
	if !*long {
		t.Skip("-long is not set: it shows what Kueue does without the check for urgent work")
	}
	c := startCluster(t, options{nodes: []node{{"gpu-1", "on-prem", cut}}, export: []string{"--cloud", "none", "--checks"}, quotas: func(text string) string {
		return strings.Replace(text, "  queueingStrategy:", "  preemption: {withinClusterQueue: LowerPriority}\n  queueingStrategy:", 1) +
			"---\napiVersion: kueue.x-k8s.io/v1beta2\nkind: WorkloadPriorityClass\nmetadata: {name: gpus-urgent}\nvalue: 1000\n"
	}})
	c.fill(true)
	before := c.slices()
	c.send(job{name: "urgent", asks: map[string]int{three: 1}, labels: map[string]string{"kueue.x-k8s.io/priority-class": "gpus-urgent"}})
	c.Await(t, "the urgent job has had quota, and no room", func() error {
		w, err := c.workload("urgent")
		if err != nil || w.Annotations[refused] == "" {
			return fmt.Errorf("%v: %s", err, c.says("urgent"))
		}
		return nil
	})
	gone := c.ended(before)
	t.Logf("Kueue has ended %v, which lay at %v; the urgent job: %s", gone, places(before, gone), c.says("urgent"))
	if len(gone) == 0 {
		t.Error("Kueue has ended no job")
	}
}
