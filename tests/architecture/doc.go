// SPDX-License-Identifier: Apache-2.0

// Command architecture draws docs/architecture.svg, the product's packages on their
// floors and who imports whom, and in docs/architecture.md the phases of an allocation, and which files
// name members of closed sets.
//
//	go run ./tests/architecture         # writes both
//	go test ./tests/architecture        # fails where they are not the program
//
// Floors come from the table in deps_test.go, imports from the source files without
// their tests. An arrow is left out where another way leads down to the same package
// (cmd/gpu-agent imports pkg/gpu, but through everything else as well): what is left
// shows the order, and every import of the product is an arrow or a chain of arrows.
// Within a floor a package that imports a sibling is in a row of its own above it.
//
// The picture depends on nothing but the source: packages are sorted by name, then
// moved a fixed number of times towards the middle of those above and below them.
package main
