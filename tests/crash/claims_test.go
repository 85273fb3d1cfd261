// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	resource "k8s.io/api/resource/v1"
	deviceplugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/fakes"
	"example.com/gpu-agent/tests/plane"
)

const (
	draDriver = "gpus." + domain
	// unitGiB is what a unit of memory has.
	unitGiB = 8
)

// claimSide is what a node has besides where its GPUs are offered through DRA: a way to
// the API server, and pods with claims.
type claimSide struct {
	*plane.Server
	t    *testing.T
	node *node
	name string // the node's
	off  func() error

	door       *door
	kubeconfig string
	// was is how GPUs that wait are laid out still, by index.
	was map[int]string

	mu sync.Mutex
	// pods are those that have been started and have not ended; guarded by mu.
	pods []*claimPod
}

// ask is a request of a claim: memory of a GPU where gib is set, a MIG instance where
// profile is, else the GPU.
type ask struct {
	request string
	gpu     int // its index
	gib     int
	profile string
	start   int
}

// suffix is the end of the name of the device that is asked for.
func (a ask) suffix() string {
	switch {
	case a.gib > 0:
		return "-shared"
	case a.profile != "":
		return migSuffix(a.profile, a.start)
	}
	return ""
}

func migSuffix(profile string, start int) string {
	return fmt.Sprintf("-mig-%s-%d", strings.NewReplacer(".", "", "+", "-").Replace(profile), start)
}

// device is the name of a device of a GPU.
func (c *claimSide) device(gpu int, suffix string) string {
	return "gpu-" + strings.TrimPrefix(c.node.gpus[gpu].UUID, "GPU-")[:8] + suffix
}

// claimPod is a pod with a claim.
type claimPod struct {
	fakes.Pod
	claim *drapb.Claim
	asks  []ask
	// names are its CDI devices, in the order of asks, once they have been said.
	names []string
	// serials are the instances that its container was made with, by ID.
	serials map[string]uint64
}

// name is the CDI device that a request's first result has: it follows from the claim's UID
// and the request alone.
func (p *claimPod) name(a ask) string {
	return cdi.DeviceName(domain, cdi.Key("claim/"+p.claim.Uid, []string{a.request + "#0"}))
}

var claimNodes atomic.Int64

// startClaims is a new node whose GPUs are laid out by modes and offered through DRA, on a
// machine of its own.
func startClaims(t *testing.T, s *plane.Server, modes ...string) (*node, error) {
	dir, err := os.MkdirTemp("", "crash-")
	if err != nil {
		return nil, err
	}
	var on []int
	for i, mode := range modes {
		if strings.HasPrefix(mode, "mig") {
			on = append(on, i)
		}
	}
	m, off, err := newMachine(filepath.Join(dir, "machine"), migSpec(model, on...))
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	c := &claimSide{Server: s, t: t, name: fmt.Sprintf("node-%d", claimNodes.Add(1)), off: off, was: map[int]string{}}
	n, err := newNode(m, dir, c, modes...)
	if err != nil {
		return nil, err
	}
	n.model = model
	return n, nil
}

// begin connects the node with the API server.
func (c *claimSide) begin(n *node) (err error) {
	c.node = n
	if c.door, err = openDoor(c.Server, doorway{counts: ofClaims, meets: n.meets}); err != nil {
		return err
	}
	if c.kubeconfig, err = c.door.kubeconfig(n.dir); err != nil {
		return err
	}
	return c.Do(c.t, nil, http.MethodPost, "/api/v1/nodes", plane.JSON, fields{"apiVersion": "v1", "kind": "Node", "metadata": fields{"name": c.name}}, nil)
}

func (c *claimSide) close() error {
	var err error
	if c.door != nil {
		err = c.door.close()
	}
	return errors.Join(err, c.off())
}

// flags are the agent's.
func (c *claimSide) flags() []string {
	return []string{"--kubeconfig", c.kubeconfig, "--node-name", c.name, "--node-labels", "none"}
}

// meets counts a change of the present process's that is no system call, and has happen
// what is to happen at it.
func (n *node) meets(what change) (killed bool) {
	n.mu.Lock()
	p := n.process
	n.mu.Unlock()
	if p == nil || !p.note(what) {
		return false
	}
	p.end()
	return true
}

// breaks notes what should not have been.
func (n *node) breaks(format string, args ...any) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.wrong = append(n.wrong, fmt.Sprintf(format, args...))
}

// claimPod makes a pod whose claim has been allocated what it asks for.
func (c *claimSide) pod(ctx context.Context, asks ...ask) (*claimPod, error) {
	p := &claimPod{Pod: c.node.pod("", 0).Pod, asks: asks}
	p.Name = c.name + "-" + p.Name
	p.Namespace = namespace
	p.claim = &drapb.Claim{Namespace: namespace, Name: p.Name}
	return p, c.allocate(ctx, p)
}

