// SPDX-License-Identifier: Apache-2.0

// Command closed is a tool for go vet: it finds each switch over a closed set, such as the kinds
// of pieces or the modes of a partition, that leaves one of them out, and each map below the
// words exhaustive:enforce. As a tool of go vet it looks again only at what has changed. Tests may
// leave out what they do not mean.
//
//	go vet -vettool=$PWD/closed ./internal/...
package main
