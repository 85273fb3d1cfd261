// SPDX-License-Identifier: Apache-2.0

// Package peers is the other programs of the field, each built unmodified from
// the Go module proxy in a module of its own, so that nothing of them enters
// the product's go.mod, and measured beside the agent.
//
// # Who is here
//
// nvidia-device-plugin is NVIDIA's k8s-device-plugin, v0.19.0, which most
// clusters run. Its go.mod is all there is of it: a tool line and the versions
// that its own go.mod asks for. The version is part of every comparison, since
// later ones differ: its loop that hands out replicas is faster after v0.20.
//
// # How they are compared
//
// Program bench runs agent and peer on the same emulated driver in the same
// minute, and asks both in turn, one call here and one call there: what else
// the machine does meets both alike. A handler that does nothing, on gRPC as
// it comes, is asked in the same turn, which is what a call costs whatever is
// behind it.
//
//	make bench                         all figures, about eleven minutes
//	go run ./tests/peers/bench -smoke  the same with tiny counts: does it all work?
//
// # What is refused here
//
// No peer is patched, and none is given settings that nobody would use: where
// it can be had in two ways, the way of its own manifests is taken. A figure
// that is worse than the peer's is printed like any other.
package peers
