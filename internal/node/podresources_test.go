// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/tests/fakes"
)

// kubelet is one whose PodResources say what a test wants.
type kubelet struct {
	*fakes.Kubelet
	t   *testing.T
	dir string
}

func newKubelet(t *testing.T) *kubelet {
	k := &kubelet{t: t, dir: t.TempDir()}
	var err error
	if k.Kubelet, err = fakes.StartKubelet(fakes.KubeletOptions{Dir: k.dir}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.Stop)
	return k
}

func (k *kubelet) start() {
	k.t.Helper()
	if err := k.Start(); err != nil {
		k.t.Fatal(err)
	}
}

func (k *kubelet) lists(pods ...*podresources.PodResources) {
	k.Answer("List", func(context.Context, any) (any, error) {
		return &podresources.ListPodResourcesResponse{PodResources: pods}, nil
	})
}

func devices(resource string, ids ...string) *podresources.ContainerDevices {
	return &podresources.ContainerDevices{ResourceName: resource, DeviceIds: ids}
}

func pod(namespace, name string, containers ...*podresources.ContainerResources) *podresources.PodResources {
	return &podresources.PodResources{Namespace: namespace, Name: name, Containers: containers}
}

func container(name string, devices ...*podresources.ContainerDevices) *podresources.ContainerResources {
	return &podresources.ContainerResources{Name: name, Devices: devices}
}

// claiming is a container with devices of the claim "c".
func claiming(name string, devices ...*podresources.ClaimResource) *podresources.ContainerResources {
	return &podresources.ContainerResources{Name: name, DynamicResources: []*podresources.DynamicResource{
		{ClaimName: "c", ClaimNamespace: "train", ClaimResources: devices}}}
}

func prepared(driver, device, share string) *podresources.ClaimResource {
	return &podresources.ClaimResource{DriverName: driver, PoolName: "node-1", DeviceName: device, ShareId: &share}
}

func client(t *testing.T, k *kubelet) *PodResources {
	p := NewPodResources(k.dir)
	t.Cleanup(func() { p.Close() })
	return p
}

