// SPDX-License-Identifier: Apache-2.0

// Package archive gets packages of Debian's archive for tests that need a vendor's own files. The
// machine's apt downloads them from where it has its own packages, each is pinned by its SHA-256,
// and dpkg unpacks them below the cache:
//
//	tree, err := archive.Package{Pool: "pool/…/nvidia-cuda-mps_550.163.01-2_amd64.deb", Sum: "7da3…"}.Tree(ctx)
//	if errors.Is(err, archive.ErrHash) { … } // not what was pinned
//
// Nothing is installed, and the machine's lists and packages stay as they are. A test skips itself
// if the archive does not have a package.
package archive
