// SPDX-License-Identifier: Apache-2.0

// Package config turns what an operator wrote into the wanted layout of every GPU of a
// node: [Parse] reads a partition file, [File.Desire] applies one of its partitions to a
// node's inventory.
//
// A file holds named partitions; one of them is chosen for a node. A partition
// is a list of entries, each of which selects GPUs and says how to lay them out:
//
//	version: v1
//	partitions:
//	  default:
//	    - devices: all            # all | [0, 3] | ["GPU-…"] | {model: "NVIDIA H100*"}
//	      mode: shared            # whole | shared | mig | off
//	      api: device-plugin      # device-plugin | dra; without it, what the node says
//	      replicas: 4             # shared only; without it, units of memory
//	      timeSlice: short        # shared only: default | short | medium | long
//	      compute: timeslice      # shared only: timeslice | mps
//	  research:
//	    - devices: [0, 1]
//	      mode: whole
//	    - devices: [2]
//	      mode: mig
//	      geometry: {3g.40gb: 1, 1g.10gb: 4}   # fixed; {} is MIG on with no instance
//	    - devices: [3]
//	      mode: mig                            # no geometry: on demand
//	      profiles: [1g.10gb, 2g.20gb]         # optional: only these
//
// # Strict decoding
//
// A mistyped key that is silently skipped would lay out a GPU in an unwanted way, so
// decoding is strict: unknown and repeated keys, wrong types,
// `replicas: 0` and keys that the mode does not have are mistakes. They are reported
// together, in line order, as `file:line: reason`: the first 20, in less than 4 KiB,
// and how many more there are. So are files that are not YAML. YAML aliases and merge
// keys work, up to a size that no sensible file reaches.
//
// What can be known from the file alone is checked when it is parsed. What
// depends on the node is checked when a partition is chosen for it:
//
//   - exactly one entry must match each GPU; the error names both lines, or the
//     GPU that none matches. (A GPU that the driver cannot describe at the
//     moment is left as it is when no entry matches it: a card that died must
//     not stop the others from being configured.)
//   - an index or a UUID that the node lacks is a mistake;
//   - so is a GPU that would offer nothing although it is to offer something: one that is
//     smaller than a unit of memory, or of whose MIG profiles none is understood or has a
//     place;
//   - so is a partition that makes more devices of the node than the kubelet can be
//     told of (30,000, of all GPUs and resources together); the error names the entry
//     that makes the most;
//   - so is what DRA cannot have (compute-instance splits, a node without an API server),
//     and one resource name through both APIs on one node, of which the scheduler would
//     see only the device plugin's;
//   - a model pattern that matches nothing here is no mistake, so that one file can
//     serve a fleet. Patterns are those of [path.Match].
//
// What this version does not support yet (compute mps) is refused in the same
// second step, by name and line, and only if it would apply to one of the node's
// GPUs: its syntax is checked with the rest of the file, and the other partitions
// of the file stay usable.
//
// # MIG is checked before anything is changed
//
// An entry with mode mig says one of three things: a geometry, which is then
// exactly what exists; `geometry: {}`, which is MIG on and no instance; or no
// geometry at all, which is on demand, of all profiles or of those listed. Counts
// are of what containers get: of a split such as 1c.3g.40gb they are of compute
// instances, and GPU instances are filled in turn.
//
// Before a geometry is accepted, pkg/mig searches whether each GPU can have it, by what
// its driver says. One message for the entry names the GPUs
// and the reason:
//
//	gpus.yaml:7: GPUs 0 and 1: 8x1g.10gb: at most 7 of 1g.10gb can exist on this GPU
//
// A GPU that cannot do MIG, or whose driver does not tell its profiles, is
// refused too. Some drivers report placements only while MIG is on: there the
// geometry is accepted, marked as [Want.Unproven], and [File.Prove] refuses what is not
// proven.
//
// # NVIDIA MIG manager's files
//
// A file whose key is `mig-configs` instead of `partitions` is one written for
// NVIDIA's MIG manager and is read as such: each of its configs is a partition,
// whose name is the value that its node label had.
//
//   - Several items may match one GPU: they apply in order and the last one wins;
//     what it replaces need not fit. A GPU that none matches is left as it is
//     ([Keep]).
//   - `devices: all` of an item with `mig-enabled: true` is all GPUs that can do
//     MIG; the others are as if the item were not there. An index names its GPU
//     whether or not it can do MIG, and counts all GPUs of the node.
//   - A device-filter is one PCI id or a list, each with the subsystem's id behind
//     a colon where boards of one device differ. An index that the node lacks is a
//     mistake unless the filter says that the item is not meant for this node.
//   - `mig-enabled: false` means whole. `mig-devices: {}` is MIG on with no
//     instance; absent or null it is a mistake where MIG is on. A count of zero
//     beside others is none.
//
// tests/peers lets NVIDIA's tool apply every example of its documentation, and compares
// the result with what this package makes of them.
//
// The package reads bytes and values. It does not know where a file came from, what
// time it is, which geometries a card can have beyond what its driver says, and what is
// running on it.
package config
