// SPDX-License-Identifier: Apache-2.0

package queues

import (
	"errors"
	"fmt"
	"testing"
)

// What befalls a workload after it was admitted: it gets a job.
func TestAfterAdmission(t *testing.T) {
	c := startCluster(t, options{
		nodes:  []node{{"gpu-1", "on-prem", shared}, {"gpu-2", "on-prem", shared}},
		export: []string{"--cloud", "none", "--checks"},
	})
	t.Run("its job comes later", func(t *testing.T) { c.prebuilt(t) })
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
