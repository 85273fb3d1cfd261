// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/fakes"
)

// The agent believes a kubelet's account of holders once its own pod is in it.
const agentNamespace, agentPod = "gpu-agent", "gpu-agent-test"

// linger is half of how long a device must stay listed after it was last on
// offer: a kubelet whose Allocate is on the wire when its ID leaves ends.
const linger = 30 * time.Second

// kubelet is the kubelet's device manager and PodResources, with kubelet
// 1.36's habits where an agent can notice them: a plugin is dialled while it
// registers; the checkpoint is written after each container's allocations and
// at each list, not when devices become free; those of ended pods become free
// when PodResources lists or somebody else is to get some, and not before; an
// init container's devices go to the app container without a question of
// preference; PodResources leaves out plain init containers. And where another
// plugin has gone before the pods that it served, their entries stay in the
// checkpoint.
type kubelet struct {
	api.UnimplementedRegistrationServer
	podresources.UnimplementedPodResourcesListerServer

	dir     string
	servers []*grpc.Server
	ended   sync.WaitGroup

	mu      sync.Mutex
	changed chan struct{} // closed and replaced at every change
	// Guarded by mu:
	plugins map[string]*endpoint // by resource
	pods    map[string]*pod      // by UID; those whose devices are not free yet
	entries []entry
	// stale are the checkpoint's entries of pods that ended long ago; they never go.
	stale []checkpointEntry
	// offered is when each ID of a resource was last listed Healthy.
	offered map[string]map[string]time.Time
	// forgets says that an agent whose memory was damaged may forget devices
	// that nobody holds.
	forgets bool
	wrong   []string
}

// endpoint is a plugin that has registered.
type endpoint struct {
	resource string
	conn     *grpc.ClientConn
	client   api.DevicePluginClient
	// Guarded by the kubelet's mu:
	health map[string]bool // by ID
	listed bool
	gone   bool
}

// entry is a container's devices of one resource, as the checkpoint has it.
type entry struct {
	pod       *pod
	container string
	resource  string
	ids       []string // sorted
	answer    *api.ContainerAllocateResponse
}

func (e *entry) key() string { return cdi.Key(e.resource, e.ids) }

// pod is one container with devices after another, the last of them the app
// container.
type pod struct {
	uid, namespace, name string
	containers           []string
	resource             string
	n                    int
	ended                bool // guarded by the kubelet's mu
}

func startKubelet(dir string) (*kubelet, error) {
	k := &kubelet{dir: dir, changed: make(chan struct{}), plugins: map[string]*endpoint{}, pods: map[string]*pod{},
		offered: map[string]map[string]time.Time{}}
	plugins, lister := grpc.NewServer(), grpc.NewServer()
	api.RegisterRegistrationServer(plugins, k)
	podresources.RegisterPodResourcesListerServer(lister, k)
	k.servers = []*grpc.Server{plugins, lister}
	for i, path := range []string{"device-plugins/kubelet.sock", "pod-resources/kubelet.sock"} {
		if err := fakes.Listen(k.servers[i], filepath.Join(dir, path), &k.ended); err != nil {
			return nil, fmt.Errorf("start a kubelet: %w", err)
		}
	}
	return k, nil
}

func (k *kubelet) stop() {
	for _, s := range k.servers {
		s.Stop()
	}
	k.mu.Lock()
	for _, e := range k.plugins {
		_ = e.conn.Close()
	}
	k.mu.Unlock()
	k.ended.Wait()
}

func (k *kubelet) changedLocked() {
	close(k.changed)
	k.changed = make(chan struct{})
}

