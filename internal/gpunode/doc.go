// SPDX-License-Identifier: Apache-2.0

// Package gpunode defines the GPUNode. With this small object a node tells the cluster which GPUs it
// has, and what is free of them.
//
// A GPUNode has the name of its Node, and only a status, since it asks nothing of the agent. The
// agent writes the [Status]. The placer and people read it:
//
//	apiVersion: example.com/v1alpha1
//	kind: GPUNode
//	metadata: {name: node-1}
//	status:
//	  resources:
//	  - {name: example.com/gpu-mem, total: 158, free: 40, largest: 33}
//	  gpus:
//	  - uuid: GPU-5a2f…
//	    mode: shared
//	    api: device-plugin
//	    resource: example.com/gpu-mem
//	    total: 79
//	    used: 0-45
//	    free: 33
//	    largest: 33
//	    conditions:
//	    - {type: Available, status: "True", …}
//	    - {type: Healthy, status: "True", …}
//
// The manifests have its schema (deployments/base/crd.yaml). A test compares the schema with these
// types. They are plain Go values: a reader needs no package of the API.
//
// # Room
//
// Totals do not tell where a pod fits. A request for memory units needs one GPU that has enough
// of them. MIG instances need runs of memory slices at certain places. So [GPU.Used] has the
// numbers of the held devices, and [MIG] the placements. [Card.Read] returns the rules for
// placements, which are the agent's own.
//
// A device's number or placement is in its ID at the kubelet, and in the status of its pod. A
// reader joins the devices of the pods that it knows with those of the object. An object may be
// older than the node: the agent writes it at once if the largest request that fits has changed,
// and later after other changes. So such a reader never gives a device out twice. A device of an
// ended pod may look held for about a minute.
//
// # Shape
//
// GPUs of one kind share the table of their MIG profiles, which is in Status.Cards once. Lists
// have keys, so that server-side apply can match elements. No list grows with the number of pods,
// except for the holders. These are there only if pods do not name their devices.
package gpunode
