// SPDX-License-Identifier: Apache-2.0

// Command hide empties directories of a container before its programs start.
//
// CUDA images bring a libcuda of their own in compat directories, for drivers that are older than
// the image ("forward compatibility"). A program that loads it goes past the library with which
// the agent holds the container to its share of GPU memory. So the CDI file of each allocation with
// a cap names hide as a hook, with the directories of such images. It does not where the operator
// lets programs past that library (--cap-policy=open).
//
//	hide /usr/local/cuda/compat '/usr/local/cuda-*/compat'
//
// The agent installs hide on the host as one static file. The container runtime runs it as an OCI
// createContainer hook, once for each creation of a container: as root, in the container's mount
// namespace, with all of the image and the volumes mounted, and before it changes to the
// container's root. No shell is in between, so hide itself expands the patterns (path.Match, in one
// part of the path). It reads the OCI state from standard input, finds the bundle there, and the
// container's root in the bundle's config.json. Then it mounts an empty, read-only tmpfs over each
// directory that exists. It leaves alone a name that does not exist or is no directory, and a
// directory that it has covered already, by another link or for another allocation of the same
// container. The programs then load the driver library of the node, through the agent's.
//
// A mount in the CDI file could not do this. It has no patterns. The runtime makes the directory
// if there is none, in the container or in a volume of the user's, and fails if that is read-only.
//
// hide looks up each name inside the container's root: an absolute link and ".." end there, too. It
// mounts on the open directory, so nothing can be swapped in between. If it cannot read the state,
// a directory has more than 10,000 names, or a mount fails, it writes the reason to standard error
// and exits with 1. The runtime then throws the container away, and the kubelet shows the reason in
// the pod's Events.
//
// # What it does not do
//
// hide is no wall. A program may bring the library elsewhere, or fetch it. For that the agent's
// watchdog reads from the driver how much memory each container really has. hide also takes away
// forward compatibility: a container whose CUDA is newer than the node's driver supports does not
// start its CUDA programs.
package main