// Register is a plugin's call.
func (k *kubelet) Register(ctx context.Context, r *api.RegisterRequest) (*api.Empty, error) {
	conn, err := grpc.NewClient("unix:"+filepath.Join(k.dir, "device-plugins", r.Endpoint),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	if err != nil {
		return nil, err
	}
	conn.Connect()
	for state := conn.GetState(); state != connectivity.Ready; state = conn.GetState() {
		if !conn.WaitForStateChange(ctx, state) {
			_ = conn.Close()
			return nil, fmt.Errorf("dial %s: %w", r.Endpoint, ctx.Err())
		}
	}
	e := &endpoint{resource: r.ResourceName, conn: conn, client: api.NewDevicePluginClient(conn)}
	k.mu.Lock()
	defer k.mu.Unlock()
	if old := k.plugins[e.resource]; old != nil {
		_ = old.conn.Close()
	}
	k.plugins[e.resource] = e
	k.changedLocked()
	k.ended.Go(func() { k.follow(e) })
	return &api.Empty{}, nil
}

func (k *kubelet) follow(e *endpoint) {
	stream, err := e.client.ListAndWatch(context.Background(), &api.Empty{})
	for err == nil {
		var list *api.ListAndWatchResponse
		if list, err = stream.Recv(); err == nil {
			k.hear(e, list.Devices)
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	e.gone = true
	k.changedLocked()
}

// hear takes a plugin's list, and notes what no list may say.
func (k *kubelet) hear(e *endpoint, devices []*api.Device) {
	k.mu.Lock()
	defer k.mu.Unlock()
	e.health, e.listed = map[string]bool{}, true
	for _, d := range devices {
		e.health[d.ID] = d.Health == api.Healthy
	}
	for i := range k.entries {
		h := &k.entries[i]
		if h.resource != e.resource {
			continue
		}
		for _, id := range h.ids {
			if healthy, listed := e.health[id]; !listed {
				k.wrongLocked("the list of %s lacks %s, which %s holds", e.resource, id, h.pod.name)
			} else if !healthy && !h.pod.ended {
				k.wrongLocked("%s of %s is listed Unhealthy while %s holds it", id, e.resource, h.pod.name)
			}
		}
	}
	now, offered := time.Now(), k.offered[e.resource]
	if offered == nil {
		offered = map[string]time.Time{}
		k.offered[e.resource] = offered
	}
	for _, id := range slices.Sorted(maps.Keys(offered)) {
		if _, listed := e.health[id]; !listed && !k.forgets && now.Sub(offered[id]) < linger {
			k.wrongLocked("%s was on offer as %s a moment ago and is not listed any more", id, e.resource)
		}
		if !e.health[id] && now.Sub(offered[id]) >= linger {
			delete(offered, id)
		}
	}
	for id, healthy := range e.health {
		if healthy {
			offered[id] = now
		}
	}
	k.writeLocked()
	k.changedLocked()
}

func (k *kubelet) wrongLocked(format string, args ...any) {
	if s := fmt.Sprintf(format, args...); !slices.Contains(k.wrong, s) {
		k.wrong = append(k.wrong, s)
	}
}

// await waits until ok, which is called with mu, says nil.
func (k *kubelet) await(ctx context.Context, ok func() error) error {
	for {
		k.mu.Lock()
		err, changed := ok(), k.changed
		k.mu.Unlock()
		if err == nil {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		}
	}
}

// plugin waits for a resource's plugin to have sent its list.
func (k *kubelet) plugin(ctx context.Context, resource string) (e *endpoint, err error) {
	err = k.await(ctx, func() error {
		if e = k.plugins[resource]; e == nil || e.gone || !e.listed {
			return fmt.Errorf("no plugin serves %s", resource)
		}
		return nil
	})
	return e, err
}

// admit gives a pod its devices, once the node has enough for the scheduler to
// send it here. An error is final for the pod, which then counts as ended.
func (k *kubelet) admit(ctx context.Context, p *pod) error {
	var free []string
	var e *endpoint
	err := k.await(ctx, func() error {
		k.dropLocked()
		if e = k.plugins[p.resource]; e == nil || e.gone || !e.listed {
			return fmt.Errorf("no plugin serves %s", p.resource)
		}
		if free = k.freeLocked(e); len(free) < p.n {
			return fmt.Errorf("%d devices of %s are free, and %d wanted", len(free), p.resource, p.n)
		}
		return nil
	})
	if err != nil {
		return err
	}
	k.mu.Lock()
	k.pods[p.uid] = p
	k.mu.Unlock()
	ids, err := k.prefer(ctx, e, free, p.n)
	for i := 0; i < len(p.containers) && err == nil; i++ {
		err = k.allocate(ctx, e, p, p.containers[i], ids)
	}
	if err != nil {
		k.finish(p)
		k.leave(ctx, e, err)
		return fmt.Errorf("%s fails for good (UnexpectedAdmissionError): %w", p.name, err)
	}
	return nil
}

// leave waits, after a call that failed because the plugin's process has ended,
// until that is known. An error of another kind is the plugin's own word.
func (k *kubelet) leave(ctx context.Context, e *endpoint, err error) {
	switch status.Code(err) {
	case codes.Unavailable, codes.Canceled:
		_ = k.await(ctx, func() error { // the caller sees the context's end itself
			if !e.gone {
				return errors.New("the plugin's stream is open")
			}
			return nil
		})
	default:
		k.mu.Lock()
		defer k.mu.Unlock()
		k.wrongLocked("a call of the kubelet's failed: %v", err)
	}
}

func (k *kubelet) prefer(ctx context.Context, e *endpoint, free []string, n int) ([]string, error) {
	answer, err := e.client.GetPreferredAllocation(ctx, &api.PreferredAllocationRequest{
		ContainerRequests: []*api.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: free, AllocationSize: int32(n)}}})
	if err != nil {
		return nil, err
	}
	if len(answer.ContainerResponses) != 1 || len(answer.ContainerResponses[0].DeviceIDs) != n {
		return nil, fmt.Errorf("asked for %d devices it prefers %v", n, answer)
	}
	return answer.ContainerResponses[0].DeviceIDs, nil
}

func (k *kubelet) allocate(ctx context.Context, e *endpoint, p *pod, container string, ids []string) error {
	answer, err := e.client.Allocate(ctx, &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: ids}}})
	if err != nil {
		return err
	}
	if len(answer.ContainerResponses) != 1 || len(answer.ContainerResponses[0].CdiDevices) == 0 {
		return fmt.Errorf("Allocate gives nothing: %v", answer)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.entries = append(k.entries, entry{p, container, e.resource, slices.Sorted(slices.Values(ids)), answer.ContainerResponses[0]})
	k.writeLocked()
	k.changedLocked()
	return nil
}

