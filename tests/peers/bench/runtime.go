// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"fmt"
	"path/filepath"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"example.com/gpu-agent/tests/fakes"
)

// socket is the runtime's socket.
func (k *kubelet) socket() string { return filepath.Join(k.dir, "cri.sock") }

// containerID is the runtime's name for a pod's container, in the form that
// runtimes have for it.
func (p *pod) containerID() string { return fmt.Sprintf("%x", sha256.Sum256([]byte(p.name))) }

// inRuntime is what the runtime calls a pod.
func (p *pod) inRuntime() fakes.Pod {
	return fakes.Pod{UID: p.name, Namespace: podNamespace, Name: p.name}
}

// create makes a pod's container, which runs at once.
func (k *kubelet) create(p *pod) {
	k.runtime.Put(p.inRuntime(), &cri.Container{Id: p.containerID(), Metadata: &cri.ContainerMetadata{Name: containerName},
		State: cri.ContainerState_CONTAINER_RUNNING, Annotations: p.answer.GetAnnotations()})
}

// endLocked ends a pod, in the kubelet's word and the runtime's at once.
func (k *kubelet) endLocked(p *pod) {
	delete(k.pods, p.name)
	k.runtime.Set(p.containerID(), cri.ContainerState_CONTAINER_EXITED, cri.ContainerEventType_CONTAINER_STOPPED_EVENT)
	k.runtime.Remove(p.name)
}
