// SPDX-License-Identifier: Apache-2.0

// Package foreign runs tests of other packages as on a machine that has a real
// NVIDIA driver. Whoever has a GPU is who will want to run them, and a driver that
// is not the emulated one must neither be seen nor be used.
//
// The machine is a mount namespace with what a driver leaves on one: device nodes,
// of one GPU and of MIG, numbers in /proc/devices, files in /proc/driver, and
// libraries and an nvidia-smi where the loader and the shell find them, which end
// whoever uses them.
//
//	go test ./tests/foreign            a part of the tests, in a minute
//	go test ./tests/foreign -all       all tests of the packages, but those of tests/peers
//	go test ./tests/foreign -all -peers
//
// The tests of the other machine say what they always say; this package has no
// opinion of its own about the emulated driver.
package foreign
