// SPDX-License-Identifier: Apache-2.0

package queues

import (
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"

	"example.com/gpu-agent/tests/plane"
)

// sensitive is a namespace whose work stays, in the cluster that sends work to another one.
const sensitive = "records"

// refusals is the API server's count of them by the policy that keeps workloads from clusters.
var refusals = regexp.MustCompile(`(?m)^apiserver_validating_admission_policy_check_total` +
	`\{enforcement_action="deny",.*policy="gpu-stays-workloads",.*\} [1-9]`)

// TestWhatStays has queues send work to a cloud that may not have it: first by a queue whose first flavor is
// the cloud, then by a MultiKueue whose only cluster is one. Nothing arrives there. The same work of a namespace
// without the label does, runs, and is reported back.
func TestWhatStays(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: the policies are tried at the API server alone, too, in deployments")
	}
	c := startCluster(t, options{nodes: twoSites, others: []string{sensitive},
		export: []string{"--cloud", "cloud=158GiB", "--topology=false"}})
	c.install("components: [%[1]s/deployments/components/stays]\n")
	t.Run("a queue that begins with the cloud", c.queueBeginsWithCloud)
	t.Run("MultiKueue", c.multiKueue)
}

// stays writes the label and the annotations of a namespace.
func (c *cluster) stays(namespace string, site any, annotations object) {
	c.t.Helper()
	label := object{"example.com/gpu.stays": site}
	c.patch("/api/v1/namespaces/"+namespace, object{"metadata": object{"labels": label, "annotations": annotations}})
}

// turn turns the order of a queue's flavors.
func (c *cluster) turn(t *testing.T) {
	t.Helper()
	const path = queueing + "/clusterqueues/" + team
	var queue struct {
		Spec struct{ ResourceGroups []map[string]any }
	}
	if err := c.get(path, &queue); err != nil {
		t.Fatal(err)
	}
	slices.Reverse(queue.Spec.ResourceGroups[0]["flavors"].([]any))
	c.patch(path, object{"spec": object{"resourceGroups": queue.Spec.ResourceGroups}})
}

func (c *cluster) queueBeginsWithCloud(t *testing.T) {
	asks := map[string]int{memory: 20}
	c.turn(t)
	c.send(job{name: "goes", asks: asks})
	c.awaitAt("goes", "cloud", 1)
	c.end("goes")

	c.stays(team, "on-prem", nil)
	c.send(job{name: "leaks", asks: asks})
	const says = "work of this namespace stays at the site on-prem (its label example.com/gpu.stays), " +
		"and this pod goes to cloud; give the pod template the node selector example.com/gpu.site: on-prem, " +
		"or send it through a queue that has no other site"
	c.Await(t, "an Event of the job says why it has no pod", func() error {
		var list core.EventList
		if err := c.get("/api/v1/namespaces/"+team+"/events", &list); err != nil {
			return err
		}
		var all []string
		for i := range list.Items {
			e := &list.Items[i]
			if e.InvolvedObject.Kind != "Job" || e.InvolvedObject.Name != "leaks" {
				continue
			}
			if e.Reason == "FailedCreate" && strings.Contains(e.Message, says) {
				return nil
			}
			all = append(all, e.Reason+": "+e.Message)
		}
		return fmt.Errorf("they say %q; %s", all, c.says("leaks"))
	})
	// A pod of its own waits behind Kueue's gate, which cannot be taken away.
	requests := object{memory: "20"}
	container := object{"name": "main", "image": "none", "resources": object{"requests": requests, "limits": requests}}
	c.post(podsOfTeam, object{
		"metadata": object{"name": "server", "labels": object{"kueue.x-k8s.io/queue-name": "gpus"}},
		"spec":     object{"terminationGracePeriodSeconds": 1, "containers": []object{container}}})
	c.Await(t, "the pod has quota of the cloud", func() error {
		var list struct{ Items []workload }
		if err := c.get(queueing+"/namespaces/"+team+"/workloads", &list); err != nil {
			return err
		}
		for i := range list.Items {
			if w := &list.Items[i]; strings.HasPrefix(w.Name, "pod-server") && w.is("Admitted") {
				return nil
			}
		}
		return errors.New("it has none")
	})
	c.send(job{name: "stays", asks: asks, selector: map[string]string{site: "on-prem"}})
	c.awaitAt("stays", "on-prem", 1)
	var server core.Pod
	if err := c.get(podsOfTeam+"/server", &server); err != nil || len(server.Spec.SchedulingGates) == 0 {
		t.Errorf("the pod has no gate any more: %v, %v", err, server.Spec.NodeSelector)
	}
	for _, p := range c.podsOf("") {
		if c.sites[p.Spec.NodeName] == "cloud" {
			t.Errorf("%s is in the cloud", p.Name)
		}
	}
	c.delete("leaks")
	c.end("stays")
	c.patch(podsOfTeam+"/server", object{"metadata": object{"finalizers": nil}})
	c.Do(t, nil, http.MethodDelete, podsOfTeam+"/server", plane.JSON, object{}, nil)

	// Through a queue that begins on-prem, the job needs to say nothing.
	c.turn(t)
	c.send(job{name: "well", asks: asks})
	c.awaitAt("well", "on-prem", 1)
	c.end("well")
	c.stays(team, nil, nil)
}

// multiKueue has a cluster send jobs to c, which it knows by the name cloud.
func (c *cluster) multiKueue(t *testing.T) {
	m := startManager(t, "batch/job", "", worker{"cloud", c})
	m.stays(sensitive, "on-prem", nil)
	m.sendTo(sensitive, "secret", 20)
	m.Await(t, "the sensitive job has quota, and waits for a cluster", func() error {
		w, err := m.dispatched(sensitive)
		if err != nil || !w.is("QuotaReserved") || len(w.Status.AdmissionChecks) != 1 {
			return fmt.Errorf("%v: %+v", err, w)
		}
		return nil
	})
	m.Await(t, "a request to send it is refused", m.refusal)
	m.sendTo(team, "plain", 20)
	c.awaitAt("plain", "on-prem", 1) // as that cluster calls the nodes that it begins with
	c.end("plain")
	m.awaitReported("plain")
	w, err := m.dispatched(sensitive)
	if err != nil || w.Status.ClusterName != "" || len(w.Status.NominatedClusterNames) > 0 {
		t.Errorf("the sensitive job is sent: %v, %+v", err, w)
	}
	if w, err := c.dispatched(sensitive); err == nil {
		t.Errorf("there is a workload of the sensitive job in the cloud: %s", w.Name)
	}
	if err := c.get(secrets, nil); err == nil {
		t.Error("the sensitive job is in the cloud")
	}
	// The policy was all that kept it.
	m.stays(sensitive, "on-prem", object{"example.com/gpu.stays-clusters": "cloud"})
	c.Await(t, "the sensitive job is in the cluster that is named", func() error { return c.get(secrets, nil) })
}

const secrets = "/apis/batch/v1/namespaces/" + sensitive + "/jobs/secret"

// refusal is an error until the policy has refused to send a workload to a cluster.
func (c *cluster) refusal() error {
	text, err := c.Text(c.t, "/metrics")
	if err == nil && !refusals.MatchString(text) {
		err = errors.New("the policy has refused nothing")
	}
	return err
}
