// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"example.com/gpu-agent/internal/fleet"
	"example.com/gpu-agent/internal/kueue"
	"example.com/gpu-agent/tests/lab"
)

// pace is how long others take in virtual time.
type pace struct {
	// writes is how long a write to the API server takes, and reacts how long a controller takes until it has
	// heard of something and acted.
	writes, reacts time.Duration
	// starts is how long a pod takes from its node until its container runs, and ends from its end until the
	// API server says so.
	starts, ends time.Duration
}

// way is how Jobs come to their sites in virtual time.
type way struct {
	pace
	// patience is how long a Job is to wait for room on-prem before the cloud is paid, and says whether Jobs say
	// how long they run. Both are told in annotations.
	patience time.Duration
	says     bool
	// luck is how events fall.
	luck uint64
}

// quiet is the pace of a machine with little else to do, as real nodes had it.
var quiet = pace{
	writes: 10 * time.Millisecond, reacts: 50 * time.Millisecond,
	starts: 2 * time.Second, ends: 2 * time.Second,
}

// world is both sites in virtual time. The placer is the product: its door to Kueue with its loop and its checks, and
// the books with all that they are told of nodes and pods. Kueue, the scheduler, the kubelets and the agents are
// models.
type world struct {
	t *testing.T
	way
	fleet *fleet.Fleet
	door  *kueue.Door

	mu     sync.Mutex // guards what follows
	random *rand.Rand
	step   time.Duration
	hosts  [2]*host
	tasks  []*task // by their Jobs' order
	queue  queue
	o      *observer
	pods   int
}

// task is a Job with its workload, as the API server has them.
type task struct {
	*History
	workloadObject
	w *world
	// created, version and checks are the workload's; version is 0 while there is none.
	created time.Time
	version int
	checks  []kueue.CheckState
	// pod is the present one, nil for none, and p what the record says of it. worked is how far the Job is.
	pod    *corev1.Pod
	p      int
	worked time.Duration
	// past is how long the workload was admitted before it was evicted, in seconds.
	past int
	// reacts says that Kueue is about to look at the workload.
	reacts bool
}

// after does something after a time that is up to half as long or as long again as d, under the lock, so that events
// come in one order and in another. No two things are done at one moment, and a run is always the same.
func (w *world) after(d time.Duration, do func()) { w.exactly(w.about(d), do) }

// exactly does something after just so long.
func (w *world) exactly(d time.Duration, do func()) {
	w.step++
	time.AfterFunc(d+w.step%time.Microsecond, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		do()
	})
}

// about is a time between half of d and d and a half.
func (w *world) about(d time.Duration) time.Duration {
	return (d/2 + time.Duration(w.random.Int64N(int64(d)+1))).Truncate(time.Microsecond)
}

func (w *world) now() time.Duration { return time.Since(w.o.began) }

// run has Jobs come, takes a sample as often as it is told to, and returns the record once all have succeeded.
func (y way) run(t *testing.T, jobs []Job, every, longest time.Duration) (r *Record) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		f := fleet.New(lab.Domain, time.Now)
		holder := fleet.HoldFor(f, kueue.HoldOf(lab.Domain))
		w := &world{t: t, way: y, fleet: f, hosts: newHosts(t), random: rand.New(rand.NewPCG(y.luck, 0))}
		w.queue.w, w.o = w, (&Cluster{}).observe(time.Now().Add(-time.Second), jobs)
		w.door = kueue.New(holder, kueue.Options{API: w, Domain: lab.Domain, Leads: holder.Ready, Listed: holder.Listed,
			Logger: slog.New(slog.DiscardHandler), Now: time.Now})
		for _, h := range w.hosts {
			f.SetNode(h.node())
			w.publish(h, h.Write())
		}
		for _, k := range []fleet.Kind{fleet.Nodes, fleet.Pods, fleet.GPUNodes} {
			f.Listed(k)
		}
		w.objects()
		ctx, cancel := context.WithCancel(t.Context())
		var runs sync.WaitGroup
		runs.Go(func() { _ = w.door.Run(ctx) })
		w.mu.Lock()
		for i, h := range w.o.Jobs {
			k := &task{History: h, w: w}
			w.tasks = append(w.tasks, k)
			w.exactly(h.Arrives, func() { k.comes(i) })
		}
		w.mu.Unlock()
		for done := false; !done && w.o.Ended < longest; {
			time.Sleep(every)
			w.mu.Lock()
			done = w.look()
			w.mu.Unlock()
		}
		cancel()
		runs.Wait()
		r = &w.o.Record
	})
	return r
}

