// SPDX-License-Identifier: Apache-2.0

package queues

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"testing"

	core "k8s.io/api/core/v1"

	"example.com/gpu-agent/tests/plane"
)

// What befalls a workload after it was admitted: it gets a job, its node is drained, and the job grows.
func TestAfterAdmission(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: the tests of internal/kueue play the same with the real books")
	}
	c := startCluster(t, options{
		nodes:  []node{{"gpu-1", "on-prem", shared}, {"gpu-2", "on-prem", shared}},
		export: []string{"--cloud", "none", "--checks"},
	})
	t.Run("its job comes later", func(t *testing.T) { c.prebuilt(t) })
	t.Run("its node is drained", func(t *testing.T) { c.drain(t) })
	t.Run("its job grows", func(t *testing.T) { c.grow(t) })
}

// prebuilt has a workload admitted before there is a job for it, as MultiKueue does. The hold takes all
// GPUs, so that the job's pods have no other room than theirs.
func (c *cluster) prebuilt(t *testing.T) {
	requests := object{memory: "50"}
	container := object{"name": "main", "image": "none", "resources": object{"requests": requests, "limits": requests}}
	spec := object{"suspend": true, "parallelism": 4, "completions": 4,
		"template": object{"spec": object{"restartPolicy": "Never", "containers": []object{container}}}}
	c.post(jobs, object{"metadata": object{"name": "model"}, "spec": spec})
	var model struct{ Spec struct{ Template object } } // with the server's defaults
	if err := c.get(jobs+"/model", &model); err != nil {
		t.Fatal(err)
	}
	set := object{"name": "main", "count": 4, "template": object{"spec": model.Spec.Template["spec"]}}
	c.post(queueing+"/namespaces/"+team+"/workloads", object{
		"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "metadata": object{"name": "pre"},
		"spec": object{"queueName": "gpus", "podSets": []object{set}}})
	c.Await(t, "the workload is admitted before there is a job", func() error {
		var w workload
		if err := c.get(queueing+"/namespaces/"+team+"/workloads/pre", &w); err != nil || !w.is("Admitted") {
			return fmt.Errorf("%w; %+v", errors.Join(err), w.Status)
		}
		return nil
	})
	labels := object{"kueue.x-k8s.io/queue-name": "gpus", "kueue.x-k8s.io/prebuilt-workload-name": "pre"}
	c.post(jobs, object{"metadata": object{"name": "pre", "labels": labels}, "spec": spec})
	c.awaitAt("pre", "on-prem", 4)
	c.end("pre")
}

// grow has an elastic job grow, which is another workload of Kueue's then. What runs goes on, and the pods that
// come use the room that is held for that one, though they were told of the first.
func (c *cluster) grow(t *testing.T) {
	requests := object{memory: "50"}
	container := object{"name": "main", "image": "none", "resources": object{"requests": requests, "limits": requests}}
	c.post(jobs, object{
		"metadata": object{"name": "grows", "labels": object{"kueue.x-k8s.io/queue-name": "gpus"},
			"annotations": object{"kueue.x-k8s.io/elastic-job": "true"}},
		"spec": object{"suspend": true, "parallelism": 2, "completions": 20,
			"template": object{"spec": object{"restartPolicy": "Never", "containers": []object{container}}}}})
	c.awaitAt("grows", "on-prem", 2)
	before := c.podsOf("batch.kubernetes.io/job-name=grows")
	c.patch(jobs+"/grows", object{"spec": object{"parallelism": 4}})
	c.awaitAt("grows", "on-prem", 4)
	now := c.podsOf("batch.kubernetes.io/job-name=grows")
	for _, was := range before {
		if !slices.ContainsFunc(now, func(p core.Pod) bool { return p.UID == was.UID }) {
			t.Errorf("%s was ended for it; %s", was.Name, c.says("grows"))
		}
	}
}

// drain cordons a node with two jobs, and evicts the pod of one. That one begins again elsewhere, since its
// next pod may go to that node alone; the other runs on.
func (c *cluster) drain(t *testing.T) {
	pod := func(job string) core.Pod {
		t.Helper()
		pods := c.podsOf("batch.kubernetes.io/job-name=" + job)
		if len(pods) != 1 {
			t.Fatalf("%s has %d pods; %s", job, len(pods), c.says(job))
		}
		return pods[0]
	}
	c.send(job{name: "evicted", asks: map[string]int{memory: 30}})
	c.awaitAt("evicted", "on-prem", 1)
	c.send(job{name: "stays", asks: map[string]int{memory: 30}})
	c.awaitAt("stays", "on-prem", 1)
	evicted, stays := pod("evicted"), pod("stays")
	at, told := evicted.Spec.NodeName, evicted.Spec.NodeSelector[core.LabelHostname]
	if stays.Spec.NodeName != at || told != at {
		t.Fatalf("they run on %s and %s, and the one may go to %s", at, stays.Spec.NodeName, told)
	}
	c.patch("/api/v1/nodes/"+at, object{"spec": object{"unschedulable": true}})
	ends := object{"apiVersion": "policy/v1", "kind": "Eviction", "metadata": object{"name": evicted.Name}}
	path := podsOfTeam + "/" + evicted.Name + "/eviction"
	if err := c.Do(t, nil, http.MethodPost, path, plane.JSON, ends, nil); err != nil {
		t.Fatal(err)
	}
	c.Await(t, "the evicted job runs on the other node", func() error {
		nodes, err := c.running("evicted")
		if err != nil || len(nodes) != 1 || nodes[0] == at {
			return fmt.Errorf("%w; it runs on %v; %s", errors.Join(err), nodes, c.says("evicted"))
		}
		return nil
	})
	if now := pod("stays"); now.UID != stays.UID {
		t.Errorf("the pod of the other job was ended: %s", c.says("stays"))
	}
	c.patch("/api/v1/nodes/"+at, object{"spec": object{"unschedulable": nil}})
	c.end("evicted")
	c.end("stays")
}
