// SPDX-License-Identifier: Apache-2.0

package workload

// Pod names a pod. The zero value names none.
type Pod struct {
	Namespace, Name string
	// UID tells it from others that had or will have its name; empty where it is not
	// known. A static pod has two: the API server's, and the one that the kubelet and
	// the container runtime call it by.
	UID string
}

// String is "namespace/name".
func (p Pod) String() string { return p.Namespace + "/" + p.Name }
