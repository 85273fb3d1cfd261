// SPDX-License-Identifier: Apache-2.0

// Package node reads the machine that the agent runs on, except for its GPUs. It reads from the
// kubelet and the container runtime which pods hold which devices. It finds the container of a
// process, and ends containers. It follows files that may be replaced at any time.
//
// # Who holds what
//
// The device-plugin API tells a plugin when devices are handed out, but not when they are free
// again. There are four sources. Each knows something that the others do not:
//
//	                     knows                    does not know           may be wrong
//	[ReadCheckpoint]     pod UID, container,      names of pods           of ended pods, as of
//	                     resource, IDs                                    its last writing
//	[Runtime.Containers] what runs, and what      IDs; containers that    never, of its own
//	                     the plugin noted on it   are not created yet     containers
//	[PodResources.List]  pods by name, IDs,       plain init containers   after a kubelet's start
//	                     devices of DRA drivers
//	[ReadDRAState]       claims, pod UIDs, CDI    names of pods           never, but devices may
//	                     devices of DRA drivers                           be in it twice
//
// A device is free if neither the checkpoint nor the runtime names it, and both were read after the
// device was last handed out:
//
//	held, err := node.ReadCheckpoint("/var/lib/kubelet")
//	if errors.Is(err, gpu.ErrNotFound) {
//		// no kubelet has written one yet
//	}
//	runtime := node.NewRuntime(node.RuntimeOptions{Root: "/host", AnnotationPrefix: "example.com/gpu-allocation."})
//	defer runtime.Close()
//	alive, err := runtime.Containers(ctx)
//
// The checkpoint may name a holder too many, but never one too few. The readers here keep to that.
// One entry that they cannot understand is an error for the whole file. A container in an unknown
// state counts as running. A broken answer is an error and not a shorter list. The kubelet drops
// the devices of ended pods when PodResources is asked. It writes the file again when a plugin
// sends a list; then [CheckpointStamp] changes.
//
// A plugin can note its allocation on a container, but a DRA driver cannot. For DRA, the CDI
// devices of a container show what it holds ([Container].CDI). The runtime
// tells them for one container at a time. The agent asks once for each container, and only if
// RuntimeOptions.DRA reports true. A container whose devices the runtime has not told (CDIUnknown)
// may hold any device.
//
// A node may have two runtimes. The wrong one lists no containers, as if all devices were free. A
// runtime that does not list the agent's own container is not the kubelet's.
//
// [Runtime.Events] reports at once what the next periodic read would find. An event is only a hint
// to read again. If a runtime has one stream of events for all listeners, Events does not listen:
// the kubelet may be the other listener.
//
// # PodResources
//
// The kubelet's official source is a service on a socket below its directory:
//
//	kubelet := node.NewPodResources("/var/lib/kubelet")
//	defer kubelet.Close()
//	listing, err := kubelet.List(ctx)
//	if err == nil && listing.Has("gpu", "gpu-agent-x7k2p") {
//		// every holder is in listing.Holdings
//	}
//
// A listing has two weaknesses. It lags behind Allocate, so a fresh allocation may be missing. And
// a kubelet may answer with some or none of its pods and no error: just after its start, or if it
// started while the API server was unreachable. [Listing] names every pod in the answer. Only a
// listing that names the agent's own pod counts as complete.
//
// # Processes
//
// The driver names processes by PID. [Proc] finds the container of each by the name of its cgroup.
// The kubelet makes one cgroup for each pod, and the runtime makes one below it for each container.
// Everything below that was made by the container itself and is not trusted.
//
//	proc := node.NewProc("/host/proc")
//	if err := proc.SeesNode(runtime); err != nil {
//		// in a PID namespace of its own, where the driver lists no other processes
//	}
//	owner, err := proc.Container(4242)
//	// {ID: "0d1c…", PodUID: "5f8a…", Cgroup: "/kubepods.slice/…/cri-containerd-0d1c….scope", V2: true, Start: 88213}
//	how, err := runtime.End(ctx, owner) // "cgroup.kill"
//
// [Runtime.End] names the container and not a PID. So if the kernel reuses the PID, End cannot hit
// the wrong container.
//
// # Following a file
//
// [WatchFile] reports a file's content now and after every change. It sees a write in place, an
// editor's rename over the file, and the kubelet's swap of a symbolic link beside it. It uses
// inotify, and also reads the file at intervals. If the machine has no inotify instance left, it
// polls.
//
// The package does not know what a GPU, a partition or an allocation is. It uses only the errors of
// package gpu.
package node
