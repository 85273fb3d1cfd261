// SPDX-License-Identifier: Apache-2.0

// Command prose counts constructions that make a reader read a sentence twice. It reads the
// comments of the product, in Go and C, and its texts: every string in the code that has at
// least three words, and so each error, log line, Event, reason and help text.
//
//	go run ./tests/architecture/prose                 # cmd, internal and pkg
//	go run ./tests/architecture/prose -v pkg/mig      # and each place it counted
//
// The count is a floor under bad habits, not a judge: a text that passes can be hard to read.
package main
