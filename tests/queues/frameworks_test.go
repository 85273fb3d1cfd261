// SPDX-License-Identifier: Apache-2.0

package queues

import (
	"fmt"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"

	"example.com/gpu-agent/tests/plane"
)

const podsOfTeam = "/api/v1/namespaces/" + team + "/pods"

// TestFrameworks applies the examples that users are shown, but for their images, and has Kueue
// admit and the scheduler place all their pods, on nodes whose agents give them what they asked for.
// The controllers are Kubernetes' own and KubeRay's.
func TestFrameworks(t *testing.T) {
	plane.Program(t, "kuberay")
	mig := []string{"{devices: all, mode: mig}"}
	c := startCluster(t, options{
		nodes:  []node{{"shares-1", "on-prem", shared}, {"mig-1", "on-prem", mig}, {"cloud-1", "cloud", shared}},
		export: []string{"--cloud", "cloud=158GiB", "--checks"},
	})
	c.Controllers(t, "deployment-controller,replicaset-controller,statefulset-controller,persistentvolume-binder-controller,horizontal-pod-autoscaler-controller")
	c.KubeRay(t)
	c.serveBurstMetric()
	for i, mode := range []string{"ReadWriteOnce", "ReadWriteMany"} {
		c.post("/api/v1/persistentvolumes", object{"metadata": object{"name": fmt.Sprint("volume-", i)},
			"spec": object{"capacity": object{"storage": "100Gi"}, "accessModes": []string{mode}, "hostPath": object{"path": "/none"}}})
	}
	for _, file := range []string{"notebook", "training", "inference", "raycluster", "rayjob"} {
		text := regexp.MustCompile(`image: \S+`).ReplaceAll(c.read("deployments/examples/"+file+".yaml"), []byte("image: stand-in"))
		c.kubectl(text, "apply", "--server-side", "--namespace", team, "--kubeconfig", c.kubeconfig, "-f", "-")
	}

	c.awaitPods("app=notebook", map[string]int{"on-prem": 1})
	c.awaitPods("app=inference,site=on-prem", map[string]int{"on-prem": 2})
	c.awaitPods("app=inference,site=cloud", map[string]int{"cloud": 1}) // a HorizontalPodAutoscaler has one at least
	c.awaitPods("ray.io/cluster=ray,ray.io/group=shares", map[string]int{"on-prem": 2})
	c.awaitPods("ray.io/cluster=ray,ray.io/group=instances", map[string]int{"on-prem": 1})
	c.awaitPods("ray.io/cluster="+c.clusterOf("tune")+",ray.io/group=shares", map[string]int{"on-prem": 2})
	c.awaitPods("batch.kubernetes.io/job-name=train", map[string]int{"on-prem": 1})
	for selector, want := range map[string]string{
		"ray.io/cluster=ray,ray.io/node-type=head": "0", "ray.io/cluster=ray,ray.io/group=shares": "1", "ray.io/cluster=ray,ray.io/group=instances": "2",
	} {
		for _, p := range c.podsOf(selector) {
			if told := gpusToldTo(&p); told != want {
				t.Errorf("Ray is told that %s has %q GPUs, want %s", p.Name, told, want)
			}
		}
	}
	t.Run("a training is interrupted", func(t *testing.T) { c.interruptTraining(t) })
	t.Run("inference follows the saturation", func(t *testing.T) { c.saturate(t) })
	t.Run("names that KubeRay knows", func(t *testing.T) { c.nameGPUs(t) })
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.refused) > 0 {
		t.Errorf("kubelets refused %q", c.refused)
	}
}

// clusterOf waits for the RayCluster that a RayJob has made.
func (c *cluster) clusterOf(job string) (name string) {
	c.t.Helper()
	c.Await(c.t, job+" has a RayCluster", func() error {
		var list struct {
			Items []struct{ Metadata struct{ Name string } }
		}
		if err := c.get("/apis/ray.io/v1/namespaces/"+team+"/rayclusters?labelSelector=ray.io/originated-from-cr-name="+job, &list); err != nil {
			return err
		}
		if len(list.Items) != 1 {
			return fmt.Errorf("it has %d; %s", len(list.Items), c.allSay())
		}
		name = list.Items[0].Metadata.Name
		return nil
	})
	return name
}

// podsOf are the pods that a selector chooses, without those that are going or have ended.
func (c *cluster) podsOf(selector string) []core.Pod {
	c.t.Helper()
	var list core.PodList
	if err := c.get(podsOfTeam+"?labelSelector="+strings.ReplaceAll(selector, ",", "%2C"), &list); err != nil {
		c.t.Fatal(err)
	}
	return slices.DeleteFunc(list.Items, func(p core.Pod) bool {
		return p.DeletionTimestamp != nil || p.Status.Phase == core.PodFailed || p.Status.Phase == core.PodSucceeded
	})
}

