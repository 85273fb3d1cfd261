// SPDX-License-Identifier: Apache-2.0

package queues

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"example.com/gpu-agent/tests/fakes"
	"example.com/gpu-agent/tests/hollow"
	"example.com/gpu-agent/tests/lab"
	"example.com/gpu-agent/tests/plane"
)

const (
	model = "A100-SXM4-80GB"
	// team is a namespace, and its queue.
	team = "research"

	memory = "example.com/gpu-mem"
	site   = "example.com/gpu.site"

	queueing = "/apis/kueue.x-k8s.io/v1beta2"
	jobs     = "/apis/batch/v1/namespaces/" + team + "/jobs"
)

type object = map[string]any

// node is one with two GPUs, at a site, laid out as its entries say.
type node struct {
	name, site string
	entries    []string
}

// options say what a cluster is.
type options struct {
	nodes []node
	// export are flags of `gpu-agent export kueue` beside --kubeconfig and --team.
	export []string
	// may is what the team may do beside, as in the flag --team.
	may string
	// others are teams beside it, which have the same.
	others []string
	gates  map[string]bool
	// quotas, if it is set, changes the exported objects before they are applied.
	quotas func(text string) string
}

// cluster is a control plane with Kueue, the placer and hollow nodes, whose kubelets are played
// beside the caller.
type cluster struct {
	*plane.Server
	t                         *testing.T
	root, program, kubeconfig string
	placer                    *plane.Placer
	nodes                     map[string]*hollow.Node
	sites                     map[string]string // of nodes
	work                      sync.WaitGroup
	// every does something again and again until the test ends.
	every func(pause time.Duration, do func())
	// slow is for how many nanoseconds a deleted pod goes on.
	slow atomic.Int64

	mu      sync.Mutex      // guards writes of nodes and sites, too, which the test's own goroutine makes
	pods    map[string]*pod // guarded by mu; by UID
	refused []string        // guarded by mu; by nodes
}

// pod is one that a kubelet has.
type pod struct {
	fakes.Pod
	node   *hollow.Node
	ending bool
}

func startCluster(t *testing.T, o options) *cluster {
	t.Helper()
	if missing := lab.Missing(); missing != "" {
		t.Skipf("skipped: this needs %s", missing)
	}
	plane.Program(t, "kueue")
	kit, err := lab.NewKit(nil)
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{Server: plane.Start(t), t: t, root: kit.Root, program: plane.Program(t, "gpu-agent"), nodes: map[string]*hollow.Node{}, sites: map[string]string{}, pods: map[string]*pod{}}
	c.SchedulerAs = object{"as": "system:kube-scheduler", "as-groups": []string{"system:authenticated"}}
	c.kubeconfig = c.Kubeconfig(t, nil)
	c.apply(c.read("deployments/base/crd.yaml"))
	c.Await(t, "GPUNodes are served", func() error { return c.get("/apis/example.com/v1alpha1/gpunodes", nil) })
	for _, name := range append([]string{team}, o.others...) {
		c.namespace(name)
		o.export = append(o.export, "--team", name+o.may)
	}
	c.Controllers(t, "job-controller")
	c.play()
	for _, n := range o.nodes {
		c.startNode(n)
	}
	for _, n := range o.nodes {
		c.Await(t, n.name+" offers its GPUs", func() error { return c.offers(n.name) })
	}
	o.export = append([]string{"--kubeconfig", c.kubeconfig}, o.export...)
	c.Kueue(t, c.export(append(o.export, "--configuration")), o.gates)
	c.startPlacer()
	objects := string(c.export(o.export))
	if o.quotas != nil {
		objects = o.quotas(objects)
	}
	c.apply([]byte(objects))
	return c
}

// startNode starts a node, with the agent on it.
func (c *cluster) startNode(n node) {
	c.t.Helper()
	made := hollow.Start(c.t, c.Server, hollow.Options{Name: n.name, Model: model, GPUs: 2, Entries: n.entries, Agent: c.program, Kubelet: "v1.36.3", Args: []string{"--node-labels", "api"}})
	// The taint is there until a controller, which does not run here, finds the node ready.
	c.patch("/api/v1/nodes/"+n.name, object{"metadata": object{"labels": object{site: n.site, core.LabelHostname: n.name}}, "spec": object{"taints": nil}})
	c.mu.Lock()
	defer c.mu.Unlock()
	c.nodes[n.name], c.sites[n.name] = made, n.site
	c.every(time.Second, func() { made.Sync(c.t) }) // a kubelet says it again, too
}

