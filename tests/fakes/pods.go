// SPDX-License-Identifier: Apache-2.0

package fakes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// linger is half of how long a device must stay listed after it was last on
// offer: a kubelet whose Allocate is on the wire when its ID leaves ends.
const linger = 30 * time.Second

// ErrRefused is what a kubelet itself has against a pod, before it asks a plugin
// or whatever the plugin says.
var ErrRefused = errors.New("the kubelet refuses the pod")

// Allocation is what a container was given of a resource.
type Allocation struct {
	Pod                 Pod
	Container, Resource string
	IDs                 []string // sorted
	Answer              *api.ContainerAllocateResponse
}

type pod struct {
	Pod
	app   string // its last container, which PodResources has
	ended bool
}

// Admit gives a pod n devices of a resource, which its containers have one after
// the other; all but the last are init containers. An error is final for the pod:
// one of the plugin's, or ErrRefused.
func (k *Kubelet) Admit(ctx context.Context, p Pod, containers []string, resource string, n int) error {
	k.mu.Lock()
	k.pods[p.UID] = &pod{Pod: p, app: containers[len(containers)-1]}
	k.mu.Unlock()
	available, e, err := k.available(resource, n)
	if err == nil {
		var ids []string
		if ids, err = k.choose(ctx, e, available, n); err == nil {
			err = k.allocate(ctx, e, p, containers, ids)
		}
	}
	if err != nil {
		k.Finish(p.UID)
		return fmt.Errorf("%s fails for good (UnexpectedAdmissionError): %w", p.Name, err)
	}
	return nil
}

func (k *Kubelet) available(resource string, n int) ([]string, Endpoint, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	e := k.endpoints[resource]
	if e == nil {
		return nil, Endpoint{}, fmt.Errorf("%w: cannot allocate unregistered device %s", ErrRefused, resource)
	}
	if len(e.healthy()) == 0 {
		return nil, e.Endpoint, fmt.Errorf("%w: no healthy devices present; cannot allocate unhealthy devices %s", ErrRefused, resource)
	}
	available := k.availableLocked(resource)
	if len(available) < n {
		return nil, e.Endpoint, fmt.Errorf("%w: requested number of devices unavailable for %s: requested %d, available %d", ErrRefused, resource, n, len(available))
	}
	return available, e.Endpoint, nil
}

// choose takes what the plugin prefers, and where that is not enough whatever
// there is.
func (k *Kubelet) choose(ctx context.Context, e Endpoint, available []string, n int) ([]string, error) {
	if !e.Options.GetGetPreferredAllocationAvailable() {
		return available[:n], nil
	}
	answer, err := e.Client.GetPreferredAllocation(ctx, &api.PreferredAllocationRequest{
		ContainerRequests: []*api.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: available, AllocationSize: int32(n)}}})
	if err != nil {
		return nil, fmt.Errorf("device plugin GetPreferredAllocation rpc failed: %w", err)
	}
	chosen := map[string]bool{}
	if len(answer.ContainerResponses) > 0 {
		for _, id := range answer.ContainerResponses[0].DeviceIDs {
			if slices.Contains(available, id) && len(chosen) < n {
				chosen[id] = true
			}
		}
	}
	if len(chosen) < n || len(answer.ContainerResponses[0].DeviceIDs) != n {
		k.complain("asked which %d of %d devices it prefers, %s answers %v", n, len(available), e.Resource, answer)
	}
	for _, id := range available {
		if len(chosen) < n {
			chosen[id] = true
		}
	}
	return slices.Collect(maps.Keys(chosen)), nil // in random order
}

// allocate asks once for each container: an init container's devices go to the next
// one, without another question of preference.
func (k *Kubelet) allocate(ctx context.Context, e Endpoint, p Pod, containers, ids []string) error {
	for _, container := range containers {
		if e.Gone != nil {
			return fmt.Errorf("%w: endpoint %s has been stopped", ErrRefused, e.Resource)
		}
		answer, err := e.Client.Allocate(ctx, &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: ids}}})
		if err != nil {
			return err
		}
		if len(answer.ContainerResponses) == 0 {
			return fmt.Errorf("%w: no containers return in allocation response %v", ErrRefused, answer)
		}
		if err := k.Give(p, container, e.Resource, ids, answer.ContainerResponses[0]); err != nil {
			return err
		}
	}
	return nil
}

