// SPDX-License-Identifier: Apache-2.0

// Package compute is the arithmetic of shares of a GPU's compute, its multiprocessors (SMs).
//
// The containers of a shared GPU take turns, or they run at the same time as clients of MPS,
// NVIDIA's Multi-Process Service. [Sharing] says which, for a GPU. Under MPS each container has a
// [Share]: a ceiling in percent of the GPU's SMs. It follows from the container's part of the GPU's
// memory:
//
//	s := compute.Sharing{MPS: true, Factor: 2, Max: 80}
//	s.Share(20.0 / 79)     // 20 of 79 GiB: ceiling 51 %
//
// Ceilings of one GPU may add up to more than 100 percent: then containers that are busy at the same
// time compete for SMs.
//
// # How strongly a share is held
//
// MPS fails open: a program that does not reach its daemon runs with all SMs. So a [Held] is never
// what was configured, but what was seen of the processes that run ([Verify]). What was not seen is
// [None], with the reason.
//
// # Limits
//
// The package is pure. It knows no daemon, no driver and no container.
package compute
