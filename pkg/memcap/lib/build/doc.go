// SPDX-License-Identifier: Apache-2.0

// Command build compiles the cap's libraries into pkg/memcap/lib/built, where the agent embeds
// them. `make build` runs it first, from the top of the checkout. Its only argument may name
// another folder. It is a program of its own so that the agent does not contain code that calls a
// compiler.
package main