// Give notes what a pod's container was given, for callers that have asked the
// plugin themselves. The real kubelet ends if an ID is not listed by then.
func (k *Kubelet) Give(p Pod, container, resource string, ids []string, answer *api.ContainerAllocateResponse) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, id := range ids {
		if k.deviceLocked(resource, id) == nil {
			k.wrongLocked("%s left the list of %s while it was allocated, which ends the kubelet", id, resource)
		}
	}
	if k.pods[p.UID] == nil {
		k.pods[p.UID] = &pod{Pod: p, app: container}
	}
	k.given = append(k.given, Allocation{p, container, resource, slices.Sorted(slices.Values(ids)), answer})
	k.changedLocked()
	return k.checkpointLocked()
}

// PreStart is the call before each start of a container, to a plugin that wants it.
// IDs are in random order, and there are 30 s.
func (k *Kubelet) PreStart(ctx context.Context, a Allocation) error {
	k.mu.Lock()
	e := k.endpoints[a.Resource]
	if e == nil || e.Gone != nil {
		k.mu.Unlock()
		return fmt.Errorf("%w: endpoint not found or stopped: %s", ErrRefused, a.Resource)
	}
	client, options := e.Client, e.Options
	k.mu.Unlock()
	if !options.GetPreStartRequired() {
		return nil
	}
	ids := slices.Clone(a.IDs)
	rand.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	ctx, cancel := context.WithTimeout(ctx, api.KubeletPreStartContainerRPCTimeoutInSecs*time.Second)
	defer cancel()
	_, err := client.PreStartContainer(ctx, &api.PreStartContainerRequest{DevicesIds: ids})
	return err
}

// Allocations are what containers of pods that have not ended were given, in order.
func (k *Kubelet) Allocations() (out []Allocation) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, a := range k.given {
		if !k.pods[a.Pod.UID].ended {
			out = append(out, a)
		}
	}
	return out
}

// Bind notes a pod that asks no device plugin, whose last container is app.
func (k *Kubelet) Bind(p Pod, app string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pods[p.UID] = &pod{Pod: p, app: app}
	k.changedLocked()
}

// Finish notes that a pod has ended or was deleted by force. Its devices are not
// free before somebody asks.
func (k *Kubelet) Finish(uid string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if p := k.pods[uid]; p != nil {
		p.ended = true
		k.changedLocked()
	}
}

// freeLocked frees the devices of ended pods, without a word to the checkpoint.
func (k *Kubelet) freeLocked() {
	k.given = slices.DeleteFunc(k.given, func(a Allocation) bool { return k.pods[a.Pod.UID].ended })
	maps.DeleteFunc(k.pods, func(_ string, p *pod) bool { return p.ended })
}

// Available are a resource's healthy devices that nobody has, in random order.
func (k *Kubelet) Available(resource string) []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.availableLocked(resource)
}

func (k *Kubelet) availableLocked(resource string) []string {
	k.freeLocked()
	e := k.endpoints[resource]
	if e == nil {
		return nil
	}
	held := map[string]bool{}
	for _, a := range k.given {
		if a.Resource == resource {
			for _, id := range a.IDs {
				held[id] = true
			}
		}
	}
	ids := slices.DeleteFunc(e.healthy(), func(id string) bool { return held[id] })
	rand.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	return ids
}

// deviceLocked is nil for an ID that is not listed.
func (k *Kubelet) deviceLocked(resource, id string) *api.Device {
	if e := k.endpoints[resource]; e != nil {
		return e.byID[id]
	}
	return nil
}

// List is PodResources': who holds what, with an entry for each device. It frees
// what ended pods had, and leaves plain init containers out.
func (k *Kubelet) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.freeLocked()
	out := &podresources.ListPodResourcesResponse{}
	for _, uid := range slices.Sorted(maps.Keys(k.pods)) {
		p := k.pods[uid]
		c := &podresources.ContainerResources{Name: p.app}
		for _, a := range k.given {
			if a.Pod.UID == uid && a.Container == p.app {
				c.Devices = append(c.Devices, each(a.Resource, a.IDs)...)
			}
		}
		out.PodResources = append(out.PodResources, &podresources.PodResources{Namespace: p.Namespace, Name: p.Name,
			Containers: []*podresources.ContainerResources{c}})
	}
	return out, nil
}

