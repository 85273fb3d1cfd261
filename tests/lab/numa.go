// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// Policies of a kubelet's Topology Manager that refuse a container.
const (
	// SingleNode has all CPUs and devices of a container on one NUMA node.
	SingleNode = "single-numa-node"
	// Restricted has them on as few as can be, and all on the same.
	Restricted = "restricted"
)

// Align starts the kubelet anew as one that gives whole CPUs to those who ask for
// them and aligns them with devices by a policy, on the CPUs and NUMA nodes of the
// driver's machine, where its world describes them: they are laid over this
// machine's (see Driver.Swap), and a kubelet looks at them when it starts. CPU 0 is
// everybody's. Containers have the CPUs that there are; what they were given is
// RunningPod.Given.
func (n *Node) Align(ctx context.Context, policy string) error {
	if _, err := n.cluster(ctx, nil, "cpusets", "drop"); err != nil {
		return fmt.Errorf("align: %w", err)
	}
	return n.SetKubelet(ctx, `topologyManagerPolicy: `+policy+`
cpuManagerPolicy: static
reservedSystemCPUs: "0"
`)
}

// Unalign gives the kubelet its usual settings again, and the CPUs of the machine
// that there is by now.
func (n *Node) Unalign(ctx context.Context) error {
	if err := n.SetKubelet(ctx, ""); err != nil {
		return err
	}
	_, err := n.cluster(ctx, nil, "cpusets", "keep")
	return err
}

// Given is what the kubelet has given to a container, by its own word.
type Given struct {
	// CPUs are those that nobody else has, by number; none where the container
	// shares.
	CPUs []int
	// Devices are IDs by resource, sorted.
	Devices map[string][]string
	// NUMA is, by resource, the NUMA nodes that the kubelet believes the devices
	// are of, sorted; none where nobody has told it.
	NUMA map[string][]int
}

// Given asks the kubelet what it has given to a container.
func (p *RunningPod) Given(ctx context.Context, container string) (Given, error) {
	if container == "" {
		container = "main"
	}
	socket := p.node.File(filepath.Join("/var/lib/kubelet", "pod-resources", "kubelet.sock"))
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	if err != nil {
		return Given{}, fmt.Errorf("ask what pod %s was given: %w", p.Name, err)
	}
	defer conn.Close()
	answer, err := podresources.NewPodResourcesListerClient(conn).List(ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		return Given{}, fmt.Errorf("ask what pod %s was given: %w", p.Name, err)
	}
	for _, pod := range answer.GetPodResources() {
		if pod.GetNamespace() != PodNamespace || pod.GetName() != p.Name {
			continue
		}
		for _, c := range pod.GetContainers() {
			if c.GetName() == container {
				return given(c), nil
			}
		}
	}
	return Given{}, fmt.Errorf("ask what pod %s was given: the kubelet does not name its container %s", p.Name, container)
}

func given(c *podresources.ContainerResources) Given {
	g := Given{Devices: map[string][]string{}, NUMA: map[string][]int{}}
	for _, cpu := range c.GetCpuIds() {
		g.CPUs = append(g.CPUs, int(cpu))
	}
	slices.Sort(g.CPUs)
	for _, d := range c.GetDevices() {
		name := d.GetResourceName()
		g.Devices[name] = append(g.Devices[name], d.GetDeviceIds()...)
		for _, node := range d.GetTopology().GetNodes() {
			g.NUMA[name] = append(g.NUMA[name], int(node.GetID()))
		}
	}
	for name := range g.Devices {
		slices.Sort(g.Devices[name])
		slices.Sort(g.NUMA[name])
		g.NUMA[name] = slices.Compact(g.NUMA[name])
	}
	return g
}
