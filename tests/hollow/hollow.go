// SPDX-License-Identifier: Apache-2.0

package hollow

import (
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
	"testing"
	"time"

	"google.golang.org/grpc"
	core "k8s.io/api/core/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/daemon"
	"example.com/gpu-agent/tests/emulator/install"
	driverlib "example.com/gpu-agent/tests/emulator/lib"
	"example.com/gpu-agent/tests/emulator/mps"
	"example.com/gpu-agent/tests/fakes"
	"example.com/gpu-agent/tests/plane"
)

// Driver is the DRA driver's name.
const Driver = "gpus.example.com"

// Options are what a node is made of.
type Options struct {
	Name string
	// Model is the emulator's name of its GPUs, of which it has GPUs.
	Model string
	GPUs  int
	// Entries are the lines of its partition. With "mps" in one of them the node has MPS's
	// programs, which are the test's own binary: its TestMain calls mps.Main first.
	Entries []string
	// Agent is the program's path, and Args are flags beside those that a node needs. Under is
	// what runs it, such as an emulator of the processor that it was built for.
	Agent string
	Args  []string
	Under []string
	// Kubelet is the version that the Node says, "" if it says none.
	Kubelet string
}

// Node is a node without a kubelet: an agent, its GPUs, and what answers it.
type Node struct {
	Options
	server  *plane.Server
	config  string // the path of its partitions
	world   *emulator.World
	kubelet *fakes.Kubelet
	runtime *fakes.Runtime
	pid     int // the agent's
	// dra is the connection to the driver that the agent serves.
	dra *grpc.ClientConn
	// admitting is held while a pod is admitted: a kubelet admits one after the other.
	admitting sync.Mutex
}

// Start starts a node of a cluster; it ends with the test.
func Start(t *testing.T, s *plane.Server, o Options) *Node {
	t.Helper()
	dir, err := os.MkdirTemp("", "hollow-")
	if err != nil {
		t.Fatal(err)
	}
	n := &Node{Options: o, server: s}
	at := func(parts ...string) string { return filepath.Join(append([]string{dir}, parts...)...) }
	// What is cleaned up last stands first.
	t.Cleanup(func() {
		if err := errors.Join(lib.Unmount(at("state")), os.RemoveAll(dir)); err != nil {
			t.Error(err)
		}
	})
	n.startDriver(t, dir)
	n.config = at("partitions.yaml")
	pod := fakes.Pod{UID: "agent", Namespace: "gpu-agent", Name: "gpu-agent-" + n.Name}
	err = errors.Join(os.Mkdir(at("cdi"), 0o755), os.Mkdir(at("state"), 0o755), os.MkdirAll(at("kubelet", "plugins_registry"), 0o755),
		os.MkdirAll(at("proc", "sys/kernel/random"), 0o755), os.WriteFile(at("proc", "sys/kernel/random/boot_id"), []byte("8a6b0a3e-0f5c-4c9d-9d4e-3a1f0c0ffee0\n"), 0o644),
		n.Partition(o.Entries))
	if err == nil {
		n.kubelet, err = fakes.StartKubelet(fakes.KubeletOptions{Dir: at("kubelet"), Agent: pod, Judge: true})
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.kubelet.Stop)
	if n.runtime, err = fakes.StartRuntime(at("cri.sock"), pod); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.runtime.Stop)

	node := map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": n.Name}}
	if err := s.Do(t, nil, http.MethodPost, "/api/v1/nodes", plane.JSON, node, nil); err != nil {
		t.Fatal(err)
	}
	if err := n.Says(t, nil); err != nil {
		t.Fatal(err)
	}
	agent := slices.Concat(o.Under, []string{o.Agent, "run", "--driver-root", at("driver"), "--config", n.config, "--evict-after", "1", "--kubelet-dir", at("kubelet"), "--cdi-dir", at("cdi"),
		"--state-dir", at("state"), "--pod", pod.Namespace + "/" + pod.Name, "--http", "", "--runtime-endpoint", "unix://" + at("cri.sock"), "--proc-root", at("proc"),
		"--host-root", "/", "--kubeconfig", s.Kubeconfig(t, nil), "--node-name", n.Name, "--node-labels", "none"}, o.Args)
	n.pid = plane.Background(t, agent[0], agent[1:]...)
	if n.underMPS() {
		// The component's second process: the node has no init of its own that would outlive it.
		plane.Background(t, plane.Program(t, "gpu-agent-mps"), "supervise", "--driver-root", at("driver"), "--state-dir", at("state"))
	}
	if slices.ContainsFunc(o.Entries, func(e string) bool { return strings.Contains(e, "api: dra") }) {
		n.register(t, at("kubelet", "plugins_registry", Driver+"-reg.sock"))
	}
	return n
}

// underMPS reports whether a GPU of the node is laid out for MPS.
func (n *Node) underMPS() bool {
	return slices.ContainsFunc(n.Entries, func(e string) bool { return strings.Contains(e, "mps") })
}

