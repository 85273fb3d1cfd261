// SPDX-License-Identifier: Apache-2.0

// Command kit makes the folder with which a card is asked (tests/hardware/run):
//
//	go run ./tests/hardware/kit dist/test-gpu
//
// (make test-gpu-kit). The folder can be taken to any machine with the driver: programs in it
// load the driver's libraries by name when they run, and need nothing else but the C library.
// The dry run on the emulated driver makes its folder in the same way.
package main
