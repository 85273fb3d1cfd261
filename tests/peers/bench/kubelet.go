// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"example.com/gpu-agent/tests/fakes"
)

// agentPod is the pod that the agent is told it runs in. The agent believes a
// kubelet's account of holders once that pod is in it.
const agentPodNamespace, agentPodName = "gpu-agent", "gpu-agent-bench"

// All other pods are in this namespace, and have this one container.
const podNamespace, containerName = "default", "main"

// kubelet is the kubelet's side of the device plugin API and of PodResources,
// in a directory, with a container runtime. It does what kubelet 1.36 does, in
// its order: a registration is answered after the plugin has been dialled; then
// its list is opened. Its checkpoint is written at each list and when a pod has
// been given its devices, not when a pod ends.
type kubelet struct {
	api.UnimplementedRegistrationServer
	podresources.UnimplementedPodResourcesListerServer

	dir     string
	servers []*grpc.Server // of the kubelet; the runtime's is not among them
	runtime *fakes.Runtime

	mu      sync.Mutex
	changed chan struct{}        // guarded by mu; closed and replaced at every change
	plugins map[string]*endpoint // guarded by mu; by resource
	pods    map[string]*pod      // guarded by mu; by name, which is its UID too
	serial  int                  // guarded by mu; of pods
	broken  error                // guarded by mu; why there is no checkpoint
	ended   sync.WaitGroup       // servers
}

// endpoint is a plugin that has registered.
type endpoint struct {
	resource string
	client   api.DevicePluginClient
	conn     *grpc.ClientConn
	options  *api.DevicePluginOptions

	registered time.Time
	// Guarded by the kubelet's mu:
	listed  time.Time // first list
	devices []*api.Device
	bytes   int // of the newest list
	lists   int
	at      time.Time // of the newest list
	gone    error     // why the list's stream ended
}

// pod is a running pod of one container with devices of one resource.
type pod struct {
	name     string
	resource string
	ids      []string
	answer   *api.ContainerAllocateResponse
}

// startKubelet serves in dir, as the real one does in /var/lib/kubelet, and the
// runtime at its endpoint.
func startKubelet(dir string) (*kubelet, error) {
	k := &kubelet{dir: dir, changed: make(chan struct{}), plugins: map[string]*endpoint{}, pods: map[string]*pod{}}
	var err error
	if k.runtime, err = fakes.StartRuntime(k.socket(), fakes.Pod{UID: agentPodName, Namespace: agentPodNamespace, Name: agentPodName}); err != nil {
		return nil, err
	}
	if _, err := k.begin(); err != nil {
		k.runtime.Stop()
		return nil, err
	}
	return k, nil
}

// begin opens the kubelet's sockets, and says when plugins could see the one
// that they wait for.
func (k *kubelet) begin() (time.Time, error) {
	plugins, lister := grpc.NewServer(), grpc.NewServer()
	k.servers = []*grpc.Server{plugins, lister}
	api.RegisterRegistrationServer(plugins, k)
	podresources.RegisterPodResourcesListerServer(lister, k)
	if err := fakes.Listen(lister, filepath.Join(k.dir, "pod-resources", "kubelet.sock"), &k.ended); err != nil {
		return time.Time{}, fmt.Errorf("start a kubelet: %w", err)
	}
	bound := time.Now()
	if err := fakes.Listen(plugins, filepath.Join(k.dir, "device-plugins", "kubelet.sock"), &k.ended); err != nil {
		return time.Time{}, fmt.Errorf("start a kubelet: %w", err)
	}
	return bound, nil
}

// end closes the kubelet's sockets and its streams to plugins.
func (k *kubelet) end() {
	for _, s := range k.servers {
		s.Stop()
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for resource, e := range k.plugins {
		_ = e.conn.Close()
		delete(k.plugins, resource)
	}
}

func (k *kubelet) stop() {
	k.end()
	k.runtime.Stop()
}

// restart is a kubelet that ends and begins anew: pods stay, plugins have to
// come again, and what they left in its directory goes, the checkpoint excepted.
func (k *kubelet) restart() (bound time.Time, err error) {
	k.end()
	dir := filepath.Join(k.dir, "device-plugins")
	files, err := os.ReadDir(dir)
	for _, f := range files {
		if f.Name() != checkpointFile {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, f.Name())))
		}
	}
	if err != nil {
		return bound, fmt.Errorf("restart a kubelet: %w", err)
	}
	return k.begin()
}

func (k *kubelet) changedLocked() {
	close(k.changed)
	k.changed = make(chan struct{})
}

