// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"io/fs"

	"example.com/gpu-agent/pkg/gpu"
)

// Read adds to an inventory what sysfs knows, sys being sysfs' root: the
// machine's name, NUMA nodes and RDMA network cards, and of each GPU with a PCI
// address its NUMA node, CPUs and PCI path. What sysfs does not say stays as it
// is; a strange sysfs is only one that says less. Nothing else of the inventory
// is looked at or changed.
func Read(sys fs.FS, inv *gpu.Inventory) {
}
