// SPDX-License-Identifier: Apache-2.0

// Package install lays the emulated driver down as a real one is: versioned
// libraries with their links, nvidia-smi, firmware, device nodes, and what the
// kernel module shows under /proc and /sys.
//
// A driver stands at a prefix of a root: / for one that is installed on the
// node, /run/nvidia/driver for one that a driver container brings. Device
// nodes open to nothing (ENXIO), which is all that a container needs of them
// to start.
//
// /proc and /sys are at fixed paths in the programs that read them. Under a
// root of its own they are plain files; on the running system they can only be
// mounted over, which Mount does for the calling process's mount namespace.
//
// Sysfs is a tree, as on a machine: /sys/devices has each card in the folder of the
// bridge that it hangs on, and /sys/bus/pci/devices and /sys/class/infiniband have links
// that lead there. Where it is mounted over the running system's, what the kernel shows
// beside it stays to be seen. CPUs and NUMA nodes are shown only for worlds that describe
// them; else those of the machine itself stay, on which programs have to run.
//
// LayRoot does all of it below one directory, as a driver container does on a node of
// Kubernetes, and RemoveRoot takes it away: it is one mount.
//
// MIG shows in three places. /proc/driver/nvidia-caps/mig-minors numbers the
// capabilities of every instance that there could ever be, by the minors of GPUs,
// and never changes. /proc/driver/nvidia/capabilities has a folder for each
// instance that stands (FollowInstances). Nodes in /dev/nvidia-caps are made by
// whoever needs one, and stay: here some are there as if somebody had, and others
// are not, so that a program has to be able to make its own.
//
// A Machine is where all that was laid. Its Sync lets device nodes and kernel
// files follow the world: a GPU that is unplugged takes its own along, and a
// driver that is upgraded replaces its libraries as a package does. Save and
// Find pass it from the program that installs to the daemon that serves.
package install
