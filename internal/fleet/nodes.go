// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/placer"
	"example.com/gpu-agent/internal/workload"
)

// nodes is what the API says about nodes, each map by the node's name. A Fleet's lock guards it.
type nodes struct {
	// about has the Nodes.
	about map[string]about
	// says has the valid GPUNodes, and passed the errors of those that are not valid.
	says   map[string]*gpunode.Status
	passed map[string]error
	// dra has the nodes that are ready and offer GPUs through DRA.
	dra map[string]bool
	// list has the Nodes as Holder.Nodes returns them, nil after a change.
	list []*corev1.Node
	// changes counts the changes of Nodes.
	changes uint64
}

// about is the part of a Node that matters here.
type about struct {
	// ready is true if the kubelet can start pods.
	ready bool
	// counts has each of the agent's resources in the Node's allocatable, true if the amount is not 0.
	counts map[string]bool
	// open is true if the node is not cordoned. If it is, one of taints says so.
	open   bool
	taints []corev1.Taint
	labels map[string]string
	// plain has what is allocatable beside the agent's resources, in the units of placer.Amount.
	plain map[string]int64
}

func newNodes() nodes {
	return nodes{
		about: map[string]about{}, says: map[string]*gpunode.Status{},
		passed: map[string]error{}, dra: map[string]bool{},
	}
}

// aboutNode reads a Node. The names of the agent's resources begin with prefix.
func aboutNode(n *corev1.Node, prefix string) about {
	a := about{open: !n.Spec.Unschedulable, labels: n.Labels, counts: map[string]bool{}, plain: map[string]int64{}}
	a.ready = slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
	for name, amount := range n.Status.Allocatable {
		if strings.HasPrefix(string(name), prefix) {
			a.counts[string(name)] = !amount.IsZero()
		} else {
			a.plain[string(name)] = plainAmount(name, amount)
		}
	}
	for _, t := range n.Spec.Taints {
		a.taints = append(a.taints, corev1.Taint{Key: t.Key, Value: t.Value, Effect: t.Effect})
	}
	if !a.open {
		// The scheduler treats spec.unschedulable as this taint. The node controller adds the taint itself later.
		cordon := corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}
		a.taints = append(a.taints, cordon)
	}
	return a
}

func (a about) equal(o about) bool {
	return a.ready == o.ready && maps.Equal(a.counts, o.counts) &&
		a.open == o.open && slices.Equal(a.taints, o.taints) && maps.Equal(a.labels, o.labels) &&
		maps.Equal(a.plain, o.plain)
}

// silent reports whether a node's kubelet has lost its agent. The GPUNode does not show that, since the agent
// writes it. But the kubelet then counts all of the agent's devices as unhealthy, also those that pods hold, and
// the Node's allocatable is 0. A node that has never had these resources is not silent.
func (ns *nodes) silent(name string) bool {
	known := false
	for _, r := range ns.says[name].Resources {
		if any, counted := ns.about[name].counts[r.Name]; any {
			return false
		} else if counted && r.Total > 0 {
			known = true
		}
	}
	return known
}

// enter writes into the books what the API says about a node.
func (ns *nodes) enter(books *placer.Books, name string) {
	delete(ns.dra, name)
	if says := ns.says[name]; says != nil {
		ready := ns.about[name].ready
		if ready && gpunode.Is(says.Conditions, gpunode.Ready) &&
			slices.ContainsFunc(says.GPUs, func(g gpunode.GPU) bool { return g.API == string(workload.DRA) }) {
			ns.dra[name] = true
		}
		books.SetNode(name, says, ready && !ns.silent(name))
	} else if wrong := ns.passed[name]; wrong != nil {
		books.PassOver(name, fmt.Sprintf("its GPUNode is not valid: %v", wrong))
	} else {
		books.DeleteNode(name)
	}
}

// known returns those of some nodes that have a Node or a valid GPUNode.
func (ns *nodes) known(among []string) []string {
	return slices.DeleteFunc(slices.Clone(among), func(name string) bool {
		_, there := ns.about[name]
		return !there && ns.says[name] == nil
	})
}

// withoutDRA returns a pod without the requests that a node serves through DRA, also under the names of extended
// resources. less is true if there were any. The scheduler has found room for them by itself, and the books do not
// know them. While the node is not ready it is unknown what it will serve through DRA, so the pod keeps all its
// requests.
func (ns *nodes) withoutDRA(p placer.Pod, name string) (rest placer.Pod, less bool) {
	if !ns.dra[name] {
		return p, false
	}
	says := ns.says[name]
	rest = p
	rest.Containers = nil
	for _, c := range p.Containers {
		requests := maps.Clone(c.Requests)
		maps.DeleteFunc(requests, func(of string, _ int) bool {
			return !slices.ContainsFunc(says.Resources, func(r gpunode.Resource) bool { return r.Name == of })
		})
		less = less || len(requests) < len(c.Requests)
		if c.Requests = requests; len(requests) > 0 {
			rest.Containers = append(rest.Containers, c)
		}
	}
	return rest, less
}
