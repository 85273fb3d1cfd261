// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
	"example.com/gpu-agent/tests/fakes"
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
	dir := pluginDir(b)
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
	c, err := fakes.Dial(b.Context(), path)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = c.Close() })
	return map[string]api.DevicePluginClient{"ours": k.client(b, gpuMem), "empty": api.NewDevicePluginClient(c)}
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
			return Grant{CDI: []string{"example.com/gpu=0123456789abcdef"}, Annotations: map[string]string{"example.com/gpu-allocation.0123456789abcdef": gpuMem}}, nil
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

// BenchmarkKubeletRestart is 20 restarts at a time of a kubelet, from the
// creation of its socket to its first list of 640 devices, while the
// registration of another resource hangs. A real kubelet refuses connections for
// some microseconds after it has made its socket; deaf makes that longer.
func BenchmarkKubeletRestart(b *testing.B) {
	for _, deaf := range []time.Duration{0, time.Millisecond, 5 * time.Millisecond} {
		b.Run("deaf="+deaf.String(), func(b *testing.B) {
			dir := pluginDir(b)
			startAgent(b, dir, map[string]Source{gpuMem: sourceOf(devices(640)...), "example.com/gpu": sourceOf(a1)})
			var took []time.Duration
			for b.Loop() {
				for range 20 {
					k := startKubelet(b, dir, func(o *fakes.KubeletOptions) {
						o.Deaf = func(k *fakes.Kubelet) {
							hang("example.com/gpu")(k)
							time.Sleep(deaf)
						}
					})
					s := k.await(b, "first list", func(s seen) bool { return len(s[gpuMem].Devices) == 640 })
					took = append(took, s[gpuMem].Listed.Sub(k.Bound()))
					k.Stop()
				}
			}
			slices.Sort(took)
			ms := func(d time.Duration) float64 { return d.Seconds() * 1e3 }
			b.ReportMetric(ms(took[len(took)/2]), "p50-ms")
			b.ReportMetric(ms(took[len(took)-1]), "max-ms")
			b.ReportMetric(0, "ns/op")
		})
	}
}
