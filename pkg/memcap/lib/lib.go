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

// Where things are in a container that holds an allocation.
const (
	Root           = "/usr/lib/gpu-agent"
	RealCUDA       = Root + "/driver/libcuda.so.1"      // the driver's own library
	RealNVML       = Root + "/driver/libnvidia-ml.so.1" // likewise
	AllocationsDir = Root + "/allocations"              // the pages; see PagesDir
	OpenMark       = Root + "/open"                     // if it exists, what cannot be counted passes
)

// compatDirs are where images bring driver libraries of their own, as patterns.
var compatDirs = []string{"/usr/local/cuda/compat", "/usr/local/cuda-*/compat"}

// Hook covers the driver libraries that an image brings: they stand for nobody's cap. It touches
// directories that are there alone, so it makes none in an image or in a volume.
func (k Kit) Hook() specs.Hook {
	return specs.Hook{HookName: "createContainer", Path: k.Hide, Args: append([]string{hideName}, compatDirs...)}
}

// The two pages of an allocation's GPU, by their names in PagesDir.
const (
	limitName = "limit"
	usageName = "usage"
	// limitsName is the folder of all limit pages on the host.
	limitsName = "limits"
)

// PagesDir is where a container has the pages of one allocation on one GPU. It is a
// directory for each GPU and in that one for each allocation, so a container with two
// allocations on one GPU has both pairs, and the library finds them whatever their
// keys are.
func PagesDir(u gpu.UUID, key string) string { return AllocationsDir + "/" + string(u) + "/" + key }

// LimitPath and UsagePath are the pages in PagesDir.
func LimitPath(u gpu.UUID, key string) string { return PagesDir(u, key) + "/" + limitName }
func UsagePath(u gpu.UUID, key string) string { return PagesDir(u, key) + "/" + usageName }

// KeyOf returns the allocation that has a page, by the page's path on the host; ok is false for
// any other file. dir is the agent's state directory.
func KeyOf(dir, path string) (key string, ok bool) {
	rest, ok := strings.CutPrefix(path, filepath.Join(dir, "cap")+"/")
	parts := strings.Split(rest, "/")
	if !ok || len(parts) != 3 || parts[0] != limitsName && parts[0] != usageName {
		return "", false
	}
	return parts[1], true
}

// Mounts are what puts an allocation's pages into a container: limit pages that it
// cannot write, and usage pages that it can. No device node and no program in
// either has any effect.
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

// DefaultContext is what a context is expected to take before an allocation's own were
// measured, and the most that one ever is, in bytes. On data-centre GPUs of 2020 to
// 2025 a context with a usual program's modules has 250 to 550 MiB; on an H200 with driver
// 580 it has 518 without any. LeastContext is the least: a container that is charged too
// little can use more than its cap until the next reading, and this much is within the
// watchdog's tolerance.
//
// DefaultCode is what may come besides for code, in bytes: the driver loads a kernel's code
// when it is first run, and asks nobody. On the H200 a context has 610 MiB after PyTorch's first
// kernel, which is 92 MiB more than before. No other GPU or driver was measured yet.
const (
	DefaultContext = 512 << 20
	LeastContext   = 64 << 20
	DefaultCode    = 610<<20 - DefaultContext
)
