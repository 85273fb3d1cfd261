// SPDX-License-Identifier: Apache-2.0

// Package capsule is a container without a container runtime: a root, mounts
// and PIDs of its own, laid in a fraction of a second, for tests of what
// happens inside one.
//
// # The model
//
// A Machine is an emulated node: a world of GPUs, the daemon that serves it in
// this very process, and the driver's files in a folder. Open makes a Container
// on it. Its image is the machine that the test runs on: an overlay of / with
// its changes in memory, a fresh /proc, a /dev with a handful of nodes. On it
// are laid the edits of a CDI file as a runtime lays them: device nodes,
// bind mounts, file systems, in their order, and what NVIDIA's hooks do so that the
// driver's libraries are found. Allocation makes such edits, the driver's part as NVIDIA's tools
// do and the cap's part as the agent does. The function Open makes a container of any
// edits, those of a real driver too.
//
//	m, err := capsule.Start(ctx, dir, emulator.Spec{Count: 2})
//	c, err := m.Open(ctx, edits, nil)
//	p, err := c.Start(capsule.Program{Args: []string{"/bin/true"}})
//	status, err := p.Wait(ctx)
//
// The container's PID 1 is this test program in another role (a test calls Main
// first thing in its TestMain): it lays the mounts, starts programs when it is
// told to over a socket, and buries the dead. It ends when the socket's other
// end closes, which is when the test ends, in whatever way; and with it the
// kernel ends all that runs in the container and takes the mounts down.
// Nothing is ever mounted outside.
//
// A Reader stands in for the agent beside the containers: at its interval it
// reads the driver's figures and publishes them on the limit pages.
//
// # What it refuses to know
//
// Cgroups, users and seccomp filters: what is tested here does not depend on
// them. Root is needed, and overlay and tmpfs in the kernel.
package capsule
