// SPDX-License-Identifier: Apache-2.0

// Package deploy has the manifests that give nodes without GPUs an emulated driver, and
// their test.
//
// The DaemonSet runs `gpu-emulator node`, which is a driver container as far as a node can
// tell: a driver's root is mounted at /run/nvidia/driver, and goes when the pod ends. The
// overlay agent/ puts the project's agent beside it. ../README.md tells how to use both.
//
// With -long, TestOverlay applies them to a test node of its own, takes pieces by the
// agent and then whole GPUs by NVIDIA's device plugin, and looks that nothing is left at
// the end:
//
//	go test ./tests/emulator/deploy -long
package deploy
