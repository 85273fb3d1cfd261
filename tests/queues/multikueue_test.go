// SPDX-License-Identifier: Apache-2.0

package queues

import (
	"fmt"
	"strings"
	"testing"
	"time"

	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"example.com/gpu-agent/tests/lab"
	"example.com/gpu-agent/tests/plane"
)

// worker is a cluster that another one sends work to, and the name by which that knows it.
type worker struct {
	name string
	*cluster
}

// startManager starts a cluster without nodes, whose queue sends jobs to workers, in this order. frameworks are the
// integrations that Kueue has on, and multiKueue is its configuration of that key.
func startManager(t *testing.T, frameworks, multiKueue string, workers ...worker) *cluster {
	t.Helper()
	kit, err := lab.NewKit(nil)
	if err != nil {
		t.Fatal(err)
	}
	m := &cluster{Server: plane.Start(t), t: t, root: kit.Root}
	m.kubeconfig = m.Kubeconfig(t, nil)
	m.namespace(team)
	m.namespace(sensitive)
	m.install("components: [%[1]s/deployments/components/stays]\n")
	if strings.Contains(frameworks, "ray.io") {
		m.KubeRay(t)
	}
	if strings.Contains(frameworks, "jobset") {
		m.JobSet(t)
	}
	// Its manager wants each integration that it has served by the workers, too.
	const configuration = "integrations: {frameworks: [%s]}\nmultiKueue: {%s}\n" +
		"resources: {excludeResourcePrefixes: [cpu]}\n"
	m.Kueue(t, fmt.Appendf(nil, configuration, frameworks, multiKueue), nil)
	var names []string
	put := func(path, kind string, o object) {
		t.Helper()
		o["apiVersion"], o["kind"] = "kueue.x-k8s.io/v1beta2", kind
		m.post(queueing+path, o)
	}
	for _, w := range workers {
		names = append(names, w.name)
		m.post("/api/v1/namespaces/kueue-system/secrets", object{
			"metadata": object{"name": w.name}, "data": object{"kubeconfig": w.Remote(t)}})
		in := object{"kubeConfig": object{"location": w.name, "locationType": "Secret"}}
		put("/multikueueclusters", "MultiKueueCluster", object{
			"metadata": object{"name": w.name}, "spec": object{"clusterSource": in}})
	}
	put("/multikueueconfigs", "MultiKueueConfig", object{
		"metadata": object{"name": "gpus"}, "spec": object{"clusters": names}})
	put("/admissionchecks", "AdmissionCheck", object{"metadata": object{"name": "elsewhere"},
		"spec": object{"controllerName": "kueue.x-k8s.io/multikueue",
			"parameters": object{"apiGroup": "kueue.x-k8s.io", "kind": "MultiKueueConfig", "name": "gpus"}}})
	put("/resourceflavors", "ResourceFlavor", object{"metadata": object{"name": "any"}})
	quota := object{"name": "any", "resources": []object{{"name": memory, "nominalQuota": "1000"}}}
	put("/clusterqueues", "ClusterQueue", object{"metadata": object{"name": "gpus"}, "spec": object{
		"namespaceSelector":       object{},
		"admissionChecksStrategy": object{"admissionChecks": []object{{"name": "elsewhere"}}},
		"resourceGroups":          []object{{"coveredResources": []string{memory}, "flavors": []object{quota}}}}})
	for _, namespace := range []string{team, sensitive} {
		path := "/namespaces/" + namespace + "/localqueues"
		put(path, "LocalQueue", object{"metadata": object{"name": "gpus"}, "spec": object{"clusterQueue": "gpus"}})
	}
	for _, path := range append([]string{"/clusterqueues/gpus"}, prefixed("/multikueueclusters/", names)...) {
		m.Await(t, path+" is active", func() error { return m.active(queueing + path) })
	}
	return m
}

func prefixed(prefix string, names []string) (out []string) {
	for _, name := range names {
		out = append(out, prefix+name)
	}
	return out
}

