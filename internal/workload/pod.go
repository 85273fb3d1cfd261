// SPDX-License-Identifier: Apache-2.0

package workload

// Pod names a pod. The zero value names none.
type Pod struct {
	Namespace, Name string
	// UID tells the pod from earlier and later ones of its name. Empty if it is not known. A static
	// pod has two: that at the API server, and that at the kubelet and the container runtime.
	UID string
}

// String returns "namespace/name".
func (p Pod) String() string { return p.Namespace + "/" + p.Name }
