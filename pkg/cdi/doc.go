// SPDX-License-Identifier: Apache-2.0

// Package cdi describes an allocation to a container runtime: it turns "these GPUs
// for that allocation" into a Container Device Interface (CDI) spec, as a value.
//
// An allocation is what the kubelet once asked for: a resource and some device IDs.
// Its [Key] names it everywhere: in the device name that Allocate answers with
// ([DeviceName]), in the file that the runtime finds that device in
// ([FileName]), and in the annotation by which the container is recognised
// later ([AnnotationName]).
//
// An allocation's spec is self-contained. It holds one device, named by the key, and
// that device carries everything: the driver's common files and hooks, the
// device nodes of each GPU, and whatever else the allocation needs. So a runtime
// reads one file and no other, and the presence of the file alone says whether
// the allocation may start: no file, no container.
//
//	parts, _ := driver.Parts(ctx)                      // what containers need, per GPU
//	key := cdi.Key("example.com/gpu-mem", ids)         // "5f0c…"
//	spec, err := cdi.Spec("example.com", key, parts, []gpu.UUID{"GPU-…"}, cdi.Overlay{})
//
// An [Overlay] replaces libraries of the driver, so that a container can be held to
// what it was granted: a program finds another library, and the driver's own is mounted
// where that one expects it.
//
// Specs are deterministic: equal arguments, in whatever order the GPUs come,
// give equal values, so that a caller may compare bytes to see whether a file
// must be written again. They declare the oldest CDI version that can express
// them, because a runtime refuses a file of a version newer than its own.
//
// Every spec sets NVIDIA_VISIBLE_DEVICES=void, as NVIDIA's own generator does.
// The name belongs to an older way of handing GPUs to containers; the value
// keeps a runtime hook that still obeys it, perhaps set in the image, from
// adding GPUs that were not allocated.
//
// The package does not know what files a driver has (pkg/gpu/nvml does), where
// specs are kept (pkg/cdi/dir does), or how a GPU is shared.
package cdi
