// SPDX-License-Identifier: Apache-2.0

// Command stutter runs a program on a machine that stops for a moment, now and
// then, with everything that the program does: a tenth to half a second, once in
// a second or two. That is what a virtual machine does whose host is busy, and a
// container at its CPU limit, and nothing that is right may break by it: neither a
// test nor what it tests, such as a wait that ends by the clock before those who
// were waited for have run again.
//
//	stutter [-seed N] PROGRAM [ARGUMENT]...
//	go run ./tests/stutter go test ./tests/memcap
//	go run ./tests/stutter make test
//
// The program and what it starts are in a control group of version 2, which the
// kernel freezes and thaws; so it needs root. What it leaves running is ended with
// it. The exit status is the program's, 1 if stutter itself fails.
//
// It knows nothing of what it runs, and does not stop programs that leave the
// group, as containers of a real containerd do.
package main