// prepare is the call before each start of a container.
func (k *kubelet) prepare(ctx context.Context, e *entry) error {
	p, err := k.plugin(ctx, e.resource)
	if err != nil {
		return err
	}
	ids := slices.Clone(e.ids)
	rand.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	call, cancel := context.WithTimeout(ctx, api.KubeletPreStartContainerRPCTimeoutInSecs*time.Second)
	defer cancel()
	if _, err = p.client.PreStartContainer(call, &api.PreStartContainerRequest{DevicesIds: ids}); err != nil {
		k.leave(ctx, p, err)
	}
	return err
}

// entryOf is what a container was given.
func (k *kubelet) entryOf(p *pod, container string) *entry {
	k.mu.Lock()
	defer k.mu.Unlock()
	for i := range k.entries {
		if e := &k.entries[i]; e.pod == p && e.container == container {
			copied := *e
			return &copied
		}
	}
	return nil
}

// finish notes that a pod's containers have ended for good. Its devices are not
// free before somebody asks.
func (k *kubelet) finish(p *pod) {
	k.mu.Lock()
	defer k.mu.Unlock()
	p.ended = true
	k.changedLocked()
}

// dropLocked frees the devices of ended pods, without a word to the checkpoint.
func (k *kubelet) dropLocked() {
	k.entries = slices.DeleteFunc(k.entries, func(e entry) bool { return e.pod.ended })
	maps.DeleteFunc(k.pods, func(_ string, p *pod) bool { return p.ended })
}

// freeLocked are the healthy devices that nobody has, in random order.
func (k *kubelet) freeLocked(e *endpoint) (free []string) {
	held := k.heldLocked(e.resource)
	for id, healthy := range e.health { // a map's order is random
		if healthy && !held[id] {
			free = append(free, id)
		}
	}
	return free
}

func (k *kubelet) heldLocked(resource string) map[string]bool {
	held := map[string]bool{}
	for i := range k.entries {
		if k.entries[i].resource == resource {
			for _, id := range k.entries[i].ids {
				held[id] = true
			}
		}
	}
	return held
}

