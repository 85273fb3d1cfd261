// SPDX-License-Identifier: Apache-2.0

package crowd

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
	"testing"
	"time"

	"google.golang.org/grpc"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/daemon"
	"example.com/gpu-agent/tests/emulator/install"
	driverlib "example.com/gpu-agent/tests/emulator/lib"
	"example.com/gpu-agent/tests/fakes"
	"example.com/gpu-agent/tests/plane"
)

const (
	driver = "gpus.example.com"
	model  = "A100-SXM4-80GB"
	// gpus are those of a node.
	gpus = 2
	// units is how many GiB of a GPU's memory can be had.
	units = 79
)

// hollow is a node without a kubelet: an agent, its GPUs, and what answers it.
type hollow struct {
	name    string
	config  string // the path of its partitions
	world   *emulator.World
	kubelet *fakes.Kubelet
	runtime *fakes.Runtime
	// dra is the connection to the driver that the agent serves.
	dra *grpc.ClientConn
}

// startNode starts a node whose GPUs are laid out as entries of a partition say.
func startNode(t *testing.T, s *plane.Server, agent, name string, entries []string) *hollow {
	t.Helper()
	dir, err := os.MkdirTemp("", "crowd-")
	if err != nil {
		t.Fatal(err)
	}
	n := &hollow{name: name}
	at := func(parts ...string) string { return filepath.Join(append([]string{dir}, parts...)...) }
	// What is cleaned up last stands first.
	t.Cleanup(func() {
		if err := errors.Join(lib.Unmount(at("state")), os.RemoveAll(dir)); err != nil {
			t.Error(err)
		}
	})
	n.startDriver(t, dir, entries)
	n.config = at("partitions.yaml")
	pod := fakes.Pod{UID: "agent", Namespace: "gpu-agent", Name: "gpu-agent-" + name}
	err = errors.Join(os.Mkdir(at("cdi"), 0o755), os.Mkdir(at("state"), 0o755), os.MkdirAll(at("kubelet", "plugins_registry"), 0o755),
		os.MkdirAll(at("proc", "sys/kernel/random"), 0o755), os.WriteFile(at("proc", "sys/kernel/random/boot_id"), []byte("8a6b0a3e-0f5c-4c9d-9d4e-3a1f0c0ffee0\n"), 0o644),
		n.partition(entries))
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

	create(t, s, "/api/v1/nodes", map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": name}})
	n.says(t, s, nil)
	plane.Background(t, agent, "run", "--driver-root", at("driver"), "--config", n.config, "--evict-after", "1", "--kubelet-dir", at("kubelet"), "--cdi-dir", at("cdi"),
		"--state-dir", at("state"), "--pod", pod.Namespace+"/"+pod.Name, "--http", "", "--runtime-endpoint", "unix://"+at("cri.sock"), "--proc-root", at("proc"),
		"--host-root", "/", "--kubeconfig", s.Kubeconfig(t, nil), "--node-name", name, "--node-labels", "none")
	if slices.ContainsFunc(entries, func(e string) bool { return strings.Contains(e, "api: dra") }) {
		n.register(t, at("kubelet", "plugins_registry", driver+"-reg.sock"))
	}
	return n
}

// says tells the API server what the node has, besides these devices.
func (n *hollow) says(t *testing.T, s *plane.Server, devices map[string]int) {
	t.Helper()
	room := map[string]any{"cpu": "64", "memory": "64Gi", "pods": "500"}
	for name, count := range devices {
		room[name] = fmt.Sprint(count)
	}
	if err := s.Do(t, nil, http.MethodPatch, "/api/v1/nodes/"+n.name+"/status", plane.Strategic, map[string]any{"status": map[string]any{"capacity": room, "allocatable": room,
		"conditions": []any{map[string]any{"type": "Ready", "status": "True"}}}}, nil); err != nil {
		t.Fatal(err)
	}
}

// partition writes the node's partition file, at one stroke.
func (n *hollow) partition(entries []string) error {
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
func (n *hollow) startDriver(t *testing.T, dir string, entries []string) {
	t.Helper()
	// A new instance takes two of these and stands within 100 ms.
	spec := emulator.Spec{Model: model, Count: gpus, Seed: n.name, MIG: emulator.MIGSpec{CreateSeconds: 0.05, DestroySeconds: 0.05, ModeSeconds: 0.2}}
	for i, e := range entries {
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
func (n *hollow) register(t *testing.T, socket string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for {
		if _, err := os.Stat(socket); err == nil {
			break
		}
		select {
		case <-ctx.Done():
			t.Fatalf("node %s: the agent serves no %s", n.name, socket)
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
	if err != nil || info.Name != driver {
		t.Fatalf("node %s: the driver says it is %v, %v", n.name, info, err)
	}
	if _, err := client.NotifyRegistrationStatus(ctx, &registration.RegistrationStatus{PluginRegistered: true}); err != nil {
		t.Fatal(err)
	}
}

// start has a pod's claim prepared and its container run.
func (n *hollow) start(ctx context.Context, p fakes.Pod, claim *drapb.Claim) error {
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

// end ends a pod's container and gives its claim back, where it has one.
func (n *hollow) end(ctx context.Context, p fakes.Pod, claim *drapb.Claim) error {
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

// admit does with a pod what a kubelet does with one that asks device plugins. An error is
// final for the pod.
func (n *hollow) admit(ctx context.Context, p fakes.Pod, want map[string]int) error {
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
func (n *hollow) run(p fakes.Pod, annotations map[string]string) {
	n.runtime.Put(p, &cri.Container{Id: p.UID + "/main", Metadata: &cri.ContainerMetadata{Name: "main"}, State: cri.ContainerState_CONTAINER_RUNNING, Annotations: annotations},
		cri.ContainerEventType_CONTAINER_CREATED_EVENT, cri.ContainerEventType_CONTAINER_STARTED_EVENT)
}

// stop ends a pod's container.
func (n *hollow) stop(p fakes.Pod) {
	n.runtime.Remove(p.UID, cri.ContainerEventType_CONTAINER_STOPPED_EVENT, cri.ContainerEventType_CONTAINER_DELETED_EVENT)
	n.kubelet.Finish(p.UID)
}

// offered is how many devices of each resource the node's device plugins offer.
func (n *hollow) offered() map[string]int {
	out := map[string]int{}
	endpoints, _ := n.kubelet.Endpoints()
	for resource, e := range endpoints {
		if e.Serves() && len(e.Healthy()) > 0 {
			out[resource] = len(e.Healthy())
		}
	}
	return out
}

// gpu is a GPU as the hardware is, by its UUID.
func (n *hollow) gpu(uuid string) (emulator.GPUState, bool) {
	for _, g := range n.world.State().GPUs {
		if g.UUID == uuid {
			return g, true
		}
	}
	return emulator.GPUState{}, false
}

func create(t *testing.T, s *plane.Server, path string, object map[string]any) {
	t.Helper()
	if err := s.Do(t, nil, http.MethodPost, path, plane.JSON, object, nil); err != nil {
		t.Fatal(err)
	}
}
