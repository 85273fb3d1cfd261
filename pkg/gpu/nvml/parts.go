// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
)

// leftOut are NVIDIA's hooks that would let a container decide what it gets. The first
// reads memory limits from its environment; the second puts driver libraries of its image before
// the host's. Only the agent sets limits.
//
// All else of NVIDIA's list stays, so that a container sees what it would see under NVIDIA's
// toolkit. Of the hooks these are:
//
//   - update-ldcache and create-symlinks, by which libcuda.so.1 is found.
//   - disable-device-node-modification, which keeps nvidia-smi inside a container from making nodes
//     of other GPUs. It reads only the host's driver parameters.
//   - update-application-profile, which keeps EGL and Vulkan from listing GPUs whose nodes the
//     container lacks. It reads only those nodes.
var leftOut = []string{"apply-cuda-memory-limits", string(nvcdi.EnableCudaCompatHook)}

// needed are the device nodes that every CUDA program needs.
var needed = []string{"/dev/nvidiactl", "/dev/nvidia-uvm"}

// partsReader lists what containers need, by NVIDIA's generator.
type partsReader struct{ *session }

func (r *partsReader) Parts(ctx context.Context) (cdi.Parts, error) {
	if !filepath.IsAbs(r.opts.Hook) {
		return cdi.Parts{}, fmt.Errorf("list the driver's parts: hook program %q: "+
			"want the host's absolute path of nvidia-cdi-hook: %w", r.opts.Hook, gpu.ErrInvalid)
	}
	return call(ctx, r.session, "list the driver's parts", func() (cdi.Parts, error) { return r.parts(ctx) })
}

func (r *partsReader) parts(ctx context.Context) (cdi.Parts, error) {
	var none cdi.Parts
	names, err := nvcdi.NewDeviceNamer(nvcdi.DeviceNameStrategyUUID)
	if err != nil {
		return none, fmt.Errorf("name devices by UUID: %w", err)
	}
	generator, err := nvcdi.New(
		nvcdi.WithMode(nvcdi.ModeNvml),
		nvcdi.WithNvmlLib(r.lib),
		nvcdi.WithLogger(logger{r.log}),
		nvcdi.WithDeviceNamers(names),
		nvcdi.WithDriverRoot(r.opts.DriverRoot),
		nvcdi.WithDevRoot(r.opts.DevRoot),
		nvcdi.WithNVIDIACDIHookPath(r.opts.Hook),
		nvcdi.WithDisabledHooks(leftOut...),
		// It would load one more library of the driver into the process, whose calls no lock
		// guards.
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils),
	)
	if err != nil {
		return none, fmt.Errorf("look at the driver below %s: %w: %v", r.opts.DriverRoot, gpu.ErrDriver, err)
	}
	// NVIDIA's errors may wrap the driver's return codes, which must not leave this package:
	// hence %v.
	common, err := generator.GetCommonEdits()
	if err != nil {
		return none, fmt.Errorf("find the driver's files below %s: %w: %v", r.opts.DriverRoot, gpu.ErrNoDriver, err)
	}
	parts := cdi.Parts{Common: r.seenByHost(*common.ContainerEdits), Devices: map[gpu.UUID]specs.ContainerEdits{}}
	if err := r.usable(parts.Common); err != nil {
		return none, err
	}
	count, ret := r.lib.DeviceGetCount()
	if err := nvmlDeviceGetCount.failed("count the GPUs", ret); err != nil {
		return none, err
	}
	for i := range count {
		if err := ctx.Err(); err != nil {
			return none, fmt.Errorf("find the device nodes of GPU %d: %w: %w", i, gpu.ErrTimeout, err)
		}
		u, edits, err := r.deviceParts(generator, i)
		if err != nil {
			r.log.Warn("a GPU cannot be given to containers", "index", i, "gpu", u, "err", err)
			continue
		}
		parts.Devices[u] = edits
	}
	return parts, nil
}

