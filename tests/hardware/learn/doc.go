// SPDX-License-Identifier: Apache-2.0

// Command learn holds what a card has answered (tests/hardware/run) against what the emulated
// driver answers to the same questions:
//
//	go run ./tests/hardware/learn FOLDER                 the differences, as a table
//	go run ./tests/hardware/learn -keep h200 FOLDER      and the answers into tests/testdata/cards/h200
//	go run ./tests/hardware/learn -model B200-180GB F    against that card of the emulator
//
// The emulator is asked anew each time, so the table says what is assumed today. Each line
// names the places in the code that rest on the answer: there something is to be mended, or
// to be explained.
package main
