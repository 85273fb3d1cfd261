// SPDX-License-Identifier: Apache-2.0

// Package workload defines names for what runs on a node. The packages for the kubelet, the
// container runtime and the API server all report pods, and do not know each other. They share the
// type [Pod], so that a caller can compare the pods of two of them as values.
//
//	p := workload.Pod{Namespace: "train", Name: "job-1", UID: "5f8a…"}
//	err := client.Evict(ctx, p)    // this pod, and no later one of the same name
//
// [API] is the API through which a container got its devices.
//
// Not every source knows all of a pod: PodResources names pods without a UID, cgroups by the UID
// alone. The package knows neither, nor any object of the API.
package workload
