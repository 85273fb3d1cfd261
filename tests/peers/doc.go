// SPDX-License-Identifier: Apache-2.0

// Package peers is the other programs of the field, each built unmodified from
// the Go module proxy in a module of its own, so that nothing of them enters
// the product's go.mod, and measured beside the agent.
//
// # Who is here
//
// nvidia-device-plugin is NVIDIA's k8s-device-plugin, v0.19.3, which most
// clusters run. The version is part of every comparison, since
// later ones differ: its loop that hands out replicas is faster after v0.20.
//
// nvidia-mig-parted is NVIDIA's mig-parted, v0.13.1, which cuts GPUs into MIG
// devices on most clusters, started by their MIG manager. The tests here run its
// export, apply and assert on the emulated driver, with the configurations that it
// comes with; what operators find out about it is tried as well, since an emulator
// on which it does not fail is none:
//
//	a change of one GPU's mode resets every GPU, and needs them all idle
//	a busy instance fails a change after its idle neighbours are gone
//	a GPU instance without a compute instance is invisible to it, and in its way
//	what no card can have is valid, and empties the card; of another card's
//	profile it even says that it was applied
//
// gpu-feature-discovery is NVIDIA's GPU Feature Discovery, v0.19.3, by whose labels
// much of the field chooses nodes. It runs on the emulated driver of one machine
// after another, and what it writes is held, entry by entry, against what
// internal/label makes of the same machine.
//
// nvidia-dra-driver is NVIDIA's driver for dynamic resource allocation, v0.4.1, which runs
// with its gate DynamicMIG in program bench alone. Its module asks for the Kubernetes
// libraries of the test node's release, where its own go.mod has a release candidate's. It
// publishes nothing on a machine of more than eight GPUs.
//
// node-feature-discovery is what decides about a features file in the Kubernetes
// project's Node Feature Discovery, v0.18.3: it reads the agent's file for every
// machine that is recorded, and says which labels it would set.
//
// Each peer's go.mod is all there is of it, but for the last: a tool line and the
// versions that its own go.mod asks for. Peer.Build makes the program, and Parted,
// GFD and NFD run it in a namespace of its own.
//
// # How they are compared
//
// Program bench runs agent and peer on the same emulated driver in the same
// minute, and asks both in turn, one call here and one call there: what else
// the machine does meets both alike. A handler that does nothing, on gRPC as
// it comes, is asked in the same turn, which is what a call costs whatever is
// behind it.
//
//	make bench                         all figures, about forty minutes
//	go run ./tests/peers/bench -smoke  the same with tiny counts: does it all work?
//
// # What is refused here
//
// No peer is patched, and none is given settings that nobody would use: where
// it can be had in two ways, the way of its own manifests is taken. A figure
// that is worse than the peer's is printed like any other.
package peers
