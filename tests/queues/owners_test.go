// SPDX-License-Identifier: Apache-2.0

package queues

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"example.com/gpu-agent/tests/plane"
)

const (
	rayJobs      = "/apis/ray.io/v1/namespaces/" + team + "/rayjobs"
	rayClusters  = "/apis/ray.io/v1/namespaces/" + team + "/rayclusters"
	jobSets      = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/" + team + "/jobsets"
	deployments  = "/apis/apps/v1/namespaces/" + team + "/deployments"
	statefulSets = "/apis/apps/v1/namespaces/" + team + "/statefulsets"
)

// queued are the labels of what goes through the team's queue.
var queued = object{"kueue.x-k8s.io/queue-name": "gpus"}

// TestOwners has work go through Kueue that is no Job, beside Jobs. Each story begins with nothing on two nodes on-prem
// and one in the cloud, which has half the room of its quota, and leaves nothing. It is watched meanwhile (fair).
func TestOwners(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: the tests of internal/kueue play the same with the real books")
	}
	for _, program := range []string{"kuberay", "jobset"} {
		plane.Program(t, program)
	}
	c := startCluster(t, options{
		nodes:  []node{{"gpu-1", "on-prem", shared}, {"gpu-2", "on-prem", shared}, {"cloud-1", "cloud", shared}},
		export: []string{"--cloud", "cloud=316GiB", "--checks"}, others: []string{"lender"},
	})
	c.Controllers(t, "deployment-controller,replicaset-controller,statefulset-controller,garbage-collector-controller")
	c.KubeRay(t)
	c.JobSet(t)
	for _, story := range []struct {
		name string
		tell func(t *testing.T)
	}{
		{"a RayJob", c.ray},
		{"a RayCluster", c.rayCluster},
		{"a JobSet", c.set},
		{"a Deployment", c.deployment},
		{"a StatefulSet", c.stateful},
		{"a pod of its own", c.alone},
		{"a group of pods", c.group},
		{"an elastic job in the cloud", c.growsFar},
		{"room without quota", c.poor},
		{"pods on both sites", c.both},
		{"two cohorts, and pods without Kueue", c.cohorts},
	} {
		t.Run(story.name, func(t *testing.T) {
			c.awaitIdle(t)
			c.fair(t)
			story.tell(t)
			c.noneRefused()
		})
	}
}

// main is a container that asks for GPU memory.
func main(units int) object {
	requests := object{"cpu": "100m"}
	if units > 0 {
		requests[memory] = fmt.Sprint(units)
	}
	return object{"name": "main", "image": "none", "resources": object{"requests": requests, "limits": requests}}
}

// podOf is a pod's spec.
func podOf(units int) object {
	return object{"terminationGracePeriodSeconds": 1, "containers": []object{main(units)}}
}

// occupy has Jobs take whole GPUs, on-prem first, and returns what ends the one of a number.
func (c *cluster) occupy(onPrem, cloud int) (end func(i int)) {
	c.t.Helper()
	name := func(i int) string { return fmt.Sprint("occupies-", i) }
	for i := range onPrem + cloud {
		j := job{name: name(i), asks: map[string]int{memory: 70}, selector: map[string]string{site: "on-prem"}}
		if i >= onPrem {
			j.selector = map[string]string{site: "cloud"}
		}
		c.send(j)
		c.awaitAt(j.name, j.selector[site], 1)
	}
	return func(i int) {
		c.t.Helper()
		c.end(name(i))
		c.drop(jobs+"/"+name(i), "batch.kubernetes.io/job-name="+name(i))
	}
}

// drop deletes an object, and waits until its pods are gone, which a selector chooses.
func (c *cluster) drop(path, selector string) {
	c.t.Helper()
	with := object{"propagationPolicy": "Background"}
	if err := c.Do(c.t, nil, http.MethodDelete, path, plane.JSON, with, nil); err != nil {
		c.t.Fatal(err)
	}
	c.awaitPods(selector, nil)
}

