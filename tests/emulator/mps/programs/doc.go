// SPDX-License-Identifier: Apache-2.0

// Command programs is the emulated programs of MPS and nothing else: NVIDIA's control daemon, the program that
// speaks to it, and the server, by the name under which it is started (package tests/emulator/mps). Tests have
// it built (internal/mps/mpstest): a supervisor starts the control program several times in each round, and a
// test binary takes long to start, above all with the race detector.
package main