// run has a pod's claim prepared, as often as it takes, and starts its container.
func (c *claimSide) run(ctx context.Context, p *claimPod) error {
	c.node.kubelet.Bind(p.Pod, "main")
	if err := c.prepare(ctx, p); err != nil {
		return err
	}
	return c.create(p)
}

// create makes a pod's container and starts it.
func (c *claimSide) create(p *claimPod) error {
	a := fakes.Allocation{Pod: p.Pod, Container: "main", Resource: draDriver, Answer: &deviceplugin.ContainerAllocateResponse{}}
	for i, name := range p.names {
		a.Answer.CdiDevices = append(a.Answer.CdiDevices, &deviceplugin.CDIDevice{Name: name})
		a.IDs = append(a.IDs, c.ids(p.asks[i])...)
	}
	id, err := c.node.runtime.create(a)
	if err != nil {
		return fmt.Errorf("the claim of %s was prepared, and then: %w", p.Name, err)
	}
	c.node.runtime.start(id)
	stand := c.node.standing()
	c.mu.Lock()
	defer c.mu.Unlock()
	p.serials = map[string]uint64{}
	for _, id := range a.IDs {
		if strings.Contains(id, "@") {
			p.serials[id] = stand[id]
		}
	}
	return nil
}

// standing are the numbers of the instances that stand, by ID.
func (n *node) standing() map[string]uint64 {
	out := map[string]uint64{}
	for _, g := range n.world.State().GPUs {
		all, _ := standing(g)
		for _, i := range all {
			out[i.id] = i.serial
		}
	}
	return out
}

// all are the pods that have been started and have not ended.
func (c *claimSide) all() []*claimPod {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.pods)
}

// prepare has a pod's claim prepared, as often as it takes. Only an agent or a kubelet that
// ends meanwhile may make it fail.
func (c *claimSide) prepare(ctx context.Context, p *claimPod) error {
	c.mu.Lock()
	if !slices.Contains(c.pods, p) {
		c.pods = append(c.pods, p)
	}
	c.mu.Unlock()
	var devices []*drapb.Device
	if err := c.insist(ctx, "prepare "+p.Name, func() error {
		answer, err := c.node.kubelet.Prepare(ctx, p.Pod, draDriver, p.claim)
		devices = answer[p.claim.Uid]
		return err
	}); err != nil {
		return err
	}
	var names []string
	for _, a := range p.asks {
		var own []string
		for _, d := range devices { // twice where a kubelet has asked twice
			if slices.Equal(d.RequestNames, []string{a.request}) {
				own = append(own, d.CdiDeviceIds...)
			}
		}
		if own = slices.Compact(own); !slices.Equal(own, []string{p.name(a)}) {
			return fmt.Errorf("request %s of %s has the CDI devices %q, want %s", a.request, p.Name, own, p.name(a))
		}
		names = append(names, own...)
	}
	p.names = names
	return nil
}

