// SPDX-License-Identifier: Apache-2.0

// Command programs is the emulated programs of MPS and nothing else: NVIDIA's control daemon, the program that
// speaks to it, and the server, by the name under which it is started (package tests/emulator/mps). Tests
// with the race detector have it built without: a supervisor starts the control program several times in
// each round, and every start of a program with the detector takes a twentieth of a second of a processor.
package main
