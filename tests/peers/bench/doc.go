// SPDX-License-Identifier: Apache-2.0

// Command bench measures the agent beside NVIDIA's device plugin on one
// emulated driver, and prints a line for each figure:
//
//	NAME VALUE UNIT
//
//	allocate_p50/devices=640/gpu-agent      0.21 ms      target: at most 1.1 x the peer's 0.20: reached
//
// The first three fields are for programs; what follows on a line, and lines
// that start with #, are for people. A figure that misses its target does not
// fail the run. What fails it is behaviour: a peer that does not see the
// emulated GPUs or their Xids, an agent that does not register, grant or
// refuse. With -smoke the counts are tiny and the times mean nothing, but all
// of that is still checked.
//
// # What runs
//
// The program starts itself again in namespaces of its own (mounts, PIDs,
// network), with all files on a tmpfs: the peer's directory is compiled in
// (/var/lib/kubelet/device-plugins), and there may be a real kubelet outside.
// The namespaces end with the program, however it ends, and everything in them
// with them.
//
// Inside are the emulated driver's daemon, a kubelet's side of the device
// plugin API and of PodResources (kubelet.go; it registers plugins, dials them
// with the kubelet's own options, opens their lists, and asks for preferences
// with the free IDs in random order), an API server's side
// of lists, watches, patches and events over TLS and HTTP/2 (apiserver.go), and
// the programs that are measured, each a process of its own:
//
//	gpu-agent             as make build makes it, with partitions from a watched ConfigMap
//	gpu-agent-file        the same with --config FILE and no API server
//	nvidia-device-plugin  v0.19.0, time slicing where replicas are asked for
//	empty                 a device plugin on gRPC's defaults that answers nothing
//
// The devices are gpu-mem units of the agent and replicas of the peer, as many
// of each on every GPU: 10, 80 and 320.
//
// # How it measures
//
// Programs are asked in turn, so that drift meets all alike. Times are those of
// the calling side. CPU time is the kernel's clock of the process, all threads,
// those that ended included. Memory is /proc/PID/smaps_rollup in MB of 10^6
// bytes; "anonymous" is what is left without the pages of files. Driver calls
// are the emulator's count for the process, without the waits for events that
// run in the background all the time.
//
// What the figures cannot say: the driver's own time, since the emulated one
// answers in microseconds what hardware takes milliseconds for; and the cost of
// a container's start, which the end-to-end tests see.
package main
