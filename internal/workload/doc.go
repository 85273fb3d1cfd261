// SPDX-License-Identifier: Apache-2.0

// Package workload has the words for what runs on a node. The kubelet, the container
// runtime and the API server each speak of pods, and none of their packages knows
// another: they say [Pod], and whoever compares what two of them said compares values.
//
//	p := workload.Pod{Namespace: "train", Name: "job-1", UID: "5f8a…"}
//	err := client.Evict(ctx, p)    // this pod, and none that comes after it
//
// [API] is how a container got its devices.
//
// Not everybody knows all of a pod: PodResources names pods without a UID, cgroups by
// the UID alone. The package knows neither, nor any object of the API.
package workload
