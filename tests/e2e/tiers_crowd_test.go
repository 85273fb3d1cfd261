// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/tests/lab"
)

const twoTwice = `version: v1
partitions:
  default:
    - devices: [0, 1]
      mode: shared
      spot: true
    - devices: [2, 3, 4, 5, 6, 7]
      mode: off
`

const (
	// Guaranteed pods are of one size, of which six fill a GPU: then the scheduler's count of units is never of
	// two GPUs together, and any refusal is spot's doing. Twelve of them leave no room for a spot pod.
	guaranteedUnits = 13
	crowdGPUs       = 2
	// Each tier has four Jobs of as many pods, and ten waves of a Deployment's pods.
	crowdJobs, jobPods     = 4, 40
	crowdWaves, wavePods   = 10, 4
	spotWaveUnits          = 3 // of all waves together there is room for
	crowdGrace             = 2 * time.Second
	stuckAfter             = time.Minute
	guaranteedJob, spotJob = "day", "batch"
	// The controller of Jobs waits up to ten minutes after pods that were evicted.
	crowdLimit = 30 * time.Minute
)

// crowdPod is the template of a pod that works for some seconds, or until it ends if there are none. One that is asked
// to end has not succeeded.
func crowdPod(owner, resource string, units, seconds int) map[string]any {
	type object = map[string]any
	tier, work := ledger.Guaranteed.Word(), fmt.Sprintf("sleep %d", seconds)
	if strings.HasSuffix(resource, ".spot") {
		tier = string(ledger.Spot)
	}
	restart := "Never"
	if seconds == 0 {
		restart, work = "Always", "sleep 100000"
	}
	return object{
		"metadata": object{"labels": object{"owner": owner, "tier": tier}},
		"spec": object{
			"restartPolicy": restart, "automountServiceAccountToken": false, "enableServiceLinks": false,
			"terminationGracePeriodSeconds": 5,
			"containers": []object{{
				"name": "main", "image": lab.TestImage, "imagePullPolicy": "Never",
				"command":   []string{"/bin/sh", "-c", "trap 'exit 3' TERM\n" + work + " & wait $!"},
				"resources": object{"limits": object{resource: fmt.Sprint(units)}},
			}},
		},
	}
}

// crowdJob is a Job as docs/tiers.md shows one, or a Job that allows no failure if retries is zero.
func crowdJob(name, resource string, units, seconds, atOnce, retries int) map[string]any {
	type object = map[string]any
	return object{"apiVersion": "batch/v1", "kind": "Job", "metadata": object{"name": name, "namespace": lab.PodNamespace}, "spec": object{
		"completions": jobPods, "parallelism": atOnce, "backoffLimit": retries, "podReplacementPolicy": "Failed",
		"podFailurePolicy": object{"rules": []object{
			{"action": "Ignore", "onPodConditions": []object{{"type": "DisruptionTarget"}}},
			{"action": "Ignore", "onExitCodes": object{"operator": "In", "values": []int{137}}},
			{"action": "FailJob", "onExitCodes": object{"operator": "NotIn", "values": []int{0, 137}}},
		}},
		"template": crowdPod(name, resource, units, seconds),
	}}
}

func crowdDeployment(name, resource string, units, replicas int) map[string]any {
	type object = map[string]any
	return object{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": object{"name": name, "namespace": lab.PodNamespace},
		"spec": object{"replicas": replicas, "selector": object{"matchLabels": object{"owner": name}}, "template": crowdPod(name, resource, units, 0)}}
}

// seenPods are a tier's pods that were seen.
type seenPods struct {
	mu sync.Mutex // guards what follows
	// bound and started are when the scheduler had bound each pod, and when its container had started first.
	bound, started map[types.UID]time.Time
	names          map[types.UID]string
	// refused are the pods that the kubelet has refused.
	refused map[types.UID]string
}

