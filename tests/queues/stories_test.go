// SPDX-License-Identifier: Apache-2.0

package queues

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"example.com/gpu-agent/tests/plane"
)

// TestStories are lives of jobs beside each other: each begins with nothing on two nodes on-prem and one in the cloud,
// and leaves nothing.
func TestStories(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: the tests of internal/kueue play the same with the real books")
	}
	c := startCluster(t, options{
		nodes:  []node{{"gpu-1", "on-prem", shared}, {"gpu-2", "on-prem", shared}, {"cloud-1", "cloud", shared}},
		export: []string{"--cloud", "cloud=158GiB", "--checks"}, others: []string{"lender"},
	})
	c.post("/api/v1/namespaces/default/serviceaccounts", object{"metadata": object{"name": "default"}})
	for _, story := range []struct {
		name string
		tell func(t *testing.T)
	}{
		{"cpu runs out", c.cpuRunsOut},
		{"nodes are tainted", c.tainted},
		{"an elastic job waits to grow, and shrinks", c.growsLater},
		{"fewer pods than asked for", c.fewer},
		{"preemption within a queue", c.preempts},
		{"what was lent is taken back", c.reclaims},
		{"a taint of spot nodes", c.spot},
		{"pods without a job", c.servers},
		{"patience", c.patience},
	} {
		t.Run(story.name, func(t *testing.T) {
			c.awaitIdle(t)
			story.tell(t)
			c.noneRefused()
		})
	}
}

// awaitIdle waits until nothing is held on any node, and no workload has quota.
func (c *cluster) awaitIdle(t *testing.T) {
	t.Helper()
	c.Await(t, "nothing is left of the story before", func() error {
		var list struct{ Items []workload }
		if err := c.get(queueing+"/namespaces/"+team+"/workloads", &list); err != nil {
			return err
		}
		for i := range list.Items {
			if w := &list.Items[i]; w.is("QuotaReserved") && !w.is("Finished") {
				return fmt.Errorf("%s has quota", w.Name)
			}
		}
		for name := range c.nodes {
			var g struct {
				Status struct {
					Resources []struct {
						Name        string
						Total, Free int
					}
				}
			}
			if err := c.get("/apis/example.com/v1alpha1/gpunodes/"+name, &g); err != nil {
				return err
			}
			for _, r := range g.Status.Resources {
				if r.Free != r.Total {
					return fmt.Errorf("%s has %d of %d %s", name, r.Free, r.Total, r.Name)
				}
			}
		}
		return nil
	})
}

// onPrem are the nodes on-prem.
var onPrem = []string{"gpu-1", "gpu-2"}

// filler is a pod without GPUs, and without Kueue.
func (c *cluster) filler(node, cpu string) (end func()) {
	c.t.Helper()
	const pods = "/api/v1/namespaces/default/pods"
	container := object{"name": "main", "image": "none", "resources": object{"requests": object{"cpu": cpu}}}
	c.post(pods, object{"metadata": object{"name": "filler-" + node}, "spec": object{"nodeName": node, "containers": []object{container}}})
	return func() {
		now := object{"gracePeriodSeconds": 0}
		if err := c.Do(c.t, nil, http.MethodDelete, pods+"/filler-"+node, plane.JSON, now, nil); err != nil {
			c.t.Error(err)
		}
	}
}

// awaitSays waits until a Job's workload says something.
func (c *cluster) awaitSays(t *testing.T, job, part string) {
	t.Helper()
	c.Await(t, fmt.Sprintf("%s says %q", job, part), func() error {
		if says := c.says(job); !strings.Contains(says, part) {
			return errors.New(says)
		}
		return nil
	})
}

// cpuRunsOut: on-prem has GPUs and no cpu, so the job goes to the cloud; the next one stays there once there is cpu.
func (c *cluster) cpuRunsOut(t *testing.T) {
	var ends []func()
	for _, name := range onPrem {
		var n core.Node
		if err := c.get("/api/v1/nodes/"+name, &n); err != nil {
			t.Fatal(err)
		}
		ends = append(ends, c.filler(name, fmt.Sprint(n.Status.Allocatable.Cpu().Value()-2)))
	}
	c.send(job{name: "thirsty", asks: map[string]int{memory: 20, "cpu": 4}})
	c.awaitAt("thirsty", "cloud", 1)
	c.awaitSays(t, "thirsty", "too little cpu")
	c.send(job{name: "modest", asks: map[string]int{memory: 20, "cpu": 2}})
	c.awaitAt("modest", "on-prem", 1)
	for _, end := range ends {
		end()
	}
	c.send(job{name: "later", asks: map[string]int{memory: 20, "cpu": 4}})
	c.awaitAt("later", "on-prem", 1)
	for _, name := range []string{"thirsty", "modest", "later"} {
		c.end(name)
	}
}