// awaitNoNode waits until so many pods are to go to the cloud, by their node selector, and have no node.
func (c *cluster) awaitNoNode(selector string, n int) {
	c.t.Helper()
	c.Await(c.t, fmt.Sprintf("%d of %s wait for a node of the cloud", n, selector), func() error {
		waiting, says := 0, ""
		for _, p := range c.podsOf(selector) {
			if p.Spec.NodeName == "" && len(p.Spec.SchedulingGates) == 0 && p.Spec.NodeSelector[site] == "cloud" {
				waiting++
			}
			says += fmt.Sprintf("\n%s on %q, %v", p.Name, p.Spec.NodeName, p.Spec.NodeSelector)
		}
		if waiting != n {
			return fmt.Errorf("%d do:%s\n%s", waiting, says, c.allSay())
		}
		return nil
	})
}

// raySpec is a Ray cluster with a head, and so many workers that ask for so many units each.
func raySpec(labels object, workers, units int) object {
	template := func(units int) object {
		return object{"metadata": object{"labels": labels}, "spec": podOf(units)}
	}
	head := object{"rayStartParams": object{}, "template": template(0)}
	group := object{"rayStartParams": object{}, "template": template(units), "groupName": "shares",
		"replicas": workers, "minReplicas": workers, "maxReplicas": workers}
	return object{"rayVersion": "2.46.0", "headGroupSpec": head, "workerGroupSpecs": []object{group}}
}

// rayJob makes a RayJob with a cluster of its own.
func (c *cluster) rayJob(name string, labels object, workers, units int) {
	c.t.Helper()
	submitter := object{"metadata": object{"labels": labels}, "spec": podOf(0)}
	submitter["spec"].(object)["restartPolicy"] = "Never"
	c.post(rayJobs, object{
		"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": object{"name": name, "labels": queued},
		"spec": object{"suspend": true, "shutdownAfterJobFinishes": true, "entrypoint": "true",
			"submitterPodTemplate": submitter, "rayClusterSpec": raySpec(labels, workers, units)}})
}

// shares selects the workers of a Ray cluster.
const shares = ",ray.io/group=shares"

// ray: a RayJob is on-prem or in the cloud with all of its workers. Its head has begun before its workers have nodes,
// so it comes back by the label that all its pods checkpoint.
func (c *cluster) ray(*testing.T) {
	post := func(name string, labels object) (selector string) {
		c.rayJob(name, labels, 2, 50)
		return "ray.io/cluster=" + c.clusterOf(name)
	}
	end := c.occupy(3, 0)
	far := post("far", nil)
	c.awaitPods(far+shares, map[string]int{"cloud": 2})
	moves := post("moves", object{"example.com/gpu.checkpoints": "true"})
	c.awaitNoNode(moves+shares, 2)
	end(0)
	c.Await(c.t, "it comes back", func() error {
		if n := len(c.podsOf(moves + shares)); n > 0 {
			return fmt.Errorf("%d workers of the cluster in the cloud are left; %s", n, c.allSay())
		}
		return nil
	})
	moves = "ray.io/cluster=" + c.clusterOf("moves")
	c.awaitPods(moves+shares, map[string]int{"on-prem": 2})
	// It has begun, so it stays.
	end(1)
	end(2)
	c.awaitPods(far+shares, map[string]int{"cloud": 2})
	c.drop(rayJobs+"/far", far)
	c.drop(rayJobs+"/moves", moves)
}

// rayCluster: so is a RayCluster, which keeps its name when it comes back.
func (c *cluster) rayCluster(*testing.T) {
	post := func(name string, labels object) (selector string) {
		spec := raySpec(labels, 2, 50)
		spec["suspend"] = true
		c.post(rayClusters, object{"apiVersion": "ray.io/v1", "kind": "RayCluster",
			"metadata": object{"name": name, "labels": queued}, "spec": spec})
		return "ray.io/cluster=" + name
	}
	end := c.occupy(3, 0)
	far := post("far", nil)
	c.awaitPods(far+shares, map[string]int{"cloud": 2})
	moves := post("moves", object{"example.com/gpu.checkpoints": "true"})
	c.awaitNoNode(moves+shares, 2)
	end(0)
	c.awaitPods(moves+shares, map[string]int{"on-prem": 2})
	end(1)
	end(2)
	c.awaitPods(far+shares, map[string]int{"cloud": 2})
	c.drop(rayClusters+"/far", far)
	c.drop(rayClusters+"/moves", moves)
}

