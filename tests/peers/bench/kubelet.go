// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"example.com/gpu-agent/tests/fakes"
)

// agentPod is the pod that the agent is told it runs in. The agent believes a
// kubelet's account of holders once that pod is in it.
var agentPod = fakes.Pod{UID: "gpu-agent-bench", Namespace: "gpu-agent", Name: "gpu-agent-bench"}

// All other pods are in this namespace, and have this one container.
const podNamespace, containerName = "default", "main"

// kubelet is a kubelet in a directory, with its container runtime.
type kubelet struct {
	*fakes.Kubelet
	dir     string
	runtime *fakes.Runtime

	mu     sync.Mutex
	serial int // guarded by mu; of pods
}

// pod is a running pod of one container with devices of one resource.
type pod = fakes.Allocation

// startKubelet serves in dir, as the real one does in /var/lib/kubelet, and the
// runtime at its endpoint.
func startKubelet(dir string) (*kubelet, error) {
	k := &kubelet{dir: dir}
	var err error
	if k.runtime, err = fakes.StartRuntime(k.socket(), agentPod); err != nil {
		return nil, err
	}
	if k.Kubelet, err = fakes.StartKubelet(fakes.KubeletOptions{Dir: dir, Agent: agentPod}); err != nil {
		k.runtime.Stop()
		return nil, err
	}
	return k, nil
}

func (k *kubelet) stop() {
	k.Stop()
	k.runtime.Stop()
}

// restart is a kubelet that ends and begins anew.
func (k *kubelet) restart() (bound time.Time, err error) {
	k.Stop()
	err = k.Start()
	return k.Bound(), err
}

// forget drops resources, or all, and the pods that hold them, so that what is
// awaited next is of a program that is started next.
func (k *kubelet) forget(resources ...string) error {
	for _, p := range k.Allocations() {
		if len(resources) == 0 || slices.Contains(resources, p.Resource) {
			k.runtime.Remove(p.Pod.UID)
		}
	}
	return k.Forget(resources...)
}

// await waits until a resource's newest list satisfies ok, and returns its
// endpoint at that moment.
func (k *kubelet) await(ctx context.Context, resource, what string, ok func(fakes.Endpoint) bool) (now fakes.Endpoint, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err = k.Await(ctx, func(all map[string]fakes.Endpoint) error {
		now = all[resource]
		if now.Listed.IsZero() || !ok(now) {
			return fmt.Errorf("wait for %s of %s; last seen: %d lists, %d devices, %d of them healthy (stream: %v)",
				what, resource, now.Lists, len(now.Devices), len(now.Healthy()), now.Gone)
		}
		return nil
	})
	return now, errors.Join(err, complaints(k))
}

// complaints are the kubelet's own: it could not write its checkpoint.
func complaints(k *kubelet) error {
	if wrong := k.Complaints(); len(wrong) > 0 {
		return errors.New(strings.Join(wrong, "; "))
	}
	return nil
}

// settled waits until a resource's lists say the same for a while.
func (k *kubelet) settled(ctx context.Context, resource string) (last fakes.Endpoint, err error) {
	const while = 200 * time.Millisecond
	var since time.Time
	err = await(ctx, "the lists of "+resource+" to come to rest", func() (bool, error) {
		all, _ := k.Endpoints()
		e := all[resource]
		if e.Listed.IsZero() {
			since = time.Time{}
			return false, fmt.Errorf("no plugin serves %s", resource)
		}
		if since.IsZero() || e.Conn != last.Conn || !slices.Equal(e.Healthy(), last.Healthy()) {
			since = time.Now()
		}
		last = e
		return time.Since(since) >= while, nil
	})
	return last, err
}

// makeRoom ends pods until at most so many devices of a resource are held.
func (k *kubelet) makeRoom(random *rand.Rand, resource string, most int) {
	pods := slices.DeleteFunc(k.pods(), func(p pod) bool { return p.Resource != resource })
	held := 0
	for _, p := range pods {
		held += len(p.IDs)
	}
	for held > most {
		i := random.IntN(len(pods))
		pods[0], pods[i] = pods[i], pods[0]
		held -= len(pods[0].IDs)
		k.end(pods[0])
		pods = pods[1:]
	}
}

// pods are those that run, in the order of their names.
func (k *kubelet) pods() []pod {
	return slices.SortedFunc(slices.Values(k.Allocations()), func(a, b pod) int { return strings.Compare(a.Pod.Name, b.Pod.Name) })
}

// admit gives a pod its devices, which its container has from create on.
func (k *kubelet) admit(resource string, ids []string, answer *api.ContainerAllocateResponse) (pod, error) {
	k.mu.Lock()
	k.serial++
	name := fmt.Sprintf("pod-%d", k.serial)
	k.mu.Unlock()
	p := pod{Pod: fakes.Pod{UID: name, Namespace: podNamespace, Name: name}, Container: containerName, Resource: resource, IDs: ids, Answer: answer}
	k.runtime.Run(p.Pod)
	return p, k.Give(p.Pod, p.Container, resource, ids, answer)
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

// socket is the runtime's socket.
func (k *kubelet) socket() string { return filepath.Join(k.dir, "cri.sock") }
