// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"slices"

	"google.golang.org/grpc"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"example.com/gpu-agent/internal/workload"
)

// maxListing is the largest accepted answer, in bytes. gRPC's default of 4 MiB is too small for a
// node with tens of thousands of devices. The kubelet repeats each device's ID and NUMA node for
// its holder, and lists all of them for Allocatable.
const maxListing = 64 << 20

// Holding is the devices of one resource that one container holds.
type Holding struct {
	Namespace, Pod, Container, Resource string
	// IDs is sorted and without repetition.
	IDs []string
}

// Prepared is a device that a DRA driver has prepared for a pod. Driver, pool and device identify
// it.
type Prepared struct {
	// Claim is the name of the ResourceClaim, which is in the pod's namespace.
	Namespace, Pod, Claim string
	Driver, Pool, Device  string
}

// Listing is the kubelet's answer at one moment.
type Listing struct {
	// Pods is every pod in the answer, with devices or without, sorted. The service has no UIDs.
	Pods []workload.Pod
	// Holdings has the devices of all plugins, app containers and restartable init containers,
	// sorted by namespace, pod, container and resource. Plain init containers are never in it.
	Holdings []Holding
	// Prepared has the devices of DRA drivers that the same containers hold, sorted by its fields
	// in their order and without repetition. Kubelets before 1.34 report none.
	Prepared []Prepared
}

// Has reports whether the listing names that pod.
func (l *Listing) Has(namespace, pod string) bool {
	_, found := slices.BinarySearchFunc(l.Pods, workload.Pod{Namespace: namespace, Name: pod}, comparePods)
	return found
}

func comparePods(a, b workload.Pod) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}

func compareHoldings(a, b Holding) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod),
		cmp.Compare(a.Container, b.Container), cmp.Compare(a.Resource, b.Resource))
}

func comparePrepared(a, b Prepared) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Claim, b.Claim),
		cmp.Compare(a.Driver, b.Driver), cmp.Compare(a.Pool, b.Pool), cmp.Compare(a.Device, b.Device))
}

// PodResources asks the kubelet who holds which devices. It keeps one connection. Its methods may
// be called from several goroutines.
type PodResources struct {
	dir    string // the kubelet's
	socket string
	client grpcClient
}

// NewPodResources prepares to ask the kubelet with this directory, "/var/lib/kubelet" on most
// nodes. It opens nothing before the first question.
func NewPodResources(kubeletDir string) *PodResources {
	socket := filepath.Join(kubeletDir, "pod-resources", "kubelet.sock")
	return &PodResources{dir: kubeletDir, socket: socket, client: grpcClient{
		socket:  func() (string, error) { return socket, nil },
		answers: []grpc.CallOption{grpc.MaxCallRecvMsgSize(maxListing), grpc.ForceCodecV2(newExact())},
	}}
}

// Close closes the connection. A later question opens a new one.
func (p *PodResources) Close() error { return p.client.close() }

// Checkpoint calls ReadCheckpoint for this kubelet.
func (p *PodResources) Checkpoint() (Checkpoint, error) { return ReadCheckpoint(p.dir) }

// Stamp calls CheckpointStamp for this kubelet.
func (p *PodResources) Stamp() Stamp { return CheckpointStamp(p.dir) }

// List returns the kubelet's pods and their devices. It fails if the kubelet does not answer, and
// does not wait for it.
func (p *PodResources) List(ctx context.Context) (Listing, error) {
	var answer *podresources.ListPodResourcesResponse
	err := p.client.ask(ctx, func(conn *grpc.ClientConn) (err error) {
		answer, err = podresources.NewPodResourcesListerClient(conn).List(ctx, &podresources.ListPodResourcesRequest{})
		return err
	})
	if err != nil {
		return Listing{}, fmt.Errorf("list pod resources at %s: %w", p.socket, err)
	}
	return listing(answer), nil
}

func listing(answer *podresources.ListPodResourcesResponse) Listing {
	var l Listing
	for _, pod := range answer.GetPodResources() {
		l.Pods = append(l.Pods, workload.Pod{Namespace: pod.GetNamespace(), Name: pod.GetName()})
		for _, container := range pod.GetContainers() {
			for resource, ids := range collect(container.GetDevices()) {
				l.Holdings = append(l.Holdings,
					Holding{pod.GetNamespace(), pod.GetName(), container.GetName(), resource, ids})
			}
			for _, claim := range container.GetDynamicResources() {
				for _, device := range claim.GetClaimResources() {
					l.Prepared = append(l.Prepared, Prepared{pod.GetNamespace(), pod.GetName(), claim.GetClaimName(),
						device.GetDriverName(), device.GetPoolName(), device.GetDeviceName()})
				}
			}
		}
	}
	slices.SortFunc(l.Pods, comparePods)
	slices.SortFunc(l.Holdings, compareHoldings)
	slices.SortFunc(l.Prepared, comparePrepared)
	l.Prepared = slices.Compact(l.Prepared)
	return l
}

// collect joins the kubelet's entries by resource. A resource has one entry for each of its NUMA
// nodes.
func collect(devices []*podresources.ContainerDevices) map[string][]string {
	byResource := map[string][]string{}
	for _, d := range devices {
		byResource[d.GetResourceName()] = append(byResource[d.GetResourceName()], d.GetDeviceIds()...)
	}
	for resource, ids := range byResource {
		slices.Sort(ids)
		byResource[resource] = slices.Compact(ids)
	}
	return byResource
}

// Allocatable returns the IDs of the devices that the kubelet would hand out or has handed out, by
// resource name, sorted. So it shows what the kubelet understood of the plugins' lists.
func (p *PodResources) Allocatable(ctx context.Context) (map[string][]string, error) {
	var answer *podresources.AllocatableResourcesResponse
	err := p.client.ask(ctx, func(conn *grpc.ClientConn) (err error) {
		answer, err = podresources.NewPodResourcesListerClient(conn).GetAllocatableResources(ctx,
			&podresources.AllocatableResourcesRequest{})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read allocatable resources at %s: %w", p.socket, err)
	}
	return collect(answer.GetDevices()), nil
}
