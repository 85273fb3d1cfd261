// SPDX-License-Identifier: Apache-2.0

// Command node-feature-discovery says what Node Feature Discovery, v0.18.3, makes of
// the features files at /etc/kubernetes/node-feature-discovery/features.d: as JSON,
// the labels that it would set on the node, and those that it refuses.
//
// NFD itself needs a cluster and its own kinds of objects in it, and takes a minute
// to see a file. What decides about a file is small: its worker's source "local",
// which reads the directory, and the rules by which its master takes a label. Both
// are called here, unmodified; nothing is decided by this program.
//
// It is in a module of its own, like each peer.
package main
