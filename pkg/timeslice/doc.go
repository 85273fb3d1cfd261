// SPDX-License-Identifier: Apache-2.0

// Package timeslice is the arithmetic of sharing a GPU between containers that take turns on it:
// how many pieces a GPU has, how they are named, and which of them a request should get.
//
// There are two kinds of pieces, numbered from 0 on each GPU. A unit is an amount of a GPU's
// memory, the same on every node. A GPU has [Units] of them, and a request for n units means n ×
// unit of memory of one GPU. A replica is one of r equal turns on a GPU of any size. A request for
// n replicas means n different GPUs. [ID] names a piece:
//
//	GPU-5a2f…-c1::17
//
// A node has at most [MaxDevices] pieces, since the kubelet accepts no longer list.
//
// # Which pieces
//
// The kubelet knows pieces only as a set of names. It asks the plugin which ones to prefer, and
// without an answer takes any. The preferences are these:
//
//   - [PreferUnits] packs. Of the GPUs that have n units free it takes the fullest, so that the
//     largest free block stays as large as possible for the next big request.
//   - [PreferReplicas] takes one replica of each of n GPUs, the fullest GPUs first, so that idle
//     GPUs stay idle.
//
// Among equal GPUs a rank from the caller decides (their index), and then the UUID. Within a GPU
// the lowest numbers go first. So an answer depends on what is free, and never on the order of the
// list.
//
//	ids, err := timeslice.PreferUnits(available, must, 24, rank)
//
// # Refusals
//
// A request may fit the sum over the GPUs, which is all that the scheduler sees, and still fit no
// GPU. Then the error is a [FitError] or a [SpreadError]. Its text is for the person whose pod was
// refused.
//
// The kubelet does not ask for a preference if it needs every free piece. It also gives pieces of a
// pod's init container to its app container without asking. So [OneGPU] and [DistinctGPUs] check
// what was granted.
//
// # Limits
//
// The package is pure and deterministic: it has no clock, no driver and no state. It does not know
// who holds a piece, what a piece gives inside a container, or how a resource is named.
package timeslice
