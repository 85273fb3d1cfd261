// SPDX-License-Identifier: Apache-2.0

// Package gpunode has the words of the GPUNode, the one small object by which a node
// tells the cluster what its GPUs are, what is left of them, and in which pieces.
//
// An object has the name of its Node and only a status: nobody asks anything of the agent
// by way of it. The agent writes [Status], the placer and people read it:
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
// The manifests have its schema (deployments/base/crd.yaml); a test holds the two equal.
// There are plain Go values only: no package of the API is needed to read them.
//
// # Room
//
// Totals are not enough to place a pod. A request for memory units lives on one GPU, and
// MIG instances need runs of memory slices, at certain places. So [GPU.Used] has the
// numbers of the devices that are held, and [MIG] the placements. What a reader knows of
// pods it adds by set union: a device's number or placement is in its ID at the kubelet,
// and in the status of the pod that has it. [Card.Read] gives the rules of what can
// stand beside what, which are the ones that the agent follows.
//
// An object may be older than the node. The agent writes it at once when the largest
// request that fits changes, and later when anything else does. So a reader who adds the
// devices of the pods never gives out a device twice, and one that an ended pod had may
// look held for about a minute.
//
// # Shape
//
// What all GPUs of a kind have in common, the table of their MIG profiles, is in
// Status.Cards once. Lists have keys, so that server-side apply and a reader of
// differences can tell elements apart, and none grows with the number of pods, except
// the holders, which are there only where pods do not tell them themselves.
package gpunode
