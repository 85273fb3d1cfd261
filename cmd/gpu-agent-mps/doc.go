// SPDX-License-Identifier: Apache-2.0

// Command gpu-agent-mps keeps the MPS control daemons of a node's GPUs, as the agent asks. It is the program of
// the DaemonSet gpu-agent-mps, in the agent's image.
//
//	gpu-agent-mps run        the pod's first process: starts the supervisor, whenever that ends
//	gpu-agent-mps supervise  the supervisor, which starts daemons and answers the agent
//	gpu-agent-mps probe      begins CUDA and ends, to find out whether a server answers
//	gpu-agent-mps version
//
// It is a program of its own, beside gpu-agent, because two of its processes stand on each node all the
// time. Neither speaks to the API server, to the kubelet or to NVML, and without the code for these an
// idle supervisor takes a sixth of the memory. deps_test.go holds what it may be linked with.
//
// This directory turns flags into options of internal/mps, which does the work. It makes no decisions. Only
// this directory ends the process.
package main
