// SPDX-License-Identifier: Apache-2.0

// Package ctxlock has two locks for a library whose calls can hang. Waiting for them, and for the
// calls, ends with the caller's context.
//
// A [Mutex] runs one call at a time ([Do]). If the caller's context ends first, the caller
// leaves and the call goes on. Once such a call is [HungAfter] old it counts as hung: until it
// returns, the mutex refuses all other callers at once. An [RWMutex] is held by many callers
// together or by one alone. Their own errors wrap gpu.ErrTimeout.
//
// The package does not know what the calls do.
package ctxlock
