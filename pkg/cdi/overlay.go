// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/gpu"
)

// Overlay is what an allocation's container gets beside its parts, and in place of
// some of them. The zero value changes nothing.
type Overlay struct {
	// Overrides are the driver libraries that are replaced.
	Overrides []Override
	// Mounts are added as they are. Of two on one path the later one wins.
	Mounts []specs.Mount
	// Hooks run before those of the parts, which write down what libraries there are.
	Hooks []specs.Hook
}

// Override mounts a file where containers look for a library of the driver. The
// library itself is mounted at another path.
type Override struct {
	// Library is the library's name without its version, for example
	// "libcuda.so": it is mounted as libcuda.so.<version of the driver>.
	Library string
	// HostPath is the file that replaces it, and Real the path inside the
	// container where the library itself is found.
	HostPath, Real string
}

// apply changes edits. It fails where a library that is to be replaced is not there: a
// container would get the real one, or none.
func (o *Overlay) apply(edits *specs.ContainerEdits) error {
	for _, s := range o.Overrides {
		at := slices.IndexFunc(edits.Mounts, func(m *specs.Mount) bool { return s.isOf(m) })
		if at < 0 {
			return fmt.Errorf("put %s in place of %s: the driver's parts have no %[2]s.<version>: %w",
				s.HostPath, s.Library, gpu.ErrNotFound)
		}
		real := *edits.Mounts[at]
		real.ContainerPath = s.Real
		for i, m := range edits.Mounts {
			if s.isOf(m) {
				instead := *m // this one is the parts' own
				instead.HostPath = s.HostPath
				edits.Mounts[i] = &instead
			}
		}
		edits.Mounts = append(edits.Mounts, &real)
	}
	for i := range o.Mounts {
		edits.Mounts = append(edits.Mounts, &o.Mounts[i])
	}
	first := make([]*specs.Hook, len(o.Hooks))
	for i := range o.Hooks {
		first[i] = &o.Hooks[i]
	}
	edits.Hooks = slices.Concat(first, edits.Hooks)
	return nil
}

func (s *Override) isOf(m *specs.Mount) bool {
	return strings.HasPrefix(path.Base(m.ContainerPath), s.Library+".")
}
