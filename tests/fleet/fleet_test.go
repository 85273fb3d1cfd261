// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.yaml.in/yaml/v4"
	core "k8s.io/api/core/v1"

	"example.com/gpu-agent/tests/fakes"
	"example.com/gpu-agent/tests/hollow"
	"example.com/gpu-agent/tests/lab"
	"example.com/gpu-agent/tests/plane"
)

var (
	long  = flag.Bool("long", false, "200 nodes for ten minutes, and a placer with 1,000 nodes")
	nodes = flag.Int("nodes", 0, "the number of nodes, instead; TestSize has five pods on each")
)

const (
	namespace = "fleet"
	pods      = "/api/v1/namespaces/" + namespace + "/pods"
	gpuNodes  = "/apis/example.com/v1alpha1/gpunodes"
	allNodes  = "/api/v1/nodes"

	// podsPerHour come to each node in the mean.
	podsPerHour = 30
	// mostWrites of a GPUNode an hour are allowed in the mean while pods come and go, and
	// mostIdle while nothing happens.
	mostWrites, mostIdle = 60, 5
	// period is that of a kubelet that is left as it comes.
	period = 10 * time.Second
)

// counter counts what a watch tells.
type counter struct {
	mu            sync.Mutex
	events, bytes int
}

func (c *counter) add(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.events, c.bytes = c.events+1, c.bytes+n
}

// take returns what has come since it was asked last.
func (c *counter) take() (events, bytes int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	events, bytes = c.events, c.bytes
	c.events, c.bytes = 0, 0
	return events, bytes
}

// fleet is a control plane, nodes, and what was counted.
type fleet struct {
	*plane.Server
	t      *testing.T
	root   string // of the checkout
	placer *plane.Placer
	nodes  map[string]*hollow.Node

	gpuNodes, allNodes counter
	kubelets           counter // writes of the kubelets' to their Nodes

	mu      sync.Mutex
	pods    map[string]*pod // by name
	refused []string
	work    sync.WaitGroup
}

type pod struct {
	fakes.Pod
	wants map[string]int
	stays time.Duration
	begun bool
}

// start starts the control plane, with GPUNodes.
func start(t *testing.T) *fleet {
	t.Helper()
	if missing := lab.Missing(); missing != "" {
		t.Skipf("skipped: this needs %s", missing)
	}
	kit, err := lab.NewKit(nil)
	if err != nil {
		t.Fatal(err)
	}
	f := &fleet{Server: plane.Start(t), t: t, root: kit.Root, nodes: map[string]*hollow.Node{}, pods: map[string]*pod{}}
	crd, err := os.ReadFile(filepath.Join(kit.Root, "deployments", "base", "crd.yaml"))
	var object map[string]any
	if err == nil {
		err = yaml.Unmarshal(crd, &object)
	}
	if err != nil {
		t.Fatal(err)
	}
	f.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", object)
	f.create("/api/v1/namespaces", map[string]any{"metadata": map[string]any{"name": namespace}})
	f.create("/api/v1/namespaces/"+namespace+"/serviceaccounts", map[string]any{"metadata": map[string]any{"name": "default"}})
	f.Await(t, "GPUNodes are served", func() error { return f.get(gpuNodes, nil) })
	return f
}

// schedule starts the placer, and the scheduler that asks it.
func (f *fleet) schedule() {
	f.t.Helper()
	f.placer = f.StartPlacer(f.t, plane.Program(f.t, "gpu-placer"), f.Kubeconfig(f.t, nil), plane.FreeAddress(f.t), "--lease", namespace+"/gpu-placer")
	f.SchedulerAsking(f.t, filepath.Join(f.root, "deployments", "placer", "scheduler-config.yaml"), f.placer.Door, 0)
}

func (f *fleet) create(path string, object map[string]any) {
	f.t.Helper()
	if err := f.Do(f.t, nil, http.MethodPost, path, plane.JSON, object, nil); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fleet) get(path string, into any) error {
	return f.Do(f.t, nil, http.MethodGet, path, "", nil, into)
}