// dialPlugin connects as the kubelet does: gRPC's defaults.
func dialPlugin(ctx context.Context, path string) (*grpc.ClientConn, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	conn, err := grpc.NewClient("passthrough:///"+path,
		grpc.WithAuthority("localhost"),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", addr)
		}))
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", path, err)
	}
	conn.Connect()
	for state := conn.GetState(); state.String() != "READY"; state = conn.GetState() {
		if !conn.WaitForStateChange(ctx, state) {
			_ = conn.Close()
			return nil, fmt.Errorf("dial %s: %w", path, ctx.Err())
		}
	}
	return conn, nil
}

// Register is the plugin's call.
func (k *kubelet) Register(ctx context.Context, r *api.RegisterRequest) (*api.Empty, error) {
	e := &endpoint{resource: r.ResourceName, options: r.Options, registered: time.Now()}
	if r.Version != api.Version {
		return nil, fmt.Errorf("register %s: version %q, want %q", r.ResourceName, r.Version, api.Version)
	}
	var err error
	if e.conn, err = dialPlugin(ctx, filepath.Join(k.dir, "device-plugins", r.Endpoint)); err != nil {
		return nil, err
	}
	e.client = api.NewDevicePluginClient(e.conn)
	k.mu.Lock()
	old := k.plugins[r.ResourceName]
	k.plugins[r.ResourceName] = e
	k.changedLocked()
	k.mu.Unlock()
	if old != nil {
		_ = old.conn.Close()
	}
	go k.follow(e)
	return &api.Empty{}, nil
}

func (k *kubelet) follow(e *endpoint) {
	stream, err := e.client.ListAndWatch(context.Background(), &api.Empty{})
	for err == nil {
		var list *api.ListAndWatchResponse
		if list, err = stream.Recv(); err == nil {
			now := time.Now()
			k.mu.Lock()
			if e.lists++; e.lists == 1 {
				e.listed = now
			}
			e.devices, e.bytes, e.at = list.Devices, proto.Size(list), now
			k.changedLocked()
			k.checkpointLocked()
			k.mu.Unlock()
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	e.gone = err
	k.changedLocked()
}

// forget drops resources and the pods that hold them, so that what is awaited
// next is of a program that is started next.
func (k *kubelet) forget(resources ...string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, resource := range resources {
		if e := k.plugins[resource]; e != nil {
			_ = e.conn.Close()
			delete(k.plugins, resource)
		}
	}
	for name, p := range k.pods {
		if slices.Contains(resources, p.resource) {
			delete(k.pods, name)
			k.runtime.Remove(name)
		}
	}
	k.checkpointLocked()
}

// forgetAll is forget of everything that there is.
func (k *kubelet) forgetAll() {
	k.mu.Lock()
	resources := slices.Collect(maps.Keys(k.plugins))
	for _, p := range k.pods {
		resources = append(resources, p.resource)
	}
	k.mu.Unlock()
	k.forget(resources...)
}

// await waits until a resource's newest list satisfies ok, and returns a copy
// of its endpoint at that moment.
func (k *kubelet) await(ctx context.Context, resource, what string, ok func(endpoint) bool) (endpoint, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		k.mu.Lock()
		var now endpoint
		if e := k.plugins[resource]; e != nil {
			now = *e
		}
		changed := k.changed
		k.mu.Unlock()
		if now.client != nil && now.lists > 0 && ok(now) {
			return now, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return now, fmt.Errorf("wait for %s of %s: %w; last seen: %d lists, %d devices, %d of them healthy (stream: %v)",
				what, resource, ctx.Err(), now.lists, len(now.devices), len(healthy(now.devices)), now.gone)
		}
	}
}

// settled waits until a resource's lists say the same for a while.
func (k *kubelet) settled(ctx context.Context, resource string) (last endpoint, err error) {
	const while = 200 * time.Millisecond
	var since time.Time
	err = await(ctx, "the lists of "+resource+" to come to rest", func() (bool, error) {
		k.mu.Lock()
		defer k.mu.Unlock()
		e := k.plugins[resource]
		if e == nil || e.lists == 0 {
			since = time.Time{}
			return false, fmt.Errorf("no plugin serves %s", resource)
		}
		if since.IsZero() || e.conn != last.conn || !slices.Equal(healthy(e.devices), healthy(last.devices)) {
			since = time.Now()
		}
		last = *e
		return time.Since(since) >= while, nil
	})
	return last, err
}

func healthy(devices []*api.Device) (ids []string) {
	for _, d := range devices {
		if d.Health == api.Healthy {
			ids = append(ids, d.ID)
		}
	}
	return ids
}

func unhealthy(devices []*api.Device) (ids []string) {
	for _, d := range devices {
		if d.Health != api.Healthy {
			ids = append(ids, d.ID)
		}
	}
	return ids
}

// free are the devices of a resource that may be given to a pod, in random
// order, as the kubelet takes them out of a set.
func (k *kubelet) free(e endpoint) []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	held := map[string]bool{}
	for _, p := range k.pods {
		if p.resource == e.resource {
			for _, id := range p.ids {
				held[id] = true
			}
		}
	}
	ids := slices.DeleteFunc(healthy(e.devices), func(id string) bool { return held[id] })
	rand.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	return ids
}

