// SPDX-License-Identifier: Apache-2.0

// Package arm64 tests, on an amd64 machine, what is built for arm64: with Debian's cross
// compiler, and under qemu's emulation of a process (qemu-user), with pages of 4 KiB or 64.
//
//   - units_test.go runs the packages' own tests. The C programs that they build are arm64's,
//     too.
//   - agent_test.go starts the agent on the emulated driver, whose libraries are arm64's.
//   - cap_test.go holds a program to its cap by the library that a container has.
//
// So that tests may start programs of their own, qemu is registered as the interpreter of
// arm64 programs (binfmt_misc), in a user namespace that ends with the test: nothing of the
// machine changes. That takes Linux 6.7.
//
// qemu plays pages of 64 KiB, and still maps a file only as far as the file goes. So the
// libraries that it loads are padded (lib.Pad).
//
// What qemu cannot do is in a list, with the reason, and the long form looks that it still
// cannot. It shows no weak memory order: an emulator on x86-64 has x86-64's. See tests/order.
package arm64