// insist does what a kubelet does at a driver until it succeeds. An error of the driver's
// own is wrong.
func (c *claimSide) insist(ctx context.Context, what string, do func() error) error {
	for {
		_, err := c.node.kubelet.AwaitDriver(ctx, draDriver)
		if err == nil {
			if err = do(); err == nil {
				return nil
			}
		}
		if code := grpcstatus.Code(err); !errors.Is(err, fakes.ErrRefused) && code != codes.Unavailable && code != codes.Canceled {
			c.node.breaks("%s: %v", what, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", what, errors.Join(ctx.Err(), err))
		case <-time.After(5 * time.Millisecond): // until it is known that the process has ended
		}
	}
}

// end ends a pod, and its claim with it.
func (c *claimSide) end(ctx context.Context, p *claimPod) error {
	c.node.stop(&pod{Pod: p.Pod})
	if err := c.insist(ctx, "unprepare "+p.Name, func() error {
		return c.node.kubelet.Unprepare(ctx, p.Pod, draDriver, p.claim)
	}); err != nil {
		return err
	}
	c.forget(p)
	return c.remove(p)
}

func (c *claimSide) forget(p *claimPod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pods = slices.DeleteFunc(c.pods, func(o *claimPod) bool { return o == p })
}

// ids is what a request has, in the form of the device plugin's IDs, one for each unit.
func (c *claimSide) ids(a ask) (out []string) {
	uuid := c.node.gpus[a.gpu].UUID
	switch {
	case a.profile != "":
		return []string{fmt.Sprintf("%s::%s@%d", uuid, a.profile, a.start)}
	case a.gib == 0:
		return []string{uuid}
	}
	for u := range a.gib / unitGiB {
		out = append(out, fmt.Sprintf("%s::%d", uuid, u))
	}
	return out
}

// held is what pods have by the kubelet's account, or a container of theirs by the
// runtime's, by the key of each request's allocation.
func (c *claimSide) held() map[string]holding {
	known := map[string]bool{}
	for _, claim := range c.node.kubelet.Claims(draDriver) {
		known[claim.Uid] = true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	out := map[string]holding{}
	for _, p := range c.pods {
		if known[p.claim.Uid] || len(c.node.runtime.living(p.Pod)) > 0 {
			for _, a := range p.asks {
				out[strings.TrimPrefix(p.name(a), cdi.DeviceName(domain, ""))] = holding{p.Namespace, p.Name, draDriver, c.ids(a)}
			}
		}
	}
	return out
}

// differs compares what is published and what stands with what should.
func (c *claimSide) differs(st *status.Status) error {
	want := "applied"
	if slices.Contains(slices.Collect(maps.Values(c.node.waits)), true) {
		want = "blocked"
	}
	if st.Partition.State != want {
		return fmt.Errorf("the partition is %s (%s), want %s", st.Partition.State, st.Partition.Message, want)
	}
	for i, g := range c.node.world.State().GPUs {
		if _, empty := standing(g); empty {
			return fmt.Errorf("GPU %d has an empty GPU instance: %s", i, geometry(g))
		}
	}
	var claims resource.ResourceClaimList
	if err := c.Do(c.t, nil, http.MethodGet, claimsPath, "", nil, &claims); err != nil {
		return err
	}
	told := map[string]int{}
	for i := range claims.Items {
		told[string(claims.Items[i].UID)] = len(claims.Items[i].Status.Devices)
	}
	stand := c.node.standing()
	for _, p := range c.all() {
		if len(c.node.runtime.living(p.Pod)) == 0 {
			continue
		}
		if told[p.claim.Uid] != len(p.asks) {
			return fmt.Errorf("the claim of %s has the status of %d devices, want %d", p.Name, told[p.claim.Uid], len(p.asks))
		}
		for id, serial := range p.serials {
			if stand[id] != serial {
				return fmt.Errorf("%s has been made anew under the container of %s: it is number %d, and was %d", id, p.Name, stand[id], serial)
			}
		}
	}
	return c.slicesDiffer()
}

// slicesDiffer compares the slices at the API server with the layouts.
func (c *claimSide) slicesDiffer() error {
	all, err := c.slices()
	if err != nil {
		return err
	}
	var got []string
	for i := range all {
		pool := all[i].Spec.Pool
		if pool.Generation != all[0].Spec.Pool.Generation || pool.ResourceSliceCount != int64(len(all)) {
			return fmt.Errorf("slice %s is of generation %d and one of %d, and there are %d, the first of generation %d",
				all[i].Name, pool.Generation, pool.ResourceSliceCount, len(all), all[0].Spec.Pool.Generation)
		}
		for _, d := range all[i].Spec.Devices {
			line := d.Name
			for _, taint := range d.Taints {
				line += " " + cmp.Or(taint.Key, "?")
			}
			got = append(got, line)
		}
	}
	want, may, err := c.published()
	if err != nil {
		return err
	}
	got = slices.DeleteFunc(got, func(line string) bool { return slices.Contains(may, line) })
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		return fmt.Errorf("the slices have %q, want %q", got, want)
	}
	return nil
}

// published are the devices that are to be in the slices. Those of GPUs that wait have a
// taint; where nobody has them they may be there.
func (c *claimSide) published() (want, may []string, err error) {
	m, err := emulator.LoadModel(model)
	if err != nil {
		return nil, nil, err
	}
	var held []string
	for _, p := range c.all() {
		for _, a := range p.asks {
			held = append(held, c.device(a.gpu, a.suffix()))
		}
	}
	for i, mode := range c.node.modes {
		waits := c.node.waits[i]
		if waits {
			mode = c.was[i]
		}
		add := func(suffix string) {
			switch name := c.device(i, suffix); {
			case waits && slices.Contains(held, name):
				want = append(want, name+" "+domain+"/withdrawn")
			case waits:
				may = append(may, name+" "+domain+"/withdrawn")
			default:
				want = append(want, name)
			}
		}
		if mode == "whole" || mode == "dynamic" {
			add("")
		}
		if mode == "shared" || mode == "dynamic" {
			add("-shared")
		}
		if mode == "mig" || mode == "dynamic" {
			for _, p := range m.MIG.Profiles {
				for _, start := range p.Starts {
					add(migSuffix(p.Name, int(start)))
				}
			}
		}
	}
	return want, may, nil
}