// look reads the pods.
func (s *seenPods) look(ctx context.Context, tier string) error {
	var list core.PodList
	if err := node.Read(ctx, "/api/v1/namespaces/"+lab.PodNamespace+"/pods?labelSelector=tier%3D"+tier, &list); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range list.Items {
		p := &list.Items[i]
		s.names[p.UID] = p.Name
		for _, c := range p.Status.Conditions {
			if c.Type == core.PodScheduled && c.Status == core.ConditionTrue {
				s.bound[p.UID] = c.LastTransitionTime.Time
			}
		}
		for _, c := range p.Status.ContainerStatuses {
			at := time.Time{}
			if c.State.Running != nil {
				at = c.State.Running.StartedAt.Time
			} else if c.State.Terminated != nil {
				at = c.State.Terminated.StartedAt.Time
			}
			if _, known := s.started[p.UID]; !known && !at.IsZero() {
				s.started[p.UID] = at
			}
		}
		if p.Status.Reason == "UnexpectedAdmissionError" {
			s.refused[p.UID] = p.Status.Message
		}
	}
	return nil
}

// waits are how long the pods that have started waited from when they were bound, in order. The API server's times are
// in seconds.
func (s *seenPods) waits() (out []time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for uid, at := range s.started {
		out = append(out, at.Sub(s.bound[uid]))
	}
	slices.Sort(out)
	return out
}

// granted is what the account says that each tier had, in GiB-hours.
func (b *bench) granted() map[string]float64 {
	b.Helper()
	out := map[string]float64{}
	for _, s := range asks[[]usage.Sum](b, "--by", "namespace") {
		out[s.Tier] += s.GrantedGiBHours
	}
	return out
}