func TestListing(t *testing.T) {
	k := newKubelet(t)
	k.lists(
		pod("train", "job-2", container("main", devices("example.com/gpu-mem", "GPU-a::2"))),
		pod("gpu", "gpu-agent-x", container("agent")),
		pod("train", "job-1",
			container("side", devices("example.com/gpu", "GPU-c")),
			claiming("first", prepared("gpu.nvidia.com", "gpu-1", ""), prepared("gpu.nvidia.com", "gpu-0", "share-1")),
			claiming("second", prepared("gpu.nvidia.com", "gpu-0", "share-2")), // the same claim, shared
			// One entry per NUMA node, not sorted, and one device on two nodes.
			container("main", devices("example.com/gpu-mem", "GPU-a::1", "GPU-a::0"), devices("other.io/nic", "eth0"),
				devices("example.com/gpu-mem", "GPU-a::7", "GPU-a::1"))),
		pod("gpu", "idle"))
	p := client(t, k)
	got, err := p.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := Listing{
		Pods: []workload.Pod{{Namespace: "gpu", Name: "gpu-agent-x"}, {Namespace: "gpu", Name: "idle"}, {Namespace: "train", Name: "job-1"}, {Namespace: "train", Name: "job-2"}},
		Holdings: []Holding{
			{"train", "job-1", "main", "example.com/gpu-mem", []string{"GPU-a::0", "GPU-a::1", "GPU-a::7"}},
			{"train", "job-1", "main", "other.io/nic", []string{"eth0"}},
			{"train", "job-1", "side", "example.com/gpu", []string{"GPU-c"}},
			{"train", "job-2", "main", "example.com/gpu-mem", []string{"GPU-a::2"}},
		},
		Prepared: []Prepared{
			{"train", "job-1", "c", "gpu.nvidia.com", "node-1", "gpu-0"},
			{"train", "job-1", "c", "gpu.nvidia.com", "node-1", "gpu-1"},
		},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if !got.Has("gpu", "idle") || got.Has("gpu", "job-1") || got.Has("train", "job") || (&Listing{}).Has("gpu", "idle") {
		t.Error("Has is wrong about who is listed")
	}
}

func TestAllocatable(t *testing.T) {
	k := newKubelet(t)
	k.Answer("GetAllocatableResources", func(context.Context, any) (any, error) {
		return &podresources.AllocatableResourcesResponse{Devices: []*podresources.ContainerDevices{
			devices("example.com/gpu", "GPU-b"), devices("example.com/gpu-mem", "GPU-a::1"),
			devices("example.com/gpu", "GPU-a"), devices("example.com/gpu-mem", "GPU-a::0"),
		}}, nil
	})
	got, err := client(t, k).Allocatable(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := map[string][]string{"example.com/gpu": {"GPU-a", "GPU-b"}, "example.com/gpu-mem": {"GPU-a::0", "GPU-a::1"}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// An answer beyond gRPC's default limit: what 16 GPUs in small units come to.
func TestLargeListing(t *testing.T) {
	const pods, each = 200, 600
	k := newKubelet(t)
	var all []*podresources.PodResources
	for i := range pods {
		ids := make([]string, each)
		for j := range ids {
			ids[j] = fmt.Sprintf("GPU-5e0f8c1a-0000-1111-2222-%012d::%d", i, j)
		}
		all = append(all, pod("train", fmt.Sprintf("job-%03d", i), container("main", devices("example.com/gpu-mem", ids...))))
	}
	k.lists(all...)
	got, err := client(t, k).List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Pods) != pods || len(got.Holdings) != pods {
		t.Fatalf("%d pods and %d holdings, want %d of each", len(got.Pods), len(got.Holdings), pods)
	}
	bytes := 0
	for _, h := range got.Holdings {
		if len(h.IDs) != each {
			t.Fatalf("%s holds %d, want %d", h.Pod, len(h.IDs), each)
		}
		for _, id := range h.IDs {
			bytes += len(id)
		}
	}
	if bytes < 4<<20 {
		t.Fatalf("%d bytes of IDs prove nothing", bytes)
	}
}

// The first question after a kubelet's restart is answered, and one while it is
// away fails at once.
func TestKubeletRestart(t *testing.T) {
	k := newKubelet(t)
	k.lists(pod("a", "b"))
	p := client(t, k)
	ask := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		l, err := p.List(ctx)
		if err == nil && !l.Has("a", "b") {
			t.Error("pod a/b is not listed")
		}
		return err
	}
	if err := ask(); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		k.Stop()
		for range 3 {
			err := ask()
			if grpcstatus.Code(err) != codes.Unavailable {
				t.Fatalf("%v, want an error of an absent kubelet", err)
			}
			if !strings.Contains(err.Error(), k.dir) {
				t.Errorf("%q does not name the socket", err)
			}
		}
		k.start()
		if err := ask(); err != nil {
			t.Fatalf("first question after the restart: %v", err)
		}
		// And with no question while it was away.
		k.Stop()
		k.start()
		if err := ask(); err != nil {
			t.Fatalf("first question after an unseen restart: %v", err)
		}
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if err := ask(); err != nil {
		t.Fatalf("after Close: %v", err)
	}
}

func TestKubeletRestartUnderManyQuestions(t *testing.T) {
	k := newKubelet(t)
	k.lists(pod("a", "b"))
	p := client(t, k)
	if _, err := p.List(t.Context()); err != nil {
		t.Fatal(err)
	}
	k.Stop()
	k.start()
	var wait sync.WaitGroup
	for range 20 {
		wait.Go(func() {
			if _, err := p.List(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wait.Wait()
}

func TestKubeletNeverThere(t *testing.T) {
	p := NewPodResources(t.TempDir())
	defer p.Close()
	if _, err := p.List(t.Context()); err == nil || !strings.Contains(err.Error(), "kubelet.sock") {
		t.Errorf("%v, want an error that names the socket", err)
	}
}

func TestKubeletHangs(t *testing.T) {
	k := newKubelet(t)
	k.Answer("List", func(ctx context.Context, _ any) (any, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := client(t, k).List(ctx); grpcstatus.Code(errors.Unwrap(err)) != codes.DeadlineExceeded {
		t.Errorf("%v, want the end of the deadline", err)
	}
}