// namespace makes one, with the account that its controller would make.
func (c *cluster) namespace(name string) {
	c.t.Helper()
	c.post("/api/v1/namespaces", object{"metadata": object{"name": name}})
	c.post("/api/v1/namespaces/"+name+"/serviceaccounts", object{"metadata": object{"name": "default"}})
}

// offers says what keeps a node from being exported as it will be.
func (c *cluster) offers(name string) error {
	var n core.Node
	if err := c.get("/api/v1/nodes/"+name, &n); err != nil {
		return err
	}
	var g struct{ Status struct{ GPUs []object } }
	if err := c.get("/apis/example.com/v1alpha1/gpunodes/"+name, &g); err != nil {
		return err
	}
	if n.Labels["example.com/gpu.mode"] == "" || len(g.Status.GPUs) != 2 {
		return fmt.Errorf("it has the labels %v, and %d GPUs", n.Labels, len(g.Status.GPUs))
	}
	offered := c.nodes[name].Offered()
	for resource, n := range offered {
		if is := n; is == 0 {
			return fmt.Errorf("it offers no %s", resource)
		}
	}
	if len(offered) == 0 {
		return errors.New("it offers nothing")
	}
	return nil
}

// startPlacer starts the placer with the rights that are shipped, and the scheduler, which asks
// it.
func (c *cluster) startPlacer() {
	c.t.Helper()
	c.install("resources: [%[1]s/deployments/placer]\ncomponents: [%[1]s/deployments/placer/kueue]\n")
	c.placer = c.placerAt(plane.FreeAddress(c.t))
	c.SchedulerAsking(c.t, filepath.Join(c.root, "deployments/placer/scheduler-config.yaml"), c.placer.Door, 300)
}

// install applies what a kustomization makes of the manifests; its %[1]s is the way to the checkout.
func (c *cluster) install(kustomization string) {
	c.t.Helper()
	dir := c.t.TempDir()
	up, err := filepath.Rel(dir, c.root) // kubectl takes no absolute path
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "kustomization.yaml"), fmt.Appendf(nil, kustomization, up), 0o600)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	c.apply(c.kubectl(nil, "kustomize", dir))
}

// placerAt starts the placer, whose door for the scheduler is at an address.
func (c *cluster) placerAt(door string) *plane.Placer {
	c.t.Helper()
	as := object{"as": "system:serviceaccount:gpu-placer:gpu-placer", "as-groups": []string{"system:serviceaccounts", "system:serviceaccounts:gpu-placer", "system:authenticated"}}
	return c.StartPlacer(c.t, plane.Program(c.t, "gpu-placer"), c.Kubeconfig(c.t, as), door, "--doors=extender,kueue")
}

func (c *cluster) read(file string) []byte {
	c.t.Helper()
	text, err := os.ReadFile(filepath.Join(c.root, filepath.FromSlash(file)))
	if err != nil {
		c.t.Fatal(err)
	}
	return text
}

func (c *cluster) kubectl(in []byte, args ...string) []byte {
	c.t.Helper()
	return c.run(in, plane.Program(c.t, "kubectl"), args...)
}

// apply waits until what defines the objects is served.
func (c *cluster) apply(text []byte) {
	c.t.Helper()
	c.kubectl(text, "apply", "--server-side", "--kubeconfig", c.kubeconfig, "-f", "-")
}

// export runs `gpu-agent export kueue`.
func (c *cluster) export(args []string) []byte {
	c.t.Helper()
	return c.run(nil, c.program, append([]string{"export", "kueue"}, args...)...)
}

func (c *cluster) run(in []byte, program string, args ...string) []byte {
	c.t.Helper()
	cmd := exec.CommandContext(c.t.Context(), program, args...)
	cmd.Stdin = bytes.NewReader(in)
	out, err := cmd.Output()
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		err = fmt.Errorf("%w: %s", err, exit.Stderr)
	}
	if err != nil {
		c.t.Fatalf("%s %s: %v", filepath.Base(program), args, err)
	}
	return out
}

func (c *cluster) get(path string, into any) error {
	return c.Do(c.t, nil, http.MethodGet, path, "", nil, into)
}

func (c *cluster) post(path string, o object) {
	c.t.Helper()
	if err := c.Do(c.t, nil, http.MethodPost, path, plane.JSON, o, nil); err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) patch(path string, o object) {
	c.t.Helper()
	if err := c.Do(c.t, nil, http.MethodPatch, path, plane.Merge, o, nil); err != nil {
		c.t.Fatal(err)
	}
}