// look takes a sample, and says whether all Jobs have succeeded.
func (w *world) look() (done bool) {
	of := map[*History]*workloadObject{}
	for _, k := range w.tasks {
		if k.Came != 0 {
			of[k.History] = &k.workloadObject
			k.admission(&k.workloadObject, w.o.began, w.now())
		}
	}
	return w.o.sample(w.now(), [2]int{w.hosts[OnPrem].used(), w.hosts[Cloud].used()}, of, w.hosts[OnPrem].holders())
}

// comes makes the Job, and its workload.
func (k *task) comes(i int) {
	k.Came = k.w.now()
	k.w.after(k.w.reacts, func() {
		k.created = time.Now().Truncate(time.Second)
		k.Metadata.UID, k.Metadata.Annotations = fmt.Sprintf("workload-%d", i), map[string]string{}
		k.told()
		k.w.queue.update(k, false)
	})
}

// condition is one of the workload's, and whether it is true.
func (k *task) condition(kind string) (c condition, yes bool) {
	for _, c := range k.Status.Conditions {
		if c.Type == kind {
			return c, c.Status == "True"
		}
	}
	return c, false
}

// set gives the workload a condition.
func (k *task) set(kind string, yes bool, reason string) {
	status := map[bool]string{true: "True", false: "False"}[yes]
	next := condition{kind, status, reason, second().Time}
	for i, c := range k.Status.Conditions {
		if c.Type == kind {
			k.Status.Conditions[i] = next
			return
		}
	}
	k.Status.Conditions = append(k.Status.Conditions, next)
}

// told has the placer hear of a workload, and Kueue look at it.
func (k *task) told() {
	k.version++
	o := k.object()
	k.w.after(k.w.writes, func() { k.w.door.Set(kueue.Workloads, o) })
	if !k.reacts {
		k.reacts = true
		k.w.after(k.w.reacts, func() { k.reacts = false; k.w.queue.reconcile(k) })
	}
}

// object is the workload as the API server has it.
func (k *task) object() *unstructured.Unstructured {
	status := object{"conditions": k.Status.Conditions, "admissionChecks": k.checks,
		"accumulatedPastExecutionTimeSeconds": k.past}
	if k.Status.Admission != nil {
		flavors := k.Status.Admission.PodSetAssignments[0].Flavors
		status["admission"] = object{"podSetAssignments": []object{{"name": "main", "flavors": flavors, "count": 1}}}
	}
	return k.w.object("Workload", object{
		"metadata": object{"name": k.Name, "namespace": Team, "uid": k.Metadata.UID,
			"resourceVersion": fmt.Sprint(k.version), "creationTimestamp": k.created.UTC().Format(time.RFC3339),
			"ownerReferences": []any{object{"apiVersion": "batch/v1", "kind": "Job", "name": "job", "uid": "job"}},
			"annotations":     k.Metadata.Annotations},
		"spec":   object{"podSets": []object{{"name": "main", "count": 1, "template": k.template()}}},
		"status": status,
	})
}

// object is one of Kueue's as a client reads it.
func (w *world) object(kind string, has object) *unstructured.Unstructured {
	has["apiVersion"], has["kind"] = "kueue.x-k8s.io/v1beta2", kind
	text, err := json.Marshal(has)
	o := &unstructured.Unstructured{}
	if err == nil {
		err = o.UnmarshalJSON(text)
	}
	if err != nil {
		w.t.Error(err)
	}
	return o
}

