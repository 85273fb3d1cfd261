// SPDX-License-Identifier: Apache-2.0

// Package config turns what an operator wrote into the wanted layout of each GPU of a node.
// [Parse] reads a partition file, and [File.Desire] applies one of its partitions to a node's
// inventory.
//
// A file holds named partitions; one of them is chosen for a node. A partition is a list of
// entries. Each entry selects GPUs and gives their layout:
//
//	version: v1
//	partitions:
//	  default:
//	    - devices: all            # all | [0, 3] | ["GPU-…"] | {model: "NVIDIA H100*"}
//	      mode: shared            # whole | shared | mig | off
//	      api: device-plugin      # device-plugin | dra; without it, what the node says
//	      replicas: 4             # shared only; without it, units of memory
//	      timeSlice: short        # shared only: default | short | medium | long
//	      compute: timeslice      # shared only: timeslice | mps | {mps: {factor: 2, max: 80}}
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
// If a mistyped key were skipped, a GPU would get an unwanted layout. So decoding is strict:
// unknown and repeated keys, wrong types, `replicas: 0` and keys of another mode are mistakes,
// and so is a file that is not YAML. Mistakes are reported together, in line order, as
// `file:line: reason`: the first 20, in less than 4 KiB, and the number of the others. YAML
// aliases and merge keys work, up to a size that no sensible file reaches.
//
// Parse checks what the file alone can show. Desire checks what depends on the node:
//
//   - Exactly one entry must match each GPU. The error names both lines, or the GPU that has no
//     entry. A GPU that the driver cannot describe at the moment may go without: it is left as
//     it is, since one dead card must not stop the others from being configured.
//   - An index or a UUID that the node lacks is a mistake.
//   - So is a GPU that is to offer something and has nothing to offer: it is smaller than a unit of
//     memory, or it has no MIG profile that is known and has a place.
//   - So is a partition with more devices than the kubelet can be told of (30,000 for a node). The
//     error names the entry with the most.
//   - So is anything that DRA cannot do: compute-instance splits, or a node without an API server.
//   - So is one resource name through both APIs on one node: the scheduler would see only the
//     device plugin's.
//   - A model pattern that matches nothing is no mistake, so that one file can serve a fleet.
//     Patterns are those of [path.Match].
//
// Desire also refuses compute mps, by name and line, if the node cannot have it, or a GPU that it would
// apply to. Parse checks its syntax with the rest of the file, and the file's other partitions stay
// usable.
//
// # MIG is checked before anything is changed
//
// An entry with mode mig is one of three. With a geometry, exactly its instances exist. With
// `geometry: {}` MIG is on without instances. With no geometry, instances are made on demand, of
// all profiles or of those listed. Counts are of the instances that containers get: for a split
// such as 1c.3g.40gb these are compute instances, and GPU instances are filled in turn.
//
// Before a geometry is accepted, pkg/mig searches whether each GPU can have it, from its driver's
// figures. The entry gets one message, with the GPUs and the reason:
//
//	gpus.yaml:7: GPUs 0 and 1: 8x1g.10gb: at most 7 of 1g.10gb can exist on this GPU
//
// A GPU that cannot do MIG, or whose driver reports no profiles, is refused too. Some drivers
// report placements only while MIG is on. The geometry is then accepted and marked as
// [Want.Unproven]; [File.Prove] refuses it.
//
// # NVIDIA MIG manager's files
//
// A file with the key `mig-configs` in place of `partitions` was written for NVIDIA's MIG manager,
// and is read as that. Each of its configs is a partition. Its name is the value that the MIG
// manager's node label had.
//
//   - Several items may match one GPU. They apply in order, and the last one wins; what it replaces
//     need not fit. A GPU that no item matches is left as it is ([Keep]).
//   - `devices: all` with `mig-enabled: true` means all GPUs that can do MIG; the item does not
//     apply to others. An index counts all GPUs, whether they can do MIG or not.
//   - A device-filter is one PCI id or a list. Each may have the subsystem's id after a colon, if
//     boards of one device differ. An index that the node lacks is a mistake, unless the filter
//     excludes all GPUs of the node.
//   - `mig-enabled: false` means whole. `mig-devices: {}` is MIG on with no instance; absent or
//     null it is a mistake if MIG is on. A count of zero beside others means none.
//
// tests/peers lets NVIDIA's tool apply each example of its documentation, and compares the result.
//
// # Limits
//
// The package reads bytes and values. It does not know where a file came from, what time it is,
// what runs on a card, or which geometries it can have beyond what its driver says.
package config