// set: so is a JobSet, and one that waits for the cloud comes back as a whole.
func (c *cluster) set(*testing.T) {
	end := c.occupy(3, 0)
	far := c.jobSet("far", replicated("leader", 1, 0), replicated("workers", 2, 50))
	c.awaitPods(far+workers, map[string]int{"cloud": 2})
	waits := c.jobSet("waits", replicated("workers", 2, 50))
	c.awaitNoNode(waits, 2)
	end(0)
	c.awaitPods(waits, map[string]int{"on-prem": 2})
	c.awaitPods(far+workers, map[string]int{"cloud": 2})
	c.drop(jobSets+"/far", far)
	c.drop(jobSets+"/waits", waits)
	end(1)
	end(2)
}

// workers selects those of a JobSet.
const workers = ",jobset.sigs.k8s.io/replicatedjob-name=workers"

// jobSet makes a JobSet of some replicated Jobs, and returns the selector of its pods.
func (c *cluster) jobSet(name string, jobs ...object) (selector string) {
	c.t.Helper()
	c.post(jobSets, object{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet",
		"metadata": object{"name": name, "labels": queued},
		"spec":     object{"suspend": true, "replicatedJobs": jobs}})
	return "jobset.sigs.k8s.io/jobset-name=" + name
}

// replicated is so many Jobs of one pod.
func replicated(name string, n, units int) object {
	spec := object{"parallelism": 1, "completions": 1, "template": object{"spec": podOf(units)}}
	return object{"name": name, "replicas": n, "template": object{"spec": spec}}
}

// both: Kueue gives a JobSet quota on-prem for some of its pods, and in the cloud for the others. Those wait there for
// a node while the others run.
func (c *cluster) both(*testing.T) {
	path := queueing + "/clusterqueues/" + team
	end := c.occupy(0, 2)
	before := c.quotas(path, "research", map[string]string{"on-prem": "60", "cloud": "320"})
	both := c.jobSet("both", replicated("leader", 1, 50), replicated("workers", 1, 50))
	c.awaitPods(both+",jobset.sigs.k8s.io/replicatedjob-name=leader", map[string]int{"on-prem": 1})
	c.awaitNoNode(both+workers, 1)
	end(0)
	c.awaitPods(both+workers, map[string]int{"cloud": 1})
	c.drop(jobSets+"/both", both)
	c.patch(path, object{"spec": before})
	end(1)
}

// deployment: each of its pods is on-prem or in the cloud by itself. One that waits for the cloud is made anew on-prem.
func (c *cluster) deployment(*testing.T) {
	post := func(name string, n int) (selector string) {
		labels := object{"app": name}
		template := object{"metadata": object{"labels": labels}, "spec": podOf(50)}
		c.post(deployments, object{
			"metadata": object{"name": name, "labels": queued},
			"spec":     object{"replicas": n, "selector": object{"matchLabels": labels}, "template": template}})
		return "app=" + name
	}
	end := c.occupy(1, 1)
	serves := post("serves", 4)
	c.awaitPods(serves, map[string]int{"on-prem": 3, "cloud": 1})
	more := post("more", 1)
	c.awaitNoNode(more, 1)
	end(0)
	c.awaitPods(more, map[string]int{"on-prem": 1})
	c.awaitPods(serves, map[string]int{"on-prem": 3, "cloud": 1})
	c.drop(deployments+"/serves", serves)
	c.drop(deployments+"/more", more)
	end(1)
}

