// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// maxListing is the largest answer accepted, in bytes. gRPC's default of 4 MiB
// is too little for a node with tens of thousands of devices: the kubelet
// repeats each device's ID and NUMA node for its holder, and lists all of them
// for Allocatable.
const maxListing = 64 << 20

// PodName names a pod. The service has no UIDs.
type PodName struct {
	Namespace, Name string
}

// Holding is the devices of one resource that one container holds.
type Holding struct {
	Namespace, Pod, Container, Resource string
	// IDs is sorted and without repetition.
	IDs []string
}

// Listing is the kubelet's account at one moment.
type Listing struct {
	// Pods is every pod in the account, with devices or without, sorted.
	Pods []PodName
	// Holdings is sorted by namespace, pod, container and resource. It has the
	// devices of all plugins, app containers and restartable init containers;
	// plain init containers are never in it.
	Holdings []Holding
}

// Has tells whether the account names that pod.
func (l *Listing) Has(namespace, pod string) bool {
	_, found := slices.BinarySearchFunc(l.Pods, PodName{namespace, pod}, comparePods)
	return found
}

func comparePods(a, b PodName) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}

func compareHoldings(a, b Holding) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod),
		cmp.Compare(a.Container, b.Container), cmp.Compare(a.Resource, b.Resource))
}

// PodResources asks the kubelet who holds which devices. It keeps one
// connection. Its methods may be called from several goroutines.
type PodResources struct {
	socket string

	mu   sync.Mutex // guards conn
	conn *grpc.ClientConn
}

// NewPodResources prepares to ask the kubelet whose directory this is,
// "/var/lib/kubelet" on most nodes. Nothing is opened before the first
// question.
func NewPodResources(kubeletDir string) *PodResources {
	return &PodResources{socket: filepath.Join(kubeletDir, "pod-resources", "kubelet.sock")}
}

// Close gives the connection back. A later question opens another.
func (p *PodResources) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conn == nil {
		return nil
	}
	conn := p.conn
	p.conn = nil
	return conn.Close()
}

// List returns the kubelet's account of pods and their devices. It does not
// wait for a kubelet that is away.
func (p *PodResources) List(ctx context.Context) (Listing, error) {
	var answer *podresources.ListPodResourcesResponse
	err := p.ask(ctx, func(kubelet podresources.PodResourcesListerClient) (err error) {
		answer, err = kubelet.List(ctx, &podresources.ListPodResourcesRequest{})
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
		l.Pods = append(l.Pods, PodName{pod.GetNamespace(), pod.GetName()})
		for _, container := range pod.GetContainers() {
			for resource, ids := range collect(container.GetDevices()) {
				l.Holdings = append(l.Holdings,
					Holding{pod.GetNamespace(), pod.GetName(), container.GetName(), resource, ids})
			}
		}
	}
	slices.SortFunc(l.Pods, comparePods)
	slices.SortFunc(l.Holdings, compareHoldings)
	return l
}

// collect joins the kubelet's entries, of which a resource has one for each of
// its NUMA nodes.
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

// Allocatable returns, by resource name, the IDs of the devices that the
// kubelet would hand out or has handed out, sorted: what it has understood of
// the plugins' lists.
func (p *PodResources) Allocatable(ctx context.Context) (map[string][]string, error) {
	var answer *podresources.AllocatableResourcesResponse
	err := p.ask(ctx, func(kubelet podresources.PodResourcesListerClient) (err error) {
		answer, err = kubelet.GetAllocatableResources(ctx, &podresources.AllocatableResourcesRequest{})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read allocatable resources at %s: %w", p.socket, err)
	}
	return collect(answer.GetDevices()), nil
}

// ask calls question on the open connection. A kubelet that restarted leaves
// the connection dead and gRPC in a back-off that has no reason to end with the
// restart, so an unavailable server is tried once more on a fresh one.
func (p *PodResources) ask(ctx context.Context, question func(podresources.PodResourcesListerClient) error) error {
	conn, fresh, err := p.connection(nil)
	if err != nil {
		return err
	}
	err = question(podresources.NewPodResourcesListerClient(conn))
	// Canceled, without our context being so: another caller found the
	// connection dead and closed it.
	code := status.Code(err)
	if fresh || code != codes.Unavailable && code != codes.Canceled || ctx.Err() != nil {
		return err
	}
	if conn, _, err = p.connection(conn); err != nil {
		return err
	}
	return question(podresources.NewPodResourcesListerClient(conn))
}

// connection returns the open connection, or a fresh one where there is none or
// the open one is known as dead.
func (p *PodResources) connection(dead *grpc.ClientConn) (conn *grpc.ClientConn, fresh bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conn != nil && p.conn != dead {
		return p.conn, false, nil
	}
	if p.conn != nil {
		p.conn.Close()
		p.conn = nil
	}
	conn, err = grpc.NewClient("unix:"+p.socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithNoProxy(),
		grpc.WithDisableServiceConfig(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxListing)))
	if err != nil {
		return nil, false, fmt.Errorf("prepare a connection: %w", err)
	}
	p.conn = conn
	return conn, true, nil
}
