// SPDX-License-Identifier: Apache-2.0

package diagnosis

import (
	"cmp"

	"example.com/gpu-agent/internal/status"
)

// Code is a stable word for a cause, for programs. docs/kubectl.md explains each one; a test
// compares the two.
type Code string

// Codes of what a pod asks for.
const (
	// NoGPU: no container asks for a GPU.
	NoGPU Code = "NoGPU"
	// WrongResource: no node offers a resource of that name, and none could.
	WrongResource Code = "WrongResource"
	// NotOffered: the name is right, and no node's partition offers it.
	NotOffered Code = "NotOffered"
	// TooMuch: no GPU is large enough, even if it were idle.
	TooMuch Code = "TooMuch"
	// Fragmented: as much is free, and not on one GPU.
	Fragmented Code = "Fragmented"
	// Full: it is held by others.
	Full Code = "Full"
)

// Codes of what is wrong on nodes.
const (
	NodeCordoned     Code = "NodeCordoned"
	GPUCordoned      Code = "GPUCordoned"
	NodeNotReady     Code = "NodeNotReady"
	NoAgent          Code = "NoAgent"
	UnhealthyGPU     Code = "UnhealthyGPU"
	OtherOwner       Code = "OtherOwner"
	MIGOff           Code = "MIGOff"
	PartitionBlocked Code = "PartitionBlocked"
	PartitionPending Code = "PartitionPending"
	PartitionWrong   Code = "PartitionWrong"
)

// Codes of what holds a pod or a Job up.
const (
	// HolderEnding: a container waits for the end of the one that had its devices before.
	HolderEnding Code = "HolderEnding"
	// NotReady: a container waits for something else of the agent.
	NotReady Code = "NotReady"
	// Refused: the kubelet or the agent refused the pod for another reason.
	Refused Code = "Refused"
	// Quota: Kueue has no quota left. Queued: Kueue holds it for another reason. Suspended: the Job
	// is suspended, and not by Kueue.
	Quota     Code = "Quota"
	Queued    Code = "Queued"
	Suspended Code = "Suspended"
	// Gated: another program's scheduling gate holds the pod. Unplaced: the scheduler finds no node
	// for a reason that is not GPUs.
	Gated    Code = "Gated"
	Unplaced Code = "Unplaced"
)

// Codes of how containers ended.
const (
	// OverCap: a container was ended since it had more than its cap. Intruder: one used a GPU
	// without an allocation.
	OverCap  Code = "OverCap"
	Intruder Code = "Intruder"
	// NoCUDA: the image lacks the libraries or the program that it needs.
	NoCUDA Code = "NoCUDA"
	// OutOfMemory: a program asked for more GPU memory than its piece has. OOMKilled: a container
	// used more of the node's memory than its limit.
	OutOfMemory Code = "OutOfMemory"
	OOMKilled   Code = "OOMKilled"
	// ImagePull: the image cannot be pulled. Crash: a container ended with an error of its own.
	ImagePull Code = "ImagePull"
	Crash     Code = "Crash"
)

// Codes of what is not wrong, or not known.
const (
	Fine    Code = "Fine"
	Over    Code = "Over"
	Unknown Code = "Unknown"
)

// Codes lists every Code, in the order of the documentation.
var Codes = []Code{NoGPU, WrongResource, NotOffered, TooMuch, Fragmented, Full,
	NodeCordoned, GPUCordoned, NodeNotReady, NoAgent, UnhealthyGPU, OtherOwner, MIGOff,
	PartitionBlocked, PartitionPending, PartitionWrong,
	HolderEnding, NotReady, Refused, Quota, Queued, Suspended, Gated, Unplaced,
	OverCap, Intruder, NoCUDA, OutOfMemory, OOMKilled, ImagePull, Crash, Fine, Over, Unknown}

