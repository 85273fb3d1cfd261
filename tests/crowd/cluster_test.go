// SPDX-License-Identifier: Apache-2.0

package crowd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.yaml.in/yaml/v4"
	core "k8s.io/api/core/v1"
	resource "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"example.com/gpu-agent/tests/fakes"
	"example.com/gpu-agent/tests/hollow"
	"example.com/gpu-agent/tests/lab"
	"example.com/gpu-agent/tests/plane"
	"example.com/gpu-agent/tests/room"
)

const (
	namespace = "crowd"
	pods      = "/api/v1/namespaces/" + namespace + "/pods"
	claims    = "/apis/resource.k8s.io/v1/namespaces/" + namespace + "/resourceclaims"
	slicesAt  = "/apis/resource.k8s.io/v1/resourceslices"
	gpuNodes  = "/apis/example.com/v1alpha1/gpunodes"

	model = "A100-SXM4-80GB"
	// gpus are those of a node.
	gpus = 2
	// units is how many GiB of a GPU's memory can be had.
	units = 79
	// kubeletVersion is that of a kubelet that names a pod's devices in its status.
	kubeletVersion = "v1.36.3"
)

// cluster is a control plane with hollow nodes. Its kubelets' work is done beside the
// caller, who sends and ends pods.
type cluster struct {
	*plane.Server
	t     *testing.T
	root  string // of the checkout
	nodes map[string]*hollow.Node
	// byClaim says that pods ask by claims, not by resources of the device plugin.
	byClaim bool

	mu sync.Mutex
	// edits says that nodes are laid out anew meanwhile: who was placed by a layout that is
	// no more may be ended. Guarded by mu.
	edits bool
	pods  map[string]*sent // guarded by mu; by name
	// wrong is what should not have been, and done counts what was. Guarded by mu.
	wrong []string
	done  map[string]int
	work  sync.WaitGroup
}

// sent is a pod that was sent.
type sent struct {
	*request
	fakes.Pod
	claim   *drapb.Claim
	node    *hollow.Node // once it is bound
	devices []device
	running bool
	refused string // by the scheduler, last
	// failed says that the node has refused it, which is final.
	failed bool
	// ending keeps kubelets off it, and begun is closed when one has done with its start.
	ending bool
	begun  chan struct{}
	bound  time.Time
}

// device is what a claim has, in the words of the slices' attributes.
type device struct {
	gpu, use, profile string
	start, gib        int
}

// startCluster starts a cluster of nodes that are laid out as entries say, one list a node.
func startCluster(t *testing.T, layout [][]string, byClaim bool) *cluster {
	t.Helper()
	return startClusterWith(t, fleet{entries: layout}, byClaim, func(c *cluster) { c.Scheduler(t, 300) })
}

