// SPDX-License-Identifier: Apache-2.0

package lib

import (
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/gpu"
)

// Paths in a container that holds an allocation.
const (
	Root           = "/usr/lib/gpu-agent"
	RealCUDA       = Root + "/driver/libcuda.so.1"      // the driver's own library
	RealNVML       = Root + "/driver/libnvidia-ml.so.1" // the driver's own library
	AllocationsDir = Root + "/allocations"              // the pages; see PagesDir
	MPSDir         = Root + "/mps"                      // the pipe directory of the GPU's MPS daemon, with its beat file
	OpenMark       = Root + "/open"                     // if it exists, what cannot be counted is allowed
	YieldFile      = Root + "/yield"                    // in the spot tier: by when the room is taken back; see Pages.Notice
)

// compatDirs are patterns of the directories where images bring driver libraries of their own.
var compatDirs = []string{"/usr/local/cuda/compat", "/usr/local/cuda-*/compat"}

// Hook returns the CDI hook that covers the driver libraries that an image brings, since those have
// no cap. It covers only directories that exist, so it creates none in an image or in a volume.
func (k Kit) Hook() specs.Hook {
	return specs.Hook{HookName: "createContainer", Path: k.Hide, Args: append([]string{hideName}, compatDirs...)}
}

// The names of an allocation's two pages in PagesDir.
const (
	limitName = "limit"
	usageName = "usage"
	// limitsName is the folder of all limit pages on the host.
	limitsName = "limits"
)

// PagesDir returns the folder in a container that has the pages of one allocation on one GPU. There
// is a folder for each GPU, and in it one for each allocation. So a container with two allocations
// on one GPU has both pairs of pages, and the library finds them without knowing the keys.
func PagesDir(u gpu.UUID, key string) string { return AllocationsDir + "/" + string(u) + "/" + key }

// LimitPath and UsagePath return the paths of the pages in PagesDir.
func LimitPath(u gpu.UUID, key string) string { return PagesDir(u, key) + "/" + limitName }
func UsagePath(u gpu.UUID, key string) string { return PagesDir(u, key) + "/" + usageName }

// KeyOf returns the key of the allocation that a page belongs to, by the page's path on the host.
// ok is false for any other file. dir is the agent's state directory.
func KeyOf(dir, path string) (key string, ok bool) {
	rest, ok := strings.CutPrefix(path, filepath.Join(dir, "cap")+"/")
	parts := strings.Split(rest, "/")
	if !ok || len(parts) != 3 || parts[0] != limitsName && parts[0] != usageName {
		return "", false
	}
	return parts[1], true
}

// Mounts returns the mounts of an allocation's pages into a container: limit pages read-only, and
// usage pages writable. No device node and no program in either has any effect.
func Mounts(key string, pages map[gpu.UUID]Page) []specs.Mount {
	var out []specs.Mount
	for _, u := range slices.Sorted(maps.Keys(pages)) {
		out = append(out, bind(pages[u].Limit, LimitPath(u, key), "ro"))
		if usage := pages[u].Usage; usage != "" {
			out = append(out, bind(usage, UsagePath(u, key), "rw"))
		}
	}
	return out
}

func bind(from, to, how string) specs.Mount {
	return specs.Mount{
		HostPath: from, ContainerPath: to,
		Options: []string{how, "nosuid", "nodev", "noexec", "rbind", "rprivate"},
	}
}

// None is the limit of a GPU without one.
const None = ^uint64(0)

// DefaultContext is what a context is expected to take before those of its allocation were
// measured, in bytes. An estimate never exceeds it. On data-centre GPUs of 2020 to 2025 a context
// with a usual program's modules has 250 to 550 MiB. On an H200 with driver 580 it has 518 MiB
// without any.
//
// LeastContext is the smallest estimate. A container that is charged too little can use more than
// its cap until the next reading; a context of this size is within the watchdog's tolerance.
//
// DefaultCode is what a context may take later for code, in bytes. The driver loads a kernel's code
// when it is first run, without any call that asks for memory. On the H200 a context has 610 MiB
// after PyTorch's first kernel, which is 92 MiB more than before. No other GPU or driver was
// measured yet.
const (
	DefaultContext = 512 << 20
	LeastContext   = 64 << 20
	DefaultCode    = 610<<20 - DefaultContext
)
