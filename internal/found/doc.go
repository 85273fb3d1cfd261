// SPDX-License-Identifier: Apache-2.0

// Package found names what earlier owners have left on a node's GPUs: modes, limits and programs
// that a layout does not ask for.
//
// It is pure. The caller reads a [Node] and adds the layout of each GPU, and [Look] returns the
// findings:
//
//	found.Look(found.Node{Driver: "580.95.05", GPUs: []found.GPU{{
//		Device: dev, Mode: status.Shared, Setup: gpu.Setup{Compute: gpu.ComputeExclusiveProcess}}}})
//	// ComputeModeSet, Failed: GPU 3 (GPU-…) is in compute mode EXCLUSIVE_PROCESS: …
//
// # A closed set
//
// Each kind of finding is a row in kinds.go: its code, what is found, what follows from it, the
// layouts that it matters for, and the command that ends it. A finding that matters for the GPU's
// layout is a condition of a grave type. Otherwise it is a remark ([status.Noted]). A setting that
// the driver does not report is no finding, and neither is a default. So a node that no other
// program has changed has no findings.
//
// # What is put right
//
// The agent changes only the compute mode ([PutRight]): it must be DEFAULT for whole GPUs and for
// those that containers share, or CUDA refuses each process but the first. If the owner of the mode
// lives, the agent names it and leaves the mode alone. An owner is a process on the GPU that
// belongs to no pod with an allocation there, or a daemon of MPS. All other settings stay: an
// operator may want them.
//
// # Limits
//
// The driver reports application clocks, but locked clocks (nvidia-smi -lgc) only while they slow a
// GPU down. Names of processes are chosen by the processes: they are shown, and a process that
// calls itself a daemon of MPS can only prevent that the mode is put right.
package found
