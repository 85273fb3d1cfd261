// SPDX-License-Identifier: Apache-2.0

package diagnosis

import (
	"time"

	"example.com/gpu-agent/internal/gpunode"
)

// Facts are the objects that a diagnosis follows from. Exactly one of Pod, Job and Node is the
// subject: Node if it is set, then Job, then Pod. The rest may be empty.
type Facts struct {
	// Domain is the prefix of the agent's labels and the group of GPUNodes, and Resources the domain
	// of its resources. Both are required.
	Domain, Resources string
	// Pod is the subject, or of a Job the pod that says the most: see [Worst].
	Pod *Pod
	// Job is the subject if it is not nil.
	Job *Job
	// Node is the name of the node that is the subject; empty if none is.
	Node string
	// Workload is Kueue's object for the Job or the pod; nil if there is none.
	Workload *Workload
	// Events are those about the subject and its pod, in any order.
	Events []Event
	// GPUNodes has the GPUNode of each node that has one.
	GPUNodes []GPUNode
	// Nodes are the cluster's Nodes; nil if they were not read.
	Nodes []Node
	// Agents are the pods of the agent; nil if they were not read.
	Agents []Agent
	// Unseen names what could not be read, and why.
	Unseen []Unseen
}

// Unseen is something that could not be read.
type Unseen struct {
	// What is the objects, in words: "Nodes".
	What string `json:"what"`
	// Why is the reason: the API server's refusal, or that they do not exist.
	Why string `json:"why"`
}

// Pod is a pod.
type Pod struct {
	Namespace, Name string
	// Node is the node that the pod is bound to; empty if it is not.
	Node string
	// Phase, Reason and Message are those of its status.
	Phase, Reason, Message string
	// Unscheduled is the scheduler's message while it finds no node; empty otherwise.
	Unscheduled string
	// Gates are the names of its scheduling gates.
	Gates []string
	// Selector is its node selector.
	Selector map[string]string
	// Deleting is true once it is being deleted.
	Deleting bool
	// Created is the time at which it was created.
	Created time.Time
	// Containers are its init containers, and then the others.
	Containers []Container
	// Claims are the names of its ResourceClaims, as the pod names them.
	Claims []string
}

// Container is a container of a pod.
type Container struct {
	Name string
	// Init is true for an init container that ends before the others start.
	Init bool
	// Requests are the amounts that it asks for, by resource.
	Requests map[string]int64
	// Devices are the IDs of the devices that the kubelet has given it. Empty if it has none yet, or
	// if the kubelet does not report them.
	Devices []string
	// Running is true while it runs.
	Running bool
	// Waiting and WaitingMessage are why it does not run yet; empty otherwise.
	Waiting, WaitingMessage string
	// Ended is how it ended last; nil if it never did.
	Ended *Ended
	// Restarts counts how often it was started again.
	Restarts int
	// Log is the tail of the log of the run that ended; empty if it was not read.
	Log string
}

// Ended is the end of a container.
type Ended struct {
	Exit            int
	Reason, Message string
}

// Job is a Job of the group batch.
type Job struct {
	Namespace, Name string
	// Suspended is true while it may have no pods.
	Suspended bool
	// Queue is Kueue's local queue, from the Job's label; empty if it has none.
	Queue string
	// Complete is true once it has succeeded. Failed is why it has failed for good; empty if it has
	// not.
	Complete bool
	Failed   string
	// Active and Lost count its pods that live and that failed.
	Active, Lost int
}

// Workload is Kueue's Workload.
type Workload struct {
	Name, Queue string
	// Inactive is true if it was deactivated (spec.active is false).
	Inactive   bool
	Conditions []Condition
	// Checks are its admission checks.
	Checks []Check
}

// Condition is a condition of an object.
type Condition struct {
	Type            string
	True            bool
	Reason, Message string
}

// Check is an admission check of a Workload. State is "Pending", "Ready", "Retry" or "Rejected".
type Check struct{ Name, State, Message string }

// Event is an Event about the subject.
type Event struct {
	// Warning is true for an Event of that type.
	Warning bool   `json:"warning"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
	// From is the component that wrote it.
	From string    `json:"from,omitempty"`
	Last time.Time `json:"last"`
	// Count is how often it happened; 0 counts as 1.
	Count int `json:"count,omitempty"`
}

// GPUNode is a GPUNode.
type GPUNode struct {
	Name   string
	Status *gpunode.Status
	// Odd is why the status cannot be used; empty if it can be. Status is nil then.
	Odd string
}

// Node is a Node.
type Node struct {
	Name   string
	Labels map[string]string
	// Cordoned is true if no new pods are placed there.
	Cordoned bool
	// NotReady is why the kubelet is not ready; empty if it is.
	NotReady string
	// Chosen is true if the node has the label by which the agent's manifests choose it.
	Chosen bool
	// State is the state of the node's partition, from the agent's label, and Reason and Message
	// are those of its annotations. Partition is the operator's label. All are empty without them.
	State, Reason, Message, Partition string
	// Allocatable are the amounts that the scheduler may give out, by resource.
	Allocatable map[string]int64
}

// Agent is a pod of the agent.
type Agent struct {
	Node, Namespace, Name string
	// NotReady is why it is not ready; empty if it is.
	NotReady string
}

// Worst returns the pod of a Job that says the most: one that waits for a reason that is known, or else
// one that has failed, or else one that waits; of several the newest. It is nil without pods.
func Worst(pods []Pod) *Pod {
	var best *Pod
	for i := range pods {
		p := &pods[i]
		more := best == nil || p.trouble() > best.trouble()
		if more || p.trouble() == best.trouble() && p.Created.After(best.Created) {
			best = p
		}
	}
	return best
}

// trouble returns how much a pod says about what is wrong.
func (p *Pod) trouble() int {
	told := p.Unscheduled != "" || len(p.Gates) > 0
	for i := range p.Containers {
		c := &p.Containers[i]
		told = told || c.WaitingMessage != "" || c.Waiting == "CrashLoopBackOff"
	}
	switch {
	case p.Phase != "Failed" && p.Phase != "Succeeded" && told:
		return 3
	case p.Phase == "Failed":
		return 2
	case p.Phase == "Pending":
		return 1
	}
	return 0
}
