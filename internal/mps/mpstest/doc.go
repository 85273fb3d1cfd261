// SPDX-License-Identifier: Apache-2.0

// Package mpstest gives tests the emulated programs of MPS ([mps.Main]) without a card:
//
//	func TestMain(m *testing.M) { mpstest.Main(); os.Exit(m.Run()) }
//
//	programs := mpstest.Install(t, "555.58.02")  // a directory with both programs
package mpstest
