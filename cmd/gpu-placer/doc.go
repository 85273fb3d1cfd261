// SPDX-License-Identifier: Apache-2.0

// Command gpu-placer tells schedulers which node of a cluster has room for a pod. It goes by
// the GPUNodes that the agents write, and it believes nobody: what it reads is held against
// bounds before it counts.
//
//	gpu-placer run           the Deployment's program
//	gpu-placer certificates  what the placer and kube-scheduler know each other by
//	gpu-placer version
//
// It needs nothing of a node, and no C library: the program is static, and alone in its image
// with the certificates of public authorities.
//
// This directory turns flags into options, opens the outside worlds (the API server, the
// schedulers' doors) and connects them with the books, which internal/fleet keeps. It decides
// nothing; it is the only place that ends the process.
package main