// stateful: a StatefulSet's pods are on-prem together, or in the cloud. If they wait for the cloud, they are made anew
// on-prem once all of them have room there.
func (c *cluster) stateful(*testing.T) {
	post := func(name string) (selector string) {
		labels := object{"app": name}
		template := object{"metadata": object{"labels": labels}, "spec": podOf(50)}
		c.post(statefulSets, object{
			"metadata": object{"name": name, "labels": queued},
			"spec": object{"replicas": 2, "serviceName": name, "podManagementPolicy": "Parallel",
				"selector": object{"matchLabels": labels}, "template": template}})
		return "app=" + name
	}
	end := c.occupy(3, 0)
	far := post("far")
	c.awaitPods(far, map[string]int{"cloud": 2})
	waits := post("waits")
	c.awaitNoNode(waits, 2)
	end(0)
	c.awaitPods(waits, map[string]int{"on-prem": 2})
	c.awaitPods(far, map[string]int{"cloud": 2})
	c.drop(statefulSets+"/far", far)
	c.drop(statefulSets+"/waits", waits)
	end(1)
	end(2)
}

// ownPod makes a pod that comes to the queue by itself.
func (c *cluster) ownPod(name string, units int, labels, annotations object) {
	c.t.Helper()
	all := object{"app": "own"}
	for _, some := range []object{queued, labels} {
		for key, value := range some {
			all[key] = value
		}
	}
	about := object{"name": name, "labels": all, "annotations": annotations}
	c.post(podsOfTeam, object{"metadata": about, "spec": podOf(units)})
}

// alone: a pod without a controller, which would make another one, is not ended while it waits for the cloud.
func (c *cluster) alone(t *testing.T) {
	end := c.occupy(4, 2)
	c.ownPod("own", 50, nil, nil)
	c.awaitNoNode("app=own", 1)
	before := c.podsOf("app=own")[0]
	end(0)
	for range 20 {
		time.Sleep(time.Second)
		if now := c.podsOf("app=own"); len(now) != 1 || now[0].UID != before.UID {
			t.Fatalf("it is ended: %v; %s", now, c.allSay())
		}
	}
	end(4)
	c.awaitPods("app=own", map[string]int{"cloud": 1})
	c.deletePods("app=own")
	for _, i := range []int{1, 2, 3, 5} {
		end(i)
	}
}

// group: pods that belong together are on-prem together, or in the cloud.
func (c *cluster) group(*testing.T) {
	post := func(name string) {
		for i := range 2 {
			c.ownPod(fmt.Sprint(name, "-", i), 50, object{"kueue.x-k8s.io/pod-group-name": name, "group": name},
				object{"kueue.x-k8s.io/pod-group-total-count": "2"})
		}
	}
	end := c.occupy(3, 0)
	post("far")
	c.awaitPods("group=far", map[string]int{"cloud": 2})
	end(0)
	post("near")
	c.awaitPods("group=near", map[string]int{"on-prem": 2})
	c.deletePods("app=own")
	end(1)
	end(2)
}

// growsFar: an elastic job that runs in the cloud grows there, also while on-prem has room.
func (c *cluster) growsFar(t *testing.T) {
	end := c.occupy(4, 0)
	c.elastic("far", 1, 50)
	c.awaitAt("far", "cloud", 1)
	before := c.podsOf("batch.kubernetes.io/job-name=far")
	end(0)
	end(1)
	c.patch(jobs+"/far", object{"spec": object{"parallelism": 2}})
	c.awaitAt("far", "cloud", 2)
	c.still(t, before)
	c.drop(jobs+"/far", "batch.kubernetes.io/job-name=far")
	end(2)
	end(3)
}

