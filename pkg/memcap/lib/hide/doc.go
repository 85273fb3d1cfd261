// SPDX-License-Identifier: Apache-2.0

// Command hide empties directories of a container before its programs start.
//
// The agent mounts a libcuda.so.1 of its own into each container whose GPU memory has a cap. It
// counts what programs allocate, refuses what is beyond the cap, and passes all else on to the node's
// driver library. CUDA images bring another libcuda in compat directories, for nodes whose driver is
// older than the image ("forward compatibility"), and loaders find that one first. So the CDI file of
// an allocation with a cap names hide as a hook, with a fixed list of such directories:
//
//	hide /usr/local/cuda/compat '/usr/local/cuda-*/compat'
//
// If the agent's --cap-policy is open, which lets programs allocate uncounted, the CDI file has no
// such hook.
//
// The agent installs hide on the host as one static file. The container runtime runs it as an OCI
// createContainer hook: as root, in the container's mount namespace, with the image and the volumes
// mounted, and before the runtime changes to the container's root. A container with two allocations
// has the hook twice. No shell is in between, so hide expands the patterns itself: one component of a
// path may have wildcards, as path.Match knows them. hide reads the OCI state from standard input,
// finds the bundle there, and the container's root in the bundle's config.json. Then it mounts an
// empty, read-only tmpfs over each directory that exists. It skips names that do not exist or are no
// directories, and what an earlier run of hide has covered. Programs then find the agent's libcuda.
//
// A mount in the CDI file could not replace the hook. CDI has no patterns. And where such a directory
// is missing, the runtime would create it, in the container or in a user's volume, and the container
// would not start where that is read-only.
//
// hide looks up each name inside the container's root: an absolute link and ".." end there, too. It
// mounts on the directory that it has opened, so nothing can be swapped in between. It fails if it
// cannot read the state, if a directory that it searches for a pattern (/usr/local) has more than
// 10,000 names, or if a mount fails. Then it writes the reason to standard error and exits with 1. The
// runtime throws the container away, and the kubelet shows the reason in the pod's Events.
//
// # What it does not do
//
// hide is no wall. A program may bring that library elsewhere, or fetch it. For that the agent's
// watchdog asks the driver how much memory each container has, and ends a container that is beyond
// its cap. hide also takes forward compatibility away: CUDA programs that are too new for the node's
// driver do not start.
package main
