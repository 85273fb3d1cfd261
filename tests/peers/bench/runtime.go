// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"fmt"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// containerID is the runtime's name for a pod's container, in the form that
// runtimes have for it.
func containerID(p pod) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(p.Pod.Name))) }

// create makes a pod's container, which runs at once.
func (k *kubelet) create(p pod) {
	k.runtime.Put(p.Pod, &cri.Container{Id: containerID(p), Metadata: &cri.ContainerMetadata{Name: p.Container},
		State: cri.ContainerState_CONTAINER_RUNNING, Annotations: p.Answer.GetAnnotations()})
}

// end ends a pod, in the kubelet's word and the runtime's at once.
func (k *kubelet) end(p pod) {
	k.Finish(p.Pod.UID)
	k.runtime.Set(containerID(p), cri.ContainerState_CONTAINER_EXITED, cri.ContainerEventType_CONTAINER_STOPPED_EVENT)
	k.runtime.Remove(p.Pod.UID)
}