func (c *cluster) tainted(t *testing.T) {
	taint := func(taints any) {
		t.Helper()
		for _, name := range onPrem {
			c.patch("/api/v1/nodes/"+name, object{"spec": object{"taints": taints}})
		}
	}
	taint([]object{{"key": "maintenance", "effect": "NoSchedule"}})
	c.send(job{name: "repelled", asks: map[string]int{memory: 20}})
	c.awaitAt("repelled", "cloud", 1)
	taint(nil)
	c.send(job{name: "welcome", asks: map[string]int{memory: 20}})
	c.awaitAt("welcome", "on-prem", 1)
	c.end("repelled")
	c.end("welcome")
}

// elastic makes an elastic Job.
func (c *cluster) elastic(name string, pods, units int) {
	c.t.Helper()
	requests := object{memory: fmt.Sprint(units)}
	container := object{"name": "main", "image": "none", "resources": object{"requests": requests, "limits": requests}}
	c.post(jobs, object{
		"metadata": object{"name": name, "labels": object{"kueue.x-k8s.io/queue-name": "gpus"},
			"annotations": object{"kueue.x-k8s.io/elastic-job": "true"}},
		"spec": object{"suspend": true, "parallelism": pods, "completions": 20,
			"template": object{"spec": object{"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": []object{container}}}}})
}

// growsLater: the pods that run go on while there is no room for more.
func (c *cluster) growsLater(t *testing.T) {
	c.elastic("stretches", 2, 50)
	c.awaitAt("stretches", "on-prem", 2)
	before := c.podsOf("batch.kubernetes.io/job-name=stretches")
	for i := range 2 {
		c.send(job{name: fmt.Sprint("beside-", i), asks: map[string]int{memory: 60}})
		c.awaitAt(fmt.Sprint("beside-", i), "on-prem", 1)
	}
	c.patch(jobs+"/stretches", object{"spec": object{"parallelism": 3}})
	c.awaitMessage(t, "its present pods keep running, and more follow once there is room")
	c.still(t, before)
	c.end("beside-0")
	c.awaitAt("stretches", "on-prem", 3)
	c.still(t, before)
	c.patch(jobs+"/stretches", object{"spec": object{"parallelism": 1}})
	c.awaitAt("stretches", "on-prem", 1)
	c.send(job{name: "after", asks: map[string]int{memory: 60}}) // what it has left is free
	c.awaitAt("after", "on-prem", 1)
	c.delete("stretches")
	c.end("beside-1")
	c.end("after")
}

// awaitMessage waits until some workload's check says something.
func (c *cluster) awaitMessage(t *testing.T, part string) {
	t.Helper()
	c.Await(t, fmt.Sprintf("a check says %q", part), func() error {
		var list struct{ Items []workload }
		if err := c.get(queueing+"/namespaces/"+team+"/workloads", &list); err != nil {
			return err
		}
		var all []string
		for i := range list.Items {
			for _, s := range list.Items[i].Status.AdmissionChecks {
				if all = append(all, list.Items[i].Name+": "+s.State+": "+s.Message); strings.Contains(s.Message, part) {
					return nil
				}
			}
		}
		return errors.New(strings.Join(all, "; "))
	})
}

// still checks that pods run as before.
func (c *cluster) still(t *testing.T, before []core.Pod) {
	t.Helper()
	for i := range before {
		var now core.Pod
		err := c.get(podsOfTeam+"/"+before[i].Name, &now)
		if err != nil || now.UID != before[i].UID || now.DeletionTimestamp != nil || now.Status.Phase != core.PodRunning {
			t.Errorf("%s was ended: %v, %s", before[i].Name, err, now.Status.Phase)
		}
	}
}