// poor: a job that checkpoints goes to the cloud since its queue has no quota on-prem. It is not ended for the room
// there.
func (c *cluster) poor(t *testing.T) {
	path := queueing + "/clusterqueues/" + team
	before := c.quotas(path, "research", map[string]string{"on-prem": "10", "cloud": "320"})
	label := map[string]string{"example.com/gpu.checkpoints": "true"}
	c.send(job{name: "poor", asks: map[string]int{memory: 50}, podLabels: label})
	c.awaitAt("poor", "cloud", 1)
	c.awaitSays(t, "poor", "on-prem, there is room and no quota")
	pods := c.podsOf("batch.kubernetes.io/job-name=poor")
	for range 30 {
		time.Sleep(time.Second)
		if c.still(t, pods); t.Failed() {
			t.Fatal(c.says("poor"))
		}
	}
	c.end("poor")
	c.patch(path, object{"spec": before})
}

// quotas puts a queue into a cohort, with the same quota of each resource by site, and returns what it had.
func (c *cluster) quotas(path, cohort string, of map[string]string) (before object) {
	c.t.Helper()
	var queue struct {
		Spec struct {
			CohortName        string           `json:"cohortName"`
			NamespaceSelector object           `json:"namespaceSelector"`
			ResourceGroups    []map[string]any `json:"resourceGroups"`
		}
	}
	if err := c.get(path, &queue); err != nil {
		c.t.Fatal(err)
	}
	was := queue.Spec
	before = object{"cohortName": was.CohortName, "namespaceSelector": was.NamespaceSelector}
	before["resourceGroups"] = was.ResourceGroups
	var groups []object
	for _, g := range was.ResourceGroups {
		var flavors []object
		for _, f := range g["flavors"].([]any) {
			name := f.(object)["name"].(string)
			at := "on-prem"
			if strings.HasPrefix(name, "cloud") {
				at = "cloud"
			}
			var resources []object
			for _, r := range f.(object)["resources"].([]any) {
				one := object{"name": r.(object)["name"], "nominalQuota": of[at]}
				if one["name"] == "example.com/gpu-memory" {
					one["nominalQuota"] = of[at] + "Gi"
				}
				resources = append(resources, one)
			}
			flavors = append(flavors, object{"name": name, "resources": resources})
		}
		groups = append(groups, object{"coveredResources": g["coveredResources"], "flavors": flavors})
	}
	all := object{"matchLabels": nil}
	c.patch(path, object{"spec": object{"cohortName": cohort, "resourceGroups": groups, "namespaceSelector": all}})
	return before
}

// cohorts: two cohorts have quota for all of on-prem each, and pods come without Kueue. None is refused, and none is in
// the cloud for which on-prem has room.
func (c *cluster) cohorts(t *testing.T) {
	for name, cohort := range map[string]string{team: "gpus", "lender": "second"} {
		c.quotas(queueing+"/clusterqueues/"+name, cohort, map[string]string{"on-prem": "320", "cloud": "320"})
	}
	c.post(queueing+"/namespaces/"+team+"/localqueues", object{
		"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue", "metadata": object{"name": "second"},
		"spec": object{"clusterQueue": "lender"}})
	plain := func(name string) { // without Kueue, and by a scheduler that asks the placer
		spec := podOf(60)
		spec["nodeSelector"] = object{site: "on-prem"}
		c.post(podsOfTeam, object{"metadata": object{"name": name, "labels": object{"app": name}}, "spec": spec})
		c.awaitPods("app="+name, map[string]int{"on-prem": 1})
	}
	send := func(name, queue string) {
		labels := map[string]string{"kueue.x-k8s.io/queue-name": queue}
		c.send(job{name: name, asks: map[string]int{memory: 50}, labels: labels})
	}
	plain("plain-0")
	send("a-0", "gpus")
	send("b-0", "second")
	c.awaitAt("a-0", "on-prem", 1)
	c.awaitAt("b-0", "on-prem", 1)
	plain("plain-1")
	send("a-1", "gpus")
	send("b-1", "second")
	c.awaitAt("a-1", "cloud", 1)
	c.awaitAt("b-1", "cloud", 1)
	send("b-2", "second") // the cloud is full, too
	c.awaitNoNode("batch.kubernetes.io/job-name=b-2", 1)
	c.deletePods("app=plain-0")
	c.awaitAt("b-2", "on-prem", 1)
	c.end("a-0")
	send("a-2", "gpus")
	c.awaitAt("a-2", "on-prem", 1)
	c.deletePods("app=plain-1")
	for _, name := range []string{"a-1", "b-0", "b-1", "b-2", "a-2"} {
		c.end(name)
	}
}

