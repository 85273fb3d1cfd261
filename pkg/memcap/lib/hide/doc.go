// SPDX-License-Identifier: Apache-2.0

// Command hide covers directories of a container's image, so that its programs find them empty:
// those where images of CUDA bring driver libraries of their own, in front of which no cap stands.
//
//	hide '/usr/local/cuda/compat' '/usr/local/cuda-*/compat'
//
// A container runtime runs it as a hook (createContainer), as root, in the container's mount
// namespace and before the container's root is its own, with the container's state on standard
// input. Over each directory that is there it mounts an empty file system that nobody can write to.
// One that is not there is left alone. A mount in a CDI file would make it, in the image or in a
// volume of the user's, and could not where that is read-only.
//
// Names in the image are the image's: links in them, absolute ones too, lead to files of the
// container's root and nowhere else. Where a directory cannot be covered hide fails, and
// the container does not start.
package main
