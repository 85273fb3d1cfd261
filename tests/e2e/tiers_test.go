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
func owned(kind, name, resource string, count int) map[string]any {
	type object = map[string]any
	pod := lab.Pod{Name: name, Once: kind == "Job", Containers: []lab.Container{{
		Name: "main", Resources: map[string]int{resource: count}, Mounts: []lab.Mount{{Host: "/run/tiers", Path: "/notes"}},
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

// runs waits until an owner has a pod that is ready, and is as wanted.
func (b *bench) runs(what, owner string, wanted ...func(lab.ListedPod) bool) (pod lab.ListedPod) {
	b.Helper()
	b.must(lab.Await(b.ctx, 4*time.Minute, what, func(ctx context.Context) error {
		pods, err := node.Pods(ctx, "owner="+owner)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(pods, func(p lab.ListedPod) bool {
			return p.Containers["main"].Ready && !slices.ContainsFunc(wanted, func(is func(lab.ListedPod) bool) bool { return !is(p) })
		})
		if i < 0 {
			return fmt.Errorf("none of %v is ready, and as wanted", pods)
		}
		pod = pods[i]
		return nil
	}))
	return pod
}

// comesBack is that a pod has taken the place of another, or else that it was started again. The kubelet's word of
// that one is old while its next container waits.
func comesBack(was lab.ListedPod, anew bool) func(lab.ListedPod) bool {
	return func(p lab.ListedPod) bool {
		return (p.Name != was.Name) == anew && (p.Containers["main"].Restarts == 0) == anew
	}
}

// A guaranteed pod takes the room of spot pods, which have their grace to write a checkpoint. Their controllers' pods come
// back when it has ended, with and without evictions, and a Job counts nothing as its own failure.
func TestTiers(t *testing.T) {
	b := begin(t, oneTwice, oneTwiceOffers)
	yields := func(b *bench, options lab.DeployOptions, grace time.Duration, way string) {
		options.Partitions, options.Env = oneTwice, map[string]string{"GPU_AGENT_YIELD_GRACE": grace.String()}
		b.redeploy(options)
		b.offers(oneTwiceOffers)
		b.apply(owned("Deployment", "extra", spotMemory, 30), owned("Job", "night", spotMemory, 40))
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
			is := b.runs("the pod of "+owner+" to come back", owner, comesBack(was, owner == "night" || way == "evicted"))
			b.Logf("%s: %s before, %s after, which was started again %d times", owner, was.Name, is.Name, is.Containers["main"].Restarts)
		}
		if s, err := node.JobState(b.ctx, "night"); err != nil || s.Ended != "" {
			b.Errorf("the Job is %+v, %v", s, err)
		}
	}
	// A busy kubelet takes seconds to end an evicted pod, and after the grace the agent ends it.
	b.sub("with evictions", func(b *bench) {
		yields(b, lab.DeployOptions{Components: []string{"evict"}}, 20*time.Second, "evicted")
	})
	b.rest("without", func(b *bench) { yields(b, lab.DeployOptions{}, 2*time.Second, "ended") })
}

// Each mode of a GPU that TestTiers has not: GPU 0 has shares through MPS, 1 a fixed MIG instance, and 2 is cut as pods
// ask, in halves of which two make no whole.
const eachTwice = `version: v1
partitions:
  default:
    - devices: [0]
      mode: shared
      compute: mps
      spot: true
    - devices: [1]
      mode: mig
      geometry: {3g.40gb: 1}
      spot: true
    - devices: [2]
      mode: mig
      profiles: [2g.20gb, 7g.80gb]
      spot: true
    - devices: [3, 4, 5, 6, 7]
      mode: off
`

// Guaranteed pods take the room that spot pods have in MIG instances, fixed and on demand, and in shares through MPS. An
// instance that fits is used again, another is cut. A disruption budget keeps no pod beyond its grace. Clients of MPS
// are detached before their container ends, so their neighbours go on.
func TestTiersOfMIGAndMPS(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: TestTiers has spot pods yield")
	}
	const (
		grace  = 4 * time.Second
		detach = 2 * time.Second // before the end of the grace
		// A start may take 2 s above the grace. Before that, the pod is scheduled.
		above       = 2*time.Second + time.Second
		neighbours  = 20
		shares      = 40
		terminated  = "810" // CUDA_ERROR_MPS_CLIENT_TERMINATED
		budget      = "extra"
		deployment  = "extra" // has the budget, so it is ended
		job         = "night" // is evicted
		oneYield    = `gpu_agent_spot_yield_seconds_count{way="%s"}`
		allDetached = `gpu_agent_mps_detaches_total{outcome="%s"}`
	)
	three, two, seven := lab.MIG("3g.40gb"), lab.MIG("2g.20gb"), lab.MIG("7g.80gb")
	offers := map[string]int{}
	for name, count := range map[string]int{lab.Memory: units, three: 1, two: 3, seven: 1} {
		offers[name], offers[name+".spot"] = count, count
	}
	prepare(t).swap(lab.DriverOptions{Model: model, Count: gpus}) // no instance of an earlier test
	b := begin(t, oneTwice, oneTwiceOffers)
	b.redeploy(lab.DeployOptions{Partitions: eachTwice, Components: []string{"evict", "mps"},
		Env: map[string]string{"GPU_AGENT_YIELD_GRACE": grace.String()}})
	b.underMPS(offers)

	type object = map[string]any
	b.apply(object{"apiVersion": "policy/v1", "kind": "PodDisruptionBudget",
		"metadata": object{"name": budget, "namespace": lab.PodNamespace},
		"spec":     object{"minAvailable": 1, "selector": object{"matchLabels": object{"owner": deployment}}}},
		owned("Deployment", deployment, three+".spot", 1), owned("Job", job, two+".spot", 1))
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if _, err := node.Kubectl(ctx, nil, "delete", "-n", lab.PodNamespace, "deployment/"+deployment, "job/"+job, "pdb/"+budget); err != nil {
			b.Error(err)
		}
	})
	pod := func(name, resource string, count int, then string) *lab.RunningPod {
		b.Helper()
		c := b.container("main", map[string]int{resource: count})
		c.Then = then
		return b.create(lab.Pod{Name: name, Containers: []lab.Container{c}})
	}
	neighbour := pod("neighbour", lab.Memory, neighbours, "")
	share := pod("share", spotMemory, shares, lab.Deaf)
	b.must(each([]*lab.RunningPod{neighbour, share}, func(p *lab.RunningPod) error { return p.Running(b.ctx) }))
	beside, client := b.probe(neighbour, "main", nil), b.probe(share, "main", nil)
	b.take(beside, giB, neighbours/2)
	b.take(client, giB, shares/2)
	computing, err := share.Processes(b.ctx, "main", lab.ProbeProgram)
	b.must(err)
	for _, p := range computing {
		b.must(driver.KeepBusy(b.ctx, 0, p, 50))
	}
	held, err := share.Process(b.ctx, "main")
	b.must(err)
	has := map[string]instance{}
	was := map[string]lab.ListedPod{}
	for _, owner := range []string{deployment, job} {
		was[owner] = b.runs("the spot pod of "+owner, owner)
		all := b.insideMIG(was[owner].RunningPod, "")
		if len(all) != 1 {
			b.Fatalf("the pod of %s sees %v, want one instance", owner, all)
		}
		has[owner] = all[0]
	}

	guaranteed := []*lab.RunningPod{pod("api", three, 1, ""), pod("train", seven, 1, ""), pod("service", lab.Memory, units-neighbours, "")}
	began := time.Now()
	var end time.Time // of the grace, at a second before it at most
	b.must(lab.Await(b.ctx, grace, "a notice of the end", func(ctx context.Context) error {
		told, err := share.Exec(ctx, "main", "cat", "/usr/lib/gpu-agent/yield")
		if err == nil {
			end, err = time.Parse(time.RFC3339, strings.TrimSpace(string(told)))
		}
		return err
	}))
	for said := ""; said != terminated; time.Sleep(50 * time.Millisecond) {
		if said = b.ask(client, "take cuMemAlloc_v2 %d 1", chunk).Result(); said != lab.Success && said != terminated {
			b.Fatalf("a client of MPS hears %s before its container ends, want %s when it is detached", said, terminated)
		}
	}
	// Later it would be detached as its container is ended.
	if now := time.Now(); now.Before(end.Add(-detach)) || !now.Before(end) {
		b.Errorf("a client of MPS is detached %v before the end of the grace, want %v", end.Sub(now), detach)
	}
	if !node.Lives(held) {
		b.Error("the container has ended when its client of MPS is detached")
	}
	b.must(each(guaranteed, func(p *lab.RunningPod) error {
		err := p.InState(b.ctx, grace+above, "to start in the room of a spot pod", started)
		b.Logf("%s has started %v after it was made, with a grace of %v", p, time.Since(began).Round(10*time.Millisecond), grace)
		return err
	}))

	// The neighbour has its context still, and the next holder the room.
	b.take(beside, giB, 1)
	b.take(b.probe(guaranteed[2], "main", nil), giB, shares)
	m, err := agent.Metrics(b.ctx)
	b.must(err)
	if done, not := m[fmt.Sprintf(allDetached, "detached")], m[fmt.Sprintf(allDetached, "unanswered")]; done == 0 || not > 0 {
		b.Errorf("%g clients of MPS were detached and %g were not, want all of them", done, not)
	}
	evicted, ended := m[fmt.Sprintf(oneYield, "evicted")], m[fmt.Sprintf(oneYield, "ended")]
	if evicted == 0 || ended == 0 || evicted+ended != 3 {
		b.Errorf("%g spot pods have ended by their eviction and %g at the end of their grace, want three and some of both", evicted, ended)
	}
	if got := b.insideMIG(guaranteed[0], ""); len(got) != 1 || got[0].compute.Serial != has[deployment].compute.Serial {
		b.Errorf("a guaranteed pod has %v, want the instance that its spot pod had: %v", got, has[deployment])
	}
	if got := b.insideMIG(guaranteed[1], ""); len(got) != 1 || got[0].compute.Profile != "7g.80gb" || got[0].gpu.UUID != has[job].gpu.UUID {
		b.Errorf("a guaranteed pod has %v, want all of the GPU of %v", got, has[job])
	}

	b.must(each(guaranteed, func(p *lab.RunningPod) error { return p.Delete(b.ctx) }))
	for owner, before := range was {
		is := b.runs("the pod of "+owner+" to come back", owner, comesBack(before, owner == job))
		got := b.insideMIG(is.RunningPod, "")
		if len(got) != 1 || got[0].compute.Profile != has[owner].compute.Profile {
			b.Errorf("%s has %v again, want another as %v", is.Name, got, has[owner])
		}
		b.Logf("%s: %s before, %s after, which was started again %d times", owner, before.Name, is.Name, is.Containers["main"].Restarts)
	}
	if s, err := node.JobState(b.ctx, job); err != nil || s.Ended != "" {
		b.Errorf("the Job is %+v, %v", s, err)
	}
}
