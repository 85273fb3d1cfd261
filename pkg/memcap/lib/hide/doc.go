// SPDX-License-Identifier: Apache-2.0

// Command hide covers directories of a container's image, so that the container's programs find
// them empty. In these directories, images of CUDA bring driver libraries of their own. The memory
// cap does not work with those libraries.
//
//	hide '/usr/local/cuda/compat' '/usr/local/cuda-*/compat'
//
// A container runtime runs hide as a hook (createContainer): as root, in the container's mount
// namespace, and before it changes to the container's root. The container's state is on standard
// input. hide mounts an empty, read-only file system over each directory that exists, and leaves
// the others alone. A mount in a CDI file would not do: it would make a missing directory, in the
// image or in a volume of the user's, and would fail where that is read-only.
//
// hide follows links in the image, absolute ones too, only to files of the container's root. If it
// cannot cover a directory it fails, and the container does not start.
package main