// active is an error until an object says that it is active.
func (c *cluster) active(path string) error {
	var o struct{ Status core.NodeStatus } // conditions alone count
	if err := c.get(path, &o); err != nil {
		return err
	}
	for _, is := range o.Status.Conditions {
		if is.Type == "Active" && is.Status == core.ConditionTrue {
			return nil
		}
	}
	return fmt.Errorf("it says %+v", o.Status.Conditions)
}

// sendTo makes a Job in a namespace, which asks for so much memory.
func (c *cluster) sendTo(namespace, name string, units int) {
	c.t.Helper()
	requests := object{memory: fmt.Sprint(units)}
	container := object{"name": "main", "image": "none", "resources": object{"requests": requests, "limits": requests}}
	c.post("/apis/batch/v1/namespaces/"+namespace+"/jobs", object{
		"metadata": object{"name": name, "labels": object{"kueue.x-k8s.io/queue-name": "gpus"}},
		"spec": object{"suspend": true, "template": object{"spec": object{
			"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": []object{container}}}}})
}

// awaitReported waits until the cluster that sent a Job knows that it is complete.
func (c *cluster) awaitReported(name string) {
	c.t.Helper()
	c.Await(c.t, name+" is complete here, too", func() error {
		var j batch.Job
		if err := c.get(jobs+"/"+name, &j); err != nil {
			return err
		}
		if j.Status.Succeeded != 1 {
			return fmt.Errorf("it says %+v", j.Status)
		}
		return nil
	})
}

// dispatched is the only workload of a namespace.
func (c *cluster) dispatched(namespace string) (*workload, error) {
	var list struct{ Items []workload }
	if err := c.get(queueing+"/namespaces/"+namespace+"/workloads", &list); err != nil {
		return nil, err
	}
	if len(list.Items) != 1 {
		return nil, fmt.Errorf("it has %d workloads", len(list.Items))
	}
	return &list.Items[0], nil
}

// A cluster sends jobs to one on-prem, and after a round to one in the cloud. The check of the one on-prem decides
// whether a job has room there. What does not goes to the cloud, and is reported back; work that stays waits for the
// room on-prem.
func TestMultiKueueThereAndBack(t *testing.T) {
	if !*long {
		t.Skip("-long is not set: a round of Kueue's dispatcher takes five minutes")
	}
	others := []string{sensitive}
	none, limit := []string{"--cloud", "none", "--checks"}, []string{"--cloud", "cloud=158GiB", "--checks"}
	home := startCluster(t, options{nodes: twoSites[:1], others: others, export: none})
	cloud := startCluster(t, options{nodes: twoSites[1:], others: others, export: limit})
	home.install("components: [%[1]s/deployments/components/stays]\n")
	home.stays(sensitive, "on-prem", nil)
	// By their names the cloud would come first.
	const incremental = "dispatcherName: kueue.x-k8s.io/multikueue-dispatcher-incremental, " +
		"incrementalDispatcherConfig: {stepSize: 1}"
	m := startManager(t, "batch/job", incremental, worker{"on-prem", home}, worker{"cloud", cloud})
	m.stays(sensitive, "on-prem", object{"example.com/gpu.stays-clusters": "on-prem"})

	for _, name := range []string{"one", "two"} {
		m.sendTo(team, name, 50)
		home.awaitAt(name, "on-prem", 1)
	}
	// 58 units are left, 29 on each GPU: there is quota, and no room.
	const waits = "the largest free block of " + memory + " is 29, on gpu-1; it keeps its quota while it waits"
	m.sendTo(team, "large", 40)
	home.awaitMessage(t, waits)
	m.sendTo(sensitive, "secret", 40)
	// Await has less patience than the dispatcher.
	for until := time.Now().Add(10 * time.Minute); ; time.Sleep(time.Second) {
		nodes, err := cloud.running("large")
		if err == nil && len(nodes) == 1 {
			break
		}
		if time.Now().After(until) {
			t.Fatalf("large does not run in the cloud: %v, %s", err, m.says("large"))
		}
	}
	m.Await(t, "a request to send the sensitive job to the cloud is refused", m.refusal)
	home.Await(t, "the sensitive job has quota on-prem, and no room", func() error {
		w, err := home.dispatched(sensitive)
		if err != nil {
			return err
		}
		if of := w.Status.AdmissionChecks; len(of) != 1 || !strings.Contains(of[0].Message, waits) {
			return fmt.Errorf("its checks say %+v", of)
		}
		return nil
	})
	home.end("one")
	home.Await(t, "the sensitive job has its room on-prem", func() error {
		var list core.PodList
		if err := home.get("/api/v1/namespaces/"+sensitive+"/pods", &list); err != nil {
			return err
		}
		if len(list.Items) != 1 || list.Items[0].Spec.NodeName == "" {
			return fmt.Errorf("it has %d pods, none of them bound", len(list.Items))
		}
		return nil
	})
	if _, err := cloud.dispatched(sensitive); err == nil {
		t.Error("there is a workload of the sensitive job in the cloud")
	}
	cloud.end("large")
	home.end("two")
	for _, name := range []string{"one", "two", "large"} {
		m.awaitReported(name)
	}
	home.noneRefused()
	cloud.noneRefused()
}

