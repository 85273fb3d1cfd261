// SPDX-License-Identifier: Apache-2.0

// Command gpu-agent owns the NVIDIA GPUs of one Kubernetes node: it lays
// them out as a partition file says, offers the pieces to the kubelet, and tells people
// and schedulers what is left.
//
//	gpu-agent run          the DaemonSet's program
//	gpu-agent inventory    what the driver says of the node's GPUs
//	gpu-agent check        is a partition file right, here or on a recorded inventory
//	gpu-agent plan         what a partition would do to MIG instances, here or there
//	gpu-agent topology     how close GPUs, CPUs and network cards are to each other
//	gpu-agent status       what the agent on this node offers, and who holds it
//	gpu-agent usage        who was granted what, and used it
//	gpu-agent advise       which partition would have served it better
//	gpu-agent export       the cluster's GPUs for other schedulers and autoscalers
//	gpu-agent cleanup      take away what agents have left on the node
//	gpu-agent version
//
// Each command is made by a function of its own, newRun and so on. What they have in common
// is in internal/command: help, the environment's variables, exit codes, completion and the
// reference. A flag that several commands have is registered by one function, so that its
// name means one thing.
//
// This directory turns flags into options, opens the outside worlds (driver,
// kubelet, API server, directories) and hands them to the loop. It decides
// nothing; it is the only place that ends the process.
package main
