// SPDX-License-Identifier: Apache-2.0

// Package cdi describes an allocation to a container runtime: it turns "these GPUs for that
// allocation" into a Container Device Interface (CDI) spec, as a value.
//
// An allocation is what the kubelet once asked for: a resource and some device IDs. Its [Key] is
// its name in three places: in the device name that Allocate returns ([DeviceName]), in the name of
// the file where the runtime finds that device ([FileName]), and in the annotation that identifies
// its containers later ([AnnotationName]).
//
// The spec of an allocation has one device, named by the key, with everything that it needs: the
// driver's common files and hooks, the device nodes of each GPU, and the rest. So a runtime reads
// one file for it, and the file alone decides whether the allocation's container may start: without
// the file it cannot.
//
//	parts, _ := driver.Parts(ctx)                      // what containers need, per GPU
//	key := cdi.Key("example.com/gpu-mem", ids)         // "5f0c…"
//	spec, err := cdi.Spec("example.com", key, parts, []gpu.UUID{"GPU-…"}, cdi.Overlay{})
//
// An [Overlay] replaces libraries of the driver, so that they can hold a container to what it was
// granted. A program finds the other library, and the driver's own is mounted where that one
// expects it.
//
// Specs are deterministic: equal arguments give equal values, in any order of the GPUs. So a caller
// may compare bytes to see whether a file must be written again. A spec declares the oldest CDI
// version that can express it, since a runtime refuses a file of a version newer than its own.
//
// Every spec sets NVIDIA_VISIBLE_DEVICES=void, as NVIDIA's own generator does. An older way of
// giving GPUs to containers uses that variable, and an image may set it. The value keeps a runtime
// hook that still obeys it from adding GPUs that were not allocated.
//
// The package does not know what files a driver has (pkg/gpu/nvml does), where specs are kept
// (pkg/cdi/dir does), or how a GPU is shared.
package cdi