// fair watches until the test ends whether what was admitted runs, and whether a workload waits for the cloud while
// on-prem has room.
func (c *cluster) fair(t *testing.T) {
	const (
		// runs is how long a pod of an admitted workload may have no node while there is room for it. waits is how long
		// a workload may be in the cloud without a node while on-prem has room: ten seconds by the check, and the time
		// that agents, Kueue and the placer take.
		runs  = time.Minute
		waits = 40 * time.Second
	)
	done, over := make(chan struct{}), make(chan struct{})
	since, watched := map[string]time.Time{}, false
	long := func(what string, is bool, most time.Duration) bool {
		if !is {
			delete(since, what)
			return false
		}
		if since[what].IsZero() {
			since[what] = time.Now()
		}
		if time.Since(since[what]) < most {
			return false
		}
		since[what] = time.Now() // said once in a while
		return true
	}
	look := func() error {
		var pods core.PodList
		free := map[string][]int{}
		err := c.get(podsOfTeam, &pods)
		for _, name := range append([]string{"cloud-1"}, onPrem...) {
			var g struct {
				Status struct{ GPUs []struct{ Free int } }
			}
			err = errors.Join(err, c.get("/apis/example.com/v1alpha1/gpunodes/"+name, &g))
			for _, gpu := range g.Status.GPUs {
				free[c.sites[name]] = append(free[c.sites[name]], gpu.Free)
			}
		}
		if err != nil {
			return err
		}
		waiting := map[string][]int{} // what the pods of a workload in the cloud ask for
		placed := map[string]bool{}
		for i := range pods.Items {
			p := &pods.Items[i]
			key := p.Annotations["kueue.x-k8s.io/workload"]
			watched = watched || key != ""
			quantity := p.Spec.Containers[0].Resources.Requests[memory]
			units := int(quantity.Value())
			gated := p.DeletionTimestamp != nil || len(p.Spec.SchedulingGates) > 0
			open := !gated && p.Status.Phase == core.PodPending && key != ""
			at := p.Spec.NodeSelector[site]
			if long("pod "+string(p.UID), open && units > 0 && fits(free[at], units), runs) {
				const says = "%s was admitted and does not run, and %s has %v: %v"
				t.Errorf(says, p.Name, at, free[at], p.Status.Conditions)
			}
			again := meta.GetControllerOf(p) != nil
			if placed[key] = placed[key] || p.Spec.NodeName != "" || !again; open && at == "cloud" {
				waiting[key] = append(waiting[key], units)
			}
		}
		for what := range since { // a workload that has gone elsewhere begins anew
			if waiting[what] == nil && !strings.HasPrefix(what, "pod ") {
				delete(since, what)
			}
		}
		for key, units := range waiting {
			if long(key, !placed[key] && fits(free["on-prem"], units...), waits) {
				t.Errorf("%s waits for the cloud, and on-prem has %v: %s", key, free["on-prem"], c.allSay())
			}
		}
		return nil
	}
	go func() {
		defer close(over)
		for {
			if err := look(); err != nil && c.t.Context().Err() == nil {
				t.Errorf("cannot look: %v", err)
			}
			select {
			case <-done:
				return
			case <-time.After(time.Second):
			}
		}
	}()
	t.Cleanup(func() {
		close(done)
		if <-over; !watched {
			t.Error("no pod says of which workload it is, so nothing was watched")
		}
	})
}

// fits reports whether GPUs have room for pods that ask for so many units each, one after the other.
func fits(free []int, units ...int) bool {
	left := slices.Clone(free)
	for _, n := range units {
		best := -1
		for i, f := range left {
			if f >= n && (best < 0 || f < left[best]) {
				best = i
			}
		}
		if best < 0 {
			return false
		}
		left[best] -= n
	}
	return true
}