// fewer: Kueue gives a Job the number of pods that quota has; the check says which number would fit.
func (c *cluster) fewer(t *testing.T) {
	requests := object{memory: "50"}
	container := object{"name": "main", "image": "none", "resources": object{"requests": requests, "limits": requests}}
	post := func(name, least string, pods int) {
		c.post(jobs, object{
			"metadata": object{"name": name, "labels": object{"kueue.x-k8s.io/queue-name": "gpus"},
				"annotations": object{"kueue.x-k8s.io/job-min-parallelism": least}},
			"spec": object{"suspend": true, "parallelism": pods, "completions": pods,
				"template": object{"spec": object{"restartPolicy": "Never", "terminationGracePeriodSeconds": 1,
					"nodeSelector": object{site: "on-prem"}, "containers": []object{container}}}}})
	}
	// On-prem's quota is for six such pods, and there is room for four.
	post("partly", "2", 8)
	c.awaitSays(t, "partly", `with a parallelism of 4 for "main" it would fit`)
	c.delete("partly")
	post("fits", "2", 4)
	c.awaitAt("fits", "on-prem", 4)
	c.end("fits")
}

// delete deletes a Job with its pods, and waits until Kueue knows.
func (c *cluster) delete(name string) {
	c.t.Helper()
	with := object{"propagationPolicy": "Background"}
	if err := c.Do(c.t, nil, http.MethodDelete, jobs+"/"+name, plane.JSON, with, nil); err != nil {
		c.t.Fatal(err)
	}
	// No garbage collector runs here.
	c.deletePods("batch.kubernetes.io/job-name=" + name)
	var list struct{ Items []workload }
	if err := c.get(queueing+"/namespaces/"+team+"/workloads", &list); err != nil {
		c.t.Fatal(err)
	}
	for i := range list.Items {
		w := &list.Items[i]
		if by := meta.GetControllerOf(&w.ObjectMeta); by != nil && by.Name == name {
			path := queueing + "/namespaces/" + team + "/workloads/" + w.Name
			c.patch(path, object{"metadata": object{"finalizers": nil}})
			c.Do(c.t, nil, http.MethodDelete, path, plane.JSON, object{}, nil) // it may be gone
		}
	}
}

