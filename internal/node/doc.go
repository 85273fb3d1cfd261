// SPDX-License-Identifier: Apache-2.0

// Package node reads the machine that the agent runs on, except for its GPUs: what the
// kubelet and the container runtime say about who holds which device, which container
// a process is in and how to end it, and files that somebody may replace at any time.
//
// # Who holds what
//
// The device-plugin API tells a plugin when devices are handed out and never
// when they come back. There are three sources, each of which knows
// something that the others do not:
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
// Nobody holds a device that neither the checkpoint nor the runtime names, if
// both were read after the device was last handed out:
//
//	held, err := node.ReadCheckpoint("/var/lib/kubelet")
//	if errors.Is(err, gpu.ErrNotFound) {
//		// no kubelet has written one yet
//	}
//	runtime := node.NewRuntime(node.RuntimeOptions{Root: "/host", AnnotationPrefix: "example.com/gpu-allocation."})
//	defer runtime.Close()
//	alive, err := runtime.Containers(ctx)
//
// The checkpoint may name a holder too many, never one too few, and so do the
// readers here: an entry that cannot be understood is an error for the whole file, a
// container in an unknown state counts as running, and a broken answer is an error and
// not a shorter list. The kubelet drops what ended
// pods held when PodResources is asked, and writes the file anew when a plugin
// sends a list; [CheckpointStamp] tells that it did.
//
// What a plugin notes on a container, DRA has no place for. There the CDI devices with which
// a container was created tell what it has ([Container].CDI), and the runtime tells them of one
// container at a time: each is asked about once, and only where RuntimeOptions.DRA says so. A
// container whose devices the runtime does not tell (CDIUnknown) may have any.
//
// A node may have two runtimes. The list of the wrong one is empty, as if nothing
// were held: a runtime that does not name the agent's own container is not the
// kubelet's.
//
// [Runtime.Events] reports at once what a slow tick would find later. An event is only
// a hint: read again when it comes. It does not listen to a runtime that has one stream
// of events for all listeners, since the kubelet may be another one.
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
// A listing has two weaknesses that the caller must know. It lags
// behind Allocate, so a fresh allocation may be missing. And a kubelet that has just
// started, or that started while the API server was away, answers with nothing
// or with a part of its pods and does not say so: [Listing] names every pod in
// it, and only a listing that names the agent's own pod is taken as complete.
//
// # Processes
//
// The driver names processes by PID. [Proc] tells which container each is in, by
// the name of its cgroup: the kubelet makes one for each pod, the runtime one
// below it for each container, and everything further down was made by the
// container itself and is not believed.
//
//	proc := node.NewProc("/host/proc")
//	if err := proc.SeesNode(runtime); err != nil {
//		// in a PID namespace of its own, where the driver lists no other processes
//	}
//	owner, err := proc.Container(4242)
//	// {ID: "0d1c…", PodUID: "5f8a…", Cgroup: "/kubepods.slice/…/cri-containerd-0d1c….scope", V2: true, Start: 88213}
//	how, err := runtime.End(ctx, owner) // "cgroup.kill"
//
// [Runtime.End] names the container and no PID, so a PID that is reused
// meanwhile cannot end another one.
//
// # Following a file
//
// [WatchFile] delivers a file's content now and after every change, however the
// change was made: written in place, renamed over by an editor, or
// swapped by the kubelet, which replaces a symbolic link beside the file. It
// gets changes from inotify, and also reads the file now and then; where the machine
// has no inotify instance left, it polls.
//
// The package does not know what a GPU, a partition or an allocation is: from package gpu it
// uses the errors alone.
package node
