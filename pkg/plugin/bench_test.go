// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
)

// empty is a device plugin that does nothing, on gRPC as it comes: what a call
// costs whatever is behind it.
type empty struct {
	api.UnimplementedDevicePluginServer
}

func (empty) GetPreferredAllocation(context.Context, *api.PreferredAllocationRequest) (*api.PreferredAllocationResponse, error) {
	return &api.PreferredAllocationResponse{}, nil
}

func (empty) Allocate(context.Context, *api.AllocateRequest) (*api.AllocateResponse, error) {
	return &api.AllocateResponse{}, nil
}

func benchClients(b *testing.B, src Source) map[string]api.DevicePluginClient {
	dir := tempDir(b)
	k := startKubelet(b, dir)
	startAgent(b, dir, map[string]Source{gpuMem: src})

	path := filepath.Join(tempDir(b), "empty.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		b.Fatal(err)
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, empty{})
	go func() { _ = server.Serve(l) }()
	b.Cleanup(server.Stop)
	c, err := dialPlugin(b.Context(), path)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = c.conn.Close() })
	return map[string]api.DevicePluginClient{"ours": k.client(b, gpuMem), "empty": c}
}

// BenchmarkGetPreferredAllocation asks for 24 units of 8 GPUs as the kubelet
// does: with all free IDs in random order.
func BenchmarkGetPreferredAllocation(b *testing.B) {
	for _, n := range []int{80, 640, 2560} {
		var ids []string
		rank := map[gpu.UUID]int{}
		for g := range 8 {
			u := gpu.UUID(fmt.Sprintf("GPU-5a2f0c11-9a3e-4f57-8d57-%012x", rand.Uint64N(1<<48)))
			rank[u] = g
			for i := range n / 8 {
				ids = append(ids, timeslice.ID(u, i))
			}
		}
		rand.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
		src := sourceOf(devices(n)...)
		src.prefer = func(available, must []string, n int) ([]string, error) {
			return timeslice.PreferUnits(available, must, n, rank)
		}
		clients := benchClients(b, src)
		for _, who := range []string{"empty", "ours"} {
			b.Run(fmt.Sprintf("devices=%d/%s", n, who), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					_, err := clients[who].GetPreferredAllocation(b.Context(), &api.PreferredAllocationRequest{
						ContainerRequests: []*api.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: ids, AllocationSize: 8}}})
					if err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

func BenchmarkAllocate(b *testing.B) {
	for _, n := range []int{80, 640, 2560} {
		src := sourceOf(devices(n)...)
		src.allocate = func(ids []string) (Grant, error) {
			if _, err := timeslice.OneGPU(ids); err != nil {
				return Grant{}, err
			}
			return Grant{CDI: []string{"example.com/gpu=0123456789abcdef"}, Annotations: map[string]string{"example.com/gpu-claim.0123456789abcdef": gpuMem}}, nil
		}
		var ids []string
		for _, d := range devices(24) {
			ids = append(ids, d.ID)
		}
		clients := benchClients(b, src)
		for _, who := range []string{"empty", "ours"} {
			b.Run(fmt.Sprintf("devices=%d/%s", n, who), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if _, err := clients[who].Allocate(b.Context(), &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: ids}}}); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// BenchmarkKubeletRestart is from the start of a kubelet, which removes our
// socket and makes its own, to its first list of 640 devices.
func BenchmarkKubeletRestart(b *testing.B) {
	dir := tempDir(b)
	startAgent(b, dir, map[string]Source{gpuMem: sourceOf(devices(640)...)})
	for b.Loop() {
		k := startKubelet(b, dir)
		k.await(b, "first list", func(s seen) bool { return len(s.last[gpuMem]) == 640 })
		b.StopTimer()
		k.stop()
		b.StartTimer()
	}
}
