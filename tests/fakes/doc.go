// SPDX-License-Identifier: Apache-2.0

// Package fakes has stand-ins for what a node runs beside the agent, on real
// sockets, for tests that need no node. They know what their caller tells them,
// refuse what the real ones refuse, and where a test needs a fault Answer speaks in
// their place.
//
// [Kubelet] is the kubelet's device manager and PodResources in a directory, with
// the habits of kubelet 1.36.3 that a plugin or the agent can notice:
//
//   - When it starts it removes all files of the plugins' directory but its checkpoint.
//     A registration is answered when the plugin has been dialled and has said its
//     options; then its list is opened. Resources without a domain and other versions
//     of the API are refused.
//   - It has one client a resource, the newest, and drops that one, whichever it is, when
//     any list's stream of the resource ends. All devices are Unhealthy then.
//   - It chooses among Healthy devices that nobody has, by the plugin's preference as
//     far as that is any good. An init container's devices go to the next container
//     without another question of preference. It does not ask a plugin that has gone.
//   - The checkpoint is written after each container's allocations and at each list, not
//     when devices become free: those of ended pods do when PodResources lists or
//     somebody else is to get some.
//   - A DRA driver is registered when its socket is there, and again when that is another
//     one; its health stream is open then. A claim is in the account before its driver is
//     called. One that is prepared causes no call; after a start of the kubelet none is, and
//     what the driver answers then is appended to what the account has.
//   - PodResources has an entry for each device, leaves out plain init containers, and
//     answers 100 calls a second, 10 at once.
//
// [Runtime] is a containerd, as far as the agent asks one. As that does, it forgets
// events that nobody listens to, and gives each to everybody who does:
//
//	agent := fakes.Pod{UID: "agent", Namespace: "gpu-agent", Name: "gpu-agent-x"}
//	k, err := fakes.StartKubelet(fakes.KubeletOptions{Dir: dir, Agent: agent})
//	defer k.Stop()
//	r, err := fakes.StartRuntime(socket, agent)
//	defer r.Stop()
//	err = k.Admit(ctx, pod, []string{"main"}, "example.com/gpu", 1)
//	r.Put(pod, &cri.Container{Id: "c", State: cri.ContainerState_CONTAINER_RUNNING}, cri.ContainerEventType_CONTAINER_STARTED_EVENT)
//	k.Finish(pod.UID)
//	r.Remove(pod.UID)
package fakes
