// SPDX-License-Identifier: Apache-2.0

// Package gpu holds the words that every other room of the agent uses when it
// speaks of hardware: what a GPU is called, how much memory it has, what sits
// on it and which ways of failing a caller can tell apart.
//
// It is floor 0 of the house: plain values, no behaviour that could fail, no
// import beyond the standard library. The driver's own types stop at
// pkg/gpu/nvml, the kubelet's at pkg/plugin; what passes between rooms is what
// is declared here.
//
// Two pairs of types run through the whole program. What could exist is not
// what exists (a MIG [Profile] with its [Placement], against an [Instance] with
// its UUID), and what is wanted is not what is (config.Desired, against
// [Inventory]). Keeping them apart in the type system is what stops a plan from
// being mistaken for a fact.
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