// deviceParts returns the UUID and the device nodes of the GPU at an index.
func (r *partsReader) deviceParts(
	generator nvcdi.Interface, index int,
) (u gpu.UUID, none specs.ContainerEdits, err error) {
	h, u, err := r.byIndex(index)
	if err != nil {
		return u, none, err
	}
	// The generator makes the same call; this one is for an error that a reader can act on.
	minor, ret := h.GetMinorNumber()
	if err := nvmlDeviceGetMinorNumber.failed("read the minor number of "+string(u), ret); err != nil {
		return u, none, err
	}
	devices, err := generator.GetDeviceSpecsByID(string(u))
	if err != nil || len(devices) != 1 {
		return u, none, fmt.Errorf("find the device nodes of %s: %w: %d devices, %v",
			u, gpu.ErrDriver, len(devices), err)
	}
	edits := r.seenByHost(devices[0].ContainerEdits)
	node := fmt.Sprintf("/dev/nvidia%d", minor)
	if !hasNode(edits, node) {
		return u, none, fmt.Errorf("%s has no device node %s below %s: %w; nvidia-modprobe -c %d makes it",
			u, node, r.opts.DevRoot, gpu.ErrNoDriver, minor)
	}
	return u, edits, nil
}

// usable fails if containers could not use the driver.
func (r *partsReader) usable(common specs.ContainerEdits) error {
	if !slices.ContainsFunc(common.Mounts, func(m *specs.Mount) bool {
		return strings.HasPrefix(filepath.Base(m.ContainerPath), "libcuda.so.")
	}) {
		return fmt.Errorf("no libcuda.so.<version> of this driver below %s: %w; "+
			"install the driver's compute libraries, or name the right --driver-root",
			r.opts.DriverRoot, gpu.ErrNoDriver)
	}
	for _, node := range needed {
		if !hasNode(common, node) {
			return fmt.Errorf("no device node %s below %s: %w; nvidia-modprobe -c 0 -u makes it",
				node, r.opts.DevRoot, gpu.ErrNoDriver)
		}
	}
	return nil
}

func hasNode(edits specs.ContainerEdits, path string) bool {
	return slices.ContainsFunc(edits.DeviceNodes, func(n *specs.DeviceNode) bool { return n.Path == path })
}

// seenByHost turns the agent's paths into the host's. It removes the numbers of device nodes: the
// runtime reads them when it makes the container. So a kernel module that was loaded again with
// another major number does no harm.
func (s *session) seenByHost(edits specs.ContainerEdits) specs.ContainerEdits {
	hostDev := "/"
	if s.opts.DevRoot == s.opts.DriverRoot {
		hostDev = s.opts.HostDriverRoot
	}
	for _, m := range edits.Mounts {
		m.HostPath = rebase(m.HostPath, s.opts.DriverRoot, s.opts.HostDriverRoot)
	}
	for _, n := range edits.DeviceNodes {
		if n.HostPath = rebase(cmp.Or(n.HostPath, n.Path), s.opts.DevRoot, hostDev); n.HostPath == n.Path {
			n.HostPath = "" // they are equal, and without HostPath an older CDI version is enough
		}
		n.Type, n.Major, n.Minor = "", 0, 0
	}
	for _, h := range edits.Hooks {
		// For --link <target>::<link>, the generator leaves the agent's root of device nodes in
		// links that the hook makes inside the container.
		for i, arg := range h.Args {
			if target, link, ok := strings.Cut(arg, "::"); ok {
				h.Args[i] = rebase(target, s.opts.DevRoot, "/") + "::" + rebase(link, s.opts.DevRoot, "/")
			}
		}
	}
	return edits
}

// rebase moves a path from below the directory from to below the directory to. A path elsewhere
// stays as it is.
func rebase(path, from, to string) string {
	if from == to || !filepath.IsAbs(path) {
		return path
	}
	rest, err := filepath.Rel(from, path)
	if err != nil || !filepath.IsLocal(rest) {
		return path
	}
	return filepath.Join(to, rest)
}
