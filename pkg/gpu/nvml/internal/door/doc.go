// SPDX-License-Identifier: Apache-2.0

// Package door lets callers wait for a library whose calls can hang, and leave.
//
// A [Door] has one call inside at a time ([Through]). Its caller waits no longer than his
// context; if he leaves, the call stays inside, and once it is [HungAfter] old it is taken for
// hung: everybody else is turned away at once until it returns. A [Share] is held by many
// together or by one alone, and those in line for it can leave as well. All errors of both
// wrap gpu.ErrTimeout.
//
// The package does not know what the calls are.
package door
