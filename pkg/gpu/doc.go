// SPDX-License-Identifier: Apache-2.0

// Package gpu has the types with which all other packages of the agent describe
// hardware: what a GPU is called, how much memory it has, which instances it has, and
// which failures a caller can tell apart.
//
// It is floor 0: plain values, no behaviour that could fail, no import beyond the
// standard library. The driver's own types stop at pkg/gpu/nvml, the kubelet's at
// pkg/plugin; between packages only the types declared here are passed.
//
// Two pairs of types run through the whole program. What could exist is not
// what exists (a MIG [Profile] with its [Placement], against an [Instance] with
// its UUID), and what is wanted is not what is (config.Desired, against
// [Inventory]). Separate types keep a plan from being mistaken for a fact.
//
// An Inventory is also a document: `gpu-agent inventory -o json` prints it, and
// `gpu-agent check --inventory` reads it, so its field names are a contract
// with other tools.
//
//	{"driver": "580.159.03", "gpus": [{"index": 0, "uuid": "GPU-…", "memoryMiB": 81559}]}
//
// The package does not know how a value was obtained, how a GPU is shared, or
// what a container is.
package gpu
