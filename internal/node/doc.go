// SPDX-License-Identifier: Apache-2.0

// Package node is the agent's door to the machine that it runs on, the GPUs
// apart: the kubelet's and the runtime's accounts of who holds which device, the
// containers of processes and the way to end them, and files that somebody may
// replace under the agent's feet.
//
// # Who holds what
//
// The device-plugin API tells a plugin when devices are handed out and never
// when they come back. Whoever must know asks witnesses, each of which knows
// something that the others do not:
//
//	                     knows                    is silent about         may lie
//	[ReadCheckpoint]     pod UID, container,      names of pods           of ended pods, as of
//	                     resource, IDs                                    its last writing
//	[Runtime.Containers] what runs, and what      IDs; containers that    never, of its own
//	                     the plugin noted on it   are not created yet     containers
//	[PodResources.List]  pods by name, IDs,       plain init containers   after a kubelet's start
//	                     devices of DRA drivers
//
// Nobody holds a device that neither the checkpoint nor the runtime names, if
// both were read after the device was last handed out:
//
//	held, err := node.ReadCheckpoint("/var/lib/kubelet")
//	if errors.Is(err, gpu.ErrNotFound) {
//		// no kubelet has written one yet
//	}
//	runtime := node.NewRuntime(node.RuntimeOptions{Root: "/host", AnnotationPrefix: "example.com/gpu-claim."})
//	defer runtime.Close()
//	alive, err := runtime.Containers(ctx)
//
// The checkpoint only ever errs on the side of a holder too many, and so do the
// readers here: an entry that cannot be understood spoils the whole file, a
// container in a state that nobody knows counts as running, and where an answer
// is broken there is an error and no shorter list. The kubelet drops what ended
// pods held when PodResources is asked, and writes the file anew when a plugin
// sends a list; [CheckpointStamp] tells that it did.
//
// A node may have two runtimes. A list from the wrong one is empty, which looks
// like good news: one that does not name the agent's own container is not the
// kubelet's.
//
// [Runtime.Events] says at once what a slow tick would find later. It is a hint
// and not an account: act on it by looking again. It listens to no runtime that has
// one stream of events for all, since the kubelet may be the other listener.
//
// # PodResources
//
// The kubelet's official account is a service on a socket under its directory:
//
//	kubelet := node.NewPodResources("/var/lib/kubelet")
//	defer kubelet.Close()
//	listing, err := kubelet.List(ctx)
//	if err == nil && listing.Has("gpu", "gpu-agent-x7k2p") {
//		// every holder is in listing.Holdings
//	}
//
// A listing is a witness with two weaknesses that the caller must know. It lags
// behind Allocate, so a fresh claim may be missing. And a kubelet that has just
// started, or that started while the API server was away, answers with nothing
// or with a part of its pods and does not say so: [Listing] names every pod in
// it, and only a listing that names the agent's own pod can be believed to be
// complete.
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
//		// in a PID namespace of its own, where the driver is silent about others
//	}
//	owner, err := proc.Container(4242)
//	// {ID: "0d1c…", PodUID: "5f8a…", Cgroup: "/kubepods.slice/…/cri-containerd-0d1c….scope", V2: true, Start: 88213}
//	how, err := runtime.End(ctx, owner) // "cgroup.kill"
//
// [Runtime.End] names the container and no PID, so nothing that happens to PIDs
// meanwhile can turn it against another.
//
// # Following a file
//
// [WatchFile] hands out a file's content now and after every change, whichever
// way the change was made: written in place, renamed over by an editor, or
// swapped by the kubelet, which replaces a symbolic link beside the file. It
// hears of changes by inotify and reads again now and then all the same; where
// the machine has no inotify instance left, it polls.
//
// The package does not know what a GPU, a partition or a claim is: of package
// gpu it borrows the errors alone.
package node
