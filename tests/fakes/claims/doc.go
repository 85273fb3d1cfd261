// SPDX-License-Identifier: Apache-2.0

// Package claims is a stand-in for a cluster as a DRA driver of one node sees it: an API
// server with ResourceClaims and ResourceSlices, a scheduler, and the kubelet's account of
// the claims that it has had prepared. All of it is in memory.
//
// [Cluster] answers what internal/dra asks, with the habits of Kubernetes 1.36 that a
// driver can notice:
//
//   - Whoever watches slices is told when somebody else changes them, as a kubelet does
//     that starts ([Cluster.Wipe], [Cluster.Meddle]).
//   - [Cluster.Schedule] takes the first device that fits, in the order of the slices, as the
//     scheduler does: no taint, what it consumes of its counters beside all that is allocated,
//     and its capacity beside all shares of it. What has left its slice consumes nothing.
//   - The kubelet writes a claim down before it calls the driver and forgets it after an
//     Unprepare that succeeded ([Cluster.Prepare], [Cluster.Unprepare]).
//
// A test that needs a claim of a shape of its own makes it with [Cluster.Put].
//
//	c := &claims.Cluster{Driver: "gpus.example.com"}
//	claim, err := c.Schedule("ns", "a", claims.Request{Name: "gpu", Fits: claims.Named("-shared"), Memory: 4 << 30})
//	devices, err := c.Prepare(ctx, driver, claim)
//	err = c.Unprepare(ctx, driver, claim)
//	c.Remove("ns", "a")
package claims