// follow watches what is at a path until the test ends, from now on.
func (f *fleet) follow(path string, see func(event []byte)) {
	f.t.Helper()
	var list struct {
		Metadata struct{ ResourceVersion string }
	}
	if err := f.get(path, &list); err != nil {
		f.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(f.t.Context())
	f.t.Cleanup(cancel)
	f.work.Go(func() {
		if err := f.Watch(ctx, path+"?timeoutSeconds=7200&resourceVersion="+list.Metadata.ResourceVersion, see); err != nil && ctx.Err() == nil {
			f.t.Errorf("watch %s: %v", path, err)
		}
	})
	f.t.Cleanup(f.work.Wait)
}

// startNodes starts nodes with two GPUs each: one is shared by memory, one has instances on
// demand.
func (f *fleet) startNodes(count int) {
	f.t.Helper()
	began := time.Now()
	for i := range count {
		name := fmt.Sprintf("node-%03d", i)
		f.nodes[name] = hollow.Start(f.t, f.Server, hollow.Options{
			Name: name, Model: "A100-SXM4-80GB", GPUs: 2, Entries: []string{"{devices: [0], mode: shared}", "{devices: [1], mode: mig}"},
			Agent: plane.Program(f.t, "gpu-agent"), Kubelet: "v1.36.3",
		})
		if i%20 == 19 {
			f.t.Logf("%d of %d agents started, %.0f s", i+1, count, time.Since(began).Seconds())
		}
	}
	ctx, cancel := context.WithCancel(f.t.Context())
	f.t.Cleanup(f.work.Wait)
	f.t.Cleanup(cancel)
	for _, n := range f.nodes {
		f.work.Go(func() {
			wait := time.Duration(rand.Int64N(int64(period)))
			for {
				select {
				case <-ctx.Done():
					return
				case <-time.After(wait):
				}
				wait = period
				switch wrote, err := n.Sync(f.t); {
				case err != nil && ctx.Err() == nil:
					f.t.Errorf("the kubelet of %s: %v", n.Name, err)
				case wrote:
					f.kubelets.add(0)
				}
			}
		})
	}
	for name, n := range f.nodes {
		f.Await(f.t, name+" is offered, and told of", func() error {
			var node core.Node
			if err := errors.Join(f.get(allNodes+"/"+name, &node), f.get(gpuNodes+"/"+name, nil)); err != nil {
				return err
			}
			offered := n.Offered()
			for of, count := range offered {
				if now := node.Status.Allocatable[core.ResourceName(of)]; now.Value() != int64(count) {
					return fmt.Errorf("of %s there are %s, want %d", of, now.String(), count)
				}
			}
			if len(offered) < 2 {
				return fmt.Errorf("it offers %v", offered)
			}
			return nil
		})
	}
	f.t.Logf("%d nodes are offered after %.0f s", count, time.Since(began).Seconds())
}

// seen does what kubelets do with a pod.
func (f *fleet) seen(event []byte) {
	var e struct{ Object core.Pod }
	if err := json.Unmarshal(event, &e); err != nil {
		f.t.Errorf("a pod cannot be read: %v", err)
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	p, n := f.pods[e.Object.Name], f.nodes[e.Object.Spec.NodeName]
	if p == nil || n == nil || p.begun {
		return
	}
	p.begun = true
	p.Pod = fakes.Pod{UID: string(e.Object.UID), Namespace: namespace, Name: e.Object.Name}
	f.work.Go(func() {
		if err := f.live(n, p); err != nil && f.t.Context().Err() == nil {
			f.t.Errorf("%s on %s: %v", p.Name, n.Name, err)
		}
	})
}

// live is the life of a pod on a node.
func (f *fleet) live(n *hollow.Node, p *pod) error {
	ctx := f.t.Context()
	is, err := map[string]any{"phase": "Failed"}, n.Admit(ctx, p.Pod, p.wants)
	if err == nil {
		is = n.Status(p.Pod)
	} else {
		f.mu.Lock()
		f.refused = append(f.refused, fmt.Sprintf("%s on %s: %v", p.Name, n.Name, err))
		f.mu.Unlock()
	}
	if err := f.Do(f.t, nil, http.MethodPatch, pods+"/"+p.Name+"/status", plane.Strategic, map[string]any{"status": is}, nil); err != nil || ctx.Err() != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return nil
	case <-time.After(p.stays):
	}
	return errors.Join(n.End(ctx, p.Pod, nil), f.Do(f.t, nil, http.MethodDelete, pods+"/"+p.Name, plane.JSON, map[string]any{"gracePeriodSeconds": 0}, nil))
}

// wants draws what a pod asks for: memory, or an instance.
func wants(rng *rand.Rand) map[string]int {
	if rng.IntN(2) == 0 {
		return map[string]int{"example.com/gpu-mem": 4 + rng.IntN(29)}
	}
	profiles := []string{"1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb"}
	return map[string]int{"example.com/mig-" + profiles[rng.IntN(len(profiles))]: 1}
}

func spec(asks map[string]int, node string) map[string]any {
	limits := map[string]any{}
	for name, n := range asks {
		limits[name] = fmt.Sprint(n)
	}
	out := map[string]any{"automountServiceAccountToken": false, "restartPolicy": "Never", "tolerations": []any{map[string]any{"operator": "Exists"}},
		"containers": []any{map[string]any{"name": "main", "image": "none", "resources": map[string]any{"limits": limits}}}}
	if node != "" {
		out["nodeName"] = node
	}
	return out
}

// churn has pods come and go for a while, as a Poisson process, and returns how many came.
func (f *fleet) churn(span, stays time.Duration) (sent int) {
	f.t.Helper()
	rng := rand.New(rand.NewPCG(17, uint64(len(f.nodes))))
	every := float64(time.Hour) / podsPerHour / float64(len(f.nodes))
	for began, next := time.Now(), time.Duration(0); ; sent++ {
		next += time.Duration(rng.ExpFloat64() * every)
		if next > span {
			time.Sleep(span - time.Since(began))
			return sent
		}
		time.Sleep(next - time.Since(began))
		p := &pod{wants: wants(rng), stays: time.Duration((0.5 + rng.Float64()) * float64(stays))}
		name := fmt.Sprintf("pod-%d", sent)
		f.mu.Lock()
		f.pods[name] = p
		f.mu.Unlock()
		f.create(pods, map[string]any{"metadata": map[string]any{"name": name}, "spec": spec(p.wants, "")})
	}
}

// TestFleet counts what agents write while nothing happens, and while pods come and go.
func TestFleet(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: it counts writes")
	}
	count, idle, span, stays := 20, 20*time.Second, time.Minute, 20*time.Second
	if *long {
		count, idle, span, stays = 200, 3*time.Minute, 10*time.Minute, 4*time.Minute
	}
	if *nodes > 0 {
		count = *nodes
	}
	f := start(t)
	f.schedule()
	f.startNodes(count)
	f.follow(gpuNodes, func(event []byte) { f.gpuNodes.add(len(event)) })
	f.follow(allNodes, func(event []byte) { f.allNodes.add(len(event)) })
	f.follow(pods, f.seen)

	settle := 15 * time.Second // what came with the start has been written by then
	time.Sleep(settle)
	phase := func(name string, span time.Duration, do func()) (perHour float64) {
		t.Helper()
		f.gpuNodes.take()
		f.allNodes.take()
		f.kubelets.take()
		began := time.Now()
		do()
		nodeHours := time.Since(began).Hours() * float64(count)
		writes, bytes := f.gpuNodes.take()
		events, nodeBytes := f.allNodes.take()
		kubelets, _ := f.kubelets.take()
		perHour = float64(writes) / nodeHours
		t.Logf("%s, %d nodes for %.0f s: a node and hour %.1f writes of its GPUNode, %.0f KiB to each watch of it; %.1f writes of the Node by agent and placer and %.1f by the kubelet, %.0f KiB to each watch of it",
			name, count, span.Seconds(), perHour, float64(bytes)/nodeHours/1024, float64(events-kubelets)/nodeHours, float64(kubelets)/nodeHours, float64(nodeBytes)/nodeHours/1024)
		return perHour
	}
	if n := phase("idle", idle, func() { time.Sleep(idle) }); n >= mostIdle {
		t.Errorf("while nothing happens a GPUNode is written %.1f times an hour, want fewer than %d", n, mostIdle)
	}
	sent := 0
	if n := phase("churn", span, func() { sent = f.churn(span, stays) }); n > mostWrites {
		t.Errorf("while pods come and go a GPUNode is written %.1f times an hour, want at most %d", n, mostWrites)
	}
	f.tell(sent)
}

