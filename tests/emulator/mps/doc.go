// SPDX-License-Identifier: Apache-2.0

// Package mps emulates NVIDIA's MPS: the control daemon, the program that speaks to it, the server,
// and clients. Every figure from it is emulated. The program that imports it is all of them, under
// NVIDIA's names:
//
//	func main() { mps.Main(); … }      // first of all
//
//	err := mps.Lay("/run/nvidia/driver/usr/bin", "555.58.02")
//
// # Who knows what
//
// The daemon has the settings and the connections of clients, by the files and answers that NVIDIA's
// own have. In a driver root the server is also known to the emulated driver's world, which it tells
// of itself ([emulator.World.ServeMPS]): the world says what contexts a client has, what a fault or a
// kill does to its neighbours, and what the compute mode forbids. Without a world beside it, the
// programs are for tests of the control side alone, with clients of [Connect].
//
// A client is a program that has loaded the emulated libcuda.so.1 (lib/c/cuda_mps.c). It asks the
// daemon first, and then tells the world whose client it is:
//
//	client → daemon   "client"
//	daemon → client   "server PID percent P", or "error NUMBER" with CUDA's number
//
// # Where it is from
//
// What needs no card is held to transcripts of NVIDIA's own programs in testdata of internal/mps:
// files, options, answers, refusals, one control program at a time. What needs a card is from
// NVIDIA's documentation, and from others' measurements: servers, percentages that are fixed when a
// context is made, 48 clients, terminate_client, faults. A command that the emulation does not know is
// refused as an unknown one.
//
// [Behave] changes how the daemons of a directory behave from their next command on: they answer
// nonsense, ignore settings, die, or leave their servers behind.
package mps
