// SPDX-License-Identifier: Apache-2.0

// Command gpu-agent owns the NVIDIA GPUs of one Kubernetes node. It lays them out as a partition
// file says, offers the pieces to the kubelet, and tells people and schedulers what is left.
//
//	gpu-agent run          the DaemonSet's program
//	gpu-agent inventory    print the node's GPUs, as the driver reports them
//	gpu-agent check        is a partition file right, here or on a recorded inventory
//	gpu-agent plan         what a partition would do to the GPUs, here or there
//	gpu-agent topology     how close GPUs, CPUs and network cards are to each other
//	gpu-agent status       what the agent on this node offers, and who holds it
//	gpu-agent usage        who was granted what, and used it
//	gpu-agent advise       which partition would have served the requests better
//	gpu-agent export       the cluster's GPUs for other schedulers and autoscalers
//	gpu-agent cleanup      remove what agents have left on the node
//	gpu-agent version
//
// Each command is made by a function of its own, newRun and so on. internal/command has what they
// have in common: help, environment variables, exit codes, completion and the reference. If
// several commands have a flag, one function adds it to all, so that its name means one thing.
//
// This directory turns flags into options, opens the outside worlds (driver, kubelet, API server,
// directories) and passes them to the loop. It makes no decisions. Only this directory ends
// the process.
package main