// awaitPods waits until so many of them run at each site, and no others are there.
func (c *cluster) awaitPods(selector string, want map[string]int) {
	c.t.Helper()
	c.Await(c.t, fmt.Sprintf("%s runs at %v", selector, want), func() error {
		at, all, says := map[string]int{}, 0, ""
		for _, p := range c.podsOf(selector) {
			if all++; p.Status.Phase == core.PodRunning {
				at[c.sites[p.Spec.NodeName]]++
			}
			says += fmt.Sprintf("\n%s %s %v %v", p.Name, p.Status.Phase, p.Spec.SchedulingGates, p.Status.Conditions)
		}
		sum := 0
		for site, n := range want {
			if sum += n; at[site] != n {
				return fmt.Errorf("they run at %v:%s\n%s", at, says, c.allSay())
			}
		}
		if all != sum {
			return fmt.Errorf("there are others:%s", says)
		}
		return nil
	})
}

// allSay is what all workloads say, for people.
func (c *cluster) allSay() (out string) {
	var list struct{ Items []workload }
	if err := c.get(queueing+"/namespaces/"+team+"/workloads", &list); err != nil {
		return err.Error()
	}
	for _, w := range list.Items {
		out += w.Name + ":"
		for _, is := range w.Status.Conditions {
			out += fmt.Sprintf(" %s=%s (%s)", is.Type, is.Status, is.Message)
		}
		for _, s := range w.Status.AdmissionChecks {
			out += fmt.Sprintf(" %s %s (%s)", s.Name, s.State, s.Message)
		}
		out += "\n"
	}
	return out
}

// gpusToldTo is how many GPUs Ray is told that a pod has; empty where it is not told.
func gpusToldTo(p *core.Pod) string {
	m := regexp.MustCompile(`--num-gpus=(\S+)`).FindStringSubmatch(strings.Join(slices.Concat(p.Spec.Containers[0].Command, p.Spec.Containers[0].Args), " "))
	if m == nil {
		return ""
	}
	return m[1]
}

// interruptTraining has its pod evicted, which does not count and makes another one, and then fail by
// itself, which ends the Job.
func (c *cluster) interruptTraining(t *testing.T) {
	state := func() (j batch.Job) {
		if err := c.get(jobs+"/train", &j); err != nil {
			t.Fatal(err)
		}
		return j
	}
	fail := func(p *core.Pod, how object) {
		c.mu.Lock()
		is := c.pods[string(p.UID)]
		is.ending = true
		c.mu.Unlock()
		if err := is.node.End(t.Context(), is.Pod, nil); err != nil {
			t.Fatal(err)
		}
		c.status(is, how)
	}
	first := c.podsOf("batch.kubernetes.io/job-name=train")[0]
	if first.Labels["example.com/gpu.checkpoints"] != "true" {
		t.Errorf("its pods do not say that they checkpoint: %v", first.Labels)
	}
	fail(&first, object{"phase": "Failed", "conditions": []object{{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}}})
	c.Await(t, "the next pod runs", func() error {
		pods := c.podsOf("batch.kubernetes.io/job-name=train")
		if len(pods) != 1 || pods[0].UID == first.UID || pods[0].Status.Phase != core.PodRunning {
			return fmt.Errorf("there are %d pods; %s", len(pods), c.says("train"))
		}
		return nil
	})
	if j := state(); j.Status.Failed != 0 {
		t.Errorf("an eviction counts as %d failures", j.Status.Failed)
	}
	second := c.podsOf("batch.kubernetes.io/job-name=train")[0]
	ended := object{"terminated": object{"exitCode": 1, "startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:00Z"}}
	fail(&second, object{"phase": "Failed", "containerStatuses": []object{{"name": "train", "image": "none", "imageID": "", "ready": false, "restartCount": 0, "state": ended}}})
	c.Await(t, "the Job has failed", func() error {
		j := state()
		for _, is := range j.Status.Conditions {
			if is.Type == batch.JobFailed && is.Status == core.ConditionTrue && is.Reason == batch.JobReasonPodFailurePolicy {
				return nil
			}
		}
		return fmt.Errorf("it says %+v", j.Status)
	})
}

// burstRatio is what is above a saturation of 80 %, in workers, as the rules of docs/schedulers.md
// have it; here of the nodes on-prem.
func (c *cluster) burstRatio() float64 {
	sum, n := 0.0, 0.0
	for name, site := range c.sites {
		var g struct {
			Status struct {
				Summary struct{ SaturationPercent float64 }
			}
		}
		if site != "on-prem" || c.get("/apis/example.com/v1alpha1/gpunodes/"+name, &g) != nil {
			continue
		}
		sum, n = sum+g.Status.Summary.SaturationPercent/100, n+1 // they have the same memory
	}
	return math.Ceil(max(sum/n-0.8, 0) * 20)
}

