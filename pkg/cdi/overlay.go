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

// Overlay is what a claim's container gets beside its parts, and in place of
// some of them. The zero value changes nothing.
type Overlay struct {
	// Stands are driver libraries that something else stands for.
	Stands []Stand
	// Mounts are added as they are. Of two on one path the later one wins.
	Mounts []specs.Mount
}

// Stand puts a file where containers look for a library of the driver. The
// library itself stays within reach, at another path.
type Stand struct {
	// Library is the library's name without its version, for example
	// "libcuda.so": it is mounted as libcuda.so.<version of the driver>.
	Library string
	// HostPath is the file that stands for it, and Real the path inside the
	// container where the library itself is found.
	HostPath, Real string
}

// apply changes edits. It fails where a library that something is to stand for
// is not there: a container would get the real one, or none.
func (o *Overlay) apply(edits *specs.ContainerEdits) error {
	for _, s := range o.Stands {
		at := slices.IndexFunc(edits.Mounts, func(m *specs.Mount) bool { return s.isOf(m) })
		if at < 0 {
			return fmt.Errorf("put %s in place of %s: the driver's parts have no %[2]s.<version>: %w", s.HostPath, s.Library, gpu.ErrNotFound)
		}
		real := *edits.Mounts[at]
		real.ContainerPath = s.Real
		for _, m := range edits.Mounts {
			if s.isOf(m) {
				m.HostPath = s.HostPath
			}
		}
		edits.Mounts = append(edits.Mounts, &real)
	}
	for i := range o.Mounts {
		edits.Mounts = append(edits.Mounts, &o.Mounts[i])
	}
	return nil
}

func (s *Stand) isOf(m *specs.Mount) bool {
	return strings.HasPrefix(path.Base(m.ContainerPath), s.Library+".")
}