// play plays the kubelets until the test ends.
func (c *cluster) play() {
	ctx, cancel := context.WithCancel(c.t.Context())
	c.t.Cleanup(func() {
		cancel()
		c.work.Wait()
	})
	c.every = func(pause time.Duration, do func()) {
		c.work.Go(func() {
			for ctx.Err() == nil {
				do()
				select {
				case <-ctx.Done():
				case <-time.After(pause):
				}
			}
		})
	}
	c.every(100*time.Millisecond, func() { c.look(ctx) })
}

// look starts the pods that are bound, and ends those that are deleted.
func (c *cluster) look(ctx context.Context) {
	var list core.PodList
	if err := c.get("/api/v1/namespaces/"+team+"/pods", &list); err != nil {
		return // asked again
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range list.Items {
		of := &list.Items[i]
		p := c.pods[string(of.UID)]
		switch {
		case p == nil && of.DeletionTimestamp != nil:
			c.work.Go(func() { c.remove(of.Name) })
		case p == nil && c.nodes[of.Spec.NodeName] != nil && of.Status.Phase == core.PodPending:
			p = &pod{Pod: fakes.Pod{UID: string(of.UID), Namespace: team, Name: of.Name}, node: c.nodes[of.Spec.NodeName]}
			c.pods[p.UID] = p
			c.work.Go(func() { c.start(ctx, p, of) })
		case p != nil && of.DeletionTimestamp != nil && !p.ending && of.Status.Phase != core.PodPending:
			p.ending = true
			c.work.Go(func() {
				select {
				case <-ctx.Done():
				case <-time.After(time.Duration(c.slow.Load())):
				}
				p.node.End(c.t.Context(), p.Pod, nil)
				c.remove(p.Name)
			})
		}
	}
}

func (c *cluster) remove(name string) {
	c.Do(c.t, nil, http.MethodDelete, "/api/v1/namespaces/"+team+"/pods/"+name, plane.JSON, object{"gracePeriodSeconds": 0}, nil) // asked again
}

// start is what the kubelet does with a pod.
func (c *cluster) start(ctx context.Context, p *pod, of *core.Pod) {
	want := map[string]int{}
	for name, n := range of.Spec.Containers[0].Resources.Requests {
		if strings.HasPrefix(string(name), "example.com/") {
			want[string(name)] = int(n.Value())
		}
	}
	is := object{"phase": "Failed", "reason": "UnexpectedAdmissionError"}
	if err := p.node.Admit(ctx, p.Pod, want); err == nil {
		is = p.node.Status(p.Pod)
		is["conditions"] = []object{{"type": "Ready", "status": "True"}, {"type": "ContainersReady", "status": "True"}}
	} else if ctx.Err() == nil {
		c.mu.Lock()
		c.refused = append(c.refused, fmt.Sprintf("%s on %s: %v", p.Name, p.node.Name, err))
		c.mu.Unlock()
	}
	c.status(p, is)
}

func (c *cluster) status(p *pod, is object) {
	if err := c.Do(c.t, nil, http.MethodPatch, "/api/v1/namespaces/"+team+"/pods/"+p.Name+"/status", plane.Strategic, object{"status": is}, nil); err != nil && c.t.Context().Err() == nil {
		c.t.Errorf("say that %s is %v: %v", p.Name, is["phase"], err)
	}
}

// job is one of so many pods, each of which asks for something.
type job struct {
	name   string
	pods   int
	asks   map[string]int
	labels map[string]string
	// selector and podLabels are its pods'.
	selector, podLabels map[string]string
}

// send makes a Job.
func (c *cluster) send(j job) {
	c.t.Helper()
	labels := map[string]string{"kueue.x-k8s.io/queue-name": "gpus"}
	maps.Copy(labels, j.labels)
	requests := object{}
	for name, n := range j.asks {
		requests[name] = fmt.Sprint(n)
	}
	n := max(1, j.pods)
	c.post(jobs, object{"metadata": object{"name": j.name, "labels": labels}, "spec": object{"suspend": true, "parallelism": n, "completions": n, "backoffLimit": 20,
		"template": object{"metadata": object{"labels": j.podLabels}, "spec": object{"restartPolicy": "Never", "nodeSelector": j.selector, "terminationGracePeriodSeconds": 1,
			"containers": []object{{"name": "main", "image": "none", "resources": object{"requests": requests, "limits": requests}}}}}}})
}

// running is where pods of a Job run.
func (c *cluster) running(name string) (nodes []string, err error) {
	var list core.PodList
	if err := c.get("/api/v1/namespaces/"+team+"/pods?labelSelector=batch.kubernetes.io/job-name="+name, &list); err != nil {
		return nil, err
	}
	for i := range list.Items {
		if p := &list.Items[i]; p.Status.Phase == core.PodRunning && p.DeletionTimestamp == nil {
			nodes = append(nodes, p.Spec.NodeName)
		}
	}
	slices.Sort(nodes)
	return nodes, nil
}

// awaitAt waits until so many pods of a Job run at a site.
func (c *cluster) awaitAt(name, site string, n int) {
	c.t.Helper()
	c.Await(c.t, fmt.Sprintf("%s runs at %s", name, site), func() error {
		nodes, err := c.running(name)
		if err != nil {
			return err
		}
		at := 0
		for _, node := range nodes {
			if c.sites[node] == site {
				at++
			}
		}
		if at != n || len(nodes) != n {
			return fmt.Errorf("its pods run on %v, %s; %s", nodes, c.waiting(name), c.says(name))
		}
		return nil
	})
}

// waiting is why pods of a Job do not run, for people.
func (c *cluster) waiting(name string) string {
	var out []string
	for _, p := range c.podsOf("batch.kubernetes.io/job-name=" + name) {
		if p.Status.Phase == core.PodRunning && p.DeletionTimestamp == nil {
			continue
		}
		text := fmt.Sprintf("%s is %s on %q, gates %v", p.Name, p.Status.Phase, p.Spec.NodeName, p.Spec.SchedulingGates)
		for _, is := range p.Status.Conditions {
			if is.Status != core.ConditionTrue {
				text += fmt.Sprintf(", %s: %s", is.Type, is.Message)
			}
		}
		out = append(out, text)
	}
	return strings.Join(out, "; ")
}

// end has the pods of a Job succeed.
func (c *cluster) end(name string) {
	c.t.Helper()
	var list core.PodList
	if err := c.get("/api/v1/namespaces/"+team+"/pods?labelSelector=batch.kubernetes.io/job-name="+name, &list); err != nil {
		c.t.Fatal(err)
	}
	for i := range list.Items {
		c.mu.Lock()
		p := c.pods[string(list.Items[i].UID)]
		mine := p != nil && !p.ending
		if mine {
			p.ending = true
		}
		c.mu.Unlock()
		if mine {
			if err := p.node.End(c.t.Context(), p.Pod, nil); err != nil {
				c.t.Fatal(err)
			}
			c.status(p, object{"phase": "Succeeded"})
		}
	}
	c.Await(c.t, name+" is complete", func() error {
		var j batch.Job
		if err := c.get(jobs+"/"+name, &j); err != nil {
			return err
		}
		if j.Status.Succeeded == 0 {
			return fmt.Errorf("it says %+v", j.Status)
		}
		return nil
	})
}

// workload is what is looked at of one.
type workload struct {
	meta.ObjectMeta `json:"metadata"`
	Spec            struct{ Active *bool }
	Status          struct {
		Conditions []meta.Condition
		Admission  *struct {
			PodSetAssignments []struct{ Flavors map[string]string }
		}
		AdmissionChecks []struct {
			Name, State, Message string
			PodSetUpdates        []struct{ Annotations, NodeSelector map[string]string }
		}
		// Of MultiKueue.
		ClusterName           string
		NominatedClusterNames []string
	}
}

// is reports a condition.
func (w *workload) is(kind string) bool {
	return slices.ContainsFunc(w.Status.Conditions, func(c meta.Condition) bool { return c.Type == kind && c.Status == meta.ConditionTrue })
}

// workload is a Job's.
func (c *cluster) workload(job string) (*workload, error) {
	var list struct{ Items []workload }
	if err := c.get(queueing+"/namespaces/"+team+"/workloads", &list); err != nil {
		return nil, err
	}
	for i := range list.Items {
		w := &list.Items[i]
		if by := meta.GetControllerOf(&w.ObjectMeta); by != nil && by.Kind == "Job" && by.Name == job {
			return w, nil
		}
	}
	return nil, errors.New("there is no workload of it")
}

// says is what a Job's workload says, for people.
func (c *cluster) says(job string) string {
	w, err := c.workload(job)
	if err != nil {
		return err.Error()
	}
	text := fmt.Sprintf("%s, kept from %q:", w.Name, w.Annotations[refused])
	for _, is := range w.Status.Conditions {
		text += fmt.Sprintf(" %s=%s (%s: %s)", is.Type, is.Status, is.Reason, is.Message)
	}
	for _, s := range w.Status.AdmissionChecks {
		text += fmt.Sprintf(" %s %s (%s)", s.Name, s.State, s.Message)
	}
	return text
}
