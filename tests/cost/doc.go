// SPDX-License-Identifier: Apache-2.0

// Package cost measures what an input from outside makes a program allocate, for tests that hold
// it to a bound:
//
//	if took := cost.Allocated(func() { parse(text) }); took > 8<<20 {
//
// Bytes are counted and not time, so the answer is the same on a machine that other work keeps
// busy. Whoever allocates beside it in the same process counts too.
package cost