// serveBurstMetric stands in for Prometheus and its adapter, with what the agents have published.
func (c *cluster) serveBurstMetric() {
	c.t.Helper()
	const group = "external.metrics.k8s.io/v1beta1"
	mux := http.NewServeMux()
	answer := func(w http.ResponseWriter, text string) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, text)
	}
	mux.HandleFunc("GET /apis/"+group, func(w http.ResponseWriter, _ *http.Request) {
		answer(w, `{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"`+group+`","resources":[{"name":"gpu_agent_burst_workers","singularName":"","namespaced":true,"kind":"ExternalMetricValueList","verbs":["get"]}]}`)
	})
	mux.HandleFunc("GET /apis/"+group+"/namespaces/"+team+"/gpu_agent_burst_workers", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, fmt.Sprintf(`{"kind":"ExternalMetricValueList","apiVersion":"%s","metadata":{},"items":[{"metricName":"gpu_agent_burst_workers","metricLabels":{},"timestamp":%q,"value":"%v"}]}`,
			group, time.Now().UTC().Format(time.RFC3339), c.burstRatio()))
	})
	server := httptest.NewTLSServer(mux)
	c.t.Cleanup(server.Close)
	// The API server passes requests on to a Service, which is another name for this machine.
	c.post("/api/v1/namespaces", object{"metadata": object{"name": "monitoring"}})
	c.post("/api/v1/namespaces/monitoring/services", object{"metadata": object{"name": "adapter"}, "spec": object{"type": "ExternalName", "externalName": "localhost"}})
	c.post("/apis/apiregistration.k8s.io/v1/apiservices", object{"metadata": object{"name": "v1beta1.external.metrics.k8s.io"}, "spec": object{
		"group": "external.metrics.k8s.io", "version": "v1beta1", "groupPriorityMinimum": 100, "versionPriority": 100, "insecureSkipTLSVerify": true,
		"service": object{"namespace": "monitoring", "name": "adapter", "port": server.Listener.Addr().(*net.TCPAddr).Port}}})
}

// saturate fills the nodes on-prem, and has what is served in the cloud follow.
func (c *cluster) saturate(t *testing.T) {
	before := c.burstRatio()
	for i := range 4 {
		c.send(job{name: fmt.Sprint("fill-", i), asks: map[string]int{"example.com/mig-3g.40gb": 1}})
	}
	for i := range 2 {
		c.send(job{name: fmt.Sprint("more-", i), asks: map[string]int{memory: 20}})
	}
	c.Await(t, "on-prem is saturated", func() error {
		if c.burstRatio() < 2 {
			return fmt.Errorf("so many workers are wanted elsewhere: %v", c.burstRatio())
		}
		return nil
	})
	want := int(c.burstRatio())
	t.Logf("%v workers were wanted elsewhere before, and %d are now", before, want)
	c.awaitPods("app=inference,site=cloud", map[string]int{"cloud": min(want, 4)})
}

// nameGPUs has KubeRay make pods that ask for GPUs under names that it knows and that it does not,
// with nothing said of how many GPUs that are.
func (c *cluster) nameGPUs(t *testing.T) {
	asks := map[string]string{"gpu": "example.com/gpu", "units": memory, "replicas": "example.com/gpu.shared", "instances": "example.com/mig-3g.40gb",
		"nvidia": "nvidia.com/mig-3g.40gb", "engines": "nvidia.com/mig-1g.10gb.me"}
	told := map[string]string{"gpu": "2", "nvidia": "2"}
	group := func(resource string) object {
		limits := object{"cpu": "1", "memory": "1Gi"}
		if resource != "" {
			limits[resource] = 2
		}
		return object{"rayStartParams": object{}, "template": object{"spec": object{"containers": []object{{"name": "ray", "image": "none", "resources": object{"limits": limits}}}}}}
	}
	var workers []object
	for name, resource := range asks {
		w := group(resource)
		w["groupName"], w["replicas"], w["minReplicas"], w["maxReplicas"] = name, 1, 1, 1
		workers = append(workers, w)
	}
	c.post("/apis/ray.io/v1/namespaces/"+team+"/rayclusters", object{"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": object{"name": "names"},
		"spec": object{"rayVersion": "2.46.0", "headGroupSpec": group(""), "workerGroupSpecs": workers}})
	for name, resource := range asks {
		selector := "ray.io/cluster=names,ray.io/group=" + name
		c.Await(t, resource+" has a worker", func() error {
			if n := len(c.podsOf(selector)); n != 1 {
				return fmt.Errorf("there are %d", n)
			}
			return nil
		})
		if have := gpusToldTo(&c.podsOf(selector)[0]); have != told[name] {
			t.Errorf("of a worker with 2 of %s Ray is told that it has %q GPUs, want %q", resource, have, told[name])
		}
	}
}
