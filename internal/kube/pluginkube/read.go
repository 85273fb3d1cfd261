// SPDX-License-Identifier: Apache-2.0

package pluginkube

import (
	"cmp"
	"maps"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"example.com/gpu-agent/internal/diagnosis"
	"example.com/gpu-agent/internal/kube"
)

// into reads an object into a type of k8s.io/api.
func into[T any](o *unstructured.Unstructured) (*T, error) {
	out := new(T)
	return out, runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, out)
}

// readPod returns what a diagnosis needs of a pod.
func readPod(p *corev1.Pod) diagnosis.Pod {
	out := diagnosis.Pod{Namespace: p.Namespace, Name: p.Name, Node: p.Spec.NodeName, Phase: string(p.Status.Phase),
		Reason: p.Status.Reason, Message: p.Status.Message, Selector: p.Spec.NodeSelector,
		Deleting: p.DeletionTimestamp != nil, Created: p.CreationTimestamp.Time}
	for _, c := range p.Status.Conditions {
		gated := c.Reason == corev1.PodReasonSchedulingGated
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && !gated {
			out.Unscheduled = cmp.Or(c.Message, c.Reason)
		}
	}
	for _, g := range p.Spec.SchedulingGates {
		out.Gates = append(out.Gates, g.Name)
	}
	for i := range p.Spec.ResourceClaims {
		out.Claims = append(out.Claims, p.Spec.ResourceClaims[i].Name)
	}
	for i := range p.Spec.InitContainers {
		c := &p.Spec.InitContainers[i]
		sidecar := c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
		out.Containers = append(out.Containers, readContainer(c, p.Status.InitContainerStatuses, !sidecar))
	}
	for i := range p.Spec.Containers {
		out.Containers = append(out.Containers, readContainer(&p.Spec.Containers[i], p.Status.ContainerStatuses, false))
	}
	return out
}

func readContainer(c *corev1.Container, statuses []corev1.ContainerStatus, init bool) diagnosis.Container {
	out := diagnosis.Container{Name: c.Name, Init: init, Requests: map[string]int64{}}
	amounts := corev1.ResourceList{}
	maps.Copy(amounts, c.Resources.Limits)
	maps.Copy(amounts, c.Resources.Requests)
	for name, q := range amounts {
		out.Requests[string(name)] = q.Value() // the server has put it into canonical form
	}
	for i := range statuses {
		s := &statuses[i]
		if s.Name != c.Name {
			continue
		}
		out.Restarts, out.Running = int(s.RestartCount), s.State.Running != nil
		if w := s.State.Waiting; w != nil {
			out.Waiting, out.WaitingMessage = w.Reason, w.Message
		}
		for _, t := range []*corev1.ContainerStateTerminated{s.State.Terminated, s.LastTerminationState.Terminated} {
			if t != nil {
				out.Ended = &diagnosis.Ended{Exit: int(t.ExitCode), Reason: t.Reason, Message: t.Message}
				break
			}
		}
		for _, of := range s.AllocatedResourcesStatus {
			for _, d := range of.Resources {
				out.Devices = append(out.Devices, string(d.ResourceID))
			}
		}
	}
	return out
}

// readJob returns what a diagnosis needs of a Job.
func readJob(j *batchv1.Job) *diagnosis.Job {
	out := &diagnosis.Job{Namespace: j.Namespace, Name: j.Name, Queue: j.Labels["kueue.x-k8s.io/queue-name"],
		Active: int(j.Status.Active), Lost: int(j.Status.Failed)}
	out.Suspended = j.Spec.Suspend != nil && *j.Spec.Suspend
	for _, c := range j.Status.Conditions {
		switch {
		case c.Status != corev1.ConditionTrue:
		case c.Type == batchv1.JobComplete:
			out.Complete = true
		case c.Type == batchv1.JobFailed:
			out.Failed = strings.TrimSpace(c.Reason + " " + c.Message)
		}
	}
	return out
}

// readEvent returns what a diagnosis needs of an Event. Events of the old and the new API have their
// times and counts in different fields.
func readEvent(e *corev1.Event) diagnosis.Event {
	out := diagnosis.Event{Warning: e.Type == corev1.EventTypeWarning, Reason: e.Reason, Message: e.Message,
		From: cmp.Or(e.Source.Component, e.ReportingController), Count: int(e.Count)}
	times := []time.Time{e.FirstTimestamp.Time, e.LastTimestamp.Time, e.EventTime.Time}
	if e.Series != nil {
		times = append(times, e.Series.LastObservedTime.Time)
		out.Count = max(out.Count, int(e.Series.Count))
	}
	for _, t := range times {
		if t.After(out.Last) {
			out.Last = t
		}
	}
	return out
}

