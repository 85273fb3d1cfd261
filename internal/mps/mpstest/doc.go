// SPDX-License-Identifier: Apache-2.0

// Package mpstest gives tests the emulated programs of MPS ([mps.Main]) without a card:
//
//	func TestMain(m *testing.M) { mpstest.Main(); os.Exit(m.Run()) }
//
//	programs := mpstest.Install(t, "555.58.02")  // a directory with both programs
//
// They are built once for each test binary; on other processors than amd64 they are that binary, which is why
// it calls Main.
package mpstest
