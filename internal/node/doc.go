// SPDX-License-Identifier: Apache-2.0

// Package node is the agent's door to the machine that it runs on, the GPUs
// apart: the kubelet's own account of who holds which device, and files that
// somebody may replace under the agent's feet.
//
// # Who holds what
//
// The device-plugin API tells a plugin when devices are handed out and never
// when they come back. The kubelet's account is its PodResources service, on a
// socket under its directory:
//
//	kubelet := node.NewPodResources("/var/lib/kubelet")
//	defer kubelet.Close()
//	listing, err := kubelet.List(ctx)
//	if err == nil && listing.Has("gpu", "gpu-agent-x7k2p") {
//		// every holder is in listing.Holdings
//	}
//
// A listing is a witness with two weaknesses that the caller must know. It lags
// behind Allocate, so a fresh claim may be missing. And a kubelet that has just
// started, or that started while the API server was away, answers with nothing
// or with a part of its pods and does not say so: [Listing] names every pod in
// it, and only a listing that names the agent's own pod can be believed to be
// complete.
//
// # Following a file
//
// [WatchFile] hands out a file's content now and after every change, whichever
// way the change was made: written in place, renamed over by an editor, or
// swapped by the kubelet, which replaces a symbolic link beside the file. It
// hears of changes by inotify and reads again now and then all the same; where
// the machine has no inotify instance left, it polls.
//
// The package does not know what a GPU, a partition or a claim is.
package node
