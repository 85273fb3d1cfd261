// SPDX-License-Identifier: Apache-2.0

// Command gpu-placer tells schedulers which node of a cluster has room for a pod. It relies on
// the GPUNodes that the agents write, and checks them against bounds before they count.
//
//	gpu-placer run           the Deployment's program
//	gpu-placer certificates  make the certificates of the placer and kube-scheduler
//	gpu-placer version
//
// It needs nothing of a node, and no C library. The program is static, and its image has nothing
// else but the certificates of public authorities.
//
// This directory turns flags into options, opens the outside worlds (the API server, the
// schedulers' doors) and connects them with the books, which internal/fleet keeps. It makes no
// decisions. Only this directory ends the process.
package main