// The agent's marks on a Node, below its domain.
const (
	chosenLabel       = "gpu.node"
	partitionLabel    = "gpu.partition"
	stateLabel        = "gpu.partition.state"
	reasonAnnotation  = "gpu.partition.reason"
	messageAnnotation = "gpu.partition.message"
)

// readNode returns what a diagnosis needs of a Node.
func readNode(n *corev1.Node, domain string) diagnosis.Node {
	out := diagnosis.Node{Name: n.Name, Labels: n.Labels, Cordoned: n.Spec.Unschedulable,
		Chosen: n.Labels[domain+"/"+chosenLabel] == "true", Partition: n.Labels[domain+"/"+partitionLabel],
		State: n.Labels[domain+"/"+stateLabel], Reason: n.Annotations[domain+"/"+reasonAnnotation],
		Message: n.Annotations[domain+"/"+messageAnnotation], Allocatable: map[string]int64{}}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status != corev1.ConditionTrue {
			out.NotReady = cmp.Or(c.Message, c.Reason, "it does not say why")
		}
	}
	for name, q := range n.Status.Allocatable {
		out.Allocatable[string(name)] = q.Value()
	}
	return out
}

// readGPUNode returns a GPUNode. A node that was taken over can write any numbers.
func readGPUNode(o *unstructured.Unstructured) diagnosis.GPUNode {
	out := diagnosis.GPUNode{Name: o.GetName()}
	s, err := kube.ReadGPUNode(o)
	if err == nil {
		err = s.Check()
	}
	if err != nil {
		out.Odd = err.Error()
		return out
	}
	out.Status = s
	return out
}

// readAgent returns a pod of the agent.
func readAgent(p *corev1.Pod) Agent {
	out := Agent{Agent: diagnosis.Agent{Node: p.Spec.NodeName, Namespace: p.Namespace, Name: p.Name}, Port: 9500}
	for i := range p.Spec.Containers {
		c := &p.Spec.Containers[i]
		if c.Name != agentContainer {
			continue
		}
		out.Image = c.Image
		for _, port := range c.Ports {
			if port.Name == "http" {
				out.Port = int(port.ContainerPort)
			}
		}
	}
	isReady := false
	for _, c := range p.Status.Conditions {
		isReady = isReady || c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	}
	for i := range p.Status.ContainerStatuses {
		s := &p.Status.ContainerStatuses[i]
		switch {
		case s.Name != agentContainer:
		case s.State.Waiting != nil:
			out.NotReady = strings.TrimSuffix(s.State.Waiting.Reason+": "+s.State.Waiting.Message, ": ")
		case s.State.Terminated != nil:
			out.NotReady = "its container has ended"
		case !s.Ready:
			out.NotReady = "it runs, and is not ready yet"
		}
		if s.Name == agentContainer {
			out.Restarts = int(s.RestartCount)
		}
	}
	switch {
	case p.DeletionTimestamp != nil:
		out.NotReady = "it is being deleted"
	case isReady:
		out.NotReady = ""
	case out.NotReady == "":
		out.NotReady = "it is " + cmp.Or(string(p.Status.Phase), "not started")
	}
	return out
}

// workload is the part of Kueue's Workload that is read. Both versions have these fields.
type workload struct {
	Metadata struct {
		Name            string
		OwnerReferences []struct{ UID string }
	}
	Spec struct {
		QueueName string
		Active    *bool
	}
	Status struct {
		Conditions      []metav1.Condition
		AdmissionChecks []struct{ Name, State, Message string }
	}
}

func (w *workload) facts() *diagnosis.Workload {
	out := &diagnosis.Workload{Name: w.Metadata.Name, Queue: w.Spec.QueueName,
		Inactive: w.Spec.Active != nil && !*w.Spec.Active}
	for _, c := range w.Status.Conditions {
		out.Conditions = append(out.Conditions, diagnosis.Condition{
			Type: c.Type, True: c.Status == metav1.ConditionTrue, Reason: c.Reason, Message: c.Message})
	}
	for _, c := range w.Status.AdmissionChecks {
		out.Checks = append(out.Checks, diagnosis.Check{Name: c.Name, State: c.State, Message: c.Message})
	}
	return out
}
