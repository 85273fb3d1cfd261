// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"maps"
	"slices"
	"testing"

	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

func TestGiven(t *testing.T) {
	on := func(node int64) *podresources.TopologyInfo {
		return &podresources.TopologyInfo{Nodes: []*podresources.NUMANode{{ID: node}}}
	}
	// The kubelet has an entry for each NUMA node of a resource.
	got := given(&podresources.ContainerResources{CpuIds: []int64{9, 1}, Devices: []*podresources.ContainerDevices{
		{ResourceName: GPU, DeviceIds: []string{"c"}, Topology: on(1)},
		{ResourceName: GPU, DeviceIds: []string{"b", "a"}, Topology: on(0)},
		{ResourceName: Memory, DeviceIds: []string{"d"}},
	}})
	if !slices.Equal(got.CPUs, []int{1, 9}) {
		t.Errorf("the CPUs are %v", got.CPUs)
	}
	if !maps.EqualFunc(got.Devices, map[string][]string{GPU: {"a", "b", "c"}, Memory: {"d"}}, slices.Equal) {
		t.Errorf("the devices are %v", got.Devices)
	}
	if !maps.EqualFunc(got.NUMA, map[string][]int{GPU: {0, 1}, Memory: {}}, slices.Equal) {
		t.Errorf("the NUMA nodes are %v", got.NUMA)
	}
}
