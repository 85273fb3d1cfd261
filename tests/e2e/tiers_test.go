// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

// spotMemory is what spot pods ask for.
const spotMemory = lab.Memory + ".spot"

const oneTwice = `version: v1
partitions:
  default:
    - devices: [0]
      mode: shared
      spot: true
    - devices: [1, 2, 3, 4, 5, 6, 7]
      mode: off
`

var oneTwiceOffers = map[string]int{lab.Memory: units, spotMemory: units}

// owned is a Deployment or a Job that docs/tiers.md shows, of pods that write down what they are told, in the node's
// folder of notes.
func owned(kind, name string, units int) map[string]any {
	type object = map[string]any
	pod := lab.Pod{Name: name, Once: kind == "Job", Containers: []lab.Container{{
		Name: "main", Resources: map[string]int{spotMemory: units}, Mounts: []lab.Mount{{Host: "/run/tiers", Path: "/notes"}},
		// Its end is no success, or its Job would be done.
		Then: "trap 'exit 3' TERM\nwhile :; do [ -s /usr/lib/gpu-agent/yield ] && cp /usr/lib/gpu-agent/yield /notes/" + name + "; sleep 0.1; done\n",
	}}}
	labels := object{"owner": name}
	template := object{"metadata": object{"labels": labels}, "spec": node.PodObject(pod)["spec"]}
	if kind == "Job" {
		return object{"apiVersion": "batch/v1", "kind": kind, "metadata": object{"name": name, "namespace": lab.PodNamespace}, "spec": object{
			"backoffLimit": 1, "podReplacementPolicy": "Failed", "template": template,
			"podFailurePolicy": object{"rules": []object{
				{"action": "Ignore", "onPodConditions": []object{{"type": "DisruptionTarget"}}},
				{"action": "Ignore", "onExitCodes": object{"operator": "In", "values": []int{137}}},
				{"action": "FailJob", "onExitCodes": object{"operator": "NotIn", "values": []int{0, 137}}},
			}}}}
	}
	return object{"apiVersion": "apps/v1", "kind": kind, "metadata": object{"name": name, "namespace": lab.PodNamespace},
		"spec": object{"replicas": 1, "selector": object{"matchLabels": labels}, "template": template}}
}

// runs waits until an owner has one pod that is ready.
func (b *bench) runs(what, owner string) (pod lab.ListedPod) {
	b.Helper()
	b.must(lab.Await(b.ctx, 4*time.Minute, what, func(ctx context.Context) error {
		pods, err := node.Pods(ctx, "owner="+owner)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(pods, func(p lab.ListedPod) bool { return p.Containers["main"].Ready })
		if i < 0 {
			return fmt.Errorf("none of %v is ready", pods)
		}
		pod = pods[i]
		return nil
	}))
	return pod
}

// A guaranteed pod takes the room of spot pods, which have their grace to write a checkpoint. Their controllers' pods come
// back when it has ended, with and without evictions, and a Job counts nothing as its own failure.
func TestTiers(t *testing.T) {
	b := begin(t, oneTwice, oneTwiceOffers)
	const grace = 2 * time.Second
	yields := func(b *bench, options lab.DeployOptions, way string) {
		options.Partitions, options.Env = oneTwice, map[string]string{"GPU_AGENT_YIELD_GRACE": grace.String()}
		b.redeploy(options)
		b.offers(oneTwiceOffers)
		b.apply(owned("Deployment", "extra", 30), owned("Job", "night", 40))
		b.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			if _, err := node.Kubectl(ctx, nil, "delete", "-n", lab.PodNamespace, "deployment/extra", "job/night"); err != nil {
				b.Error(err)
			}
		})
		spot, first := map[string]lab.ListedPod{}, map[string]lab.Process{}
		for _, owner := range []string{"extra", "night"} {
			spot[owner] = b.runs("the spot pod of "+owner, owner)
			p, err := spot[owner].Process(b.ctx, "main")
			b.must(err)
			first[owner] = p
		}
		began := time.Now()
		api := b.create(lab.Pod{Name: "api", Containers: []lab.Container{{Name: "main", Resources: map[string]int{lab.Memory: units},
			Mounts: []lab.Mount{{Host: "/run/tiers", Path: "/notes"}}}}})
		b.must(api.Running(b.ctx))
		b.Logf("a guaranteed pod has started in room that spot pods had %v after it was made, with a grace of %v", time.Since(began).Round(10*time.Millisecond), grace)
		for owner, was := range spot {
			// The kubelet's word of it is old while its next container waits.
			_, _, err := node.End(b.ctx, time.Second, first[owner])
			b.must(err)
			b.must(node.AwaitEvent(b.ctx, "Pod", lab.PodNamespace, was.Name, "says to whom its room goes", func(e lab.Event) bool {
				return e.Reason == "Yielded" && strings.Contains(e.Message, "work/api") && strings.Contains(e.Message, "it ends by ")
			}))
			told, err := api.Exec(b.ctx, "main", "cat", "/notes/"+owner)
			b.must(err)
			if by, err := time.Parse(time.RFC3339, strings.TrimSpace(string(told))); err != nil || by.Sub(began) < 0 || by.Sub(began) > time.Minute {
				b.Errorf("the program of %s was told %q, want when its grace is over (%v)", owner, told, err)
			}
		}
		m, err := agent.Metrics(b.ctx)
		b.must(err)
		n := 0.0
		for name, value := range m {
			if strings.HasPrefix(name, "gpu_agent_spot_yield_seconds_count") {
				n += value
			}
		}
		if of := m[fmt.Sprintf("gpu_agent_spot_yield_seconds_count{way=%q}", way)]; n != 2 || of != 2 {
			b.Errorf("%g have given their room back, %g of them %s; want two", n, of, way)
		}
		b.must(api.Delete(b.ctx))
		for owner, was := range spot {
			is := b.runs("the pod of "+owner+" to come back", owner)
			b.Logf("%s: %s before, %s after, which was started again %d times", owner, was.Name, is.Name, is.Containers["main"].Restarts)
		}
		if s, err := node.JobState(b.ctx, "night"); err != nil || s.Ended != "" {
			b.Errorf("the Job is %+v, %v", s, err)
		}
	}
	b.sub("with evictions", func(b *bench) { yields(b, lab.DeployOptions{Components: []string{"evict"}}, "evicted") })
	b.rest("without", func(b *bench) { yields(b, lab.DeployOptions{}, "ended") })
}