// template is what the Job's pods are made from.
func (k *task) template() object {
	labels := object{"batch.kubernetes.io/job-name": k.Name}
	if k.Checkpoints {
		labels[lab.Domain+"/gpu.checkpoints"] = "true"
	}
	limits := object{lab.Domain + "/" + k.Resource: fmt.Sprint(k.Count)}
	annotations := object{}
	if k.w.says {
		annotations[lab.Domain+"/gpu.runs-for"] = k.Runs.String()
	}
	return object{"metadata": object{"labels": labels, "annotations": annotations},
		"spec": object{"containers": []object{{"name": "main", "resources": object{"limits": limits}}}}}
}

// start makes a pod of the template, and of what the check says.
func (k *task) start() {
	w := k.w
	w.pods++
	pod := &corev1.Pod{}
	text, err := json.Marshal(k.template())
	if err == nil {
		err = json.Unmarshal(text, pod)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	pod.Namespace, pod.Name = Team, fmt.Sprintf("%s-%d", k.Name, w.pods)
	pod.UID = types.UID(pod.Name)
	for _, s := range k.checks {
		for _, u := range s.PodSetUpdates {
			pod.Annotations = u.Annotations
		}
	}
	site := k.site()
	k.pod, k.p = pod, len(k.Pods)
	k.Pods = append(k.Pods, Pod{UID: string(pod.UID), Site: site})
	w.fleet.SetPod(pod.DeepCopy())
	w.after(w.reacts, func() { k.schedule(pod, w.hosts[site]) })
}

// schedule asks the placer for a node, as the scheduler does, until there is one.
func (k *task) schedule(pod *corev1.Pod, h *host) {
	w := k.w
	if k.pod != pod {
		return
	}
	at, _, err := w.fleet.Place(w.t.Context(), string(pod.UID), []string{h.Name})
	if err != nil {
		w.t.Error(err)
	}
	if at == "" {
		w.after(time.Second, func() { k.schedule(pod, h) })
		return
	}
	pod.Spec.NodeName = at
	w.fleet.SetPod(pod.DeepCopy())
	w.after(w.starts, func() { k.runs(pod, h) })
}

// runs is what the kubelet does with a pod.
func (k *task) runs(pod *corev1.Pod, h *host) {
	w := k.w
	if k.pod != pod {
		return
	}
	p := &k.Pods[k.p]
	ids, err := h.Admit(k.Name, lab.Domain+"/"+k.Resource, k.Count)
	if err != nil {
		p.Refused = "UnexpectedAdmissionError"
		w.t.Errorf("%s refuses %s: %v", h.Name, pod.Name, err)
		return
	}
	has := corev1.ResourceStatus{Name: corev1.ResourceName(lab.Domain + "/" + k.Resource)}
	for _, id := range ids {
		has.Resources = append(has.Resources, corev1.ResourceHealth{ResourceID: corev1.ResourceID(id)})
	}
	pod.Status.Phase = corev1.PodRunning
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{{AllocatedResourcesStatus: []corev1.ResourceStatus{has}}}
	w.fleet.SetPod(pod.DeepCopy())
	w.changed(h)
	p.From = w.now()
	w.exactly(k.Runs-k.worked, func() {
		if k.pod == pod && p.Until == 0 {
			p.Until = w.now()
			w.after(w.ends, func() { k.succeeds(pod, h) })
		}
	})
}

func (k *task) succeeds(pod *corev1.Pod, h *host) {
	w := k.w
	k.Pods[k.p].Succeeded = true
	pod.Status.Phase = corev1.PodSucceeded
	w.fleet.SetPod(pod.DeepCopy())
	h.End(k.Name)
	w.changed(h)
	w.after(w.reacts, func() {
		k.Done = w.now()
		k.set("Finished", true, "Succeeded")
		k.told()
		w.queue.release(k)
	})
}

// stop ends the pod, and then does something.
func (k *task) stop(then func()) {
	w, pod := k.w, k.pod
	k.pod = nil
	if pod == nil || k.Pods[k.p].Succeeded {
		w.after(w.reacts, then)
		return
	}
	h := w.hosts[k.Pods[k.p].Site]
	w.after(w.ends, func() {
		if p := &k.Pods[k.p]; p.From != 0 && p.Until == 0 {
			p.Until = w.now()
			if k.Checkpoints {
				k.worked += (p.Until - p.From).Truncate(time.Second)
			}
		}
		w.fleet.DeletePod(string(pod.UID))
		h.End(k.Name)
		w.changed(h)
		w.after(w.reacts, then)
	})
}

// objects tells the placer of checks and flavors.
func (w *world) objects() {
	for site, name := range Sites {
		check := object{"metadata": object{"name": checkOf[site], "uid": "check-" + name, "resourceVersion": "1"},
			"spec": object{"controllerName": lab.Domain + "/" + checkOf[site]}}
		flavor := object{"metadata": object{"name": flavorOf[site], "uid": "flavor-" + name, "resourceVersion": "1",
			"labels": object{lab.Domain + "/gpu.cloud": fmt.Sprint(Site(site) == Cloud)}, "annotations": object{}},
			"spec": object{"nodeLabels": object{lab.Domain + "/gpu.site": name}}}
		if Site(site) == Cloud {
			flavor["metadata"].(object)["annotations"].(object)[lab.Domain+"/gpu.patience"] = w.patience.String()
		}
		w.door.Set(kueue.AdmissionChecks, w.object("AdmissionCheck", check))
		w.door.Set(kueue.ResourceFlavors, w.object("ResourceFlavor", flavor))
	}
	for _, of := range []schema.GroupVersionResource{kueue.AdmissionChecks, kueue.ResourceFlavors, kueue.Workloads} {
		w.door.Listed(of)
	}
}

// find is the task of a workload, if it is in that version.
func (w *world) find(o *unstructured.Unstructured) *task {
	for _, k := range w.tasks {
		if k.Metadata.UID == string(o.GetUID()) && fmt.Sprint(k.version) == o.GetResourceVersion() {
			return k
		}
	}
	return nil
}

// Read, WriteStatus and Annotate are the API server, for the placer.
func (w *world) Read(_ context.Context, of schema.GroupVersionResource, see func(*unstructured.Unstructured)) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, k := range w.tasks {
		if of == kueue.Workloads && k.version > 0 {
			see(k.object())
		}
	}
	return nil
}

