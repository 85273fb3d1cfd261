// SPDX-License-Identifier: Apache-2.0

package workload

// API is the API of the kubelet through which a container gets its devices. A GPU is given out
// through one of them. Its values are written in records and in GPUNodes.
type API string

const (
	DevicePlugin API = "device-plugin"
	// DRA is dynamic resource allocation.
	DRA API = "dra"
)
