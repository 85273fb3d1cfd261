// SPDX-License-Identifier: Apache-2.0

// Package door has two locks for a library whose calls can hang. Waiting for them, and for the
// calls, ends with the caller's context.
//
// A [Door] runs one call at a time ([Through]). If the caller's context ends first, the caller
// leaves and the call goes on. Once such a call is [HungAfter] old it counts as hung: until it
// returns, the door refuses all other callers at once. A [Share] is held by many callers together
// or by one alone. Their own errors wrap gpu.ErrTimeout.
//
// The package does not know what the calls do.
package door