// codes are the codes for reasons of the agent that say why a node or a GPU gives nothing out.
var codes = map[status.Reason]Code{
	status.HeldByPods: PartitionBlocked, status.BusyProcess: PartitionBlocked, status.NotInPartition: PartitionBlocked,
	status.MIGOff: MIGOff, status.ResetDue: MIGOff,
	status.OtherOwner: OtherOwner, status.ForeignInstance: OtherOwner,
	status.GPUUnhealthy: UnhealthyGPU, status.GPUMissing: UnhealthyGPU, status.DriverFailed: UnhealthyGPU,
	status.GPUDriverHangs: UnhealthyGPU, status.GPUInstanceFailed: UnhealthyGPU,
	status.GPUCordoned:       GPUCordoned,
	status.PartitionsInvalid: PartitionWrong, status.PartitionsMissing: PartitionWrong,
	status.PartitionUnfit: PartitionWrong, status.PartitionUnset: PartitionWrong,
	status.MIGUnsupported: PartitionWrong, status.NoRoom: PartitionWrong,
	status.AgentEnds:  NoAgent,
	status.NotOffered: NotOffered,
	status.GPUChange:  PartitionPending, status.GPUChangeFailed: PartitionPending, status.ListsFull: PartitionPending,
	status.Starting: PartitionPending, status.NodeUnknown: PartitionPending, status.DriverUnread: PartitionPending,
	status.DriverLetGo: PartitionPending,
}

// codeOf returns the code for a reason of the agent; NotReady for all others. The reason may be a newer
// version's.
func codeOf(r status.Reason) Code { return cmp.Or(codes[r], NotReady) }

// next are the steps that follow from codes. Steps that depend on figures stand where the finding is
// made.
var next = map[Code]string{
	NoGPU:            "name a resource of the table of `kubectl gpu` in the container's limits",
	NotOffered:       "ask for what `kubectl gpu` lists, or change the nodes' partition",
	Full:             "wait until a holder ends, or ask for less; `kubectl gpu` lists what is free",
	NodeCordoned:     "wait, or let pods there again: kubectl uncordon NODE",
	GPUCordoned:      "wait, or take the GPU out of the node's annotation gpu.cordon",
	NodeNotReady:     "look at the node: kubectl describe node NODE",
	NoAgent:          "look why no agent runs there: kubectl get pods -n gpu-agent -o wide",
	UnhealthyGPU:     "see what to do about it: kubectl gpu status NODE; a new pod can go to another GPU meanwhile",
	OtherOwner:       "take the other program off the node, or give the GPU the mode off; one owner per GPU",
	MIGOff:           "end what has the GPU open; the agent then resets it, if --reset allows; or reboot the node",
	PartitionBlocked: "wait for the holders to end, or end them; nothing busy is taken away",
	PartitionPending: "wait: the agent goes on by itself; kubectl gpu status NODE shows how far it is",
	PartitionWrong:   "correct the partition file: kubectl gpu check FILE says what is wrong with it",
	HolderEnding:     "wait until that one has ended; delete it if it should not run any longer",
	NotReady:         "wait: the kubelet tries again; kubectl gpu status NODE shows what the agent does",
	Refused:          "create the pod anew, or let its controller do it; the kubelet does not try a refused pod again",
	Quota:            "wait until other workloads of the queue end, ask for less, or have the queue's quota raised",
	Queued:           "wait; Kueue tries again when room or quota appears",
	Suspended:        "let it run: set spec.suspend to false, or give it the label kueue.x-k8s.io/queue-name",
	Gated:            "see to the program that has set the gate",
	Unplaced:         "see to what the scheduler names: taints, affinity, CPU or memory",
	OverCap: "ask for more, or have the program use less; if its image brings a libcuda.so of its own, " +
		"take that out, so that the program is told before it is over the cap",
	Intruder:    "ask for a GPU in the container's limits, and do not mount /dev or set NVIDIA_VISIBLE_DEVICES",
	NoCUDA:      "use an image with what the program needs; the agent brings the driver's libraries and nvidia-smi",
	OutOfMemory: "ask for more units, or have the program use less",
	OOMKilled:   "raise the container's limit of memory; GPU memory does not count there",
	ImagePull:   "correct the image's name, or give the pod the secret to pull it",
	Crash:       "read its log: kubectl logs POD --previous",
	Unknown:     "read all of it: kubectl describe, and kubectl gpu status NODE",
}