// startClusterWith has the scheduler started by somebody else, once the API server is there.
func startClusterWith(t *testing.T, f fleet, byClaim bool, scheduler func(*cluster)) *cluster {
	t.Helper()
	if missing := lab.Missing(); missing != "" {
		t.Skipf("skipped: this needs %s", missing)
	}
	kit, err := lab.NewKit(nil)
	if err != nil {
		t.Fatal(err)
	}
	var args []string
	if f.gangs {
		args = []string{"--feature-gates=" + workloads, "--runtime-config=scheduling.k8s.io/v1alpha2=true"}
	}
	c := &cluster{Server: plane.Start(t, args...), t: t, root: kit.Root, byClaim: byClaim, nodes: map[string]*hollow.Node{}, pods: map[string]*sent{}, done: map[string]int{}}
	c.apply("/apis/resource.k8s.io/v1/deviceclasses", "components/dra/classes.yaml")
	c.apply("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", "base/crd.yaml")
	c.Await(t, "GPUNodes are served", func() error { return c.get(gpuNodes, nil) })
	create(t, c.Server, "/api/v1/namespaces", map[string]any{"apiVersion": "v1", "kind": "Namespace", "metadata": map[string]any{"name": namespace}})
	create(t, c.Server, "/api/v1/namespaces/"+namespace+"/serviceaccounts", map[string]any{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": map[string]any{"name": "default"}})
	c.Controllers(t, "resourceclaim-controller,device-taint-eviction-controller")
	for i, entries := range f.entries {
		name := fmt.Sprintf("node-%d", i+1)
		c.nodes[name] = hollow.Start(t, c.Server, hollow.Options{Name: name, Model: model, GPUs: gpus, Entries: entries, Agent: plane.Program(t, "gpu-agent"), Kubelet: kubeletVersion})
	}
	scheduler(c)
	c.Await(t, "each GPU is in the slices", func() error {
		if !byClaim {
			return nil
		}
		var list resource.ResourceSliceList
		if err := c.get(slicesAt, &list); err != nil {
			return err
		}
		found := map[string]bool{}
		for i := range list.Items {
			for _, d := range list.Items[i].Spec.Devices {
				found[cmp.Or(attribute(&d, "parentUUID"), attribute(&d, "uuid"))] = len(d.Taints) == 0
			}
		}
		if want := gpus * len(f.entries); len(found) != want {
			return fmt.Errorf("there are %v, want %d", found, want)
		}
		return nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(func() {
		cancel()
		c.work.Wait()
	})
	c.work.Go(func() {
		for ctx.Err() == nil {
			c.look(ctx)
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
		}
	})
	return c
}

// apply makes the objects of a manifest that is shipped.
func (c *cluster) apply(path, manifest string) {
	c.t.Helper()
	all, err := os.ReadFile(filepath.Join(c.root, "deployments", filepath.FromSlash(manifest)))
	if err != nil {
		c.t.Fatal(err)
	}
	for _, text := range strings.Split(string(all), "\n---\n") {
		var object map[string]any
		if err := yaml.Unmarshal([]byte(text), &object); err != nil {
			c.t.Fatal(err)
		}
		create(c.t, c.Server, path, object)
	}
}

func (c *cluster) get(path string, into any) error {
	return c.Do(c.t, nil, http.MethodGet, path, "", nil, into)
}

func attribute(d *resource.Device, name string) string {
	if a := d.Attributes[resource.QualifiedName(hollow.Driver+"/"+name)]; a.StringValue != nil {
		return *a.StringValue
	}
	if a := d.Attributes[resource.QualifiedName(name)]; a.StringValue != nil {
		return *a.StringValue
	}
	return ""
}

func (c *cluster) breaks(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if line := fmt.Sprintf(format, args...); !slices.Contains(c.wrong, line) {
		c.wrong = append(c.wrong, line)
	}
}

// send makes a pod and its claim.
func (c *cluster) send(r *request) {
	c.t.Helper()
	var claim, pod struct{ Metadata struct{ UID string } }
	c.mu.Lock()
	p := &sent{request: r, begun: make(chan struct{})}
	c.pods[r.name] = p
	c.mu.Unlock()
	var err error
	if c.byClaim {
		err = c.Do(c.t, nil, http.MethodPost, claims, plane.JSON, r.claim(), &claim)
	}
	if err = errors.Join(err, c.Do(c.t, nil, http.MethodPost, pods, plane.JSON, r.pod(c.byClaim), &pod)); err != nil {
		c.t.Fatal(err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.byClaim {
		p.claim = &drapb.Claim{Namespace: namespace, Name: r.name, Uid: claim.Metadata.UID}
	}
	p.Pod = fakes.Pod{UID: pod.Metadata.UID, Namespace: namespace, Name: r.name}
	c.done["sent"]++
}

// look plays the kubelets: pods that are bound are started, and what they have is checked.
func (c *cluster) look(ctx context.Context) {
	var list core.PodList
	if err := c.get(pods, &list); err != nil {
		return // asked again
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range list.Items {
		of := &list.Items[i]
		p := c.pods[of.Name]
		if p != nil && of.DeletionTimestamp != nil && !p.ending {
			p.ending = true
			c.done["evicted"]++
			c.work.Go(func() { c.evicted(p) })
		}
		if p == nil || p.UID == "" || p.node != nil || p.ending {
			continue
		}
		for _, is := range of.Status.Conditions {
			if is.Type == core.PodScheduled && is.Status == core.ConditionFalse {
				p.refused = is.Message
			}
		}
		if p.node, p.bound = c.nodes[of.Spec.NodeName], time.Now(); p.node != nil {
			c.work.Go(func() {
				defer close(p.begun)
				c.start(ctx, p)
			})
		}
	}
}

// start is what the kubelet does with a pod. A claim that is refused is asked for again; a
// pod whose devices are has failed.
func (c *cluster) start(ctx context.Context, p *sent) {
	if !c.byClaim {
		c.admit(ctx, p)
		return
	}
	for {
		err := p.node.Prepare(ctx, p.Pod, p.claim)
		if err == nil || ctx.Err() != nil {
			break
		}
		c.mu.Lock()
		c.done["refused"]++
		over, edits := p.ending, c.edits
		c.mu.Unlock()
		switch {
		case over:
			return
		case !edits:
			c.breaks("%s, of %s, is refused on %s: %v", p.name, p.request, p.node.Name, err)
		case time.Since(p.bound) > patience:
			c.breaks("%s, of %s, hangs on %s: %v", p.name, p.request, p.node.Name, err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
	devices, err := c.given(ctx, p.name)
	if err == nil {
		err = c.phase(p, "Running")
	}
	if err != nil {
		if ctx.Err() == nil {
			c.breaks("%s: %v", p.name, err)
		}
		return
	}
	c.mu.Lock()
	p.devices, p.running = devices, true
	c.done["ran"]++
	c.mu.Unlock()
	c.check(p)
}

// evicted is what the kubelet does with a pod that the cluster deletes.
func (c *cluster) evicted(p *sent) {
	c.mu.Lock()
	edits, ran := c.edits, p.running
	c.mu.Unlock()
	if !edits || ran {
		c.breaks("%s, of %s, is evicted; it ran: %v", p.name, p.request, ran)
	}
	if err := c.endOne(p); err != nil {
		c.breaks("end of %s: %v", p.name, err)
	}
}

func (c *cluster) admit(ctx context.Context, p *sent) {
	refused := p.node.Admit(ctx, p.Pod, p.resources())
	is := map[string]any{"phase": "Failed"}
	if refused == nil {
		is = p.node.Status(p.Pod)
	}
	err := c.status(p, is)
	if err != nil && ctx.Err() == nil {
		c.breaks("%s: %v", p.name, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if p.running, p.failed = refused == nil, refused != nil; p.failed {
		c.done["refused"]++
		return
	}
	c.done["ran"]++
}

func (c *cluster) phase(p *sent, phase string) error {
	return c.status(p, map[string]any{"phase": phase})
}

func (c *cluster) status(p *sent, is map[string]any) error {
	return c.Do(c.t, nil, http.MethodPatch, pods+"/"+p.name+"/status", plane.Strategic, map[string]any{"status": is}, nil)
}

// errWriting is of a pool whose slices are being written one after the other: a device that moves
// from one to another may be in none meanwhile.
var errWriting = errors.New("the slices of its pool are not of one generation")

// given are the devices that a claim has, once the slices of their pools are whole.
func (c *cluster) given(ctx context.Context, claim string) ([]device, error) {
	var is resource.ResourceClaim
	if err := c.get(claims+"/"+claim, &is); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		devices, err := c.devices(&is)
		if !errors.Is(err, errWriting) {
			return devices, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// complete are the pools of which each slice is there, by name.
func complete(all []resource.ResourceSlice) map[string]bool {
	newest, there, out := map[string]int64{}, map[string]int64{}, map[string]bool{}
	for i := range all {
		pool := &all[i].Spec.Pool
		newest[pool.Name] = max(newest[pool.Name], pool.Generation)
	}
	for i := range all {
		if pool := &all[i].Spec.Pool; pool.Generation == newest[pool.Name] {
			there[pool.Name]++
			out[pool.Name] = there[pool.Name] == pool.ResourceSliceCount
		}
	}
	return out
}

// devices are what a claim has been given, by the attributes of the slices that have it.
func (c *cluster) devices(claim *resource.ResourceClaim) (out []device, err error) {
	var list resource.ResourceSliceList
	if err := c.get(slicesAt, &list); err != nil {
		return nil, err
	}
	of, complete := map[string]*resource.Device{}, complete(list.Items)
	for i := range list.Items {
		for j := range list.Items[i].Spec.Devices {
			of[list.Items[i].Spec.Pool.Name+"/"+list.Items[i].Spec.Devices[j].Name] = &list.Items[i].Spec.Devices[j]
		}
	}
	if claim.Status.Allocation == nil {
		return nil, errors.New("its pod is bound, and its claim has nothing")
	}
	for _, r := range claim.Status.Allocation.Devices.Results {
		d := of[r.Pool+"/"+r.Device]
		if d == nil && !complete[r.Pool] {
			return nil, fmt.Errorf("its claim has device %s: %w", r.Device, errWriting)
		}
		if d == nil {
			return nil, fmt.Errorf("its claim has device %s, which is in no slice", r.Device)
		}
		has := device{gpu: cmp.Or(attribute(d, "parentUUID"), attribute(d, "uuid")), use: cmp.Or(attribute(d, "sharing"), attribute(d, "type")), profile: attribute(d, "profile")}
		if has.profile != "" {
			if _, err := fmt.Sscanf(r.Device[strings.LastIndexByte(r.Device, '-')+1:], "%d", &has.start); err != nil {
				return nil, fmt.Errorf("device %s does not say where it starts", r.Device)
			}
		}
		if q, ok := r.ConsumedCapacity["memory"]; ok {
			has.gib = int(q.Value() >> 30)
		}
		out = append(out, has)
	}
	return out, nil
}

// check looks at the GPUs of a pod that runs: each is in one mode, holds no more than it
// can, and the hardware is what its pods were promised.
func (c *cluster) check(p *sent) {
	for _, d := range p.devices {
		c.mu.Lock()
		uses, gib, shared := map[string]int{}, 0, map[string]string{}
		var over []string
		for _, o := range c.pods {
			for _, has := range o.devices {
				if !o.running || has.gpu != d.gpu {
					continue
				}
				uses[has.use]++
				gib += has.gib
				for s := has.start; has.profile != "" && s < has.start+int(profiles()[has.profile].Size); s++ {
					if other := shared[fmt.Sprint(s)]; other != "" {
						over = append(over, fmt.Sprintf("%s and %s have memory slice %d", other, o.name, s))
					}
					shared[fmt.Sprint(s)] = o.name
				}
			}
		}
		stands := p.running
		c.mu.Unlock()
		if len(uses) > 1 || uses["gpu"] > 1 || gib > units || len(over) > 0 {
			c.breaks("GPU %s is used as %v at once, with %d GiB; %v", d.gpu, uses, gib, over)
		}
		g, ok := p.node.GPU(d.gpu)
		if on := g.MIG != nil && g.MIG.Enabled; stands && (!ok || on != (d.use == "mig")) {
			c.breaks("%s has %+v, and its GPU has MIG on: %v", p.name, d, on)
			continue
		}
		if stands && d.use == "mig" && !stand(g.MIG.Instances, d) {
			c.breaks("%s has %+v, and there stand %+v", p.name, d, g.MIG.Instances)
		}
	}
}

// settled waits until each pod that was sent runs or has been refused by the scheduler, and
// nobody who was refused would find room, by a search of its own.
func (c *cluster) settled() (running []*request) {
	c.t.Helper()
	since := map[string]time.Time{} // when room was first found for whom
	c.Await(c.t, "each pod runs, or there is no room for it", func() error {
		c.mu.Lock()
		running = nil
		var waits []sent
		for _, p := range c.pods {
			switch {
			case p.running:
				running = append(running, p.request)
			case p.node != nil || p.refused == "":
				defer c.mu.Unlock()
				return fmt.Errorf("%s is not decided on: bound %v; went wrong: %q", p.name, p.node != nil, c.wrong)
			default:
				waits = append(waits, *p)
			}
		}
		c.mu.Unlock()
		missed, err := c.noRoom(waits)
		if missed == nil {
			return err
		}
		if since[missed.name].IsZero() {
			since[missed.name] = time.Now()
		}
		if missed.gib > 0 && time.Since(since[missed.name]) > backOff {
			since[missed.name] = time.Now()
			c.remind()
		}
		return err
	})
	return running
}

// backOff is how long the scheduler may leave a pod alone for which there is room, and a
// little more.
const backOff = 15 * time.Second

// remind has the scheduler look again at all pods. The one of Kubernetes 1.36.3 counts the
// capacity of a share twice while it writes the share's claim (GatherAllocatedState adds
// what is in flight to what the informer has already), and a pod that it refuses then it
// leaves alone for five minutes, unless a claim is given back or a slice or class changes.
func (c *cluster) remind() {
	c.mu.Lock()
	c.done["overlooked by the scheduler"]++
	n := c.done["overlooked by the scheduler"]
	c.mu.Unlock()
	if err := c.Do(c.t, nil, http.MethodPatch, "/apis/resource.k8s.io/v1/deviceclasses/gpu-memory.example.com", plane.Merge,
		map[string]any{"metadata": map[string]any{"annotations": map[string]any{"reminder": fmt.Sprint(n)}}}, nil); err != nil {
		c.breaks("remind the scheduler: %v", err)
	}
}

// noRoom returns one of those that wait for whom there is room, and says where.
func (c *cluster) noRoom(waits []sent) (*sent, error) {
	w, err := room.Look(c.get)
	if err != nil {
		return nil, err
	}
	specs := map[types.UID]resource.DeviceClaim{}
	for i := range w.Claims {
		specs[w.Claims[i].UID] = w.Claims[i].Spec.Devices
	}
	for i := range waits {
		p := &waits[i]
		for name := range c.nodes {
			found, err := w.For(c.t.Context(), name, specs[types.UID(p.claim.Uid)])
			if err != nil || len(found) > 0 {
				return p, fmt.Errorf("%s, of %s, waits (%s), and a search finds %v on %s: %v", p.name, p.request, p.refused, found, name, err)
			}
		}
	}
	return nil, nil
}

// endAll ends all pods that there are, and waits until no claim is left: the controller takes
// back what they had. First those go that wait: a scheduler that is binding a pod while that
// is deleted takes back what it meant to give it, and tells nobody whom it has refused the
// same for five minutes.
func (c *cluster) endAll() {
	c.t.Helper()
	var has, waits []string
	c.mu.Lock()
	for name, p := range c.pods {
		if p.node == nil {
			waits = append(waits, name)
		} else {
			has = append(has, name)
		}
	}
	c.mu.Unlock()
	c.end(waits)
	c.end(has)
	c.Await(c.t, "no claim is left", func() error {
		var list resource.ResourceClaimList
		if err := c.get(claims, &list); err != nil {
			return err
		}
		if len(list.Items) == 0 {
			return nil
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		is := &list.Items[0]
		return fmt.Errorf("there are %d, the first is %s, deleted %v, with finalizers %v and status %+v; went wrong: %q", len(list.Items), is.Name, is.DeletionTimestamp, is.Finalizers, is.Status, c.wrong)
	})
}

// end ends some pods: those that run come to their end, the others are deleted.
func (c *cluster) end(names []string) {
	c.t.Helper()
	var ending []*sent
	c.mu.Lock()
	for _, name := range names {
		if p := c.pods[name]; p != nil && !p.ending {
			ending = append(ending, p)
		}
	}
	c.mu.Unlock()
	var all sync.WaitGroup
	for _, p := range ending {
		all.Go(func() {
			if err := c.endOne(p); err != nil {
				c.breaks("end of %s: %v", p.name, err)
			}
		})
	}
	all.Wait()
}

func (c *cluster) endOne(p *sent) error {
	c.mu.Lock()
	p.ending = true
	bound := p.node != nil
	c.mu.Unlock()
	if bound {
		<-p.begun
	}
	c.mu.Lock()
	ran := p.running
	p.running = false
	c.mu.Unlock()
	if bound {
		if err := p.node.End(c.t.Context(), p.Pod, p.claim); err != nil {
			return err
		}
	}
	if ran {
		if err := c.phase(p, "Succeeded"); err != nil {
			return err
		}
	}
	none := map[string]any{"gracePeriodSeconds": 0}
	err := c.Do(c.t, nil, http.MethodDelete, pods+"/"+p.name, plane.JSON, none, nil)
	if c.byClaim {
		err = errors.Join(err, c.Do(c.t, nil, http.MethodDelete, claims+"/"+p.name, plane.JSON, none, nil))
	}
	if err != nil {
		return err
	}
	c.mu.Lock()
	delete(c.pods, p.name)
	c.mu.Unlock()
	return nil
}

func create(t *testing.T, s *plane.Server, path string, object map[string]any) {
	t.Helper()
	if err := s.Do(t, nil, http.MethodPost, path, plane.JSON, object, nil); err != nil {
		t.Fatal(err)
	}
}
