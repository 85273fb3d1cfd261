// SPDX-License-Identifier: Apache-2.0

package capsule

import (
	"context"
	"path/filepath"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
	emulib "example.com/gpu-agent/tests/emulator/lib"
)

// Library is the folder of the cap's libraries as they are built from this checkout,
// which look for all they need below root; see lib.Root.
func Library(ctx context.Context, root string) (string, error) {
	sum, err := lib.Stamp(ctx, root)
	if err != nil {
		return "", err
	}
	return emulib.Once(ctx, "memcap", "cap-"+sum, func(ctx context.Context, dir string) error { return lib.BuildBelow(ctx, dir, root) })
}

// Allocation is what the cap adds to a container.
type Allocation struct {
	Kit lib.Kit
	Key string
	// Pages are its pages' files by GPU, as lib.Pages.Write returns them.
	Pages map[gpu.UUID]lib.Page
	// Open lets allocations pass where the cap cannot do its work.
	Open bool
}

// Apply makes a plain container's edits those of an allocation's container.
func (c Allocation) Apply(edits specs.ContainerEdits) specs.ContainerEdits {
	stands := []struct{ library, hostPath, real string }{
		{emulib.CUDA, c.Kit.CUDA, lib.RealCUDA},
		{emulib.NVML, c.Kit.NVML, lib.RealNVML},
	}
	var mounts []*specs.Mount
	for _, m := range edits.Mounts {
		for _, s := range stands {
			if strings.HasPrefix(filepath.Base(m.ContainerPath), s.library+".") {
				mounts = append(mounts, bind(m.HostPath, s.real))
				m = bind(s.hostPath, m.ContainerPath)
			}
		}
		mounts = append(mounts, m)
	}
	for _, m := range lib.Mounts(c.Key, c.Pages) {
		mounts = append(mounts, &m)
	}
	if c.Open {
		mounts = append(mounts, bind(c.Kit.Mark, lib.OpenMark))
	} else {
		hide := c.Kit.Hook()
		edits.Hooks = append([]*specs.Hook{&hide}, edits.Hooks...)
	}
	edits.Mounts = mounts
	return edits
}