// tell prints what has become of the pods, and what it took.
func (f *fleet) tell(sent int) {
	f.t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	began := 0
	for _, p := range f.pods {
		if p.begun {
			began++
		}
	}
	unguarded := f.placer.Metric(f.t, "gpu_agent_placer_unguarded_pods_total")
	f.t.Logf("%d pods sent, %d bound, %d refused by kubelets, %v unguarded", sent, began, len(f.refused), unguarded)
	if float64(len(f.refused)) > unguarded {
		f.t.Errorf("refused:\n%s", strings.Join(f.refused, "\n"))
	}
	if began == 0 {
		f.t.Error("no pod was bound")
	}
	agents := 0.0
	for _, n := range f.nodes {
		agents += resident(f.t, n.PID())
	}
	f.t.Logf("resident: the placer %.1f MB, an agent %.1f MB in the mean", resident(f.t, f.placer.PID()), agents/float64(len(f.nodes)))
}

// resident is how much memory a process has, in MB.
func resident(t *testing.T, pid int) float64 {
	t.Helper()
	return memory(t, pid, "VmRSS") / 1e6
}

// memory is a line of a process's status that counts memory, in bytes: VmRSS is what it has, and
// VmHWM the most that it has had.
func memory(t *testing.T, pid int, line string) float64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), line+":")
	var kib float64
	if _, err := fmt.Sscanf(rest, "%f kB", &kib); err != nil {
		t.Fatalf("process %d does not say how much memory it has: %v", pid, err)
	}
	return kib * 1024
}
