// SPDX-License-Identifier: Apache-2.0

// Package order shows that the counter that a container's processes share is right on arm64,
// whose processors reorder what x86-64 keeps in order. No test on an x86-64 machine can see
// that: an emulator there (qemu) runs arm64 programs with x86-64's order.
//
// # The machine
//
// machine.go is Armv8 as its architecture permits it to be: one memory, in which a store
// becomes visible to all other processors at once, and threads that do their accesses in any
// order that nothing forbids. An access waits for an acquiring read before it, a releasing
// write for all before it, a write for the values and the condition that it depends on, and
// accesses to one word keep their order. Reads wait for no condition, since processors
// speculate; a load may take what its own thread has yet to store; the two halves of an update
// (LDAXR, STLXR) are two steps, between which other accesses come, as on the processors
// that lack Armv8.1's atomic instructions. Those order more. All executions of a program are
// walked through. litmus_test.go holds the machine to what Arm's own model says of the litmus
// tests by which memory models are told apart.
//
// # The counter
//
// counter.go has the counter's steps as threads of such a machine: allocations and frees
// beside a repair, idle memory, slots that are new or whose owner was killed at any step,
// lost memory near the ceiling, a reading while it is published, borrowed memory, attempts,
// and gates that are closed. Each says what must be true at every moment, or in the end.
//
// The order of each access is read from the source (source.go), so the model and the source
// cannot say different things. Each order is then taken out, one at a time, and some program
// must go wrong. What goes wrong nowhere is an order that the source need not state. Three of
// these it states all the same, because C's rules need them.
//
// # What it does not show
//
// Only what is under way at the same time in a few threads, each a few steps long. The
// driver's calls are taken to have a lock of their own, a system call to be a barrier, and the
// kernel's lock on a slot to be one. The agent reads usage pages by pread: its words come
// in any order within a call, and in order from call to call, because the kernel takes and
// drops a reference of each page. The table of a process (c/table.h) and its pools are not
// here, but for their gates.
package order
