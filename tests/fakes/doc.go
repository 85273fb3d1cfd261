// SPDX-License-Identifier: Apache-2.0

// Package fakes has stand-ins for what a node runs beside the agent, on real
// sockets, for tests that need no node: [Runtime] is a container runtime's side of
// the CRI. It knows what its caller tells it and nothing of devices:
//
//	r, err := fakes.StartRuntime(socket, fakes.Pod{UID: "agent", Namespace: "gpu-agent", Name: "gpu-agent-x"})
//	defer r.Stop()
//	r.Put(pod, &cri.Container{Id: "c", State: cri.ContainerState_CONTAINER_RUNNING}, cri.ContainerEventType_CONTAINER_STARTED_EVENT)
//	r.Remove(pod.UID)
//
// As containerd does, it forgets events that nobody listens to, and gives each to
// everybody who does.
package fakes
