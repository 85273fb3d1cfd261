// SPDX-License-Identifier: Apache-2.0

// Package daemon shares one emulator.World among the processes of a node, as
// the kernel's driver shares the GPUs.
//
// A Server answers on a unix socket of type SEQPACKET: one message asks, one
// answers, in the form that package emulator's Session.Serve reads. A
// connection begins with "hello", which carries the protocol's version and is
// answered with the name of the world and a page of shared memory. The
// page lets a program keep answers that cannot have changed (its first word
// numbers the state they hold for) and still have every call counted, so that
// a static look-up costs what it costs on a real driver.
//
// Who asks is known from the socket's peer credentials. Process lists are
// given in the asker's own PID namespace, and what that namespace cannot see is
// left out, as the real driver does; a process's memory is freed when the
// process is dead, not when a descriptor is closed, since a forked child keeps
// descriptors open.
//
// Which GPUs the asker sees follows from the device nodes in its /dev, so that a
// container has its own. The /dev that the daemon itself sees is the machine's: its
// nodes count only where package install has laid them, as on a test node, and are
// a real driver's otherwise.
//
// A Client is the operator's hand on the world: it raises an Xid, drops or
// unplugs a GPU, unloads the driver, makes calls fail, counts them. It speaks
// JSON over the same socket. Where package install has left word of what it laid
// at the Server's driver root, device nodes, kernel files and libraries follow.
package daemon
