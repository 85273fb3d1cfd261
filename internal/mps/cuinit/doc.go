// SPDX-License-Identifier: Apache-2.0

// Package cuinit begins CUDA in the process that calls it, and does nothing else. It is for a short-lived
// process that finds out whether programs can: under an MPS server that hangs cuInit never returns, so
// the caller gives the process a deadline.
//
//	result, err := cuinit.Call() // 0, or CUDA's error
//
// The driver's library is found by the dynamic linker, LD_LIBRARY_PATH included. The package makes no
// context.
package cuinit
