// SPDX-License-Identifier: Apache-2.0

// Command image makes the container images of the agent and the placer, and all that a release
// brings.
//
// An image holds the programs, the files below etc, and of Debian's packages the few files
// that the programs need: for the agent and the driver's library the C library, for the placer,
// which is static, the certificates of public authorities. debian.lock names the packages, with their
// versions and hashes, so the same lock always gives the same files. They are fetched by apt
// from the mirror that this machine uses, held against the hash, and read without being
// installed. What the programs are linked against comes from there too. No file of the
// machine itself gets in.
//
// The same commit gives the same digest, wherever and whenever it is built: entries are
// sorted, owned by root, and dated as the commit.
//
//	image cc --arch amd64          the compiler that links against the lock's packages
//	image build --of gpu-placer …  an OCI archive
//	image lock                     renews debian.lock by what the mirror has now
//	image behind                   tells what the mirror has newer
//	image release …                archives, chart, manifests, SBOMs, packages, notes, checksums
//	image publish …                pushes a release to registries
//
// A release is published as it lies in its folder: the images of both architectures, and the chart as Helm
// puts it into a registry. Nothing has a tag before all of it is there, and a tag that names
// something else is left alone. Credentials are those of `docker login`.
//
// The programs themselves are built by the Makefile. It is a module of its own, since the
// agent needs none of the libraries that it needs. It signs nothing.
package main
