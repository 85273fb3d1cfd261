// SPDX-License-Identifier: Apache-2.0

// Package mpstest emulates MPS for tests: the control daemon, the program that speaks to it, the
// server, and clients. Every figure from it is emulated. The test binary itself is all of them,
// under NVIDIA's names:
//
//	func TestMain(m *testing.M) { mpstest.Main(); os.Exit(m.Run()) }
//
//	programs := mpstest.Install(t, "555.58.02")  // a directory with both programs
//
// What needs no card is held to transcripts of NVIDIA's own programs in testdata of package mps:
// files, options, answers, refusals, one control program at a time. What needs a card is from
// NVIDIA's documentation: servers, clients, a percentage that is fixed when a client connects,
// terminate_client. A command that the emulation does not know is refused as an unknown one.
//
// [Set] changes how the daemons of a directory behave from their next command on: they answer
// nonsense, ignore settings, die, or leave their servers behind.
package mpstest
