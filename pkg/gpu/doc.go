// SPDX-License-Identifier: Apache-2.0

// Package gpu has the types by which the agent's other packages describe hardware: the names of
// GPUs, their memory, their MIG instances, and the failures that callers distinguish.
//
// It has plain values only and imports nothing beyond the standard library. The driver's own
// types do not leave pkg/gpu/nvml, nor the kubelet's pkg/plugin.
//
// Two pairs of types are kept apart, so that no code takes a plan for a fact. A MIG [Profile]
// with its [Placement] could exist; an [Instance] with its UUID exists. config.Desired is what an
// administrator wants; [Inventory] is what the node has.
//
// An Inventory is also a document: `gpu-agent inventory -o json` prints it, and `gpu-agent check
// --inventory` reads it. So its field names are a contract with other tools.
//
//	{"driver": "580.159.03", "gpus": [{"index": 0, "uuid": "GPU-…", "memoryMiB": 81559}]}
//
// The package does not know how a value was obtained, how a GPU is shared, or
// what a container is.
package gpu