// Says tells the API server that the node is ready, and what it has besides these devices.
func (n *Node) Says(t testing.TB, devices map[string]int) error {
	room := map[string]any{"cpu": "64", "memory": "64Gi", "pods": "500"}
	for name, count := range devices {
		room[name] = fmt.Sprint(count)
	}
	return n.server.Do(t, nil, http.MethodPatch, n.path(), plane.Strategic, map[string]any{"status": map[string]any{"capacity": room, "allocatable": room,
		"conditions": []any{map[string]any{"type": "Ready", "status": "True"}}, "nodeInfo": n.info()}}, nil)
}

func (n *Node) path() string { return "/api/v1/nodes/" + n.Name + "/status" }

// info is what the API server wants of a Node's nodeInfo as a whole.
func (n *Node) info() map[string]any {
	if n.Kubelet == "" {
		return nil
	}
	out := map[string]any{"kubeletVersion": n.Kubelet}
	for _, name := range []string{"architecture", "bootID", "containerRuntimeVersion", "kernelVersion", "kubeProxyVersion", "machineID", "operatingSystem", "osImage", "systemUUID"} {
		out[name] = ""
	}
	return out
}

// Partition writes the node's partition file, at one stroke.
func (n *Node) Partition(entries []string) error {
	text := "version: v1\npartitions:\n  default:\n"
	for _, e := range entries {
		text += "    - " + e + "\n"
	}
	if err := os.WriteFile(n.config+".new", []byte(text), 0o644); err != nil {
		return err
	}
	return os.Rename(n.config+".new", n.config)
}

// startDriver serves the node's GPUs, in the MIG mode that their entries want: a change of
// it is not what is tested.
func (n *Node) startDriver(t *testing.T, dir string) {
	t.Helper()
	// A new instance takes two of these and stands within 100 ms.
	spec := emulator.Spec{Model: n.Model, Count: n.GPUs, Seed: n.Name, MIG: emulator.MIGSpec{CreateSeconds: 0.05, DestroySeconds: 0.05, ModeSeconds: 0.2}}
	for i, e := range n.Entries {
		if strings.Contains(e, "mode: mig") {
			spec.GPUs = append(spec.GPUs, emulator.GPUSpec{Index: i, MIG: true})
		}
	}
	built, err := driverlib.Cached(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if n.world, err = emulator.New(spec); err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(dir, "driver")
	devices, err := os.ReadFile("/proc/devices")
	if err == nil {
		err = errors.Join(install.Driver(root, built, n.world), install.Nodes(filepath.Join(root, "dev"), n.world), install.Kernel(dir, string(devices), n.world),
			install.Machine{Driver: root, Dev: filepath.Join(root, "dev"), Kernel: dir}.Save())
	}
	if err == nil && n.underMPS() {
		programs := filepath.Join(root, install.Programs)
		err = errors.Join(mps.Lay(programs, n.world.State().Driver), mps.Until(programs, os.Getpid()))
	}
	if err != nil {
		t.Fatal(err)
	}
	l, err := daemon.Listen(filepath.Join(root, install.Socket))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- (&daemon.Server{World: n.world, Driver: root}).Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// register does what a kubelet does with a driver's socket.
func (n *Node) register(t *testing.T, socket string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for {
		if _, err := os.Stat(socket); err == nil {
			break
		}
		select {
		case <-ctx.Done():
			t.Fatalf("node %s: the agent serves no %s", n.Name, socket)
		case <-time.After(50 * time.Millisecond):
		}
	}
	var err error
	if n.dra, err = fakes.Dial(ctx, socket); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.dra.Close() })
	client := registration.NewRegistrationClient(n.dra)
	info, err := client.GetInfo(ctx, &registration.InfoRequest{})
	if err != nil || info.Name != Driver {
		t.Fatalf("node %s: the driver says it is %v, %v", n.Name, info, err)
	}
	if _, err := client.NotifyRegistrationStatus(ctx, &registration.RegistrationStatus{PluginRegistered: true}); err != nil {
		t.Fatal(err)
	}
}

// Prepare has a pod's claim prepared and its container run.
func (n *Node) Prepare(ctx context.Context, p fakes.Pod, claim *drapb.Claim) error {
	n.kubelet.Bind(p, "main")
	ctx, cancel := context.WithTimeout(ctx, 45*time.Second) // the kubelet's
	defer cancel()
	answer, err := drapb.NewDRAPluginClient(n.dra).NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	if err != nil {
		return err
	}
	of := answer.Claims[claim.Uid]
	if of.GetError() != "" || len(of.GetDevices()) == 0 {
		return fmt.Errorf("%d devices: %s", len(of.GetDevices()), of.GetError())
	}
	var names []string
	for _, d := range of.Devices {
		names = append(names, d.CdiDeviceIds...)
	}
	n.runtime.SetDevices(p.UID+"/main", names...)
	n.run(p, nil)
	return nil
}

