// SPDX-License-Identifier: Apache-2.0

// Package programs builds small C programs that take GPU memory as users'
// programs do: by the allocators of PyTorch, RMM and JAX, between processes as
// NCCL and vLLM do.
//
// A cap that holds each call to the byte can still end an honest program: a pool
// that grows where the program has only given back on another stream, a refusal
// that takes so long that an allocator which retries crawls, memory that stays
// counted after another process has closed it. None of that shows in a call by
// itself. So each program here has the whole way of its original, with its
// constants: which sizes it asks the driver for, what it keeps, what it does when
// it is refused. What it computes is a load that the memory it has been told of
// holds, and that fills the rest by what the allocator keeps, so that it is at the
// edge all the time.
//
//	$ programs pytorch-caching 1 10000
//	ended name=pytorch-caching operations=4031882 granted=2914 refused=371 failed=0 … cpu-us=9914402 wall-us=10000310 failure=
//
// Which program stands for what, and where its constants come from, is told at the
// top of each file in c/. A program is told nothing of a cap, of the emulated
// driver or of a container: it asks the driver how much memory there is, as the
// originals do. It runs on a real GPU as it is. A request that stays refused after
// all that the allocator does about it counts as failed, and the program goes on
// as a user's would that has caught the error.
//
// The doors to the library are the probe's (package probe).
package programs
