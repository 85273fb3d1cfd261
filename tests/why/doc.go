// SPDX-License-Identifier: Apache-2.0

// Package why has the tests of `kubectl gpu` on a real node: with a real API server, scheduler, kubelet,
// container runtime and Kueue. Only the NVIDIA driver is emulated.
//
// TestWhy stages the troubles that docs/kubectl.md promises an answer to, one after the other, and asks
// the real program about each: as the author of the pod, who has the role gpu-agent-view, and as an
// operator. The cause must be in the first line. internal/diagnosis has the same troubles as values, in
// more forms; what only a node shows is what the kubelet, the runtime, the scheduler, Kueue and the
// agent really write.
//
// TestCommands runs each other command once as an operator, with the roles of the manifests and no
// others, and TestVerifyClaims tries a node that offers its GPUs to claims.
package why
