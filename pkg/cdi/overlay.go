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

// Overlay is what an allocation's container gets in addition to its parts, or in place of some of
// them. The zero value changes nothing.
type Overlay struct {
	// Overrides are the driver libraries that are replaced.
	Overrides []Override
	// Mounts are added unchanged. Of two on one path the later one wins.
	Mounts []specs.Mount
	// Env are variables, "NAME=value", behind those of the parts.
	Env []string
	// Hooks run before the hooks of the parts, since those record which libraries exist.
	Hooks []specs.Hook
}

// Override mounts a file where containers look for a library of the driver. The library itself is
// mounted at another path.
type Override struct {
	// Library is the library's name without its version, such as "libcuda.so". It is mounted as
	// libcuda.so.<version of the driver>.
	Library string
	// HostPath is the file that replaces the library. Real is the path inside the container where
	// the library itself is mounted.
	HostPath, Real string
}

// apply changes edits. It returns gpu.ErrNotFound if the parts lack a library that is to be
// replaced: the container would get the driver's own library, or none.
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
				instead := *m // a copy, since *m belongs to the parts
				instead.HostPath = s.HostPath
				edits.Mounts[i] = &instead
			}
		}
		edits.Mounts = append(edits.Mounts, &real)
	}
	for i := range o.Mounts {
		edits.Mounts = append(edits.Mounts, &o.Mounts[i])
	}
	edits.Env = slices.Concat(edits.Env, o.Env)
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