// preempts: the room of those that Kueue preempts goes to the one that it preempts them for.
func (c *cluster) preempts(t *testing.T) {
	queue := queueing + "/clusterqueues/" + team
	c.patch(queue, object{"spec": object{"preemption": object{"withinClusterQueue": "LowerPriority"}}})
	defer c.patch(queue, object{"spec": object{"preemption": object{"withinClusterQueue": "Never"}}})
	c.post(queueing+"/workloadpriorityclasses", object{
		"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "WorkloadPriorityClass", "metadata": object{"name": "high"}, "value": 1000})
	stay := map[string]string{site: "on-prem"}
	for i := range 4 {
		c.send(job{name: fmt.Sprint("low-", i), asks: map[string]int{memory: 70}, selector: stay})
		c.awaitAt(fmt.Sprint("low-", i), "on-prem", 1)
	}
	c.slow.Store(int64(8 * time.Second)) // pods take so long to end
	defer c.slow.Store(0)
	c.send(job{name: "high", asks: map[string]int{memory: 60}, selector: stay, labels: map[string]string{"kueue.x-k8s.io/priority-class": "high"}})
	c.awaitAt("high", "on-prem", 1)
	c.delete("high")
	for i := range 4 {
		c.delete(fmt.Sprint("low-", i))
	}
}

// reclaims: a team that lends its quota on-prem takes it back, and gets the room that others leave for it.
func (c *cluster) reclaims(t *testing.T) {
	queue := queueing + "/clusterqueues/lender"
	anybody := object{"matchLabels": nil}
	c.patch(queue, object{"spec": object{"namespaceSelector": anybody, "preemption": object{"reclaimWithinCohort": "Any"}}})
	c.post(queueing+"/namespaces/"+team+"/localqueues", object{
		"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": object{"name": "lender"}, "spec": object{"clusterQueue": "lender"}})
	stay := map[string]string{site: "on-prem"}
	for i := range 4 {
		c.send(job{name: fmt.Sprint("borrows-", i), asks: map[string]int{memory: 70}, selector: stay})
		c.awaitAt(fmt.Sprint("borrows-", i), "on-prem", 1)
	}
	c.slow.Store(int64(8 * time.Second))
	defer c.slow.Store(0)
	c.send(job{name: "owns", asks: map[string]int{memory: 60}, selector: stay, labels: map[string]string{"kueue.x-k8s.io/queue-name": "lender"}})
	c.awaitAt("owns", "on-prem", 1)
	c.delete("owns")
	for i := range 4 {
		c.delete(fmt.Sprint("borrows-", i))
	}
}

// flavor is the name of the only flavor of a site.
func (c *cluster) flavor(t *testing.T, of string) string {
	t.Helper()
	var flavors struct {
		Items []struct {
			meta.ObjectMeta `json:"metadata"`
			Spec            struct{ NodeLabels map[string]string }
		}
	}
	if err := c.get(queueing+"/resourceflavors", &flavors); err != nil {
		t.Fatal(err)
	}
	for _, f := range flavors.Items {
		if f.Spec.NodeLabels[site] == of {
			return queueing + "/resourceflavors/" + f.Name
		}
	}
	t.Fatalf("no flavor is of %s", of)
	return ""
}

// spot: the cloud's nodes have a taint that its flavor tolerates, so pods go there that know nothing of it.
func (c *cluster) spot(t *testing.T) {
	taint := object{"key": "cloud.example.com/spot", "value": "true", "effect": "NoSchedule"}
	flavor, node := c.flavor(t, "cloud"), "/api/v1/nodes/cloud-1"
	c.patch(flavor, object{"spec": object{"tolerations": []object{{"key": "cloud.example.com/spot", "operator": "Exists"}}}})
	c.patch(node, object{"spec": object{"taints": []object{taint}}})
	for i := range 5 {
		c.send(job{name: fmt.Sprint("spot-", i), asks: map[string]int{memory: 60}})
		c.awaitAt(fmt.Sprint("spot-", i), map[bool]string{true: "cloud", false: "on-prem"}[i == 4], 1)
	}
	c.patch(flavor, object{"spec": object{"tolerations": nil}})
	c.patch(node, object{"spec": object{"taints": nil}})
	for i := range 5 {
		c.end(fmt.Sprint("spot-", i))
	}
}

// servers are pods that come to the queue by themselves.
func (c *cluster) servers(t *testing.T) {
	requests := object{memory: "50"}
	container := object{"name": "main", "image": "none", "resources": object{"requests": requests, "limits": requests}}
	for i := range 5 {
		c.post(podsOfTeam, object{
			"metadata": object{"name": fmt.Sprint("server-", i), "labels": object{"kueue.x-k8s.io/queue-name": "gpus", "batch.kubernetes.io/job-name": "servers"}},
			"spec":     object{"terminationGracePeriodSeconds": 1, "containers": []object{container}}})
	}
	c.Await(t, "four of five servers run on-prem, and one in the cloud", func() error {
		nodes, err := c.running("servers")
		at := map[string]int{}
		for _, n := range nodes {
			at[c.sites[n]]++
		}
		if err != nil || at["on-prem"] != 4 || at["cloud"] != 1 {
			return fmt.Errorf("%w; they run on %v", errors.Join(err), nodes)
		}
		return nil
	})
	c.deletePods("batch.kubernetes.io/job-name=servers")
}

// deletePods deletes pods, and waits until their kubelet has ended them.
func (c *cluster) deletePods(selector string) {
	c.t.Helper()
	for _, p := range c.podsOf(selector) {
		c.patch(podsOfTeam+"/"+p.Name, object{"metadata": object{"finalizers": nil}})
		c.Do(c.t, nil, http.MethodDelete, podsOfTeam+"/"+p.Name, plane.JSON, object{}, nil) // it may be gone
	}
	c.Await(c.t, "the pods are gone", func() error {
		if left := c.podsOf(selector); len(left) > 0 {
			return fmt.Errorf("%d are left", len(left))
		}
		return nil
	})
}

// patience: a job waits for on-prem as long as the cloud's flavor says, and gets the room that comes meanwhile.
func (c *cluster) patience(t *testing.T) {
	flavor := c.flavor(t, "cloud")
	say := func(text any) {
		t.Helper()
		c.patch(flavor, object{"metadata": object{"annotations": object{"example.com/gpu.patience": text}}})
	}
	for i := range 4 {
		c.send(job{name: fmt.Sprint("holds-", i), asks: map[string]int{memory: 70}})
		c.awaitAt(fmt.Sprint("holds-", i), "on-prem", 1)
	}
	say("10m")
	c.send(job{name: "patient", asks: map[string]int{memory: 60}})
	c.awaitSays(t, "patient", "it waits for room on-prem until")
	c.end("holds-0")
	c.awaitAt("patient", "on-prem", 1)
	say("1s")
	c.send(job{name: "hasty", asks: map[string]int{memory: 60}})
	c.awaitAt("hasty", "cloud", 1)
	say(nil)
	for _, name := range []string{"holds-1", "holds-2", "holds-3", "patient", "hasty"} {
		c.end(name)
	}
}

// TestCloudThatStartsAtZero: a cloud has no node until a job needs one. The job is admitted to it. If on-prem gets room
// before its node is there, it runs on-prem; otherwise it runs as soon as an autoscaler has made the node.
func TestCloudThatStartsAtZero(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: the export is compared with golden files, and the check played with the real books")
	}
	c := startCluster(t, options{
		nodes:  []node{{"gpu-1", "on-prem", shared}},
		export: []string{"--cloud", "cloud/NVIDIA-A100-SXM4-80GB/shared=158GiB", "--checks"},
	})
	for i := range 2 {
		c.send(job{name: fmt.Sprint("fills-", i), asks: map[string]int{memory: 60}})
		c.awaitAt(fmt.Sprint("fills-", i), "on-prem", 1)
	}
	for _, name := range []string{"first", "second"} {
		c.send(job{name: name, asks: map[string]int{memory: 60}})
		c.awaitSays(t, name, "Admitted=True")
		if w, err := c.workload(name); err != nil || w.Status.Admission == nil ||
			!strings.HasPrefix(w.Status.Admission.PodSetAssignments[0].Flavors[memory], "cloud") {
			t.Fatalf("%s is not in the cloud: %v; %s", name, err, c.says(name))
		}
	}
	c.end("fills-0")
	c.awaitAt("first", "on-prem", 1)
	if nodes, err := c.running("second"); err != nil || len(nodes) > 0 {
		t.Errorf("the second one runs on %v: %v", nodes, err)
	}
	c.startNode(node{"cloud-1", "cloud", shared})
	c.awaitAt("second", "cloud", 1)
	// One that has begun there stays.
	c.end("first")
	c.send(job{name: "third", asks: map[string]int{memory: 60}})
	c.awaitAt("third", "on-prem", 1)
	c.awaitAt("second", "cloud", 1)
	c.noneRefused()
}

// TestSpotNodesAreTaken: the cloud's nodes go away while a job runs there, first without notice and then with the taint
// of a notice. It begins again on the next node of the cloud, and on-prem if that has room.
func TestSpotNodesAreTaken(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: the tests of internal/kueue play the same with the real books")
	}
	c := startCluster(t, options{nodes: twoSites, export: []string{"--cloud", "cloud=158GiB", "--checks"}})
	// Eviction needs an index of the cache of pods that the controller of DaemonSets makes (1.36).
	c.Controllers(t, "taint-eviction-controller,pod-garbage-collector-controller,daemonset-controller")
	const pods = "batch.kubernetes.io/job-name=goes"
	for i := range 2 {
		c.send(job{name: fmt.Sprint("fills-", i), asks: map[string]int{memory: 60}})
		c.awaitAt(fmt.Sprint("fills-", i), "on-prem", 1)
	}
	c.send(job{name: "goes", asks: map[string]int{memory: 60}})
	c.awaitAt("goes", "cloud", 1)
	if err := c.Do(t, nil, http.MethodDelete, "/api/v1/nodes/cloud-1", plane.JSON, object{}, nil); err != nil {
		t.Fatal(err)
	}
	c.awaitNoNode(pods, 1)
	c.startNode(node{"cloud-2", "cloud", shared})
	c.awaitAt("goes", "cloud", 1)
	before := c.podsOf(pods)
	c.end("fills-0")
	c.send(job{name: "small", asks: map[string]int{memory: 10}})
	c.awaitAt("small", "on-prem", 1) // the placer knows that there is room
	c.still(t, before)
	taint := object{"key": "cloud.example.com/interrupted", "effect": "NoExecute"}
	c.patch("/api/v1/nodes/cloud-2", object{"spec": object{"taints": []object{taint}}})
	c.awaitAt("goes", "on-prem", 1)
	c.noneRefused()
}
