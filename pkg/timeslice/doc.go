// SPDX-License-Identifier: Apache-2.0

// Package timeslice is the arithmetic of sharing a GPU between containers that
// take turns on it: how many pieces a GPU has, what the pieces are called, and which
// of them a request should get.
//
// There are two kinds of pieces. A unit is an amount of a GPU's memory, the
// same on every node: a GPU has [Units] of them, and a request for n units
// means n × unit of memory of one GPU. A replica is one of r equal turns on a
// GPU, whatever its size: a request for n replicas means n different GPUs. The
// pieces of a GPU are numbered from 0, and [ID] names one:
//
//	GPU-5a2f…-c1::17
//
// A node has at most [MaxDevices] of them, since the kubelet takes no longer list.
//
// The kubelet knows pieces only as a set of names. It asks which ones to prefer, and
// without an answer it takes any, in map order. So the rules are here. [PreferUnits] packs:
// of the GPUs that still have n units free it takes the fullest, so that the largest free
// block stays as large as it can be for the next big request. [PreferReplicas] takes one
// replica of each of n GPUs, the fullest GPUs first, so that idle GPUs stay whole. Equal
// GPUs are told apart by a rank that the caller gives (their index) and then by UUID,
// and within a GPU the lowest numbers go first, so that an answer depends on
// what is free and never on the order in which it was listed.
//
//	ids, err := timeslice.PreferUnits(available, must, 24, rank)
//
// An answer can be impossible though the sum over the GPUs would do: the
// scheduler sees the sum only. Then the error is a [FitError] or a
// [SpreadError], written for the person whose pod was refused.
//
// Preferences are wishes. The kubelet does not ask when it needs every piece
// that is free, and gives pieces of a pod's init container to its app container
// unasked. [OneGPU] and [DistinctGPUs] therefore judge again what was granted.
//
// Everything is pure and deterministic: no clock, no driver, no state. The
// package does not know who holds a piece, what a piece is good for inside a
// container, or how a resource is named.
package timeslice
