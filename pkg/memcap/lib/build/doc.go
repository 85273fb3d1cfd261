// SPDX-License-Identifier: Apache-2.0

// Command build compiles the cap's libraries into pkg/memcap/lib/built, from
// where the agent embeds them; `make build` runs it first, from the top of the
// checkout. Another folder can be named as its only argument. It is a program
// of its own so that the agent need not bring a compiler's caller along, and it
// knows nothing but lib.Build.
package main
