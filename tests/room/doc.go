// SPDX-License-Identifier: Apache-2.0

// Package room says whether a pod that is pending would find devices: a search over what
// the API server has at that moment, by the scheduler's own allocator as a library. It
// shares nothing with the scheduler that runs, whose picture may be old, and nothing with
// the product, whose slices it only reads.
//
//	w, err := room.Look(get)
//	on, err := w.For(ctx, "node-1", room.Request("mig-2g.20gb.example.com", 1))
//
// A search that finds something says that the scheduler could place the pod now, or that it
// is about to: it tries again after a back-off of up to ten seconds. Who judges waits for
// longer than that.
package room