// GetAllocatableResources is PodResources': all healthy devices.
func (k *Kubelet) GetAllocatableResources(context.Context, *podresources.AllocatableResourcesRequest) (*podresources.AllocatableResourcesResponse, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	out := &podresources.AllocatableResourcesResponse{}
	for _, resource := range slices.Sorted(maps.Keys(k.endpoints)) {
		out.Devices = append(out.Devices, each(resource, k.endpoints[resource].healthy())...)
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

// Outlive leaves entries in the checkpoint that never go: of pods that ended after
// the plugin that served them had gone.
func (k *Kubelet) Outlive(entries ...Allocation) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.leftovers = append(k.leftovers, entries...)
	return k.checkpointLocked()
}

// checkpointLocked writes what kubelet 1.36.3 writes
// (pkg/kubelet/cm/devicemanager/checkpoint), but for the sum, which is made from
// Go's description of a private type. Devices without a NUMA node are under -1.
func (k *Kubelet) checkpointLocked() error {
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
	for resource, e := range k.endpoints {
		c.Data.RegisteredDevices[resource] = e.healthy()
	}
	for _, a := range slices.Concat(k.leftovers, k.given) {
		ids := map[int64][]string{}
		for _, id := range a.IDs {
			nodes := k.deviceLocked(a.Resource, id).GetTopology().GetNodes()
			for _, n := range nodes {
				ids[n.ID] = append(ids[n.ID], id)
			}
			if len(nodes) == 0 {
				ids[-1] = append(ids[-1], id)
			}
		}
		answer, err := proto.Marshal(a.Answer)
		if err != nil {
			return fmt.Errorf("encode an answer to Allocate: %w", err)
		}
		c.Data.PodDeviceEntries = append(c.Data.PodDeviceEntries, entry{a.Pod.UID, a.Container, a.Resource, ids, answer})
	}
	data, err := json.Marshal(&c)
	path := filepath.Join(k.o.Dir, pluginDir, checkpointFile)
	temporary := filepath.Join(filepath.Dir(path), "."+checkpointFile)
	if err == nil {
		err = os.WriteFile(temporary, data, 0o600)
	}
	if err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		return fmt.Errorf("write the kubelet's checkpoint: %w", err)
	}
	return nil
}

// judgeLocked notes what no list may say.
func (k *Kubelet) judgeLocked(e *endpoint) {
	for _, a := range k.given {
		for _, id := range a.IDs {
			switch d := e.byID[id]; {
			case a.Resource != e.Resource:
			case d == nil:
				k.wrongLocked("the list of %s lacks %s, which %s holds", e.Resource, id, a.Pod.Name)
			case d.Health != api.Healthy && !k.pods[a.Pod.UID].ended:
				k.wrongLocked("%s of %s is listed Unhealthy while %s holds it", id, e.Resource, a.Pod.Name)
			}
		}
	}
	now, offered := time.Now(), k.offered[e.Resource]
	if offered == nil {
		offered = map[string]time.Time{}
		k.offered[e.Resource] = offered
	}
	for _, id := range slices.Sorted(maps.Keys(offered)) {
		d := e.byID[id]
		if d == nil && !k.forgets && now.Sub(offered[id]) < linger {
			k.wrongLocked("%s was on offer as %s a moment ago and is not listed any more", id, e.Resource)
		}
		if d.GetHealth() != api.Healthy && now.Sub(offered[id]) >= linger {
			delete(offered, id)
		}
	}
	for _, id := range e.Healthy() {
		offered[id] = now
	}
}

// Forgive lets an agent whose memory was damaged forget devices that nobody holds.
func (k *Kubelet) Forgive() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.forgets = true
}

func (k *Kubelet) complain(format string, args ...any) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.wrongLocked(format, args...)
}

func (k *Kubelet) wrongLocked(format string, args ...any) {
	if s := fmt.Sprintf(format, args...); !slices.Contains(k.wrong, s) {
		k.wrong = append(k.wrong, s)
	}
}

// Complaints are what was wrong since the last call: what the plugin should not
// have said, and a checkpoint that could not be written.
func (k *Kubelet) Complaints() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	wrong := k.wrong
	k.wrong = nil
	return wrong
}