// makeRoom ends pods until at most so many devices of a resource are held.
func (k *kubelet) makeRoom(random *rand.Rand, resource string, most int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	var names []string
	held := 0
	for name, p := range k.pods {
		if p.resource == resource {
			names, held = append(names, name), held+len(p.ids)
		}
	}
	slices.Sort(names)
	for held > most {
		i := random.IntN(len(names))
		names[0], names[i] = names[i], names[0]
		held -= len(k.pods[names[0]].ids)
		k.endLocked(k.pods[names[0]])
		names = names[1:]
	}
}

// admit gives a pod its devices, which its container has from create on.
func (k *kubelet) admit(resource string, ids []string, answer *api.ContainerAllocateResponse) *pod {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.serial++
	p := &pod{name: fmt.Sprintf("pod-%d", k.serial), resource: resource, ids: ids, answer: answer}
	k.pods[p.name] = p
	k.runtime.Run(p.inRuntime())
	k.checkpointLocked()
	return p
}

const checkpointFile = "kubelet_internal_checkpoint"

// checkpointLocked writes what kubelet 1.36.3 writes
// (pkg/kubelet/cm/devicemanager/checkpoint), but for the sum, which is made from
// Go's description of a private type. Devices without a NUMA node are under -1.
func (k *kubelet) checkpointLocked() {
	type entry struct {
		PodUID, ContainerName, ResourceName string
		DeviceIDs                           map[int64][]string
		AllocResp                           []byte
	}
	var c struct {
		Data struct {
			PodDeviceEntries  []entry
			RegisteredDevices map[string][]string
		}
		Checksum uint64
	}
	c.Data.RegisteredDevices = map[string][]string{}
	for resource, e := range k.plugins {
		c.Data.RegisteredDevices[resource] = healthy(e.devices)
	}
	for name, p := range k.pods {
		answer, _ := proto.Marshal(p.answer) // it came in that form
		c.Data.PodDeviceEntries = append(c.Data.PodDeviceEntries,
			entry{name, containerName, p.resource, map[int64][]string{-1: p.ids}, answer})
	}
	data, err := json.Marshal(&c)
	path := filepath.Join(k.dir, "device-plugins", checkpointFile)
	if err == nil {
		err = os.WriteFile(path+".new", data, 0o600)
	}
	if err = cmp.Or(err, os.Rename(path+".new", path)); err != nil {
		k.broken = err
	}
}

// List is PodResources': who holds what, an entry for each device.
func (k *kubelet) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.broken != nil {
		return nil, k.broken
	}
	out := &podresources.ListPodResourcesResponse{PodResources: []*podresources.PodResources{{
		Namespace: agentPodNamespace, Name: agentPodName,
		Containers: []*podresources.ContainerResources{{Name: "gpu-agent"}},
	}}}
	for name, p := range k.pods {
		out.PodResources = append(out.PodResources, &podresources.PodResources{Namespace: podNamespace, Name: name,
			Containers: []*podresources.ContainerResources{{Name: containerName, Devices: each(p.resource, p.ids)}}})
	}
	return out, nil
}

// GetAllocatableResources is PodResources': what plugins offer.
func (k *kubelet) GetAllocatableResources(context.Context, *podresources.AllocatableResourcesRequest) (*podresources.AllocatableResourcesResponse, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := &podresources.AllocatableResourcesResponse{}
	for resource, e := range k.plugins {
		out.Devices = append(out.Devices, each(resource, healthy(e.devices))...)
	}
	return out, nil
}

func each(resource string, ids []string) []*podresources.ContainerDevices {
	out := make([]*podresources.ContainerDevices, len(ids))
	for i, id := range ids {
		out[i] = &podresources.ContainerDevices{ResourceName: resource, DeviceIds: []string{id}}
	}
	return out
}

func preferredRequest(available []string, n int) *api.PreferredAllocationRequest {
	return &api.PreferredAllocationRequest{ContainerRequests: []*api.ContainerPreferredAllocationRequest{
		{AvailableDeviceIDs: available, AllocationSize: int32(n)}}}
}

func allocateRequest(ids []string) *api.AllocateRequest {
	return &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: ids}}}
}

// gpuOf is the GPU that a device ID of either program is on.
func gpuOf(id string) string {
	gpu, _, _ := strings.Cut(id, "::")
	return gpu
}