// A crowd of guaranteed and spot pods of Jobs and Deployments on one node. No guaranteed pod is refused or stuck, and each
// pod of a spot controller runs in the end.
func TestTiersCrowd(t *testing.T) {
	if !*long {
		t.Skip("make soak runs it; TestTiers has a few pods")
	}
	offers := map[string]int{lab.Memory: crowdGPUs * units, spotMemory: crowdGPUs * units}
	b := begin(t, twoTwice, offers)
	b.redeploy(lab.DeployOptions{Components: []string{"evict"}, Partitions: twoTwice, Env: map[string]string{"GPU_AGENT_YIELD_GRACE": crowdGrace.String()}})
	b.offers(offers)
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if _, err := node.Kubectl(ctx, nil, "delete", "-n", lab.PodNamespace, "deployments,jobs", "--all"); err != nil {
			b.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(b.ctx, crowdLimit)
	defer cancel()
	tiers := map[string]*seenPods{}
	for _, tier := range []string{ledger.Guaranteed.Word(), string(ledger.Spot)} {
		tiers[tier] = &seenPods{bound: map[types.UID]time.Time{}, started: map[types.UID]time.Time{}, names: map[types.UID]string{}, refused: map[types.UID]string{}}
	}
	watching, done := context.WithCancel(ctx)
	var watch, waves sync.WaitGroup
	watch.Go(func() {
		for watching.Err() == nil {
			for tier, s := range tiers {
				if err := s.look(watching, tier); err != nil && watching.Err() == nil {
					b.Logf("look at the pods: %v", err)
				}
			}
			select {
			case <-watching.Done():
			case <-time.After(time.Second):
			}
		}
	})
	defer watch.Wait()
	defer done()
	before, began := b.granted(), time.Now()

	for i, of := range []struct{ units, seconds int }{{7, 4}, {13, 4}, {20, 6}, {7, 8}} {
		b.apply(crowdJob(fmt.Sprintf("%s-%d", spotJob, i), spotMemory, of.units, of.seconds, 3, 100),
			crowdJob(fmt.Sprintf("%s-%d", guaranteedJob, i), lab.Memory, guaranteedUnits, 5, 2, 0))
	}
	kubectl := func(args ...string) error {
		_, err := node.Kubectl(ctx, nil, append([]string{"-n", lab.PodNamespace}, args...)...)
		return err
	}
	ready := func(owner string) error {
		return lab.Await(ctx, crowdLimit, "the pods of "+owner, func(ctx context.Context) error {
			pods, err := node.Pods(ctx, "owner="+owner)
			n := 0
			for _, p := range pods {
				if p.Containers["main"].Ready {
					n++
				}
			}
			if n != wavePods {
				err = errors.Join(err, fmt.Errorf("%d are ready", n))
			}
			return err
		})
	}
	b.apply(crowdDeployment("service", lab.Memory, guaranteedUnits, 0))
	for wave := range crowdWaves {
		extra := fmt.Sprintf("extra-%d", wave)
		b.apply(crowdDeployment(extra, spotMemory, spotWaveUnits, wavePods))
		waves.Go(func() {
			if err := errors.Join(ready(extra), kubectl("delete", "deployment", extra)); err != nil {
				b.Error(err)
			}
		})
		b.must(kubectl("scale", "deployment/service", fmt.Sprint("--replicas=", wavePods)))
		b.must(ready("service"))
		time.Sleep(5 * time.Second) // the peak
		b.must(kubectl("scale", "deployment/service", "--replicas=0"))
		time.Sleep(5 * time.Second) // and the time between two
	}
	complete := func(job string) {
		b.Helper()
		for i := range crowdJobs {
			name := fmt.Sprintf("%s-%d", job, i)
			b.must(lab.Await(ctx, crowdLimit, "the end of Job "+name, func(ctx context.Context) error {
				s, err := node.JobState(ctx, name)
				if err == nil && s.Ended == "" {
					err = fmt.Errorf("it is %+v", s)
				}
				return err
			}))
			if s, err := node.JobState(ctx, name); err != nil || s.Ended != "Complete" || job == guaranteedJob && s.FailedPods > 0 {
				b.Errorf("Job %s is %+v, %v", name, s, err)
			}
		}
	}
	complete(guaranteedJob)
	had, span := b.granted(), time.Since(began)
	complete(spotJob)
	waves.Wait()
	all := time.Since(began)
	done()
	watch.Wait()

	m, err := agent.Metrics(b.ctx)
	b.must(err)
	refusals, yields := map[string]float64{}, map[string]float64{}
	for name, value := range m {
		switch {
		case strings.HasPrefix(name, "gpu_agent_plugin_refusals_total") && value > 0:
			refusals[name] = value
			// A container that is not ready waits at its gate, and is asked for again.
			if strings.Contains(name, fmt.Sprintf("resource=%q", lab.Memory)) && !strings.Contains(name, fmt.Sprintf("reason=%q", status.NotReady)) {
				b.Errorf("guaranteed pods are refused: %s is %g", name, value)
			}
		case strings.HasPrefix(name, "gpu_agent_spot_yield_seconds_count") && value > 0:
			yields[name] = value
		}
	}
	if len(yields) == 0 {
		b.Error("no spot pod has given its room back, so the tiers have not met")
	}
	for tier, s := range tiers {
		b.must(s.look(b.ctx, tier))
		waits := s.waits()
		if len(waits) < crowdJobs*jobPods+crowdWaves*wavePods {
			b.Errorf("%d pods of the %s tier have run, want %d at least", len(waits), tier, crowdJobs*jobPods+crowdWaves*wavePods)
			continue
		}
		longest := waits[len(waits)-1]
		b.Logf("%s: %d pods were seen, %d have started, %v after they were bound (p50), %v (p99), %v at most; %d were refused", tier, len(s.names),
			len(waits), waits[len(waits)/2], waits[len(waits)*99/100], longest, len(s.refused))
		if tier == string(ledger.Spot) {
			continue
		}
		if longest > stuckAfter {
			b.Errorf("a guaranteed pod has started %v after it was bound", longest)
		}
		for uid, why := range s.refused {
			b.Errorf("guaranteed pod %s is refused: %s", s.names[uid], why)
		}
		for uid, name := range s.names {
			if _, ok := s.started[uid]; !ok {
				b.Errorf("guaranteed pod %s has never run", name)
			}
		}
	}
	bound := crowdGPUs * units * span.Hours()
	without := had[usage.Guaranteed] - before[usage.Guaranteed]
	spot := had[usage.Spot] - before[usage.Spot]
	b.Logf("in %v of guaranteed work GiB-hours were %.2f without the spot tier (%.0f %%) and %.2f with it (%.0f %%), of %.2f; all was done after %v; %v; %v",
		span.Round(time.Second), without, 100*without/bound, without+spot, 100*(without+spot)/bound, bound, all.Round(time.Second), yields, refusals)
	if without <= 0 || spot <= 0 || without+spot > bound {
		b.Errorf("%.2f GiB-hours of guaranteed and %.2f of spot pods, want some of each and %.2f together at most", without, spot, bound)
	}
}