// End ends a pod's container and gives its claim back, where it has one.
func (n *Node) End(ctx context.Context, p fakes.Pod, claim *drapb.Claim) error {
	n.stop(p)
	if claim == nil {
		return nil
	}
	answer, err := drapb.NewDRAPluginClient(n.dra).NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	if err == nil && answer.Claims[claim.Uid].GetError() != "" {
		err = errors.New(answer.Claims[claim.Uid].Error)
	}
	return err
}

// Admit does with a pod what a kubelet does with one that asks device plugins. An error is
// final for the pod.
func (n *Node) Admit(ctx context.Context, p fakes.Pod, want map[string]int) error {
	n.admitting.Lock()
	defer n.admitting.Unlock()
	for _, resource := range slices.Sorted(maps.Keys(want)) {
		if err := n.kubelet.Admit(ctx, p, []string{"main"}, resource, want[resource]); err != nil {
			return err
		}
	}
	given := map[string]string{}
	for _, a := range n.kubelet.Allocations() {
		if a.Pod != p {
			continue
		}
		maps.Copy(given, a.Answer.Annotations)
		for err := n.kubelet.PreStart(ctx, a); err != nil; err = n.kubelet.PreStart(ctx, a) {
			select {
			case <-ctx.Done():
				return err
			case <-time.After(100 * time.Millisecond): // the kubelet's back-off is longer
			}
		}
	}
	n.run(p, given)
	return nil
}

// run makes a pod's container, with these annotations, and starts it.
func (n *Node) run(p fakes.Pod, annotations map[string]string) {
	n.runtime.Put(p, &cri.Container{Id: p.UID + "/main", Metadata: &cri.ContainerMetadata{Name: "main"}, State: cri.ContainerState_CONTAINER_RUNNING, Annotations: annotations},
		cri.ContainerEventType_CONTAINER_CREATED_EVENT, cri.ContainerEventType_CONTAINER_STARTED_EVENT)
}

// stop ends a pod's container.
func (n *Node) stop(p fakes.Pod) {
	n.runtime.Remove(p.UID, cri.ContainerEventType_CONTAINER_STOPPED_EVENT, cri.ContainerEventType_CONTAINER_DELETED_EVENT)
	n.kubelet.Finish(p.UID)
}

// Status is what the kubelet says in the status of a pod that it has admitted and that runs:
// which devices it has.
func (n *Node) Status(p fakes.Pod) map[string]any {
	type object = map[string]any
	var all []any
	for _, a := range n.kubelet.Allocations() {
		if a.Pod != p {
			continue
		}
		var has []any
		for _, id := range a.IDs {
			has = append(has, object{"resourceID": id, "health": "Healthy"})
		}
		all = append(all, object{"name": a.Resource, "resources": has})
	}
	return object{"phase": "Running", "containerStatuses": []any{object{"name": "main", "image": "none", "imageID": "", "ready": true, "started": true, "restartCount": 0,
		"state": object{"running": object{"startedAt": time.Now().UTC().Format(time.RFC3339)}}, "allocatedResourcesStatus": all}}}
}

// Sync writes once what a kubelet writes of its devices with each status: what differs from
// what it was told of the Node last. A resource without a plugin has a capacity, and nothing
// of it can be had. It returns whether it wrote anything.
func (n *Node) Sync(t testing.TB) (wrote bool, err error) {
	var is core.Node
	if err := n.server.Do(t, nil, http.MethodGet, n.path(), "", nil, &is); err != nil {
		return false, err
	}
	capacity, allocatable := map[string]any{}, map[string]any{}
	differs := func(list core.ResourceList, name string, want int, in map[string]any) {
		if now, ok := list[core.ResourceName(name)]; !ok || now.Value() != int64(want) {
			in[name], wrote = fmt.Sprint(want), true
		}
	}
	endpoints, _ := n.kubelet.Endpoints()
	for name, e := range endpoints {
		can := 0
		if e.Serves() {
			can = len(e.Healthy())
		}
		differs(is.Status.Capacity, name, len(e.Devices), capacity)
		differs(is.Status.Allocatable, name, can, allocatable)
	}
	if !wrote {
		return false, nil
	}
	return true, n.server.Do(t, nil, http.MethodPatch, n.path(), plane.Strategic, map[string]any{"status": map[string]any{"capacity": capacity, "allocatable": allocatable}}, nil)
}

// PID is the agent's process.
func (n *Node) PID() int { return n.pid }

// Available are the devices of a resource that the kubelet could give out now.
func (n *Node) Available(resource string) []string { return n.kubelet.Available(resource) }

// Offered is how many devices of each resource the node's device plugins offer.
func (n *Node) Offered() map[string]int {
	out := map[string]int{}
	endpoints, _ := n.kubelet.Endpoints()
	for resource, e := range endpoints {
		if e.Serves() && len(e.Healthy()) > 0 {
			out[resource] = len(e.Healthy())
		}
	}
	return out
}

// GPU is a GPU as the hardware is, by its UUID.
func (n *Node) GPU(uuid string) (emulator.GPUState, bool) {
	for _, g := range n.world.State().GPUs {
		if g.UUID == uuid {
			return g, true
		}
	}
	return emulator.GPUState{}, false
}