func (w *world) WriteStatus(
	_ context.Context, of schema.GroupVersionResource, o *unstructured.Unstructured,
) (now *unstructured.Unstructured, changed bool, err error) {
	w.write()
	defer w.mu.Unlock()
	if of != kueue.Workloads {
		return o, false, nil
	}
	k := w.find(o)
	if k == nil {
		return nil, true, nil
	}
	var is struct {
		Status struct {
			Conditions      []condition
			AdmissionChecks []kueue.CheckState
		}
	}
	text, err := o.MarshalJSON()
	if err == nil {
		err = json.Unmarshal(text, &is)
	}
	if err != nil {
		return nil, false, err
	}
	woken := false
	for _, c := range is.Status.Conditions {
		was, _ := k.condition(c.Type)
		same := was.Reason == c.Reason && was.LastTransitionTime.Equal(c.LastTransitionTime)
		if c.Type == "Requeued" && !same {
			k.set(c.Type, c.Status == "True", c.Reason)
			woken = true
		}
	}
	k.checks = is.Status.AdmissionChecks
	if k.told(); woken {
		w.after(w.reacts, func() { w.queue.update(k, true) })
	}
	return k.object(), false, nil
}

func (w *world) Annotate(
	_ context.Context, _ schema.GroupVersionResource, o *unstructured.Unstructured, annotations map[string]*string,
) (now *unstructured.Unstructured, changed bool, err error) {
	w.write()
	defer w.mu.Unlock()
	k := w.find(o)
	if k == nil {
		return nil, true, nil
	}
	for name, value := range annotations {
		if delete(k.Metadata.Annotations, name); value != nil {
			k.Metadata.Annotations[name] = *value
		}
	}
	k.told()
	return k.object(), false, nil
}

// write takes as long as a write does, and then the lock.
func (w *world) write() {
	w.mu.Lock()
	d := w.about(w.writes)
	w.mu.Unlock()
	time.Sleep(d)
	w.mu.Lock()
}

var _ kueue.API = (*world)(nil)