// What is no Job goes through MultiKueue, too: the worker's check judges the workload, which comes there first, and
// keeps the room for the pods that come later. An elastic job grows there.
func TestMultiKueueOwners(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: the tests of internal/kueue play the same with the real books")
	}
	for _, program := range []string{"kuberay", "jobset"} {
		plane.Program(t, program)
	}
	home := startCluster(t, options{nodes: twoSites[:1], export: []string{"--cloud", "none", "--checks"}})
	home.Controllers(t, "garbage-collector-controller") // a job that Kueue makes anew takes no workload that another still has
	home.KubeRay(t)
	home.JobSet(t)
	m := startManager(t, "batch/job, jobset.x-k8s.io/jobset, ray.io/rayjob, pod", "", worker{"on-prem", home})

	set := m.jobSet("set", replicated("leader", 1, 0), replicated("workers", 2, 50))
	home.awaitPods(set+workers, map[string]int{"on-prem": 2})
	m.rayJob("ray", nil, 1, 40)
	home.awaitMessage(t, "the largest free block of "+memory+" is 29, on gpu-1; it keeps its quota while it waits")
	for i := range 2 {
		home.end(fmt.Sprint("set-workers-", i))
	}
	home.end("set-leader-0")
	home.awaitPods("ray.io/cluster="+home.clusterOf("ray")+shares, map[string]int{"on-prem": 1})
	m.ownPod("own", 20, nil, nil)
	home.awaitPods("app=own", map[string]int{"on-prem": 1})
	m.elastic("grows", 1, 10)
	home.awaitAt("grows", "on-prem", 1)
	was, before := home.jobUID("grows"), home.podsOf("batch.kubernetes.io/job-name=grows")
	m.patch(jobs+"/grows", object{"spec": object{"parallelism": 2}})
	home.awaitAt("grows", "on-prem", 2)
	if home.jobUID("grows") == was {
		home.still(t, before)
	} else {
		t.Log("Kueue has ended the job in its worker while it grew, and made it anew there")
	}
	m.Await(t, "the JobSet is complete here, too", func() error {
		var is struct {
			Status struct{ TerminalState string }
		}
		if err := m.get(jobSets+"/set", &is); err != nil {
			return err
		}
		if is.Status.TerminalState != "Completed" {
			return fmt.Errorf("it says %q; %s", is.Status.TerminalState, m.allSay())
		}
		return nil
	})
	home.noneRefused()
}

func (c *cluster) jobUID(name string) types.UID {
	c.t.Helper()
	var is batch.Job
	if err := c.get(jobs+"/"+name, &is); err != nil {
		c.t.Fatal(err)
	}
	return is.UID
}
