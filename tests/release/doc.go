// SPDX-License-Identifier: Apache-2.0

// Package release has the tests of a release as an operator takes it: the archive is loaded
// onto a real node, the chart installed by Helm as docs/helm.md says, upgraded and rolled
// back while pods use GPUs, and uninstalled. Afterwards the API server and the node's files
// are compared with what was there before.
//
// A release here is what `make release` ends in, for this machine's architecture, made of
// the programs that the image was built with; deployments/image tests that `make release`
// makes the same twice. [Kit.BuildNext] is the newer release: it has another version and
// carries another library for memory caps. The older one is v0.1.0, built from its tag; a clone that
// lacks the tag makes it of today's programs, and the log says so. With -from it is a release that is
// kept somewhere:
//
//	make release VERSION=v0.1.0-rc.1
//	go test ./tests/release -from dist/v0.1.0-rc.1
//
// TestFirstDay runs the commands that README, docs/install.md, docs/pods.md and what they lead to show, in a
// reader's order, and logs a transcript with seconds. A command that is shown and not
// run needs a reason in the test.
//
// A third test publishes a release to a registry on the node, as `make publish` does, and installs it by
// the registry's name: Helm takes the chart from there, and containerd the images.
//
// [Kit.BuildNext]: example.com/gpu-agent/tests/lab.Kit.BuildNext
package release