// List is PodResources': who holds what.
func (k *kubelet) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.dropLocked()
	out := &podresources.ListPodResourcesResponse{PodResources: []*podresources.PodResources{{
		Namespace: agentNamespace, Name: agentPod, Containers: []*podresources.ContainerResources{{Name: "gpu-agent"}}}}}
	for _, uid := range slices.Sorted(maps.Keys(k.pods)) {
		p := k.pods[uid]
		app := p.containers[len(p.containers)-1]
		c := &podresources.ContainerResources{Name: app}
		for i := range k.entries {
			if e := &k.entries[i]; e.pod == p && e.container == app {
				c.Devices = append(c.Devices, &podresources.ContainerDevices{ResourceName: e.resource, DeviceIds: e.ids})
			}
		}
		out.PodResources = append(out.PodResources, &podresources.PodResources{Namespace: p.namespace, Name: p.name,
			Containers: []*podresources.ContainerResources{c}})
	}
	return out, nil
}

// GetAllocatableResources is PodResources': all healthy devices.
func (k *kubelet) GetAllocatableResources(context.Context, *podresources.AllocatableResourcesRequest) (*podresources.AllocatableResourcesResponse, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := &podresources.AllocatableResourcesResponse{}
	for _, resource := range slices.Sorted(maps.Keys(k.plugins)) {
		e := k.plugins[resource]
		for _, id := range slices.Sorted(maps.Keys(e.health)) {
			if e.health[id] && !e.gone {
				out.Devices = append(out.Devices, &podresources.ContainerDevices{ResourceName: resource, DeviceIds: []string{id}})
			}
		}
	}
	return out, nil
}

// outlive leaves an entry for each GPU in the checkpoint, of a pod that another
// plugin has given it to and that is no more. It names GPUs as NVIDIA's plugin, its
// replicas and HAMi's do.
func (k *kubelet) outlive(gpus []emulator.GPUState) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for i := range gpus {
		id := gpus[i].UUID
		k.stale = append(k.stale, checkpointEntry{fmt.Sprintf("00000000-0000-4000-9000-%012d", i), "main", "nvidia.com/gpu",
			map[int64][]string{-1: {id + []string{"", "::1", "-0"}[i%3]}}, nil})
	}
	k.writeLocked()
}

// The checkpoint, as kubelet 1.36.3 has it in pkg/kubelet/cm/devicemanager/checkpoint.
// Devices without NUMA nodes stand under -1. The sum is the kubelet's own
// business: it is made from Go's description of a private type.
type (
	checkpointEntry struct {
		PodUID, ContainerName, ResourceName string
		DeviceIDs                           map[int64][]string
		AllocResp                           []byte
	}
	checkpoint struct {
		Data struct {
			PodDeviceEntries  []checkpointEntry
			RegisteredDevices map[string][]string
		}
		Checksum uint64
	}
)

func (k *kubelet) writeLocked() {
	var c checkpoint
	c.Data.RegisteredDevices = map[string][]string{}
	c.Data.PodDeviceEntries = slices.Clone(k.stale)
	for resource, e := range k.plugins {
		c.Data.RegisteredDevices[resource] = slices.Sorted(maps.Keys(e.health))
	}
	for i := range k.entries {
		e := &k.entries[i]
		answer, err := proto.Marshal(e.answer)
		if err != nil {
			k.wrongLocked("encode an answer to Allocate: %v", err)
		}
		c.Data.PodDeviceEntries = append(c.Data.PodDeviceEntries,
			checkpointEntry{e.pod.uid, e.container, e.resource, map[int64][]string{-1: e.ids}, answer})
	}
	data, err := json.Marshal(&c)
	path := filepath.Join(k.dir, "device-plugins", "kubelet_internal_checkpoint")
	if err == nil {
		err = os.WriteFile(filepath.Join(filepath.Dir(path), ".kubelet_internal_checkpoint"), data, 0o600)
	}
	if err = cmp.Or(err, os.Rename(filepath.Join(filepath.Dir(path), ".kubelet_internal_checkpoint"), path)); err != nil {
		k.wrongLocked("write the kubelet's checkpoint: %v", err)
	}
}

// complaints returns what was wrong since the last call.
func (k *kubelet) complaints() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	wrong := k.wrong
	k.wrong = nil
	return wrong
}
